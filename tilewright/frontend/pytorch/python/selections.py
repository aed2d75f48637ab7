"""Elements of a tensor of which data tell how many there are, `x[mask]`, `x[:n]` and `nonzero()`: kept as the whole
tensor and a mask as long as nobody asks how they lie, so that bodies of branches and loops can have them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tilewright.errors import UnsupportedError
from tilewright.frontend.pytorch.own_operators import taken
from tilewright.frontend.pytorch.python.values import is_data, numeral

_ELEMENTWISE = {
    "add", "sub", "mul", "div", "truediv", "floordiv", "pow", "mod", "neg", "abs", "exp", "log", "sqrt", "rsqrt",
    "tanh", "sigmoid", "relu", "clamp", "clip", "gt", "lt", "ge", "le", "eq", "ne", "logical_not", "logical_and",
    "logical_or", "sin", "cos", "square", "float", "long", "int", "bool", "half", "double", "sign", "round", "floor",
    "ceil", "trunc", "erf", "gelu", "silu", "where", "maximum", "minimum", "clone", "detach", "exp2", "log2", "log1p",
    "floor_divide", "remainder",
}  # fmt: skip
# What is done along dimensions behind the first to each of the elements alone.
_ROWS = {"sum", "any", "all", "prod", "mean", "max", "min", "amax", "amin", "argmax", "argmin", "softmax",
         "log_softmax", "logsumexp", "std", "var", "cumsum", "cumprod"}  # fmt: skip
_WHOLE = {"numel", "flatten", "reshape"} | _ROWS


@dataclass(frozen=True)
class Bounds:
    """Where a slice of the first dimension begins and how long it is, which data tell."""

    start: torch.Tensor
    length: torch.Tensor

    @cached_property
    def numbers(self) -> tuple[Any, Any]:
        """Both as sizes."""
        return self.start.item(), self.length.item()

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """The part of a tensor, which is a view of it."""
        start, length = self.numbers
        for size in (start, length, x.shape[0] - start - length):
            torch._check(size >= 0)
        return x.narrow(0, start, length)


class Selection:
    """The elements of a tensor where a mask over its first dimensions is set, in order. Those of a slice, which has
    bounds, are the tensor's own; others are copies."""

    def __init__(
        self, whole: torch.Tensor, mask: torch.Tensor, by: tuple[Any, ...] = (), bounds: Bounds | None = None
    ) -> None:
        self._whole, self.mask, self._bounds = whole, mask, bounds
        self._by = by or _key(mask)
        self._elements: torch.Tensor | None = None  # where somebody has asked for them
        self._version = 0

    @staticmethod
    def of(x: torch.Tensor, mask: torch.Tensor) -> Selection:
        """What a tensor has now where a mask is set now."""
        return Selection(x, mask).copy()

    def copy(self) -> Selection:
        return Selection(self.whole.clone(), self.mask.clone(), self._by, self._bounds)

    def apart(self) -> Selection:
        """As PyTorch has it: chosen by a mask a copy, by a slice a view."""
        return self.copy() if self._bounds is None else self

    @staticmethod
    def between(x: torch.Tensor, start: Any, stop: Any) -> Selection:
        """The slice of a tensor from one place to another, as they are now; either may be None."""
        extent = x.shape[0]
        first = torch.full((), 0, dtype=torch.int64) if start is None else _place(start, extent)
        last = torch.full((), extent, dtype=torch.int64) if stop is None else _place(stop, extent)
        at = torch.arange(extent, device=x.device)
        bounds = Bounds(first, (last - first).clamp(min=0))
        return Selection(x, (at >= first) & (at < last), (*_key(start), *_key(stop), extent), bounds)

    def is_by(self, mask: Any) -> bool:
        """Whether the elements are those where this mask is set."""
        other = mask._by if isinstance(mask, Selection) else _key(mask)
        return len(other) == len(self._by) and all(
            a is b or (not is_data(a) and not is_data(b) and a == b) for a, b in zip(other, self._by, strict=True)
        )

    @property
    def whole(self) -> torch.Tensor:
        if self._is_apart:
            raise UnsupportedError(
                "elements chosen by a mask are changed in place through a view of them, and then used inside a branch "
                "or a loop that data decide; change them all, or make a new tensor"
            )
        return self._whole

    @property
    def _is_apart(self) -> bool:
        """Whether the elements have been changed since somebody asked for them, so that they alone are right."""
        return self._elements is not None and self._elements._version != self._version

    # what needs no order

    @property
    def count(self) -> torch.Tensor:
        return numeral(self.mask.sum())

    @property
    def shape(self) -> tuple[Any, ...]:
        return (self.count, *self._whole.shape[self.mask.ndim :])

    @property
    def dtype(self) -> torch.dtype:
        return self._whole.dtype

    @property
    def device(self) -> torch.device:
        return self._whole.device

    @property
    def ndim(self) -> int:
        return 1 + self._whole.ndim - self.mask.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> torch.Tensor:
        return numeral(self.count * self._whole[(0,) * self.mask.ndim].numel())

    def sum(self, dim: Any = None, **named: Any) -> Any:
        return self._reduced("sum", 0, dim, named)

    def any(self, dim: Any = None, **named: Any) -> Any:
        return self._reduced("any", False, dim, named)

    def all(self, dim: Any = None, **named: Any) -> Any:
        return self._reduced("all", True, dim, named)

    def prod(self, dim: Any = None, **named: Any) -> Any:
        return self._reduced("prod", 1, dim, named)

    def max(self, dim: Any = None, **named: Any) -> Any:
        return self._extreme("amax", dim, named)

    def min(self, dim: Any = None, **named: Any) -> Any:
        return self._extreme("amin", dim, named)

    def mean(self, dim: Any = None, **named: Any) -> Any:
        rows = self._of_rows("mean", dim, **named)
        if rows is not None:
            return rows
        if dim not in (None, 0) or named or not self.dtype.is_floating_point or self._is_apart:
            return self.elements().mean(*(() if dim is None else (dim,)), **named)
        return self.sum(dim) / (self.numel() if dim is None else self.count)

    def item(self) -> Any:
        return numeral(self.sum())  # of one element

    def _wide(self) -> torch.Tensor:
        return self.mask.reshape(*self.mask.shape, *[1] * (self._whole.ndim - self.mask.ndim))

    def _reduced(self, name: str, neutral: Any, dim: Any, named: dict[str, Any]) -> Any:
        rows = self._of_rows(name, dim, **named)
        if rows is not None:
            return rows
        if dim not in (None, 0) or named or self._is_apart:
            return getattr(self.elements(), name)(*(() if dim is None else (dim,)), **named)
        filled = self.whole.masked_fill(~self._wide(), neutral)
        return getattr(filled, name)() if dim is None else getattr(filled.flatten(0, self.mask.ndim - 1), name)(0)

    def _of_rows(self, name: str, *args: Any, **named: Any) -> Any:
        """What is done along other dimensions than that of the elements; None where it is not."""
        dim, *others = args or (named.pop("dim", None),)
        dims = [d % self.ndim for d in (dim if isinstance(dim, tuple | list) else (dim,)) if isinstance(d, int)]
        if 0 in dims or not dims or self._is_apart:
            return None
        shifted = [d + self.mask.ndim - 1 for d in dims]
        named.pop("_stacklevel", None)  # of PyTorch's own functions
        function = getattr(self.whole, name)
        found = function(tuple(shifted) if isinstance(dim, tuple | list) else shifted[0], *others, **named)
        return pytree.tree_map(lambda x: Selection(x, self.mask, self._by, self._bounds), found)

    def _extreme(self, name: str, dim: Any, named: dict[str, Any]) -> Any:
        rows = self._of_rows(name[1:], dim, **named)
        if rows is not None:
            return rows
        if dim is not None or named or self.dtype is torch.bool or self._is_apart:
            return getattr(self.elements(), name[1:])(*(() if dim is None else (dim,)), **named)
        info = torch.finfo(self.dtype) if self.dtype.is_floating_point else torch.iinfo(self.dtype)
        return getattr(self.whole.masked_fill(~self._wide(), info.min if name == "amax" else info.max), name)()

    def put_into(self, x: torch.Tensor, mask: Any) -> torch.Tensor | None:
        """The tensor with these elements where its mask, which is theirs, is set; None where it is another."""
        is_same = self.is_by(mask) and x.ndim == self._whole.ndim and x.shape[: self.mask.ndim] == self.mask.shape
        return torch.where(self._wide(), self.whole.to(x.dtype), x) if is_same and not self._is_apart else None

    # what does

    def elements(self) -> torch.Tensor:
        if self._bounds is not None:
            return self._bounds.of(self._whole)
        if self._elements is None:
            self._elements = self._whole[self.mask]
            self._version = self._elements._version
        return self._elements

    def element(self, place: Any) -> torch.Tensor:
        """The element at a place that may be a tensor; the first one where there is none."""
        at = self._mask_at(place).flatten().to(torch.int64).argmax()
        return taken(self.whole.flatten(0, self.mask.ndim - 1), 0, at)

    def _mask_at(self, place: Any) -> torch.Tensor:
        """A mask of the element at a place alone."""
        flat = self.mask.flatten()
        wanted = torch.where(torch.as_tensor(place) < 0, place + self.count, place) + 1
        return ((flat.cumsum(0) == wanted) & flat).reshape(self.mask.shape)

    def flatten(self, start: int = 0, end: int = -1) -> Any:
        """All elements in one row, which they lie in as they did before."""
        if (start % self.ndim, end % self.ndim) != (0, self.ndim - 1) or self._elements is not None:
            return self.elements().flatten(start, end)
        many = prod(self._whole.shape[self.mask.ndim :])
        mask = self._wide().expand(self._whole.shape).reshape(-1)
        bounds = None if self._bounds is None else Bounds(self._bounds.start * many, self._bounds.length * many)
        return Selection(self._whole.reshape(-1), mask, (*self._by, "flat", many), bounds)

    def reshape(self, *shape: Any) -> Any:
        return self.flatten() if shape in ((-1,), ((-1,),), ([-1],)) else self.elements().reshape(*shape)

    view = reshape

    def change(self, name: str, *args: Any, **named: Any) -> Selection:
        """An operation in place, such as add_."""
        is_each = name.rstrip("_") in _ELEMENTWISE | {"fill", "zero", "copy"} and self._fits(args, named)
        if is_each and self._elements is None:
            new = self._whole.clone()
            given, by_name = _wholes((args, named))
            if name == "copy_" and not is_data(given[0]):
                name = "fill_"
            getattr(new, name)(*given, **by_name)
            self._whole.copy_(torch.where(self._wide(), new, self._whole))
        else:
            getattr(self.elements(), name)(*map_elements(args), **map_elements(named))
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.endswith("_"):
            return partial(self.change, name)
        if name in _ROWS:
            return partial(self._along, name)
        if name in _ELEMENTWISE:
            return lambda *args, **named: self._each(lambda x, *a, **n: getattr(x, name)(*a, **n), (self, *args), named)
        return getattr(self.elements(), name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = next(x for x in pytree.tree_leaves((args, kwargs or {}), is_leaf=_is_selection) if _is_selection(x))
        name = getattr(function, "__name__", "")
        if name in _ELEMENTWISE:
            return first._each(function, args, kwargs or {})
        if args and args[0] is first and name in _WHOLE:
            return getattr(first, name)(*args[1:], **(kwargs or {}))
        return function(*map_elements(args), **map_elements(kwargs or {}))

    def _fits(self, args: Any, named: Any) -> bool:
        """Whether all of these are selections by this mask, or the same for all its elements."""
        tail = self._whole.ndim - self.mask.ndim
        return not self._is_apart and all(
            self.is_by(x) and not x._is_apart if isinstance(x, Selection) else not is_data(x) or x.ndim <= tail
            for x in pytree.tree_leaves((args, named), is_leaf=_is_selection)
        )

    def _along(self, name: str, *args: Any, **named: Any) -> Any:
        rows = self._of_rows(name, *args, **named)
        return getattr(self.elements(), name)(*args, **named) if rows is None else rows

    def _each(self, function: Callable[..., Any], args: Any, named: Any) -> Any:
        """An operation on each element, where all that it is given are selections by this mask or the same for all."""
        found: Any = function(*_wholes(args), **_wholes(named)) if self._fits(args, named) else None
        if is_data(found) and found.shape[: self.mask.ndim] == self.mask.shape:
            return Selection(found, self.mask, self._by, self._bounds)
        return function(*map_elements(args), **map_elements(named))

    def _columns(self, key: Any) -> Selection | None:
        """The same elements of other dimensions, `x[:, k]`: a view."""
        parts = key if isinstance(key, tuple) else (key,)
        is_plain = all(isinstance(p, int | slice) for p in parts) and parts[:1] == (slice(None),)
        if not is_plain or self._elements is not None:
            return None
        part = self._whole[(*[slice(None)] * self.mask.ndim, *parts[1:])]
        return Selection(part, self.mask, self._by, self._bounds)

    def __getitem__(self, key: Any) -> Any:
        columns = self._columns(key)
        if columns is not None:
            return columns
        if self._elements is None and _is_place(key):
            return self.element(key)
        return self.elements()[map_elements(key)]

    def __setitem__(self, key: Any, value: Any) -> None:
        columns = self._columns(key)
        if columns is not None:
            columns.copy_(value)
        elif self._elements is None and _is_place(key) and not isinstance(value, Selection):
            Selection(self._whole, self._mask_at(key)).change("copy_", torch.as_tensor(value))
        else:
            self.elements()[map_elements(key)] = map_elements(value)

    def __neg__(self) -> Any:
        return self._each(operator.neg, (self,), {})

    def __invert__(self) -> Any:
        return self._each(operator.invert, (self,), {})

    def __iter__(self) -> Any:
        return iter(self.elements())

    def __len__(self) -> int:
        return len(self.elements())


def _operator(name: str, is_reversed: bool) -> Callable[[Selection, Any], Any]:
    function = getattr(operator, name)

    def apply(self: Selection, other: Any) -> Any:
        pair = (other, self) if is_reversed else (self, other)
        return self._each(function, pair, {})

    return apply


def _in_place(name: str) -> Callable[[Selection, Any], Selection]:
    return lambda self, other: self.change(f"{_METHODS.get(name, name.rstrip('_'))}_", other)


_METHODS = {"truediv": "div", "floordiv": "floor_divide", "mod": "remainder", "and_": "logical_and",
            "or_": "logical_or"}  # fmt: skip
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_")
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
for _name in (*_ARITHMETIC, *_COMPARISONS):
    _plain = _name.rstrip("_")
    setattr(Selection, f"__{_plain}__", _operator(_name, False))
    if _name in _ARITHMETIC:
        setattr(Selection, f"__r{_plain}__", _operator(_name, True))
        setattr(Selection, f"__i{_plain}__", _in_place(_name))
Selection.__hash__ = object.__hash__  # type: ignore[method-assign]


def _flattened(x: Selection) -> tuple[list[Any], bool]:
    bounds = x._bounds
    return [x.whole, x.mask, *(() if bounds is None else (bounds.start, bounds.length))], bounds is not None


def _built(parts: Iterable[Any], _: bool) -> Selection:
    whole, mask, *bounds = parts
    return Selection(whole, mask, bounds=Bounds(*bounds) if bounds else None)


pytree.register_pytree_node(Selection, _flattened, _built, serialized_type_name="tilewright.Selection")


def _key(mask: Any) -> tuple[Any, ...]:
    """What tells a mask, or a bound of a slice, from another one: the tensor and how often it had been changed."""
    return (mask, mask._version if is_data(mask) else 0)


def _place(value: Any, extent: int) -> torch.Tensor:
    """A bound of a slice as Python takes it: counted from the end, or beyond."""
    place = value.to(torch.int64) if is_data(value) else torch.full((), value, dtype=torch.int64)
    return torch.where(place < 0, place + extent, place).clamp(0, extent)


def _is_place(key: Any) -> bool:
    return isinstance(key, int) or (is_data(key) and not key.ndim and key.dtype is not torch.bool)


def _is_selection(x: Any) -> bool:
    return isinstance(x, Selection)


def _wholes(value: Any) -> Any:
    return pytree.tree_map(lambda x: x.whole if isinstance(x, Selection) else x, value, is_leaf=_is_selection)


def map_elements(value: Any) -> Any:
    """A value whose selections are tensors of as many elements as the data have."""
    return pytree.tree_map(lambda x: x.elements() if isinstance(x, Selection) else x, value, is_leaf=_is_selection)
