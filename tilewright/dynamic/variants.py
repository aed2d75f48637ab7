"""Compiled forms of a model with open shapes: what each is for, and the ports that they share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright.calls.arguments import Array
from tilewright.dynamic.model import Compiled
from tilewright.errors import printable

Shapes = Mapping[str, tuple[int, ...]]
Values = Mapping[str, Array]
Extents = tuple[int | str | None, ...]


@dataclass(frozen=True)
class OpenPort:
    """An input or output: an open dimension is its name, or None; a shape that the model does not tell is None."""

    name: str
    dtype: np.dtype[Any] | None
    shape: Extents | None

    def __str__(self) -> str:
        kind = "?" if self.dtype is None else self.dtype.name
        inside = "..." if self.shape is None else ", ".join("?" if n is None else str(n) for n in self.shape)
        return printable(f"{self.name}: {kind}[{inside}]")


@dataclass(frozen=True)
class Variant:
    """A compiled form of a model: for these shapes of its inputs, and for these values of those that decide shapes."""

    shapes: Shapes
    values: Values
    compile_seconds: float

    def __str__(self) -> str:
        parts = [f"{name} {'x'.join(map(str, shape)) or 'scalar'}" for name, shape in self.shapes.items()]
        parts += [f"{name} = {array.tolist()}" for name, array in self.values.items()]
        return printable(", ".join(parts)) or "no inputs"


@dataclass(frozen=True)
class KeptVariant:
    """A variant and the model compiled for it."""

    variant: Variant
    model: Compiled
