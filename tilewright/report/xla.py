"""An ONNX model as a function for JAX, so that XLA compiles it: each node is what NumPy's names in JAX say of it.

Values that do not depend on inputs (shapes, axes) stay NumPy's and are known while JAX traces. With another float type
floats of 32 bits are of that type everywhere, but for what normalisations and softmax compute inside.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Values = Sequence[Any]
Attributes = Mapping[str, Any]

_UNKNOWN = {"auto_pad", "ceil_mode", "storage_order"}  # windows given otherwise than by their padding are refused


def jax_function(model_path: str, precision: str = "float32") -> tuple[Callable[[Any, Any], list[Any]], Any, list[str]]:
    """What takes weights and inputs (by name) and gives the outputs, the weights, and the names of the inputs. A model
    with an operator that is not here is refused by a ValueError."""
    onnx = importlib.import_module("onnx")
    graph = onnx.load(model_path).graph
    missing = sorted({n.op_type for n in graph.node} - set(_OPERATORS) - {"Constant"})
    if missing:
        raise ValueError(f"XLA: no {', '.join(missing)} among the operators that are known here")
    for node in graph.node:
        unknown = sorted({a.name for a in node.attribute if onnx.helper.get_attribute_value(a) not in (0, b"NOTSET")}
                         & _UNKNOWN)  # fmt: skip
        if unknown:
            raise ValueError(f"XLA: {', '.join(unknown)} of {node.op_type} is not known here")
    read = onnx.numpy_helper.to_array
    kept = {t.name: _typed(read(t), precision) for t in graph.initializer}
    weights = {name: array for name, array in kept.items() if array.dtype.kind not in "iub" and array.size > 1}
    small = {name: array for name, array in kept.items() if name not in weights}
    names = [port.name for port in graph.input if port.name not in kept]

    def run(given: Mapping[str, Any], inputs: Mapping[str, Any]) -> list[Any]:
        known: dict[str, Any] = {"": None, **small, **given}
        known.update({name: _typed(value, precision) for name, value in inputs.items()})
        for node in graph.node:
            about = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
            if node.op_type == "Constant":
                known[node.output[0]] = _typed(read(about["value"]), precision)
                continue
            if node.op_type in ("Cast", "ConstantOfShape"):
                about["float"] = precision
            found = _OPERATORS[node.op_type]([known[name] for name in node.input], {**about, "outs": len(node.output)})
            results = found if isinstance(found, tuple) else (found,)
            known.update(zip(node.output, results, strict=False))
        return [known[port.name] for port in graph.output]

    return run, weights, names


def _typed(array: Any, precision: str) -> Any:
    if array.dtype != np.float32 or precision == "float32":
        return array
    return array.astype(_jnp().bfloat16 if precision == "bfloat16" else precision)


def _jnp() -> Any:
    return importlib.import_module("jax.numpy")


def _lax() -> Any:
    return importlib.import_module("jax.lax")


def _module(values: Values) -> Any:
    """NumPy for what is known already."""
    return np if all(v is None or isinstance(v, np.ndarray | np.generic) for v in values) else _jnp()


def _named(name: str) -> Callable[[Values, Attributes], Any]:
    return lambda x, about: getattr(_module(x), name)(*x)


def _whole(values: Any) -> list[int]:
    return [int(n) for n in np.asarray(values).reshape(-1)]


def _wide(compute: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """In float32, and back."""
    return lambda x: compute(x.astype("float32")).astype(x.dtype)


def _axes(x: Values, about: Attributes) -> tuple[int, ...]:
    return tuple(about["axes"] if "axes" in about else _whole(x[1]))


def _reshape(x: Values, about: Attributes) -> Any:
    sizes = _whole(x[1])
    return x[0].reshape([x[0].shape[i] if n == 0 and not about.get("allowzero") else n for i, n in enumerate(sizes)])


def _squeeze(x: Values, about: Attributes) -> Any:
    return _module(x[:1]).squeeze(x[0], _axes(x, about))


def _unsqueeze(x: Values, about: Attributes) -> Any:
    return _module(x[:1]).expand_dims(x[0], _axes(x, about))


def _slice(x: Values, about: Attributes) -> Any:
    starts, ends = _whole(x[1]), _whole(x[2])
    axes = _whole(x[3]) if len(x) > 3 and x[3] is not None else list(range(len(starts)))
    steps = _whole(x[4]) if len(x) > 4 else [1] * len(starts)
    index = [slice(None)] * x[0].ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        index[axis] = slice(start, None if step < 0 and end < -x[0].shape[axis] else end, step)
    return x[0][tuple(index)]


def _split(x: Values, about: Attributes) -> Any:
    axis = about.get("axis", 0)
    places: Any = about["outs"] if len(x) < 2 or x[1] is None else list(np.cumsum(_whole(x[1]))[:-1])
    return tuple(_module(x[:1]).split(x[0], places, axis))


def _gemm(x: Values, about: Attributes) -> Any:
    a, b = (v.T if about.get(name) else v for v, name in zip(x[:2], ("transA", "transB"), strict=True))
    found = about.get("alpha", 1.0) * (a @ b)
    return found if len(x) < 3 else found + about.get("beta", 1.0) * x[2]


def _normalised(x: Values, about: Attributes) -> Any:
    axes = tuple(range(about.get("axis", -1) % x[0].ndim, x[0].ndim))

    def compute(a: Any) -> Any:
        mean = a.mean(axes, keepdims=True)
        apart = a - mean
        return apart / _jnp().sqrt((apart * apart).mean(axes, keepdims=True) + about.get("epsilon", 1e-5))

    found = _wide(compute)(x[0]) * x[1]
    return found if len(x) < 3 else found + x[2]


def _softmax(x: Values, about: Attributes) -> Any:
    nn = importlib.import_module("jax.nn")
    return _wide(lambda a: nn.softmax(a, axis=about.get("axis", -1)))(x[0])


def _pads(about: Attributes, rank: int) -> list[tuple[int, int]]:
    pads = list(about.get("pads", [0] * 2 * rank))
    return list(zip(pads[:rank], pads[rank:], strict=True))


def _convolution(x: Values, about: Attributes) -> Any:
    rank = x[0].ndim - 2
    ones = [1] * rank
    found = _lax().conv_general_dilated(
        x[0], x[1], about.get("strides", ones), _pads(about, rank), rhs_dilation=about.get("dilations", ones),
        feature_group_count=about.get("group", 1),
    )  # fmt: skip
    return found if len(x) < 3 else found + x[2].reshape(-1, *ones)


def _largest(x: Values, about: Attributes) -> Any:
    rank = x[0].ndim - 2
    window, strides = (about.get(name, [1] * rank) for name in ("kernel_shape", "strides"))
    pads = [(0, 0), (0, 0), *_pads(about, rank)]
    least = np.asarray(-np.inf, x[0].dtype)
    apart = (1, 1, *about.get("dilations", [1] * rank))
    return _lax().reduce_window(x[0], least, _lax().max, (1, 1, *window), (1, 1, *strides), pads, None, apart)


def _lstm(x: Values, about: Attributes) -> Any:
    """One direction: the gates are input, output, forget and cell, in this order."""
    jnp, nn = _jnp(), importlib.import_module("jax.nn")
    given, weights, again = x[0], x[1][0], x[2][0]
    size = again.shape[-1]
    bias = (x[3][0, : 4 * size] + x[3][0, 4 * size :]) if len(x) > 3 and x[3] is not None else 0
    states = [x[i] if len(x) > i else None for i in (5, 6)]
    begin = tuple(v[0] if v is not None else jnp.zeros((given.shape[1], size), given.dtype) for v in states)
    fed = given @ weights.T + bias

    def step(state: Any, one: Any) -> Any:
        i, o, f, c = jnp.split(one + state[0] @ again.T, 4, -1)
        cell = nn.sigmoid(f) * state[1] + nn.sigmoid(i) * jnp.tanh(c)
        hidden = nn.sigmoid(o) * jnp.tanh(cell)
        return (hidden, cell), hidden

    (hidden, cell), every = _lax().scan(step, begin, fed)
    return every[:, None], hidden[None], cell[None]


def _cast(x: Values, about: Attributes) -> Any:
    onnx = importlib.import_module("onnx")
    kind = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(about["to"]))
    return _typed(x[0].astype(kind), about["float"])


def _filled(x: Values, about: Attributes) -> Any:
    onnx = importlib.import_module("onnx")
    value = onnx.numpy_helper.to_array(about["value"]) if "value" in about else np.zeros(1, np.float32)
    return _typed(np.full(_whole(x[0]), value.reshape(-1)[0], value.dtype), about["float"])


def _expand(x: Values, about: Attributes) -> Any:
    return _module(x[:1]).broadcast_to(x[0], np.broadcast_shapes(x[0].shape, tuple(_whole(x[1]))))


def _clip(x: Values, about: Attributes) -> Any:
    low, high = (x[i] if len(x) > i else None for i in (1, 2))
    return _jnp().clip(x[0], low, high)


def _reduced(name: str) -> Callable[[Values, Attributes], Any]:
    def compute(x: Values, about: Attributes) -> Any:
        axes = _axes(x, about) if "axes" in about or len(x) > 1 else None
        return _wide(lambda a: getattr(a, name)(axes, keepdims=bool(about.get("keepdims", 1))))(x[0])

    return compute


_OPERATORS: Mapping[str, Callable[[Values, Attributes], Any]] = {
    **{op: _named(name) for op, name in (
        ("Add", "add"), ("Sub", "subtract"), ("Mul", "multiply"), ("Div", "divide"), ("Sqrt", "sqrt"), ("Exp", "exp"),
        ("Tanh", "tanh"), ("Pow", "power"), ("MatMul", "matmul"), ("Equal", "equal"), ("Where", "where"),
        ("Neg", "negative"), ("Abs", "abs"), ("Max", "maximum"), ("Min", "minimum"), ("Greater", "greater"),
        ("Less", "less"), ("Not", "logical_not"),
    )},
    "Cast": _cast, "Clip": _clip, "ConstantOfShape": _filled, "Conv": _convolution, "Expand": _expand, "Gemm": _gemm,
    "LSTM": _lstm, "LayerNormalization": _normalised, "MaxPool": _largest, "Reshape": _reshape, "Slice": _slice,
    "Softmax": _softmax, "Split": _split, "Squeeze": _squeeze, "Unsqueeze": _unsqueeze,
    "ReduceMean": _reduced("mean"), "ReduceSum": _reduced("sum"),
    "Concat": lambda x, about: _module(x).concatenate(x, about["axis"]),
    "Erf": lambda x, about: importlib.import_module("jax.scipy.special").erf(x[0]),
    "Flatten": lambda x, about: x[0].reshape(int(np.prod(x[0].shape[: about.get("axis", 1)])), -1),
    "Gather": lambda x, about: _module(x).take(x[0], x[1], about.get("axis", 0)),
    "GlobalAveragePool": lambda x, about: _wide(lambda a: a.mean(tuple(range(2, a.ndim)), keepdims=True))(x[0]),
    "Identity": lambda x, about: x[0],
    "Relu": lambda x, about: _jnp().maximum(x[0], np.zeros((), x[0].dtype)),
    "Shape": lambda x, about: np.array(x[0].shape, np.int64),
    "Sigmoid": lambda x, about: importlib.import_module("jax.nn").sigmoid(x[0]),
    "Transpose": lambda x, about: x[0].transpose(about.get("perm")),
}  # fmt: skip
