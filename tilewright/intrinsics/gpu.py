"""The GPU's instructions: warp shuffles, vector copies, asynchronous copies; tensor cores from gpu_matrix.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from tilewright.intrinsics.gpu_matrix import ROWS as MATRIX_ROWS
from tilewright.intrinsics.table import Intrinsic, OperandRule
from tilewright.ir.forms.expr import Axis, Expr, add, load, var
from tilewright.ir.forms.loops import PREFETCH, For, ForKind, Instruction, Memory, Operand, Stmt, Store
from tilewright.ir.meaning.instruct import INSTRUCTIONS, WARP, InstructionContext, Meaning

_REGISTER = frozenset({Memory.REGISTER})
_ANY = frozenset({Memory.GLOBAL, Memory.SHARED, Memory.REGISTER})


def _moved(operand: Operand, by: Expr) -> tuple[Expr, ...]:
    return (*operand.origin[:-1], add(operand.origin[-1], by))


def _copy_loop(span: int, instruction: Instruction) -> tuple[Stmt, ...]:
    to, source = instruction.operands
    axis = Axis("lane", span)
    value = load(source.buffer, _moved(source, var(axis)))
    return (For(axis, ForKind.SERIAL, (Store(to.buffer, _moved(to, var(axis)), value),)),)


def _copy_meaning(span: int, context: InstructionContext) -> None:
    # All read before any is written: the packet moves as one.
    values = [context.read(1, (k,)) for k in range(span)]
    for k, value in enumerate(values):
        context.write(0, value, (k,))


def _shuffle_from(context: InstructionContext) -> None:
    own = np.arange(context.threads)
    partner = own // WARP * WARP + int(context.scalars[0])
    context.write(0, context.from_threads(context.read(1), partner))


def _issue_meaning(span: int, context: InstructionContext) -> None:
    for k in range(span):
        context.issue(0, context.read(1, (k,)), (k,))


def _issue_or_zero_meaning(span: int, context: InstructionContext) -> None:
    for k in range(span):
        context.issue(0, context.read_where(1, (k,), context.scalars[0]), (k,))


def _unpack_meaning(context: InstructionContext) -> None:
    """half((float((byte >> shift) & mask) - zero) · scale) of neighbours."""
    shift, mask, zero, scale = context.scalars
    for k in range(8):
        code = context.read(1, (k,)).astype(np.int32) >> shift & mask
        value = (code.astype(np.float32) - np.float32(zero)) * np.asarray(scale, np.float32)
        context.write(0, value.astype(np.float16), (k,))


def _unpack_codes_meaning(bits: int, context: InstructionContext) -> None:
    """The same of a pair of 16 neighbours, by its number, and of the pair eight places behind it."""
    zero, scale, pair = context.scalars
    for second, near in np.ndindex(2, 2):
        place = 2 * int(pair) + near
        code = context.read(1, (place if bits == 4 else place + 8 * second,)).astype(np.int32)
        code = code >> 4 * second & 15 if bits == 4 else code
        value = (code.astype(np.float32) - np.asarray(zero, np.float32)) * np.asarray(scale, np.float32)
        context.write(0, value.astype(np.float16), (2 * second + near,))


def _commit_meaning(context: InstructionContext) -> None:
    context.commit()


def _wait_meaning(context: InstructionContext) -> None:
    context.wait(int(context.scalars[0]))


def _nothing(context: InstructionContext) -> None:
    """Matters to what the hardware does at the same time alone."""


def _shuffle(name: str, meaning: Meaning) -> Intrinsic:
    return Intrinsic(
        name=name,
        scope="warp",
        operands=(OperandRule(_REGISTER, written=True), OperandRule(_REGISTER)),
        scalars=1,
        text={"cuda": f"{{element0}} = tw::{name}<{{type1}}>(static_cast<{{type1}}>({{element1}}), {{scalar0}});"},
        meaning=meaning,
    )


def _copy(span: int) -> Intrinsic:
    return Intrinsic(
        name=f"copy{span}",
        scope="thread",
        operands=(OperandRule(_ANY, span, written=True), OperandRule(_ANY, span)),
        scalars=0,
        text={"cuda": f"tw::copy<{span}>({{place0}}, {{place1}});"},
        meaning=partial(_copy_meaning, span),
        expand=partial(_copy_loop, span),
        packet_bytes=(2, 4, 8, 16),
    )


def _copy_async(span: int) -> Intrinsic:
    return Intrinsic(
        name=f"copy_async{span}",
        scope="thread",
        operands=(
            OperandRule(frozenset({Memory.SHARED}), span, written=True),
            OperandRule(frozenset({Memory.GLOBAL}), span),
        ),
        scalars=0,
        text={"cuda": f"tw::copy_async<{span}>({{place0}}, {{place1}});"},
        meaning=partial(_issue_meaning, span),
        expand=partial(_copy_loop, span),
        asynchronous="issue",
        packet_bytes=(4, 8, 16),
    )


def _copy_async_or_zero(span: int) -> Intrinsic:
    """The same where the condition holds; zeros, and nothing read, where it does not."""
    plain = _copy_async(span)
    return replace(
        plain, name=f"copy_async_or_zero{span}", scalars=1, meaning=partial(_issue_or_zero_meaning, span), expand=None,
        text={"cuda": f"tw::copy_async_or_zero<{span}>({{place0}}, {{place1}}, {{scalar0}});"},
    )  # fmt: skip


def _order(name: str, scalars: int, text: str, meaning: Meaning) -> Intrinsic:
    return Intrinsic(name, "thread", (), scalars, {"cuda": text}, meaning, asynchronous=name)


_ROWS = (
    _shuffle("shuffle_xor", INSTRUCTIONS["shuffle_xor"]),
    _shuffle("shuffle_down", INSTRUCTIONS["shuffle_down"]),
    _shuffle("shuffle", _shuffle_from),  # every lane reads the lane that the immediate names
    *(_copy(span) for span in (2, 4, 8, 16)),
    *(_copy_async(span) for span in (1, 2, 4, 8, 16)),
    *(_copy_async_or_zero(span) for span in (2, 4, 8, 16)),
    Intrinsic("unpack8", "thread", (OperandRule(_REGISTER, 8, written=True), OperandRule(_REGISTER, 8)), 4,
              {"cuda": "tw::unpack8({place0}, {place1}, {scalar0}, {scalar1}, {scalar2}, {scalar3});"},
              _unpack_meaning),
    *(Intrinsic(f"unpack_codes{bits}", "thread",
                (OperandRule(_REGISTER, 4, written=True), OperandRule(_REGISTER, 2 * bits)), 3,
                {"cuda": f"tw::unpack_codes<{bits}>({{place0}}, {{place1}}, {{scalar0}}, {{scalar1}}, {{scalar2}});"},
                partial(_unpack_codes_meaning, bits)) for bits in (4, 8)),
    Intrinsic(PREFETCH, "thread", (OperandRule(frozenset({Memory.GLOBAL})),), 0, {"cuda": "tw::prefetch({place0});"},
              INSTRUCTIONS[PREFETCH]),
    _order("commit", 0, "tw::commit();", _commit_meaning),
    _order("wait", 1, "tw::wait<{scalar0}>();", _wait_meaning),
    _order("async_fence", 0, "tw::async_fence();", _nothing),
    # a barrier of the block to which its warps come from several places
    _order("meet", 0, "tw::meet();", _nothing),
    *MATRIX_ROWS,
)

GPU: Mapping[str, Intrinsic] = {row.name: row for row in _ROWS}
MEANINGS: Mapping[str, Meaning] = {row.name: row.meaning for row in _ROWS}
