"""Conversions between vectors whose elements differ in width, for the C renderer.

Compilers convert element by element when a step is more than twice as wide, or when the narrow vector is shorter
than a register. So conversions go in steps of two, and four narrow elements are widened inside a whole register.
"""

from __future__ import annotations

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.dtypes import DType
from tilewright.render.c_text import vector_name
from tilewright.target.instruction_sets import AVX512_BYTES

Conversion = tuple[DType, DType, int]  # from, to, lanes

_SMALL = (dtypes.int8, dtypes.uint8, dtypes.int16, dtypes.uint16, dtypes.bfloat16)
_PLAIN = (dtypes.float32, dtypes.int32, dtypes.uint32)


def needs_function(source: DType, target: DType) -> bool:
    """Whether a conversion is more than one step of the compiler's own."""
    if dtypes.float16 in (source, target) or source is target:
        return False
    known = (*_SMALL, *_PLAIN)
    return (source in _SMALL or target in _SMALL) and source in known and target in known


def name(conversion: Conversion) -> str:
    source, target, lanes = conversion
    return f"tw_{target.name}_of_{vector_name(source, lanes)}"


def vectors(conversion: Conversion) -> list[tuple[DType, int]]:
    """The vector types that the function's text names."""
    source, target, lanes = conversion
    middle = [(d, lanes) for d in _steps(source, target)]
    return [*middle, (dtypes.uint32, lanes)] if dtypes.bfloat16 in (source, target) else middle


def text(conversion: Conversion) -> str:
    """The function that converts one vector."""
    source, target, lanes = conversion
    steps = _steps(source, target)
    value = "x"
    lines: list[str] = []
    position = 0
    while position < len(steps) - 1:
        here, after = steps[position], steps[position + 1]
        quick = len(steps) - position > 2 and _is_quarter(here, steps[position + 2], lanes)
        if quick:
            after = steps[position + 2]
        made = f"x{len(lines) + 1}"
        kind = vector_name(after, lanes)
        lines.extend(_step(here, after, lanes, value, made, kind))
        value = made
        position += 2 if quick else 1
    result = vector_name(target, lanes)
    head = f"static inline {result} {name(conversion)}({vector_name(source, lanes)} x) {{\n"
    return head + "".join(f"    {line}\n" for line in lines) + f"    return {value};\n}}\n"


def _steps(source: DType, target: DType) -> list[DType]:
    """Types on the way, both ends included."""
    if source is dtypes.bfloat16:
        return [source, *_steps(dtypes.float32, target)]
    if target is dtypes.bfloat16:
        return [*_steps(source, dtypes.float32), target]
    if source is target:
        return [source]
    if source.is_float:
        return [source, *_steps(dtypes.uint32 if target is dtypes.uint32 else dtypes.int32, target)]
    if target.is_float:
        wide = dtypes.uint32 if source is dtypes.uint32 else dtypes.int32
        return [*_steps(source, wide), target]
    if source.bits == target.bits:
        return [source, target]
    # widening keeps the sign of the source; narrowing drops high bits, whatever the sign
    signed = (source if target.bits > source.bits else target).kind == "i"
    bits = source.bits * 2 if target.bits > source.bits else source.bits // 2
    return [source, *_steps(dtypes.by_name(f"{'int' if signed else 'uint'}{bits}"), target)]


def _is_quarter(source: DType, target: DType, lanes: int) -> bool:
    return lanes == 4 and source.bits == 8 and target.bits == 32 and target.is_int


def _step(source: DType, target: DType, lanes: int, value: str, made: str, kind: str) -> list[str]:
    plain = f"{kind} {made} = __builtin_convertvector({value}, {kind});"
    if source is dtypes.bfloat16:
        whole = vector_name(dtypes.uint32, lanes)
        shifted = f"{kind} {made} = ({kind})(__builtin_convertvector({value}, {whole}) << 16);"
        if lanes != 4:
            return [shifted]
        places = ", ".join(f"{i}, {i + lanes}" for i in range(lanes))  # zeros below, the bits above
        zeros = f"({vector_name(source, lanes)}){{}}"
        joined = f"{kind} {made} = ({kind})__builtin_shufflevector({zeros}, {value}, {places});"
        return _if_shuffles([joined], [shifted])
    if target is dtypes.bfloat16:
        return _to_bfloat16(lanes, value, made, kind)
    if not _is_quarter(source, target, lanes):
        return [plain]
    sign = "u" if source.kind == "u" else ""
    types = (("int", 32), ("int", 8), ("int", 16))
    names = {bits: f"{sign}{stem}{bits}_t" for stem, bits in types}
    inside = [
        f"typedef {names[8]} bytes __attribute__((vector_size(16)));",
        f"typedef {names[16]} halves __attribute__((vector_size(32)));",
        f"typedef {names[16]} half __attribute__((vector_size(16)));",
        f"typedef {names[32]} words __attribute__((vector_size(32)));",
        f"halves h = __builtin_convertvector((bytes)(({kind}){{({names[32]}){value}}}), halves);",
        "half l = __builtin_shufflevector(h, h, 0, 1, 2, 3, 4, 5, 6, 7);",
        "words w = __builtin_convertvector(l, words);",
        f"{kind} {made} = ({kind})__builtin_shufflevector(w, w, 0, 1, 2, 3);",
    ]
    return _if_shuffles(inside, [plain])


def _to_bfloat16(lanes: int, value: str, made: str, kind: str) -> list[str]:
    whole = vector_name(dtypes.uint32, lanes)
    plain = [
        f"{whole} bits = ({whole}){value}, nan = ({whole})({value} != {value});",
        f"{whole} even = bits + 0x7fff + ((bits >> 16) & 1);",
        "even = (even & ~nan) | ((bits | 0x400000) & nan);",
        f"{made} = __builtin_convertvector(even >> 16, {kind});",
    ]
    if lanes * dtypes.float32.bytes != AVX512_BYTES:
        return [f"{kind} {made};", *plain]
    # One instruction does it, but for denormal numbers, which it takes as zeros. Bits are looked at, because while
    # denormals are flushed vfpclassps, too, takes them for zeros.
    quick = [
        "uint16_t small;",
        f"const {whole} exponent = ({whole}){{}} + 0x7f800000, fraction = ({whole}){{}} + 0x7fffff;",
        f'__asm__("vcvtneps2bf16 %1, %0" : "=v"({made}) : "v"({value}));',
        f'__asm__("vptestnmd %2, %1, %0" : "=Yk"(small) : "v"({value}), "v"(exponent));',
        f'__asm__("vptestmd %2, %1, %0%{{%3%}}" : "=Yk"(small) : "v"({value}), "v"(fraction), "Yk"(small));',
        "if (!__builtin_expect(small, 0)) return " + made + ";",
    ]
    return [f"{kind} {made};", "#ifdef __AVX512BF16__", *quick, "#endif", *plain]


def _if_shuffles(lines: list[str], otherwise: list[str]) -> list[str]:
    return ["#if __has_builtin(__builtin_shufflevector)", *lines, "#else", *otherwise, "#endif"]
