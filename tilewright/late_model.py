"""What models have in common that compile when they are called."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from tilewright.arguments import Array

if TYPE_CHECKING:
    from tilewright.compiler import Artifact
    from tilewright.ir.loops import Call
    from tilewright.profiles import Profile

P = TypeVar("P", bound="Named")


class Named(Protocol):
    @property
    def name(self) -> str: ...


class Compiled(Protocol):
    """What such a model uses of a `tilewright.Model`."""

    @property
    def outputs(self) -> Sequence[Any]: ...
    @property
    def calls(self) -> tuple[Call, ...]: ...
    @property
    def artifact(self) -> Artifact: ...
    def __call__(self, /, *args: Any, **named: Any) -> list[Array]: ...
    def run_into(self, inputs: Sequence[Any], outputs: Sequence[Any], *, stream: Any = None) -> None: ...
    def profile(self, /, *args: Any, repeat: int = 20, **named: Any) -> Profile: ...
    def explain(self) -> str: ...
    def save(self, folder: str | os.PathLike[str]) -> None: ...


class LateModel(Generic[P]):
    """Inputs and outputs as the model declares them; it can run, though nothing may be compiled yet."""

    def __init__(self, name: str, inputs: Sequence[P], outputs: Sequence[P]) -> None:
        self._name = name
        self._inputs = tuple(inputs)
        self._outputs = tuple(outputs)
        self._names = tuple(port.name for port in inputs)
        self._compiled = 0

    @property
    def inputs(self) -> tuple[P, ...]:
        return self._inputs

    @property
    def outputs(self) -> tuple[P, ...]:
        return self._outputs

    @property
    def can_run(self) -> bool:
        return True

    @property
    def compilations(self) -> int:
        """How often something was compiled for a call, or looked up in the cache on disk."""
        return self._compiled

    def __repr__(self) -> str:
        takes, gives = (", ".join(map(str, ports)) for ports in (self._inputs, self._outputs))
        return f"<tilewright.{type(self).__name__} ({takes}) -> ({gives})>"


def printable(text: str) -> str:
    """Names of a model are any text: what commands a terminal is not printed."""
    return "".join(c if c.isprintable() else "?" for c in text)
