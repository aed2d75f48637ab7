"""A directory with a model for ranges of sizes, read back: nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tilewright.dynamic.conforming import record
from tilewright.dynamic.encoding import RecordDecoder
from tilewright.dynamic.loaded_variants import loaded
from tilewright.dynamic.model import Compiled
from tilewright.dynamic.ranged_model import Ranged, RangedModel, RangeVariant
from tilewright.dynamic.room_model import RoomModel, RoomPort
from tilewright.dynamic.saved_ranges import DATA, FOLDERS, FORMAT, KIND, TABLE
from tilewright.dynamic.spans import Span
from tilewright.dynamic.variants import OpenPort
from tilewright.ir.forms.blocks import Blocks


def load(folder: Path, load_variant: Callable[[Path], Compiled], *, trust: bool = False) -> RangedModel:
    """The model of a directory."""

    def make(table: Any, decoder: RecordDecoder) -> RangedModel:
        return _model(folder, table, decoder, load_variant)

    return loaded(folder, (KIND, FORMAT), (TABLE, DATA), make, trust=trust)


def is_for_ranges(manifest: str) -> bool:
    """Whether a manifest is one of these; what is wrong with it is told by whoever reads it."""
    return f'"{KIND}"' in manifest


def _model(folder: Path, table: Any, decoder: RecordDecoder, load_variant: Callable[[Path], Compiled]) -> RangedModel:
    value = decoder.value
    spans = tuple(record(Span, *value(row)) for row in table["spans"])
    kept = []
    for number, (rooms, seconds, ports) in enumerate(table["kept"]):
        model = load_variant(folder / FOLDERS / str(number))
        variant = record(RangeVariant, spans, value(rooms), seconds)
        kept.append(Ranged(variant, _with_room(table["name"], variant, value(ports), model)))
    inputs, outputs = ([record(OpenPort, *value(row)) for row in table[side]] for side in ("inputs", "outputs"))
    cut = value(table["blocks"])
    blocks = None if cut is None else record(Blocks, *cut)
    return RangedModel(table["name"], inputs, outputs, spans, value(table["places"]), kept, blocks)


def _with_room(name: str, variant: RangeVariant, ports: Any, model: Compiled) -> Compiled:
    if ports is None:
        return model
    takes, gives = ([record(RoomPort, *row) for row in side] for side in ports)
    return RoomModel(name, variant.rooms, takes, gives, model)
