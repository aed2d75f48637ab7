"""A model with open shapes as a directory: what is compiled for each set of shapes, and what it is found by.

Loaded, it takes these shapes and no others: the model file, of which others would be compiled, is not in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from tilewright.dynamic.conforming import record
from tilewright.dynamic.encoding import Decoder, Encoder
from tilewright.dynamic.model import Compiled
from tilewright.dynamic.open_model import Kept, OpenModel, OpenPort, Shapes, Values, Variant
from tilewright.errors import InputError, ModelError
from tilewright.packages.directory import MANIFEST, check_files, read_manifest, sums, write_directory
from tilewright.packages.manifest import file_sums, head, sealed, unsealed
from tilewright.version import VERSION

KIND = "tilewright model for several shapes"
FORMAT = 1
_FOLDERS = "variants"
_TABLE, _DATA = "table.json", "table.data"


def save(model: OpenModel, folder: Path) -> None:
    """Write what is compiled to a directory, whole or not at all. An earlier saved model there gives way."""
    write_directory(folder, lambda place: _fill(place, model))


def load(folder: Path, load_variant: Callable[[Path], Compiled], *, trust: bool = False) -> OpenModel:
    """The model of a directory, after a look at every file; nothing is compiled and nothing unpickled."""
    row = unsealed(read_manifest(folder, trust=trust), f"'{folder}'", VERSION, KIND, FORMAT)
    try:
        check_files(folder, file_sums(row["files"]), trust=trust)
        data = np.fromfile(folder / _DATA, np.uint8)
        table = json.loads((folder / _TABLE).read_text(encoding="utf-8"))
        return _model(folder, table, Decoder(data), load_variant)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ModelError(f"'{folder}': its {_TABLE} does not fit this version; save the model again") from error


def is_for_shapes(manifest: str) -> bool:
    """Whether a manifest is one of these; what is wrong with it is told by whoever reads it."""
    return f'"{KIND}"' in manifest


def _fill(place: Path, model: OpenModel) -> None:
    (place / _FOLDERS).mkdir()
    with (place / _DATA).open("wb") as file:
        value = Encoder(file).value
        kept = []
        for number, (key, found) in enumerate(model.kept.items()):
            found.model.save(place / _FOLDERS / str(number))
            about = found.variant
            kept.append([value(key), value(about.shapes), value(about.values), about.compile_seconds])
        table = {
            "name": model.name,
            "inputs": [value((p.name, p.dtype, p.shape)) for p in model.inputs],
            "outputs": [value((p.name, p.dtype, p.shape)) for p in model.outputs],
            "deciding": list(model.deciding),
            "kept": kept,
        }
    (place / _TABLE).write_text(json.dumps(table), encoding="utf-8")
    body = {
        **head(KIND, FORMAT, VERSION, model.inputs, model.outputs),
        "variants": [str(variant) for variant in model.variants],
        # a variant's own manifest has the sums of its files
        "files": {n: s for n, s in sums(place).items() if n in (_TABLE, _DATA) or _is_manifest(n)},
    }
    (place / MANIFEST).write_text(sealed(body), encoding="utf-8")


def _is_manifest(name: str) -> bool:
    return name.endswith(f"/{MANIFEST}") and name.count("/") == 2


def _model(folder: Path, table: Any, decoder: Decoder, load_variant: Callable[[Path], Compiled]) -> OpenModel:
    value = decoder.value
    kept: dict[Any, Kept] = {}
    for number, (key, shapes, values, seconds) in enumerate(table["kept"]):
        made = load_variant(folder / _FOLDERS / str(number))
        kept[value(key)] = Kept(record(Variant, value(shapes), value(values), seconds), made)
    inputs, outputs = ([record(OpenPort, *value(row)) for row in table[side]] for side in ("inputs", "outputs"))
    known = "; ".join(str(found.variant) for found in kept.values())
    refused = InputError(f"'{folder}' has this model for {known}; compile the model file for other inputs")

    def build(shapes: Shapes, values: Values) -> NoReturn:
        raise refused

    return OpenModel(table["name"], inputs, outputs, build, len(kept), refused, kept, tuple(table["deciding"]))
