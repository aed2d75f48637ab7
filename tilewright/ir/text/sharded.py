"""The text of a Sharded Program: stages with their meshes, pieces with what is cut, exchanges between them."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.ir.forms.expr import Axis
from tilewright.ir.forms.mesh import Mesh, Spread
from tilewright.ir.forms.sharded import Exchange, Sharded, ShardedCompute
from tilewright.ir.forms.tensor import Tensor


def sharded_text(sharded: Sharded) -> str:
    lines: list[str] = []
    for number, stage in enumerate(sharded.stages):
        lines.append(f"stage {number}: ranks {stage.ranks.start} to {stage.ranks.stop - 1}, mesh {stage.mesh}")
        for step in stage.steps:
            text = _exchange(step, stage.mesh) if isinstance(step, Exchange) else _piece(step, stage.mesh)
            lines.append(f"  {text}")
    return "\n".join(lines) + "\n"


def spread_text(spread: Spread, mesh: Mesh) -> str:
    """Only what is not whole, by mesh axis."""
    parts = zip(spread.parts, mesh.axes, strict=True)
    found = [f"{part} over {name}" for part, (name, _) in parts if not part.is_whole]
    return ", ".join(found) or "whole"


def cuts_text(cuts: Sequence[Axis | Tensor | None], mesh: Mesh) -> str:
    found = [f"{_cut(cut)} over {name}" for cut, (name, _) in zip(cuts, mesh.axes, strict=True) if cut is not None]
    return f"cut {', '.join(found)}" if found else "everywhere"


def _cut(cut: Axis | Tensor) -> str:
    return f"{cut.name}:{cut.extent}" if isinstance(cut, Axis) else f"rows of {cut.name}"


def _piece(piece: ShardedCompute, mesh: Mesh) -> str:
    names = ", ".join(t.name for t in piece.compute.outputs)
    read = "; ".join(f"{t.name} {spread_text(s, mesh)}" for t, s in piece.reads.items())
    return f"{names}: {cuts_text(piece.cuts, mesh)}; gives {spread_text(piece.gives, mesh)}; reads {read or 'nothing'}"


def _exchange(step: Exchange, mesh: Mesh) -> str:
    if step.axis is None:
        return f"{step.kind} {step.tensor.name}: from the stage that has it"
    name = mesh.axes[step.axis][0]
    change = f"{spread_text(step.before, mesh)} -> {spread_text(step.after, mesh)}"
    return f"{step.kind} {step.tensor.name} over {name}: {change}"
