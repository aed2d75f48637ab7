"""What a kernel takes over what the fold predicts, by a network up the Plan's tree, along its reads, or both.

Up the tree (DLBCM): a Leaf's state comes from its numbers, a Tile's from its own and those of its children, taken in
order by an LSTM; the kernel's is the last. Along the reads (LPM): a Leaf's state is mixed with the mean of those that
it reads from and of those that read it, twice; the kernel's is their mean and their largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from tilewright.learn.encode import Encoded

KINDS = ("tree", "graph", "both")
_WIDTH = 24  # of a state
_ROUNDS = 2  # of messages along reads
_LONGEST = 2.0  # doublings that a kernel is corrected by, at most


@dataclass(frozen=True)
class FeatureNames:
    """Which numbers a network is told, and how they are spread: all are told as logarithms, 0 in the middle."""

    nodes: tuple[str, ...]
    whole: tuple[str, ...]
    node_spread: tuple[tuple[float, float], ...]  # the middle, and one over the deviation
    whole_spread: tuple[tuple[float, float], ...]

    @staticmethod
    def of(kernels: Sequence[Encoded]) -> FeatureNames:
        nodes = tuple(sorted({name for k in kernels for node in k.nodes for name in node}))
        whole = tuple(sorted({name for k in kernels for name in k.whole}))
        all_nodes = _logarithms([node for k in kernels for node in k.nodes], nodes)
        all_whole = _logarithms([k.whole for k in kernels], whole)
        return FeatureNames(nodes, whole, _spread(all_nodes), _spread(all_whole))


def _logarithms(rows: Sequence[object], names: Sequence[str]) -> np.ndarray:
    given = np.array([[row.get(name, 0) for name in names] for row in rows], np.float64)  # type: ignore[attr-defined]
    return np.asarray(np.sign(given) * np.log2(1 + np.abs(given)))


def _spread(values: np.ndarray) -> tuple[tuple[float, float], ...]:
    deviations = values.std(0)
    scales = np.where(deviations > 1e-6, 1 / np.maximum(deviations, 1e-6), 0.0)
    return tuple(zip(values.mean(0).tolist(), scales.tolist(), strict=True))


@dataclass(frozen=True)
class Level:
    """Nodes as deep as each other: their children side by side, short of some at the end."""

    nodes: Tensor
    children: Tensor  # nodes, 0 where there are no more
    counts: Tensor


@dataclass(frozen=True)
class Batch:
    """Kernels side by side."""

    nodes: Tensor  # numbers
    whole: Tensor
    levels: tuple[Level, ...]  # the deepest first
    roots: Tensor
    leaves: Tensor  # nodes
    owners: Tensor  # of the leaves: kernels
    reads: Tensor  # pairs of places among the leaves
    seconds: Tensor


def batch_of(kernels: Sequence[Encoded], names: FeatureNames) -> Batch:
    roots: list[int] = []
    leaves: list[int] = []
    owners: list[int] = []
    reads: list[tuple[int, int]] = []
    depths: list[int] = []
    children: list[list[int]] = []
    for number, kernel in enumerate(kernels):
        first = len(depths)
        roots.append(first)
        place_of = {node: len(leaves) + i for i, node in enumerate(kernel.leaves)}
        leaves += [first + node for node in kernel.leaves]
        owners += [number] * len(kernel.leaves)
        reads += [(place_of[reader], place_of[read]) for reader, read in kernel.reads]
        for node in range(len(kernel.nodes)):
            parent = kernel.parents[node - 1] if node else None
            depths.append(0 if parent is None else depths[first + parent] + 1)
            children.append([])
            if parent is not None:
                children[first + parent].append(first + node)
    return Batch(
        _scaled([node for k in kernels for node in k.nodes], names.nodes, names.node_spread),
        _scaled([k.whole for k in kernels], names.whole, names.whole_spread),
        tuple(_level(depth, depths, children) for depth in range(max(depths), -1, -1)),
        torch.tensor(roots), torch.tensor(leaves), torch.tensor(owners), torch.tensor(reads).reshape(-1, 2),
        torch.tensor([k.seconds for k in kernels], dtype=torch.float64),
    )  # fmt: skip


def _scaled(rows: Sequence[object], names: Sequence[str], spread: Sequence[tuple[float, float]]) -> Tensor:
    middle, scale = np.array(spread).T
    return torch.from_numpy(np.clip((_logarithms(rows, names) - middle) * scale, -4, 4).astype(np.float32))


def _level(depth: int, depths: Sequence[int], children: Sequence[Sequence[int]]) -> Level:
    nodes = [n for n, d in enumerate(depths) if d == depth]
    most = max(1, *(len(children[n]) for n in nodes)) if nodes else 1
    rows = [[*children[n], *[0] * (most - len(children[n]))] for n in nodes]
    return Level(torch.tensor(nodes), torch.tensor(rows), torch.tensor([len(children[n]) for n in nodes]))


class Network(nn.Module):
    def __init__(self, kind: str, names: FeatureNames) -> None:
        super().__init__()
        self.kind = kind
        size = len(names.nodes)
        whole = len(names.whole)
        if kind != "graph":
            self.own = nn.Linear(size, _WIDTH)
            self.in_turn = nn.LSTM(_WIDTH, _WIDTH, batch_first=True)
            self.up = nn.Linear(2 * _WIDTH, _WIDTH)
        if kind != "tree":
            self.first = nn.Linear(size + whole, _WIDTH)
            self.mixes = nn.ModuleList(nn.Linear(3 * _WIDTH, _WIDTH) for _ in range(_ROUNDS))
        states = {"tree": 1, "graph": 2, "both": 3}[kind]
        self.whole = nn.Linear(states * _WIDTH + whole, _WIDTH)
        self.last = nn.Linear(_WIDTH, 1)
        nn.init.zeros_(self.last.weight)  # it begins with what the fold says
        nn.init.zeros_(self.last.bias)

    def forward(self, batch: Batch) -> Tensor:
        """By kernel, the doublings that its prediction is corrected by."""
        states = [batch.whole]
        if self.kind != "graph":
            states.append(self._up_the_tree(batch))
        if self.kind != "tree":
            states.append(self._along_reads(batch))
        found = self.last(torch.relu(self.whole(torch.cat(states, 1))))[:, 0]
        return _LONGEST * torch.tanh(found / _LONGEST)

    def _up_the_tree(self, batch: Batch) -> Tensor:
        own = torch.relu(self.own(batch.nodes))
        states = torch.zeros_like(own)
        for level in batch.levels:
            taken, _ = self.in_turn(states[level.children])
            last = taken[torch.arange(len(level.nodes)), (level.counts - 1).clamp(min=0)]
            below = last * (level.counts > 0)[:, None]
            now = torch.relu(self.up(torch.cat((own[level.nodes], below), 1)))
            states = states.index_copy(0, level.nodes, now)
        return states[batch.roots]

    def _along_reads(self, batch: Batch) -> Tensor:
        state = torch.relu(self.first(torch.cat((batch.nodes[batch.leaves], batch.whole[batch.owners]), 1)))
        reader, read = batch.reads.T
        for mix in self.mixes:
            sources = _mean(state[read], reader, len(state))
            readers = _mean(state[reader], read, len(state))
            state = nn.functional.normalize(torch.relu(mix(torch.cat((state, sources, readers), 1))), dim=1)
        count = len(batch.roots)
        places = batch.owners[:, None].expand_as(state)
        largest = torch.zeros(count, _WIDTH).scatter_reduce(0, places, state, "amax")
        return torch.cat((_mean(state, batch.owners, count), largest), 1)


def _mean(values: Tensor, places: Tensor, count: int) -> Tensor:
    """Of what goes to each place; 0 where nothing does."""
    total = torch.zeros(count, values.shape[1]).index_add(0, places, values)
    many = torch.zeros(count).index_add(0, places, torch.ones(len(places)))
    return total / many.clamp(min=1)[:, None]
