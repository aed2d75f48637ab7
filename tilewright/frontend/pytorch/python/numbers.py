"""What Python's own functions give of tensors in rewritten code: the numbers and truths that they would take out of a
tensor stay tensors without dimensions, since only the data tell them."""

from __future__ import annotations

import builtins
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from functools import partial, reduce
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tilewright.frontend.pytorch.own_operators import one_of
from tilewright.frontend.pytorch.python.elements import looked_up
from tilewright.frontend.pytorch.python.selections import Selection
from tilewright.frontend.pytorch.python.values import (
    flag,
    hashed,
    is_data,
    is_numeral,
    kind_of_number,
    made_of,
    number_like,
    numeral,
    spelled,
)

# Functions and methods whose whole numbers say how many elements there are.
_OF_SIZES = {
    "zeros", "ones", "empty", "full", "rand", "randn", "new_zeros", "new_ones", "new_empty", "new_full", "view",
    "reshape", "expand", "repeat", "tile", "narrow", "topk", "split", "chunk", "arange", "eye", "linspace",
    "unflatten", "repeat_interleave", "broadcast_to", "randint", "resize_",
}  # fmt: skip


# Methods of dicts and sets that find things by their hash.
_BY_HASH = ("pop", "setdefault", "add", "discard", "remove")


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """What tells PyTorch of a number, which of a tensor's it need not know."""
    return lambda truth, *args, **named: None if is_data(truth) else function(truth, *args, **named)


def _of_plain(check: Callable[[Any], Any], function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """A function that only plain values may be given."""
    check((args, named))
    return function(*args, **named)


def _of_elements(kind: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """A set of elements, or a dict of pairs or of another one."""
    if not args or isinstance(args[0], Mapping):
        return kind(*args, **named)
    found = list(args[0])
    for each in found:
        hashed(each[0] if kind in (dict, OrderedDict) else each)
    return kind(found, *args[1:], **named)


def _tensor_of(function: Callable[..., Any], like: torch.Tensor | None, data: Any, *args: Any, **named: Any) -> Any:
    """A tensor of nested lists of numbers, of which only the data tell some."""
    leaves = pytree.tree_leaves(data)
    if args or is_data(data) or not any(map(is_data, leaves)):
        return function(data, *args, **named)
    kinds = [torch.get_default_dtype() if is_numeral(x) and kind_of_number(x).is_floating_point else kind_of_number(x)
             for x in leaves]  # fmt: skip
    kind = named.get("dtype") or (reduce(torch.promote_types, kinds) if like is None else like.dtype)
    device = named.get("device") or (None if like is None else like.device)

    def made(x: Any) -> torch.Tensor:
        return torch.stack([made(v) for v in x]) if isinstance(x, list | tuple) else number_like(x).reshape(()).to(kind)

    return made(data) if device is None else made(data).to(device)


def _selected(x: torch.Tensor, mask: torch.Tensor) -> Selection:
    return Selection.of(*torch.broadcast_tensors(x, mask))


class TracedNumbers:
    """What is called of Python and PyTorch for a number, a truth or a size."""

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[torch.Tensor, Any]] = {}  # by the tensor, which is kept
        self._own: dict[Any, Callable[..., Any]] = {
            int: self._whole, float: self._real, bool: self._truth,
            any: self._any, all: self._all, len: self._length, sum: self._sum,
            abs: partial(self._of_numbers, abs), pow: partial(self._of_numbers, pow),
            round: self._rounded, divmod: self._divided,
            isinstance: self._is_of, type: self._type, torch.is_tensor: self._is_tensor,
            torch.equal: self._equal, torch.allclose: self._close, torch.is_nonzero: self._truth,
            torch.nonzero: self._places, torch.masked_select: _selected,
            torch.tensor: partial(_tensor_of, torch.tensor, None),
            torch.as_tensor: partial(_tensor_of, torch.as_tensor, None), torch._check: _checked(torch._check),
            torch._check_is_size: _checked(torch._check_is_size),
            **{kind: partial(_of_plain, spelled, kind) for kind in (str, repr, ascii, format)},
            **{kind: partial(_of_elements, kind) for kind in (set, frozenset, Counter, dict, OrderedDict)},
        }  # fmt: skip

    def called(self, function: Any) -> Any:
        """A function that gives such, of tensors too; others as they are."""
        if function is torch.where:
            return lambda *args, **named: (
                torch.where(*args, **named) if named or len(args) != 1 else self._places(*args, as_tuple=True)
            )
        if function is builtins.max or function is builtins.min:  # while PyTorch exports, functions of its own
            return self._largest if function is builtins.max else self._smallest
        try:
            own = self._own.get(function)
        except TypeError:  # no key of a dictionary
            return function
        if own is not None:
            return own
        name, of = getattr(function, "__name__", ""), getattr(function, "__self__", None)
        if isinstance(of, torch.Tensor):
            methods: dict[str, Callable[..., Any]] = {
                "item": self._item, "tolist": self._list, "nonzero": self._places, "equal": self._equal,
                "allclose": self._close, "new_tensor": partial(_tensor_of, function),
                "masked_select": _selected,
            }  # fmt: skip
            method = methods.get(name)
            if method is not None:
                return lambda *args, **named: method(of, *args, **named)
        if isinstance(of, dict) and name == "get":
            return lambda key, default=None: looked_up(of, key, default) if is_data(key) else of.get(key, default)
        if isinstance(of, dict | set) and name in _BY_HASH:
            return lambda *args: function(*map(hashed, args[:1]), *args[1:])
        if isinstance(of, str) and name == "format":
            return partial(_of_plain, spelled, function)
        if name == "fromkeys" and isinstance(of, type) and issubclass(of, dict):
            return lambda keys, *value: function(map(hashed, keys), *value)
        if callable(function) and function is getattr(math, name, None):
            return lambda *args: self._mathematical(function, *args)
        if name in _OF_SIZES and (isinstance(of, torch.Tensor | Selection) or getattr(torch, name, None) is function):
            return lambda *args, **named: function(
                *map(self.sized, args), **{k: self.sized(v) for k, v in named.items()}
            )
        return function

    def sized(self, value: Any) -> Any:
        """A size that may be a tensor: one that data tell, the same whenever it is asked for."""
        if isinstance(value, tuple | list):
            return type(value)(map(self.sized, value)) if type(value) in (tuple, list) else value
        if not is_data(value) or value.ndim or value.dtype is not torch.int64:
            return value
        kept = self._sizes.get(id(value))
        if kept is None:
            kept = self._sizes[id(value)] = (value, value.item())
        return kept[1]

    # of one value

    def _item(self, x: torch.Tensor) -> Any:
        if x.dtype.is_complex:
            return x.item()
        return (
            self._real(x) if x.dtype.is_floating_point else self._truth(x) if x.dtype is torch.bool else self._whole(x)
        )

    def _whole(self, *args: Any) -> Any:
        if len(args) == 1 and is_data(args[0]):
            x = args[0].reshape(())
            return numeral((x.trunc() if x.dtype.is_floating_point else x).to(torch.int64).clone())
        return args[0] if len(args) == 1 and isinstance(args[0], torch.SymInt) else int(*args)

    def _real(self, *args: Any) -> Any:
        """In the tensor's own precision, at least 32 bits: tensors keep their type beside it, as beside a number."""
        if len(args) != 1 or not is_data(args[0]):
            return float(*args)
        x = args[0].reshape(())
        return numeral(x.to(torch.promote_types(x.dtype, torch.float32)).clone())

    def _truth(self, *args: Any) -> Any:
        return numeral(flag(args[0]).clone()) if len(args) == 1 and is_data(args[0]) else bool(*args)

    def _list(self, x: torch.Tensor) -> Any:
        return self._item(x) if x.ndim == 0 else [self._list(row) for row in x]

    def _mathematical(self, function: Any, *args: Any) -> Any:
        same = getattr(torch, function.__name__, None)
        if same is None or not any(map(is_data, args)):
            return function(*args)
        found = same(*(number_like(float(a)) if not is_data(a) else a for a in args))
        return numeral(found.to(torch.int64) if function in (math.floor, math.ceil, math.trunc) else found)

    def _of_numbers(self, function: Any, *args: Any, **named: Any) -> Any:
        found = function(*args, **named)
        if isinstance(found, tuple):
            return tuple(made_of(x, args) for x in found)
        return made_of(found, args)

    def _rounded(self, x: Any, digits: Any = None) -> Any:
        if not is_data(x) or not is_numeral(x) or (digits is not None and not isinstance(digits, int)):
            return round(x, digits)
        if not x.dtype.is_floating_point:
            return x if digits is None or digits >= 0 else self._whole(self._rounded(x / 10**-digits) * 10**-digits)
        return self._whole(x.round()) if digits is None else numeral((x * 10.0**digits).round() / 10.0**digits)

    def _divided(self, one: Any, other: Any) -> Any:
        if not is_data(one) and not is_data(other):
            return divmod(one, other)
        return made_of(one // other, (one, other)), made_of(one % other, (one, other))

    def _is_of(self, x: Any, kinds: Any) -> bool:
        is_meant = is_numeral(x) or isinstance(x, Selection)
        return issubclass(self._type(x), kinds) if is_meant else isinstance(x, kinds)

    def _type(self, *args: Any) -> Any:
        """Of what stands for a number, that of the number."""
        if len(args) != 1 or not isinstance(args[0], torch.Tensor | Selection):
            return type(*args)
        if not is_numeral(args[0]):
            return nn.Parameter if isinstance(args[0], nn.Parameter) else torch.Tensor
        kind = args[0].dtype
        return bool if kind is torch.bool else float if kind.is_floating_point else int

    def _is_tensor(self, x: Any) -> bool:
        return isinstance(x, torch.Tensor | Selection) and not is_numeral(x)

    # of several

    def _largest(self, *args: Any, **named: Any) -> Any:
        return self._extreme(max, torch.gt, args, named)

    def _smallest(self, *args: Any, **named: Any) -> Any:
        return self._extreme(min, torch.lt, args, named)

    def _extreme(self, plain: Any, is_beyond: Any, args: Any, named: Any) -> Any:
        values = list(args[0]) if len(args) == 1 and not isinstance(args[0], Selection) else list(args)
        if named or not any(map(is_data, values)):
            return plain(values, **named) if len(args) == 1 else plain(*args, **named)
        found = number_like(values[0])
        for value in values[1:]:
            other = number_like(value)
            kind = torch.promote_types(found.dtype, other.dtype)
            found = torch.where(is_beyond(other, found), other.to(kind), found.to(kind))
        tensors = {x.untyped_storage()._cdata: x for x in values if is_data(x) and not is_numeral(x)}
        return made_of(one_of(found, list(tensors.values())) if tensors else found, values)

    def _sum(self, values: Any, start: Any = 0) -> Any:
        found = list(values)
        return made_of(sum(found, start), (*found, start))

    def _any(self, values: Any) -> Any:
        return self._joined(torch.logical_or, values, any)

    def _all(self, values: Any) -> Any:
        return self._joined(torch.logical_and, values, all)

    def _joined(self, join: Any, values: Any, plain: Any) -> Any:
        found = list(values)
        if not any(map(is_data, found)):
            return plain(found)
        joined = flag(found[0])
        for value in found[1:]:
            joined = join(joined, flag(value))
        return numeral(joined.clone())

    def _length(self, value: Any) -> Any:
        return value.count if isinstance(value, Selection) else len(value)

    def _equal(self, one: Any, other: Any) -> Any:
        return numeral((one == other).all()) if one.shape == other.shape else False

    def _close(self, one: Any, other: Any, *args: Any, **named: Any) -> Any:
        return numeral(torch.isclose(one, other, *args, **named).all())

    def _places(self, x: Any, **named: Any) -> Any:
        """nonzero(): the places of a tensor, those where it is not zero."""
        if named.get("as_tuple"):
            found = self._places(x)
            return tuple(found[:, k] for k in range(x.ndim))
        if named or not isinstance(x, torch.Tensor) or not x.ndim:
            return torch.nonzero(x, **named)
        ranges = [torch.arange(n, device=x.device) for n in x.shape]
        return Selection.of(torch.stack(torch.meshgrid(*ranges, indexing="ij"), -1), x != 0)
