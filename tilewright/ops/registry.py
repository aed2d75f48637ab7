"""The registry of operators: which function lowers which operator from which operator-set version on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Operator:
    """One entry: `lower(builder, node, *tensors)` gives the node's outputs.

    `constants` are positions of inputs whose values decide shapes: known when compiling, or from an earlier part.
    """

    name: str
    domain: str
    since: int
    lower: Callable[..., Any]
    constants: tuple[int, ...] = ()


# Attributes of ONNX's own operators that say yes or no.
FLAGS = frozenset((
    "align_corners", "allowzero", "antialias", "ceil_mode", "center_point_box", "count_include_pad", "detect_negative",
    "detect_positive", "exclude_outside", "exclusive", "fmod", "input_forget", "inverse", "is_causal",
    "keepdims", "largest", "layout", "linear_before_reset", "new_axis", "noop_with_empty_axes", "onesided", "reverse",
    "saturate", "select_last_index", "sorted", "storage_order", "training_mode", "transA", "transB", "upper",
))  # fmt: skip

_ENTRIES: dict[tuple[str, str], list[Operator]] = {}  # filled while the families are imported, then only read


def operator(
    *names: str, since: int = 1, domain: str = "", constants: tuple[int, ...] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function for operators of these names, from operator-set version `since` on."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            entries = _ENTRIES.setdefault((domain, name), [])
            if any(e.since == since for e in entries):
                raise ValueError(f"operator {name} since {since} is registered twice")
            entries.append(Operator(name, domain, since, function, constants))
            entries.sort(key=lambda e: e.since)
        return function

    return register


def find(name: str, domain: str = "", version: int = 0) -> Operator | None:
    """The entry that holds for an operator-set version (0: the newest), or None."""
    known = _ENTRIES.get(("" if domain == "ai.onnx" else domain, name), [])
    fitting = [e for e in known if version == 0 or e.since <= version]
    return fitting[-1] if fitting else None


def supported() -> list[str]:
    """Names of all operators, domain first where it is not ONNX's own."""
    return sorted(f"{domain}.{name}" if domain else name for domain, name in _ENTRIES)
