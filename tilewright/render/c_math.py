"""Vector mathematics for the C renderer: float32 functions in GNU vector types, written out only where a kernel
uses them; a single element is a lane of the narrowest vector, so that a tail is not another function.

Each is a minimax polynomial on a reduced range, at most 4 ulp from the exact result for every argument, denormals,
infinities and NaN included (an exhaustive test holds this), without branches except where sin and cos meet a very
large argument. Polynomials are split in two so that more of them runs at once: the time an operation waits for the one
before it counts as well as their number.
Nothing relies on a fused multiply-add: where a product must be exact, its factors are short or doubles.
Every value has a name of its own: compilers that are told to keep variables apart copy one that is assigned again.
A division stays one: it runs beside the multiply-adds, and iterating from an estimate would take their slots.

$V is the vector type, $W its lanes, $I its integer twin, $D and $L doubles and 64-bit integers of as many lanes.
"""

from __future__ import annotations

import re
from string import Template

from tilewright.ir.forms.scalar import CHAINS
from tilewright.render.c_text import once

_X86_VECTORS = "($W == 16 && defined(__AVX512F__)) || ($W == 8 && defined(__AVX__)) || ($W == 4 && defined(__AVX__))"


def _extreme_with_constant(name: str, otherwise: str) -> str:
    """NaN wins, and only the first operand can be one. NEON's instructions give NaN where either is; those of x86 give
    their last operand then. Elsewhere one comparison that is true of NaN, and a select."""
    return f"""
static inline $V tw_{name}_constant_$V($V a, $V b) {{
#if $W == 4 && defined(__aarch64__)
    $V y;
    __asm__("f{name} %0.4s, %1.4s, %2.4s" : "=w"(y) : "w"(a), "w"(b));
    return y;
#elif {_X86_VECTORS}
    $V y;
    __asm__("v{name}ps %1, %2, %0" : "=v"(y) : "v"(a), "v"(b));
    return y;
#else
    return tw_select_$V(~(a {otherwise} b), a, b);
#endif
}}
"""


_TEXT: dict[str, tuple[tuple[str, ...], str]] = {
    "wide": ((), """
typedef double $D __attribute__((vector_size($W * 8)));
typedef int64_t $L __attribute__((vector_size($W * 8)));
"""),
    "select": ((), """
static inline $V tw_select_$V($I mask, $V a, $V b) { return ($V)((mask & ($I)a) | (~mask & ($I)b)); }
"""),
    "abs": ((), """
static inline $V tw_abs_$V($V x) { return ($V)(($I)x & 0x7fffffff); }
"""),
    "max_constant": (("select",), _extreme_with_constant("max", "<=")),
    "min_constant": (("select",), _extreme_with_constant("min", ">=")),
    # A multiply-add of Arm overwrites what it adds to: a constant kept in a register is copied first, by the units that
    # compute. A load takes none of those.
    "addend": ((), """
#if $W == 4 && defined(__aarch64__)
#define tw_addend_$V(c) ({ static const volatile $V _c = {c, c, c, c}; _c; })
#else
#define tw_addend_$V(c) (c)
#endif
"""),
    "whole_max": (("select",), """
static inline $V tw_whole_max_$V($V a, $V b) { return tw_select_$V(a > b, a, b); }
"""),
    "whole_min": (("select",), """
static inline $V tw_whole_min_$V($V a, $V b) { return tw_select_$V(a < b, a, b); }
"""),
    "sign": (("select",), """
static inline $V tw_sign_$V($V x) {
    $V y = ($V)(((x > 0.0f) & 0x3f800000) | ((x < 0.0f) & (int)0xbf800000));
    return tw_select_$V(x != x, x, y);
}
"""),
    # e^r times a power of two, where results below 2^-126 are to come out denormal, and those beyond the largest number
    # infinite: 2^k by the instruction for it; or 2^2k, where the 127 in t makes 2^k one shift, applied twice.
    "power": ((), """
#if (defined(__AVX512F__) && $W == 16) || (defined(__AVX512VL__) && ($W == 8 || $W == 4))
#define tw_powers_$V 1
static inline $V tw_power_$V($V p, $V t, $V k) {
    $V y;
    __asm__("vscalefps %2, %1, %0" : "=v"(y) : "v"(p), "v"(k));
    return y;
}
#else
#define tw_powers_$V 2
static inline $V tw_power_$V($V p, $V t, $V k) {
    const $V n = ($V)(($I)t << 23);
    return p * n * n;
}
#endif
#define tw_turn_$V (tw_powers_$V == 1 ? 12582912.0f : 12583039.0f)
"""),
    # |r| <= ln2 / 2, or ln2. NaN stays NaN.
    "exp": (("addend", "max_constant", "min_constant", "power"), """
static inline $V tw_exp_$V($V x) {
    $V c = tw_max_constant_$V(x, ($V){} - 104.0f);
    $V c1 = tw_min_constant_$V(c, ($V){} + 89.0f);
    $V t = c1 * (1.44269504f / tw_powers_$V) + tw_addend_$V(tw_turn_$V);
    $V k = t - tw_turn_$V;
    $V r = c1 - k * (0.693359375f * tw_powers_$V);
    $V r1 = r + k * (2.12194440e-4f * tw_powers_$V);
    $V s = r1 * r1;
    $V p = 1.96289577e-4f * r1 + tw_addend_$V(0.00141054485f);
    $V p1 = p * s + (0.0083359722f * r1 + tw_addend_$V(0.0416611992f));
    $V p2 = p1 * s + (0.166666165f * r1 + tw_addend_$V(0.500000358f));
    $V p3 = p2 * s + (r1 + 1.0f);
    return tw_power_$V(p3, t, k);
}
"""),
    "log": (("select", "addend"), """
static inline $V tw_log_$V($V x) {
    $I tiny = x < 1.17549435e-38f;
    $V y = tw_select_$V(tiny, x * 8388608.0f, x);
    $I bits = ($I)y - 0x3f3504f3;
    $V f = ($V)((bits & 0x007fffff) + 0x3f3504f3) - 1.0f;
    $V k = ($V)((bits >> 23) - (tiny & 23) + 0x4b400000) - 12582912.0f;
    $V s = f * f;
    $V p = 0.0674578324f * s + (-0.1167499721f * f + tw_addend_$V(0.1188818812f));
    $V p1 = p * s + (-0.1240569800f * f + tw_addend_$V(0.1421956271f));
    $V p2 = p1 * s + (-0.1666799039f * f + tw_addend_$V(0.2000211775f));
    $V p3 = p2 * s + (-0.2500000894f * f + tw_addend_$V(0.3333331347f));
    $V p4 = p3 * (f * s) + k * -2.12194440e-4f;
    $V p5 = p4 - 0.5f * s;
    $V p6 = p5 + f;
    $V p7 = p6 + k * 0.693359375f;
    $V p8 = tw_select_$V(x < INFINITY, p7, x);
    $V below = tw_select_$V(x == 0.0f, ($V){} - INFINITY, ($V){} + NAN);
    return tw_select_$V(x <= 0.0f, below, p8);
}
"""),
    # -m / (2 + m), m = e^-2|x| - 1 = 2^n (e^-2r - 1) + (2^n - 1): exact to the last places also where x is small. Only
    # while n is small does the rounding of n ln2/2 count, and then it is rounded little.
    "tanh": (("select", "abs", "addend", "min_constant"), """
static inline $V tw_tanh_$V($V x) {
    $V a = tw_abs_$V(x);
    $V c = tw_min_constant_$V(a, ($V){} + 10.0f);
    $V t = c * -2.88539008f + tw_addend_$V(12583039.0f);
    $V k = t - 12583039.0f;
    $V r = k * 0.34657359f + c;
    $V s = r * r;
    $V p = 0.08812212199f * s + (-0.2677895725f * r + tw_addend_$V(0.6667103767f));
    $V p1 = p * s + (-1.333321929f * r + tw_addend_$V(1.999999523f));
    $V p2 = p1 * s + -2.0f * r;
    $V n = ($V)(($I)t << 23);
    $V m = p2 * n + (n - 1.0f);
    $V y = m / (-2.0f - m);
    return tw_select_$V(($I){} + (int)0x80000000, x, y);
}
"""),
    # near 0 an odd polynomial; beyond, 1 - g^8, where g = erfc^(1/8) is smooth enough for a short polynomial, up to
    # where erf is 1
    "erf": (("select", "abs", "addend", "min_constant"), """
static inline $V tw_erf_$V($V x) {
    $V a = tw_abs_$V(x);
    $V c = tw_min_constant_$V(a, ($V){} + 4.0f);
    $V s = c * c;
    $V s2 = s * s;
    $V p = -5.829478614e-4f * s + tw_addend_$V(0.004959411919f);
    $V p1 = p * s2 + (-0.02674181014f * s + tw_addend_$V(0.1128106862f));
    $V p2 = p1 * s2 + (-0.3761241436f * s + tw_addend_$V(0.1283791363f));
    $V near = p2 * c + c;
    $V g = 1.432728895e-4f * s + (-0.002401351696f * c + tw_addend_$V(0.01263690367f));
    $V g1 = g * s + (-0.01073800679f * c + tw_addend_$V(-0.06219419464f));
    $V g2 = g1 * s + (-0.1445770562f * c + tw_addend_$V(1.000710607f));
    $V g3 = g2 * g2;
    $V g4 = g3 * g3;
    $V far = tw_addend_$V(1.0f) - g4 * g4;
    $V y = tw_select_$V(c < 0.9453125f, near, far);
    return tw_select_$V(($I){} + (int)0x80000000, x, y);
}
"""),
    "exp2": (("exp",), """
static inline $V tw_exp2_$V($V x) { return tw_exp_$V(x * 0.693147181f); }
"""),
    # 1 / (1 + e^-c) as p / (p + e), where e^-c = 2^n q / p. p and q are about 2^-32, so that e is a normal number for
    # every c, and small results come out of the division as denormals. Where c is NaN p is, whatever e may be.
    "sigmoid": (("addend", "max_constant", "min_constant"), """
static inline $V tw_sigmoid_$V($V x) {
    $V c = tw_max_constant_$V(x, ($V){} - 104.0f);
    $V c1 = tw_min_constant_$V(c, ($V){} + 60.0f);
    $V t = c1 * -1.44269504f + tw_addend_$V(12582912.0f);
    $V k = t - 12582912.0f;
    $V r = k * 0.693359375f + c1;
    $V r1 = k * -2.12194440e-4f + r;
    $V s = r1 * r1;
    $V b = 1.94025546e-12f * s + tw_addend_$V(1.16415322e-10f);
    $V a = 2.32830647e-11f * s + tw_addend_$V(2.32830644e-10f);
    $V b1 = b * r1;
    $V p = a + b1;
    $V q = a - b1;
    $V e = ($V)(($I)q + (($I)t << 23));
    return p / (p + e);
}
"""),
    # x - n pi/2 for |x| >= 2^17: x times the bits of 2/pi that matter, modulo 4, in fixed point
    "turns": ((), """
static double tw_turns_$V(float x, int *quadrant) {
    static const uint32_t digits[8] = {0, 0xa2f9836eu, 0x4e441529u, 0xfc2757d1u,
                                       0xf534ddc0u, 0xdb629599u, 0x3c439041u, 0xfe5163abu};
    union { float f; uint32_t u; } v = { x };
    const uint32_t exponent = v.u >> 23 & 255;
    *quadrant = 0;
    if (exponent == 255) return x - x;
    const uint64_t m = (v.u & 0x7fffff) | 0x800000;
    const uint32_t first = exponent - 120, shift = first & 31;
    const uint32_t *w = digits + (first >> 5);
    const uint64_t a = (uint64_t)w[0] << 32 | w[1], b = (uint64_t)w[1] << 32 | w[2], c = (uint64_t)w[2] << 32 | w[3];
    const uint64_t turn = (m * (a << shift >> 32) << 32) + m * (b << shift >> 32) + (m * (c << shift >> 32) >> 32);
    const uint64_t n = (turn + (1ull << 61)) >> 62;
    const double r = (double)(int64_t)(turn - (n << 62)) * 3.4061215800865545e-19;
    *quadrant = v.u >> 31 ? -(int)n : (int)n;
    return v.u >> 31 ? -r : r;
}
"""),
    "reduce_far": (("turns",), """
static __attribute__((noinline, cold)) $V tw_reduce_far_$V($V x, $V r, $I *n) {
    for (int i = 0; i < $W; ++i) {
        int quadrant;
        if (x[i] < 131072.0f && x[i] > -131072.0f) continue;
        r[i] = (float)tw_turns_$V(x[i], &quadrant);
        (*n)[i] = quadrant;
    }
    return r;
}
"""),
    # r = x - n pi/2: pi/2 is split so that the first product is exact in a double, and the second small enough
    "circle": (("select", "abs", "wide", "reduce_far"), """
static inline $V tw_circle_$V($V x, int turn) {
    $V t = x * 0.636619772f + 12582912.0f;
    $D k = __builtin_convertvector(t - 12582912.0f, $D);
    $D wide = __builtin_convertvector(x, $D) - k * 1.5707963267341256;
    wide = wide - k * 6.077100506506192e-11;
    $V r = __builtin_convertvector(wide, $V);
    $I n = ($I)t;
    $I far = ~(tw_abs_$V(x) < 131072.0f);
    int any = 0;
    for (int i = 0; i < $W; ++i) any |= far[i];
    if (__builtin_expect(any, 0)) {
        $I quadrant = n;
        r = tw_reduce_far_$V(x, r, &quadrant);
        n = quadrant;
    }
    n = n + turn;
    $V s = r * r;
    $V s2 = s * s;
    $V p = -1.95056287e-4f * s + 0.00833209604f;
    p = p * s2 + (-0.1666665375f * s + 1.0f);
    p = p * r;
    $V q = 2.44120856e-5f * s - 0.001388713019f;
    q = q * s + 0.04166664183f;
    q = q * s2 + (-0.5f * s + 1.0f);
    $V y = tw_select_$V(-(n & 1), q, p);
    return ($V)(($I)y ^ ((n & 2) << 30));
}
"""),
    "sin": (("circle",), """
static inline $V tw_sin_$V($V x) { return tw_circle_$V(x, 0); }
"""),
    "cos": (("circle",), """
static inline $V tw_cos_$V($V x) { return tw_circle_$V(x, 1); }
"""),
    # 2^(y log2 |x|): the logarithm and the product in doubles, since the fraction of a product up to 150 must keep
    # 24 bits; the power of the fraction in floats. IEEE's cases are prepared beside it and selected at the end.
    "pow": (("select", "abs", "wide"), """
static inline $V tw_pow_$V($V x, $V y) {
    $V a = tw_abs_$V(x), b = tw_abs_$V(y);
    $I tiny = a < 1.17549435e-38f;
    $I bits = ($I)tw_select_$V(tiny, a * 8388608.0f, a) - 0x3f3504f3;
    $V e = ($V)((bits >> 23) - (tiny & 23) + 0x4b400000) - 12582912.0f;
    $D f = __builtin_convertvector(($V)((bits & 0x007fffff) + 0x3f3504f3) - 1.0f, $D);
    $D f2 = f * f, f4 = f2 * f2;
    $D l = (-0.14283863334239422 * f + 0.14474855540090661) * f2 + (-0.14315662560777082 * f + 0.15876980609946528);
    l = 0.07736945040850776 * f4 + l;
    l = l * f4 + ((-0.18030058673782093 * f + 0.20617535849271093) * f2 +
                  (-0.24045316617356294 * f + 0.28853729350865676));
    l = l * f4 + ((-0.36067367481809276 * f + 0.4808983613950583) * f2 + (-0.721347520868806 * f + 1.442695040868707));
    $D wide = (l * f + __builtin_convertvector(e, $D)) * __builtin_convertvector(y, $D);
    $D t = wide + 6755399441055998.0;
    $V r = __builtin_convertvector(wide - (t - 6755399441055998.0), $V);
    $V s = r * r;
    $V p = 1.53292640e-4f * s + (0.001339096925f * r + 0.009618499316f);
    p = p * s + (0.05550359562f * r + 0.2402264774f);
    p = p * s + (0.6931471825f * r + 1.0f);
    $I n = __builtin_convertvector(($L)t, $I), h = n >> 1;
    p = p * ($V)(h << 23) * ($V)((n - h) << 23);

    $I large = b >= 8388608.0f;
    $V units = tw_select_$V(large, b, b + 8388608.0f);
    $I whole = large | (units - 8388608.0f == b);
    $I negative = ($I)x & whole & (b < 16777216.0f) & (($I)units << 31);
    $V end = tw_select_$V(a < 1.0f, ($V){} - INFINITY, ($V){} + INFINITY);
    $V z = tw_select_$V((a == 0.0f) | (a == INFINITY), y * end, __builtin_convertvector(wide, $V));
    p = tw_select_$V((z > 129.0f) | (z < -151.0f), ($V)((z > 0.0f) & 0x7f800000), p);
    p = ($V)(($I)p | negative);
    $I undefined = (x != x) | (y != y) | ((x < 0.0f) & (a < INFINITY) & ~whole);
    $I one = (y == 0.0f) | (x == 1.0f);
    $I fixed = one | undefined | ((x == -1.0f) & (b == INFINITY));
    return tw_select_$V(fixed, ($V)(0x3f800000 | (~one & undefined & 0x7fc00000)), p);
}
"""),
    "rsqrt": (("sqrt",), """
static inline $V tw_rsqrt_$V($V x) { return 1.0f / tw_sqrt_$V(x); }
"""),
}  # fmt: skip

# NaN where either operand is. Compilers find no instruction in any spelling of this: Arm's does it all, x86's gives the
# second operand where one is NaN, so that the first has to be asked: the new one, since the other is a chain of them.
_TEXT |= {
    name: (("select",), f"""
static inline $V tw_{name}_$V($V a, $V b) {{
#if defined(__aarch64__) && ($W == 4 || $W == 2)
    $V y;
    __asm__("f{name} %0.${{W}}s, %1.${{W}}s, %2.${{W}}s" : "=w"(y) : "w"(a), "w"(b));
    return y;
#elif (defined(__AVX512F__) && $W == 16) || (defined(__AVX512VL__) && ($W == 8 || $W == 4))
    $V y = b;
    uint16_t number;
    __asm__("vcmpps $$7, %1, %1, %0" : "=Yk"(number) : "v"(b));
    __asm__("v{name}ps %1, %2, %0%{{%3%}}" : "+v"(y) : "v"(a), "v"(b), "Yk"(number));
    return y;
#elif defined(__AVX__) && ($W == 8 || $W == 4)
    $V y;
    __asm__("v{name}ps %1, %2, %0" : "=x"(y) : "x"(a), "x"(b));
    return tw_select_$V(b != b, b, y);
#else
    return tw_select_$V((a {sign} b) | (a != a), a, b);
#endif
}}
""")
    for name, sign in (("max", ">"), ("min", "<"))
}  # fmt: skip

# Compilers make one instruction of these loops.
_BY_LANES = {"sqrt": "sqrt", "floor": "floor", "ceil": "ceil", "round": "nearbyint", "trunc": "trunc"}
_TEXT |= {
    name: ((), f"""
static inline $V tw_{name}_$V($V x) {{
    $V y;
    for (int i = 0; i < $W; ++i) y[i] = __builtin_{builtin}f(x[i]);
    return y;
}}
""")
    for name, builtin in _BY_LANES.items()
}  # fmt: skip


MOST_TOGETHER = 4


def together(name: str, count: int) -> str:
    """The name of the function for so many arguments at once."""
    return f"{name}_{count}"


def _together(text: str, count: int) -> str:
    """The function for several arguments at once: every line of its body for one, then for the next.

    Compilers are told to keep to the order of the text, since theirs costs registers where sums are kept in them.
    """
    head, *body = text.strip().splitlines()[:-1]
    start = re.fullmatch(r"static inline \$V (\w+)_\$V\(\$V x\) {", head)
    assert start is not None
    local = {"x", *re.findall(r"^ +\$[VI] (\w+) =", text, re.MULTILINE)}
    parameters = ", ".join([f"$V x_{i}" for i in range(count)] + [f"$V *result_{i}" for i in range(count)])
    # as a call of its own it would take its arguments through memory
    lines = ["static inline __attribute__((always_inline)) void", f"{together(start[1], count)}_$V({parameters}) {{"]
    names = re.compile(rf"\b({'|'.join(sorted(local))})\b")
    for line in body:
        lines += [names.sub(rf"\1_{copy}", line).replace("return ", f"*result_{copy} = ") for copy in range(count)]
    return "\n".join(("", *lines, "}", ""))


_TEXT |= {
    together(name, count): (_TEXT[name][0], _together(_TEXT[name][1], count))
    for name in sorted(CHAINS)
    for count in range(2, MOST_TOGETHER + 1)
}

FUNCTIONS = frozenset(_TEXT)
# Every machine has vectors of four, and compilers move a single lane to and from integers more slowly than four.
LEAST_LANES = 4
# Those that a single element takes from here too; for the others C has an operation of its own.
TRANSCENDENTAL = frozenset({"exp", "exp2", "log", "tanh", "erf", "sigmoid", "sin", "cos", "pow"})


def text(used: set[str], vector: str, integer: str, lanes: int) -> str:
    """The functions used, and those they use, for one vector type."""
    ordered: list[str] = []

    def add(name: str) -> None:
        for inner in _TEXT[name][0]:
            add(inner)
        if name not in ordered:
            ordered.append(name)

    for name in sorted(used):
        add(name)
    names = {"V": vector, "I": integer, "D": f"tw_wide_{vector}", "L": f"tw_long_{vector}", "W": str(lanes)}
    return "".join(once(Template(_TEXT[name][1]).substitute(names)) for name in ordered)


def called_name(name: str, vector: str) -> str:
    return f"tw_call_{name}_{vector}"


def called(name: str, vector: str, count: int) -> str:
    """One copy of a function of several vectors, for kernels that use it all over."""
    given = ", ".join([*(f"{vector} x_{i}" for i in range(count)), *(f"{vector} *result_{i}" for i in range(count))])
    passed = ", ".join([*(f"x_{i}" for i in range(count)), *(f"result_{i}" for i in range(count))])
    head = f"static __attribute__((noinline)) void {called_name(name, vector)}({given})"
    return f"{head} {{ tw_{name}_{vector}({passed}); }}\n"
