"""PyTorch's higher-order operators as nodes of the Graph: cond as If, while_loop as Loop, scan and map as Scan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from tilewright.frontend.pytorch.emitter import Emitted, Emitter
from tilewright.frontend.pytorch.tensors import tensor_of
from tilewright.ir.forms import dtypes
from tilewright.ir.forms import graph as ir

Known = Emitted | tuple[Emitted | None, ...]
EmitAll = Callable[[Emitter, Iterable[fx.Node], dict[fx.Node, Known]], None]
_MOST_STEPS = 1 << 12  # a loop is counted by doing what its condition needs; beyond this it is left to run time

_higher = torch.ops.higher_order
# Where the bodies stand among a call's arguments.
_BODIES = {_higher.cond: (1, 2), _higher.while_loop: (0, 1), _higher.scan: (0,), _higher.map_impl: (0,)}


def is_control(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in _BODIES


def is_loop(node: fx.Node) -> bool:
    """Whether a node is a loop whose data may decide how often it runs."""
    return node.target is _higher.while_loop


def bodies(node: fx.Node) -> list[fx.GraphModule]:
    owner = node.graph.owning_module
    assert owner is not None
    return [owner.get_submodule(str(node.args[k].target)) for k in _BODIES[node.target]]  # type: ignore[union-attr,index,misc]


def inner_nodes(body: fx.GraphModule) -> list[fx.Node]:
    return [n for n in body.graph.nodes if n.op not in ("placeholder", "output")]


def operands(node: fx.Node) -> list[Any]:
    """All that the bodies are given, in the order of their placeholders."""
    rest = node.args[3:] if node.target is _higher.cond else node.args[max(_BODIES[node.target]) + 1 :]  # type: ignore[index]
    return [x for part in rest for x in part]  # type: ignore[union-attr]


def why_no_control(node: fx.Node, uncovered: Callable[[Iterable[fx.Node]], Iterable[str]]) -> str | None:
    """Why a call of a higher-order operator has no node. Whether a loop can be counted is seen when it is emitted."""
    for x in operands(node):
        if not isinstance(x, fx.Node) or not isinstance(x.meta.get("val"), torch.Tensor):
            return f"{node.target} '{node.name}': an operand that is no tensor; carry a count as torch.tensor(0)"
    for body in bodies(node):
        missing = list(uncovered(inner_nodes(body)))
        if missing:
            return "; ".join(missing)
        if not all(isinstance(x, fx.Node) for x in returned(body)):
            return f"{node.target} '{node.name}': a body that returns what is no tensor"
    return None


def returned(body: fx.GraphModule) -> list[Any]:
    found = next(n for n in body.graph.nodes if n.op == "output").args[0]
    return list(found) if isinstance(found, tuple | list) else [found]


def emit_control(
    m: Emitter, node: fx.Node, known: Mapping[fx.Node, Known], wanted: tuple[Emitted | None, ...], emit_all: EmitAll
) -> Known:
    """The control node that stands for a call, and what it gives."""
    m.enter(f"{node.target} '{node.name}'", node.name)
    if node.target is _higher.cond:
        names = _branches(m, node, known, len(wanted), emit_all)
    elif node.target is _higher.while_loop:
        names = _loop(m, node, known, emit_all)
    else:
        names = _scan(m, node, known, len(wanted), emit_all)
    return tuple(None if w is None else Emitted(n, w.dtype, w.shape) for n, w in zip(names, wanted, strict=True))


def _value(known: Mapping[fx.Node, Known], node: fx.Node) -> Emitted:
    found = known[node]
    assert isinstance(found, Emitted)
    return found


class _Body:
    """A body on its way to a Graph: its placeholders are inputs of that, or stand for what is made around it."""

    def __init__(
        self, m: Emitter, body: fx.GraphModule, given: Sequence[Emitted], inputs: Sequence[Emitted | None],
        leading: Sequence[Emitted] = (),
    ) -> None:  # fmt: skip
        """`inputs` says of each placeholder what the input is like, or None; `leading` are inputs in front of them."""
        self.m, self.body = m.inside(), body
        self.inputs: list[ir.Value] = []
        self.leading = [self._input(value.name, value) for value in leading]
        self.known: dict[fx.Node, Known] = {}
        placeholders = [n for n in body.graph.nodes if n.op == "placeholder"]
        for placeholder, outer, own in zip(placeholders, given, inputs, strict=True):
            self.known[placeholder] = outer if own is None else self._input(placeholder.name, own)

    def _input(self, name: str, like: Emitted) -> Emitted:
        value = Emitted(self.m.unique(name), like.dtype, like.shape)
        self.inputs.append(ir.Value(value.name, value.dtype, value.shape))
        return value

    def graph(self, name: str, emit_all: EmitAll, before: Callable[[], Sequence[str]] = tuple) -> ir.Graph:
        """`before` tells outputs in front of the body's own, when that is there."""
        emit_all(self.m, inner_nodes(self.body), self.known)
        leading = before()
        made = {name for node in self.m.nodes for name in node.outputs}
        self.m.enter(name, name)
        outputs = []
        for node in returned(self.body):
            found = _value(self.known, node).name
            # what a body hands on as it got it, or twice, is a tensor of its own
            outputs.append(found if found in made and found not in outputs else self.m.new("Identity", found))
        declared = {v.name: v for v in self.inputs}
        return ir.Graph(name, tuple(self.inputs), (*leading, *outputs), tuple(self.m.nodes), self.m.constants, declared)


def _branches(
    m: Emitter, node: fx.Node, known: Mapping[fx.Node, Known], count: int, emit_all: EmitAll
) -> Sequence[str]:
    given = [_value(known, x) for x in operands(node)]
    graphs = [
        _Body(m, body, given, [None] * len(given)).graph(f"{node.name}_{number}", emit_all)
        for number, body in enumerate(bodies(node))
    ]
    condition = _value(known, node.args[0])  # type: ignore[arg-type]
    m.enter(f"torch.cond '{node.name}'", node.name)
    return m.several("If", count, condition, then_branch=graphs[0], else_branch=graphs[1])


def _scan(m: Emitter, node: fx.Node, known: Mapping[fx.Node, Known], count: int, emit_all: EmitAll) -> Sequence[str]:
    parts = [[_value(known, x) for x in part] for part in node.args[1:]]  # type: ignore[union-attr,arg-type]
    states, scanned, others = parts if node.target is _higher.scan else ([], *parts)
    slices = [Emitted(x.name, x.dtype, x.shape[1:]) for x in scanned]
    (body,) = bodies(node)
    inside = _Body(m, body, [*states, *slices, *others], [*states, *slices, *[None] * len(others)])
    made = inside.graph(f"{node.name}_body", emit_all)
    m.enter(f"{node.target} '{node.name}'", node.name)
    return m.several("Scan", count, *states, *scanned, body=made, num_scan_inputs=len(scanned))


def _loop(m: Emitter, node: fx.Node, known: Mapping[fx.Node, Known], emit_all: EmitAll) -> Sequence[str]:
    given = [_value(known, x) for x in operands(node)]
    carried = len(node.args[2])  # type: ignore[arg-type]
    condition, body = bodies(node)
    steps = count_steps(condition, body, carried, [m.known(x.name) for x in given])
    leading = [Emitted("step", dtypes.int64, ()), Emitted("goes_on", dtypes.bool_, ())]
    inside = _Body(m, body, given, [*given[:carried], *[None] * (len(given) - carried)], leading)

    def tested() -> Sequence[str]:
        """Whether there is another step: where they are counted, as long as there was one."""
        if steps is not None:
            return (inside.leading[1].name,)
        following = [_value(inside.known, x) for x in returned(body)]
        found = _tested(inside.m, condition, [*following, *given[carried:]], emit_all)
        inside.m.enter(f"{node.name}_condition", f"{node.name}_condition")
        return (inside.m.new("Identity", found),)

    made = inside.graph(f"{node.name}_body", emit_all, before=tested)
    limit = None if steps is None else m.number(steps, dtypes.int64)
    begins = m.number(True, dtypes.bool_) if steps is not None else _tested(m, condition, given, emit_all)
    m.enter(f"{node.target} '{node.name}'", node.name)
    return m.several("Loop", carried, limit, begins, *given[:carried], body=made)


def _tested(m: Emitter, condition: fx.GraphModule, given: Sequence[Emitted], emit_all: EmitAll) -> str:
    """The condition of a loop for these operands."""
    placeholders = [n for n in condition.graph.nodes if n.op == "placeholder"]
    known: dict[fx.Node, Known] = dict(zip(placeholders, given, strict=True))
    emit_all(m, inner_nodes(condition), known)
    test = _value(known, returned(condition)[0])
    return m.new("Reshape", test, m.integers([])) if test.shape else test.name


# the number of steps


def count_steps(
    condition: fx.GraphModule, body: fx.GraphModule, carried: int, values: Sequence[np.ndarray | None]
) -> int | None:
    """How often a while_loop runs, where that follows from the operands whose values are known; they alone are
    followed. None where it does not, or where that is too often."""
    (test,) = returned(condition)
    followed = _followed(test, body, carried, values)
    if followed is None:
        return None
    state = [None if v is None else tensor_of(np.ascontiguousarray(v)) for v in values]
    following = returned(body)
    with torch.no_grad():
        for step in range(_MOST_STEPS + 1):
            if not bool(_evaluated(condition, [test], state)[0]):
                return step
            wanted = [k for k in followed if k < carried]
            new = _evaluated(body, [following[k] for k in wanted], state)
            state = [new[wanted.index(k)] if k in wanted else s for k, s in enumerate(state)]
    return None


def _followed(
    test: fx.Node, body: fx.GraphModule, carried: int, values: Sequence[np.ndarray | None]
) -> list[int] | None:
    """Operands that the condition depends on, from step to step; None where one of them is not known."""
    found: set[int] = set()
    waiting = _placeholders_of(test)
    following = returned(body)
    while waiting is not None and waiting - found:
        place = min(waiting - found)
        if values[place] is None:
            return None
        found.add(place)
        more = _placeholders_of(following[place]) if place < carried else set()
        waiting = None if more is None else waiting | more
    return None if waiting is None else sorted(found)


def closure(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """These nodes and all that they are computed from."""
    seen: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return seen


def _placeholders_of(node: fx.Node) -> set[int] | None:
    """Which placeholders a node depends on; None where a body inside is among them, which is not evaluated here."""
    needed = closure([node])
    if any(n.op not in ("placeholder", "call_function") or is_control(n) for n in needed):
        return None
    return {k for k, n in enumerate(p for p in node.graph.nodes if p.op == "placeholder") if n in needed}


def _evaluated(body: fx.GraphModule, wanted: Sequence[fx.Node], given: Sequence[Any]) -> list[Any]:
    """Some of what a body computes, by PyTorch itself."""
    needed = closure(wanted)
    placeholders = [n for n in body.graph.nodes if n.op == "placeholder"]
    values: dict[fx.Node, Any] = dict(zip(placeholders, given, strict=True))
    for node in body.graph.nodes:
        if node.op == "call_function" and node in needed:
            args = fx.map_arg(node.args, lambda n: values[n])
            values[node] = node.target(*args, **fx.map_arg(node.kwargs, lambda n: values[n]))
    return [values[n] for n in wanted]
