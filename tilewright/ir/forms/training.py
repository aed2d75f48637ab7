"""A training step as a Program: it takes its weights and gives those of the next step.

forward    from the inputs of one part of a batch to its loss
backward   from there back to the gradient of every weight; those of all parts are added up
update     once a step: from these and what it keeps to the weights and moments of the next step
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from tilewright.ir.forms.compute import Compute, Program
from tilewright.ir.forms.tensor import Tensor


class TrainingPhase(IntEnum):
    FORWARD = 0
    BACKWARD = 1
    UPDATE = 2


@dataclass(frozen=True)
class Training:
    """`program` has the computes of all three turns in order, and the loss as its output. `states` has of every tensor
    that is kept from step to step which one it is in the next. Computes that belong to another one, and are done where
    that is, are in `beside`."""

    program: Program
    rates: Tensor  # the input that has the optimiser's numbers of a step
    states: Mapping[Tensor, Tensor]
    initial: Mapping[Tensor, np.ndarray]
    turns: Mapping[Compute, TrainingPhase]
    beside: Mapping[Compute, Compute]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """What a part of a batch has of its own."""
        return tuple(t for t in self.program.inputs if t not in self.states and t is not self.rates)
