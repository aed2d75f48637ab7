"""Lowered parts of a Program with Regions as one list of calls: what crosses parts has one name, loops and branches are
jumps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from tilewright.errors import InternalError
from tilewright.ir.forms.compute import Program, Scatter
from tilewright.ir.forms.expr import Axis, Expr, Load, Var, all_of, le, load, loads, lt, rewrite, var
from tilewright.ir.forms.loops import (
    Buffer,
    Call,
    For,
    ForKind,
    If,
    Jump,
    Kernel,
    LoopProgram,
    Memory,
    Stmt,
    Storage,
    Store,
)
from tilewright.ir.forms.tensor import Tensor
from tilewright.lower.parts import Item, Ordered, RegionBranches, RegionLoop, Straight, Update
from tilewright.tile_graph.algebra.propagate import extent_of
from tilewright.tile_graph.plan.form import Plan
from tilewright.tile_graph.plan.renamed import renamed

Names = dict[Tensor, str]


@dataclass(frozen=True)
class Lowered:
    """A straight part by itself: its Program as it was planned, its Plan and its Loops."""

    program: Program
    plan: Plan
    loops: LoopProgram


def unique_names(part: Lowered, number: int) -> Lowered:
    """The same with names of kernels, constants and temporaries that no other part has."""
    ports = {t.name for t in part.loops.tensors if t.role in ("input", "output")}

    def own(name: str) -> str:
        return name if name in ports else f"{name}@p{number}"  # no tensor of a model is named so

    def kernel(name: str) -> str:
        return f"p{number}_{name}"

    loops = LoopProgram(
        tuple(replace(k, name=kernel(k.name)) for k in part.loops.kernels),
        tuple(Call(kernel(c.kernel), tuple(map(own, c.arguments)), c.step) for c in part.loops.calls),
        tuple(replace(t, name=own(t.name)) for t in part.loops.tensors),
    )
    constants = {Tensor(own(t.name), t.shape, t.dtype): a for t, a in part.program.constants.items()}
    return Lowered(replace(part.program, constants=constants), renamed(part.plan, own, kernel), loops)


@dataclass
class Linker:
    """Puts parts together; each has had its `unique_names`."""

    parts: Mapping[Straight, Lowered]
    calls: list[Call] = field(default_factory=list)
    jumps: list[Jump] = field(default_factory=list)
    kernels: dict[str, Kernel] = field(default_factory=dict)
    rows: dict[str, Storage] = field(default_factory=dict)
    constants: dict[Tensor, np.ndarray] = field(default_factory=dict)

    def linked(self, whole: Ordered) -> LoopProgram:
        """All of them, for a model that takes and gives what the Program does."""
        program = whole.program
        for role, side in (("input", program.inputs), ("output", program.outputs)):
            for position, tensor in enumerate(side):
                self._keep(tensor.name, tensor, role, position)
        self._run(whole, {t: t.name for t in (*program.inputs, *program.outputs)})
        return LoopProgram(tuple(self.kernels.values()), tuple(self.calls), tuple(self.rows.values()),
                           tuple(self.jumps))  # fmt: skip

    def _run(self, ordered: Ordered, names: Names) -> None:
        """The calls of a Program whose inputs and outputs have these names."""
        names = {**names, **self._begun(ordered, names)}
        for item in ordered.items:
            if isinstance(item, Straight):
                self._straight(item, ordered.program, names)
            elif isinstance(item, Update):
                self._update(item, ordered.program, names)
            elif isinstance(item, RegionLoop):
                self._repeat(item, ordered.program, names)
            else:
                self._choice(item, ordered.program, names)

    def _begun(self, ordered: Ordered, names: Names) -> Names:
        """What a loop alone reads, as the first of what it carries, is made where the loop has it."""
        reads: dict[Tensor, int] = {}
        made: set[Tensor] = set()
        for item in ordered.items:
            if isinstance(item, Straight):
                made.update(t for t in item.program.outputs if t not in names)
            used = item.program.inputs if isinstance(item, Straight) else _used(item)
            for tensor in used:
                reads[tensor] = reads.get(tensor, 0) + 1
        return {
            initial: _name(output, names)
            for item in ordered.items if isinstance(item, RegionLoop)
            for initial, output in zip(item.region.captures, item.region.outputs, strict=False)
            if initial in made and reads[initial] == 1
        }  # fmt: skip

    def _straight(self, item: Straight, around: Program, names: Names) -> None:
        part = self.parts[item]
        outer: dict[str, str] = {}
        for row in part.loops.tensors:
            if row.role not in ("input", "output"):
                self.rows[row.name] = row
                continue
            side = item.program.inputs if row.role == "input" else item.program.outputs
            outer[row.name] = self._named(side[row.position], around, names)
            if self.rows[outer[row.name]].shape != row.shape:
                raise InternalError(f"{row.name} crosses parts in another layout than its own")
        self.kernels.update({kernel.name: kernel for kernel in part.loops.kernels})
        self.calls += [replace(c, arguments=tuple(outer.get(a, a) for a in c.arguments)) for c in part.loops.calls]

    def _update(self, item: Update, around: Program, names: Names) -> None:
        scatter = item.scatter
        before = self._named(scatter.initial, around, names)
        if item.in_place and names.get(scatter.output, before) == before:
            names[scatter.output] = before
        else:
            self._copy(before, self._named(scatter.output, around, names))
        sources = list(dict.fromkeys(n.source for n in loads(*scatter.indices, scatter.value)))
        name = f"put_{scatter.output.name}"
        if name not in self.kernels:
            self.kernels[name] = _put_kernel(name, scatter, [s for s in sources if isinstance(s, Tensor)])
        arguments = (scatter.output, *sources)
        self.calls.append(Call(name, tuple(self._named(t, around, names) for t in arguments)))

    def _repeat(self, item: RegionLoop, around: Program, names: Names) -> None:
        """Steps in turn read what is carried in one place and write it to the other; it ends in the first."""
        region, (body,) = item.region, item.region.branches
        count = len(region.outputs)
        first = [self._named(t, around, names) for t in region.outputs]
        for initial, into in zip(region.captures, first, strict=False):
            self._copy(self._named(initial, around, names), into)
        second = [n if k in item.in_place else self._twin(n) for k, n in enumerate(first)]
        outside = {t: self._named(c, around, names)
                   for t, c in zip(body.inputs[count:], region.captures[count:], strict=True)}  # fmt: skip
        start, passed = len(self.calls), self._here()
        end = self._jump(first[0])
        self._run(item.body, {**outside, **_bound(body, count, first, second)})
        odd = self._jump(second[0])
        self._run(item.body, {**outside, **_bound(body, count, second, first)})
        self.jumps.append(Jump(len(self.calls), start, passed))
        self._land(odd)
        for source, into in zip(second, first, strict=True):
            self._copy(source, into)
        self._land(end)

    def _choice(self, item: RegionBranches, around: Program, names: Names) -> None:
        region = item.region
        results = {t: self._named(t, around, names) for t in region.outputs}
        taken = [self._named(t, around, names) for t in region.captures]
        skip = self._jump(self._named(region.condition, around, names))
        end: int | None = None
        for branch in item.branches:
            if end is not None:
                self._land(skip)
            bound = dict(zip(branch.program.inputs, taken, strict=True))
            bound |= dict(zip(branch.program.outputs, results.values(), strict=True))
            self._run(branch, bound)
            if end is None:
                end = self._jump(None)
        assert end is not None
        self._land(end)

    def _jump(self, condition: str | None) -> int:
        """A jump from here whose target is not known yet."""
        self.jumps.append(Jump(len(self.calls), -1, 0, condition))
        return len(self.jumps) - 1

    def _land(self, jump: int) -> None:
        self.jumps[jump] = replace(self.jumps[jump], target=len(self.calls), passed=self._here())

    def _here(self) -> int:
        """Jumps that stand in front of the next call."""
        return sum(jump.at == len(self.calls) for jump in self.jumps)

    def _named(self, tensor: Tensor, around: Program, names: Names) -> str:
        """The name of a tensor that crosses parts, which has memory from now on."""
        name = names.setdefault(tensor, tensor.name)
        if name not in self.rows:
            is_constant = tensor in around.constants
            self._keep(name, tensor, "constant" if is_constant else "temporary")
            if is_constant:
                self.constants[tensor] = around.constants[tensor]
        return name

    def _twin(self, name: str) -> str:
        row = self.rows[name]
        self.rows[f"{name}@1"] = replace(row, name=f"{name}@1", role="temporary", position=0)
        return f"{name}@1"

    def _keep(self, name: str, tensor: Tensor, role: str, position: int = 0) -> None:
        shape = tuple(extent_of(e) for e in tensor.shape)
        self.rows[name] = Storage(name, shape, tensor.dtype, role, position)

    def _copy(self, source: str, into: str) -> None:
        row = self.rows[into]
        size = prod(row.shape)
        if source == into or not size:
            return
        name = f"copy_{row.dtype.name}_{size}"
        self.kernels.setdefault(name, _copy_kernel(name, row))
        self.calls.append(Call(name, (into, source)))


def _used(item: Item) -> Sequence[Tensor]:
    """What an item that is no straight part reads."""
    if isinstance(item, Update):
        return [item.scatter.initial, *(n.source for n in loads(*item.scatter.indices, item.scatter.value))]
    assert isinstance(item, RegionLoop | RegionBranches)
    condition = () if isinstance(item, RegionLoop) else (item.region.condition,)  # of a loop it is the first capture
    return [*condition, *item.region.captures]


def _name(tensor: Tensor, names: Names) -> str:
    return names.get(tensor, tensor.name)


def _bound(body: Program, count: int, taken: Sequence[str], given: Sequence[str]) -> Names:
    """The names of what a step of a loop takes and gives."""
    return {**dict(zip(body.inputs[:count], taken, strict=True)), **dict(zip(body.outputs, given, strict=True))}


def _copy_kernel(name: str, row: Storage) -> Kernel:
    into, source = (Buffer(n, (prod(row.shape),), row.dtype, Memory.GLOBAL) for n in ("into", "source"))
    place = Axis("i", prod(row.shape))
    return _serial(name, (into, source), (place,), Store(into, (var(place),), load(source, (var(place),))))


def _put_kernel(name: str, scatter: Scatter, sources: Sequence[Tensor]) -> Kernel:
    """Writes the elements of a Scatter; one that would lie outside is left out."""
    into = Buffer("into", tuple(scatter.output.shape), scatter.output.dtype, Memory.GLOBAL)
    buffers = {t: Buffer(f"source{k}", tuple(t.shape), t.dtype, Memory.GLOBAL) for k, t in enumerate(sources)}

    def here(root: Expr) -> Expr:
        return rewrite(root, lambda n: load(buffers[n.source], n.args)
                       if isinstance(n, Load) and n.source in buffers else None)  # fmt: skip

    indices = tuple(map(here, scatter.indices))
    stored: Stmt = Store(into, indices, here(scatter.value))
    unsure = [(i, e) for i, e in zip(indices, into.shape, strict=True) if not isinstance(i, Var)]
    if unsure:
        stored = If(all_of(c for i, e in unsure for c in (le(0, i), lt(i, e))), (stored,))
    return _serial(name, (into, *buffers.values()), scatter.axes, stored)


def _serial(name: str, params: tuple[Buffer, ...], axes: Sequence[Axis], stmt: Stmt) -> Kernel:
    """One tile that goes through all axes."""
    for axis in reversed(axes):
        stmt = For(axis, ForKind.SERIAL, (stmt,))
    return Kernel(name, params, (For(Axis("tile", 1), ForKind.PARALLEL, (stmt,)),))
