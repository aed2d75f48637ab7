"""Parts of vectors: the first elements, read and stored at once under a mask where there is one; some of the lanes.

x86 puts lanes together one by one through a single port, fourteen inserts for a row of fourteen; a masked move is one
instruction, and touches nothing beyond. Arm loads into lanes, and its vectors are short.
"""

from __future__ import annotations

from tilewright.ir.forms.dtypes import DType
from tilewright.target.instruction_sets import MASKED_BYTES


def is_maskable(dtype: DType, lanes: int) -> bool:
    return dtype.bytes == 4 and dtype.kind != "b" and lanes * dtype.bytes in MASKED_BYTES


def functions(element: str, kind: str, lanes: int) -> str:
    """Reading the first `count` elements, zeros on the other lanes, and storing them. To the builtins of gcc and clang
    pointers are of different types."""
    floats = f"float __attribute__((vector_size({4 * lanes})))"
    if lanes == 16:
        has = stores = "defined(__AVX512F__)"
        mask = "(uint16_t)((1u << count) - 1)"
        read = f"({kind})__builtin_ia32_loadups512_mask((const void *)from, ({floats}){{}}, {mask})"
        store = f"__builtin_ia32_storeups512_mask((void *)to, ({floats})value, {mask})"
    else:
        # a masked store of AVX alone takes dozens of operations on some processors
        has, stores = "defined(__AVX__)", "defined(__AVX512VL__)"
        whole = "int __attribute__((vector_size(32)))"
        lane = ", ".join(f"-(count > {i})" for i in range(lanes))
        read = f"({kind})__builtin_ia32_maskloadps256((const void *)from, ({whole}){{{lane}}})"
        store = f"__builtin_ia32_storeups256_mask((void *)to, ({floats})value, (uint8_t)((1u << count) - 1))"
    always = "static inline __attribute__((always_inline))"
    return (
        f"{always} {kind} tw_first_{kind}(const {element} *from, const int count) {{\n"
        f"#if {has}\n    return {read};\n#else\n    {kind} lanes = {{}};\n"
        "    for (int i = 0; i < count; ++i) lanes[i] = from[i];\n    return lanes;\n#endif\n}\n"
        f"{always} void tw_keep_{kind}({element} *to, const {kind} value, const int count) {{\n"
        f"#if {stores}\n    {store};\n#else\n"
        "    for (int i = 0; i < count; ++i) to[i] = value[i];\n#endif\n}\n"
    )


def slice_name(kind: str, lanes: int, start: int) -> str:
    return f"tw_lanes_{start}_{start + lanes - 1}_{kind}"


def slice_function(kind: str, part: str, lanes: int, start: int) -> str:
    """Some lanes of a longer vector. Of lanes named one by one gcc makes a shuffle for each."""
    places = range(start, start + lanes)
    return (
        f"static inline {part} {slice_name(kind, lanes, start)}({kind} v) {{\n"
        "#if defined(__clang__) || __GNUC__ >= 12\n"
        f"    return __builtin_shufflevector(v, v, {', '.join(map(str, places))});\n#else\n"
        f"    return ({part}){{{', '.join(f'v[{i}]' for i in places)}}};\n#endif\n}}\n"
    )
