"""What models have in common that compile when they are called."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

from tilewright.calls.arguments import Array, NotPickled, bind, by_name
from tilewright.errors import CancelledError, InputError
from tilewright.ir.forms.tensor import Layout

if TYPE_CHECKING:
    from tilewright.calls.profiles import Profile
    from tilewright.compiler.pipeline import Artifact
    from tilewright.ir.forms.loops import Call

P = TypeVar("P", bound="Named")
Packed = tuple[tuple[str, Layout], ...]


class Named(Protocol):
    @property
    def name(self) -> str: ...


def fill(ports: Sequence[Named], results: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Results into arrays of a caller."""
    if len(outputs) != len(results):
        raise InputError(f"the model gives {len(results)} outputs, but {len(outputs)} arrays were given")
    for port, result, into in zip(ports, results, outputs, strict=True):
        if not isinstance(result, np.ndarray) or into.shape != result.shape or into.dtype != result.dtype:
            raise InputError(f"output {port.name!r} does not fit the array that was given for it")
        into[...] = result


class Compiled(Protocol):
    """What such a model uses of a `tilewright.Model`."""

    @property
    def inputs(self) -> Sequence[Any]: ...
    @property
    def outputs(self) -> Sequence[Any]: ...
    @property
    def calls(self) -> tuple[Call, ...]: ...
    @property
    def artifact(self) -> Artifact: ...
    @property
    def packed(self) -> Packed: ...
    @property
    def runners(self) -> Sequence[Any]: ...
    def __call__(self, /, *args: Any, **named: Any) -> list[Array]: ...
    def run_into(self, inputs: Sequence[Any], outputs: Sequence[Any], *, stream: Any = None) -> None: ...
    def profile(self, /, *args: Any, repeat: int = 20, **named: Any) -> Profile: ...
    def explain(self) -> str: ...
    def save(self, folder: str | os.PathLike[str]) -> None: ...
    def cancel(self) -> None: ...


def share_weights(models: Iterable[Compiled], others: Iterable[Compiled] = ()) -> None:
    """Weights that models have in common, with each other and with others, lie in memory once. None of them may run."""
    known = [runner for model in others for runner in model.runners]
    for runner in (runner for model in models for runner in model.runners):
        if hasattr(runner, "share_weights"):  # on a GPU each model has its own
            runner.share_weights(known)
            known.append(runner)


class LateModel(NotPickled, ABC, Generic[P]):
    """Inputs and outputs as the model declares them; it can run, though nothing may be compiled yet."""

    def __init__(self, name: str, inputs: Sequence[P], outputs: Sequence[P]) -> None:
        self._name = name
        self._inputs = tuple(inputs)
        self._outputs = tuple(outputs)
        self._names = tuple(port.name for port in inputs)
        self._compiled = 0
        self._cancels = 0

    @property
    def name(self) -> str:
        return self._name

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

    @property
    def calls(self) -> tuple[Call, ...]:
        """Kernel calls of the last run, in order; the body of a loop that its data ends counts once."""
        return tuple(call for model in self._ran() for call in model.calls)

    @property
    def runners(self) -> tuple[Any, ...]:
        """What runs the kernels of all that is compiled."""
        return tuple(runner for model in self._held() for runner in model.runners)

    @property
    def packed(self) -> Packed:
        """How constants lie that are packed, by name: of several models as the first of them has them."""
        return tuple({name: layout for model in reversed(self._held()) for name, layout in model.packed}.items())

    @property
    def artifact(self) -> Artifact:
        """What the compiler made of what ran last; of several parts the last one."""
        return self._ran()[-1].artifact

    def __call__(self, /, *args: Any, **named: Any) -> list[Any]:
        """Run the model on values given in order, by name, or as one dict; the outputs come in order."""
        return self._results(bind(self._names, args, named))

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Run the model on values by name; the outputs come by name too."""
        results = self._results(bind(self._names, (inputs,), {}))
        return by_name([port.name for port in self._outputs], results)

    def cancel(self) -> None:
        """End the runs in progress, from another thread: they raise a `CancelledError`, between two kernels or steps.
        What a call compiles meanwhile is compiled to its end."""
        self._cancels += 1
        for model in self._held():
            model.cancel()

    def _checked_cancels(self, seen: int) -> None:
        """Goes on with a run that began after so many."""
        if self._cancels != seen:
            raise CancelledError("the run was cancelled")

    def __repr__(self) -> str:
        takes, gives = (", ".join(map(str, ports)) for ports in (self._inputs, self._outputs))
        return f"<tilewright.{type(self).__name__} ({takes}) -> ({gives})>"

    @abstractmethod
    def _results(self, values: list[Any]) -> list[Any]:
        """The outputs for values in the order of the inputs."""

    @abstractmethod
    def _held(self) -> Sequence[Compiled]:
        """All compiled models that a run may be in."""

    @abstractmethod
    def _ran(self) -> Sequence[Compiled]:
        """The compiled models of the last run, at least one; an error where nothing has run."""
