"""A module with its control rewritten for a while: its own `forward` and those of the modules inside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FunctionType, MethodType
from typing import Any

import torch

from tilewright.frontend.pytorch.python import source
from tilewright.frontend.pytorch.python.control import Calls
from tilewright.frontend.pytorch.python.selections import map_elements


def loops_over_elements(module: torch.nn.Module) -> bool:
    """Whether a module, or one inside it, may have long loops over parts of tensors."""
    return any(map(source.loops_over_elements, _written(module)))


def catches_errors(module: torch.nn.Module) -> bool:
    """Whether a module's code may take it for an error of its own that the exporter cannot follow it."""
    return any(map(source.catches_errors, _written(module)))


def asks_for_kinds(module: torch.nn.Module) -> bool:
    """Whether a module's code may ask for the type of a number: the exporter's are none of Python's."""
    return any(map(source.asks_for_kinds, _written(module)))


def _written(module: torch.nn.Module) -> set[type | FunctionType]:
    """Classes of modules, and functions that modules hold, but PyTorch's own."""
    found: set[type | FunctionType] = set()
    for each in module.modules():
        found |= {type(each), *(x for x in vars(each).values() if isinstance(x, FunctionType))}
    return {each for each in found if (each.__module__ or "").partition(".")[0] != "torch"}


def _with_elements(forward: Callable[..., Any]) -> Callable[..., Any]:
    """What a module gives has as many elements as the data have."""

    @wraps(forward)
    def run(*args: Any, **named: Any) -> Any:
        return map_elements(forward(*args, **named))

    return run


@contextmanager
def rewritten_control(module: torch.nn.Module, rolls: bool = True) -> Iterator[Calls]:
    """Meanwhile modules run with rewritten control, and tensors they keep as plain attributes are buffers, which the
    exporter lets them change."""
    calls = Calls(rolls)
    held: list[tuple[torch.nn.Module, str]] = []
    forwards: list[torch.nn.Module] = []
    try:
        for each in module.modules():
            forward = type(each).forward
            made = calls.rewritten(forward, each is module) if isinstance(forward, FunctionType) else forward
            if made is not forward and "forward" not in vars(each):
                vars(each)["forward"] = _with_elements(MethodType(made, each))
                forwards.append(each)
            for name in [k for k, v in vars(each).items() if isinstance(v, torch.Tensor)]:
                each._buffers[name] = vars(each).pop(name)
                each._non_persistent_buffers_set.add(name)
                held.append((each, name))
        yield calls
    finally:
        for each in forwards:
            del vars(each)["forward"]
        for each, name in held:
            vars(each)[name] = each._buffers.pop(name)
            each._non_persistent_buffers_set.discard(name)
