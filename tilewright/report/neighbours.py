"""Pairs of neighbours in a model: a result, the nest that reads it, and every level at which the two were tried."""

from __future__ import annotations

from typing import Any

from tilewright.ir.compute import Compute, Scan, reads
from tilewright.report.model_view import ModelView, bytes_of, computes_of
from tilewright.schedule.fuse import why_not_in_registers
from tilewright.target import Target
from tilewright.tile_graph.plan import Leaf, Tile, Trial


class Neighbours:
    """Who reads what in a Plan; looked up kernel by kernel."""

    def __init__(self, view: ModelView, target: Target) -> None:
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
        scans = [c for c in view.program.computes if isinstance(c, Scan)]
        beyond = [t for s in scans for t in (*reads(s), *s.following, *(body for body, _ in s.stacked))]
        self._kept = frozenset((*view.program.outputs, *view.program.staged, *beyond))

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
        trial = self._trial(kernel, leaf, other, reader)
        core, made = view.by_name[leaf.core], view.by_name[tensor]
        user = next(c for c in self._inside(reader) if any(t.name == tensor for t in reads(c)))
        why = why_not_in_registers(core, view.tensors[tensor], made, user, self._users[tensor], self._kept)
        tried = [_entry(target.levels[0].name, 0.0, why, False)]
        if trial is not None:
            refusal = trial.reason or ("" if is_joined else "another way to join was predicted to be faster")
            tried.append(_entry(trial.level, trial.seconds, "" if is_joined else refusal, is_joined))
        else:
            tried.append(_entry(target.tile_level.name, 0.0, self._untried(kernel, other), is_joined))
        tried.append(_entry(target.main.name, trial.apart if trial is not None else 0.0, "", not is_joined))
        return {
            "tensor": tensor,
            "bytes": bytes_of(view.tensors[tensor]),
            "reader": reader.tensor,
            "reader_plan": other.name,
            "level": next(t["level"] for t in tried if t["chosen"]),
            "tried": tried,
        }

    def _trial(self, kernel: Tile, leaf: Leaf, other: Tile, reader: Leaf) -> Trial | None:
        """The trial that decided on a pair: its own, or that of the kernels the two had become part of by then."""
        readers = {n.tensor for n in other.leaves}
        near = [t for t in kernel.estimate.tried if t.reader in readers]
        own = [t for t in near if t.tensor == leaf.tensor]
        exact = [t for t in own if t.reader == reader.tensor]
        if other is not kernel:
            near = [t for t in near if t.tensor == kernel.leaves[-1].tensor]
        return next(iter((*exact[-1:], *own[-1:], *near[-1:])), None)

    def _untried(self, kernel: Tile, other: Tile) -> str:
        """Why there was no trial at the tile level."""
        if other is kernel:
            return ""
        schedule = self._view.plan.schedule
        if schedule != "connected":
            return f"schedule {schedule} joins no kernels"
        if self._view.scans.get(kernel.name) != self._view.scans.get(other.name):
            return "one of the two is part of a Scan's steps, the other is not"
        return "its reader was part of another kernel before this result was reached"

    def _inside(self, leaf: Leaf) -> list[Compute]:
        return [self._view.by_name[n] for n in dict.fromkeys((leaf.core, *leaf.epilogue, *leaf.composed))]


def _entry(level: str, seconds: float, reason: str, chosen: bool) -> dict[str, Any]:
    predicted = round(1e6 * seconds, 3) if seconds else None
    return {"level": level, "predicted_us": predicted, "reason": reason, "chosen": chosen}
