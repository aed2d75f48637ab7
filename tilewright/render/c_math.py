"""Vector mathematics for the C renderer: functions in GNU vector types, written out only where a kernel uses them.

Each is a polynomial on a reduced range (minimax fits, relative error below 1e-8 before rounding), with the ends
of the float32 range, infinities and NaN handled by masks. $V is the vector type, $I its integer twin, $W its lanes.
"""

from __future__ import annotations

from string import Template

_TEXT: dict[str, tuple[tuple[str, ...], str]] = {
    "select": ((), """
static inline $V tw_select_$V($I mask, $V a, $V b) { return ($V)((mask & ($I)a) | (~mask & ($I)b)); }
"""),
    "abs": ((), """
static inline $V tw_abs_$V($V x) { return ($V)(($I)x & 0x7fffffff); }
"""),
    "max": (("select",), """
static inline $V tw_max_$V($V a, $V b) { return tw_select_$V((a > b) | (a != a), a, b); }
"""),
    "min": (("select",), """
static inline $V tw_min_$V($V a, $V b) { return tw_select_$V((a < b) | (a != a), a, b); }
"""),
    # e^x = 2^n e^r, |r| <= ln2/2; 2^n is applied in two halves so that results below 2^-126 come out denormal
    "exp": (("select",), """
static inline $V tw_exp_$V($V x) {
    $V c = tw_select_$V(x > 89.0f, ($V){} + 89.0f, x);
    c = tw_select_$V(c < -104.0f, ($V){} - 104.0f, c);
    $V t = c * 1.44269504f + 12582912.0f;
    $I n = ($I)t - 0x4b400000;
    $V k = t - 12582912.0f;
    $V r = c - k * 0.693359375f;
    r = r + k * 2.12194440e-4f;
    $V p = 0.0013813161f * r + 0.0083694188f;
    p = p * r + 0.0416684560f;
    p = p * r + 0.1666651517f;
    p = p * r + 0.4999999404f;
    p = p * (r * r) + r + 1.0f;
    $I h = n >> 1;
    p = p * ($V)((h + 127) << 23) * ($V)((n - h + 127) << 23);
    p = tw_select_$V(x < -104.0f, ($V){}, p);
    return tw_select_$V(x != x, x, p);
}
"""),
    # e^x for |x| < 87: the result is normal, so that 2^n is one addition to the exponent
    "exp_normal": ((), """
static inline $V tw_exp_normal_$V($V x) {
    $V t = x * 1.44269504f + 12582912.0f;
    $V k = t - 12582912.0f;
    $V r = x - k * 0.693359375f;
    r = r + k * 2.12194440e-4f;
    $V p = 0.0013813161f * r + 0.0083694188f;
    p = p * r + 0.0416684560f;
    p = p * r + 0.1666651517f;
    p = p * r + 0.4999999404f;
    p = p * (r * r) + r + 1.0f;
    return ($V)(($I)p + (($I)t << 23));
}
"""),
    "log": (("select",), """
static inline $V tw_log_$V($V x) {
    $I tiny = x < 1.17549435e-38f;
    $V y = tw_select_$V(tiny, x * 8388608.0f, x);
    $I bits = ($I)y - 0x3f3504f3;
    $I e = (bits >> 23) - (tiny & 23);
    $V f = ($V)((bits & 0x007fffff) + 0x3f3504f3) - 1.0f;
    $V k = __builtin_convertvector(e, $V);
    $V p = 0.0674578324f * f - 0.1167499721f;
    p = p * f + 0.1188818812f;
    p = p * f - 0.1240569800f;
    p = p * f + 0.1421956271f;
    p = p * f - 0.1666799039f;
    p = p * f + 0.2000211775f;
    p = p * f - 0.2500000894f;
    p = p * f + 0.3333331347f;
    $V s = f * f;
    p = p * f * s + k * -2.12194440e-4f;
    p = p - 0.5f * s;
    p = p + f;
    p = p + k * 0.693359375f;
    p = tw_select_$V((x == x) & (x > 3.4028234e38f), x, p);
    p = tw_select_$V(x == 0.0f, ($V){} - INFINITY, p);
    return tw_select_$V((x < 0.0f) | (x != x), (x - x) / (x - x), p);
}
"""),
    "tanh": (("select", "abs", "exp_normal"), """
static inline $V tw_tanh_$V($V x) {
    $V a = tw_abs_$V(x);
    $V s = x * x;
    $V p = -0.0056482959f * s + 0.0205898061f;
    p = p * s - 0.0537251197f;
    p = p * s + 0.1333127469f;
    p = p * s - 0.3333327472f;
    $V near = p * s * x + x;
    $V d = tw_select_$V(a > 10.0f, ($V){} + 20.0f, a + a);
    $V far = 1.0f - 2.0f / (tw_exp_normal_$V(d) + 1.0f);
    $V y = tw_select_$V(a < 0.6328125f, near, far);
    y = ($V)(($I)y | (($I)x & (int)0x80000000));
    return tw_select_$V(x != x, x, y);
}
"""),
    # near 0 an odd polynomial; beyond, 1 - exp(polynomial), which stays relatively accurate up to where erf is 1
    "erf": (("select", "abs", "exp_normal"), """
static inline $V tw_erf_$V($V x) {
    $V a = tw_abs_$V(x);
    $V s = x * x;
    $V p = 8.2987768e-05f * s - 8.1256783e-04f;
    p = p * s + 0.0051995176f;
    p = p * s - 0.0268587824f;
    p = p * s + 0.1128368452f;
    p = p * s - 0.3761263192f;
    p = p * s + 0.1283791661f;
    $V near = p * x + x;
    $V t = tw_select_$V(a > 4.0f, ($V){} + 4.0f, a);
    $V q = -5.2179570e-07f * t - 1.4313494e-05f;
    q = q * t + 3.9672499e-04f;
    q = q * t - 0.0040535741f;
    q = q * t + 0.0248954874f;
    q = q * t - 0.1080123335f;
    q = q * t - 0.6335431337f;
    q = q * t - 1.1294342279f;
    q = q * t + 1.6043165e-04f;
    $V far = 1.0f - tw_exp_normal_$V(q);
    far = ($V)(($I)far | (($I)x & (int)0x80000000));
    $V y = tw_select_$V(a < 0.9296875f, near, far);
    return tw_select_$V(x != x, x, y);
}
"""),
    # by e^-|x|, which does not overflow: small results come out denormal, not 0
    "sigmoid": (("select", "abs", "exp"), """
static inline $V tw_sigmoid_$V($V x) {
    $V e = tw_exp_$V(-tw_abs_$V(x));
    return tw_select_$V(x < 0.0f, e, ($V){} + 1.0f) / (1.0f + e);
}
"""),
}  # fmt: skip

FUNCTIONS = frozenset(_TEXT)


def text(used: set[str], vector: str, integer: str) -> str:
    """The functions used, and those they use, for one vector type."""
    ordered: list[str] = []

    def add(name: str) -> None:
        for inner in _TEXT[name][0]:
            add(inner)
        if name not in ordered:
            ordered.append(name)

    for name in sorted(used):
        add(name)
    return "".join(Template(_TEXT[name][1]).substitute(V=vector, I=integer) for name in ordered)
