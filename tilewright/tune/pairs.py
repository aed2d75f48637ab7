"""Which kernels of a model are looked at together: those that share a launch, neighbours, and those that may share one.
Each is found with all that are equal to it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tilewright.backend import backend_for
from tilewright.ir.forms.compute import Program
from tilewright.ir.forms.tensor import Tensor
from tilewright.schedule.constants import NEARBY
from tilewright.target import Target
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.signature import signature
from tilewright.tile_graph.plan.form import Plan
from tilewright.tune.parts import feeders_of, kernels_of, units_of


@dataclass(frozen=True)
class Surroundings:
    """A planned model, as far as it tells kernels alike."""

    program: Program
    plan: Plan
    target: Target
    nests: Mapping[str, Sequence[Nest]]  # by kernel
    shared: frozenset[str]  # constants that several kernels read

    def key(self, names: Sequence[str]) -> Hashable:
        """Equal for kernels that are."""
        return signature([nest for name in names for nest in self.nests[name]], self._about())

    def _about(self) -> Callable[[Tensor], Hashable]:
        layouts = dict(self.plan.layouts)

        def about(t: Tensor) -> Hashable:
            kept = t.name if t.name in self.shared else t in self.program.constants
            return (layouts.get(t.name), kept)

        return about


def launches(model: Surroundings) -> Iterator[list[list[str]]]:
    """Kernels that are started together, equal launches as one."""
    found: dict[Hashable, list[list[str]]] = {}
    for unit in units_of(model.plan):
        if unit.is_launch:
            names = [kernel.name for kernel in kernels_of(unit)]
            found.setdefault((len(names), model.key(names)), []).append(names)
    yield from found.values()


def neighbours(model: Surroundings, alone: Collection[str]) -> Iterator[list[list[str]]]:
    """Kernels that start by themselves of which the second reads from the first, equal pairs together."""
    units = units_of(model.plan)
    feeders = feeders_of(units, model.program)
    # what lies between two would wait for both
    pairs = (
        [units[place].name, reader.name] for number, reader in enumerate(units) for place in sorted(feeders[number])
        if not any(place in _before(other, feeders) for other in feeders[number] - {place})
    )  # fmt: skip
    yield from _alike(model, (pair for pair in pairs if set(pair) <= set(alone)))


def beside(model: Surroundings, alone: Collection[str]) -> Iterator[list[list[str]]]:
    """Kernels that start by themselves and wait for nothing of each other, each with the next such one, where the
    machine starts several at once; equal pairs together."""
    units = units_of(model.plan)
    feeders = feeders_of(units, model.program)
    before = [_before(number, feeders) for number in range(len(units))]
    backend = backend_for(model.target)
    able = [unit.name in alone and backend.share_launch((unit,), model.target) is not None for unit in units]
    pairs = []
    for number, unit in enumerate(units if any(able) else ()):
        later = range(number + 1, min(number + 1 + NEARBY, len(units)))
        place = next((i for i in later if able[i] and number not in before[i]), None) if able[number] else None
        if place is not None:
            pairs.append([unit.name, units[place].name])
    yield from _alike(model, pairs)


def _alike(model: Surroundings, pairs: Iterable[list[str]]) -> Iterator[list[list[str]]]:
    """Equal pairs together, no kernel in two of them."""
    found: dict[Hashable, list[list[str]]] = {}
    for pair in pairs:
        key = model.key(pair)
        if {name for other in found.get(key, []) for name in other}.isdisjoint(pair):
            found.setdefault(key, []).append(pair)
    yield from found.values()


def _before(unit: int, feeders: Sequence[frozenset[int]]) -> set[int]:
    """All that a unit waits for, itself among it."""
    found, waiting = {unit}, [unit]
    while waiting:
        new = feeders[waiting.pop()] - found
        found |= new
        waiting += new
    return found
