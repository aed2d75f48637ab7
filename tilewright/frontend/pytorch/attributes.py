"""What a module keeps besides its parameters and buffers, before and after its code has run once."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

# PyTorch keeps books on these itself: what becomes of buffers is told by the exporter.
_OWN = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_is_full_backward_hook")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CONTAINERS = (list, deque, dict, set)
_CODE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, torch.Tensor, torch.nn.Module)


@dataclass(frozen=True)
class KeptObject:
    """An object that can change: what it held, by attribute, key or place, and the path that leads to it."""

    path: str
    owner: Any
    held: dict[Any, Any]


@dataclass(frozen=True)
class Snapshot:
    kept: tuple[KeptObject, ...]

    def changed(self) -> str | None:
        """The path of something that has changed since; None where nothing has."""
        for each in self.kept:
            now = _contents(each.owner)
            keys = [k for k in {**each.held, **now} if k not in each.held or k not in now]
            keys += [k for k, v in each.held.items() if k in now and not _same(v, now[k])]
            if keys:
                return _joined(each.path, each.owner, keys[0])
        return None

    def put_back(self) -> None:
        for each in self.kept:
            _put_back(each.owner, each.held)


def snapshot(module: torch.nn.Module) -> Snapshot:
    """The attributes of a module, of those inside it, and of what these hold: lists, dicts, plain objects."""
    kept: list[KeptObject] = []
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [(name, each) for name, each in module.named_modules()]
    while waiting:
        path, owner = waiting.pop(0)
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        held = _contents(owner)
        kept.append(KeptObject(path, owner, held))
        waiting += [(_joined(path, owner, k), v) for k, v in held.items() if _can_change(v)]
    return Snapshot(tuple(kept))


def _can_change(value: Any) -> bool:
    if isinstance(value, (*_PLAIN, *_CODE)):
        return False
    return isinstance(value, _CONTAINERS) or hasattr(value, "__dict__")


def _contents(owner: Any) -> dict[Any, Any]:
    if isinstance(owner, dict):
        return dict(owner)
    if isinstance(owner, list | deque):
        return dict(enumerate(owner))
    if isinstance(owner, set):
        return {x: x for x in owner}
    own = vars(owner)
    if isinstance(owner, torch.nn.Module):
        return {k: v for k, v in own.items() if k not in _OWN}
    return dict(own)


def _put_back(owner: Any, held: dict[Any, Any]) -> None:
    if isinstance(owner, list | deque):
        owner.clear()
        owner.extend(held.values())
    elif isinstance(owner, set):
        owner.clear()
        owner.update(held)
    else:
        target = owner if isinstance(owner, dict) else vars(owner)
        for k in [k for k in _contents(owner) if k not in held]:
            del target[k]
        target.update(held)


def _same(one: Any, other: Any) -> bool:
    """Whether a value is as it was, or a copy of that. What the same object holds by now is looked at by itself."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, _CONTAINERS):
        old, new = _contents(one), _contents(other)
        return old.keys() == new.keys() and all(_same(v, new[k]) for k, v in old.items())
    return isinstance(one, _PLAIN) and (one == other or (one != one and other != other))


def _joined(path: str, owner: Any, key: Any) -> str:
    if not isinstance(owner, _CONTAINERS):
        return f"{path}.{key}" if path else str(key)
    return f"{path}[{key!r}]"
