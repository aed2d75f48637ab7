"""ATen's elementwise functions and makers of tensors as operators of the Graph: one row a name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from tilewright.frontend.pytorch.emitter import Emitted, Emitter, Number, Operand, Results, Size, row
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.dtypes import DType


def dtype_of(dtype: torch.dtype) -> DType | None:
    """The element type of a torch type, or None where Tilewright has no such type."""
    name = str(dtype).removeprefix("torch.")
    return next((d for d in dtypes.ALL if d.name == name), None)


def promoted(*operands: Operand) -> DType:
    """The type in which PyTorch compares or combines operands."""
    stand_ins = [
        torch.empty((1,) * x.rank, dtype=getattr(torch, x.dtype.name), device="meta") if isinstance(x, Emitted) else x
        for x in operands
    ]
    found = dtype_of(torch.result_type(stand_ins[0], stand_ins[1]))
    assert found is not None
    return found


# arithmetic

_OF_FLAGS = {"Add": "Or", "Mul": "And", "Max": "Or", "Min": "And"}


def _combining(name: str, op: str) -> None:
    @row(name)
    def combine(m: Emitter, out: Emitted, x: Operand, y: Operand, alpha: Number = 1) -> Results:
        left, right = m.typed(x, out.dtype), m.typed(y, out.dtype)
        if alpha != 1:
            right = m.new("Mul", right, m.number(alpha, out.dtype))
        return m.new(_OF_FLAGS.get(op, op) if out.dtype is dtypes.bool_ else op, left, right)


for _name, _op in {"add": "Add", "sub": "Sub", "mul": "Mul", "maximum": "Max", "minimum": "Min"}.items():
    _combining(f"aten.{_name}", _op)


@row("aten.rsub")
def rsub(m: Emitter, out: Emitted, x: Operand, y: Operand, alpha: Number = 1) -> Results:
    right = m.typed(x, out.dtype)
    if alpha != 1:
        right = m.new("Mul", right, m.number(alpha, out.dtype))
    return m.new("Sub", m.typed(y, out.dtype), right)


@row("aten.div")
def div(m: Emitter, out: Emitted, x: Operand, y: Operand, rounding_mode: str | None = None) -> Results:
    left, right = m.typed(x, out.dtype), m.typed(y, out.dtype)
    if rounding_mode is None:
        return m.new("Div", left, right)
    if not out.dtype.is_float:
        if rounding_mode == "floor":
            left = m.new("Sub", left, m.new("Mod", left, right))
        return m.new("Div", left, right)
    ratio = m.new("Div", left, right)
    return m.new("Floor", ratio) if rounding_mode == "floor" else _truncated(m, ratio)


def _truncated(m: Emitter, x: str) -> str:
    return m.new("Mul", m.new("Sign", x), m.new("Floor", m.new("Abs", x)))


@row("aten.remainder")
def remainder(m: Emitter, out: Emitted, x: Operand, y: Operand) -> Results:
    return m.new("Mod", m.typed(x, out.dtype), m.typed(y, out.dtype))


@row("aten.fmod")
def fmod(m: Emitter, out: Emitted, x: Operand, y: Operand) -> Results:
    return m.new("Mod", m.typed(x, out.dtype), m.typed(y, out.dtype), fmod=1)


@row("aten.pow")
def pow_(m: Emitter, out: Emitted, x: Operand, y: Operand) -> Results:
    if isinstance(y, Emitted):
        return m.new("Pow", m.typed(x, out.dtype), m.typed(y, out.dtype))
    return m.new("Pow", m.typed(x, out.dtype), m.number(y, out.dtype if out.dtype.is_float else dtypes.int64))


@row("aten.atan2")
def atan2(m: Emitter, out: Emitted, y: Operand, x: Operand) -> Results:
    return m.new("Atan2", m.typed(y, out.dtype), m.typed(x, out.dtype), domain="tilewright")


@row("aten.clamp")
def clamp(m: Emitter, out: Emitted, x: Emitted, low: Operand | None = None, high: Operand | None = None,
          **named: Operand) -> Results:  # fmt: skip
    low, high = named.get("min", low), named.get("max", high)  # as an argument's name, `min` would hide Python's
    result = m.typed(x, out.dtype)
    for op, bound in (("Max", low), ("Min", high)):
        if bound is not None:
            result = m.new(op, result, m.typed(bound, out.dtype))
    return result


@row("aten.clamp_min")
def clamp_min(m: Emitter, out: Emitted, x: Emitted, low: Operand) -> Results:
    return clamp(m, out, x, low, None)


@row("aten.clamp_max")
def clamp_max(m: Emitter, out: Emitted, x: Emitted, high: Operand) -> Results:
    return clamp(m, out, x, None, high)


@row("aten.hardtanh")
def hardtanh(m: Emitter, out: Emitted, x: Emitted, low: Number = -1, high: Number = 1) -> Results:
    return clamp(m, out, x, low, high)


# comparison, logic, choice


def _comparing(name: str, op: str, negated: bool = False) -> None:
    @row(name)
    def compare(m: Emitter, out: Emitted, x: Operand, y: Operand) -> Results:
        dtype = promoted(x, y)
        found = m.new(op, m.typed(x, dtype), m.typed(y, dtype))
        return m.new("Not", found) if negated else found


for _name, _op in {"eq": "Equal", "lt": "Less", "le": "LessOrEqual", "gt": "Greater", "ge": "GreaterOrEqual"}.items():
    _comparing(f"aten.{_name}", _op)
_comparing("aten.ne", "Equal", negated=True)


def _logic(name: str, op: str) -> None:
    @row(f"aten.logical_{name}")
    def combine(m: Emitter, out: Emitted, *flags: Operand) -> Results:
        return m.new(op, *(m.typed(flag, dtypes.bool_) for flag in flags))


for _name, _op in {"and": "And", "or": "Or", "xor": "Xor", "not": "Not"}.items():
    _logic(_name, _op)


def _bits(name: str, op: str) -> None:
    @row(name)
    def combine(m: Emitter, out: Emitted, *values: Operand) -> Results:
        kind = op if out.dtype is dtypes.bool_ else f"Bitwise{op}"
        return m.new(kind, *(m.typed(value, out.dtype) for value in values))


for _name, _op in {"and": "And", "or": "Or", "xor": "Xor", "not": "Not"}.items():
    _bits(f"aten.bitwise_{_name}", _op)


def _shift(name: str, direction: str) -> None:
    @row(name)
    def shift(m: Emitter, out: Emitted, x: Operand, y: Operand) -> Results:
        return m.new("BitShift", m.typed(x, out.dtype), m.typed(y, out.dtype), direction=direction)


for _name in ("left", "right"):
    _shift(f"aten.bitwise_{_name}_shift", _name.upper())
    _shift(f"aten.__{_name[0]}shift__", _name.upper())


@row("aten.where")
def where(m: Emitter, out: Emitted, condition: Emitted, x: Operand, y: Operand) -> Results:
    return m.new("Where", m.typed(condition, dtypes.bool_), m.typed(x, out.dtype), m.typed(y, out.dtype))


@row("aten.masked_fill")
def masked_fill(m: Emitter, out: Emitted, x: Emitted, mask: Emitted, value: Operand) -> Results:
    return m.new("Where", m.typed(mask, dtypes.bool_), m.typed(value, out.dtype), m.typed(x, out.dtype))


# functions of one operand


def _unary(name: str, op: str, domain: str = "", **attributes: Any) -> None:
    @row(name)
    def apply(m: Emitter, out: Emitted, x: Emitted) -> Results:
        return m.new(op, m.typed(x, out.dtype), domain=domain, **attributes)


for _name in ("abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "erf", "exp", "floor",
              "log", "mish", "neg", "reciprocal", "relu", "sigmoid", "sign", "sin", "sinh", "sqrt", "tan",
              "tanh"):  # fmt: skip
    _unary(f"aten.{_name}", _name.title())
_unary("aten.log1p", "Log1p", "tilewright")
_unary("aten.expm1", "Expm1", "tilewright")
_unary("aten.round.default", "Round")
_unary("aten.silu", "Swish")
_unary("aten.hardswish", "HardSwish")
_unary("aten.hardsigmoid", "HardSigmoid", alpha=1 / 6, beta=0.5)
_unary("aten.selu", "Selu")


@row("aten.isnan")
def isnan(m: Emitter, out: Emitted, x: Emitted) -> Results:
    return m.new("IsNaN", x) if x.dtype.is_float else m.filled(x.shape, False, dtypes.bool_)


@row("aten.isinf")
def isinf(m: Emitter, out: Emitted, x: Emitted) -> Results:
    return m.new("IsInf", x) if x.dtype.is_float else m.filled(x.shape, False, dtypes.bool_)


@row("aten.rsqrt")
def rsqrt(m: Emitter, out: Emitted, x: Emitted) -> Results:
    return m.new("Pow", m.typed(x, out.dtype), m.number(-0.5, out.dtype))


@row("aten.exp2")
def exp2(m: Emitter, out: Emitted, x: Emitted) -> Results:
    return m.new("Pow", m.filled((1,) * x.rank, 2, out.dtype), m.typed(x, out.dtype))


@row("aten.log2")
def log2(m: Emitter, out: Emitted, x: Emitted) -> Results:
    return m.new("Mul", m.new("Log", m.typed(x, out.dtype)), m.number(1 / math.log(2), out.dtype))


@row("aten.log10")
def log10(m: Emitter, out: Emitted, x: Emitted) -> Results:
    return m.new("Mul", m.new("Log", m.typed(x, out.dtype)), m.number(1 / math.log(10), out.dtype))


@row("aten.erfc")
def erfc(m: Emitter, out: Emitted, x: Emitted) -> Results:
    return m.new("Sub", m.number(1, out.dtype), m.new("Erf", m.typed(x, out.dtype)))


@row("aten.trunc")
def trunc(m: Emitter, out: Emitted, x: Emitted) -> Results:
    return _truncated(m, x.name) if x.dtype.is_float else x.name


@row("aten.gelu")
def gelu(m: Emitter, out: Emitted, x: Emitted, approximate: str = "none") -> Results:
    return m.new("Gelu", x, approximate=approximate)


@row("aten.leaky_relu")
def leaky_relu(m: Emitter, out: Emitted, x: Emitted, slope: Number = 0.01) -> Results:
    return m.new("LeakyRelu", x, alpha=float(slope))


@row("aten.elu")
def elu(m: Emitter, out: Emitted, x: Emitted, alpha: Number = 1, scale: Number = 1, input_scale: Number = 1) -> Results:
    if input_scale != 1:
        raise m.refuse(f"input_scale {input_scale} is not supported")
    result = m.new("Elu", x, alpha=float(alpha))
    return result if scale == 1 else m.new("Mul", result, m.number(scale, x.dtype))


@row("aten.softplus")
def softplus(m: Emitter, out: Emitted, x: Emitted, beta: Number = 1, threshold: Number = 20) -> Results:
    scaled = x.name if beta == 1 else m.new("Mul", x, m.number(beta, x.dtype))
    smooth = m.new("Softplus", scaled)
    smooth = smooth if beta == 1 else m.new("Div", smooth, m.number(beta, x.dtype))
    return m.new("Where", m.new("Greater", scaled, m.number(threshold, x.dtype)), x, smooth)


@row("aten.log_sigmoid_forward", "aten.log_sigmoid")
def log_sigmoid(m: Emitter, out: Emitted | tuple[Emitted, ...], x: Emitted) -> Results:
    found = m.new("Neg", m.new("Softplus", m.new("Neg", x)))
    return found if isinstance(out, Emitted) else (found, None)


@row("aten.prelu", "aten._prelu_kernel")
def prelu(m: Emitter, out: Emitted, x: Emitted, slope: Emitted) -> Results:
    if slope.rank == 1 and x.rank > 1:
        return m.new("PRelu", x, m.reshaped(slope, (-1, *(1,) * (x.rank - 2))))
    return m.new("PRelu", x, slope)


# types and copies


@row("aten._to_copy", "aten.to", "prims.convert_element_type", "aten.clone", "aten.detach", "aten.alias",
     "aten.contiguous", "aten.lift_fresh_copy", "aten.positive", "aten.conj_physical",
     "tilewright.copied", "tilewright.lent", "tilewright.given_back", "tilewright.one_of")  # fmt: skip
def copied(m: Emitter, out: Emitted, x: Emitted, *_: Any, **__: Any) -> Results:
    return m.typed(x, out.dtype)


@row("aten.copy")
def copy(m: Emitter, out: Emitted, x: Emitted, source: Emitted, non_blocking: bool = False) -> Results:
    typed = Emitted(m.typed(source, out.dtype), out.dtype, source.shape)
    return m.expanded(typed, out.shape)


@row("aten.native_dropout", "aten.dropout")
def dropout(m: Emitter, out: Emitted | tuple[Emitted, ...], x: Emitted, p: float, train: bool | None) -> Results:
    if train and p > 0:
        raise m.refuse("dropout in training mode draws random numbers; call module.eval() first")
    if isinstance(out, Emitted):
        return x.name
    return x.name, m.filled(x.shape, True, dtypes.bool_)


# tensors out of nothing


@row("aten.full", "aten.new_full")
def full(m: Emitter, out: Emitted, *arguments: Any, **_: Any) -> Results:
    return _full_of(m, out, arguments[-1])


@row("aten.full_like", "aten.fill")
def full_like(m: Emitter, out: Emitted, x: Emitted, value: Operand, **_: Any) -> Results:
    return _full_of(m, out, value)


def _full_of(m: Emitter, out: Emitted, value: Operand) -> str:
    if not isinstance(value, Emitted):
        return m.filled(out.shape, value, out.dtype)
    return m.expanded(Emitted(m.typed(value, out.dtype), out.dtype, value.shape), out.shape)


@row("aten.zeros", "aten.zeros_like", "aten.new_zeros", "aten.empty", "aten.empty_like", "aten.new_empty",
     "aten.empty_strided", "aten.new_empty_strided", "aten.empty_permuted")  # fmt: skip
def zeros(m: Emitter, out: Emitted, *_: Any, **__: Any) -> Results:
    return m.filled(out.shape, 0, out.dtype)


@row("aten.ones", "aten.ones_like", "aten.new_ones")
def ones(m: Emitter, out: Emitted, *_: Any, **__: Any) -> Results:
    return m.filled(out.shape, 1, out.dtype)


@row("aten.scalar_tensor")
def scalar_tensor(m: Emitter, out: Emitted, value: Operand, **_: Any) -> Results:
    return m.typed(value, out.dtype)


@row("aten.arange.start_step", "aten.arange.start", "aten.arange.default")
def arange(m: Emitter, out: Emitted, *bounds: Operand, **_: Any) -> Results:
    start, step = (bounds[0] if len(bounds) > 1 else 0), (bounds[2] if len(bounds) > 2 else 1)
    if isinstance(out.shape[0], Size) or isinstance(start, Emitted) or isinstance(step, Emitted):
        end = bounds[0] if len(bounds) == 1 else bounds[1]
        return m.new("Range", *(m.typed(n, out.dtype) for n in (start, end, step)))
    at = np.arange(out.shape[0])
    values = at * step + start if out.dtype.is_int else start + at.astype(np.float64) * step
    return m.constant(values.astype(out.dtype.numpy))


@row("prims.iota")
def iota(m: Emitter, out: Emitted, length: Any, *, start: int, step: int, **_: Any) -> Results:
    if isinstance(out.shape[0], Size):
        numbers = (m.typed(length, out.dtype), m.number(step, out.dtype), m.number(start, out.dtype))
        counted = m.new("Range", m.number(0, out.dtype), numbers[0], m.number(1, out.dtype))
        return m.new("Add", m.new("Mul", counted, numbers[1]), numbers[2])
    return m.constant((np.arange(length) * step + start).astype(out.dtype.numpy))


@row("aten.eye")
def eye(m: Emitter, out: Emitted, *_: Any, **__: Any) -> Results:
    return m.constant(np.eye(*out.shape, dtype=out.dtype.numpy))
