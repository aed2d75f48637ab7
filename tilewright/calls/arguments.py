"""What a model is called with: arguments in order or by name, what each becomes as an array, and which it may fill."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from tilewright.errors import InputError, ModelError, OptionError, ToolError, printable

Array = NDArray[Any]
Shapes = Mapping[str, int | Sequence[int]]

_DLPACK_CPU = 1  # kDLCPU


@dataclass(frozen=True)
class Port:
    """An input or an output of a model."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{printable(self.name)}: {self.dtype.name}{list(self.shape)}"


class NotPickled:
    """A compiled model: copies of it are itself, since a call keeps nothing in it, and no pickle can hold its code."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise OptionError("a compiled model is not pickled: model.save(DIR), and tilewright.load(DIR) elsewhere")


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


def by_name(names: Sequence[str], results: Sequence[Any]) -> dict[str, Any]:
    """Outputs by their names, which a file may give twice."""
    named = dict(zip(names, results, strict=True))
    if len(named) < len(names):
        twice = next(name for place, name in enumerate(names) if name in names[:place])
        raise InputError(f"two outputs are called {twice!r}; call the model itself, which gives all in order")
    return named


def random_arrays(ports: Sequence[Port], seed: int) -> dict[str, Array]:
    """Arrays to try a model on: normal floats, and integers 0 or 1, in range for indices and masks alike."""
    rng = np.random.default_rng(seed)
    arrays: dict[str, Array] = {}
    for port in ports:
        is_whole = port.dtype.kind in "iub"
        values = rng.integers(0, 2, port.shape) if is_whole else rng.standard_normal(port.shape)
        arrays[port.name] = np.asarray(values).astype(port.dtype)
    return arrays


def as_array(value: Any, name: str) -> Array:
    if isinstance(value, np.ma.MaskedArray):
        raise InputError(f"input {name!r} is a masked array, and a model knows no masks; fill it with .filled(...)")
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


def on_host(value: Any) -> Any:
    """What lies on a device copied from it, as its library does that; anything else as it is."""
    device = getattr(value, "__dlpack_device__", None)
    if device is None or device()[0] == _DLPACK_CPU:
        return value
    copies = (getattr(value, name, None) for name in ("cpu", "get", "numpy"))  # of PyTorch, CuPy, our own arrays
    copy = next(filter(callable, copies), None)
    return value if copy is None else copy()


def count_inputs(names: Sequence[str]) -> str:
    if not names:
        return "no inputs"
    return f"{len(names)} input{'s' if len(names) > 1 else ''} ({', '.join(names)})"


def suggest(name: object, names: Sequence[str]) -> str:
    """The nearest of `names`, or all of them."""
    nearest = difflib.get_close_matches(name, names, n=1) if isinstance(name, str) else []
    return f"did you mean {nearest[0]!r}?" if nearest else f"the model takes {count_inputs(names)}"


def convert(value: Any, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """`value` as a contiguous array, or an error that says what the input expects. Values are never converted."""
    array = as_array(value, name)
    if array.dtype.newbyteorder("=") != dtype:
        raise InputError(
            f"input {name!r} must be {dtype.name}, not {array.dtype.name}; convert it with .astype({dtype.name!r})"
        )
    if array.shape != shape:
        raise InputError(f"input {name!r} must have shape {shape}, not {array.shape}")
    if array.dtype == dtype and array.flags.c_contiguous and array.flags.aligned:
        return array
    try:
        return np.array(array, dtype=dtype, order="C", copy=True)
    except MemoryError as error:
        raise ToolError(f"there is no memory for a copy of input {name!r}; give it contiguous") from error


def check_output(value: object, port: Port) -> None:
    """An array of the caller's that can be filled in place, or an error that says what it must be."""
    must = f"output {port.name!r} must be a writable C-contiguous {port.dtype.name} array of shape {port.shape}"
    if not isinstance(value, np.ndarray):
        raise InputError(f"{must}, not a {type(value).__name__}")
    if value.dtype != port.dtype or value.shape != port.shape:
        raise InputError(f"{must}, not {value.dtype.name} of shape {value.shape}")
    if not value.flags.c_contiguous or not value.flags.aligned or not value.flags.writeable:
        raise InputError(must)


def check_apart(
    inputs: Sequence[Array], input_names: Sequence[str], outputs: Sequence[Array], output_names: Sequence[str]
) -> None:
    """Outputs are written while inputs, and the other outputs, are still in use."""
    taken = [(array, f"input {name!r}") for array, name in zip(inputs, input_names, strict=True)]
    for array, name in zip(outputs, output_names, strict=True):
        for other, what in taken:
            if np.may_share_memory(array, other):
                raise InputError(f"output {name!r} lies in the memory of {what}; give it an array of its own")
        taken.append((array, f"output {name!r}"))


def is_model_proto(model: object) -> bool:
    """By its description, so that onnx is not imported to find out."""
    return getattr(getattr(model, "DESCRIPTOR", None), "full_name", "") == "onnx.ModelProto"


def no_model(given: object) -> OptionError:
    what = f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"
    return OptionError(
        f"a model is a path, bytes, an onnx.ModelProto, or a torch.nn.Module with example inputs, not {what}"
    )


def checked_path(path: str | os.PathLike[str]) -> Path:
    found = Path(path)
    if found.is_dir():
        raise ModelError(f"'{found}' is a folder; give the path of an ONNX file")
    if not found.exists():
        raise ModelError(f"model file '{found}' does not exist")
    return found


def checked_shapes(shapes: Shapes | None) -> dict[str, int | tuple[int, ...]]:
    if shapes is None:
        return {}
    if not isinstance(shapes, Mapping):
        raise OptionError(f"shapes must be a dict from a name to a shape, not a {type(shapes).__name__}")
    checked: dict[str, int | tuple[int, ...]] = {}
    for name, shape in shapes.items():
        extents = _extents(shape)
        if extents is None or not isinstance(name, str):
            raise OptionError(f"the shape of {name!r} must be a number or a tuple of them, not {shape!r}")
        checked[name] = extents
    return checked


def _extents(shape: object) -> int | tuple[int, ...] | None:
    """A number or several, of Python or NumPy, none of them negative."""
    if isinstance(shape, int | np.integer):
        return int(shape) if not isinstance(shape, bool) and shape >= 0 else None
    if isinstance(shape, str) or not isinstance(shape, Sequence | np.ndarray):
        return None
    found = [_extents(extent) for extent in shape]
    return tuple(n for n in found if isinstance(n, int)) if all(isinstance(n, int) for n in found) else None
