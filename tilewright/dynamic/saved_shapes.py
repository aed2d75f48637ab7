"""A model with open shapes as a directory: what is compiled for each set of shapes, and what it is found by."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tilewright.dynamic.encoding import Encoder
from tilewright.dynamic.variants import KeptVariant, OpenPort, Variant
from tilewright.packages.directory import MANIFEST, sums, write_directory
from tilewright.packages.manifest import head, sealed
from tilewright.packages.shared import share_weights
from tilewright.version import VERSION

KIND = "tilewright model for several shapes"
FORMAT = 1
FOLDERS = "variants"
TABLE, DATA = "table.json", "table.data"


class Open(Protocol):
    """What is written of a model with open shapes."""

    @property
    def name(self) -> str: ...
    @property
    def kept(self) -> Mapping[Any, KeptVariant]: ...
    @property
    def deciding(self) -> Sequence[str]: ...
    @property
    def inputs(self) -> Sequence[OpenPort]: ...
    @property
    def outputs(self) -> Sequence[OpenPort]: ...
    @property
    def variants(self) -> Sequence[Variant]: ...


def save(model: Open, folder: Path) -> None:
    """Write what is compiled to a directory, whole or not at all. An earlier saved model there gives way."""
    write_directory(folder, lambda place: _fill(place, model))


def _fill(place: Path, model: Open) -> None:
    (place / FOLDERS).mkdir()
    with (place / DATA).open("wb") as file:
        value = Encoder(file).value
        kept = []
        for number, (key, found) in enumerate(model.kept.items()):
            found.model.save(place / FOLDERS / str(number))
            about = found.variant
            kept.append([value(key), value(about.shapes), value(about.values), about.compile_seconds])
        table = {
            "name": model.name,
            "inputs": [value((p.name, p.dtype, p.shape)) for p in model.inputs],
            "outputs": [value((p.name, p.dtype, p.shape)) for p in model.outputs],
            "deciding": list(model.deciding),
            "kept": kept,
        }
    (place / TABLE).write_text(json.dumps(table), encoding="utf-8")
    share_weights(place, sorted((place / FOLDERS).iterdir()))
    body = {
        **head(KIND, FORMAT, VERSION, model.inputs, model.outputs),
        "variants": [str(variant) for variant in model.variants],
        # a variant's own manifest has the sums of its files
        "files": {n: s for n, s in sums(place).items() if n in (TABLE, DATA) or _is_manifest(n)},
    }
    (place / MANIFEST).write_text(sealed(body), encoding="utf-8")


def _is_manifest(name: str) -> bool:
    return name.endswith(f"/{MANIFEST}") and name.count("/") == 2
