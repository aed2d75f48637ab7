"""Calling a compiled model on tensors: their memory in, new tensors out, nothing copied on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from tilewright.frontend.tensors import array_of, tensor_of
from tilewright.ir.graph import Graph


class Callee(Protocol):
    """What a compiled model offers here."""

    @property
    def outputs(self) -> Sequence[Any]: ...
    def __call__(self, /, *args: Any) -> list[Any]: ...
    def explain(self) -> str: ...
    def profile(self, /, *args: Any, repeat: int = ...) -> Any: ...


Build = Callable[[Graph], Callee]
"""How a Graph becomes a model; the options are in it."""


def run(model: Callee, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The model's results for tensors, which lie on the CPU or where the model runs."""
    results = model(*[array_of(t) if t.is_cpu else t for t in tensors])
    return [r if isinstance(r, torch.Tensor) else tensor_of(r) for r in results]
