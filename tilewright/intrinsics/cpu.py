"""The CPU's dot-product and matrix instructions: NEON dot, AVX-512 VNNI and BF16, AMX tiles, and copies of a run.

Each row has its text for the machine that has it, a portable text with the same meaning that any compiler takes, and
its meaning for the interpreter. A `Dot` says what planning must know of a multiply-accumulate instruction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from tilewright.intrinsics.cpu_text import (
    AMX_PORTABLE,
    INTERLEAVE_TEXT,
    RUN_TEXT,
    amx_portable_dot,
    lane_dot_text,
    madd_text,
    portable_dot,
    portable_lane_dot,
    sdot_text,
    x86_dot_text,
)
from tilewright.intrinsics.table import Intrinsic, OperandRule
from tilewright.ir.forms.loops import PREFETCH, PREFETCH_BESIDE, PREFETCH_TILE, Memory
from tilewright.ir.meaning.instruct import INSTRUCTIONS, InstructionContext, Meaning

TILE_ROWS = 16
TILE_BYTES = 64  # of a row of a tile
TILES = 8

_MEMORY = frozenset({Memory.GLOBAL, Memory.SCRATCH})
_REGISTER = frozenset({Memory.REGISTER})
_TILE = frozenset({Memory.TILE})


@dataclass(frozen=True)
class Dot:
    """A multiply-accumulate instruction: c[m, n] += sum over k of a[m, k] * b[k, n], k in groups that one lane sums.

    `instructions` names the row of the table by the element types of a and b. b is stored as (k / group, n, k % group).
    """

    name: str
    features: tuple[str, ...]
    architecture: str
    instructions: tuple[tuple[tuple[str, str], str], ...]
    accumulator: str
    group: int
    lanes: int  # n
    block: int  # elements of k one step takes
    rows: int  # m: 1 where the accumulator is a vector register
    speed: float  # multiply-adds, in units of what the machine's float32 vectors do, where no rate was measured
    # rows of the other 8-bit type: (types, row of the table, type the rows are moved to, how much less they are then)
    moved: tuple[tuple[tuple[str, str], str, str, int], ...] = ()

    @property
    def is_tile(self) -> bool:
        return self.rows > 1

    @property
    def row_groups(self) -> int:
        """Groups of a row that lie in one register; the instruction names one of them."""
        return 1 if self.is_tile else self.block // self.group

    def instruction(self, a: str, b: str) -> str | None:
        found = {pair: name for pair, name, _, _ in self.moved}
        return dict(self.instructions).get((a, b)) or found.get((a, b))

    def moves(self, a: str, b: str) -> tuple[str, int]:
        """The type rows must have, and what they lose on the way: a * b = moved * b + lost * b, summed over k."""
        return next(((kind, lost) for pair, _, kind, lost in self.moved if pair == (a, b)), (a, 0))


# --- meanings: arrays whose leading dimensions are the instruction's own, then the lanes around it


def _grid(context: InstructionContext, *sizes: int) -> list[np.ndarray]:
    """For every dimension of the instruction its positions, shaped to broadcast with the others and the lanes."""
    after = len(sizes) + context.depth
    return [np.arange(n).reshape(n, *(1,) * (after - 1 - i)) for i, n in enumerate(sizes)]


def _wide(values: np.ndarray, dtype: type) -> np.ndarray:
    return np.asarray(values).astype(dtype)


def _dot_meaning(dtype: type, lanes: int, group: int, by_lane: bool, context: InstructionContext) -> None:
    first = int(context.scalars[0]) * group if by_lane else 0
    n, k = _grid(context, lanes, group)
    a = _wide(context.read_run(1, first + k), dtype)
    b = _wide(context.read_run(2, n * group + k), dtype)
    total = (a * b).sum(axis=1, dtype=dtype)
    (n,) = _grid(context, lanes)
    context.write(0, context.read(0, (n,)) + total, (n,))


def _lane_dot_meaning(lanes: int, group: int, context: InstructionContext) -> None:
    n, k = _grid(context, lanes, group)
    a = _wide(context.read_run(1, n * group + k), np.int32)
    b = _wide(context.read_run(2, n * group + k), np.int32)
    (n,) = _grid(context, lanes)
    context.write(0, context.read(0, (n,)) + (a * b).sum(axis=1, dtype=np.int32), (n,))


def _interleave_meaning(lanes: int, context: InstructionContext) -> None:
    (n,) = _grid(context, lanes)
    for place in range(4):
        context.write_run(0, context.read(1 + place, (n,)), n * 4 + place)


def _tile_dot_meaning(dtype: type, group: int, context: InstructionContext) -> None:
    rows, columns, groups = (int(s) for s in context.scalars)
    i, n, k, q = _grid(context, rows, columns, groups, group)
    a = _wide(context.read(1, (i, k * group + q)), dtype)
    b = _wide(context.read(2, (k, n * group + q)), dtype)
    total = (a * b).sum(axis=(2, 3), dtype=dtype)
    i, n = _grid(context, rows, columns)
    context.write(0, context.read(0, (i, n)) + total, (i, n))


def _tile_zero_meaning(context: InstructionContext) -> None:
    rows, columns = (int(s) for s in context.scalars)
    context.write(0, 0, tuple(_grid(context, rows, columns)))


def _tile_load_meaning(context: InstructionContext) -> None:
    rows, columns, stride = (int(s) for s in context.scalars)
    i, j = _grid(context, rows, columns)
    context.write(0, context.read_run(1, i * stride + j), (i, j))


def _tile_store_meaning(context: InstructionContext) -> None:
    rows, columns, stride = (int(s) for s in context.scalars)
    i, j = _grid(context, rows, columns)
    context.write_run(0, context.read(1, (i, j)), i * stride + j)


def _copy_meaning(context: InstructionContext) -> None:
    (k,) = _grid(context, int(context.scalars[0]))
    context.write_run(0, context.read_run(1, k), k)


def _clear_meaning(context: InstructionContext) -> None:
    (k,) = _grid(context, int(context.scalars[0]))
    context.write_run(0, 0, k)


def _nothing(context: InstructionContext) -> None:
    """Sets up or gives back tiles, which the interpreter has by name."""


# --- rows


def _vector_dot(
    name: str, dtype: type, lanes: int, group: int, text: str, prelude: Mapping[str, str], by_lane: bool = False
) -> Intrinsic:
    return Intrinsic(
        name=name,
        scope="thread",
        operands=(
            OperandRule(_REGISTER, lanes, written=True),
            OperandRule(_REGISTER if by_lane else _MEMORY, group),
            OperandRule(_MEMORY, lanes * group),
        ),
        scalars=1 if by_lane else 0,
        text={"c": text, "portable": text},
        meaning=partial(_dot_meaning, dtype, lanes, group, by_lane),
        prelude=prelude,
    )


def _lane_dot(name: str, a: str, mnemonic: str, lanes: int, register: str) -> Intrinsic:
    """Every lane sums a group of its own: of both operands."""
    rules = (OperandRule(_REGISTER, lanes, written=True), *(OperandRule(_MEMORY, 4 * lanes),) * 2)
    text = f"{{element0}} = tw_{name}({{element0}}, {{place1}}, {{place2}});"
    prelude = {"c": lane_dot_text(name, mnemonic, lanes, register), "portable": portable_lane_dot(name, a, lanes)}
    meaning = partial(_lane_dot_meaning, lanes, 4)
    return Intrinsic(name, "thread", rules, 0, {"c": text, "portable": text}, meaning, prelude=prelude)


def _tile(name: str, rules: tuple[OperandRule, ...], scalars: int, c: str, portable: str, meaning: Meaning,
          more: str = "") -> Intrinsic:  # fmt: skip
    return Intrinsic(name, "thread", rules, scalars, {"c": c, "portable": portable}, meaning,
                     prelude={"c": "", "portable": AMX_PORTABLE + more}, permission="amx")  # fmt: skip


def _tile_dot(name: str, dtype: type, group: int, mnemonic: str, types: tuple[str, str, str]) -> Intrinsic:
    rules = (OperandRule(_TILE, written=True), OperandRule(_TILE), OperandRule(_TILE))
    c = f'__asm__ volatile("{mnemonic} %tmm{{tile2}}, %tmm{{tile1}}, %tmm{{tile0}}");'
    portable = f"tw_{name}(&{{tile0}}, &{{tile1}}, &{{tile2}}, {{scalar0}}, {{scalar1}}, {{scalar2}});"
    return _tile(name, rules, 3, c, portable, partial(_tile_dot_meaning, dtype, group),
                 amx_portable_dot(name, group, *types))  # fmt: skip


_ROWS = (
    _vector_dot(
        "sdot_int8", np.int32, 4, 4, "{element0} = tw_sdot_int8({element0}, {element1}, {place2}, {scalar0});",
        {"c": sdot_text("sdot_int8"), "portable": portable_dot("sdot_int8", "int8_t", "int8_t", "int32_t", 4, 4, True)},
        by_lane=True,
    ),
    _vector_dot(
        "vnni_int8", np.int32, 16, 4, "{element0} = tw_vnni_int8({element0}, {place1}, {place2});",
        {"c": x86_dot_text("vnni_int8", "vpdpbusd", "int32_t", 16, "v"),
         "portable": portable_dot("vnni_int8", "uint8_t", "int8_t", "int32_t", 16, 4, False)},
    ),
    _vector_dot(
        "vnni_int8_256", np.int32, 8, 4, "{element0} = tw_vnni_int8_256({element0}, {place1}, {place2});",
        {"c": x86_dot_text("vnni_int8_256", "%{vex%} vpdpbusd", "int32_t", 8, "x"),
         "portable": portable_dot("vnni_int8_256", "uint8_t", "int8_t", "int32_t", 8, 4, False)},
    ),
    *(
        _vector_dot(
            f"madd_int8_{bits}", np.int32, bits // 32, 2,
            f"{{element0}} = tw_madd_int8_{bits}({{element0}}, {{place1}}, {{place2}});",
            {"c": madd_text(f"madd_int8_{bits}", bits // 32),
             "portable": portable_dot(f"madd_int8_{bits}", "int16_t", "int8_t", "int32_t", bits // 32, 2, False)},
        )
        for bits in (256, 512)
    ),
    _vector_dot(
        "vdp_bf16", np.float32, 16, 2, "{element0} = tw_vdp_bf16({element0}, {place1}, {place2});",
        {"c": x86_dot_text("vdp_bf16", "vdpbf16ps", "float", 16, "v"),
         "portable": portable_dot("vdp_bf16", "uint16_t", "uint16_t", "float", 16, 2, False)},
    ),
    _lane_dot("sdot_int8_lanes", "int8_t", "sdot %0.4s, %1.16b, %2.16b", 4, "w"),
    _lane_dot("vnni_int8_lanes", "uint8_t", "vpdpbusd %2, %1, %0", 16, "v"),
    _lane_dot("vnni_int8_256_lanes", "uint8_t", "%{vex%} vpdpbusd %2, %1, %0", 8, "x"),
    # four registers of sixteen bytes, one byte of each in turn
    Intrinsic("interleave_4", "thread", (OperandRule(_MEMORY, 64, written=True), *(OperandRule(_REGISTER, 16),) * 4), 0,
              dict.fromkeys(("c", "portable"),
                            "tw_interleave_4({place0}, {element1}, {element2}, {element3}, {element4});"),
              partial(_interleave_meaning, 16), prelude=dict.fromkeys(("c", "portable"), INTERLEAVE_TEXT)),
    _tile_dot("amx_bf16", np.float32, 2, "tdpbf16ps", ("uint16_t", "uint16_t", "float")),
    _tile_dot("amx_int8_ss", np.int32, 4, "tdpbssd", ("int8_t", "int8_t", "int32_t")),
    _tile_dot("amx_int8_us", np.int32, 4, "tdpbusd", ("uint8_t", "int8_t", "int32_t")),
    # 16 immediates: rows of each of the eight tiles, then bytes of a row; a tile's number: its place among those alive
    _tile(
        "tile_configure", (), 2 * TILES,
        '{{ static const struct {{ uint8_t kind, start, none[14]; uint16_t bytes[16]; uint8_t rows[16]; }}'
        ' __attribute__((aligned(64))) tiles = {{ 1, 0, {{ 0 }},'
        ' {{ ' + ", ".join(f"{{scalar{TILES + i}}}" for i in range(TILES)) + ' }},'
        ' {{ ' + ", ".join(f"{{scalar{i}}}" for i in range(TILES)) + ' }} }};'
        ' __asm__ volatile("ldtilecfg %0" :: "m"(tiles)); }}',
        "", _nothing,
    ),
    _tile("tile_release", (), 0, '__asm__ volatile("tilerelease");', "", _nothing),
    _tile("tile_zero", (OperandRule(_TILE, written=True),), 2, '__asm__ volatile("tilezero %tmm{tile0}");',
          "tw_tile_zero(&{tile0});", _tile_zero_meaning),
    _tile(
        "tile_load", (OperandRule(_TILE, written=True), OperandRule(_MEMORY)), 3,
        '__asm__ volatile("tileloadd (%0,%1,1), %%tmm{tile0}" :: "r"({place1}),'
        ' "r"((int64_t)sizeof({type1}) * {scalar2}) : "memory");',
        "tw_tile_load(&{tile0}, {place1}, {scalar0}, sizeof({type1}) * {scalar1}, sizeof({type1}) * {scalar2});",
        _tile_load_meaning,
    ),
    _tile(
        "tile_store", (OperandRule(_MEMORY, written=True), OperandRule(_TILE)), 3,
        '__asm__ volatile("tilestored %%tmm{tile1}, (%0,%1,1)" :: "r"({place0}),'
        ' "r"((int64_t)sizeof({type0}) * {scalar2}) : "memory");',
        "tw_tile_store({place0}, &{tile1}, {scalar0}, sizeof({type0}) * {scalar1}, sizeof({type0}) * {scalar2});",
        _tile_store_meaning,
    ),
    Intrinsic("copy_run", "thread", (OperandRule(_MEMORY, written=True), OperandRule(_MEMORY)), 1,
              dict.fromkeys(("c", "portable"), RUN_TEXT["copy"]), _copy_meaning),
    Intrinsic("clear_run", "thread", (OperandRule(_MEMORY, written=True),), 1,
              dict.fromkeys(("c", "portable"), RUN_TEXT["clear"]), _clear_meaning),
    Intrinsic(PREFETCH, "thread", (OperandRule(_MEMORY),), 0,
              dict.fromkeys(("c", "portable"), "__builtin_prefetch({place0});"), INSTRUCTIONS[PREFETCH]),
    Intrinsic(PREFETCH_BESIDE, "thread", (OperandRule(_MEMORY),), 0,
              dict.fromkeys(("c", "portable"), "__builtin_prefetch({place0}, 0, 1);"), INSTRUCTIONS[PREFETCH_BESIDE]),
    Intrinsic(PREFETCH_TILE, "thread", (OperandRule(_MEMORY),), 0,
              dict.fromkeys(("c", "portable"), "__builtin_prefetch({place0}, 0, 2);"), INSTRUCTIONS[PREFETCH_TILE]),
)  # fmt: skip

CPU: Mapping[str, Intrinsic] = {row.name: row for row in _ROWS}
MEANINGS: Mapping[str, Meaning] = {row.name: row.meaning for row in _ROWS}

_SIGNED, _MIXED, _NARROW = ("int8", "int8"), ("uint8", "int8"), ("bfloat16", "bfloat16")

# Speeds: multiply-adds a cycle over the 2 x lanes of the float32 pipes. A tile instruction takes 16 cycles.
DOTS: Mapping[str, Dot] = {
    dot.name: dot
    for dot in (
        Dot("sdot_int8", ("asimddp",), "aarch64", ((_SIGNED, "sdot_int8"),), "int32", 4, 4, 16, 1, 4.0,
            ((_MIXED, "sdot_int8", "int8", 128),)),
        Dot("vnni_int8", ("avx512_vnni",), "x86_64", ((_MIXED, "vnni_int8"),), "int32", 4, 16, 4, 1, 4.0,
            ((_SIGNED, "vnni_int8", "uint8", -128),)),
        Dot("vnni_int8_256", ("avx_vnni",), "x86_64", ((_MIXED, "vnni_int8_256"),), "int32", 4, 8, 4, 1, 4.0,
            ((_SIGNED, "vnni_int8_256", "uint8", -128),)),
        # where there is nothing better: pairs in 16 bits, rows widened as they are copied
        *(Dot(f"madd_int8_{bits}", features, "x86_64", (), "int32", 2, bits // 32, 2, 1, 1.5,
              tuple((pair, f"madd_int8_{bits}", "int16", 0) for pair in (_SIGNED, _MIXED)))
          for bits, features in ((256, ("avx2",)), (512, ("avx512f", "avx512bw")))),
        Dot("vdp_bf16", ("avx512_bf16",), "x86_64", ((_NARROW, "vdp_bf16"),), "float32", 2, 16, 2, 1, 2.0),
        Dot("amx_bf16", ("amx_tile", "amx_bf16"), "x86_64", ((_NARROW, "amx_bf16"),), "float32", 2, 16, 32,
            TILE_ROWS, 16.0),
        Dot("amx_int8", ("amx_tile", "amx_int8"), "x86_64", ((_SIGNED, "amx_int8_ss"), (_MIXED, "amx_int8_us")),
            "int32", 4, 16, 64, TILE_ROWS, 32.0),
    )
}  # fmt: skip

# Those whose lanes each take groups of their own from both operands, for windows that slide over every channel alone.
WINDOW_DOTS: Mapping[str, Dot] = {
    dot.name: dot
    for dot in (
        Dot("sdot_int8_lanes", ("asimddp",), "aarch64", ((_SIGNED, "sdot_int8_lanes"),), "int32", 4, 4, 4, 1, 4.0),
        Dot("vnni_int8_lanes", ("avx512_vnni",), "x86_64", ((_MIXED, "vnni_int8_lanes"),), "int32", 4, 16, 4, 1, 4.0),
        Dot("vnni_int8_256_lanes", ("avx_vnni",), "x86_64", ((_MIXED, "vnni_int8_256_lanes"),), "int32", 4, 8, 4, 1,
            4.0),
    )
}  # fmt: skip
