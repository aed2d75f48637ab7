"""Elementwise operators: arithmetic, comparison, logic and activations, all Maps with broadcasting."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.expr import Expr, cast, const, eq, le, lt, maximum, minimum, op, select
from tilewright.ir.forms.graph import Node
from tilewright.ir.forms.tensor import Tensor
from tilewright.ops.builder import MOST_OPERANDS, Builder, dims
from tilewright.ops.registry import operator


def elementwise(b: Builder, element: Callable[..., Expr], *tensors: Tensor) -> Tensor:
    """A Map over the broadcast of the tensors."""
    if len({t.dtype for t in tensors}) > 1:
        raise b.invalid(f"its inputs differ in type: {', '.join(t.dtype.name for t in tensors)}")
    return broadcast_map(b, "", element, *tensors)


def broadcast_map(b: Builder, hint: str, element: Callable[..., Expr], *tensors: Tensor) -> Tensor:
    return b.map(hint, b.broadcast(*tensors), lambda *i: element(*(b.read(t, i) for t in tensors)))


def through_wide(element: Callable[..., Expr]) -> Callable[..., Expr]:
    """The same function, with 16-bit floats widened inside: several rounding steps would lose too much."""

    def widened(*values: Expr) -> Expr:
        dtype = values[0].dtype
        wide = dtypes.accumulator(dtype)
        return cast(element(*(cast(v, wide) for v in values)), dtype)

    return widened


def _unary(name: str, element: Callable[[Expr], Expr], since: int = 1) -> None:
    @operator(name, since=since)
    def lower(b: Builder, node: Node, x: Tensor) -> Tensor:
        return elementwise(b, element, x)


def _binary(name: str, element: Callable[[Expr, Expr], Expr]) -> None:
    @operator(name)
    def lower(b: Builder, node: Node, x: Tensor, y: Tensor) -> Tensor:
        if node.version and node.version < 7:
            y = _old_broadcast(b, node, x, y)
        return elementwise(b, element, x, y)


def _old_broadcast(b: Builder, node: Node, x: Tensor, y: Tensor) -> Tensor:
    """Before operator set 7 the second operand's axes matched the first's from attribute `axis` on."""
    if not node.attributes.get("broadcast", 0) or "axis" not in node.attributes:
        return y
    trailing = x.rank - y.rank - b.axis(node.attributes["axis"], x.rank)
    shape = dims(y) + (1,) * trailing
    return b.map("aligned", shape, lambda *i: b.read(y, i[: y.rank]))


def _variadic(name: str, combine: Callable[[Expr, Expr], Expr]) -> None:
    @operator(name)
    def lower(b: Builder, node: Node, *tensors: Tensor) -> Tensor:
        return elementwise(b, lambda *values: _chain(combine, values), *_combined(b, combine, tensors))


def _combined(b: Builder, combine: Callable[[Expr, Expr], Expr], tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """So few tensors that one expression combines them, by combining the first of them, as often as need be."""
    while len(tensors) > MOST_OPERANDS:
        first = elementwise(b, lambda *values: _chain(combine, values), *tensors[:MOST_OPERANDS])
        tensors = (first, *tensors[MOST_OPERANDS:])
    return tensors


def _chain(combine: Callable[[Expr, Expr], Expr], values: tuple[Expr, ...]) -> Expr:
    result = values[0]
    for value in values[1:]:
        result = combine(result, value)
    return result


# arithmetic


def divide(x: Expr, y: Expr) -> Expr:
    """Integers truncate towards zero; divided by zero they are 0."""
    return op("div" if x.dtype.is_float else "truncdiv", x, y)


_binary("Add", lambda x, y: x + y)
_binary("Sub", lambda x, y: x - y)
_binary("Mul", lambda x, y: x * y)
_binary("Div", divide)
_binary("And", lambda x, y: op("and", x, y))
_binary("Or", lambda x, y: op("or", x, y))
_binary("Xor", lambda x, y: op("ne", x, y))
_binary("Equal", eq)
_binary("Less", lt)
_binary("LessOrEqual", le)
_binary("Greater", lambda x, y: lt(y, x))
_binary("GreaterOrEqual", lambda x, y: le(y, x))
_variadic("Sum", lambda x, y: x + y)
_variadic("Min", minimum)
_variadic("Max", maximum)


@operator("Mean")
def mean(b: Builder, node: Node, *tensors: Tensor) -> Tensor:
    def add(x: Expr, y: Expr) -> Expr:
        return x + y

    parts = _combined(b, add, tensors)
    return elementwise(b, lambda *v: op("div", _chain(add, v), float(len(tensors))), *parts)


@operator("Mod", since=10)
def mod(b: Builder, node: Node, x: Tensor, y: Tensor) -> Tensor:
    if node.attributes.get("fmod", 0):
        return elementwise(b, lambda p, q: op("fmod", p, q), x, y)
    if x.dtype.is_float:
        return elementwise(b, _floored_mod, x, y)
    return elementwise(b, lambda p, q: op("mod", p, q), x, y)


def _floored_mod(x: Expr, y: Expr) -> Expr:
    """The remainder with the divisor's sign, exact where x - floor(x / y) * y would round."""
    rest = op("fmod", x, y)
    wrong = op("and", op("ne", rest, 0), op("ne", lt(rest, 0), lt(y, 0)))
    return select(wrong, rest + y, rest)


@operator("Pow")
def pow_(b: Builder, node: Node, x: Tensor, y: Tensor) -> Tensor:
    exponent = b.value(y)
    if exponent is not None and exponent.size == 1:
        fixed = float(exponent.reshape(()))
        shape = b.broadcast(x, y)
        return b.map("", shape, lambda *i: power(b.read(x, i), fixed))
    return broadcast_map(b, "", _general_power, x, y)


def power(x: Expr, exponent: float) -> Expr:
    """x to a known exponent; small ones as products."""
    if exponent == 1:
        return x
    if exponent == 2:
        return x * x
    if exponent == 3:
        return x * x * x
    if x.dtype.is_float:
        if exponent == 0.5:
            return op("sqrt", x)
        if exponent == -0.5:
            return op("rsqrt", x)
        if exponent == -1:
            return op("div", const(1, x.dtype), x)
        return op("pow", x, const(exponent, x.dtype))
    return _general_power(x, const(exponent, dtypes.float64))


def _general_power(x: Expr, y: Expr) -> Expr:
    if x.dtype.is_float:
        return op("pow", x, cast(y, x.dtype))
    real = op("pow", cast(x, dtypes.float64), cast(y, dtypes.float64))
    # a true power of integers is an integer; rounding undoes the last bit of the real power
    return cast(op("round", real) if y.dtype.is_int else real, x.dtype)


# one operand

# Where e^x is still a number, and x * x.
_EXP_REACH = {"float32": 88.0, "float64": 709.0}
_SQUARE_REACH = {"float32": 2.0**28, "float64": 2.0**56}
# As many terms as the type has digits for: of sinh up to 1, of the arc tangent up to tan(pi/8).
_SINH_TERMS = {"float32": (9, 7, 5, 3), "float64": (17, 15, 13, 11, 9, 7, 5, 3)}
_EXP_TERMS = {"float32": range(9, 1, -1), "float64": range(16, 1, -1)}  # of e^x - 1 up to 1/2
_ATAN_TERMS = {"float32": range(17, 0, -2), "float64": range(41, 0, -2)}
_MISH_REACH = 30.0  # beyond it is x


def _sign(x: Expr) -> Expr:
    if x.dtype.kind == "u":
        return select(lt(0, x), const(1, x.dtype), const(0, x.dtype))
    return op("sign", x)


def _tan(x: Expr) -> Expr:
    return op("div", op("sin", x), op("cos", x))


def _odd(x: Expr, positive: Callable[[Expr], Expr]) -> Expr:
    """An odd function by its values of |x|; zeros keep their sign."""
    value = positive(op("abs", x))
    return select(eq(x, 0), x, select(lt(x, 0), -value, value))


def log_of_one_more(x: Expr) -> Expr:
    """log(1 + x), exact to the last places also where x is small: what 1 + x rounds away is made good by a factor."""
    sum_ = x + 1
    kept = sum_ - 1
    factor = select(eq(kept, x), const(1, x.dtype), op("div", x, kept))
    return select(eq(sum_, 1), x, op("log", sum_) * factor)


def _exp_less_one_of_negative(x: Expr) -> Expr:
    """e^x - 1 for x <= 0, to the last places also where x is small and the difference would lose them."""
    series: Expr = const(0, x.dtype)
    for n in _EXP_TERMS[x.dtype.name]:
        series = (series + 1 / math.factorial(n)) * x
    return select(lt(-0.5, x), x + x * series, op("exp", x) - 1)


def _softsign(x: Expr) -> Expr:
    size = op("abs", x)
    return select(lt(_SQUARE_REACH[x.dtype.name], size), op("sign", x), op("div", x, size + 1))


def _halves(size: Expr) -> tuple[Expr, Expr, Expr]:
    """e^size / 2 and e^-size / 2 for size >= 0, and whether they are beyond the reach of e^size itself."""
    far = lt(_EXP_REACH[size.dtype.name], size)
    power_ = op("exp", select(far, size * 0.5, size))
    return select(far, power_ * 0.5 * power_, power_ * 0.5), op("div", const(0.5, size.dtype), power_), far


def hyperbolic_sine(x: Expr) -> Expr:
    def positive(size: Expr) -> Expr:
        square = size * size
        series: Expr = const(0, x.dtype)
        for n in _SINH_TERMS[x.dtype.name]:
            series = (series + 1 / math.factorial(n)) * square
        grown, shrunk, far = _halves(size)
        return select(lt(size, 1), size + size * series, select(far, grown, grown - shrunk))

    return _odd(x, positive)


def _cosh(x: Expr) -> Expr:
    grown, shrunk, far = _halves(op("abs", x))
    return select(far, grown, grown + shrunk)


def _log_of_twice(x: Expr, otherwise: Expr) -> Expr:
    """log(2x) where x is large, log(1 + otherwise) elsewhere."""
    large = lt(_SQUARE_REACH[x.dtype.name], x)
    logarithm = log_of_one_more(select(large, x, otherwise))
    return select(large, logarithm + math.log(2), logarithm)


def _asinh(x: Expr) -> Expr:
    def positive(size: Expr) -> Expr:
        square = size * size
        return _log_of_twice(size, size + op("div", square, op("sqrt", square + 1) + 1))

    return _odd(x, positive)


def _acosh(x: Expr) -> Expr:
    above = x - 1
    value = _log_of_twice(x, above + op("sqrt", above * (above + 2)))
    return select(lt(x, 1), const(math.nan, x.dtype), value)


def _atanh(x: Expr) -> Expr:
    return _odd(x, lambda size: log_of_one_more(op("div", size * 2, 1 - size)) * 0.5)


def arc_tangent(x: Expr) -> Expr:
    """Arc tangent: |x| > 1 through pi/2 - atan(1/x), half the angle, then the series."""

    def positive(size: Expr) -> Expr:
        big = lt(1, size)
        t = select(big, op("div", const(1, x.dtype), size), size)
        t = op("div", t, op("sqrt", t * t + 1) + 1)
        square = t * t
        first, *others = _ATAN_TERMS[x.dtype.name]
        series: Expr = const(1 / first, x.dtype)
        for k in others:
            series = const(1 / k, x.dtype) - square * series
        angle = t * series * 2
        return select(big, const(math.pi / 2, x.dtype) - angle, angle)

    return _odd(x, positive)


def _asin(x: Expr) -> Expr:
    return arc_tangent(op("div", x, op("sqrt", (1 - x) * (1 + x))))


def _softplus(x: Expr) -> Expr:
    # log(1 + e^x) without overflow: the exponential of -|x| is at most 1
    return maximum(x, 0) + log_of_one_more(op("exp", -op("abs", x)))


def _mish(x: Expr) -> Expr:
    """x tanh(log(1 + e^x)) as x (e^2x + 2e^x) / (e^2x + 2e^x + 2), where nothing cancels. Far below zero it is x e^x,
    and e^x alone would be denormal where that is not."""
    far = lt(x, -_EXP_REACH[x.dtype.name] + 8)
    power_ = op("exp", select(far, x * 0.5, minimum(x, _MISH_REACH)))
    grown = power_ * (power_ + 2)
    near = select(lt(_MISH_REACH, x), x, x * op("div", grown, grown + 2))
    return select(far, x * power_ * power_, near)


def erf_gelu(x: Expr) -> Expr:
    # halved before the product: twice the largest numbers is none any more
    return x * ((op("erf", x * math.sqrt(0.5)) + 1) * 0.5)


def tanh_gelu(x: Expr) -> Expr:
    inner = (x + x * x * x * 0.044715) * math.sqrt(2 / math.pi)
    return x * ((op("tanh", inner) + 1) * 0.5)


_unary("Abs", lambda x: x if x.dtype.kind == "u" else op("abs", x))
_unary("Neg", lambda x: -x)
_unary("Sign", _sign)
_unary("Relu", lambda x: maximum(x, 0))
_unary("Not", lambda x: op("not", x))
_unary("IsNaN", lambda x: op("isnan", x))
_unary("Reciprocal", lambda x: op("div", const(1, x.dtype), x))
for _name in ("Exp", "Log", "Sqrt", "Tanh", "Erf", "Sigmoid", "Sin", "Cos", "Floor", "Ceil", "Round"):
    _unary(_name, partial(op, _name.lower()))
for _name, _function in {
    "Tan": _tan,
    "Sinh": hyperbolic_sine,
    "Cosh": _cosh,
    "Asinh": _asinh,
    "Acosh": _acosh,
    "Atanh": _atanh,
    "Atan": arc_tangent,
    "Asin": _asin,
    "Acos": lambda x: arc_tangent(op("sqrt", op("div", 1 - x, x + 1))) * 2,
    "Softplus": _softplus,
    "Softsign": _softsign,
    "Mish": _mish,
    "HardSwish": lambda x: x * maximum(minimum(x * (1 / 6) + 0.5, 1), 0),
}.items():
    _unary(_name, through_wide(_function))


@operator("Gelu")
def gelu(b: Builder, node: Node, x: Tensor) -> Tensor:
    kind = node.attributes.get("approximate", "none")
    if kind not in ("none", "tanh"):
        raise b.unsupported(f"approximate='{kind}' is not known; use 'none' or 'tanh'")
    return elementwise(b, through_wide(erf_gelu if kind == "none" else tanh_gelu), x)


@operator("FastGelu", domain="com.microsoft")
def fast_gelu(b: Builder, node: Node, x: Tensor, bias: Tensor | None = None) -> Tensor:
    if bias is None:
        return elementwise(b, through_wide(tanh_gelu), x)
    return elementwise(b, through_wide(lambda v, w: tanh_gelu(v + w)), x, bias)


@operator("Gelu", domain="com.microsoft")
def microsoft_gelu(b: Builder, node: Node, x: Tensor) -> Tensor:
    return elementwise(b, through_wide(erf_gelu), x)


@operator("IsInf", since=10)
def is_inf(b: Builder, node: Node, x: Tensor) -> Tensor:
    negative = bool(node.attributes.get("detect_negative", 1))
    positive = bool(node.attributes.get("detect_positive", 1))

    def element(v: Expr) -> Expr:
        if negative and positive:
            return op("isinf", v)
        if not negative and not positive:
            return op("and", op("isinf", v), const(False, dtypes.bool_))
        return op("and", op("isinf", v), lt(0, v) if positive else lt(v, 0))

    return elementwise(b, element, x)


# activations with parameters


def activation(name: str, attributes: Any) -> Callable[[Expr], Expr] | None:
    """An activation by its ONNX name with its parameters; also what recurrent operators name."""
    simple: dict[str, Callable[[Expr], Expr]] = {
        "relu": lambda x: maximum(x, 0),
        "tanh": lambda x: op("tanh", x),
        "sigmoid": lambda x: op("sigmoid", x),
        "softsign": _softsign,
        "softplus": _softplus,
    }
    key = name.lower()
    if key in simple:
        return simple[key]
    defaults = {
        "affine": (1.0, 0.0),
        "leakyrelu": (0.01, 0.0),
        "thresholdedrelu": (1.0, 0.0),
        "scaledtanh": (1.0, 1.0),
        "hardsigmoid": (0.2, 0.5),
        "elu": (1.0, 0.0),
        "celu": (1.0, 0.0),
        "selu": (1.67326319217681884765625, 1.05070102214813232421875),
        "swish": (1.0, 0.0),
    }
    if key not in defaults:
        return None
    alpha = float(attributes.get("alpha", defaults[key][0]))
    beta = float(attributes.get("gamma" if key == "selu" else "beta", defaults[key][1]))
    table: dict[str, Callable[[Expr], Expr]] = {
        "affine": lambda x: x * alpha + beta,
        "leakyrelu": lambda x: select(lt(x, 0), x * alpha, x),
        "thresholdedrelu": lambda x: select(lt(alpha, x), x, const(0, x.dtype)),
        "scaledtanh": lambda x: op("tanh", x * beta) * alpha,
        "hardsigmoid": lambda x: maximum(minimum(x * alpha + beta, 1), 0),
        "elu": lambda x: select(lt(x, 0), _exp_less_one_of_negative(x) * alpha, x),
        "celu": lambda x: select(lt(x, 0), _exp_less_one_of_negative(x * (1 / alpha)) * alpha, x),
        "selu": lambda x: select(lt(x, 0), _exp_less_one_of_negative(x) * alpha, x) * beta,
        "swish": lambda x: x * op("sigmoid", x if alpha == 1 else x * alpha),
    }
    return table[key]


@operator("LeakyRelu", "ThresholdedRelu", "HardSigmoid", "Elu", "Celu", "Selu", "Swish")
def parametric(b: Builder, node: Node, x: Tensor) -> Tensor:
    element = activation(node.op, node.attributes)
    assert element is not None
    return elementwise(b, through_wide(element), x)


@operator("PRelu")
def prelu(b: Builder, node: Node, x: Tensor, slope: Tensor) -> Tensor:
    if node.version and node.version < 7 and slope.rank == 1 and dims(slope)[0] > 1:
        slope = b.map("slope", (*dims(slope), *(1,) * (x.rank - 2)), lambda *i: b.read(slope, i[:1]))
    return elementwise(b, lambda v, s: select(lt(v, 0), v * s, v), x, slope)


@operator("Shrink", since=9)
def shrink(b: Builder, node: Node, x: Tensor) -> Tensor:
    lambd, bias = float(node.attributes.get("lambd", 0.5)), float(node.attributes.get("bias", 0.0))

    def element(v: Expr) -> Expr:
        zero = const(0, v.dtype)
        return select(
            lt(v, const(-lambd, v.dtype)),
            v + const(bias, v.dtype),
            select(lt(const(lambd, v.dtype), v), v - const(bias, v.dtype), zero),
        )

    return elementwise(b, element, x)


@operator("Clip", since=1)
def clip_by_attributes(b: Builder, node: Node, x: Tensor) -> Tensor:
    def element(v: Expr) -> Expr:
        if "min" in node.attributes:
            v = maximum(v, const(node.attributes["min"], v.dtype))
        if "max" in node.attributes:
            v = minimum(v, const(node.attributes["max"], v.dtype))
        return v

    return elementwise(b, element, x)


@operator("Clip", since=11)
def clip(b: Builder, node: Node, x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    def element(*i: Expr) -> Expr:
        v = b.read(x, i)
        if low is not None:
            v = maximum(v, b.read(low, ()))
        if high is not None:
            v = minimum(v, b.read(high, ()))
        return v

    return b.map("", dims(x), element)


@operator("Where", since=9)
def where(b: Builder, node: Node, condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    if x.dtype is not y.dtype:
        raise b.invalid(f"its inputs differ in type: {x.dtype.name}, {y.dtype.name}")
    return broadcast_map(b, "", select, condition, x, y)
