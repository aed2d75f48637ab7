"""How names, numbers and operations are spelled in the text of every form."""

from __future__ import annotations

import json
import re

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.dtypes import DType

_WORDS = """
    program symbol input output constant monoid layout staged scan region host end let in and or true false inf nan
    if else alloc barrier do parallel block thread vector serial unroll descending unique limit reverse
    sum product least largest all any reduce scatter sort
"""
KEYWORDS = frozenset(_WORDS.split()) | {d.name for d in dtypes.EVERY}
SUFFIX = {
    "float32": "", "int64": "", "bool": "", "float64": "_f64", "float16": "_f16", "bfloat16": "_bf16", "int8": "_i8",
    "int16": "_i16", "int32": "_i32", "uint8": "_u8", "uint16": "_u16", "uint32": "_u32", "uint64": "_u64",
    "tf32": "_tf32",
    **{d.name: f"_s{d.onnx}" for d in dtypes.STORAGE},
}  # fmt: skip
PRECEDENCE = {
    "or": 1, "and": 2, "eq": 3, "ne": 3, "lt": 3, "le": 3, "add": 4, "sub": 4,
    "mul": 5, "div": 5, "floordiv": 5, "mod": 5,
}  # fmt: skip
BITS = "bits_"  # in front of a type: a value's bits as one of that type
ATOM = 9  # binds tighter than any operation
LET_SIZE = 16  # a shared operand of this many nodes is named, so that text stays linear in the expression
LET_DEPTH = 40  # a deep chain is cut into named pieces, so that reading it back nests little
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")


def name_text(name: str) -> str:
    if _WORD.fullmatch(name) and name not in KEYWORDS and not re.match(r"(inf|nan)_", name):
        return name
    return json.dumps(name)


def const_text(value: int | float | bool, dtype: DType) -> str:
    if dtype.kind == "b":
        return "true" if value else "false"
    return f"{value!r}{SUFFIX[dtype.name]}"
