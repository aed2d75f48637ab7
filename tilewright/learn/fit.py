"""Networks fitted to measured plans: several of one kind, by which plan of a task is faster and by what each takes."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import sqrt

import numpy as np
import torch
from torch import Tensor

from tilewright.learn.encode import Encoded
from tilewright.learn.networks import FeatureNames, Network, batch_of

_MEMBERS = 4
_STEPS, _RATE, _DECAY = 120, 4e-3, 1e-3  # of Adam
_SECONDS = 0.1  # how much the logarithm of the time counts beside which of two is faster
_CLEAR = 0.3  # doublings by which two plans differ that count in full


@dataclass(frozen=True)
class Sample:
    """A measured plan: plans of one task are compared with each other."""

    task: str
    kernels: tuple[Encoded, ...]
    microseconds: float


@dataclass(frozen=True)
class Learned:
    """Networks of one kind that began with other weights; how far they are apart tells how far to believe them."""

    kind: str
    names: FeatureNames
    members: tuple[Network, ...]

    def log_seconds(self, plans: Sequence[Sequence[Encoded]]) -> np.ndarray:
        """Logarithms to base 2 of what plans take, by member and plan."""
        batch = batch_of([k for kernels in plans for k in kernels], self.names)
        owners = _owners(plans)
        with torch.no_grad():
            return np.stack([_total(m(batch), batch.seconds, owners, len(plans)).numpy() for m in self.members])

    def dumped(self) -> bytes:
        """As arrays with a head of text: nothing in it runs when it is read."""
        head = json.dumps({"kind": self.kind, "names": asdict(self.names), "members": len(self.members)})
        arrays = {f"{i} {name}": value.numpy() for i, member in enumerate(self.members)
                  for name, value in member.state_dict().items()}  # fmt: skip
        file = io.BytesIO()
        np.savez(file, head=np.frombuffer(head.encode(), np.uint8), **arrays)
        return file.getvalue()

    @staticmethod
    def loaded(data: bytes) -> Learned:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            head = json.loads(arrays["head"].tobytes())
            given = head["names"]
            spreads = (tuple((m, s) for m, s in given[part]) for part in ("node_spread", "whole_spread"))
            names = FeatureNames(tuple(given["nodes"]), tuple(given["whole"]), *spreads)
            members = []
            for number in range(head["members"]):
                member = Network(head["kind"], names)
                member.load_state_dict({name.partition(" ")[2]: torch.from_numpy(arrays[name])
                                        for name in arrays.files if name.startswith(f"{number} ")})  # fmt: skip
                members.append(member)
        return Learned(head["kind"], names, tuple(members))


def fitted(kind: str, samples: Sequence[Sample], members: int = _MEMBERS) -> Learned:
    """The same every time on one machine."""
    names = FeatureNames.of([k for sample in samples for k in sample.kernels])
    return Learned(kind, names, tuple(_member(kind, names, samples, seed) for seed in range(members)))


def _member(kind: str, names: FeatureNames, samples: Sequence[Sample], seed: int) -> Network:
    plans = [sample.kernels for sample in samples]
    batch, owners = batch_of([k for kernels in plans for k in kernels], names), _owners(plans)
    measured = torch.log2(torch.tensor([s.microseconds * 1e-6 for s in samples], dtype=torch.float64))
    one, other, weights = _pairs(samples, measured)
    with torch.random.fork_rng(devices=()), _one_thread():
        torch.manual_seed(seed)
        network = Network(kind, names)
        optimiser = torch.optim.AdamW(network.parameters(), lr=_RATE, weight_decay=_DECAY)
        for step in range(_STEPS):
            for group in optimiser.param_groups:
                group["lr"] = _RATE * (1 - step / _STEPS)
            found = _total(network(batch), batch.seconds, owners, len(samples))
            # which of two is faster: a step of the logarithm in place of a sign, so that its slope leads somewhere
            apart = (found[one] - found[other]) * torch.sign(measured[one] - measured[other])
            rank = (weights * torch.nn.functional.softplus(-apart / _CLEAR)).sum() / weights.sum().clamp(min=1e-9)
            off = torch.nn.functional.huber_loss(found, measured)
            optimiser.zero_grad()
            (rank + _SECONDS * off).backward()
            optimiser.step()
    return network.eval()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Threads wait for each other longer than these small products take."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _pairs(samples: Sequence[Sample], measured: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Plans of one task, two and two, and how much each pair counts: little where noise may have told them apart, and
    tasks by the root of their size."""
    tasks: dict[str, list[int]] = {}
    for number, sample in enumerate(samples):
        tasks.setdefault(sample.task, []).append(number)
    pairs = [(a, b, 1 / sqrt(len(some))) for some in tasks.values() for i, a in enumerate(some) for b in some[:i]]
    one, other = (torch.tensor([pair[side] for pair in pairs], dtype=torch.long) for side in (0, 1))
    clear = ((measured[one] - measured[other]).abs() / _CLEAR).clamp(max=1)
    return one, other, torch.tensor([weight for _, _, weight in pairs], dtype=torch.float64) * clear


def _owners(plans: Sequence[Sequence[Encoded]]) -> Tensor:
    return torch.tensor([number for number, kernels in enumerate(plans) for _ in kernels])


def _total(doublings: Tensor, seconds: Tensor, owners: Tensor, count: int) -> Tensor:
    """The logarithm of what each plan's kernels take together."""
    each = seconds * torch.exp2(doublings.double())
    return torch.log2(torch.zeros(count, dtype=torch.float64).index_add(0, owners, each))
