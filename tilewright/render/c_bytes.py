"""Rounding float vectors to bytes, for the C renderer: added to 1.5 * 2^23 a number's last byte is the rounded one.

That takes one addition where rounding and converting take two instructions, which most cores run on one of their
pipes only. Four registers of four numbers become one of sixteen bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.ir.analysis.simplify import Linear
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.dtypes import DType
from tilewright.ir.forms.expr import Const, Expr, is_op, loads, var
from tilewright.ir.forms.loops import Buffer, For, ForKind, Memory, Stmt, Store
from tilewright.render.c_address import flat, lane_stride
from tilewright.render.c_text import vector_name

_REACH = 1 << 21  # rounding by adding is exact inside
_MAGIC = 12582912.0
MOST = 4  # vectors that are packed together
_PART = 4  # lanes of what is packed: in wider registers a conversion fills a store by itself

Packing = tuple[DType, int, int]  # to, lanes of a part, parts


@dataclass(frozen=True)
class Rounded:
    """round(value) + added, as bytes."""

    value: Expr
    added: int


def rounded(node: Expr) -> Rounded | None:
    """What a conversion to bytes rounds, where the value stays small enough to be rounded by adding."""
    if not is_op(node, "cast") or node.dtype not in (dtypes.int8, dtypes.uint8):
        return None
    value, added = node.args[0], 0.0
    if value.dtype is not dtypes.float32:
        return None
    if is_op(value, "add") and isinstance(more := value.args[1], Const):
        value, added = value.args[0], float(more.value)
    if not is_op(value, "round") or not added.is_integer() or abs(added) > 255:
        return None
    clamped = value.args[0]
    return Rounded(clamped, int(added)) if is_small(clamped) else None


def is_small(value: Expr) -> bool:
    """Whether a value was brought between two small bounds."""
    names = {"min", "max"}
    while names and any(is_op(value, n) for n in names) and isinstance(value.args[1], Const):
        if not abs(float(value.args[1].value)) < _REACH:
            return False
        names.discard(value.op.name)  # type: ignore[attr-defined]
        value = value.args[0]
    return not names


def side_by_side(body: Sequence[Stmt]) -> list[For]:
    """The first of the statements, as many as store rounded bytes side by side and fill a register together."""
    found: list[For] = []
    first: tuple[Buffer, Linear] | None = None
    for stmt in body:
        store = stmt.body[0] if isinstance(stmt, For) and stmt.kind is ForKind.VECTOR and len(stmt.body) == 1 else None
        if not isinstance(store, Store) or not isinstance(stmt, For) or stmt.axis.extent != _PART:
            break
        if rounded(store.value) is None or any(n.source is store.buffer for n in loads(store.value)):
            break
        offset = flat(store.buffer, store.indices)
        if lane_stride(offset, stmt.axis) != 1 or store.buffer.memory is Memory.REGISTER:
            break
        terms = {t: c for t, c in offset.terms.items() if t is not var(stmt.axis)}
        start = Linear(terms, offset.constant - _PART * len(found))
        first = first or (store.buffer, start)
        if (store.buffer, start) != first:
            break
        found.append(stmt)
    return found[: MOST if len(found) == MOST else 2] if len(found) > 1 else []


def rounding(text: str) -> str:
    """A small number rounded."""
    return f"(({text} + {_MAGIC}f) - {_MAGIC}f)"


def name(packing: Packing) -> str:
    target, lanes, count = packing
    return f"tw_{target.name}_of_rounded_{count}{vector_name(dtypes.float32, lanes)}"


def vectors(packing: Packing) -> list[tuple[DType, int]]:
    target, lanes, count = packing
    wide = [(d, lanes) for d in (dtypes.float32, dtypes.int32, dtypes.int16, target)]
    return [*wide, (target, lanes * count)]


def text(packing: Packing) -> str:
    target, lanes, count = packing
    source, result = vector_name(dtypes.float32, lanes), vector_name(target, lanes * count)
    words = vector_name(dtypes.int32, lanes)
    arguments = ", ".join(f"{source} x{i}" for i in range(count))
    head = f"static inline {result} {name(packing)}({arguments}) {{\n"
    bits = [f"({words})(x{i} + {_MAGIC}f)" for i in range(count)]
    lines = [f"{words} w{i} = {b};" for i, b in enumerate(bits)]
    lines += _packed(target, lanes, count, result)
    return head + "".join(f"    {line}\n" for line in lines) + "}\n"


def _packed(target: DType, lanes: int, count: int, result: str) -> list[str]:
    if lanes != _PART:
        halves = vector_name(dtypes.int16, lanes)
        return [f"return __builtin_convertvector(__builtin_convertvector(w0, {halves}), {result});"]
    last = count - 1
    kind = "int8_t" if target is dtypes.int8 else "uint8_t"
    lines = [
        "typedef int16_t halves __attribute__((vector_size(16)));",
        f"typedef {kind} bytes __attribute__((vector_size(16)));",
        f"halves h0 = {_even('halves', 'w0', f'w{min(1, last)}', 8)};",
    ]
    if count == 4:
        return [*lines, f"halves h1 = {_even('halves', 'w2', 'w3', 8)};", f"return {_even('bytes', 'h0', 'h1', 16)};"]
    lines.append(f"bytes b = {_even('bytes', 'h0', 'h0', 16)};")
    unit = "int64_t" if count == 2 else "int32_t"
    return [*lines, f"typedef {unit} units __attribute__((vector_size(16)));", f"return ({result})((units)b)[0];"]


def _even(kind: str, a: str, b: str, lanes: int) -> str:
    """The low halves of the elements of two registers: every second element of half the size."""
    return f"tw_even({kind}, {a}, {b}, {', '.join(str(2 * i) for i in range(lanes))})"


PRELUDE = """#if __has_builtin(__builtin_shufflevector)
#define tw_even(kind, a, b, ...) __builtin_shufflevector((kind)a, (kind)b, __VA_ARGS__)
#else
#define tw_even(kind, a, b, ...) __builtin_shuffle((kind)a, (kind)b, (kind){__VA_ARGS__})
#endif
"""
