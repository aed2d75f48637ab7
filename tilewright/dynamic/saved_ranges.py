"""A model for ranges of sizes as a directory: its compiled forms, and by which sizes each is found."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tilewright.dynamic.encoding import Encoder
from tilewright.dynamic.room_model import RoomModel
from tilewright.dynamic.spans import Span
from tilewright.dynamic.variants import OpenPort
from tilewright.ir.forms.blocks import Blocks
from tilewright.packages.directory import MANIFEST, sums, write_directory
from tilewright.packages.manifest import head, sealed
from tilewright.packages.shared import share_weights
from tilewright.version import VERSION

KIND = "tilewright model for ranges of sizes"
FORMAT = 2
FOLDERS = "variants"
TABLE, DATA = "table.json", "table.data"


class RangedForm(Protocol):
    """What is written of a model for ranges."""

    @property
    def name(self) -> str: ...
    @property
    def inputs(self) -> Sequence[OpenPort]: ...
    @property
    def outputs(self) -> Sequence[OpenPort]: ...
    @property
    def spans(self) -> Sequence[Span]: ...
    @property
    def places(self) -> Mapping[str, Mapping[int, int]]: ...
    @property
    def blocks(self) -> Blocks | None: ...
    @property
    def kept(self) -> Sequence[Any]: ...


def save(model: RangedForm, folder: Path) -> None:
    """Write a model to a directory, whole or not at all. An earlier saved model there gives way."""
    write_directory(folder, lambda place: _fill(place, model))


def _fill(place: Path, model: RangedForm) -> None:
    (place / FOLDERS).mkdir()
    with (place / DATA).open("wb") as file:
        value = Encoder(file).value
        kept = []
        for number, found in enumerate(model.kept):
            found.model.save(place / FOLDERS / str(number))
            kept.append([value(found.variant.rooms), found.variant.compile_seconds, value(_ports(found.model))])
        table = {
            "name": model.name,
            "inputs": [value((p.name, p.dtype, p.shape)) for p in model.inputs],
            "outputs": [value((p.name, p.dtype, p.shape)) for p in model.outputs],
            "spans": [value((s.name, s.low, s.high, s.step)) for s in model.spans],
            "places": value({name: dict(axes) for name, axes in model.places.items()}),
            "blocks": value(_cut(model.blocks)),
            "kept": kept,
        }
    (place / TABLE).write_text(json.dumps(table), encoding="utf-8")
    share_weights(place, sorted((place / FOLDERS).iterdir()))
    body = {
        **head(KIND, FORMAT, VERSION, model.inputs, model.outputs),
        **({} if model.blocks is None else {"blocks": list(model.blocks.sizes)}),
        "variants": [str(found.variant) for found in model.kept],
        # a variant's own manifest has the sums of its files
        "files": {n: s for n, s in sums(place).items() if n in (TABLE, DATA) or _is_manifest(n)},
    }
    (place / MANIFEST).write_text(sealed(body), encoding="utf-8")


def _ports(model: Any) -> Any:
    """How arrays get their room in a compiled form; None where it is for one size."""
    if not isinstance(model, RoomModel):
        return None
    return tuple(tuple((p.name, p.dtype, p.forms) for p in side) for side in (model.takes, model.gives))


def _cut(blocks: Blocks | None) -> Any:
    return None if blocks is None else (blocks.sizes, dict(blocks.inputs), dict(blocks.outputs))


def _is_manifest(name: str) -> bool:
    return name.endswith(f"/{MANIFEST}") and name.count("/") == 2
