"""Control flow as Regions: loops that data may end and branches that data choose, with bodies as Programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tilewright.errors import BudgetError, UnsupportedError
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import Compute, Program, Reduce, Region, Scan, Scatter, reads
from tilewright.ir.forms.expr import Axis, Expr, all_of, cast, const, load, lt, var
from tilewright.ir.forms.tensor import Tensor
from tilewright.ops.builder import Builder, dims


@dataclass(frozen=True)
class LoopStep:
    """What one step of a loop gives: whether another may follow (None: it does), the next states, what is stacked."""

    goes_on: Tensor | None
    following: Sequence[Tensor]
    stacked: Sequence[Tensor] = ()


@dataclass(frozen=True)
class InnerGraph:
    """The computes of a body or a branch, and what it gives."""

    computes: list[Compute]
    outputs: list[Tensor]


Body = Callable[[Tensor, list[Tensor]], LoopStep]  # of the step's number and of the states


def loop_region(
    b: Builder, limit: Tensor | None, condition: Tensor | None, start: Sequence[Tensor], body: Body
) -> tuple[list[Tensor], list[Tensor]] | None:
    """A loop that makes steps while its condition holds, at most `limit`: its last states, and all rows of what it
    stacks. None where tensors change their shape from step to step, or data decide how many rows there are."""
    goes_on, number = b.tensor("goes_on", (), dtypes.bool_), b.tensor("number", (), dtypes.index)
    carry = [b.tensor(f"carry{k}", dims(t), t.dtype) for k, t in enumerate(start)]
    outer, b.computes = b.computes, []
    try:
        step = body(number, carry)
        rooms = _rooms(b, limit, condition, step)
        if rooms is None or not _keeps_shapes(step.following, carry):
            return None
        advanced = b.map("next", (), lambda: load(number, ()) + 1)
        again = b.map("still", (), lambda: all_of(_conditions(b, load(advanced, ()), limit, step.goes_on)))
        stacks = [_with_row(b, room, number, row) for room, row in zip(rooms, step.stacked, strict=True)]
        carried = [goes_on, number, *carry, *rooms]
        outside, inside = _apart(b.computes, carried)
        inner = _owned(b, InnerGraph(inside, [again, advanced, *step.following, *stacks]))
    except BudgetError:
        raise
    except UnsupportedError:
        return None  # a step has to know more than that it is one of many
    finally:
        b.computes = outer
    for compute in outside:
        b.emit(compute)
    initial = [
        b.map("begins", (), lambda: all_of(_conditions(b, const(0), limit, condition))),
        b.map("first", (), lambda: const(0)),
        *start,
        *(b.map("empty", dims(room), lambda *_, room=room: const(0, room.dtype)) for room in rooms),
    ]
    captured = _captured(b, inner, carried)
    finals = [b.tensor("" if k == 2 else f"final{k}", dims(t), t.dtype) for k, t in enumerate(carried)]
    program = _program(b, carried + captured, inner)
    b.emit(Region("loop", initial[0], (*initial, *captured), (program,), tuple(finals), origin=b.origin))
    end = 2 + len(start)
    return finals[2:end], finals[end:]


def branch(b: Builder, run: Callable[[], list[Tensor]]) -> InnerGraph:
    """A branch as it is lowered."""
    outer, b.computes = b.computes, []
    try:
        outputs = run()
        return InnerGraph(b.computes, outputs)
    finally:
        b.computes = outer


def if_region(b: Builder, condition: Tensor, branches: Sequence[InnerGraph]) -> list[Tensor]:
    """One of two branches, which give the same shapes."""
    chosen = b.map("chosen", (), lambda: b.read(condition, (0,) * condition.rank)) if condition.rank else condition
    owned = [_owned(b, inner) for inner in branches]
    captured = list(dict.fromkeys(t for inner in owned for t in _captured(b, inner, ())))
    results = [b.tensor(f"out{k}" if k else "", dims(t), t.dtype) for k, t in enumerate(owned[0].outputs)]
    programs = tuple(_program(b, captured, inner) for inner in owned)
    b.emit(Region("if", chosen, tuple(captured), programs, tuple(results), origin=b.origin))
    return results


def _rooms(b: Builder, limit: Tensor | None, condition: Tensor | None, step: LoopStep) -> list[Tensor] | None:
    """What a loop carries for its stacks; None where the data decide how many rows they have, or nothing ends it."""
    may_end = step.goes_on is not None and b.value(step.goes_on) is None
    may_not_begin = condition is not None and b.value(condition) is None
    count = b.value(limit)
    if (limit is None and not may_end) or (step.stacked and (may_end or may_not_begin or count is None)):
        return None
    if not step.stacked:
        return []
    assert count is not None
    rows = max(0, int(count.reshape(-1)[0]))
    return [b.tensor(f"room{k}", (rows, *dims(t)), t.dtype) for k, t in enumerate(step.stacked)]


def _keeps_shapes(following: Sequence[Tensor], carry: Sequence[Tensor]) -> bool:
    pairs = zip(following, carry, strict=True)
    return all(isinstance(f, Tensor) and dims(f) == dims(c) and f.dtype is c.dtype for f, c in pairs)


def _conditions(b: Builder, number: Expr, limit: Tensor | None, own: Tensor | None) -> list[Expr]:
    """Whether the step of this number is made."""
    found = [] if limit is None else [lt(number, cast(b.read(limit, (0,) * limit.rank), dtypes.index))]
    return found if own is None else [*found, b.read(own, (0,) * own.rank)]


def _with_row(b: Builder, room: Tensor, number: Tensor, row: Tensor) -> Tensor:
    """A stack with the row of this step in its place."""
    axes = tuple(Axis(f"i{k}", n) for k, n in enumerate(dims(row)))
    at = [var(a) for a in axes]
    output = b.tensor("stacked", dims(room), room.dtype)
    b.computes.append(Scatter(output, room, axes, (load(number, ()), *at), b.read(row, at), None, True, b.origin))
    return output


def _apart(computes: Sequence[Compute], carried: Sequence[Tensor]) -> tuple[list[Compute], list[Compute]]:
    """What is the same in every step and worth keeping, sums and what they are made of, and what is not."""
    varying = set(carried)
    steady: list[Compute] = []
    for compute in computes:
        if isinstance(compute, Region | Scatter) or not varying.isdisjoint(reads(compute)):
            varying.update(compute.outputs)
        else:
            steady.append(compute)
    wanted: set[Tensor] = set()
    kept: set[Compute] = set()
    for compute in reversed(steady):
        if isinstance(compute, Reduce | Scan) or not wanted.isdisjoint(compute.outputs):
            wanted.update(reads(compute))
            kept.add(compute)
    return [c for c in computes if c in kept], [c for c in computes if c not in kept]


def _owned(b: Builder, inner: InnerGraph) -> InnerGraph:
    """The same without what nobody reads, each output computed inside and given once: constants, tensors from outside,
    states and those given before are copied."""
    computes = list(inner.computes)
    made = {t for c in computes for t in c.outputs}
    outputs: list[Tensor] = []
    for tensor in inner.outputs:
        if tensor not in made or tensor in outputs:
            copy = b.map_compute("copy", dims(tensor), lambda *i, t=tensor: b.read(t, i))
            computes.append(copy)
            tensor = copy.output
        outputs.append(tensor)
    wanted = set(outputs)
    alive: list[Compute] = []
    for compute in reversed(computes):
        if not wanted.isdisjoint(compute.outputs):
            alive.append(compute)
            wanted.update(reads(compute))
    return InnerGraph(alive[::-1], outputs)


def _captured(b: Builder, inner: InnerGraph, carried: Sequence[Tensor]) -> list[Tensor]:
    """What a body reads of the Program around it."""
    own = {t for c in inner.computes for t in c.outputs} | set(carried) | b.constants.keys()
    return list(dict.fromkeys(t for c in inner.computes for t in reads(c) if t not in own))


def _program(b: Builder, inputs: Sequence[Tensor], inner: InnerGraph) -> Program:
    read = {t for c in inner.computes for t in reads(c)}
    constants = {t: a for t, a in b.constants.items() if t in read}
    return Program(tuple(inputs), tuple(inner.outputs), tuple(inner.computes), constants)
