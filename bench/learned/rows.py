"""Records as rows to learn from: what every kernel of a measured plan is predicted to take, and its numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from bench.judge.judge import machines_of
from tilewright.errors import TilewrightError
from tilewright.ir.forms.compute import Program
from tilewright.learn.encode import Encoded, encoded
from tilewright.target import Target
from tilewright.tile_graph.plan.form import Plan
from tilewright.tune.features import Told, features
from tilewright.tune.records import Measurement, Records, read_program

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """A measured plan."""

    measured: Measurement
    machine: str
    kernels: tuple[Told, ...]
    trees: tuple[Encoded, ...] = ()  # as networks are told them, where they are

    @property
    def predicted(self) -> float:
        """Microseconds."""
        return 1e6 * sum(kernel.seconds for kernel in self.kernels)


class Reader:
    """Tells the kernels of measured plans; Programs and machines are read once."""

    def __init__(self, records: Records) -> None:
        self.records = records
        self.programs: dict[str, Program] = {}
        self.targets: dict[str, Target] = {}

    def told(self, one: Measurement) -> tuple[Told, ...]:
        """Nothing where this code does not know how to price the plan."""
        return self._known(one, features)

    def trees(self, one: Measurement) -> tuple[Encoded, ...]:
        return self._known(one, encoded)

    def _known(self, one: Measurement, ask: Callable[[Program, Plan, Target], Sequence[T]]) -> tuple[T, ...]:
        if one.program not in self.programs:
            self.programs[one.program] = read_program(self.records.programs[one.program])
        if one.target not in self.targets:
            self.targets[one.target] = self.records.targets[one.target].target()
        plan = Plan.from_json(json.dumps(one.plan))
        try:
            return tuple(ask(self.programs[one.program], plan, self.targets[one.target]))
        except TilewrightError:
            return ()


def rows_of(records: Records, has_trees: bool = False) -> list[Row]:
    """Of all plans that can be priced."""
    names, reader = machines_of(records), Reader(records)
    found = (
        Row(m, names[m.target], reader.told(m), reader.trees(m) if has_trees else ()) for m in records.measurements
    )
    return [row for row in found if row.kernels]
