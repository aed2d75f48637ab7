"""A compiled module: called like the module itself, with one model for each set of shapes it has met."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tilewright.calls.progress import log_compiled
from tilewright.errors import InputError, ModelError, OptionError
from tilewright.frontend.pytorch.aliases import overlap_groups, overlapping
from tilewright.frontend.pytorch.exported import Exported, export
from tilewright.pytorch.calls import Build, Callee, TensorCall

MOST_SHAPES = 16  # models kept at once; the oldest goes first


@dataclass(frozen=True)
class ModuleEntry:
    """The module compiled for one set of shapes."""

    exported: Exported
    call: TensorCall | None  # None where nothing is computed
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
        if module.training and any(acts_in_training(m) for m in module.modules()):
            raise ModelError(
                f"{type(module).__name__} is in training mode, where dropout and normalisation act otherwise; "
                f"call module.eval() first"
            )
        self._module = module
        self._build = build
        self._most = most_shapes
        self._entries: dict[Any, ModuleEntry] = {}
        self._lock = RLock()
        self._compilations = 0
        self._strides_matter = False  # what is a view of an argument may depend on how that lies in memory
        self._overlaps_matter = False  # of arguments, some of which are changed
        self._keeps_gradients = any(p.requires_grad for p in module.parameters())  # as PyTorch would
        self._find(*_flattened(args, named), args, named)

    def __call__(self, *args: Any, **named: Any) -> Any:
        leaves, structure = _flattened(args, named)
        entry = self._entries.get(self._key(leaves, structure))
        if entry is None or not entry.is_current:
            entry = self._find(leaves, structure, args, named)
        if self._keeps_gradients and torch.is_grad_enabled():
            self._keeps_gradients = False  # told once
            self._warn(
                "its parameters require gradients, and the result of compiled code has none; call it under "
                "torch.no_grad()", 3,
            )  # fmt: skip
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
            head = f"shapes {number} of {len(self._entries)} (at most {self._most} are kept): {shapes}"
            texts.append("\n".join([head, *(f"  {mutation}" for mutation in entry.exported.mutations), told]))
        return "\n\n".join(texts)

    def profile(self, *args: Any, repeat: int = 20, **named: Any) -> Any:
        """Time per kernel for these arguments."""
        leaves, structure = _flattened(args, named)
        entry = self._find(leaves, structure, args, named)
        if entry.call is None:
            raise InputError("the module computes nothing")
        return entry.call.model.profile(*[p.tensor(leaves, ()) for p in entry.exported.inputs], repeat=repeat)

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
        (entry,) = self._entries.values()
        model = self.models[0] if entry.exported.copying is None else self._build(entry.exported.copying())
        model.save(folder)

    def __repr__(self) -> str:
        return f"<tilewright.CompiledModule of {type(self._module).__name__}, {len(self._entries)} sets of shapes>"

    def _key(self, leaves: Sequence[Any], structure: Any) -> Any:
        """Equal for arguments that one model takes."""
        strides = _strides(leaves) if self._strides_matter else ()
        return (*_key(leaves, structure), strides, overlap_groups(leaves) if self._overlaps_matter else ())

    def _find(
        self, leaves: Sequence[Any], structure: Any, args: Sequence[Any], named: Mapping[str, Any]
    ) -> ModuleEntry:
        with self._lock:
            key = self._key(leaves, structure)
            entry = self._entries.get(key)
            if entry is not None and entry.is_current:
                return entry
            if self._compilations:
                why = "its parameters have changed" if entry is not None else "it has not met these shapes"
                self._warn(f"{why}, so it is compiled again ({self._compilations} times before)", 4)
            start = time.perf_counter()
            made = _compiled(self._exported(leaves, args, named), self._build)
            if self._compilations:
                seconds = time.perf_counter() - start
                name = type(self._module).__name__
                log_compiled(f"compiled {name} for {_shapes(leaves)} in {seconds:.2f} s", seconds)
            self._compilations += 1
            kept = dict(self._entries)  # a new dictionary: calls in other threads read the old one without the lock
            kept.pop(key, None)
            if len(kept) >= self._most:
                kept.pop(next(iter(kept)))
                self._warn(f"more than {self._most} sets of shapes: the oldest model is dropped", 4)
            kept[self._key(leaves, structure)] = made
            self._entries = kept
            return made

    def _exported(self, leaves: Sequence[Any], args: Sequence[Any], named: Mapping[str, Any]) -> Exported:
        """The module for these arguments. Where it changes some that overlap, it is followed with their memory."""
        exported = export(self._module, args, named)
        is_dense = all(x.is_contiguous() for x in leaves if isinstance(x, torch.Tensor))
        self._strides_matter |= exported.changes_arguments or exported.views_arguments or not is_dense
        self._overlaps_matter |= exported.changes_arguments
        groups = overlap_groups(leaves) if exported.changes_arguments else ()
        return export(self._module, args, named, groups) if groups else exported

    def _warn(self, what: str, level: int) -> None:
        warnings.warn(f"tilewright: {type(self._module).__name__}: {what}", stacklevel=level)


def compile_module(module: torch.nn.Module, example: Any, build: Build) -> CompiledModule:
    """A module compiled for inputs like the example: a tensor, a tuple of arguments, or a dict of them by name."""
    if example is None:
        raise OptionError(
            "a torch.nn.Module needs inputs to follow it with: tilewright.compile(module, (x,)), or a dict by name"
        )
    if isinstance(example, Mapping):
        return CompiledModule(module, (), dict(example), build)
    return CompiledModule(module, tuple(example) if isinstance(example, tuple | list) else (example,), {}, build)


def acts_in_training(module: torch.nn.Module) -> bool:
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


def _shapes(leaves: Sequence[Any]) -> str:
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    return ", ".join("x".join(map(str, x.shape)) or "scalar" for x in tensors) or "no tensors"


def _strides(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Of the tensors that are not contiguous."""
    tensors = [(k, x) for k, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
    return tuple([(k, x.stride()) for k, x in tensors if not x.is_contiguous()])


def _check_apart(exported: Exported, leaves: Sequence[Any]) -> None:
    """An argument may not overlap with a tensor of the module when one of them changes."""
    changed = [place.what for place, _ in exported.changes if place.kind == "tensor"]
    held = [*changed, *(exported.constants if exported.changes_arguments else ())]
    given = [x for x in leaves if isinstance(x, torch.Tensor)]
    memory = {x.untyped_storage().data_ptr() for x in held}
    if not any(x.untyped_storage().data_ptr() in memory for x in given):
        return
    for group in overlapping([*given, *held]):
        if group[0] < len(given) <= group[-1]:
            raise InputError(
                f"tensor {group[0]} of the arguments shares memory with one that the module holds, and one of the two "
                f"is changed in place; pass a copy"
            )


def _compiled(exported: Exported, build: Build) -> ModuleEntry:
    versions = tuple((t, t._version) for t in exported.constants if not t.is_inference())
    call = TensorCall(build(exported.graph)) if exported.graph.outputs else None
    return ModuleEntry(exported, call, versions)


def _call(entry: ModuleEntry, leaves: Sequence[Any]) -> Any:
    exported = entry.exported
    tensors = [p.tensor(leaves, ()) for p in exported.inputs]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise InputError(
            "a compiled module keeps no gradients, but an input requires them; call it under torch.no_grad()"
        )
    if exported.changes:
        _check_apart(exported, leaves)
    results = entry.call(tensors) if entry.call is not None else []
    return pytree.tree_unflatten(exported.returned(leaves, results), exported.structure)
