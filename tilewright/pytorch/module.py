"""A compiled module: called like the module itself, with one model for each set of shapes it has met."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tilewright.errors import InputError, ModelError, OptionError
from tilewright.frontend.exported import Cut, Exported, Place, export
from tilewright.pytorch.calls import Build, Callee, TensorCall
from tilewright.pytorch.partition import CutCall

MOST_SHAPES = 16  # models kept at once; the oldest goes first


@dataclass(frozen=True)
class Entry:
    """The module compiled for one set of shapes."""

    exported: Exported
    call: TensorCall | CutCall | None  # None where nothing is computed
    versions: tuple[tuple[torch.Tensor, int], ...]  # of the parameters whose values were compiled in

    @property
    def is_current(self) -> bool:
        return all(tensor._version == version for tensor, version in self.versions)


class CompiledModule:
    """What `tilewright.compile` gives for a torch.nn.Module. It takes what the module's forward takes and returns what
    that returns, for inference: no gradients are kept. Calls from several threads at once are safe."""

    def __init__(
        self, module: torch.nn.Module, args: Sequence[Any], named: Mapping[str, Any], build: Build,
        most_shapes: int = MOST_SHAPES,
    ) -> None:  # fmt: skip
        if module.training and any(_acts_in_training(m) for m in module.modules()):
            raise ModelError(
                f"{type(module).__name__} is in training mode, where dropout and normalisation act otherwise; "
                f"call module.eval() first"
            )
        self._module = module
        self._build = build
        self._most = most_shapes
        self._entries: dict[Any, Entry] = {}
        self._lock = RLock()
        self._compilations = 0
        self._find(*_flattened(args, named), args, named)

    def __call__(self, *args: Any, **named: Any) -> Any:
        leaves, structure = _flattened(args, named)
        key = _key(leaves, structure)
        entry = self._entries.get(key)
        if entry is None or not entry.is_current:
            entry = self._find(leaves, structure, args, named)
        return _call(entry, leaves)

    @property
    def module(self) -> torch.nn.Module:
        return self._module

    @property
    def models(self) -> list[Callee]:
        """The compiled models, the one used last at the end."""
        return [model for e in self._entries.values() if e.call is not None for model in e.call.models]

    @property
    def compilations(self) -> int:
        """How often the module was compiled so far."""
        return self._compilations

    def explain(self) -> str:
        """What became of the module for each set of shapes."""
        texts = []
        for number, (key, entry) in enumerate(self._entries.items(), 1):
            shapes = ", ".join(str(list(leaf[0])) for leaf in key[0] if isinstance(leaf, tuple))
            models = entry.call.models if entry.call is not None else []
            told = "\n\n".join(model.explain() for model in models) or "nothing is computed"
            texts.append(f"shapes {number} of {len(self._entries)} (at most {self._most} are kept): {shapes}\n{told}")
        return "\n\n".join(texts)

    def profile(self, *args: Any, repeat: int = 20, **named: Any) -> Any:
        """Time per kernel for these arguments."""
        leaves, structure = _flattened(args, named)
        entry = self._find(leaves, structure, args, named)
        if entry.call is None:
            raise InputError("the module computes nothing")
        if isinstance(entry.call, CutCall):
            raise InputError(
                "the module is several models, with a loop that data end; profile its bodies by themselves"
            )
        return entry.call.model.profile(*[_tensor(p, leaves, ()) for p in entry.exported.inputs], repeat=repeat)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the model of the one set of shapes that was compiled to a directory, which `tilewright.load` and a C
        program start from (docs/shipping.md). It takes and gives the tensors alone, in order: no dicts, no buffers."""
        if len(self._entries) != 1 or len(self.models) != 1:
            raise OptionError(
                f"a directory holds one model for one set of shapes, and this module is {len(self.models)} for "
                f"{len(self._entries)}: compile it anew for the shapes to ship"
            )
        if next(iter(self._entries.values())).exported.changes:
            raise OptionError(
                "the module changes buffers or inputs in place, which a saved model does not: return them"
            )
        self.models[0].save(folder)

    def __repr__(self) -> str:
        return f"<tilewright.CompiledModule of {type(self._module).__name__}, {len(self._entries)} sets of shapes>"

    def _find(self, leaves: Sequence[Any], structure: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Entry:
        key = _key(leaves, structure)
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.is_current:
                return entry
            if self._compilations:
                why = "its parameters have changed" if entry is not None else "it has not met these shapes"
                self._warn(f"{why}, so it is compiled again ({self._compilations} times before)")
            made = _compiled(self._module, args, named, self._build)
            self._compilations += 1
            kept = dict(self._entries)  # a new dictionary: calls in other threads read the old one without the lock
            kept.pop(key, None)
            if len(kept) >= self._most:
                kept.pop(next(iter(kept)))
                self._warn(f"more than {self._most} sets of shapes: the oldest model is dropped")
            kept[key] = made
            self._entries = kept
            return made

    def _warn(self, what: str) -> None:
        warnings.warn(f"tilewright: {type(self._module).__name__}: {what}", stacklevel=4)


def compile_module(module: torch.nn.Module, example: Any, build: Build) -> CompiledModule:
    """A module compiled for inputs like the example: a tensor, a tuple of arguments, or a dict of them by name."""
    if example is None:
        raise OptionError(
            "a torch.nn.Module needs inputs to follow it with: tilewright.compile(module, (x,)), or a dict by name"
        )
    if isinstance(example, Mapping):
        return CompiledModule(module, (), dict(example), build)
    return CompiledModule(module, tuple(example) if isinstance(example, tuple | list) else (example,), {}, build)


def _acts_in_training(module: torch.nn.Module) -> bool:
    norms = torch.nn.modules.batchnorm._BatchNorm
    if isinstance(module, norms):
        return module.training and module.track_running_stats
    return isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.training and module.p > 0


def _flattened(args: Sequence[Any], named: Mapping[str, Any]) -> tuple[Sequence[Any], Any]:
    """The leaves of the arguments, and their structure; of plain tensors in order that is their number."""
    if not named and all(type(a) is torch.Tensor for a in args):
        return args, len(args)
    return pytree.tree_flatten((tuple(args), dict(named)))


def _key(leaves: Sequence[Any], structure: Any) -> Any:
    """Equal for arguments that one model takes; values that are no tensors are part of the model."""
    described = tuple([(x.shape, x.dtype) if isinstance(x, torch.Tensor) else x for x in leaves])
    try:
        hash(described)
    except TypeError:
        described = tuple([(x.shape, x.dtype) if isinstance(x, torch.Tensor) else repr(x) for x in leaves])
    return described, structure if isinstance(structure, int) else str(structure)


def _compiled(module: torch.nn.Module, args: Sequence[Any], named: Mapping[str, Any], build: Build) -> Entry:
    exported = export(module, args, named)
    versions = tuple((t, t._version) for t in exported.constants if not t.is_inference())
    if isinstance(exported.graph, Cut):
        return Entry(exported, CutCall(exported.graph, build), versions)
    call = TensorCall(build(exported.graph)) if exported.graph.outputs else None
    return Entry(exported, call, versions)


def _call(entry: Entry, leaves: Sequence[Any]) -> Any:
    exported = entry.exported
    tensors = [_tensor(p, leaves, ()) for p in exported.inputs]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise InputError(
            "a compiled module keeps no gradients, but an input requires them; call it under torch.no_grad()"
        )
    results = entry.call(tensors) if entry.call is not None else []
    if exported.changes:
        with torch.no_grad():
            for target, place in exported.changes:
                _tensor(target, leaves, results).copy_(results[place])
    return pytree.tree_unflatten([_tensor(p, leaves, results) for p in exported.outputs], exported.structure)


def _tensor(place: Place, leaves: Sequence[Any], results: Sequence[torch.Tensor]) -> Any:
    if place.kind == "leaf":
        return leaves[place.what]
    return results[place.what] if place.kind == "result" else place.what
