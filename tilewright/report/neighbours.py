"""Pairs of neighbours in a model: a result, the nest that reads it, and every level at which the two were tried."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tilewright.ir.forms.compute import Compute, all_computes, reads
from tilewright.report.model_view import ModelView, bytes_of, computes_of
from tilewright.schedule.fuse import why_not_in_registers
from tilewright.schedule.planner import parts_of
from tilewright.schedule.trials import JoinTrial, Trials
from tilewright.target import Target
from tilewright.tile_graph.plan.form import Leaf, Tile
from tilewright.tile_graph.traffic.residence import reuse_distances


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
        self._tried: dict[tuple[str, str, str], JoinTrial] = {}
        self._near: dict[tuple[str, str], JoinTrial | None] = {}
        self._alone = {kernel.name for kernel, steps in view.plan.launches() if steps is None}
        self._distances = reuse_distances(_units(view.plan.body), all_computes(view.program))
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
        nearer = self._nearer(kernel, leaf) if is_joined else None
        is_near = nearer is not None and self._inner_level(kernel, leaf.tensor) == nearer.level
        flat = nearer.apart if is_near and nearer is not None else trial.together
        place = trial.level if is_joined else view.between.get(tensor, target.main.name)
        outer = target.shared_cache.name if target.shared_cache is not None else ""
        tried = [
            _entry(target.registers.name, None, why, False),
            *([_entry(nearer.level, nearer.together, nearer.reason, is_near)] if nearer is not None else []),
            _entry(trial.level, flat, "" if is_joined else trial.reason, is_joined and not is_near),
            *([_entry(outer, trial.apart if place == outer else None, self._passes(tensor, place), place == outer)]
              if outer and not is_joined else []),
            _entry(target.main.name, trial.apart if place != outer else None, trial.reason if is_joined else "",
                   place == target.main.name),
        ]  # fmt: skip
        return {
            "tensor": tensor,
            "bytes": bytes_of(view.tensors[tensor]),
            "reader": reader.tensor,
            "plan": kernel.name,
            "reader_plan": other.name,
            "reader_kernel": self._names[other.name],
            "level": next(t["level"] for t in tried if t["chosen"]),
            "tried": tried,
        }

    def _passes(self, tensor: str, place: str) -> str:
        """Why a tensor does not stay in the outer cache between kernels."""
        if self._target.shared_cache is None or place == self._target.shared_cache.name:
            return ""
        if tensor not in self._distances or self._distances[tensor] <= self._target.shared_room:
            return "it leaves the model, or the steps of a Scan read it"
        passing, room = (f"{n / 1e6:.3g} MB" for n in (self._distances[tensor], self._target.shared_room))
        return f"{passing} pass before it is read for the last time, and {room} stay"

    def _trial(self, kernel: Tile, leaf: Leaf, other: Tile) -> JoinTrial:
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

    def _nearer(self, kernel: Tile, leaf: Leaf) -> JoinTrial | None:
        """The same kernel with what a leaf stores nearer; those of a Scan's steps are not looked at."""
        if self._view.plan.schedule != "connected" or kernel.name not in self._alone or leaf.tensor not in kernel.held:
            return None
        key = (kernel.name, leaf.tensor)
        if key not in self._near:
            self._near[key] = self._trials.nearer(kernel, leaf.tensor)
        return self._near[key]

    def _inner_level(self, kernel: Tile, tensor: str) -> str:
        """The level of the innermost Tile of a kernel that holds a tensor."""
        tiles = [t for t in kernel.walk() if isinstance(t, Tile) and any(h.tensor == tensor for h in t.holds)]
        return tiles[-1].level if tiles else ""

    def _inside(self, leaf: Leaf) -> list[Compute]:
        return [self._view.by_name[n] for n in dict.fromkeys((leaf.core, *leaf.epilogue, *leaf.composed))]


def _units(tile: Tile) -> list[Tile]:
    """Kernels and Scans in order, whatever holds what they leave to each other."""
    inside = [n for n in tile.body if isinstance(n, Tile)]
    return [u for n in inside for u in ([n] if n.is_kernel or n.over == "steps" else _units(n))]


def _entry(level: str, seconds: float | None, reason: str, chosen: bool) -> dict[str, Any]:
    predicted = None if seconds is None else round(1e6 * seconds, 3)
    return {"level": level, "predicted_us": predicted, "reason": reason, "chosen": chosen}
