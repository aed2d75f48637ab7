"""ATen's recurrent layers as operators of the Graph: a node a layer, its gates in the order that ONNX has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilewright.frontend.pytorch.emitter import Emitted, Emitter, Results, row

# The places of PyTorch's gates in ONNX's order.
_GATES = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN": (0,)}


def _recurrence(name: str, op: str, **attributes: Any) -> None:
    @row(name)
    def layers(m: Emitter, out: tuple[Emitted, ...], x: Emitted, start: Emitted | Sequence[Emitted],
               weights: Sequence[Emitted],
               has_biases: bool, count: int, dropout: float, train: bool, bidirectional: bool,
               batch_first: bool) -> Results:  # fmt: skip
        if train and dropout:
            raise m.refuse("dropout in training mode draws random numbers; call module.eval() first")
        states = [start] if isinstance(start, Emitted) else list(start)
        directions, parts = 2 if bidirectional else 1, 4 if has_biases else 2
        if len(weights) != count * directions * parts:
            raise m.refuse("a recurrent layer with projections is not supported")
        current = m.transposed(x.name, (1, 0, 2)) if batch_first else x.name
        steps, batch = (x.shape[1], x.shape[0]) if batch_first else x.shape[:2]
        finals: list[list[str]] = [[] for _ in states]
        for layer in range(count):
            given = [weights[(layer * directions + d) * parts :][:parts] for d in range(directions)]
            matrices = [_stacked(m, op, [g[k] for g in given]) for k in (0, 1)]
            bias = _biases(m, op, given) if has_biases else None
            begin = [m.sliced(s.name, 0, layer * directions, (layer + 1) * directions) for s in states]
            hidden = weights[1].shape[1]
            found = m.several(
                op, 1 + len(states), current, *matrices, bias, None, *begin, hidden_size=hidden,
                direction="bidirectional" if bidirectional else "forward", **attributes,
            )  # fmt: skip
            for kept, final in zip(finals, found[1:], strict=True):
                kept.append(final)
            # [steps, directions, batch, hidden] to [steps, batch, directions * hidden]
            current = m.reshape(m.transposed(found[0], (0, 2, 1, 3)), (steps, batch, directions * hidden))
        ends = [kept[0] if len(kept) == 1 else m.new("Concat", *kept, axis=0) for kept in finals]
        return (m.transposed(current, (1, 0, 2)) if batch_first else current, *ends)


def _ordered(m: Emitter, op: str, x: Emitted) -> str:
    """A weight or bias of all gates, in ONNX's order."""
    order = _GATES[op]
    if len(order) == 1:
        return x.name
    parts = m.several("Split", len(order), x, m.integers([x.shape[0] // len(order)] * len(order)), axis=0)
    return m.new("Concat", *(parts[k] for k in order), axis=0)


def _stacked(m: Emitter, op: str, given: Sequence[Emitted]) -> str:
    """Both directions, [directions, gates * hidden, columns]."""
    shaped = [m.reshape(_ordered(m, op, x), (1, *x.shape)) for x in given]
    return shaped[0] if len(shaped) == 1 else m.new("Concat", *shaped, axis=0)


def _biases(m: Emitter, op: str, given: Sequence[Sequence[Emitted]]) -> str:
    """[directions, 2 * gates * hidden]: the input's, then the state's."""
    shaped = []
    for parts in given:
        both = m.new("Concat", _ordered(m, op, parts[2]), _ordered(m, op, parts[3]), axis=0)
        shaped.append(m.reshape(both, (1, 2 * parts[2].shape[0])))
    return shaped[0] if len(shaped) == 1 else m.new("Concat", *shaped, axis=0)


_recurrence("aten.lstm.input", "LSTM")
_recurrence("aten.gru.input", "GRU", linear_before_reset=1)
_recurrence("aten.rnn_tanh.input", "RNN")


_LSTM_MODE = 2  # PyTorch's number for it


@row("aten.mkldnn_rnn_layer")
def one_layer(m: Emitter, out: tuple[Emitted, ...], x: Emitted, of_input: Emitted, of_state: Emitted, bias: Emitted,
              state_bias: Emitted, hidden: Emitted, cell: Emitted, reverse: bool, batch_sizes: Sequence[int], mode: int,
              hidden_size: int, count: int, has_biases: bool, bidirectional: bool, batch_first: bool,
              train: bool) -> Results:  # fmt: skip
    """One layer in one direction, as torch.compile finds nn.LSTM on CPUs."""
    if mode != _LSTM_MODE or batch_sizes or count != 1 or bidirectional or train:
        raise m.refuse("only one layer of an LSTM in one direction, of sequences of one length, is supported")
    current = m.transposed(x.name, (1, 0, 2)) if batch_first else x.name
    steps, batch = (x.shape[1], x.shape[0]) if batch_first else x.shape[:2]
    matrices = [_stacked(m, "LSTM", [w]) for w in (of_input, of_state)]
    given = _biases(m, "LSTM", [(of_input, of_state, bias, state_bias)]) if has_biases else None
    begin = [m.reshaped(s, (1, batch, hidden_size)) for s in (hidden, cell)]
    found = m.several(
        "LSTM", 3, current, *matrices, given, None, *begin, hidden_size=hidden_size,
        direction="reverse" if reverse else "forward",
    )  # fmt: skip
    every = m.reshape(found[0], (steps, batch, hidden_size))
    ends = [m.reshape(name, value.shape) for name, value in zip(found[1:], out[1:3], strict=True)]
    return m.transposed(every, (1, 0, 2)) if batch_first else every, *ends, None
