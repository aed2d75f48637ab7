"""A Program and its Plan with what explanations look up: who makes a tensor, how often a kernel runs, which nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from tilewright.ir.forms.compute import Compute, Program, Reduce, Scan, reads
from tilewright.ir.forms.tensor import Tensor
from tilewright.tile_graph.algebra.nest import is_view
from tilewright.tile_graph.algebra.occurrences import once
from tilewright.tile_graph.plan.form import Plan, Tile
from tilewright.tile_graph.traffic.held import plan_nests


class ModelView:
    """A Program and its Plan with the lookups that the facts need."""

    def __init__(self, program: Program, plan: Plan) -> None:
        self.program = program
        self.trees = {k.name: k for k in plan.kernels}  # as they are, copies and all
        plan = plan.with_kernels({k.name: once(k) for k in plan.kernels})
        self.plan = plan
        self.by_name = {t.name: c for c in computes_of(program) for t in c.outputs}
        self.tensors = {t.name: t for c in computes_of(program) for t in c.outputs}
        read = (t for c in (*program.computes, *computes_of(program)) for t in reads(c))
        self.everything = {t.name: t for t in (*read, *self.tensors.values())}
        self._places = {c: i for i, c in enumerate(computes_of(program))}
        self.steps = {t.name: steps_of(c) for c in program.computes if isinstance(c, Scan) for t in c.outputs[:1]}
        self.scans = {k.name: around.scan for k, around in plan.launches() if around is not None and around.scan}
        self.between = dict(_between(plan.body))
        self.launched: dict[str, float] = {}  # seconds of kernels that share a launch: all for the first of them
        for launch, _ in plan.calls():
            if launch.is_launch:
                names = [n.name for n in launch.body if isinstance(n, Tile)]
                self.launched.update({n: launch.estimate.seconds if n == names[0] else 0.0 for n in names})
        self.kept = frozenset(t.name for t in program.outputs)
        self.stored = frozenset(
            t.name
            for kernel in plan.kernels
            for made in plan_nests(kernel, self.by_name)
            if made.tensor.name not in kernel.held
            for t in made.stores
        )

    def repeats(self, kernel: Tile) -> int:
        return self.steps.get(self.scans.get(kernel.name, ""), 1)

    def parts(self, kernel: Tile) -> list[Compute]:
        """The computes inside a kernel, in the program's order."""
        names = {n for leaf in kernel.leaves for n in (leaf.core, *leaf.epilogue, *leaf.composed)}
        return sorted({self.by_name[n] for n in names}, key=self._places.__getitem__)

    def intermediates(self) -> Iterator[tuple[Tensor, int]]:
        """Every tensor between the model's inputs and outputs, and how often it is computed."""
        for compute in self.program.computes:
            steps = steps_of(compute) if isinstance(compute, Scan) else 1
            for inner in compute.body if isinstance(compute, Scan) else (compute,):
                yield from ((t, steps) for t in inner.outputs if t.name not in self.kept)


def _between(tile: Tile) -> Iterator[tuple[str, str]]:
    """What is held outside of kernels, with its level; the innermost comes last."""
    yield from ((hold.tensor, tile.level) for hold in tile.holds if hold.fill is None)
    for node in tile.body:
        if isinstance(node, Tile) and not node.is_kernel:
            yield from _between(node)


def computes_of(program: Program) -> Iterator[Compute]:
    """Every compute that a kernel holds: a Scan stands for its body."""
    for compute in program.computes:
        if isinstance(compute, Scan):
            yield from compute.body
        else:
            yield compute


def steps_of(scan: Scan) -> int:
    return scan.axis.extent if isinstance(scan.axis.extent, int) else 1


def bytes_of(tensor: Tensor) -> int:
    return prod(e for e in tensor.shape if isinstance(e, int)) * tensor.dtype.bytes


def origins(computes: Sequence[Compute]) -> list[str]:
    """The model's nodes behind computes, each once."""
    return list(dict.fromkeys(c.origin or c.outputs[0].name for c in computes))


def summary(computes: Sequence[Compute]) -> str:
    """Kinds of the nodes behind a kernel: reductions first; what only moves data, only where there is nothing else."""
    ranks: dict[str, int] = {}
    for compute in computes:
        rank = 0 if isinstance(compute, Reduce) else 2 if is_view(compute) else 1
        origin = compute.origin or compute.outputs[0].name
        ranks[origin] = min(rank, ranks.get(origin, 2))
    shown = [o for o, rank in sorted(ranks.items(), key=lambda item: item[1]) if rank < 2] or list(ranks)
    counts: dict[str, int] = {}
    for origin in shown:
        counts[kind_of(origin)] = counts.get(kind_of(origin), 0) + 1
    return ", ".join(kind if n == 1 else f"{kind} x{n}" for kind, n in counts.items())


def kind_of(origin: str) -> str:
    """`Conv` of `Conv node '/features/0'`."""
    return origin.partition(" node ")[0]
