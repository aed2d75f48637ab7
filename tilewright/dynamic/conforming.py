"""Records whose fields are what their annotations say: what comes from a file may be anything."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def record(kind: type[T], *values: Any) -> T:
    """A record of these values; ValueError where one is not of its field's kind, or there are too many or too few."""
    names = [field.name for field in fields(kind)] if is_dataclass(kind) else []
    if len(values) != len(names):
        raise ValueError(f"{len(values)} values of a {kind.__name__}, which has {len(names)}")
    hints: dict[str, Any] = _hints(kind)  # type: ignore[arg-type]
    for name, value in zip(names, values, strict=True):
        if not conforms(value, hints.get(name, Any)):
            raise ValueError(f"{name} of a {kind.__name__} cannot be {type(value).__name__}")
    return kind(*values)


def conforms(value: Any, hint: Any) -> bool:
    """As far as an annotation says what can be seen; what it does not say is not looked at."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(conforms(value, each) for each in inside)
    if hint is None or hint is type(None):
        return value is None
    if hint is float:
        return isinstance(value, int | float)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if inside[-1:] == (Ellipsis,):
            return all(conforms(each, inside[0]) for each in value)
        return len(value) == len(inside) and all(map(conforms, value, inside))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        key, item = inside
        return isinstance(value, dict) and all(conforms(k, key) and conforms(v, item) for k, v in value.items())
    if isinstance(origin, type) and issubclass(origin, Sequence | set | frozenset):
        kind = list | tuple if origin is Sequence else origin
        return isinstance(value, kind) and all(conforms(each, inside[0]) for each in value)
    seen = origin or hint
    is_vague = hint is Any or not isinstance(seen, type) or getattr(seen, "_is_protocol", False)
    return is_vague or isinstance(value, seen)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    vague: dict[str, Any] = {}  # names that only a checker of types imports: of all others something is said
    while True:
        try:
            return get_type_hints(kind, localns=vague)
        except NameError as error:
            vague[str(error.name)] = Any
