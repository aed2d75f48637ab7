"""Recurrent layers: the projection of all steps as one contraction, then a Scan per direction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tilewright.ir import dtypes
from tilewright.ir.compute import Compute, Scan
from tilewright.ir.dtypes import DType
from tilewright.ir.expr import Axis, Expr, cast, load, op, var
from tilewright.ir.graph import Node
from tilewright.ir.tensor import Tensor
from tilewright.ops.builder import Builder, dims
from tilewright.ops.elementwise import activation
from tilewright.ops.registry import operator
from tilewright.ops.shape import concatenated

Activations = list[Callable[[Expr], Expr]]


@dataclass(frozen=True)
class Layer:
    """What the three cells share. `weight` is [directions, gates * hidden, inputs], as ONNX stores it."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    gates: int
    hidden: int
    steps: int
    batch: int
    batch_first: bool
    wide: DType  # the type sums and states are kept in


@dataclass(frozen=True)
class Direction:
    """One direction of a layer: its place in the weights, its order and its activations."""

    place: int
    reverse: bool
    functions: Activations
    hint: str


def _layer(b: Builder, node: Node, gates: int, x: Tensor, weight: Tensor, recurrence: Tensor, bias: Tensor | None,
           lengths: Tensor | None) -> Layer:  # fmt: skip
    hidden = dims(recurrence)[2]
    if x.rank != 3 or dims(weight)[1] != gates * hidden or dims(weight)[2] != dims(x)[2]:
        raise b.invalid(f"input {list(dims(x))} does not fit weights {list(dims(weight))}")
    batch_first = bool(node.attributes.get("layout", 0))
    batch, steps = dims(x)[:2] if batch_first else dims(x)[1::-1]
    if lengths is not None:
        known = b.value(lengths)
        if known is None or np.any(known != steps):
            raise b.unsupported(f"sequence_lens other than the full {steps} steps is not supported; leave it out")
    if node.attributes.get("clip", 0):
        raise b.unsupported("attribute clip is not supported; remove it or express the cell by other operators")
    if node.attributes.get("input_forget", 0):
        raise b.unsupported("attribute input_forget=1 is not supported")
    wide = dtypes.accumulator(x.dtype)
    return Layer(x, weight, bias, gates, hidden, steps, batch, batch_first, wide)


def _of_direction(b: Builder, weight: Tensor, d: Direction, hint: str) -> Tensor:
    """One direction's weights as a matrix; folded where they are constant."""
    return b.map(f"{d.hint}_{hint}", dims(weight)[1:], lambda row, k: load(weight, (d.place, row, k)))


def _directions(b: Builder, node: Node, defaults: tuple[str, ...]) -> list[Direction]:
    kind = node.attributes.get("direction", "forward")
    orders = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}.get(kind)
    if orders is None:
        raise b.invalid(f"direction '{kind}' is not known")
    names = list(node.attributes.get("activations") or defaults * len(orders))
    alphas = list(node.attributes.get("activation_alpha") or ())
    betas = list(node.attributes.get("activation_beta") or ())
    functions: Activations = []
    for name in names:
        attributes = {}
        # parameters are listed only for the activations that have them
        if name.lower() not in ("relu", "tanh", "sigmoid", "softsign", "softplus"):
            if alphas:
                attributes["alpha"] = alphas.pop(0)
            if betas and name.lower() in ("affine", "scaledtanh", "hardsigmoid"):
                attributes["beta"] = betas.pop(0)
        function = activation(name, attributes)
        if function is None:
            raise b.unsupported(f"activation '{name}' is not known")
        functions.append(function)
    each = len(defaults)
    return [
        Direction(place, reverse, functions[place * each : (place + 1) * each], "backward" if reverse else "forward")
        for place, reverse in enumerate(orders)
    ]


def _projection(b: Builder, layer: Layer, d: Direction, recurrent_bias: Callable[[int], bool]) -> Tensor:
    """x W^T + bias for all steps, [steps, batch, gates, hidden].

    `recurrent_bias(gate)` says whether the gate's recurrent bias may be added here already.
    """
    hidden, wide = layer.hidden, layer.wide
    weight = _of_direction(b, layer.weight, d, "weight")

    def element(i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Expr:
        t, n, g, j = i
        left = load(layer.x, (n, t, r[0]) if layer.batch_first else (t, n, r[0]))
        return cast(left, wide) * cast(load(weight, (g * hidden + j, r[0])), wide)

    shape = (layer.steps, layer.batch, layer.gates, hidden)
    total = b.reduce(f"{d.hint}_projection", shape, (dims(layer.x)[2],), element, "add")
    bias = layer.bias
    if bias is None:
        return total
    parts = []
    for gate in range(layer.gates):
        def summed(_: Expr, j: Expr, gate: int = gate) -> Expr:
            value = b.wide(bias, (d.place, gate * hidden + j))
            if recurrent_bias(gate):
                value = value + b.wide(bias, (d.place, (layer.gates + gate) * hidden + j))
            return value

        parts.append(b.map(f"{d.hint}_bias{gate}", (1, hidden), summed))
    shift = concatenated(b, f"{d.hint}_bias", tuple(parts), 0)
    return b.map(f"{d.hint}_input", shape, lambda t, n, g, j: b.read(total, (t, n, g, j)) + b.read(shift, (g, j)))


def _initial(b: Builder, layer: Layer, d: Direction, hint: str, given: Tensor | None) -> Tensor:
    if given is None:
        return b.constant(np.zeros((layer.batch, layer.hidden), layer.wide.numpy), f"{d.hint}_{hint}")

    def element(n: Expr, j: Expr) -> Expr:
        return b.wide(given, (n, d.place, j) if layer.batch_first else (d.place, n, j))

    return b.map(f"{d.hint}_{hint}", (layer.batch, layer.hidden), element)


def _recurrence(b: Builder, layer: Layer, hint: str, d: Direction, state: Tensor, matrix: Tensor, first: int, count: int
                ) -> Compute:  # fmt: skip
    """state R^T for `count` gates from `first` on: [batch, gates, hidden], or [batch, hidden] for one gate."""
    hidden = layer.hidden

    def element(i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Expr:
        row = i[-1] + first * hidden if count == 1 else (i[1] + first) * hidden + i[2] if first else i[1] * hidden + i[2]
        return load(state, (i[0], r[0])) * cast(load(matrix, (row, r[0])), layer.wide)

    shape = (layer.batch, hidden) if count == 1 else (layer.batch, count, hidden)
    return b.reduce_compute(f"{d.hint}_{hint}", shape, (hidden,), element, "add")


def _joined(b: Builder, node: Node, layer: Layer, x: Tensor, place: int, hint: str, parts: list[Tensor], steps: bool
            ) -> Tensor | None:  # fmt: skip
    """The directions of one output put together in ONNX's axis order; None where the node does not want it."""
    if len(node.outputs) <= place or not node.outputs[place]:
        return None
    outer = (layer.steps,) if steps else ()
    shape = (*outer, 1, layer.batch, layer.hidden)
    order = (*(("t",) if steps else ()), "d", "n", "j")
    if layer.batch_first:
        order = ("n", "t", "d", "j") if steps else ("n", "d", "j")
    sizes = {"t": layer.steps, "d": 1, "n": layer.batch, "j": layer.hidden}
    shape = tuple(sizes[a] for a in order)
    single = len(parts) == 1

    def placed(part: Tensor, name: str) -> Tensor:
        def element(*i: Expr) -> Expr:
            at = dict(zip(order, i, strict=True))
            value = load(part, (at["t"], at["n"], at["j"]) if steps else (at["n"], at["j"]))
            return cast(value, x.dtype)

        return b.map(name, shape, element)

    pieces = tuple(placed(p, hint if single else f"{hint}{k}") for k, p in enumerate(parts))
    return concatenated(b, hint, pieces, order.index("d"))


@operator("LSTM")
def lstm(
    b: Builder, node: Node, x: Tensor, weight: Tensor, recurrence: Tensor, bias: Tensor | None = None,
    lengths: Tensor | None = None, initial_h: Tensor | None = None, initial_c: Tensor | None = None,
    peephole: Tensor | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    layer = _layer(b, node, 4, x, weight, recurrence, bias, lengths)
    stacked, last_h, last_c = [], [], []
    for d in _directions(b, node, ("Sigmoid", "Tanh", "Tanh")):
        gate, squash, output = d.functions
        given = _projection(b, layer, d, lambda g: True)
        step = Axis("t", layer.steps)
        shape = (layer.batch, layer.hidden)
        h, c = b.tensor(f"{d.hint}_h", shape, layer.wide), b.tensor(f"{d.hint}_c", shape, layer.wide)
        matrix = _of_direction(b, recurrence, d, "recurrence")
        gates = _recurrence(b, layer, "gates", d, h, matrix, 0, 4)
        sums = gates.outputs[0]

        def raw(g: int, n: Expr, j: Expr, given: Tensor = given, sums: Tensor = sums, step: Axis = step) -> Expr:
            return load(given, (var(step), n, g, j)) + load(sums, (n, g, j))

        def peek(which: int, cell: Expr, j: Expr, place: int = d.place) -> Expr | None:
            if peephole is None:
                return None
            return b.wide(peephole, (place, j + which * layer.hidden)) * cell

        def plus(value: Expr, more: Expr | None) -> Expr:
            return value if more is None else value + more

        def next_c(n: Expr, j: Expr, c: Tensor = c, gate=gate, squash=squash, raw=raw, peek=peek) -> Expr:
            old = load(c, (n, j))
            keep = gate(plus(raw(2, n, j), peek(2, old, j)))
            take = gate(plus(raw(0, n, j), peek(0, old, j)))
            return keep * old + take * squash(raw(3, n, j))

        new_c = b.map_compute(f"{d.hint}_next_c", shape, next_c)

        def next_h(n: Expr, j: Expr, new_c=new_c, gate=gate, output=output, raw=raw, peek=peek) -> Expr:
            cell = load(new_c.output, (n, j))
            return gate(plus(raw(1, n, j), peek(1, cell, j))) * output(cell)

        new_h = b.map_compute(f"{d.hint}_next_h", shape, next_h)
        start = (_initial(b, layer, d, "h0", initial_h), _initial(b, layer, d, "c0", initial_c))
        wants_c = len(node.outputs) > 2 and bool(node.outputs[2])
        parts = _scan(b, node, layer, d, step, start, (h, c), (gates, new_c, new_h), (new_h.output, new_c.output), wants_c)
        for found, part in zip((stacked, last_h, last_c), parts, strict=True):
            found.append(part)
    return (
        _joined(b, node, layer, x, 0, "", stacked, steps=True),
        _joined(b, node, layer, x, 1, "last_h", last_h, steps=False),
        _joined(b, node, layer, x, 2, "last_c", last_c, steps=False),
    )


def _scan(
    b: Builder, node: Node, layer: Layer, d: Direction, step: Axis, start: tuple[Tensor, ...], carry: tuple[Tensor, ...],
    body: tuple[Compute, ...], following: tuple[Tensor, ...], wants_second: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Emit the Scan; gives the stacked hidden states and the final carries, each only where the node wants it."""
    shape = (layer.batch, layer.hidden)
    wants_all = bool(node.outputs[0])
    wants_last = len(node.outputs) > 1 and bool(node.outputs[1])
    steps = b.tensor(f"{d.hint}_steps", (layer.steps, *shape), layer.wide) if wants_all else None
    last = b.tensor(f"{d.hint}_last_h", shape, layer.wide) if wants_last else None
    second = b.tensor(f"{d.hint}_last_c", shape, layer.wide) if wants_second else None
    finals = (last, second)[: len(carry)]
    stacked = () if steps is None else ((following[0], steps),)
    b.emit(Scan(step, start, carry, body, following, finals, stacked, d.reverse, b.origin))
    return steps, last, second


@operator("GRU")
def gru(
    b: Builder, node: Node, x: Tensor, weight: Tensor, recurrence: Tensor, bias: Tensor | None = None,
    lengths: Tensor | None = None, initial_h: Tensor | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    layer = _layer(b, node, 3, x, weight, recurrence, bias, lengths)
    reset_after = bool(node.attributes.get("linear_before_reset", 0))
    stacked, last_h = [], []
    for d in _directions(b, node, ("Sigmoid", "Tanh")):
        gate, squash = d.functions
        given = _projection(b, layer, d, lambda g: g < 2 or not reset_after)
        step = Axis("t", layer.steps)
        shape = (layer.batch, layer.hidden)
        h = b.tensor(f"{d.hint}_h", shape, layer.wide)
        matrix = _of_direction(b, recurrence, d, "recurrence")
        gates = _recurrence(b, layer, "gates", d, h, matrix, 0, 3 if reset_after else 2)
        sums = gates.outputs[0]

        def raw(g: int, n: Expr, j: Expr, given: Tensor = given, sums: Tensor = sums, step: Axis = step) -> Expr:
            return load(given, (var(step), n, g, j)) + load(sums, (n, g, j))

        body: list[Compute] = [gates]
        if reset_after:

            def candidate(n: Expr, j: Expr, d=d, given=given, sums=sums, step=step, raw=raw, gate=gate) -> Expr:
                inner = load(sums, (n, 2, j))
                if bias is not None:
                    inner = inner + b.wide(bias, (d.place, j + 5 * layer.hidden))
                return load(given, (var(step), n, 2, j)) + gate(raw(1, n, j)) * inner
        else:
            reset = b.map_compute(
                f"{d.hint}_reset", shape,
                lambda n, j, raw=raw, gate=gate, h=h: gate(raw(1, n, j)) * load(h, (n, j)),
            )  # fmt: skip
            hidden = _recurrence(b, layer, "hidden", d, reset.output, matrix, 2, 1)
            body += [reset, hidden]

            def candidate(n: Expr, j: Expr, given=given, step=step, hidden=hidden) -> Expr:
                return load(given, (var(step), n, 2, j)) + load(hidden.outputs[0], (n, j))

        def next_h(n: Expr, j: Expr, h=h, raw=raw, gate=gate, squash=squash, candidate=candidate) -> Expr:
            update = gate(raw(0, n, j))
            return (1 - update) * squash(candidate(n, j)) + update * load(h, (n, j))

        new_h = b.map_compute(f"{d.hint}_next_h", shape, next_h)
        start = (_initial(b, layer, d, "h0", initial_h),)
        parts = _scan(b, node, layer, d, step, start, (h,), (*body, new_h), (new_h.output,))
        stacked.append(parts[0])
        last_h.append(parts[1])
    return (
        _joined(b, node, layer, x, 0, "", stacked, steps=True),
        _joined(b, node, layer, x, 1, "last_h", last_h, steps=False),
    )


@operator("RNN")
def rnn(
    b: Builder, node: Node, x: Tensor, weight: Tensor, recurrence: Tensor, bias: Tensor | None = None,
    lengths: Tensor | None = None, initial_h: Tensor | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    layer = _layer(b, node, 1, x, weight, recurrence, bias, lengths)
    stacked, last_h = [], []
    for d in _directions(b, node, ("Tanh",)):
        given = _projection(b, layer, d, lambda g: True)
        step = Axis("t", layer.steps)
        shape = (layer.batch, layer.hidden)
        h = b.tensor(f"{d.hint}_h", shape, layer.wide)
        matrix = _of_direction(b, recurrence, d, "recurrence")
        sums = _recurrence(b, layer, "gates", d, h, matrix, 0, 1)
        new_h = b.map_compute(
            f"{d.hint}_next_h", shape,
            lambda n, j, f=d.functions[0], given=given, sums=sums, step=step: f(
                op("add", load(given, (var(step), n, 0, j)), load(sums.outputs[0], (n, j)))
            ),
        )  # fmt: skip
        start = (_initial(b, layer, d, "h0", initial_h),)
        parts = _scan(b, node, layer, d, step, start, (h,), (sums, new_h), (new_h.output,))
        stacked.append(parts[0])
        last_h.append(parts[1])
    return (
        _joined(b, node, layer, x, 0, "", stacked, steps=True),
        _joined(b, node, layer, x, 1, "last_h", last_h, steps=False),
    )
