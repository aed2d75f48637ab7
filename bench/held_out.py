"""How far the cost model holds for models that it was not fitted to: `python -m bench.predicted --held-out`.

For each model the constants of the description that no probe measures are found anew from all other models, from
values that say nothing, one constant at a time; the model is then predicted by them. What is not fitted again are the
constants inside schedule/, which are cycles of loops as compilers write them: of those all models here are in-sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from bench.measurements import Kernels, Measured
from bench.predicted import Share, free_factor, within_bounds
from bench.support import table
from tilewright.target import Target

# the first of each: as if there were no such cost
GRID: Mapping[str, tuple[float, ...]] = {
    "gathered_reads": (1.0, 1.5, 2.2, 3.0),
    "stream_cost": (0.0, 0.06, 0.12, 0.25),
    "lane_check": (0.0, 0.4, 0.8, 1.6),
    "foreign": (0.0, 0.25, 0.5, 1.0),
    "cold_start": (0.0, 1.25e-7, 2.5e-7, 5e-7),
}
_SWEEPS = 2
Constants = tuple[float, ...]


@dataclass
class Fits:
    """Ratios of measured to predicted times, by model and constants, each predicted once."""

    measured: Mapping[str, Measured]
    target: Target
    ratios: dict[tuple[str, Constants], np.ndarray] = field(default_factory=dict)
    kernels: dict[str, Kernels] = field(default_factory=dict)

    def of(self, model: str, constants: Constants) -> np.ndarray:
        key = (model, constants)
        if key not in self.ratios:
            described = replace(self.target, **dict(zip(GRID, constants, strict=True)))
            if model not in self.kernels:
                self.kernels[model] = Kernels(self.measured[model])
            kernels = self.kernels[model]
            predicted = kernels.microseconds(described)
            self.ratios[key] = np.array([call.microseconds / predicted[call.kernel] for call in kernels.calls])
        return self.ratios[key]

    def score(self, models: Sequence[str], constants: Constants) -> int:
        """Calls within the bounds, each model with its free factor."""
        return sum(within_bounds(found / free_factor(found)) for found in (self.of(m, constants) for m in models))

    def fit(self, models: Sequence[str]) -> Constants:
        """The constants that leave most calls of the models within the bounds, changed one after the other."""
        best: Constants = tuple(values[0] for values in GRID.values())
        for _ in range(_SWEEPS):
            before = best
            for place, values in enumerate(GRID.values()):
                tried = [(*best[:place], value, *best[place + 1 :]) for value in values]
                best = max(tried, key=lambda constants: self.score(models, constants))
            if best == before:
                break
        return best


def report(name: str, measured: Sequence[Measured], target: Target) -> str:
    """By model: the share within the bounds by constants found without it, and by those of all."""
    fits = Fits({m.model: m for m in measured}, target)
    models = list(fits.measured)
    everything = fits.fit(models)
    rows = []
    shares: dict[str, list[float]] = {"held out": [], "in sample": []}
    for model in models:
        others = [m for m in models if m != model]
        cells = [model]
        constants = fits.fit(others)
        for title, chosen in (("held out", constants), ("in sample", everything)):
            found = fits.of(model, chosen)
            share = Share(model, free_factor(found), tuple((found / free_factor(found)).tolist()))
            shares[title] += share.ratios
            cells += _cells(share)
        rows.append([*cells, _differences(constants, everything)])
    rows.append(["all", *(c for some in shares.values() for c in _cells(Share("all", 0.0, tuple(some)))), ""])
    header = ["model", "held out", "range", "in sample", "range", "constants that differ without it"]
    values = ", ".join(f"{n} {v:g}" for n, v in zip(GRID, everything, strict=True))
    return "\n".join([f"## {name}, constants fitted without each model", "", *table(header, rows), "",
                      f"Fitted to all: {values}.", ""])  # fmt: skip


def _cells(share: Share) -> list[str]:
    return [f"{share.within:.0%}", f"{min(share.ratios):.2f} to {max(share.ratios):.2f}"]


def _differences(constants: Constants, everything: Constants) -> str:
    pairs = zip(GRID, constants, everything, strict=True)
    return ", ".join(f"{name} {own:g}" for name, own, usual in pairs if own != usual) or "none"
