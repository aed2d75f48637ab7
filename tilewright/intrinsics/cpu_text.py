"""C texts of the CPU's instructions: the native spelling, and a portable one that any compiler takes.

Inline assembly, because compilers name these builtins differently and their headers cost more than a kernel's compile.
"""

from __future__ import annotations

_INLINE = "static inline __attribute__((always_inline))"

RUN_TEXT = {
    "copy": "__builtin_memcpy({place0}, {place1}, sizeof({type1}) * {scalar0});",
    "clear": "__builtin_memset({place0}, 0, sizeof({type0}) * {scalar0});",
}


def sdot_text(name: str) -> str:
    """NEON: the row's group is a lane of a register, so that no instruction but the dot itself takes a vector slot."""
    cases = "".join(
        f'        case {i}: __asm__("sdot %0.4s, %1.16b, %2.4b[{i}]" : "+w"(c) : "w"(v), "w"(a)); break;\n'
        for i in range(4)
    )
    return f"""typedef int32_t tw_c_{name} __attribute__((vector_size(16)));
typedef int8_t tw_a_{name} __attribute__((vector_size(16)));
typedef int8_t tw_b_{name} __attribute__((vector_size(16), aligned(1), may_alias));
{_INLINE} tw_c_{name} tw_{name}(tw_c_{name} c, tw_a_{name} a, const void *b, int group) {{
    const tw_a_{name} v = *(const tw_b_{name} *)b;
    switch (group) {{
{cases}    }}
    return c;
}}
"""


def x86_dot_text(name: str, mnemonic: str, kind: str, lanes: int, register: str) -> str:
    """One group of the row in every lane, against a vector of columns."""
    return f"""typedef {kind} tw_c_{name} __attribute__((vector_size({4 * lanes})));
typedef int32_t tw_v_{name} __attribute__((vector_size({4 * lanes})));
typedef int32_t tw_b_{name} __attribute__((vector_size({4 * lanes}), aligned(1), may_alias));
typedef int32_t tw_a_{name} __attribute__((aligned(1), may_alias));
{_INLINE} tw_c_{name} tw_{name}(tw_c_{name} c, const void *a, const void *b) {{
    const tw_v_{name} row = *(const tw_a_{name} *)a - (tw_v_{name}){{}};
    const tw_v_{name} columns = *(const tw_b_{name} *)b;
    __asm__("{mnemonic} %2, %1, %0" : "+{register}"(c) : "{register}"(row), "{register}"(columns));
    return c;
}}
"""


def madd_text(name: str, lanes: int) -> str:
    """A pair of the row in every lane, in 16 bits, against pairs of columns that are widened as they are read."""
    return f"""typedef int32_t tw_c_{name} __attribute__((vector_size({4 * lanes})));
typedef int8_t tw_b_{name} __attribute__((vector_size({2 * lanes}), aligned(1), may_alias));
typedef int32_t tw_a_{name} __attribute__((aligned(1), may_alias));
{_INLINE} tw_c_{name} tw_{name}(tw_c_{name} c, const void *a, const void *b) {{
    const tw_c_{name} row = *(const tw_a_{name} *)a - (tw_c_{name}){{}};
    tw_c_{name} columns, products;
    __asm__("vpmovsxbw %1, %0" : "=v"(columns) : "m"(*(const tw_b_{name} *)b));
    __asm__("vpmaddwd %2, %1, %0" : "=v"(products) : "v"(row), "v"(columns));
    return c + products;
}}
"""


def lane_dot_text(name: str, instruction: str, lanes: int, register: str) -> str:
    """Both operands as vectors of groups: each lane has its own."""
    return f"""typedef int32_t tw_c_{name} __attribute__((vector_size({4 * lanes})));
typedef int32_t tw_b_{name} __attribute__((vector_size({4 * lanes}), aligned(1), may_alias));
{_INLINE} tw_c_{name} tw_{name}(tw_c_{name} c, const void *a, const void *b) {{
    const tw_c_{name} left = *(const tw_b_{name} *)a, right = *(const tw_b_{name} *)b;
    __asm__("{instruction}" : "+{register}"(c) : "{register}"(left), "{register}"(right));
    return c;
}}
"""


def portable_lane_dot(name: str, a: str, lanes: int) -> str:
    return f"""typedef int32_t tw_c_{name} __attribute__((vector_size({4 * lanes})));
static __attribute__((noinline)) tw_c_{name} tw_{name}(tw_c_{name} c, const void *left, const void *right) {{
    const {a} *a = left;
    const int8_t *b = right;
    for (int n = 0; n < {lanes}; ++n) for (int k = 0; k < 4; ++k) c[n] += (int32_t)a[n * 4 + k] * (int32_t)b[n * 4 + k];
    return c;
}}
"""


def _zip(kind: str, a: str, b: str, lanes: int, first: int) -> str:
    places = ", ".join(f"{first + i}, {first + i + lanes}" for i in range(lanes // 2))
    return f"tw_mix({kind}, {a}, {b}, {places})"


def _interleave() -> str:
    lines = []
    for stem, a, b in (("p", "a", "b"), ("q", "c", "d")):
        lines += [f"const tw_pairs {stem}{i} = (tw_pairs){_zip('tw_bytes', a, b, 16, 8 * i)};" for i in range(2)]
    for i in range(4):
        mixed = _zip("tw_pairs", f"p{i // 2}", f"q{i // 2}", 8, 4 * (i % 2))
        lines.append(f"*(tw_run *)((char *)to + {16 * i}) = (tw_run){mixed};")
    body = "".join(f"    {line}\n" for line in lines)
    return f"""typedef uint8_t tw_bytes __attribute__((vector_size(16)));
typedef uint16_t tw_pairs __attribute__((vector_size(16)));
typedef uint8_t tw_run __attribute__((vector_size(16), aligned(1), may_alias));
#if __has_builtin(__builtin_shufflevector)
#define tw_mix(kind, a, b, ...) __builtin_shufflevector((kind)a, (kind)b, __VA_ARGS__)
#else
#define tw_mix(kind, a, b, ...) __builtin_shuffle((kind)a, (kind)b, (kind){{__VA_ARGS__}})
#endif
#define tw_interleave_4(to, a, b, c, d) tw_interleave((to), (tw_bytes)(a), (tw_bytes)(b), (tw_bytes)(c), (tw_bytes)(d))
{_INLINE} void tw_interleave(void *to, tw_bytes a, tw_bytes b, tw_bytes c, tw_bytes d) {{
{body}}}
"""


INTERLEAVE_TEXT = _interleave()


def _widened(kind: str, text: str) -> str:
    return f"tw_widen_bf16({text})" if kind == "uint16_t" else f"(int32_t){text}"


_WIDEN = f"""#ifndef TW_WIDEN
#define TW_WIDEN
{_INLINE} float tw_widen_bf16(uint16_t x) {{
    union {{ uint32_t u; float f; }} v = {{ (uint32_t)x << 16 }};
    return v.f;
}}
#endif
"""


def portable_dot(name: str, a: str, b: str, c: str, lanes: int, group: int, by_lane: bool) -> str:
    row = "tw_a_" + name + " a" if by_lane else "const void *row"
    start = f"group * {group}" if by_lane else "0"
    more = ", int group" if by_lane else ""
    source = "" if by_lane else f"    const {a} *a = row;\n"
    product = f"{_widened(a, f'a[{start} + k]')} * {_widened(b, f'columns[n * {group} + k]')}"
    return f"""{_WIDEN}typedef {c} tw_c_{name} __attribute__((vector_size({4 * lanes})));
typedef {a} tw_a_{name} __attribute__((vector_size(16)));
static __attribute__((noinline)) tw_c_{name} tw_{name}(tw_c_{name} c, {row}, const void *b{more}) {{
    const {b} *columns = b;
{source}    for (int n = 0; n < {lanes}; ++n) for (int k = 0; k < {group}; ++k) c[n] += {product};
    return c;
}}
"""


AMX_PORTABLE = """#ifndef TW_TILE
#define TW_TILE
typedef struct { uint8_t bytes[16][64]; } tw_tile;
static inline void tw_tile_zero(tw_tile *t) { __builtin_memset(t, 0, sizeof(*t)); }
static inline void tw_tile_load(tw_tile *t, const void *from, int rows, int64_t bytes, int64_t stride) {
    for (int i = 0; i < rows; ++i) __builtin_memcpy(t->bytes[i], (const char *)from + i * stride, bytes);
}
static inline void tw_tile_store(void *to, const tw_tile *t, int rows, int64_t bytes, int64_t stride) {
    for (int i = 0; i < rows; ++i) __builtin_memcpy((char *)to + i * stride, t->bytes[i], bytes);
}
#endif
"""


def amx_portable_dot(name: str, group: int, a: str, b: str, c: str) -> str:
    product = f"{_widened(a, f'x[k * {group} + q]')} * {_widened(b, f'y[n * {group} + q]')}"
    parameters = "tw_tile *c, const tw_tile *a, const tw_tile *b, int rows, int columns, int groups"
    return f"""{_WIDEN}static void tw_{name}({parameters}) {{
    for (int i = 0; i < rows; ++i) for (int k = 0; k < groups; ++k) {{
        const {a} *x = (const void *)a->bytes[i];
        const {b} *y = (const void *)b->bytes[k];
        {c} *z = (void *)c->bytes[i];
        for (int n = 0; n < columns; ++n) for (int q = 0; q < {group}; ++q) z[n] += {product};
    }}
}}
"""
