"""The GPU's tensor cores: which lane of a warp keeps which element of a matrix, and the instructions on such fragments.

Shapes and lane maps are those of PTX's `mma.sync` m16n8k16 (16-bit floats), m16n8k8 (tf32) and m16n8k32 (bytes, and
8-bit floats from Ada on) and of `ldmatrix`; four warps multiply 64 rows at once by `wgmma`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tilewright.intrinsics.table import Intrinsic, OperandRule
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.dtypes import DType
from tilewright.ir.forms.loops import Memory
from tilewright.ir.meaning.instruct import WARP, InstructionContext

_REGISTER = frozenset({Memory.REGISTER})
_SHARED = frozenset({Memory.SHARED})
ROW_BYTES = 16  # of a row of the 8 x 8 matrices that ldmatrix brings: what one lane's address stands for
MATRICES = 4  # that one ldmatrix brings

Terms = tuple[tuple[int, int, int], ...]  # of (divisor, modulus, scale): scale * (x // divisor % modulus)


@dataclass(frozen=True)
class LaneMap:
    """Where the elements that the lanes of a warp keep lie in a matrix: a row and a column for (lane, element), each a
    sum of digits of the two numbers."""

    rows: int
    columns: int
    elements: int  # that a lane keeps
    row_of_lane: Terms
    row_of_element: Terms
    column_of_lane: Terms
    column_of_element: Terms

    def row(self, lane: Any, element: Any) -> Any:
        return _digits(lane, self.row_of_lane) + _digits(element, self.row_of_element)

    def column(self, lane: Any, element: Any) -> Any:
        return _digits(lane, self.column_of_lane) + _digits(element, self.column_of_element)

    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows and columns, each by lane and element."""
        lane, element = np.arange(WARP)[:, None], np.arange(self.elements)[None, :]
        return np.broadcast_arrays(self.row(lane, element), self.column(lane, element))  # type: ignore[return-value]


def _digits(number: Any, terms: Terms) -> Any:
    """The sum of the digits; of plain numbers, arrays and expressions alike."""
    total: Any = 0
    for divisor, modulus, scale in terms:
        digit = number if divisor == 1 else number // divisor
        total = total + digit % modulus * scale
    return total


@dataclass(frozen=True)
class MatrixForm:
    """A multiplication of fragments: c[rows, columns] += a[rows, depth] b[depth, columns]."""

    name: str
    operand: DType  # of what lies in memory
    a: LaneMap
    b: LaneMap
    c: LaneMap
    warps: int = 1  # that run it as one, on operands in shared memory where it is more than one
    along_sum: bool = False  # whether lines of both operands must run along the sum
    sums: DType = dtypes.float32

    @property
    def depth(self) -> int:
        return self.a.columns

    @property
    def packet(self) -> int:
        """Elements of a row of ldmatrix, which are those of the widest copy too."""
        return ROW_BYTES // self.operand.bytes


_FOURS, _PAIRS, _HALVES = (4, 8, 1), (1, 4, 2), (1, 2, 1)
_C = LaneMap(16, 8, 4, (_FOURS,), ((2, 2, 8),), (_PAIRS,), (_HALVES,))
_A16 = LaneMap(16, 16, 8, (_FOURS,), ((2, 2, 8),), (_PAIRS,), (_HALVES, (4, 2, 8)))
_B16 = LaneMap(16, 8, 4, (_PAIRS,), (_HALVES, (2, 2, 8)), (_FOURS,), ())
_A32 = LaneMap(16, 8, 4, (_FOURS,), ((1, 2, 8),), ((1, 4, 1),), ((2, 2, 4),))
_B32 = LaneMap(8, 8, 2, ((1, 4, 1),), ((1, 2, 4),), (_FOURS,), ())
_A8 = LaneMap(16, 32, 16, (_FOURS,), ((4, 2, 8),), ((1, 4, 4),), ((1, 4, 1), (8, 2, 16)))
_B8 = LaneMap(32, 8, 8, ((1, 4, 4),), ((1, 4, 1), (4, 2, 16)), (_FOURS,), ())

FORMS: Mapping[str, MatrixForm] = {
    form.name: form
    for form in (
        MatrixForm("mma_float16", dtypes.float16, _A16, _B16, _C),
        MatrixForm("mma_bfloat16", dtypes.bfloat16, _A16, _B16, _C),
        MatrixForm("mma_tf32", dtypes.tf32, _A32, _B32, _C),
        MatrixForm("mma_int8", dtypes.int8, _A8, _B8, _C, sums=dtypes.int32),
        MatrixForm("mma_e4m3", dtypes.float8e4m3fn, _A8, _B8, _C),
        MatrixForm("wgmma_float16", dtypes.float16, _A16, _B16, _C, warps=4),
        MatrixForm("wgmma_bfloat16", dtypes.bfloat16, _A16, _B16, _C, warps=4),
        MatrixForm("wgmma_tf32", dtypes.tf32, _A32, _B32, _C, warps=4, along_sum=True),
        MatrixForm("wgmma_int8", dtypes.int8, _A8, _B8, _C, warps=4, along_sum=True, sums=dtypes.int32),
        MatrixForm("wgmma_e4m3", dtypes.float8e4m3fn, _A8, _B8, _C, warps=4, along_sum=True),
    )
}


def with_kept_rows(form: MatrixForm) -> str:
    """The instruction of four warps whose rows' operand lies in registers, as its sums do."""
    return form.name.replace("wgmma_", "wgmma_kept_")


def _matrix(context: InstructionContext, number: int, lanes: LaneMap) -> np.ndarray:
    """An operand's matrix of every warp: (warps, others, rows, columns)."""
    kept = np.stack([context.by_warp(context.read(number, (e,))) for e in range(lanes.elements)])
    rows, columns = lanes.places()
    found = np.zeros((kept.shape[1], kept.shape[3], lanes.rows, lanes.columns), kept.dtype)
    found[:, :, rows, columns] = np.moveaxis(kept, (1, 3, 2, 0), (0, 1, 2, 3))
    return found


def _product(form: MatrixForm, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.matmul(a.astype(form.sums.numpy), b.astype(form.sums.numpy))


def _mma_meaning(form: MatrixForm, context: InstructionContext) -> None:
    a, b, c = (_matrix(context, n, m) for n, m in ((1, form.a), (2, form.b), (0, form.c)))
    total = c + _product(form, a, b)
    rows, columns = form.c.places()
    for element in range(form.c.elements):
        own = total[:, :, rows[:, element], columns[:, element]]  # (warps, others, lanes)
        context.write(0, context.from_warps(np.moveaxis(own, 2, 1)), (element,))


def _wgmma_meaning(form: MatrixForm, context: InstructionContext) -> None:
    columns, a_turned, b_turned, along, goes_on = (int(s) for s in context.scalars)
    between = along // (8 * ROW_BYTES)  # lines from 64 elements of a line to the next
    a = _read_group(form, context, 1, bool(a_turned), 64, between)
    b = _read_group(form, context, 2, bool(b_turned), columns, between)
    _added_by_group(form, context, a, b, bool(goes_on))


def _wgmma_kept_meaning(form: MatrixForm, context: InstructionContext) -> None:
    columns, b_turned, along = (int(s) for s in context.scalars)
    own = _matrix(context, 1, form.a)  # (warps, others, 16, depth)
    grouped = own.reshape(-1, form.warps, *own.shape[1:])
    a = np.moveaxis(grouped, 1, 2).reshape(grouped.shape[0], own.shape[1], form.warps * form.a.rows, form.depth)
    b = _read_group(form, context, 2, bool(b_turned), columns, along // (8 * ROW_BYTES))
    _added_by_group(form, context, a, b, True)


def _added_by_group(form: MatrixForm, context: InstructionContext, a: np.ndarray, b: np.ndarray, goes_on: bool) -> None:
    """Sums of every four warps, (groups, others, 64, columns), lane by lane: fragments one behind the other."""
    product = _product(form, a, np.swapaxes(b, -1, -2))
    rows, places = form.c.places()
    for j in range(product.shape[-1] // form.c.columns):
        for e in range(form.c.elements):
            at = np.asarray(j * form.c.elements + e)
            own = [product[:, :, w * form.c.rows + rows[:, e], j * form.c.columns + places[:, e]]
                   for w in range(form.warps)]  # fmt: skip
            added = np.moveaxis(np.stack(own, 1).reshape(-1, product.shape[1], WARP), 2, 1)  # (warps, lanes, others)
            before = context.by_warp(context.read_run(0, at)) if goes_on else 0
            context.write_run(0, context.from_warps(before + added), at)


def _read_group(
    form: MatrixForm, context: InstructionContext, number: int, turned: bool, count: int, between: int
) -> np.ndarray:
    """A matrix of every four warps, (groups, others, count, depth): each thread reads its share."""
    thread = context.thread_number()
    line, packet = context.origin(number)[-3:-1]
    group = 4 * WARP
    depth, size = form.depth, form.packet
    each = count * depth // group
    parts = []
    for e in range(each):
        n = thread % group * each + e
        own, summed = n // depth, n % depth
        if turned:
            far, near, within = own // 64 * between + summed, own % 64 // 8, own % 8
        else:
            far, near, within = own, summed // size, summed % size
        place = (packet + near) ^ ((line + far) % 8)
        parts.append(context.by_warp(context.read(number, (far, place - packet, within))))
    whole = np.stack(parts, -1)  # (warps, lanes, others, each)
    groups, others = whole.shape[0] // 4, whole.shape[2]
    whole = whole.reshape(groups, group, others, each)
    return np.moveaxis(whole, 2, 1).reshape(groups, others, count, depth)


def _ldmatrix_meaning(span: int, transposed: bool, context: InstructionContext) -> None:
    """Lane l hands over the address of row l % 8 of matrix l // 8; it gets neighbours of row l // 4 of every matrix, or
    of the matrix turned over."""
    row = np.stack([context.by_warp(context.read(1, (e,))) for e in range(span)])  # (span, warps, lanes, others)
    matrices = row.reshape(span, row.shape[1], MATRICES, 8, row.shape[3])
    each = span // 4  # elements of a lane in a matrix, which are a register: one of 32 bits, two of 16, four bytes
    lane = np.arange(WARP)
    for matrix in range(MATRICES):
        for k in range(each):
            near, far = lane % 4 * each + k, lane // 4
            rows, columns = (near, far) if transposed else (far, near)
            own = matrices[columns, :, matrix, rows]  # (lanes, warps, others)
            context.write(0, context.from_warps(np.moveaxis(own, 0, 1)), (matrix * each + k,))


def _mma(form: MatrixForm) -> Intrinsic:
    operands = (OperandRule(_REGISTER, form.c.elements, written=True), OperandRule(_REGISTER, form.a.elements),
                OperandRule(_REGISTER, form.b.elements))  # fmt: skip
    return Intrinsic(form.name, "warp", operands, 0, {"cuda": f"tw::{form.name}({{place0}}, {{place1}}, {{place2}});"},
                     partial(_mma_meaning, form))  # fmt: skip


_SUMS = OperandRule(_REGISTER, _C.elements, written=True)


def _nothing(context: InstructionContext) -> None:
    """Orders what the hardware does at the same time; the interpreter does one thing after the other."""


def _wgmma(form: MatrixForm) -> Intrinsic:
    """c of four warps, which have 16 of its 64 rows each, += a b, both in shared memory. Scalars: columns, whether
    lines of a and of b run along their own axes instead of the sum, bytes from 64 columns of such lines to the next,
    and whether c goes on or begins with this product."""
    operands = (_SUMS, OperandRule(_SHARED), OperandRule(_SHARED))
    given = ", ".join(f"{{scalar{n}}}" for n in range(5))
    text = f"tw::{form.name}<{given}>({{place0}}, {{place1}}, {{place2}});"
    return Intrinsic(form.name, "warpgroup", operands, 5, {"cuda": text}, partial(_wgmma_meaning, form))


def _wgmma_kept(form: MatrixForm) -> Intrinsic:
    """The same with each warp's 16 rows of a in its registers. Scalars: columns, whether lines of b run along its own
    axes, bytes from 64 columns of such lines to the next."""
    operands = (_SUMS, OperandRule(_REGISTER, form.a.elements), OperandRule(_SHARED))
    name = with_kept_rows(form)
    text = f"tw::{name}<{{scalar0}}, {{scalar1}}, {{scalar2}}>({{place0}}, {{place1}}, {{place2}});"
    return Intrinsic(name, "warpgroup", operands, 3, {"cuda": text}, partial(_wgmma_kept_meaning, form))


def _ldmatrix(name: str, span: int, transposed: bool) -> Intrinsic:
    text = f"tw::ldmatrix<{span}, {'true' if transposed else 'false'}>({{place0}}, {{place1}});"
    return Intrinsic(name, "warp", (OperandRule(_REGISTER, span, written=True), OperandRule(_SHARED, span)), 0,
                     {"cuda": text}, partial(_ldmatrix_meaning, span, transposed),
                     packet_bytes=(ROW_BYTES,))  # fmt: skip


ROWS: tuple[Intrinsic, ...] = (
    *(_mma(form) for form in FORMS.values() if form.warps == 1),
    *(_wgmma(form) for form in FORMS.values() if form.warps > 1),
    *(_wgmma_kept(form) for form in FORMS.values() if form.warps > 1 and form.operand.bits == 16),
    Intrinsic("wgmma_fence", "warpgroup", (), 0, {"cuda": "tw::wgmma_fence();"}, _nothing),
    Intrinsic("wgmma_commit", "warpgroup", (_SUMS,), 0, {"cuda": "tw::wgmma_commit({place0});"}, _nothing),
    # how many groups may be under way still, and how many sums a lane has that are done then
    Intrinsic(
        "wgmma_wait", "warpgroup", (_SUMS,), 2, {"cuda": "tw::wgmma_wait<{scalar0}, {scalar1}>({place0});"}, _nothing
    ),
    _ldmatrix("ldmatrix8", 8, False),
    _ldmatrix("ldmatrix8_trans", 8, True),
    _ldmatrix("ldmatrix4", 4, False),
    _ldmatrix("ldmatrix16", 16, False),
)
