"""The pool of interned expressions: equal ones are one object for as long as anything refers to it."""

from __future__ import annotations

import weakref
from typing import Any, TypeVar

import numpy as np

_Node = TypeVar("_Node")


class _Entry(weakref.ref[Any]):
    """A node in the pool, and the key to take out when the node is gone."""

    __slots__ = ("key",)
    key: tuple[Any, ...]


POOL: dict[tuple[Any, ...], _Entry] = {}


def _forget(entry: weakref.ref[Any]) -> None:
    assert isinstance(entry, _Entry)
    if POOL.get(entry.key) is entry:
        del POOL[entry.key]


def keep(key: tuple[Any, ...], node: _Node) -> _Node:
    """Put a new node in the pool, or give the equal one that another thread put there first."""
    entry = _Entry(node, _forget)
    entry.key = key
    while True:
        present = POOL.setdefault(key, entry)
        if present is entry:
            return node
        found = present()
        if found is not None:
            return found
        _forget(present)


class FloatKey:
    """A float compared by bits: NaN equals itself and -0.0 differs from 0.0."""

    __slots__ = ("bits",)

    def __init__(self, value: float) -> None:
        self.bits = np.float64(value).tobytes()

    def __hash__(self) -> int:
        return hash(self.bits)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FloatKey) and self.bits == other.bits
