"""A C harness around the vector functions: millions of arguments against the C library's doubles, in parallel."""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tilewright.ir.forms import dtypes
from tilewright.render import c_math
from tilewright.render.c_text import mask_dtype, prelude, vector_name
from tilewright.runtime.cache import Cache
from tilewright.runtime.toolchain import compile_shared, default_flags, find_compiler, this_machine

BLOCK = 1024
NATIVE = Path(__file__).parents[1] / "tilewright" / "runtime" / "native"


@dataclass(frozen=True)
class Function:
    """A function of one argument: its exact value as C text on a double x of size a, and what holds for its results.

    Where the first terms of the series or the limit are exact to a double, they spare the C library's function.
    """

    name: str
    exact: str
    parity: int = 0  # -1: odd, 1: even, 0: neither
    most: float = np.inf  # no result is larger in size


FUNCTIONS = {
    f.name: f
    for f in (
        Function("exp", "x > 100 ? INFINITY : x < -110 ? 0 : a < 0x1p-27 ? 1 + x : __builtin_exp(x)"),
        Function("log", "x < 0 ? NAN : __builtin_log(x)"),
        Function("tanh", "a < 0x1p-13 ? x - x * x * x / 3 : a > 20 ? __builtin_copysign(1, x) : __builtin_tanh(x)",
                 -1, 1.0),
        Function("erf", "a < 0x1p-13 ? (x - x * x * x / 3) * 1.1283791670955126 : a > 6 ? __builtin_copysign(1, x) : "
                 "__builtin_erf(x)", -1, 1.0),
        Function("sigmoid", "x < -110 ? 0 : x > 40 ? 1 : a < 0x1p-13 ? 0.5 + x / 4 : x < 0 ? "
                 "__builtin_exp(x) / (1 + __builtin_exp(x)) : 1 / (1 + __builtin_exp(-x))", 0, 1.0),
        Function("sin", "a < 0x1p-13 ? x - x * x * x / 6 : circular(x, 0)", -1, 1.0),
        Function("cos", "a < 0x1p-13 ? 1 - x * x / 2 : circular(x, 1)", 1, 1.0),
        Function("sqrt", "__builtin_sqrt(x)"),
        Function("rsqrt", "1 / __builtin_sqrt(x)"),
    )
}  # fmt: skip


class Worst(ctypes.Structure):
    """The largest distance from the exact value in units of its last place, and where it is."""

    _fields_ = (("ulp", ctypes.c_double), ("x", ctypes.c_float), ("y", ctypes.c_float), ("found", ctypes.c_float))

    def __str__(self) -> str:
        return f"{self.ulp:.2f} ulp at {self.x!r}, {self.y!r}: {self.found!r}"


_COMMON = """
typedef struct { double ulp; float x, y, found; } Worst;
/* Beyond the largest number, and below the normal range, the last place stays what it is at the border. */
static inline double per_unit(float rounded) {
    union { float f; uint32_t u; } v = { rounded };
    uint32_t exponent = v.u >> 23 & 255;
    exponent = exponent == 255 ? 254 : exponent == 0 ? 1 : exponent;
    union { uint64_t u; double d; } inverse = { (uint64_t)(1023 + 150 - exponent) << 52 };
    return inverse.d;
}
static __attribute__((noinline)) double ulps(float found, double exact) {
    float rounded = (float)exact;
    if (found == rounded) return __builtin_signbit(found) == __builtin_signbit(rounded) ? 0 : INFINITY;
    if (found != found || rounded != rounded) return found != found && rounded != rounded ? 0 : INFINITY;
    if (__builtin_isinf(found)) return INFINITY;
    return __builtin_fabs((double)found - exact) * per_unit(rounded);
}
#ifdef FLUSH
/* On one side of the smallest normal number a result is flushed, on the other it is not: both are right. */
static inline int is_border(float found, double exact) {
    const double size = __builtin_fabs(exact), border = 0x1p-126 * (1 + 0x1p-21);
    return size <= border && __builtin_fabs((double)found) <= border && !__builtin_signbit(found) == !(exact < 0);
}
#else
#define is_border(found, exact) 0
#endif
/* Looks closely only where it may be the worst so far, or a zero whose sign counts. */
static inline void compare(float found, double exact, float x, float y, Worst *worst) {
    const double about = __builtin_fabs((double)found - exact) * per_unit((float)exact);
    if ((about <= worst->ulp && found != 0) || is_border(found, exact)) return;
    const double error = ulps(found, exact);
    if (error > worst->ulp) *worst = (Worst){ error, x, y, found };
}
"""

# The C library takes too long where arguments are large: there, m 2^e times 2/pi modulo 4 by a table of 2^e 2/pi.
_CIRCULAR = """
static const unsigned __int128 quarters[] = {{ {quarters} }};
static inline double circular(double x, int turn) {{
    if (x != x || __builtin_fabs(x) < 1048576) return turn ? __builtin_cos(x) : __builtin_sin(x);
    if (__builtin_isinf(x)) return NAN;
    union {{ float f; uint32_t u; }} v = {{ (float)x }};
    const uint32_t m = (v.u & 0x7fffff) | 0x800000;
    const uint64_t place = (uint64_t)(m * quarters[(v.u >> 23 & 255) - 147] >> 64);
    const uint64_t n = (place + (1ull << 61)) >> 62;
    const double r = (double)(int64_t)(place - (n << 62)) * (3.141592653589793 / 9223372036854775808.0);
    double y = (n + turn) & 1 ? __builtin_cos(r) : __builtin_sin(r);
    if ((n + turn) & 2) y = -y;
    return x < 0 && !turn ? -y : y;
}}
"""

_ONE = """
void apply(const float *x, float *y, int64_t count) {{
    for (int64_t i = 0; i < count; i += {lanes}) *({v}u *)(y + i) = tw_{name}_{v}(*(const {v}u *)(x + i));
}}
static inline double exact(double x) {{
    const double a = __builtin_fabs(x);
    (void)a;
    return {exact};
}}
void check(uint32_t first, int64_t count, uint32_t step, Worst *worst) {{
    float x[{block}], y[{block}], z[{block}];
    for (int64_t start = 0; start < count; start += {block}) {{
        for (int i = 0; i < {block}; ++i) {{
            union {{ uint32_t u; float f; }} v = {{ first + (uint32_t)(start + i) * step }};
            x[i] = v.f;
        }}
        apply(x, y, {block});
        for (int i = 0; i < {block}; ++i) {{
            compare(y[i], exact(x[i]), x[i], 0, worst);
            if (y[i] > {most} || y[i] < -{most}) *worst = (Worst){{ INFINITY, x[i], 0, y[i] }};
            x[i] = -x[i];
        }}
        if (!{parity}) continue;
        apply(x, z, {block});
        for (int i = 0; i < {block}; ++i) {{
            union {{ float f; uint32_t u; }} a = {{ {parity} * y[i] }}, b = {{ z[i] }};
            if (a.u != b.u && z[i] == z[i]) *worst = (Worst){{ INFINITY, x[i], 0, z[i] }};
        }}
    }}
}}
"""

_TWO = """
void apply(const float *x, const float *y, float *z, int64_t count) {{
    for (int64_t i = 0; i < count; i += {lanes})
        *({v}u *)(z + i) = tw_{name}_{v}(*(const {v}u *)(x + i), *(const {v}u *)(y + i));
}}
void check(const float *x, const float *y, int64_t count, Worst *worst) {{
    float z[{block}];
    for (int64_t start = 0; start < count; start += {block}) {{
        apply(x + start, y + start, z, {block});
        for (int i = 0; i < {block}; ++i) {{
            const float a = x[start + i], b = y[start + i];
            compare(z[i], __builtin_{name}(a, b), a, b, worst);
        }}
    }}
}}
"""


_FLUSHED_ONE = """
void apply(const float *x, float *y, int64_t count) {
    tw_arithmetic mode = tw_arithmetic_enter(0);
    plain_apply(x, y, count);
    tw_arithmetic_leave(mode);
}
void check(uint32_t first, int64_t count, uint32_t step, Worst *worst) {
    tw_arithmetic mode = tw_arithmetic_enter(0);
    plain_check(first, count, step, worst);
    tw_arithmetic_leave(mode);
}
"""

_FLUSHED_TWO = """
void apply(const float *x, const float *y, float *z, int64_t count) {
    tw_arithmetic mode = tw_arithmetic_enter(0);
    plain_apply(x, y, z, count);
    tw_arithmetic_leave(mode);
}
void check(const float *x, const float *y, int64_t count, Worst *worst) {
    tw_arithmetic mode = tw_arithmetic_enter(0);
    plain_check(x, y, count, worst);
    tw_arithmetic_leave(mode);
}
"""


def _arctan_of_inverse(n: int, bits: int) -> int:
    """arctan(1/n) in units of 2^-bits."""
    term = (1 << bits) // n
    total, k = term, 1
    while term:
        term //= n * n
        k += 2
        total += -term // k if k % 4 == 3 else term // k
    return total


def _quarters() -> str:
    """2^e 2/pi modulo 4, in units of 2^-126, for the floats m 2^e from 2^20 on."""
    bits = 512
    pi = 4 * (4 * _arctan_of_inverse(5, bits) - _arctan_of_inverse(239, bits))
    turns = (2 << 2 * bits) // pi
    values = [(turns << exponent - 150 + 126 >> bits) % (1 << 128) for exponent in range(147, 255)]
    return ", ".join(f"(unsigned __int128){v >> 64:#x}ull << 64 | {v % (1 << 64):#x}ull" for v in values)


def built(name: str, lanes: int, folder: Path, flush: bool = False) -> ctypes.CDLL:
    """The function on vectors of that many lanes, compiled as kernels are: `apply` and `check`. With `flush` both run
    as kernels do, with denormals flushed; what is expected then rounds and flushes likewise."""
    v, i = (vector_name(d, lanes) for d in (dtypes.float32, mask_dtype(dtypes.float32)))
    types = f"typedef float {v} __attribute__((vector_size({4 * lanes})));\n"
    types += f"typedef float {v}u __attribute__((vector_size({4 * lanes}), aligned(4), may_alias));\n"
    types += f"typedef int32_t {i} __attribute__((vector_size({4 * lanes})));\n"
    functions = c_math.text({name}, v, i, lanes)
    if name == "pow":
        body = _TWO.format(name=name, v=v, lanes=lanes, block=BLOCK)
    else:
        f = FUNCTIONS[name]
        circular = _CIRCULAR.format(quarters=_quarters()) if "circular" in f.exact else ""
        most = "INFINITY" if np.isinf(f.most) else f"{f.most}f"
        body = _ONE.format(name=name, v=v, lanes=lanes, block=BLOCK, exact=f.exact, parity=f.parity, most=most)
        body = circular + body
    compiler, machine = find_compiler(), this_machine()
    common = _COMMON
    if flush:
        common = (NATIVE / "arithmetic.h").read_text() + "#define FLUSH 1\n" + _COMMON
        body = body.replace("void apply(", "static void plain_apply(").replace(" apply(", " plain_apply(")
        body = body.replace("void check(", "static void plain_check(")
        body += _FLUSHED_TWO if name == "pow" else _FLUSHED_ONE
    body = body.replace("\nvoid", '\n__attribute__((visibility("default"))) void')
    source = prelude("") + types + functions + common + body
    flags = default_flags(compiler, machine)
    return ctypes.CDLL(str(compile_shared(source, compiler, machine, Cache(folder), flags=flags, name=name)))


def applied(library: ctypes.CDLL, *arguments: np.ndarray) -> np.ndarray:
    """Results for arrays of any length."""
    size = arguments[0].size
    padded = [np.resize(a.astype(np.float32), -(-size // BLOCK) * BLOCK) for a in arguments]
    out = np.empty_like(padded[0])
    pointers = [ctypes.c_void_p(a.ctypes.data) for a in (*padded, out)]
    library.apply(*pointers, ctypes.c_int64(out.size))
    return out[:size]


def worst_of(library: ctypes.CDLL, first: int, count: int, step: int = 1) -> Worst:
    """The worst of `count` arguments, whose bits start at `first`, `step` apart; parts run side by side."""

    def part(start: int, size: int) -> Worst:
        worst = Worst()
        bits = (first + start * step) % (1 << 32)
        library.check(ctypes.c_uint32(bits), ctypes.c_int64(size), ctypes.c_uint32(step), ctypes.byref(worst))
        return worst

    # parts of uneven cost: many, so that both ends of the range finish together
    size = max(1, count // 64 // BLOCK) * BLOCK
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = list(pool.map(lambda s: part(s, min(size, count - s)), range(0, count, size)))
    return max(parts, key=lambda w: float(w.ulp))


def worst_of_pairs(library: ctypes.CDLL, x: np.ndarray, y: np.ndarray) -> Worst:
    """The worst of pairs; their number is a multiple of BLOCK."""
    worst = Worst()
    library.check(*(ctypes.c_void_p(a.ctypes.data) for a in (x, y)), ctypes.c_int64(x.size), ctypes.byref(worst))
    return worst
