"""Records as rows to learn from: what every kernel of a measured plan is predicted to take, and its numbers."""

from __future__ import annotations

from dataclasses import dataclass

from bench.judge.judge import machines_of
from tilewright.learn.encode import Encoded, with_trees
from tilewright.tune.features import Told
from tilewright.tune.reader import RecordReader
from tilewright.tune.records import Measurement, Records


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


def rows_of(records: Records, has_trees: bool = False) -> list[Row]:
    """Of all plans that can be priced."""
    names, reader = machines_of(records), RecordReader(records)
    found = []
    for one in records.measurements:
        told = reader.told(one)
        if told:
            trees = tuple(with_trees(*reader.parts(one), told)) if has_trees else ()
            found.append(Row(one, names[one.target], told, trees))
    return found
