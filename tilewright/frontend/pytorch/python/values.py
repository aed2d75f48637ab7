"""Values as rewritten code meets them: tensors, plain ones, and names that have none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree

from tilewright.errors import UnsupportedError

Values = tuple[Any, ...]
Step = Callable[..., Any]
# What a module's own code, or PyTorch's exporter with it, may raise.
CODE_ERRORS = (RuntimeError, TypeError, ValueError, AssertionError, NotImplementedError, AttributeError, LookupError,
               NameError, StopIteration)  # fmt: skip
NO_TEXT = "text is made of a number or a tensor that only data tell; leave it out, or print it"
# What says that code cannot be followed, by us or by PyTorch.
REFUSALS = (UnsupportedError, DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)


class Unbound:
    """The value of a name that has none, or another one in each branch: an error where it is used."""

    def __init__(self, name: str, why: str) -> None:
        self._text, self.why = f"'{name}' {why}", why

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedError(self._text)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = pytree.tree_leaves((args, kwargs or {}))
        raise UnsupportedError(next(x._text for x in leaves if isinstance(x, Unbound)))

    def _refuse(self, *_: Any) -> Any:
        raise UnsupportedError(self._text)

    __bool__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __getitem__ = _refuse
    __setitem__ = __call__ = __iter__ = __len__ = __lt__ = __gt__ = __le__ = __ge__ = __neg__ = __index__ = _refuse
    __eq__ = __ne__ = __hash__ = _refuse


def is_data(value: Any) -> bool:
    """Whether only the data tell a value."""
    return isinstance(value, torch.Tensor)


def numeral(x: torch.Tensor) -> torch.Tensor:
    """The tensor as what stands for one of Python's own numbers, which nobody can change in place."""
    x._is_numeral = True  # type: ignore[attr-defined]
    return x


def is_numeral(value: Any) -> bool:
    """Whether a value is one of Python's own numbers, or a tensor that stands for one."""
    return is_number(value) or (is_data(value) and getattr(value, "_is_numeral", False))


def made_of(found: Any, operands: Iterable[Any]) -> Any:
    """What is computed of these: of numbers alone, a number."""
    if is_data(found) and not found.ndim and all(map(is_numeral, operands)):
        return numeral(found)
    return found


def flag(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        return torch.full((), bool(value), dtype=torch.bool)
    found: torch.Tensor = value.reshape(())
    return found if found.dtype is torch.bool else found != 0


def number(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.full((), value, dtype=torch.int64)


def number_like(value: Any, like: Any = None) -> torch.Tensor:
    """A plain number as a tensor, of the type of another one."""
    if isinstance(value, torch.Tensor):
        return value
    return torch.full((), value, dtype=like.dtype if isinstance(like, torch.Tensor) else kind_of_number(value))


def kind_of_number(value: Any) -> torch.dtype:
    """The type of a tensor, or of one that a plain number becomes."""
    if isinstance(value, torch.Tensor):
        return value.dtype
    return {bool: torch.bool, int: torch.int64}.get(type(value), torch.get_default_dtype())


def is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float)


def kind_of(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


def is_same(one: Any, other: Any) -> bool:
    """Whether a value is the one it was."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    return one is other or bool(type(one) is type(other) and one == other)


def hashed(value: Any) -> Any:
    """A value as an element of a set, or a key of a dict, which only plain values are."""
    if any(is_data(x) and is_numeral(x) for x in pytree.tree_leaves(value)):
        raise UnsupportedError("a number that data tell is put into a set or a dict, or looked for in one; use a list")
    return value


def spelled(value: Any) -> Any:
    """A value that text is made of."""
    if any(map(is_data, pytree.tree_leaves(value))):
        raise UnsupportedError(NO_TEXT)
    return value
