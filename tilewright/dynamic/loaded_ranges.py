"""A directory with a model for ranges of sizes, read back: nothing is compiled."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.dynamic.conforming import record
from tilewright.dynamic.encoding import Decoder
from tilewright.dynamic.model import Compiled
from tilewright.dynamic.ranged_model import Ranged, RangedModel, RangeVariant
from tilewright.dynamic.room_model import RoomModel, RoomPort
from tilewright.dynamic.saved_ranges import DATA, FOLDERS, FORMAT, KIND, TABLE
from tilewright.dynamic.spans import Span
from tilewright.dynamic.variants import OpenPort
from tilewright.errors import ModelError
from tilewright.packages.directory import check_files, read_manifest
from tilewright.packages.manifest import file_sums, unsealed
from tilewright.version import VERSION


def load(folder: Path, load_variant: Callable[[Path], Compiled], *, trust: bool = False) -> RangedModel:
    """The model of a directory, after a look at every file; nothing is compiled and nothing unpickled."""
    row = unsealed(read_manifest(folder, trust=trust), f"'{folder}'", VERSION, KIND, FORMAT)
    try:
        check_files(folder, file_sums(row["files"]), trust=trust)
        data = np.fromfile(folder / DATA, np.uint8)
        table = json.loads((folder / TABLE).read_text(encoding="utf-8"))
        return _model(folder, table, Decoder(data), load_variant)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ModelError(f"'{folder}': its {TABLE} does not fit this version; save the model again") from error


def is_for_ranges(manifest: str) -> bool:
    """Whether a manifest is one of these; what is wrong with it is told by whoever reads it."""
    return f'"{KIND}"' in manifest


def _model(folder: Path, table: Any, decoder: Decoder, load_variant: Callable[[Path], Compiled]) -> RangedModel:
    value = decoder.value
    spans = tuple(record(Span, *value(row)) for row in table["spans"])
    kept = []
    for number, (rooms, seconds, ports) in enumerate(table["kept"]):
        model = load_variant(folder / FOLDERS / str(number))
        variant = record(RangeVariant, spans, value(rooms), seconds)
        kept.append(Ranged(variant, _with_room(table["name"], variant, value(ports), model)))
    inputs, outputs = ([record(OpenPort, *value(row)) for row in table[side]] for side in ("inputs", "outputs"))
    return RangedModel(table["name"], inputs, outputs, spans, value(table["places"]), kept)


def _with_room(name: str, variant: RangeVariant, ports: Any, model: Compiled) -> Compiled:
    if ports is None:
        return model
    takes, gives = ([record(RoomPort, *row) for row in side] for side in ports)
    return RoomModel(name, variant.rooms, takes, gives, model)
