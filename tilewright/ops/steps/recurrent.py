"""Recurrent layers: the projection of all steps as one contraction, then a Scan per direction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import Compute, Scan
from tilewright.ir.forms.dtypes import DType
from tilewright.ir.forms.expr import Axis, Expr, cast, const, load, lt, maximum, minimum, select, var
from tilewright.ir.forms.graph import Node
from tilewright.ir.forms.tensor import Tensor
from tilewright.ops.builder import Builder, dims, expect
from tilewright.ops.maps.elementwise import activation
from tilewright.ops.movement.shape import concatenated
from tilewright.ops.registry import operator

Activations = list[Callable[[Expr], Expr]]
Parts = tuple[Tensor | None, Tensor | None, Tensor | None]  # all hidden states, the last one, the last cell state

ToBytes = Callable[[str, Tensor], tuple[Compute, ...]]  # computes whose last gives a tensor rounded to 8 bits


@dataclass(frozen=True)
class RecurrentLayer:
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
    lengths: Tensor | None  # the number of steps of each sequence, where some may be shorter


@dataclass(frozen=True)
class Direction:
    """One direction of a layer: its place in the weights, its order and its activations."""

    place: int
    reverse: bool
    functions: Activations
    hint: str


def _layer(
    b: Builder,
    node: Node,
    gates: int,
    x: Tensor,
    weight: Tensor,
    recurrence: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
) -> RecurrentLayer:
    hidden = dims(recurrence)[2]
    if x.rank != 3 or dims(weight)[1] != gates * hidden or dims(weight)[2] != dims(x)[2]:
        raise b.invalid(f"input {list(dims(x))} does not fit weights {list(dims(weight))}")
    batch_first = bool(node.attributes.get("layout", 0))
    batch, steps = dims(x)[:2] if batch_first else dims(x)[1::-1]
    if lengths is not None:
        known = b.value(lengths)
        if dims(lengths) != (batch,) or (known is not None and (np.any(known < 0) or np.any(known > steps))):
            raise b.invalid(f"sequence_lens has to hold {batch} numbers from 0 to {steps}")
        if known is not None and np.all(known == steps):
            lengths = None
    expect(b, "B", bias, (dims(weight)[0], 2 * gates * hidden))
    expect(b, "R", recurrence, (dims(weight)[0], gates * hidden, hidden))
    wide = dtypes.accumulator(x.dtype)
    return RecurrentLayer(x, weight, bias, gates, hidden, steps, batch, batch_first, wide, lengths)


def _of_direction(
    b: Builder, weight: Tensor, d: Direction, hint: str, first: int = 0, rows: int | None = None
) -> Tensor:
    """One direction's weights as a matrix, or `rows` of it; folded where they are constant."""
    count, columns = dims(weight)[1:]
    shape = (count if rows is None else rows, columns)
    return b.map(f"{d.hint}_{hint}", shape, lambda row, k: load(weight, (d.place, row + first if first else row, k)))


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
    if len(functions) < each * len(orders):
        raise b.invalid(f"activations {names} are fewer than the {each * len(orders)} of its cells")
    limit = float(node.attributes.get("clip", 0))
    if limit > 0:  # of the gates alone: what squashes the cell of an LSTM takes it as it is
        functions = [f if n % each == 2 else _clipped(f, limit) for n, f in enumerate(functions)]
    return [
        Direction(place, reverse, functions[place * each : (place + 1) * each], "backward" if reverse else "forward")
        for place, reverse in enumerate(orders)
    ]


def _clipped(function: Callable[[Expr], Expr], limit: float) -> Callable[[Expr], Expr]:
    return lambda x: function(minimum(maximum(x, -limit), limit))


def _projection(b: Builder, layer: RecurrentLayer, d: Direction, recurrent_bias: Callable[[int], bool]) -> Tensor:
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


def _initial(b: Builder, layer: RecurrentLayer, d: Direction, hint: str, given: Tensor | None) -> Tensor:
    if given is None:
        return b.filled((layer.batch, layer.hidden), 0, layer.wide, f"{d.hint}_{hint}")

    ways = dims(layer.weight)[0]
    shape = (layer.batch, ways, layer.hidden) if layer.batch_first else (ways, layer.batch, layer.hidden)
    expect(b, f"initial_{hint[0]}", given, shape)

    def element(n: Expr, j: Expr) -> Expr:
        return b.wide(given, (n, d.place, j) if layer.batch_first else (d.place, n, j))

    return b.map(f"{d.hint}_{hint}", (layer.batch, layer.hidden), element)


def _recurrence(
    b: Builder, layer: RecurrentLayer, hint: str, d: Direction, state: Tensor, matrix: Tensor, count: int
) -> Compute:
    """state R^T for `count` gates: [batch, gates, hidden], or [batch, hidden] for one gate."""
    hidden = layer.hidden

    def element(i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Expr:
        row = i[-1] if count == 1 else i[1] * hidden + i[2]
        return load(state, (i[0], r[0])) * cast(load(matrix, (row, r[0])), layer.wide)

    shape = (layer.batch, hidden) if count == 1 else (layer.batch, count, hidden)
    return b.reduce_compute(f"{d.hint}_{hint}", shape, (hidden,), element, "add")


def _joined(
    b: Builder, node: Node, layer: RecurrentLayer, place: int, hint: str, parts: list[Tensor | None]
) -> Tensor | None:
    """The directions of one output put together in ONNX's axis order; None where the node does not want it."""
    wanted = [p for p in parts if p is not None]
    if not wanted:
        return None
    steps = place == 0
    if layer.batch_first:
        order = ("n", "t", "d", "j") if steps else ("n", "d", "j")
    else:
        order = ("t", "d", "n", "j") if steps else ("d", "n", "j")
    sizes = {"t": layer.steps, "d": 1, "n": layer.batch, "j": layer.hidden}
    shape = tuple(sizes[a] for a in order)

    def placed(part: Tensor, name: str) -> Tensor:
        def element(*i: Expr) -> Expr:
            at = dict(zip(order, i, strict=True))
            value = load(part, (at["t"], at["n"], at["j"]) if steps else (at["n"], at["j"]))
            return cast(value, layer.x.dtype)

        return b.map(name, shape, element)

    pieces = tuple(placed(p, hint if len(wanted) == 1 else f"{hint}{k}") for k, p in enumerate(wanted))
    return concatenated(b, hint, pieces, order.index("d"))


@operator("LSTM")
def lstm(
    b: Builder,
    node: Node,
    x: Tensor,
    weight: Tensor,
    recurrence: Tensor,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    initial_h: Tensor | None = None,
    initial_c: Tensor | None = None,
    peephole: Tensor | None = None,
    to_bytes: ToBytes | None = None,
) -> tuple[Tensor | None, ...]:
    """`to_bytes` rounds what is multiplied with weights: all of x at once, the state at every step."""
    if to_bytes is not None:
        for compute in (made := to_bytes("x", x)):
            b.emit(compute)
        x = made[-1].outputs[0]
    layer = _layer(b, node, 4, x, weight, recurrence, bias, lengths)
    found = [
        _lstm_direction(b, node, layer, d, recurrence, (initial_h, initial_c), peephole, to_bytes)
        for d in _directions(b, node, ("Sigmoid", "Tanh", "Tanh"))
    ]
    return _outputs(b, node, layer, found)


def _lstm_direction(
    b: Builder,
    node: Node,
    layer: RecurrentLayer,
    d: Direction,
    recurrence: Tensor,
    initial: tuple[Tensor | None, Tensor | None],
    peephole: Tensor | None,
    to_bytes: ToBytes | None,
) -> Parts:
    gate, squash, output = d.functions
    given = _projection(b, layer, d, lambda g: True)
    step = Axis("t", layer.steps)
    shape = (layer.batch, layer.hidden)
    h, c = b.tensor(f"{d.hint}_h", shape, layer.wide), b.tensor(f"{d.hint}_c", shape, layer.wide)
    read: tuple[Compute, ...] = () if to_bytes is None else to_bytes(f"{d.hint}_h", h)
    state = read[-1].outputs[0] if read else h
    gates = _recurrence(b, layer, "gates", d, state, _of_direction(b, recurrence, d, "recurrence"), 4)
    sums = gates.outputs[0]

    def raw(g: int, n: Expr, j: Expr, cell: Expr | None = None) -> Expr:
        """A gate before its activation; ONNX orders gates i, o, f, c and peepholes i, o, f."""
        value = load(given, (var(step), n, g, j)) + load(sums, (n, g, j))
        if peephole is None or cell is None:
            return value
        return value + b.wide(peephole, (d.place, j + g * layer.hidden)) * cell

    coupled = bool(node.attributes.get("input_forget", 0))

    def next_c(n: Expr, j: Expr) -> Expr:
        old = load(c, (n, j))
        taken = gate(raw(0, n, j, old))
        kept = 1 - taken if coupled else gate(raw(2, n, j, old))
        return kept * old + taken * squash(raw(3, n, j))

    new_c = b.map_compute(f"{d.hint}_next_c", shape, next_c)

    def next_h(n: Expr, j: Expr) -> Expr:
        cell = load(new_c.output, (n, j))
        return gate(raw(1, n, j, cell)) * output(cell)

    new_h = b.map_compute(f"{d.hint}_next_h", shape, next_h)
    start = (_initial(b, layer, d, "h0", initial[0]), _initial(b, layer, d, "c0", initial[1]))
    return _scan(b, node, layer, d, step, start, (h, c), (*read, gates, new_c, new_h), (new_h.output, new_c.output))


@operator("GRU")
def gru(
    b: Builder,
    node: Node,
    x: Tensor,
    weight: Tensor,
    recurrence: Tensor,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    initial_h: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    layer = _layer(b, node, 3, x, weight, recurrence, bias, lengths)
    direction = _gru_reset_after if node.attributes.get("linear_before_reset", 0) else _gru_reset_before
    found = [direction(b, node, layer, d, recurrence, initial_h) for d in _directions(b, node, ("Sigmoid", "Tanh"))]
    return _outputs(b, node, layer, found)


def _gru_reset_before(
    b: Builder, node: Node, layer: RecurrentLayer, d: Direction, recurrence: Tensor, initial: Tensor | None
) -> Parts:
    """The reset gate applies to the state before its product: two contractions, one after the other."""
    gate, squash = d.functions
    given = _projection(b, layer, d, lambda g: True)
    step = Axis("t", layer.steps)
    shape = (layer.batch, layer.hidden)
    h = b.tensor(f"{d.hint}_h", shape, layer.wide)
    size = layer.hidden
    # a matrix for each product: then each is packed as its product reads it
    early = _of_direction(b, recurrence, d, "recurrence", 0, 2 * size)
    late = _of_direction(b, recurrence, d, "late_recurrence", 2 * size, size)
    gates = _recurrence(b, layer, "gates", d, h, early, 2)

    def raw(g: int, n: Expr, j: Expr) -> Expr:
        return load(given, (var(step), n, g, j)) + load(gates.outputs[0], (n, g, j))

    reset = b.map_compute(f"{d.hint}_reset", shape, lambda n, j: gate(raw(1, n, j)) * load(h, (n, j)))
    hidden = _recurrence(b, layer, "hidden", d, reset.output, late, 1)

    def next_h(n: Expr, j: Expr) -> Expr:
        update = gate(raw(0, n, j))
        candidate = squash(load(given, (var(step), n, 2, j)) + load(hidden.outputs[0], (n, j)))
        return (1 - update) * candidate + update * load(h, (n, j))

    new_h = b.map_compute(f"{d.hint}_next_h", shape, next_h)
    start = (_initial(b, layer, d, "h0", initial),)
    return _scan(b, node, layer, d, step, start, (h,), (gates, reset, hidden, new_h), (new_h.output,))


def _gru_reset_after(
    b: Builder, node: Node, layer: RecurrentLayer, d: Direction, recurrence: Tensor, initial: Tensor | None
) -> Parts:
    """The reset gate applies to the product: one contraction gives all gates."""
    gate, squash = d.functions
    given = _projection(b, layer, d, lambda g: g < 2)
    step = Axis("t", layer.steps)
    shape = (layer.batch, layer.hidden)
    h = b.tensor(f"{d.hint}_h", shape, layer.wide)
    gates = _recurrence(b, layer, "gates", d, h, _of_direction(b, recurrence, d, "recurrence"), 3)
    sums = gates.outputs[0]

    def raw(g: int, n: Expr, j: Expr) -> Expr:
        return load(given, (var(step), n, g, j)) + load(sums, (n, g, j))

    def next_h(n: Expr, j: Expr) -> Expr:
        update = gate(raw(0, n, j))
        inner: Expr = load(sums, (n, 2, j))
        if layer.bias is not None:
            inner = inner + b.wide(layer.bias, (d.place, j + 5 * layer.hidden))
        candidate = squash(load(given, (var(step), n, 2, j)) + gate(raw(1, n, j)) * inner)
        return (1 - update) * candidate + update * load(h, (n, j))

    new_h = b.map_compute(f"{d.hint}_next_h", shape, next_h)
    start = (_initial(b, layer, d, "h0", initial),)
    return _scan(b, node, layer, d, step, start, (h,), (gates, new_h), (new_h.output,))


@operator("RNN")
def rnn(
    b: Builder,
    node: Node,
    x: Tensor,
    weight: Tensor,
    recurrence: Tensor,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    initial_h: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    layer = _layer(b, node, 1, x, weight, recurrence, bias, lengths)
    found = [_rnn_direction(b, node, layer, d, recurrence, initial_h) for d in _directions(b, node, ("Tanh",))]
    return _outputs(b, node, layer, found)


def _rnn_direction(
    b: Builder, node: Node, layer: RecurrentLayer, d: Direction, recurrence: Tensor, initial: Tensor | None
) -> Parts:
    given = _projection(b, layer, d, lambda g: True)
    step = Axis("t", layer.steps)
    shape = (layer.batch, layer.hidden)
    h = b.tensor(f"{d.hint}_h", shape, layer.wide)
    sums = _recurrence(b, layer, "gates", d, h, _of_direction(b, recurrence, d, "recurrence"), 1)

    def next_h(n: Expr, j: Expr) -> Expr:
        return d.functions[0](load(given, (var(step), n, 0, j)) + load(sums.outputs[0], (n, j)))

    new_h = b.map_compute(f"{d.hint}_next_h", shape, next_h)
    start = (_initial(b, layer, d, "h0", initial),)
    return _scan(b, node, layer, d, step, start, (h,), (sums, new_h), (new_h.output,))


def _scan(
    b: Builder,
    node: Node,
    layer: RecurrentLayer,
    d: Direction,
    step: Axis,
    start: tuple[Tensor, ...],
    carry: tuple[Tensor, ...],
    body: tuple[Compute, ...],
    following: tuple[Tensor, ...],
) -> Parts:
    """Emit the Scan; gives the stacked hidden states and the final carries, each only where the node wants it."""
    shape = (layer.batch, layer.hidden)
    wants = [place < len(node.outputs) and bool(node.outputs[place]) for place in range(3)]
    steps = b.tensor(f"{d.hint}_steps", (layer.steps, *shape), layer.wide) if wants[0] else None
    finals = [
        b.tensor(f"{d.hint}_{name}", shape, layer.wide) if wanted else None
        for name, wanted in zip(("last_h", "last_c"), wants[1:], strict=True)
    ]
    shown = following[0]
    if layer.lengths is not None:
        extra, following, shown = _ended(b, layer, d, step, carry, following)
        body = (*body, *extra)
    stacked = () if steps is None else ((shown, steps),)
    b.emit(Scan(step, start, carry, body, following, tuple(finals[: len(carry)]), stacked, d.reverse, b.origin))
    return steps, finals[0], finals[1]


def _ended(
    b: Builder,
    layer: RecurrentLayer,
    d: Direction,
    step: Axis,
    carry: tuple[Tensor, ...],
    following: tuple[Tensor, ...],
) -> tuple[list[Compute], tuple[Tensor, ...], Tensor]:
    """Beyond its end a sequence keeps its states and gives zeros. Backwards it begins there."""
    lengths = layer.lengths
    assert lengths is not None
    shape = (layer.batch, layer.hidden)

    def runs(n: Expr) -> Expr:
        return lt(var(step), cast(b.read(lengths, (n,)), dtypes.index))

    kept = [
        b.map_compute(
            f"{d.hint}_kept{k}",
            shape,
            lambda n, j, new=new, old=old: select(runs(n), load(new, (n, j)), load(old, (n, j))),
        )
        for k, (new, old) in enumerate(zip(following, carry, strict=True))
    ]
    shown = b.map_compute(
        f"{d.hint}_shown",
        shape,
        lambda n, j: select(runs(n), load(following[0], (n, j)), const(0, layer.wide)),
    )
    return [*kept, shown], tuple(m.output for m in kept), shown.output


def _outputs(b: Builder, node: Node, layer: RecurrentLayer, found: list[Parts]) -> tuple[Tensor | None, ...]:
    return (
        _joined(b, node, layer, 0, "", [p[0] for p in found]),
        _joined(b, node, layer, 1, "last_h", [p[1] for p in found]),
        _joined(b, node, layer, 2, "last_c", [p[2] for p in found]),
    )
