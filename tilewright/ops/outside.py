"""What no tensor expression says: the closed list of operators that run outside of native code, by ONNX's reference
evaluator, and marks for values of a graph that are no tensors."""

from __future__ import annotations

from tilewright.errors import OutsideError


class Mark:
    """A value of a graph that is no tensor and no sequence of them."""


ABSENT = Mark()  # an optional value that holds nothing
OUTSIDE = Mark()  # strings: only operators outside of native code read them

# Strings and images. Any operator that reads strings runs outside too; of sequences and optional values, none does.
OUTSIDE_OPERATORS = frozenset({
    ("", "ImageDecoder"),
    ("", "RegexFullMatch"),
    ("", "StringConcat"),
    ("", "StringNormalizer"),
    ("", "StringSplit"),
})  # fmt: skip


def outside(node: str, why: str) -> OutsideError:
    return OutsideError(f"{node}: {why}, for which there is no native code; fallback='host' lets ONNX's evaluator in")
