"""Expressions of rewritten source: what Python computes of plain values, of values that data tell too."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, KeysView, Sequence, ValuesView
from functools import partial
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch

from tilewright.errors import UnsupportedError
from tilewright.frontend.pytorch.python.numbers import TracedNumbers
from tilewright.frontend.pytorch.python.values import (
    Step,
    Unbound,
    Values,
    flag,
    hashed,
    is_data,
    is_number,
    is_numeral,
    kind_of_number,
    made_of,
    numeral,
    spelled,
)

_ARITHMETIC = {
    "Add": "add", "Sub": "sub", "Mult": "mul", "Div": "truediv", "FloorDiv": "floordiv", "Mod": "mod", "Pow": "pow",
    "BitAnd": "and", "BitOr": "or", "BitXor": "xor", "MatMult": "matmul", "LShift": "lshift", "RShift": "rshift",
}  # fmt: skip
_AUGMENTED = {name: getattr(operator, f"__i{function}__") for name, function in _ARITHMETIC.items()}
_COMBINED = {name: getattr(operator, f"__{function}__") for name, function in
             {**_ARITHMETIC, "USub": "neg", "UAdd": "pos", "Invert": "invert"}.items()}  # fmt: skip
_ORDERS = {"Lt": operator.lt, "LtE": operator.le, "Gt": operator.gt, "GtE": operator.ge, "Eq": operator.eq,
           "NotEq": operator.ne}  # fmt: skip
_PLAIN = (torch.Tensor, str, bytes, range, frozenset, torch.dtype, torch.device, type, ModuleType, FunctionType,
          BuiltinFunctionType, Unbound)  # fmt: skip


class Expressions:
    """What expressions of rewritten functions call."""

    def __init__(self) -> None:
        self._numbers = TracedNumbers()

    def branch(
        self, test: Any, then: Step, otherwise: Step, names: Sequence[str], values: Values, read: Values, where: str,
        side_that_returns: int | None = None,
    ) -> Values:  # fmt: skip
        """What one of two steps gives, whichever the test has it."""
        raise NotImplementedError

    def inverse(self, value: Any) -> Any:
        return torch.logical_not(flag(value)) if is_data(value) else not value

    def all_of(self, effects: Sequence[int], read: Values, where: str, *values: Callable[[], Any]) -> Any:
        return self._joined(True, effects, read, where, values)

    def any_of(self, effects: Sequence[int], read: Values, where: str, *values: Callable[[], Any]) -> Any:
        return self._joined(False, effects, read, where, values)

    def if_changed(self, place: int, receivers: Values) -> int:
        """The place of a value that calls methods of these, -1 where they are of kinds that none changes."""
        return place if any(map(_has_state, receivers)) else -1

    def _joined(
        self, goes_on: bool, effects: Sequence[int], read: Values, where: str, values: Sequence[Callable[[], Any]]
    ) -> Any:
        """Whether all values are true, or any is. Those at the places `effects` may change something: they are computed
        where it is still open."""
        join = torch.logical_and if goes_on else torch.logical_or
        found: Any = goes_on
        for place, value in enumerate(values):
            if is_data(found) and place in effects:
                found = self._open(goes_on, found, partial(_flag_of, value), not goes_on, where, read)
                continue
            new = value()
            if is_data(found):
                found = join(found, flag(new))
            elif is_data(new):
                found = flag(new)
            else:
                found = new
                if bool(new) is not goes_on:
                    return new
        return found

    def _open(
        self, goes_on: bool, test: Any, value: Callable[[], Any], otherwise: Any, where: str, read: Values
    ) -> Any:
        """A value where the test leaves that open."""
        sides = (value, _always(otherwise))
        then, other = sides if goes_on else (sides[1], sides[0])
        return self.choose(test, then, other, where, read)

    def last_of(
        self, goes_on: bool, effects: Sequence[int], read: Values, where: str, *values: Callable[[], Any]
    ) -> Any:
        """The value of `a and b`, if it goes on where one is true, or of `a or b`: that of the last that is asked."""
        found = values[0]()
        for place, value in enumerate(values[1:], 1):
            if not is_data(found):
                if bool(found) is not goes_on:
                    return found
                found = value()
                continue
            new = value if place in effects else _always(value())
            if place not in effects and _is_flag(found) and _is_flag(new()):
                both = (flag(found), flag(new()))
                found = numeral(torch.logical_and(*both) if goes_on else torch.logical_or(*both))
                continue
            found = self._open(goes_on, found, new, found, where, read)
            if isinstance(found, Unbound):
                raise UnsupportedError(f"{where}: the value of `and` or `or` {found.why}")
        return found

    def compared(self, kinds: Sequence[str], *values: Callable[[], Any]) -> Any:
        """`a < b < c`: each value once, as far as the answer is open."""
        last = values[0]()

        def next_one(kind: str, value: Callable[[], Any]) -> Any:
            nonlocal last
            before, last = last, value()
            return _ORDERS[kind](before, last)

        pairs = zip(kinds, values[1:], strict=True)
        return self.all_of((), (), "", *(lambda k=k, v=v: next_one(k, v) for k, v in pairs))

    def contained(self, item: Any, container: Any) -> Any:
        """`item in container`, where either may be data: whether it equals one of them."""
        if is_data(container):
            return numeral(flag((container == item).any()))
        if isinstance(container, range) and is_data(item) and not item.ndim:
            first, last = sorted((container[0], container[-1])) if container else (1, 0)
            return numeral((item >= first) & (item <= last) & ((item - first) % container.step == 0))
        is_known = isinstance(container, list | tuple | set | frozenset | dict | deque | KeysView | ValuesView)
        if not is_known or not any(is_data(x) for x in (item, *container)):
            return item in container
        if any(x is item for x in container):
            return True

        def is_like(x: Any) -> bool:
            return is_data(x) == is_data(item) or all(is_data(v) or is_number(v) for v in (x, item))

        equal = [item == x for x in container if is_like(x)]
        return self._numbers.called(any)(equal)

    def same(self, one: Any, other: Any) -> Any:
        """`one is other`, where a truth that data tell may be True or False."""
        for value, known in ((one, other), (other, one)):
            if isinstance(known, bool) and is_data(value) and is_numeral(value):
                return numeral(value == known) if value.dtype is torch.bool else False
        return one is other

    def key(self, value: Any) -> Any:
        return hashed(value)

    def keys(self, values: Any) -> list[Any]:
        return [hashed(value) for value in values]

    def written(self, value: Any) -> Any:
        return spelled(value)

    def combined(self, kind: str, *operands: Any) -> Any:
        if kind == "Mod" and isinstance(operands[0], str | bytes):
            spelled(operands[1])
        if kind == "Pow" and is_data(operands[1]) and all(map(_is_whole, operands)):
            raise UnsupportedError(
                "a whole number to the power of one that data tell is whole or not as that has it: write 2.0 ** n, or "
                "1 << n"
            )
        return made_of(_COMBINED[kind](*operands), operands)

    def changed(self, value: Any, kind: str, other: Any) -> Any:
        """What a name has behind `name += other`."""
        return self.combined(kind, value, other) if is_numeral(value) else _AUGMENTED[kind](value, other)

    def choose(
        self, test: Any, then: Callable[[], Any], otherwise: Callable[[], Any], where: str, read: Values = ()
    ) -> Any:
        if not is_data(test):
            return then() if test else otherwise()
        steps = (lambda _: (then(),), lambda _: (otherwise(),))
        (value,) = self.branch(test, *steps, ("the value",), (None,), read, where)
        return value


def _always(value: Any) -> Callable[[], Any]:
    return lambda: value


def _has_state(value: Any) -> bool:
    """Whether methods by names that tensors have may change a value: those of an object of the user's own."""
    if isinstance(value, list | tuple):
        return any(map(_has_state, value))
    if isinstance(value, dict):
        return any(map(_has_state, value.values()))
    return not (value is None or isinstance(value, _PLAIN) or is_number(value) or is_data(value))


def _flag_of(value: Callable[[], Any]) -> torch.Tensor:
    return flag(value())


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool) or (is_data(value) and not value.ndim and value.dtype is torch.bool)


def _is_whole(value: Any) -> bool:
    return is_numeral(value) and not kind_of_number(value).is_floating_point
