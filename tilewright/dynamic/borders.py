"""What a model that runs in parts takes and gives at its border, and checks of what a caller brings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright.calls.arguments import Array, as_array
from tilewright.errors import InputError, printable

Scope = dict[str, Any]  # an array, a list of arrays, None or strings by its name in the graph


@dataclass(frozen=True)
class Border:
    """An input or output as the model declares it: strings have no element type here, an open dimension is its name or
    None, and a shape may be unknown."""

    name: str
    dtype: np.dtype[Any] | None = None
    shape: tuple[int | str | None, ...] | None = None
    is_sequence: bool = False
    is_optional: bool = False
    is_checked: bool = True  # the tensors inside are of this type and shape

    def __str__(self) -> str:
        inside = "..." if self.shape is None else ", ".join("?" if n is None else str(n) for n in self.shape)
        text = f"{'strings' if self.dtype is None else self.dtype.name}[{inside}]" if self.is_checked else "?"
        text = f"sequence({text})" if self.is_sequence else text
        return printable(f"{self.name}: {f'optional({text})' if self.is_optional else text}")


def checked(ports: Sequence[Border], values: Sequence[Any]) -> Scope:
    """The values by name, as arrays and lists of them, which fit what the model declares."""
    sizes: dict[str, tuple[int, str]] = {}
    scope: Scope = {}
    for port, value in zip(ports, values, strict=True):
        if value is None and (port.is_optional or not port.is_checked):
            scope[port.name] = None
        elif isinstance(value, list | tuple) and (port.is_sequence or not port.is_checked):
            scope[port.name] = [_checked_array(port, item, {}) for item in value]
        elif port.is_sequence:
            raise InputError(f"input {port.name!r} must be a list of arrays, not a {type(value).__name__}")
        else:
            scope[port.name] = _checked_array(port, value, sizes)
    return scope


def _checked_array(port: Border, value: Any, sizes: dict[str, tuple[int, str]]) -> Array:
    array = np.asarray(value) if port.dtype is None and isinstance(value, str | list) else as_array(value, port.name)
    if not port.is_checked:
        return array
    if port.dtype is None:
        if array.dtype.kind not in "OUS":
            raise InputError(f"input {port.name!r} must hold strings, not {array.dtype.name}")
    elif array.dtype.newbyteorder("=") != port.dtype:
        raise InputError(f"input {port.name!r} must be {port.dtype.name}, not {array.dtype.name}")
    if port.shape is None:
        return array
    fits = len(array.shape) == len(port.shape)
    if not fits or any(isinstance(n, int) and n != m for n, m in zip(port.shape, array.shape, strict=True)):
        raise InputError(f"input {port.name!r} must fit {port}, and has the shape {array.shape}")
    for name, extent in zip(port.shape, array.shape, strict=True):
        if isinstance(name, str):
            size, where = sizes.setdefault(name, (extent, port.name))
            if size != extent:
                raise InputError(f"dimension {name!r} is {size} in input {where!r} and {extent} in input {port.name!r}")
    return array
