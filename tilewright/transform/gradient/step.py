"""A Program that computes a loss, and an optimiser, as a training step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tilewright.errors import OptionError
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import Compute, Map, Program
from tilewright.ir.forms.expr import Axis, Expr, load, rewrite, substitute, var
from tilewright.ir.forms.tensor import Tensor, extents
from tilewright.ir.forms.training import Training, TrainingPhase
from tilewright.transform.gradient.backward import Gradients, gradients
from tilewright.transform.gradient.optimisers import RATES, Optimiser


def training_step(
    program: Program, weights: Mapping[str, np.ndarray], optimiser: Optimiser, parts: int = 1
) -> Training:
    """Of a Program whose first output is the loss, the mean over a batch in so many parts, by those of its inputs that
    are weights, each with its first value."""
    loss = program.outputs[0]
    trained = [t for t in program.inputs if t.name in weights]
    found = gradients(program, loss, trained, 1.0 / parts)
    unread = [t.name for t in trained if t not in found.of]
    trained = [t for t in trained if t in found.of]
    if not trained:
        raise OptionError(f"the loss '{loss.name}' depends on no weight{f', not even {unread[0]}' if unread else ''}")
    made = _Update(program, found, optimiser, weights).run(trained)
    # a weight that the loss does not depend on stays as it is
    fixed = {t: weights[t.name] for t in program.inputs if t.name in unread}
    inputs = (*(t for t in program.inputs if t not in fixed), *made.moments, made.rates)
    whole = Program(inputs, (loss,), (*program.computes, *found.computes, *made.computes),
                    {**program.constants, **fixed})  # fmt: skip
    turns = {**dict.fromkeys(program.computes, TrainingPhase.FORWARD), **dict.fromkeys(found.computes,
             TrainingPhase.BACKWARD), **dict.fromkeys(made.computes, TrainingPhase.UPDATE)}  # fmt: skip
    return Training(whole, made.rates, made.states, made.initial, turns, {**found.beside, **made.beside})


@dataclass
class _Update:
    program: Program
    found: Gradients
    optimiser: Optimiser
    weights: Mapping[str, np.ndarray]
    rates: Tensor = field(init=False)
    computes: list[Compute] = field(default_factory=list)
    moments: list[Tensor] = field(default_factory=list)
    states: dict[Tensor, Tensor] = field(default_factory=dict)
    initial: dict[Tensor, np.ndarray] = field(default_factory=dict)
    beside: dict[Compute, Compute] = field(default_factory=dict)

    def __post_init__(self) -> None:
        computed = (t for c in self.found.computes for t in c.outputs)
        self.names = {t.name for t in (*self.program.tensors(), *computed)}
        self.rates = Tensor(self._free("rates"), (RATES,), dtypes.float32)

    def run(self, trained: Sequence[Tensor]) -> _Update:
        makers = {t: c for c in (*self.program.computes, *self.found.computes) for t in c.outputs}
        for weight in trained:
            gradient = self.found.of[weight]
            self._update(weight, gradient, self.found.beside[makers[gradient]])
        return self

    def _update(self, weight: Tensor, gradient: Tensor, where: Compute) -> None:
        kept = [Tensor(self._free(f"{weight.name}_{n}"), weight.shape, weight.dtype) for n in self.optimiser.moments]
        axes = tuple(Axis(f"i{n}", extent) for n, extent in enumerate(extents(weight)))
        here = [load(t, map(var, axes)) for t in (weight, gradient, *kept)]
        rates = [load(self.rates, [n]) for n in range(RATES)]
        values = self.optimiser.following(here[0], here[1], here[2:], rates)
        known: dict[Expr, Tensor] = {}
        for old, value in zip((*kept, weight), values, strict=True):
            new = Tensor(self._free(f"{old.name}_next"), old.shape, old.dtype)
            own = tuple(Axis(axis.name, axis.extent) for axis in axes)
            moved = dict(zip(axes, map(var, own), strict=True))
            made = Map(new, own, substitute(_with(value, known, axes), moved), f"update of '{weight.name}'")
            known[value] = new
            self.computes.append(made)
            self.beside[made] = where
            self.states[old] = new
            self.initial[old] = self.weights[old.name] if old is weight else np.zeros(extents(old), old.dtype.numpy)
        self.moments += kept

    def _free(self, name: str) -> str:
        found, number = name, 1
        while found in self.names:
            number += 1
            found = f"{name}_{number}"
        self.names.add(found)
        return found


def _with(value: Expr, known: Mapping[Expr, Tensor], axes: Collection[Axis]) -> Expr:
    """A value that reads what was computed before it."""
    return rewrite(value, lambda node: load(known[node], map(var, axes)) if node in known else None)
