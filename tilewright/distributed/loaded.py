"""A model on several ranks read back: every process starts the rank it has from that rank's own directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.distributed.about import About, CompiledRank, ModelPort
from tilewright.distributed.joining import joined
from tilewright.distributed.model import RankedModel
from tilewright.distributed.saved import FORMAT, RANK, Slices
from tilewright.errors import ModelError, OptionError
from tilewright.ir.forms import dtypes
from tilewright.options import Options
from tilewright.packages.directory import MANIFEST, check_files, read_manifest
from tilewright.packages.files import ShippedArtifact
from tilewright.packages.files import load as load_segment
from tilewright.packages.inspection import EXPLANATION
from tilewright.packages.manifest import ON_RANKS, file_sums, unsealed
from tilewright.runtime.ranks import Ranks
from tilewright.transform.spmd import Transfer, When
from tilewright.version import VERSION


def load(folder: Path, threads: int | None, options: Options, timeout: float, *, trust: bool = False) -> RankedModel:
    """The rank of this process, from its own directory; all ranks have to be of one model."""
    row = unsealed(read_manifest(folder, trust=trust), f"'{folder}'", VERSION, ON_RANKS, FORMAT)
    with joined(timeout) as ranks:
        return _loaded(folder, row, ranks, threads, options, trust)


def _loaded(
    folder: Path, row: Mapping[str, Any], ranks: Ranks, threads: int | None, options: Options, trust: bool
) -> RankedModel:
    if row.get("ranks") != ranks.size:
        raise OptionError(f"'{folder}' is for {row.get('ranks')} ranks, and {ranks.size} were started: "
                          f"torchrun --nproc-per-node {row.get('ranks')}")  # fmt: skip
    place = folder / f"rank_{ranks.rank}"
    own = unsealed(read_manifest(place, trust=trust), f"'{place}'", VERSION, RANK, FORMAT)
    ranks.same(bytes.fromhex(own["digest"]), "saved model")
    try:
        check_files(place, file_sums(own["files"]), trust=trust)
        about = _about(place, own)
        steps = [_step(place, each, lambda path: load_segment(path, threads, trust=trust)) for each in own["steps"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"'{place}': its {MANIFEST} does not fit this version; save the model again") from error
    ranks.wait("loading")
    return RankedModel(about, steps, ranks, options)


def _about(place: Path, row: Mapping[str, Any]) -> About:
    inputs, outputs = (tuple(ModelPort.from_row(each) for each in row[side]) for side in ("takes", "gives"))
    fixed = {name: np.load(place / f"fixed_{n}.npy", allow_pickle=False) for n, name in enumerate(row["fixed"])}
    told = (place / EXPLANATION).read_text(encoding="utf-8")
    when = tuple(When(*each) for each in row["when"])
    return About(inputs, outputs, row["parts"], row["weights"], row["digest"], told, when, fixed)


def _step(place: Path, row: Mapping[str, Any], load: Callable[[Path], ShippedArtifact]) -> CompiledRank | Transfer:
    if "transfer" in row:
        return _transfer(row["transfer"])
    gives = tuple((name, tuple(shape), dtypes.by_name(dtype).numpy) for name, shape, dtype in row["gives"])
    return CompiledRank(load(place / row["segment"]), tuple(row["takes"]), gives)


def _transfer(row: Mapping[str, Any]) -> Transfer:
    return Transfer(
        row["kind"], row["source"], row["target"], tuple(row["shape"]), dtypes.by_name(row["dtype"]).numpy,
        row["operator"], _places(row["sends"]), _places(row["takes"]),
        None if row["own"] is None else _slices(row["own"]), tuple(row["peers"]), row["axis"],
    )  # fmt: skip


def _places(rows: Sequence[Any]) -> tuple[tuple[int, Slices], ...]:
    return tuple((peer, _slices(place)) for peer, place in rows)


def _slices(bounds: Sequence[Sequence[int]]) -> Slices:
    return tuple(slice(first, last) for first, last in bounds)
