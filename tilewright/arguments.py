"""What a model is called with: arguments in order or by name, and what each becomes as an array."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewright.errors import InputError

Array = NDArray[Any]


def bind(names: Sequence[str], args: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
    """The values in the order of the inputs, whichever way they were given: in order, by name, or as one dict."""
    if len(args) == 1 and not named and isinstance(args[0], Mapping):
        return bind(names, (), args[0])
    if len(args) > len(names):
        raise InputError(f"the model takes {count_inputs(names)}, but {len(args)} were given")
    values = dict(zip(names, args, strict=False))
    for name, value in named.items():
        if name not in names:
            raise InputError(f"there is no input {name!r}; {suggest(name, names)}")
        if name in values:
            raise InputError(f"input {name!r} is given twice: once in order and once by name")
        values[name] = value
    for name in names:
        if name not in values:
            raise InputError(f"input {name!r} is missing; the model takes {count_inputs(names)}")
    return [values[name] for name in names]


def as_array(value: Any, name: str) -> Array:
    if isinstance(value, np.ndarray):
        return np.asarray(value)
    if not hasattr(value, "__dlpack__") and not hasattr(value, "__array__"):
        raise InputError(f"input {name!r} must be a NumPy array or have DLPack, not a {type(value).__name__}")
    # A CPU tensor of a type that DLPack cannot hand to NumPy may still know how to become an array.
    routes = [np.from_dlpack] if hasattr(value, "__dlpack__") else []
    routes += [np.asarray] if hasattr(value, "__array__") else []
    reason = ""
    for route in routes:
        try:
            return route(value)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0]
    raise InputError(f"input {name!r}, a {type(value).__name__}, cannot be read as an array: {reason}")


def count_inputs(names: Sequence[str]) -> str:
    if not names:
        return "no inputs"
    return f"{len(names)} input{'s' if len(names) > 1 else ''} ({', '.join(names)})"


def suggest(name: object, names: Sequence[str]) -> str:
    """The nearest of `names`, or all of them."""
    nearest = difflib.get_close_matches(name, names, n=1) if isinstance(name, str) else []
    return f"did you mean {nearest[0]!r}?" if nearest else f"the model takes {count_inputs(names)}"
