"""Elements of a tensor of which data tell how many there are, `x[mask]`, `x[:n]` and `nonzero()`: kept as the whole
tensor and a mask as long as nobody asks how they lie, so that bodies of branches and loops can have them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tilewright.frontend.pytorch.own_operators import taken

_ELEMENTWISE = {
    "add", "sub", "mul", "div", "truediv", "floordiv", "pow", "mod", "neg", "abs", "exp", "log", "sqrt", "rsqrt",
    "tanh", "sigmoid", "relu", "clamp", "clip", "gt", "lt", "ge", "le", "eq", "ne", "logical_not", "logical_and",
    "logical_or", "sin", "cos", "square", "float", "long", "int", "bool", "half", "double", "sign", "round", "floor",
    "ceil", "trunc", "erf", "gelu", "silu", "where", "maximum", "minimum", "clone", "detach", "exp2", "log2", "log1p",
}  # fmt: skip


class Selection:
    """The elements of a tensor where a mask over its first dimensions is set, in order."""

    def __init__(self, whole: torch.Tensor, mask: torch.Tensor, by: tuple[Any, int] | None = None) -> None:
        self.whole, self.mask = whole, mask
        self._by = by or (mask, 0)  # the user's own mask, and how often it had been changed by then
        self._elements: torch.Tensor | None = None

    @staticmethod
    def of(x: torch.Tensor, mask: torch.Tensor) -> Selection:
        """What a tensor has now where a mask is set now."""
        return Selection(x.clone(), mask.clone(), (mask, mask._version))

    def is_by(self, mask: Any) -> bool:
        """Whether the elements are those where this mask is set."""
        other = mask._by if isinstance(mask, Selection) else (mask, getattr(mask, "_version", 0))
        return other[0] is self._by[0] and other[1] == self._by[1]

    # what needs no order

    @property
    def count(self) -> torch.Tensor:
        return self.mask.sum()

    @property
    def shape(self) -> tuple[Any, ...]:
        return (self.count, *self.whole.shape[self.mask.ndim :])

    @property
    def dtype(self) -> torch.dtype:
        return self.whole.dtype

    @property
    def device(self) -> torch.device:
        return self.whole.device

    @property
    def ndim(self) -> int:
        return 1 + self.whole.ndim - self.mask.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> torch.Tensor:
        return self.count * self.whole[(0,) * self.mask.ndim].numel()

    def sum(self, dim: Any = None, **named: Any) -> Any:
        return self._reduced("sum", 0, dim, named)

    def any(self, dim: Any = None, **named: Any) -> Any:
        return self._reduced("any", False, dim, named)

    def all(self, dim: Any = None, **named: Any) -> Any:
        return self._reduced("all", True, dim, named)

    def prod(self, dim: Any = None, **named: Any) -> Any:
        return self._reduced("prod", 1, dim, named) if dim is None else self.elements().prod(dim, **named)

    def max(self, dim: Any = None, **named: Any) -> Any:
        return self._extreme("amax", dim, named)

    def min(self, dim: Any = None, **named: Any) -> Any:
        return self._extreme("amin", dim, named)

    def mean(self, dim: Any = None, **named: Any) -> Any:
        if dim not in (None, 0) or named or not self.dtype.is_floating_point:
            return self.elements().mean(dim, **named)
        return self.sum(dim) / (self.numel() if dim is None else self.count)

    def item(self) -> Any:
        return self.whole.masked_fill(~self._wide(), 0).sum()  # of one element

    def _wide(self) -> torch.Tensor:
        return self.mask.reshape(*self.mask.shape, *[1] * (self.whole.ndim - self.mask.ndim))

    def _reduced(self, name: str, neutral: Any, dim: Any, named: dict[str, Any]) -> Any:
        if dim not in (None, 0) or named:
            return getattr(self.elements(), name)(*(() if dim is None else (dim,)), **named)
        filled = self.whole.masked_fill(~self._wide(), neutral)
        return getattr(filled, name)() if dim is None else getattr(filled.flatten(0, self.mask.ndim - 1), name)(0)

    def _extreme(self, name: str, dim: Any, named: dict[str, Any]) -> Any:
        if dim is not None or named or self.dtype is torch.bool:
            return getattr(self.elements(), name[1:])(*(() if dim is None else (dim,)), **named)
        info = torch.finfo(self.dtype) if self.dtype.is_floating_point else torch.iinfo(self.dtype)
        return getattr(self.whole.masked_fill(~self._wide(), info.min if name == "amax" else info.max), name)()

    def put_into(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor | None:
        """The tensor with these elements where its mask, which is theirs, is set; None where it is another."""
        is_same = (
            (self.is_by(mask) or mask is self.mask) and x.ndim == self.whole.ndim and x.shape[: mask.ndim] == mask.shape
        )
        return torch.where(self._wide(), self.whole.to(x.dtype), x) if is_same else None

    # what does

    def elements(self) -> torch.Tensor:
        if self._elements is None:
            self._elements = self.whole[self.mask]
        return self._elements

    def element(self, place: Any) -> torch.Tensor:
        """The element at a place that may be a tensor; the first one where there is none."""
        flat = self.mask.flatten()
        wanted = torch.where(torch.as_tensor(place) < 0, place + self.count, place) + 1
        at = ((flat.cumsum(0) == wanted) & flat).to(torch.int64).argmax()
        return taken(self.whole.flatten(0, self.mask.ndim - 1), 0, at)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _ELEMENTWISE:
            return lambda *args, **named: self._each(lambda x, *a, **n: getattr(x, name)(*a, **n), (self, *args), named)
        return getattr(self.elements(), name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = next(x for x in pytree.tree_leaves((args, kwargs or {}), is_leaf=_is_selection) if _is_selection(x))
        name = getattr(function, "__name__", "")
        if name in _ELEMENTWISE:
            return first._each(function, args, kwargs or {})
        if args and args[0] is first and name in ("sum", "any", "all", "max", "min", "mean", "numel", "prod"):
            return getattr(first, name)(*args[1:], **(kwargs or {}))
        return function(*map_elements(args), **map_elements(kwargs or {}))

    def _each(self, function: Callable[..., Any], args: Any, named: Any) -> Any:
        """An operation on each element, where all that it is given are selections by this mask or the same for all."""
        tail = self.whole.ndim - self.mask.ndim
        leaves = pytree.tree_leaves((args, named), is_leaf=_is_selection)
        fits = all(
            self.is_by(x) if isinstance(x, Selection) else not isinstance(x, torch.Tensor) or x.ndim <= tail
            for x in leaves
        )
        if not fits:
            return function(*map_elements(args), **map_elements(named))
        whole = [pytree.tree_map(lambda x: x.whole if isinstance(x, Selection) else x, a, is_leaf=_is_selection)
                 for a in (args, named)]  # fmt: skip
        found = function(*whole[0], **whole[1])
        fits = isinstance(found, torch.Tensor) and found.shape[: self.mask.ndim] == self.mask.shape
        return Selection(found, self.mask, self._by) if fits else function(*map_elements(args), **map_elements(named))

    def __getitem__(self, key: Any) -> Any:
        parts = key if isinstance(key, tuple) else (key,)
        if parts and parts[0] == slice(None) and len(parts) > 1 and not any(p is None or p is Ellipsis for p in parts):
            return Selection(self.whole[(*[slice(None)] * self.mask.ndim, *parts[1:])], self.mask, self._by)
        if len(parts) == 1 and (isinstance(key, int) or (isinstance(key, torch.Tensor) and key.ndim == 0)):
            return self.element(key)
        return self.elements()[key]

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


_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_")
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
for _name in (*_ARITHMETIC, *_COMPARISONS):
    _plain = _name.rstrip("_")
    setattr(Selection, f"__{_plain}__", _operator(_name, False))
    if _name in _ARITHMETIC:
        setattr(Selection, f"__r{_plain}__", _operator(_name, True))
Selection.__hash__ = object.__hash__  # type: ignore[method-assign]

pytree.register_pytree_node(
    Selection, lambda x: ([x.whole, x.mask], None), lambda parts, _: Selection(*parts),
    serialized_type_name="tilewright.Selection",
)  # fmt: skip


def _is_selection(x: Any) -> bool:
    return isinstance(x, Selection)


def map_elements(value: Any) -> Any:
    """A value whose selections are tensors of as many elements as the data have."""
    return pytree.tree_map(lambda x: x.elements() if isinstance(x, Selection) else x, value, is_leaf=_is_selection)
