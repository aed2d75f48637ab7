"""A directory with a model of open shapes, read back. It takes these shapes and no others: the model file, of which
others would be compiled, is not in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from tilewright.dynamic.conforming import record
from tilewright.dynamic.encoding import RecordDecoder
from tilewright.dynamic.loaded_variants import loaded
from tilewright.dynamic.model import Compiled
from tilewright.dynamic.open_model import OpenModel
from tilewright.dynamic.saved_shapes import DATA, FOLDERS, FORMAT, KIND, TABLE
from tilewright.dynamic.variants import KeptVariant, OpenPort, Shapes, Values, Variant
from tilewright.errors import InputError


def load(folder: Path, load_variant: Callable[[Path], Compiled], *, trust: bool = False) -> OpenModel:
    """The model of a directory."""

    def make(table: Any, decoder: RecordDecoder) -> OpenModel:
        return _model(folder, table, decoder, load_variant)

    return loaded(folder, (KIND, FORMAT), (TABLE, DATA), make, trust=trust)


def is_for_shapes(manifest: str) -> bool:
    """Whether a manifest is one of these; what is wrong with it is told by whoever reads it."""
    return f'"{KIND}"' in manifest


def _model(folder: Path, table: Any, decoder: RecordDecoder, load_variant: Callable[[Path], Compiled]) -> OpenModel:
    value = decoder.value
    kept: dict[Any, KeptVariant] = {}
    for number, (key, shapes, values, seconds) in enumerate(table["kept"]):
        made = load_variant(folder / FOLDERS / str(number))
        kept[value(key)] = KeptVariant(record(Variant, value(shapes), value(values), seconds), made)
    inputs, outputs = ([record(OpenPort, *value(row)) for row in table[side]] for side in ("inputs", "outputs"))
    known = "; ".join(str(found.variant) for found in kept.values())
    refused = InputError(f"'{folder}' has this model for {known}; compile the model file for other inputs")

    def build(shapes: Shapes, values: Values) -> NoReturn:
        raise refused

    return OpenModel(table["name"], inputs, outputs, build, len(kept), refused, kept, tuple(table["deciding"]))
