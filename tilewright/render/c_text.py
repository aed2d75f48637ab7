"""How C spells types, constants and rows of the scalar table, for the C renderer."""

from __future__ import annotations

import math
from zlib import crc32

import numpy as np

from tilewright.errors import InternalError
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.dtypes import DType
from tilewright.ir.forms.expr import Const

TYPES = {
    "float32": "float", "float64": "double", "float16": "_Float16", "bfloat16": "tw_bf16", "bool": "uint8_t",
    "int8": "int8_t", "int16": "int16_t", "int32": "int32_t", "int64": "int64_t",
    "uint8": "uint8_t", "uint16": "uint16_t", "uint32": "uint32_t", "uint64": "uint64_t",
    **{d.name: "uint8_t" for d in dtypes.STORAGE},
}  # fmt: skip

INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "lt": "<", "le": "<=", "eq": "==", "ne": "!=",
          "and": "&&", "or": "||", "bitand": "&", "bitor": "|", "bitxor": "^"}  # fmt: skip
SHIFTS = {"shl": "<<", "shr": ">>"}  # of integers, by the low bits of the count
WRAPPING = frozenset({"add", "sub", "mul", "neg", "abs"})  # of integers, what may leave the type
# of integers; C's own operators where the signs allow
DIVISIONS = {"truncdiv": "/", "floordiv": "/", "mod": "%", "fmod": "%"}
MASK_INFIX = {"and": "&", "or": "|"}
_LIBM = {"exp": "exp", "exp2": "exp2", "log": "log", "sqrt": "sqrt", "tanh": "tanh", "erf": "erf", "sin": "sin",
         "cos": "cos", "floor": "floor", "ceil": "ceil", "round": "nearbyint", "trunc": "trunc", "pow": "pow",
         "fmod": "fmod", "abs": "fabs"}  # fmt: skip

_INTEGERS = "".join(
    f"typedef __{kind}{bits}_TYPE__ {kind.lower()}{bits}_t;\n" for kind in ("INT", "UINT") for bits in (8, 16, 32, 64)
)

# No headers: reading <math.h> and <stdint.h> takes longer than compiling a small kernel. Compilers know the
# functions as builtins and the types as macros.
_PRELUDE = """#define INFINITY (__builtin_inff())
#define NAN (__builtin_nanf(""))
#define tw_floordiv(a, b) ({ __auto_type _a = (a); __auto_type _b = (b); __auto_type _q = _a / _b; \\
    _q - ((_a % _b != 0) & ((_a < 0) != (_b < 0))); })
#define tw_mod(a, b) ({ __auto_type _a = (a); __auto_type _b = (b); __auto_type _r = _a % _b; \\
    _r + (-(__typeof__(_r))((_r != 0) & ((_r < 0) != (_b < 0))) & _b); })
#define tw_max(a, b) ({ __auto_type _a = (a); __auto_type _b = (b); (_a > _b) || (_a != _a) ? _a : _b; })
#define tw_min(a, b) ({ __auto_type _a = (a); __auto_type _b = (b); (_a < _b) || (_a != _a) ? _a : _b; })
#define tw_abs(a) ({ __auto_type _a = (a); _a < 0 ? -_a : _a; })
#define tw_sign(a) ({ __auto_type _a = (a); _a != _a ? _a : (__typeof__(_a))((_a > 0) - (_a < 0)); })
"""

_BITS = """#define tw_bits(source, target, x) ({ union { source _a; target _b; } _u = { ._a = (x) }; _u._b; })
"""

_ANY_DIVISOR = """#define tw_any_divisor(a, b, by_minus_one, otherwise) ({ \\
    __auto_type _n = (a); __auto_type _d = (b); \\
    _d == 0 ? 0 : (__typeof__(_d))-1 < 0 && _d == (__typeof__(_d))-1 ? (by_minus_one) : (otherwise); })
"""

# Arm has instructions that give NaN where either operand is; compilers do not find them.
_EXTREMES = "".join(
    f"""static inline float tw_f{name}(float a, float b) {{
#if defined(__aarch64__)
    __asm__("f{name} %s0, %s1, %s2" : "=w"(a) : "w"(a), "w"(b));
    return a;
#elif defined(__AVX512F__)
    float y = b;
    uint16_t number;
    __asm__("vcmpss $7, %1, %1, %0" : "=Yk"(number) : "v"(b));
    __asm__("v{name}ss %1, %2, %0%{{%3%}}" : "+v"(y) : "v"(a), "v"(b), "Yk"(number));
    return y;
#elif defined(__AVX__)
    float y, absent;  // the second operand where one is NaN; a branch would be foreseen half the time
    __asm__("v{name}ss %1, %2, %0" : "=x"(y) : "x"(a), "x"(b));
    __asm__("vcmpunordss %1, %1, %0" : "=x"(absent) : "x"(b));
    __asm__("vblendvps %2, %1, %0, %0" : "+x"(y) : "x"(b), "x"(absent));
    return y;
#else
    return tw_{name}(a, b);
#endif
}}
"""
    for name in ("max", "min")
)

_BFLOAT16 = """typedef struct { uint16_t bits; } tw_bf16;
static inline float tw_from_bf16(tw_bf16 x) {
    union { uint32_t u; float f; } v = { (uint32_t)x.bits << 16 };
    return v.f;
}
static inline tw_bf16 tw_to_bf16(float x) {
    union { float f; uint32_t u; } v = { x };
    if (x != x) return (tw_bf16){ (uint16_t)((v.u >> 16) | 0x40) };
    return (tw_bf16){ (uint16_t)((v.u + 0x7fff + ((v.u >> 16) & 1)) >> 16) };
}
"""


def once(text: str) -> str:
    """Definitions that a file may hold several times over, so that texts of kernels can follow each other in one."""
    name = f"TW_{crc32(text.encode()):08x}"
    return f"#ifndef {name}\n#define {name}\n{text}#endif\n"


def prelude(body: str) -> str:
    """What must stand before `body`: types, constants and the helpers it names."""
    extremes = once(_EXTREMES) if "tw_fmax(" in body or "tw_fmin(" in body else ""
    divisor = _ANY_DIVISOR if "tw_any_divisor(" in body else ""
    bits = _BITS if "tw_bits(" in body else ""
    bfloat16 = once(_BFLOAT16) if "tw_bf16" in body or "_bf16(" in body else ""
    return _INTEGERS + _PRELUDE + divisor + bits + extremes + bfloat16


def scalar_call(name: str, args: list[str], dtype: DType) -> str:
    """A row of the scalar table, on C scalars."""
    if name in INFIX:
        return f"({args[0]} {INFIX[name]} {args[1]})"
    if name in SHIFTS:
        return shift(name, args[0], args[1], dtype)
    if name == "select":
        return f"({args[0]} ? {args[1]} : {args[2]})"
    if name == "neg":
        return f"(-{args[0]})"
    if name == "not":
        return f"(!{args[0]})"
    if name in ("min", "max") and dtype is dtypes.float32:
        return f"tw_f{name}({', '.join(args)})"
    if name == "truncdiv":
        return f"({args[0]} / {args[1]})"
    if name in ("floordiv", "mod", "min", "max", "sign"):
        return f"tw_{name}({', '.join(args)})"
    if name == "abs":
        return _libm(name, args, dtype) if dtype.is_float else f"tw_abs({args[0]})"
    if name == "fmod" and dtype.is_int:
        return f"({args[0]} % {args[1]})"
    if name == "rsqrt":
        return f"(1 / {_libm('sqrt', args, dtype)})"
    if name == "sigmoid":
        # by e^-|x|, as the vector form: small results come out denormal, not 0
        half = _libm("exp", ["-tw_abs(_x)"], dtype)
        return f"({{ __auto_type _x = ({args[0]}); __auto_type _e = {half}; (_x < 0 ? _e : 1) / (1 + _e); }})"
    if name in ("isnan", "isinf"):
        return f"({args[0]} != {args[0]})" if name == "isnan" else f"(__builtin_isinf({args[0]}) != 0)"
    if name in _LIBM:
        return _libm(name, args, dtype)
    raise InternalError(f"the C renderer does not spell {name}")


def shift(name: str, value: str, count: str, dtype: DType) -> str:
    """A shift of a scalar; to the left among unsigned numbers, which lose their high bits where C leaves it open."""
    kind, places = TYPES[dtype.name], f"({count} & {dtype.bits - 1})"
    if name == "shr":
        return f"(({kind})({value} >> {places}))"
    wide = "uint64_t" if dtype.bits == 64 else "uint32_t"
    return f"(({kind})(({wide}){value} << {places}))"


def vector_shift(name: str, texts: list[str], dtype: DType, lanes: int) -> str:
    """A shift of a vector by the low bits of its counts; to the left among unsigned numbers."""
    whole = dtypes.by_name(f"uint{dtype.bits}") if name == "shl" else dtype
    kind, unsigned = vector_name(dtype, lanes), vector_name(whole, lanes)
    return f"(({kind})(({unsigned}){texts[0]} {SHIFTS[name]} ({unsigned})({texts[1]} & {dtype.bits - 1})))"


def bits_as(text: str, source: DType, target: DType) -> str:
    """The bits of a scalar as those of another type."""
    return f"tw_bits({TYPES[source.name]}, {TYPES[target.name]}, {text})"


def wrapping(name: str, args: list[str], dtype: DType) -> str:
    """Integer arithmetic that may leave its type: among unsigned numbers, where C says that it wraps around."""
    kind = TYPES[dtype.name]
    wide = "uint64_t" if dtype.bits == 64 else "uint32_t"
    if name == "neg":
        return f"(({kind})(0 - ({wide}){args[0]}))"
    if name == "abs":
        return f"({{ {kind} _a = {args[0]}; ({kind})(_a < 0 ? 0 - ({wide})_a : ({wide})_a); }})"
    return f"(({kind})(({wide}){args[0]} {INFIX[name]} ({wide}){args[1]}))"


def any_divisor(name: str, args: list[str], dtype: DType) -> str:
    """Integer division that may be by zero, which gives 0, or of the lowest number by -1, which processors stop at."""
    minus_one = wrapping("neg", ["_n"], dtype) if name in ("truncdiv", "floordiv") else "0"
    return f"tw_any_divisor({args[0]}, {args[1]}, {minus_one}, {scalar_call(name, ['_n', '_d'], dtype)})"


def _libm(name: str, args: list[str], dtype: DType) -> str:
    return f"__builtin_{_LIBM[name]}{'' if dtype is dtypes.float64 else 'f'}({', '.join(args)})"


def literal(value: Const) -> str:
    if value.dtype.kind == "b":
        return "1" if value.value else "0"
    if value.dtype.is_int or value.dtype.is_storage:
        return _integer(int(value.value))
    number = _float(float(value.value), value.dtype)
    return f"tw_to_bf16({number})" if value.dtype is dtypes.bfloat16 else number


def _float(number: float, dtype: DType) -> str:
    if math.isnan(number):
        return "NAN"
    if math.isinf(number):
        return "INFINITY" if number > 0 else "(-INFINITY)"
    if dtype is dtypes.float64:
        return repr(number)
    text = repr(float(np.float32(number))) if math.isfinite(float(np.float32(number))) else repr(number)
    text = np.format_float_scientific(np.float32(number), unique=True) if "e" in text else text
    if number < 0 or (number == 0 and math.copysign(1, number) < 0):
        return f"({text}f)"
    return f"{text}f"


def _integer(value: int) -> str:
    if abs(value) < 1 << 31:
        return str(value)
    if value == -(1 << 63):  # C has no negative literals, and the positive one does not fit
        return "(-9223372036854775807LL - 1)"
    return f"{value}LL" if value < 1 << 63 else f"{value}ULL"


def cast(text: str, source: DType, target: DType) -> str:
    if source is dtypes.bfloat16:
        return cast(f"tw_from_bf16({text})", dtypes.float32, target)
    if target is dtypes.bfloat16:
        return f"tw_to_bf16((float)({text}))"
    if target.kind == "b":
        return f"({text} != 0)"
    return f"(({TYPES[target.name]}){text})"


def mask_dtype(dtype: DType) -> DType:
    return {8: dtypes.int8, 16: dtypes.int16, 32: dtypes.int32, 64: dtypes.int64}[dtype.bits]


def vector_name(dtype: DType, lanes: int) -> str:
    return f"v{lanes}bf16" if dtype is dtypes.bfloat16 else f"v{lanes}{dtype.kind}{dtype.bits}"


def element_type(dtype: DType) -> str:
    """What a vector holds: C has no vectors of structs, so those of bfloat16 hold its bits."""
    return "uint16_t" if dtype is dtypes.bfloat16 else TYPES[dtype.name]
