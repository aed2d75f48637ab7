"""Control flow: loops of a known number of steps as Scans (or written out), cheap branches as selections; the others as
Regions, where the target runs these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf, prod
from typing import Any

import numpy as np

from tilewright.errors import ModelError, RegionError, UnsupportedError
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.bounds import fixed
from tilewright.ir.forms.budget import MOST_IN_A_LOOP
from tilewright.ir.forms.compute import Compute, Map, Reduce, Scan
from tilewright.ir.forms.expr import Axis, Expr, eq, load, op, select, var
from tilewright.ir.forms.graph import Graph, Node
from tilewright.ir.forms.tensor import Tensor
from tilewright.ops.builder import Builder, dims, kernel_calls
from tilewright.ops.movement.sequence import Sequence
from tilewright.ops.steps.regions import LoopStep, branch, if_region, loop_region

Scope = dict[str, Any]  # a Tensor or a Sequence of them by its name in the graph
RunBody = Callable[[Graph, Scope], list[Tensor]]  # lowers a body with its own names bound, gives its outputs
Results = tuple[Tensor | None, ...]
_DONE_IN_VAIN = 1 << 12  # steps up to which a loop that data may end does all of them
_WRITTEN_OUT = 64  # steps up to which a loop whose tensors change shape is written out


_CHEAP = 1 << 14  # elements that branches go through up to which both are computed: a few microseconds at most

NAMES = ("If", "Loop", "Scan")
_BRANCHES = ("then_branch", "else_branch")


def lower_control(b: Builder, node: Node, arguments: list[Tensor | None], run: RunBody) -> Results:
    if node.op == "If":
        return _if(b, node, arguments, run)
    if node.op == "Loop":
        return _loop(b, node, arguments, run)
    return _scan(b, node, arguments, run)


def _if(b: Builder, node: Node, arguments: list[Tensor | None], run: RunBody) -> Results:
    """The branch taken where that is known; otherwise both, which have no side effects, and a selection."""
    condition = arguments[0]
    if condition is None:
        raise b.invalid("has no condition")
    if condition.dtype is not dtypes.bool_:
        raise b.invalid(f"its condition is {condition.dtype.name}, not bool")
    for name in _BRANCHES:
        if not isinstance(node.attributes.get(name), Graph):
            raise b.invalid(f"it has no {name}")
    known = b.value(condition)
    if known is not None:
        return tuple(run(node.attributes["then_branch" if known.all() else "else_branch"], {}))
    try:
        branches = [branch(b, lambda name=name: run(node.attributes[name], {})) for name in _BRANCHES]  # type: ignore[misc]
    except RegionError:
        raise  # a loop inside that data end: whoever follows it follows the branch
    except (ModelError, UnsupportedError):
        # a branch that does not fit the shapes is never taken with them: then the condition has to say so
        b.enter(node)
        taken = b.known(condition, "cond")
        return tuple(run(node.attributes["then_branch" if taken.all() else "else_branch"], {}))
    b.enter(node)
    then, otherwise = (inner.outputs for inner in branches)
    if b.regions and _alike(then, otherwise) and sum(_work(inner.computes) for inner in branches) > _CHEAP:
        return tuple(if_region(b, condition, branches))
    b.computes += [compute for inner in branches for compute in inner.computes]
    results = []
    for place, (one, other) in enumerate(zip(then, otherwise, strict=True)):
        if isinstance(one, Sequence) or isinstance(other, Sequence):
            return tuple(then if b.known(condition, "cond").all() else otherwise)
        if dims(one) != dims(other) or one.dtype is not other.dtype:
            taken = b.decided(
                condition,
                f"its branches give {one.dtype.name}{list(dims(one))} and {other.dtype.name}{list(dims(other))}, and "
                f"the condition is known only at run time; make both branches give the same shape",
            )
            return tuple(then if taken.all() else otherwise)
        results.append(
            b.map(
                f"out{place}" if place else "",
                dims(one),
                lambda *i, one=one, other=other: select(
                    b.read(condition, (0,) * condition.rank), b.read(one, i), b.read(other, i)
                ),
            )
        )
    return tuple(results)


def _alike(then: list[Tensor], otherwise: list[Tensor]) -> bool:
    """Whether branches give the same shapes and types."""
    pairs = list(zip(then, otherwise, strict=True))
    if any(isinstance(t, Sequence) for pair in pairs for t in pair):
        return False
    return bool(pairs) and all(dims(one) == dims(other) and one.dtype is other.dtype for one, other in pairs)


def _work(computes: list[Compute]) -> float:
    """Elements that computes go through; what has steps of its own is never few."""
    total = 0.0
    for compute in computes:
        if not isinstance(compute, Map | Reduce):
            return inf
        axes = (*compute.axes, *(compute.reduce_axes if isinstance(compute, Reduce) else ()))
        total += prod(fixed(a.extent) for a in axes)
    return total


def _scan(b: Builder, node: Node, arguments: list[Tensor | None], run: RunBody) -> Results:
    if node.version < 9 and node.version:
        return _old_scan(b, node, arguments, run)
    body: Graph = node.attributes["body"]
    given = [a for a in arguments if a is not None]
    count = int(node.attributes["num_scan_inputs"])
    start, scanned = given[: len(given) - count], given[len(given) - count :]
    axes = [
        b.axis(a, t.rank) for a, t in zip(node.attributes.get("scan_input_axes", [0] * count), scanned, strict=True)
    ]
    backward = node.attributes.get("scan_input_directions", [0] * count)
    steps = dims(scanned[0])[axes[0]]
    step = Axis("t", steps)

    def slices(number: Expr) -> list[Tensor]:
        found = []
        for place, (x, axis) in enumerate(zip(scanned, axes, strict=True)):
            at = steps - 1 - number if backward[place] else number
            shape = (*dims(x)[:axis], *dims(x)[axis + 1 :])
            found.append(b.map(f"slice{place}", shape, lambda *i, x=x, a=axis, at=at: load(x, (*i[:a], at, *i[a:]))))
        return found

    def one_step(number: Expr, carry: list[Tensor]) -> list[Tensor]:
        return run(body, _bind(body, [*carry, *slices(number)]))

    def counted(number: Tensor, carry: list[Tensor]) -> LoopStep:
        outputs = one_step(load(number, ()), carry)
        return LoopStep(None, outputs[: len(start)], outputs[len(start) :])

    try:
        made = _steps(b, node, step, steps, start, lambda carry: one_step(var(step), carry), 0)
    except RegionError:
        made = loop_region(b, b.constant(np.asarray(steps, np.int64), "steps"), None, start, counted)
    if made is None:
        raise b.unsupported("its states change shape from step to step; give them a fixed shape")
    finals, stacked = made
    count = len(stacked)
    out_axes = node.attributes.get("scan_output_axes", [0] * count)
    reverse = node.attributes.get("scan_output_directions", [0] * count)
    placed = [
        _placed(b, t, b.axis(a, t.rank), bool(r), f"scan{k}")
        for k, (t, a, r) in enumerate(zip(stacked, out_axes, reverse, strict=True))
    ]
    return (*finals, *placed)


def _old_scan(b: Builder, node: Node, arguments: list[Tensor | None], run: RunBody) -> Results:
    """Scan as operator set 8 had it: an axis of batches in front of everything, whose items are scanned one by one."""
    if arguments[0] is not None:
        raise b.unsupported("sequence_lens of Scan is not supported; convert the model to operator set 9")
    given = [a for a in arguments[1:] if a is not None]
    count = int(node.attributes["num_scan_inputs"])
    batch = dims(given[0])[0]
    if not 0 < batch <= _WRITTEN_OUT or any(t.rank == 0 or dims(t)[0] != batch for t in given):
        raise b.unsupported(f"Scan of operator set 8 over {batch} batches is not supported; 1 to {_WRITTEN_OUT} are")
    newer = replace(node, version=9, attributes={
        "body": node.attributes["body"], "num_scan_inputs": count,
        "scan_input_directions": node.attributes.get("directions", [0] * count),
    })  # fmt: skip
    found = []
    for item in range(batch):
        b.enter(node)
        parts = [
            b.map(f"item{item}_{k}", dims(t)[1:], lambda *i, t=t, item=item: load(t, (item, *i)))
            for k, t in enumerate(given)
        ]
        found.append(_scan(b, newer, list(parts), run))
    b.enter(node)
    results = zip(*found, strict=True)
    return tuple(_stack(b, [p for p in parts if p is not None], f"items{k}") for k, parts in enumerate(results))


def _bind(body: Graph, tensors: list[Tensor]) -> Scope:
    return {v.name: t for v, t in zip(body.inputs, tensors, strict=True)}


def _placed(b: Builder, x: Tensor, axis: int, reverse: bool, hint: str) -> Tensor:
    """Stacked steps, their axis moved from the front and turned round where asked."""
    if axis == 0 and not reverse:
        return x
    steps, rest = dims(x)[0], dims(x)[1:]

    def element(*i: Expr) -> Expr:
        return load(x, (steps - 1 - i[axis] if reverse else i[axis], *i[:axis], *i[axis + 1 :]))

    return b.map(hint, (*rest[:axis], steps, *rest[axis:]), element)


def _steps(
    b: Builder,
    node: Node,
    step: Axis,
    steps: int,
    start: list[Tensor],
    body: Callable[[list[Tensor]], list[Tensor]],
    skip: int,
) -> tuple[list[Tensor], list[Tensor]] | None:
    """A Scan of `body(carry)`, whose outputs after the first `skip` are the next carry and what is stacked.

    None where a carry would change its type or shape.
    """
    b.enter(node)
    carry = [b.tensor(f"carry{k}", dims(t), t.dtype) for k, t in enumerate(start)]
    outer, b.computes = b.computes, []
    try:
        outputs = body(carry)[skip:]
        b.enter(node)
        inner = b.computes
        made = {t for c in inner for t in c.outputs}
        # what a step hands on must be the body's own: constants, outer tensors and the carry itself are copied
        outputs = [t if t in made else _copied(b, inner, t, k) for k, t in enumerate(outputs)]
    finally:
        b.computes = outer
    following, kept = outputs[: len(start)], outputs[len(start) :]
    if any(dims(f) != dims(c) or f.dtype is not c.dtype for f, c in zip(following, carry, strict=True)):
        return None
    calls = steps * kernel_calls(inner)
    if calls > MOST_IN_A_LOOP and (node.op == "Loop" or b.regions):
        most = f"at most {MOST_IN_A_LOOP} are made in one piece"
        raise RegionError(str(b.unsupported(f"its {steps} steps take {calls} kernel calls; {most}")))
    if b.regions and not all(isinstance(c, Map | Reduce) for c in inner):
        raise RegionError(str(b.unsupported("its steps have loops or branches inside")))
    finals = [b.tensor("" if k == 0 else f"final{k}", dims(t), t.dtype) for k, t in enumerate(start)]
    stacked = [(t, b.tensor(f"steps{k}", (steps, *dims(t)), t.dtype)) for k, t in enumerate(kept)]
    b.emit(
        Scan(
            step,
            tuple(start),
            tuple(carry),
            tuple(inner),
            tuple(following),
            tuple(finals),
            tuple(stacked),
            False,
            b.origin,
        )
    )
    return finals, [o for _, o in stacked]


def _copied(b: Builder, body: list[Compute], x: Tensor, place: int) -> Tensor:
    copy = b.map_compute(f"next{place}", dims(x), lambda *i: b.read(x, i))
    body.append(copy)
    return copy.output


def _loop(b: Builder, node: Node, arguments: list[Tensor | None], run: RunBody) -> Results:
    body: Graph = node.attributes["body"]
    limit, condition, start = arguments[0], arguments[1], [a for a in arguments[2:] if a is not None]
    way_out = "export the model with a fixed number of steps"
    has_sequences = any(isinstance(t, Sequence) for t in start)
    is_settled = b.value(limit) is not None and (condition is None or b.value(condition) is not None)
    if b.regions and not is_settled and not has_sequences:
        found = _as_region(b, node, limit, condition, start, run)
        if found is not None:
            return found
    if limit is None:
        raise RegionError(str(b.unsupported(f"its trip count is known only at run time; {way_out}")))
    count = int(b.decided(limit, f"its trip count is known only at run time; {way_out}").reshape(-1)[0])
    if condition is not None and not b.decided(condition, f"its condition is known only at run time; {way_out}").all():
        count = 0
    always = b.constant(np.asarray(True), "true")
    if count <= 0:
        return _no_steps(b, node, always, start, run)
    step = Axis("t", count)

    def checked(outputs: list[Tensor]) -> list[Tensor]:
        goes_on = b.value(outputs[0])
        if goes_on is None or not goes_on.all():
            raise RegionError(str(b.unsupported("its condition may end it early; give it a fixed number of steps")))
        return outputs

    def one_step(carry: list[Tensor]) -> list[Tensor]:
        number = b.map("step", (), lambda: var(step))
        return checked(run(body, _bind(body, [number, always, *carry])))

    try:
        made = None if has_sequences else _steps(b, node, step, count, start, one_step, 1)
    except RegionError:
        found = _as_region(b, node, limit, condition, start, run) if b.regions else None
        if found is not None:
            return found
        made = _may_end(b, node, step, count, start, run)
        if made is None:
            raise
    except UnsupportedError:
        # a step may need its number as a constant, say to slice by it
        if count > _WRITTEN_OUT:
            raise
        made = None
    if made is not None:
        return (*made[0], *made[1])
    return _written_out(b, node, body, count, always, start, run, checked)


def _as_region(
    b: Builder, node: Node, limit: Tensor | None, condition: Tensor | None, start: list[Tensor], run: RunBody
) -> Results | None:
    """A loop whose end is found at run time, or that is too long to write down."""
    body: Graph = node.attributes["body"]

    always = b.constant(np.asarray(True), "true")  # in a step that is made, the condition holds

    def one_step(number: Tensor, carry: list[Tensor]) -> LoopStep:
        outputs = run(body, _bind(body, [number, always, *carry]))
        b.enter(node)
        if any(isinstance(t, Sequence) for t in outputs):
            raise b.unsupported("its steps hand on sequences")
        return LoopStep(outputs[0], outputs[1 : 1 + len(start)], outputs[1 + len(start) :])

    b.enter(node)
    made = loop_region(b, limit, condition, start, one_step)
    b.enter(node)
    return None if made is None else (*made[0], *made[1])


def _no_steps(b: Builder, node: Node, always: Tensor, start: list[Tensor], run: RunBody) -> Results:
    """A loop that makes no step: its states as they are, and stacks of nothing, of the shape that a step would give."""
    body: Graph = node.attributes["body"]
    if len(body.outputs) == len(start) + 1:
        return tuple(start)
    outer, b.computes = b.computes, []
    try:
        first = b.constant(np.asarray(0, np.int64), "step")
        outputs = run(body, _bind(body, [first, always, *start]))
    finally:
        b.computes = outer
    b.enter(node)
    kept = outputs[len(start) + 1 :]
    if any(isinstance(t, Sequence) for t in kept):
        raise b.invalid("it would stack sequences")
    return (*start, *(b.constant(np.zeros((0, *dims(t)), t.dtype.numpy), "nothing") for t in kept))


def _may_end(
    b: Builder, node: Node, step: Axis, count: int, start: list[Tensor], run: RunBody
) -> tuple[list[Tensor], list[Tensor]] | None:
    """A loop whose condition is data: all its steps are done, and those behind the last one change nothing.

    None where what it stacks would depend on the number of steps, or where they are too many to do in vain.
    """
    body: Graph = node.attributes["body"]
    if len(body.outputs) > len(start) + 1 or count > _DONE_IN_VAIN:
        return None

    def one_step(carry: list[Tensor]) -> list[Tensor]:
        runs, held = carry[0], carry[1:]
        number = b.map("step", (), lambda: var(step))
        outputs = run(body, _bind(body, [number, runs, *held]))
        b.enter(node)
        if any(
            dims(new) != dims(old) or new.dtype is not old.dtype for new, old in zip(outputs[1:], held, strict=True)
        ):
            raise b.unsupported("its condition may end it early, and its tensors change shape; give them a fixed one")
        goes_on = b.map("goes_on", (), lambda: op("and", load(runs, ()), b.read(outputs[0], (0,) * outputs[0].rank)))
        kept = []
        for k, (new, old) in enumerate(zip(outputs[1:], held, strict=True)):

            def element(*i: Expr, new: Tensor = new, old: Tensor = old) -> Expr:
                return select(load(runs, ()), b.read(new, i), load(old, i))

            kept.append(b.map(f"kept{k}", dims(old), element))
        return [goes_on, *kept]

    made = _steps(b, node, step, count, [b.constant(np.asarray(True), "runs"), *start], one_step, 0)
    return None if made is None else (made[0][1:], [])


def _written_out(
    b: Builder,
    node: Node,
    body: Graph,
    count: int,
    always: Tensor,
    start: list[Tensor],
    run: RunBody,
    checked: Callable[[list[Tensor]], list[Tensor]],
) -> Results:
    """A loop step by step, for tensors that change shape."""
    if count > _WRITTEN_OUT:
        raise b.unsupported(f"its tensors change shape over {count} steps; at most {_WRITTEN_OUT} are supported")
    carry, kept = start, []
    for number in range(count):
        index = b.constant(np.asarray(number, np.int64), "step")
        outputs = checked(run(body, _bind(body, [index, always, *carry])))[1:]
        b.enter(node)
        carry = outputs[: len(start)]
        kept.append(outputs[len(start) :])
    stacked = []
    for place in range(len(body.outputs) - 1 - len(start)):
        parts = [step[place] for step in kept]
        if len({dims(p) for p in parts}) > 1:
            raise b.unsupported("its stacked outputs change shape from step to step; give them a fixed shape")
        stacked.append(_stack(b, parts, f"stack{place}"))
    return (*carry, *stacked)


def _stack(b: Builder, parts: list[Tensor], hint: str) -> Tensor:
    def element(*i: Expr) -> Expr:
        value = b.read(parts[-1], i[1:])
        for place in range(len(parts) - 2, -1, -1):
            value = select(eq(i[0], place), b.read(parts[place], i[1:]), value)
        return value

    return b.map(hint, (len(parts), *dims(parts[0])), element)
