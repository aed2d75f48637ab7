"""A module compiled ahead for ranges of sizes: followed at some of them, and compiled for all."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from tilewright.errors import InputError, ModelError, OptionError, UnevenError
from tilewright.frontend.open_graphs import opened, with_rooms
from tilewright.frontend.pytorch.exported import Exported, export
from tilewright.ir.forms.graph import Graph, Room
from tilewright.pytorch.calls import Callee, TensorCall

Places = Mapping[str, Mapping[int, int]]


class Sizes(Protocol):
    """Sizes of a dimension, counted."""

    @property
    def numbers(self) -> Room: ...
    def size(self, number: int) -> int: ...


class RangedCallee(Callee, Protocol):
    """What is compiled for all sizes."""

    @property
    def variants(self) -> Sequence[Any]: ...
    @property
    def compilations(self) -> int: ...


ReadSpans = Callable[[Mapping[str, Sequence[int]]], tuple[Sequence[Sizes], Places]]
BuildRanges = Callable[["FollowedModule", Sequence[Any], Graph, Places], RangedCallee]


@dataclass(frozen=True)
class FollowedModule:
    """Graphs of a module for numbers of its spans: it is followed on arguments like the example, with other sizes."""

    module: torch.nn.Module
    leaves: Sequence[Any]
    structure: Any
    spans: Sequence[Sizes]
    axes: Mapping[int, Mapping[int, int]]  # by leaf and axis the span
    whole: dict[tuple[Room, ...], Graph] = field(default_factory=dict)  # Graphs that are merged already
    tried: list[tuple[Room, ...]] = field(default_factory=list)  # rooms that one was to be merged for

    @property
    def name(self) -> str:
        return type(self.module).__name__

    def exported(self, numbers: Sequence[int]) -> Exported:
        leaves = [self._sized(k, leaf, numbers) for k, leaf in enumerate(self.leaves)]
        args, named = pytree.tree_unflatten(leaves, self.structure)
        found = export(self.module, args, named)
        is_plain = all(p.view is None and p.kind in ("result", "leaf", "value") for p in found.outputs)
        if not isinstance(found.graph, Graph) or found.changes or not is_plain:
            raise ModelError(f"{self.name} changes tensors in place, returns views or has a loop that data end, and is "
                             f"compiled for the shapes that come alone; leave out dynamic=")  # fmt: skip
        return found

    def exact(self, numbers: tuple[int, ...]) -> Graph:
        graph = self.exported(numbers).graph
        assert isinstance(graph, Graph)
        return graph

    def forget(self) -> None:
        """Follow the module anew."""
        self.whole.clear()
        self.tried.clear()

    def open(self, rooms: tuple[Room, ...]) -> Graph:
        """One Graph for as much of the spans as operators treat alike, since following a module takes long."""
        most = tuple(self._beyond_one(span) for span in self.spans)
        if not self.tried:
            self.tried.append(most)
            with suppress(UnevenError):
                self.whole[most] = opened(self.exact, most)
        for held, graph in self.whole.items():
            if all(_is_in(room, around) for room, around in zip(rooms, held, strict=True)):
                return with_rooms(graph, rooms)
        return with_rooms(opened(self.exact, rooms), rooms)

    def _beyond_one(self, span: Sizes) -> Room:
        whole = span.numbers
        low = next((n for n in range(whole.low, whole.high + 1) if span.size(n) > 1), whole.high)
        return Room(low, whole.high)

    def _sized(self, place: int, leaf: Any, numbers: Sequence[int]) -> Any:
        """An argument of another size, of elements that it has."""
        for axis, span in self.axes.get(place, {}).items():
            size = self.spans[span].size(numbers[span])
            leaf = leaf.index_select(axis, torch.arange(size) % max(1, leaf.shape[axis]))
        return leaf


def _is_in(room: Room, around: Room) -> bool:
    return around.low <= room.low and room.high <= around.high


class RangedModule:
    """What `tilewright.compile` gives for a torch.nn.Module with `dynamic`. It is called like the module, with sizes in
    the ranges, and nothing is compiled at a call. For inference: no gradients are kept."""

    def __init__(self, module: torch.nn.Module, args: Sequence[Any], named: Mapping[str, Any], read: ReadSpans,
                 build: BuildRanges) -> None:  # fmt: skip
        leaves, self._structure = pytree.tree_flatten((tuple(args), dict(named)))
        names = _names(module, args, named, leaves)
        self._spans, places = read({n: tuple(leaves[k].shape) for n, k in names.items()})
        axes = {names[name]: dict(found) for name, found in places.items()}
        self._family = FollowedModule(module, leaves, self._structure, self._spans, axes)
        self._build = build
        self._plain = {k: x for k, x in enumerate(leaves) if not isinstance(x, torch.Tensor)}
        self._compile()

    def _compile(self) -> None:
        self._family.forget()
        largest = tuple(span.numbers.high for span in self._spans)
        self._exported = self._family.exported(largest)
        self._versions = [(t, t._version) for t in self._exported.constants if not t.is_inference()]
        graph = self._exported.graph
        assert isinstance(graph, Graph)
        pairs = zip(graph.inputs, self._exported.inputs, strict=True)
        places = {v.name: self._family.axes[p.what] for v, p in pairs if p.what in self._family.axes}
        self._call = TensorCall(self._build(self._family, self._spans, graph, places))

    def __call__(self, *args: Any, **named: Any) -> Any:
        leaves, structure = pytree.tree_flatten((tuple(args), dict(named)))
        if structure != self._structure or any(leaves[k] != x for k, x in self._plain.items()):
            raise InputError(f"{self._family.name} is compiled for arguments like the example's, and these are others")
        if any(tensor._version != version for tensor, version in self._versions):
            warnings.warn(f"tilewright: {self._family.name}: its parameters have changed, so it is compiled again",
                          stacklevel=2)  # fmt: skip
            self._compile()
        tensors = [p.tensor(leaves, ()) for p in self._exported.inputs]
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            raise InputError(
                "a compiled module keeps no gradients, but an input requires them; call it under torch.no_grad()"
            )
        results = self._call(tensors)
        return pytree.tree_unflatten(self._exported.returned(leaves, results), self._exported.structure)

    @property
    def module(self) -> torch.nn.Module:
        return self._family.module

    @property
    def model(self) -> RangedCallee:
        """What is compiled, as a function of the tensors."""
        model: Any = self._call.model
        return model

    @property
    def variants(self) -> Sequence[Any]:
        """What it is made of: a compiled form for each range."""
        return self.model.variants

    @property
    def compilations(self) -> int:
        return self.model.compilations

    def explain(self) -> str:
        """What became of the module for each range."""
        return self.model.explain()

    def profile(self, *args: Any, repeat: int = 20, **named: Any) -> Any:
        """Time per kernel for these arguments."""
        leaves, _ = pytree.tree_flatten((tuple(args), dict(named)))
        return self.model.profile(*[p.tensor(leaves, ()) for p in self._exported.inputs], repeat=repeat)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the model for all its sizes to a directory. It takes and gives the tensors alone, in order."""
        self.model.save(folder)

    def __repr__(self) -> str:
        return f"<tilewright.RangedModule of {self._family.name}, {len(self.variants)} compiled forms>"


def compile_ranged(module: torch.nn.Module, example: Any, read: ReadSpans, build: BuildRanges) -> RangedModule:
    """A module compiled for inputs like the example, of all sizes that `read` finds."""
    if example is None:
        raise OptionError(
            "a torch.nn.Module needs inputs to follow it with: tilewright.compile(module, (x,), dynamic=...)"
        )
    args = () if isinstance(example, Mapping) else tuple(example) if isinstance(example, tuple | list) else (example,)
    return RangedModule(module, args, dict(example) if isinstance(example, Mapping) else {}, read, build)


def _names(
    module: torch.nn.Module, args: Sequence[Any], named: Mapping[str, Any], leaves: Sequence[Any]
) -> dict[str, int]:
    """Arguments that are tensors by their names in forward, and their places among the leaves."""
    bound = inspect.signature(module.forward).bind(*args, **named).arguments
    place = {id(x): k for k, x in enumerate(leaves)}
    return {name: place[id(x)] for name, x in bound.items() if isinstance(x, torch.Tensor)}
