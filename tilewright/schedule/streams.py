"""Splits the nests of a kernel into what runs once a tile, in every block of a streamed axis, and after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tilewright.ir.expr import Axis
from tilewright.schedule.nest import Nest
from tilewright.schedule.plan import KernelPlan, NestPlan
from tilewright.schedule.propagate import Box, Range, propagate


@dataclass(frozen=True)
class Phases:
    before: tuple[Nest, ...]
    loop: Axis | None
    inside: tuple[Nest, ...]
    after: tuple[Nest, ...]
    plans: Mapping[Nest, NestPlan]
    boxes: Mapping[Nest, Box]
    reduce_boxes: Mapping[Nest, dict[Axis, Range]] = field(default_factory=dict)

    @property
    def nests(self) -> tuple[Nest, ...]:
        return (*self.before, *self.inside, *self.after)


def stream_phases(plan: KernelPlan, nests: Sequence[Nest], root_box: Box) -> Phases:
    plans = dict(zip(nests, plan.nests, strict=True))
    return Phases(tuple(nests), None, (), (), plans, propagate(nests, root_box))
