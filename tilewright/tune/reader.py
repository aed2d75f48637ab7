"""Measurements as what they were made of: their Programs, Plans and machines, and what the fold says of the Plans."""

from __future__ import annotations

import json

from tilewright.errors import TilewrightError
from tilewright.ir.forms.compute import Program
from tilewright.target import Target
from tilewright.tile_graph.plan.form import Plan
from tilewright.tune.features import Told, features
from tilewright.tune.records import Measurement, Records, read_program


class RecordReader:
    """Programs and machines are read once."""

    def __init__(self, records: Records) -> None:
        self.records = records
        self._programs: dict[str, Program] = {}
        self._targets: dict[str, Target] = {}

    def parts(self, one: Measurement) -> tuple[Program, Plan, Target]:
        if one.program not in self._programs:
            self._programs[one.program] = read_program(self.records.programs[one.program])
        if one.target not in self._targets:
            self._targets[one.target] = self.records.targets[one.target].target()
        return self._programs[one.program], Plan.from_json(json.dumps(one.plan)), self._targets[one.target]

    def told(self, one: Measurement) -> tuple[Told, ...]:
        """The kernels of the plan; nothing where this code does not know how to price it."""
        parts = self.parts(one)
        try:
            return tuple(features(*parts))
        except TilewrightError:
            return ()
