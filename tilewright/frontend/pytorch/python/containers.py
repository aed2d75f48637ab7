"""What a body may change besides tensors: lists, dicts, sets, objects of the user's own, and names that functions
inside a function bind for it."""

from __future__ import annotations

import dis
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from tilewright.errors import UnsupportedError
from tilewright.frontend.pytorch.python.bodies import Traced
from tilewright.frontend.pytorch.python.values import Step, Unbound, Values

_LIST, _DICT, _SET, _OBJECT, _NAME = "a list", "a dict", "a set", "an object", "a name of the function around"
CONTAINERS = (_LIST, _DICT, _SET, _OBJECT, _NAME)
_OTHERS = (torch.Tensor, torch.nn.Module, type, ModuleType, BuiltinFunctionType)  # what they hold is not looked at


@dataclass(frozen=True)
class _Held:
    """Something that can change, how to see what it holds, and how to make it hold something else."""

    kind: str
    owner: Any
    contents: Callable[[], Any]
    put: Callable[[Any], None]


def _held(x: Any) -> _Held | None:
    match x:
        case list() | deque():
            return _Held(_LIST, x, lambda: list(x), partial(_put_list, x))
        case dict():
            return _Held(_DICT, x, lambda: dict(x), partial(_put_dict, x))
        case set():
            return _Held(_SET, x, lambda: set(x), partial(_put_set, x))
        case CellType():
            return _Held(_NAME, x, lambda: _in_cell(x), partial(_put_cell, x))
    if is_own_object(x):
        return _Held(_OBJECT, x, lambda: dict(vars(x)), partial(_put_dict, vars(x)))
    return None


def is_own_object(x: Any) -> bool:
    """Whether something is an object with attributes that may change: none of PyTorch's, nor of Python's but those that
    are made to have attributes."""
    home = (type(x).__module__ or "").partition(".")[0]
    is_pythons = home in sys.stdlib_module_names and home not in ("types", "collections", "argparse")
    return (
        hasattr(x, "__dict__")
        and not isinstance(x, torch.nn.Module | type)
        and not is_pythons
        and home not in ("torch", "tilewright")
    )


def _put_list(x: Any, now: Any) -> None:
    x.clear()
    x.extend(now)


def _put_dict(x: Any, now: Any) -> None:
    dict.clear(x)
    dict.update(x, now)


def _put_set(x: Any, now: Any) -> None:
    x.clear()
    x.update(now)


def _in_cell(x: CellType) -> list[Any]:
    try:
        return [x.cell_contents]
    except ValueError:  # nothing yet
        return []


def _put_cell(x: CellType, now: Any) -> None:
    if now:
        x.cell_contents = now[0]
    else:
        del x.cell_contents


@cache
def _rebound(code: CodeType) -> frozenset[str]:
    """Names of functions around it that a function binds."""
    bound = {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_DEREF"}
    return frozenset(bound & set(code.co_freevars))


def _parts(x: Any) -> list[Any]:
    """What is held by something, or reached by a function."""
    match x:
        case list() | tuple() | deque():
            return list(x)
        case dict():
            return list(x.values())
        case CellType():
            return _in_cell(x)
        case MethodType():
            return [x.__self__, x.__func__]
        case partial():
            return [x.func, *x.args, *x.keywords.values()]
        case FunctionType():
            cells = dict(zip(x.__code__.co_freevars, x.__closure__ or (), strict=True))
            rebound = _rebound(x.__code__)
            return [cell if name in rebound else tuple(_in_cell(cell)) for name, cell in cells.items()]
    return list(vars(x).values()) if is_own_object(x) else []


class Containers:
    """Lists, dicts and the like that a body may change: what they hold is given to it and by it like the values of
    names, so that both branches begin with the same and a loop carries it."""

    def __init__(self, values: Values, where: str) -> None:
        self._all: list[_Held] = []
        self._where = where
        seen: dict[int, Any] = {}
        waiting = list(values)
        while waiting:
            x = waiting.pop(0)
            if id(x) in seen or isinstance(x, (*_OTHERS, Unbound)):
                continue
            seen[id(x)] = x
            found = _held(x)
            if found is not None:
                self._all.append(found)
            waiting += _parts(x)

    def held(self) -> Values:
        return tuple(each.contents() for each in self._all)

    def put(self, contents: Values) -> None:
        for each, now in zip(self._all, contents, strict=True):
            if isinstance(now, Unbound):
                raise changed_container(self._where, each.kind)
            if not _is_same(each.contents(), now):
                each.put(now)

    def around(self, step: Step, gives: bool = True) -> Step:
        """A step that is given what they hold behind its own values, and gives what they hold then."""

        def run(*values: Any) -> Any:
            count = len(values) - len(self._all)
            self.put(values[count:])
            found = step(*values[:count])
            return (*found, *self.held()) if gives else found

        return run

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(each.kind for each in self._all)

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Behind it they hold what they held before, whatever was followed meanwhile."""
        before = self.held()
        try:
            yield
        finally:
            self.put(before)

    def changed_by(self, step: Step, values: Values) -> Containers:
        """Those that a step changes."""
        before = self.held()
        with self.put_back():
            if self._all:
                Traced(step, values, self._where)
            changed = [x for x, then in zip(self._all, before, strict=True) if not _is_same(x.contents(), then)]
        found = Containers((), self._where)
        found._all = changed
        return found


def changed_container(where: str, kind: str) -> UnsupportedError:
    ways_out = {
        _OBJECT: "return what changes, and set it behind the branch or loop",
        _NAME: "return what changes, and bind it behind the branch or loop",
    }
    way_out = ways_out.get(kind, "write into a tensor that is made before, such as ys[t] = y")
    return UnsupportedError(f"{where}: {kind} is changed where a tensor decides how often; {way_out}")


def _is_same(one: Any, other: Any) -> bool:
    now, then = _listed(one), _listed(other)
    return len(now) == len(then) and all(a is b for a, b in zip(now, then, strict=True))


def _listed(x: Sequence[Any] | dict[Any, Any] | set[Any]) -> list[Any]:
    return [part for item in x.items() for part in item] if isinstance(x, dict) else list(x)
