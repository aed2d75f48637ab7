"""A model on several ranks as directories: one a rank, in it its segments, each an ordinary saved model.

    DIR/manifest.json            of how many ranks
    DIR/rank_1/manifest.json     the steps of rank 1, and a digest by which all ranks are of one model
    DIR/rank_1/segment_0/        as any saved model

Every rank writes and reads its own, wherever it runs; the manifest above them is written by each, and the same.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.distributed.about import About, CompiledRank, type_name
from tilewright.errors import ToolError
from tilewright.options import Options
from tilewright.packages.directory import MANIFEST, check_free, sums, write_directory
from tilewright.packages.files import save as save_segment
from tilewright.packages.inspection import EXPLANATION
from tilewright.packages.manifest import ON_RANKS, head, sealed
from tilewright.runtime.ranks import Ranks
from tilewright.transform.spmd import Transfer
from tilewright.version import VERSION

RANK = "tilewright model of one rank"
FORMAT = 2

Slices = tuple[slice, ...]


def save(about: About, steps: Sequence[CompiledRank | Transfer], ranks: Ranks, folder: Path, options: Options) -> None:
    """Write what this rank has; the others are waited for at both ends."""
    check_free(folder.resolve())
    ranks.wait("saving")
    write_directory(folder / f"rank_{ranks.rank}", lambda place: _fill(place, about, steps, ranks, options))
    _write_above(folder, about, ranks.size)
    ranks.wait("saving")


def _write_above(folder: Path, about: About, size: int) -> None:
    ports = (about.inputs, about.outputs)
    text = sealed({**head(ON_RANKS, FORMAT, VERSION, *([e.port for e in side] for side in ports)), "ranks": size,
                   "files": {}})  # fmt: skip
    temporary = folder / f".{MANIFEST}-{uuid.uuid4().hex}"
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, folder / MANIFEST)
    except OSError as error:
        raise ToolError(f"cannot write {folder}: {error.strerror}") from error


def _fill(place: Path, about: About, steps: Sequence[CompiledRank | Transfer], ranks: Ranks, options: Options) -> None:
    rows: list[dict[str, Any]] = []
    for number, step in enumerate(steps):
        if isinstance(step, Transfer):
            rows.append({"transfer": _transfer_row(step)})
            continue
        save_segment(step.artifact, place / f"segment_{number}", options)
        gives = [[name, list(shape), type_name(dtype)] for name, shape, dtype in step.gives]
        rows.append({"segment": f"segment_{number}", "takes": step.takes, "gives": gives})
    for number, array in enumerate(about.fixed.values()):
        np.save(place / f"fixed_{number}.npy", array, allow_pickle=False)
    (place / EXPLANATION).write_text(about.explanation, encoding="utf-8")
    # what is in a segment's directory its own manifest has the sums of
    files = {name: text for name, text in sums(place).items() if "/" not in name or name.endswith(f"/{MANIFEST}")}
    body = {
        **head(RANK, FORMAT, VERSION, [e.port for e in about.inputs], [e.port for e in about.outputs]),
        "rank": ranks.rank, "ranks": ranks.size, "parts": about.parts, "weights": about.weights, "digest": about.digest,
        "takes": [each.to_row() for each in about.inputs], "gives": [each.to_row() for each in about.outputs],
        "fixed": list(about.fixed), "steps": rows, "when": about.when, "files": files,
    }  # fmt: skip
    (place / MANIFEST).write_text(sealed(body), encoding="utf-8")


def _transfer_row(step: Transfer) -> dict[str, Any]:
    return {
        "kind": step.kind, "source": step.source, "target": step.target, "shape": list(step.shape),
        "dtype": type_name(step.dtype), "operator": step.operator,
        "sends": [[peer, _bounds(place)] for peer, place in step.sends],
        "takes": [[peer, _bounds(place)] for peer, place in step.takes],
        "own": None if step.own is None else _bounds(step.own), "peers": list(step.peers), "axis": step.axis,
    }  # fmt: skip


def _bounds(place: Slices) -> list[list[int]]:
    return [[each.start, each.stop] for each in place]
