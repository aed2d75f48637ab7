"""Takes the product under a sum apart, so that each factor can be moved and kept by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.bits import bitcast
from tilewright.ir.forms.expr import Axis, Const, Expr, axes_of, const, flattened, is_op, op, select


@dataclass(frozen=True)
class Factor:
    """One factor of a product and the output and reduction axes it depends on."""

    value: Expr
    outputs: tuple[Axis, ...]
    reductions: tuple[Axis, ...]


def factors(element: Expr, axes: Sequence[Axis], reduce_axes: Sequence[Axis]) -> tuple[Factor, ...]:
    """The product under a sum, taken apart; a condition on the whole product goes to the factor that knows its axes."""
    product = element
    conditions: list[Expr] = []
    while is_op(product, "select"):
        condition, then, otherwise = product.args
        if is_zero(then) and not is_zero(otherwise):
            conditions.append(op("not", condition))
            product = otherwise
        elif is_zero(otherwise):
            conditions.append(condition)
            product = then
        else:
            break
    found = flattened(product, "mul")
    for condition in conditions:
        wanted = set(axes_of(condition))
        place = next((i for i, v in enumerate(found) if wanted <= set(axes_of(v))), 0)
        found[place] = select(condition, found[place], const(0, found[place].dtype))
    parts = []
    for value in found:
        used = set(axes_of(value))
        parts.append(Factor(value, tuple(a for a in axes if a in used), tuple(a for a in reduce_axes if a in used)))
    return tuple(parts)


def is_zero(node: Expr) -> bool:
    return isinstance(node, Const) and node.value == 0


_TF32_HALF, _TF32_KEPT = 0x1000, 0xFFFFE000  # half of the last bit that tf32 keeps, and all that it keeps


def as_tf32(value: Expr) -> Expr:
    """A float32 rounded to the 11 significant bits of tf32, halves away from zero."""
    bits = bitcast(value, dtypes.uint32)
    kept = op("bitand", bits + const(_TF32_HALF, dtypes.uint32), const(_TF32_KEPT, dtypes.uint32))
    return bitcast(kept, dtypes.float32)


def below_tf32(value: Expr) -> Expr | None:
    """What such a rounding rounds; None where the value is no such rounding."""
    inner = value
    for name in ("bitcast", "bitand", "add", "bitcast"):
        if not is_op(inner, name):
            return None
        inner = inner.args[0]
    return inner if as_tf32(inner) is value else None
