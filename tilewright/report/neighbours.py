"""Pairs of neighbours in a model: a result, the nest that reads it, and every level at which the two were tried."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tilewright.ir.compute import Compute, reads
from tilewright.report.model_view import ModelView, bytes_of, computes_of
from tilewright.schedule.fuse import why_not_in_registers
from tilewright.schedule.planner import parts_of
from tilewright.schedule.trials import Trial, Trials
from tilewright.target import Target
from tilewright.tile_graph.plan import Leaf, Tile


class Neighbours:
    """Who reads what in a Plan; looked up kernel by kernel."""

    def __init__(self, view: ModelView, target: Target, names: Mapping[str, str]) -> None:
        """`names` are those of the kernels that planned ones became."""
        self._names = names
        self._view = view
        self._target = target
        self._readers: dict[str, list[tuple[Tile, Leaf]]] = {}
        self._users: dict[str, list[Compute]] = {}
        for compute in computes_of(view.program):
            for tensor in reads(compute):
                self._users.setdefault(tensor.name, []).append(compute)
        for kernel in view.plan.kernels:
            for leaf in kernel.leaves:
                for name in dict.fromkeys(t.name for c in self._inside(leaf) for t in reads(c)):
                    self._readers.setdefault(name, []).append((kernel, leaf))
        self._trials = Trials(view.program, view.plan, target)
        self._tried: dict[tuple[str, str, str], Trial] = {}
        self._kept = frozenset(t for part in parts_of(view.program) for t in part.kept)

    def of(self, kernel: Tile) -> list[dict[str, Any]]:
        """Every pair whose result a kernel computes, in the order of its nests."""
        found = []
        for leaf in kernel.leaves:
            for tensor in self._view.by_name[leaf.tensor].outputs:
                for other, reader in self._readers.get(tensor.name, []):
                    if reader.tensor != leaf.tensor:
                        found.append(self._pair(kernel, leaf, tensor.name, other, reader))
        return found

    def _pair(self, kernel: Tile, leaf: Leaf, tensor: str, other: Tile, reader: Leaf) -> dict[str, Any]:
        view, target = self._view, self._target
        is_joined = other is kernel
        core, made = view.by_name[leaf.core], view.by_name[tensor]
        user = next(c for c in self._inside(reader) if any(t.name == tensor for t in reads(c)))
        why = "it is a copy made on purpose, to be read in another order or without conditions"
        if view.tensors[tensor] not in view.program.staged:
            why = why_not_in_registers(core, view.tensors[tensor], made, user, self._users[tensor], self._kept)
        trial = self._trial(kernel, leaf, other)
        tried = [
            _entry(target.levels[0].name, None, why, False),
            _entry(trial.level, trial.together, trial.reason, is_joined),
            _entry(target.main.name, trial.apart, "", not is_joined),
        ]
        return {
            "tensor": tensor,
            "bytes": bytes_of(view.tensors[tensor]),
            "reader": reader.tensor,
            "reader_plan": other.name,
            "reader_kernel": self._names[other.name],
            "level": next(t["level"] for t in tried if t["chosen"]),
            "tried": tried,
        }

    def _trial(self, kernel: Tile, leaf: Leaf, other: Tile) -> Trial:
        """What the two would cost as one kernel and as two; known once for all pairs that share it."""
        key = (kernel.name, leaf.tensor if other is kernel else "", other.name)
        if key not in self._tried:
            self._tried[key] = (
                self._trials.parted(kernel, leaf.tensor) if other is kernel else self._trials.joined(kernel, other)
            )
        schedule = self._view.plan.schedule
        if other is not kernel and schedule != "connected":
            return replace(self._tried[key], reason=f"schedule {schedule} joins no kernels")
        return self._tried[key]

    def _inside(self, leaf: Leaf) -> list[Compute]:
        return [self._view.by_name[n] for n in dict.fromkeys((leaf.core, *leaf.epilogue, *leaf.composed))]


def _entry(level: str, seconds: float | None, reason: str, chosen: bool) -> dict[str, Any]:
    predicted = None if seconds is None else round(1e6 * seconds, 3)
    return {"level": level, "predicted_us": predicted, "reason": reason, "chosen": chosen}
