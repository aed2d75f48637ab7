"""A model in parts as a directory: its graph, its compiled parts, and which follows which for what was found."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from tilewright.dynamic.borders import Border
from tilewright.dynamic.encoding import Encoder
from tilewright.dynamic.model import Compiled
from tilewright.dynamic.stages import Following, ModelStage
from tilewright.errors import CutError, UndecidedError
from tilewright.ir.forms.graph import Graph
from tilewright.options import Options
from tilewright.packages.directory import MANIFEST, sums, write_directory
from tilewright.packages.manifest import head, sealed
from tilewright.packages.shared import share_weights
from tilewright.version import VERSION

KIND = "tilewright model in parts"
FORMAT = 3
PARTS = "parts"
PLAN, DATA = "plan.json", "plan.data"
# What decides how further parts are compiled.
_OPTIONS = ("target", "threads", "precision", "schedule", "merging", "convolution", "contraction", "denormals",
            "effort", "optimize", "fallback", "tune", "variants")  # fmt: skip


class InParts(Protocol):
    """What is written of a model in parts."""

    @property
    def name(self) -> str: ...
    @property
    def graph(self) -> Graph: ...
    @property
    def inputs(self) -> Sequence[Border]: ...
    @property
    def outputs(self) -> Sequence[Border]: ...
    def held(self) -> AbstractContextManager[Following]: ...


def save(model: InParts, folder: Path, options: Options) -> None:
    """Write the model to a directory, whole or not at all. An earlier saved model there gives way."""
    write_directory(folder, lambda place: _fill(place, model, options))


def _fill(place: Path, model: InParts, options: Options) -> None:
    (place / PARTS).mkdir()
    with (place / DATA).open("wb") as file:
        writer = _Writer(Encoder(file), place / PARTS)
        plan = writer.model(model)
    (place / PLAN).write_text(json.dumps(plan), encoding="utf-8")
    share_weights(place, sorted((place / PARTS).iterdir()))
    body = {
        **head(KIND, FORMAT, VERSION, model.inputs, model.outputs),
        "options": {name: getattr(options, name) for name in _OPTIONS},
        "parts": writer.parts,
        # a part's own manifest has the sums of its files
        "files": {n: s for n, s in sums(place).items() if n in (PLAN, DATA) or n.endswith(f"/{MANIFEST}")},
    }
    (place / MANIFEST).write_text(sealed(body), encoding="utf-8")


class _Writer:
    def __init__(self, encoder: Encoder, folder: Path) -> None:
        self._encoder = encoder
        self._folder = folder
        self.parts = 0

    def model(self, model: InParts) -> dict[str, Any]:
        value = self._encoder.value
        with model.held() as first:
            return {"name": model.name, "graph": value(model.graph), "inputs": value(model.inputs),
                    "outputs": value(model.outputs), "first": self._table(first)}  # fmt: skip

    def _table(self, table: Following) -> dict[str, Any]:
        value = self._encoder.value
        return {
            "kept": [[value(key), self._stage(stage)] for key, stage in table.kept.items()],
            "first": value(table.first),
            "differ": value(table.differ),
            "refused": value(table.refused),
        }

    def _stage(self, stage: ModelStage) -> dict[str, Any]:
        value = self._encoder.value
        return {
            "start": stage.start,
            "part": None if stage.model is None else self._part(stage.model),
            "takes": value(stage.takes),
            "gives": value(stage.gives),
            "fixed": value(stage.fixed),
            "told": value(stage.told),
            "cut": None if stage.cut is None else _cut_row(stage.cut),
            "place": stage.place,
            "decided": value(stage.decided),
            "bodies": [self.model(body) for body in stage.bodies],
            "slots": value(stage.slots),
            "forms": value(stage.forms),
            "following": self._table(stage.following),
        }

    def _part(self, part: Compiled) -> int:
        part.save(self._folder / str(self.parts))
        self.parts += 1
        return self.parts - 1


def _cut_row(cut: CutError) -> dict[str, Any]:
    row: dict[str, Any] = {"kind": type(cut).__name__, "text": str(cut)}
    if isinstance(cut, UndecidedError):
        row |= {"number": cut.number, "most": cut.most, "itself": cut.itself}
    return row
