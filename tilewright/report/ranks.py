"""What is told of a model on several ranks: stages, how each group of computes is cut, what passes over which link."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from tilewright.ir.forms.compute import Reduce
from tilewright.ir.forms.mesh import Mesh
from tilewright.ir.forms.sharded import Exchange, PipelineStage, Sharded, ShardedCompute
from tilewright.ir.text.sharded import cuts_text, spread_text
from tilewright.tile_graph.sharding.routes import sent_bytes
from tilewright.transform.spmd import rank_program

_BYTES = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def ranks_text(sharded: Sharded) -> str:
    """Stages, shards, and bytes on links."""
    parts = f", a batch in {sharded.parts} parts" if sharded.parts > 1 else ""
    lines = [f"{sharded.ranks} ranks, {len(sharded.stages)} {'stage' if len(sharded.stages) == 1 else 'stages'}{parts}"]
    if sharded.seconds:
        lines.append(f"predicted: {1e3 * sharded.seconds:.3g} ms a run, by descriptions of the machine and its links")
    if len(sharded.stages) > 1:
        each = ", ".join(f"{1e3 * stage.seconds:.3g}" for stage in sharded.stages)
        lines.append(f"stages: {each} ms{' for a part' if sharded.parts > 1 else ''}")
    lines += sharded.remarks
    whole = sum(array.nbytes for array in sharded.program.constants.values())
    weights = [rank_program(sharded, rank).weights for rank in range(sharded.ranks)]
    for number, stage in enumerate(sharded.stages):
        lines += ["", f"stage {number}: ranks {_range(stage)}, mesh {stage.mesh}"]
        held = max(weights[rank] for rank in stage.ranks)
        share = f", {held / whole:.1%} of all" if whole else ""
        several = any(len(sharded.stages_of(rank)) > 1 for rank in stage.ranks)
        lines.append(f"  weights on a rank{' of all its stages' if several else ''}: at most {bytes_text(held)}{share}")
        lines += [f"  {line}" for line in _links(stage)]
        lines.append("")
        lines += [f"  {line}" for line in _steps(stage)]
    return "\n".join(lines) + "\n"


def _links(stage: PipelineStage) -> Iterator[str]:
    """By mesh axis, what a rank sends in one run."""
    for axis, (name, _) in enumerate(stage.mesh.axes):
        steps = [s for s in stage.steps if isinstance(s, Exchange) and s.axis == axis]
        kinds = sorted({s.kind for s in steps})
        counts = ", ".join(f"{sum(s.kind == kind for s in steps)} {kind}" for kind in kinds) or "nothing"
        sent = sum(sent_bytes(s, stage.mesh) for s in steps)
        yield f"over {name}: {counts}; a rank sends at most {bytes_text(sent)}"
    taken = [s for s in stage.steps if isinstance(s, Exchange) and s.axis is None]
    if taken:
        yield f"from stages before: {', '.join(s.tensor.name for s in taken)}"


def _steps(stage: PipelineStage) -> Iterator[str]:
    """Exchanges one by one, and between them computes that are cut alike as one line each."""
    for is_exchange, steps in groupby(stage.steps, lambda s: isinstance(s, Exchange)):
        if is_exchange:
            yield from (_exchange(s, stage.mesh) for s in steps if isinstance(s, Exchange))
        else:
            yield from _pieces([s for s in steps if isinstance(s, ShardedCompute)], stage.mesh)


def _pieces(pieces: Sequence[ShardedCompute], mesh: Mesh) -> Iterator[str]:
    for gives, group in groupby(pieces, lambda p: spread_text(p.gives, mesh)):
        found = list(group)
        sums = [p for p in found if isinstance(p.compute, Reduce)]
        named = ", ".join(f"{p.compute.outputs[0].name} ({cuts_text(p.cuts, mesh)})" for p in sums[:4])
        more = f" and {len(sums) - 4} more" if len(sums) > 4 else ""
        what = f": {named}{more}" if named else ""
        yield f"{len(found)} {'compute' if len(found) == 1 else 'computes'}, results {gives}{what}"


def _exchange(step: Exchange, mesh: Mesh) -> str:
    if step.axis is None:
        return f"{step.kind} of {step.tensor.name}"
    sent = bytes_text(sent_bytes(step, mesh))
    change = f"{spread_text(step.before, mesh)} -> {spread_text(step.after, mesh)}"
    return f"-- {step.kind} of {step.tensor.name}: {change}; {sent} a rank"


def bytes_text(size: int) -> str:
    for name, unit in _BYTES:
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} bytes"


def _range(stage: PipelineStage) -> str:
    return f"{stage.ranks.start}" if stage.mesh.ranks == 1 else f"{stage.ranks.start} to {stage.ranks.stop - 1}"
