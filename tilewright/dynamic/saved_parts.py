"""A model in parts as a directory: its graph, the parts that are compiled, and which follows which for what was found.

Loaded, it runs these parts as they are; a part that a call needs and the directory has not is compiled then."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.dynamic.borders import Border
from tilewright.dynamic.conforming import conforms, record
from tilewright.dynamic.encoding import Decoder, Encoder
from tilewright.dynamic.model import Compiled
from tilewright.dynamic.parts import tools_for
from tilewright.dynamic.staged_model import StagedModel, Tools
from tilewright.dynamic.stages import Following, Stage
from tilewright.errors import CutError, ModelError, OutsideError, RegionError, UndecidedError
from tilewright.ir.forms.graph import Graph
from tilewright.options import Options
from tilewright.packages.directory import MANIFEST, check_files, read_manifest, sums, write_directory
from tilewright.packages.manifest import file_sums, head, sealed, unsealed
from tilewright.version import VERSION

if TYPE_CHECKING:
    from tilewright.calls.arguments import Array

KIND = "tilewright model in parts"
_FOUND = tuple[tuple[tuple[Any, tuple[Any, ...]], ...], dict[Any, tuple[int, ...]], dict[Any, set[int]]]
_PORTS = tuple[tuple[Border, ...], tuple[Border, ...]]
FORMAT = 1
PARTS = "parts"
_PLAN, _DATA = "plan.json", "plan.data"
# What decides how further parts are compiled.
_OPTIONS = ("target", "threads", "precision", "schedule", "merging", "convolution", "contraction", "denormals",
            "effort", "fallback", "tune", "variants")  # fmt: skip
_CUTS: dict[str, type[CutError]] = {kind.__name__: kind for kind in (UndecidedError, RegionError, OutsideError)}


def save(model: StagedModel, folder: Path, options: Options) -> None:
    """Write the model to a directory, whole or not at all. An earlier saved model there gives way."""
    write_directory(folder, lambda place: _fill(place, model, options))


def load(
    folder: Path, load_part: Callable[[Path], Compiled], compile_graph: Callable[[Graph, Options], Compiled],
    threads: int | None, *, trust: bool = False,
) -> StagedModel:  # fmt: skip
    """The model of a directory, after a look at every file; nothing is compiled and nothing unpickled."""
    row = unsealed(read_manifest(folder, trust=trust), f"'{folder}'", VERSION, KIND, FORMAT)
    damaged = ModelError(f"'{folder}': its {_PLAN} does not fit this version; save the model again")
    try:
        check_files(folder, file_sums(row["files"]), trust=trust)
        parts = [load_part(folder / PARTS / str(number)) for number in range(int(row["parts"]))]
        chosen = Options.from_environment(**{**row["options"], **({} if threads is None else {"threads": threads})})
        tools = tools_for(chosen, lambda graph: compile_graph(graph, chosen))
        size = (folder / _DATA).stat().st_size
        data = np.memmap(folder / _DATA, np.uint8, "r") if size else np.zeros(0, np.uint8)
        plan = json.loads((folder / _PLAN).read_text(encoding="utf-8"))
        model = _Reader(Decoder(data), parts, tools).model(plan)
        _check_order(model)
        return model
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise damaged from error


def _check_order(model: StagedModel) -> None:
    """Nodes read what is there: inputs, constants and results of nodes before them."""
    known = {"", *model.graph.constants, *model.graph.inputs, *(port.name for port in model.inputs)}
    for node in model.graph.nodes:
        if not known.issuperset(node.inputs):
            raise ValueError(f"node {node.name} reads what is not computed before it")
        known.update(node.outputs)


def is_in_parts(manifest: str) -> bool:
    """Whether a manifest is one of these; what is wrong with it is told by whoever reads it."""
    return f'"{KIND}"' in manifest


def _fill(place: Path, model: StagedModel, options: Options) -> None:
    (place / PARTS).mkdir()
    with (place / _DATA).open("wb") as file:
        writer = _Writer(Encoder(file), place / PARTS)
        plan = writer.model(model)
    (place / _PLAN).write_text(json.dumps(plan), encoding="utf-8")
    body = {
        **head(KIND, FORMAT, VERSION, model.inputs, model.outputs),
        "options": {name: getattr(options, name) for name in _OPTIONS},
        "parts": writer.parts,
        # a part's own manifest has the sums of its files
        "files": {n: s for n, s in sums(place).items() if n in (_PLAN, _DATA) or n.endswith(f"/{MANIFEST}")},
    }
    (place / MANIFEST).write_text(sealed(body), encoding="utf-8")


class _Writer:
    def __init__(self, encoder: Encoder, folder: Path) -> None:
        self._encoder = encoder
        self._folder = folder
        self.parts = 0

    def model(self, model: StagedModel) -> dict[str, Any]:
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

    def _stage(self, stage: Stage) -> dict[str, Any]:
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
            "body": None if stage.body is None else self.model(stage.body),
            "slots": value(stage.slots),
            "forms": value(stage.forms),
            "following": self._table(stage.following),
        }

    def _part(self, part: Compiled) -> int:
        part.save(self._folder / str(self.parts))
        self.parts += 1
        return self.parts - 1


class _Reader:
    def __init__(self, decoder: Decoder, parts: list[Compiled], tools: Tools) -> None:
        self._decoder = decoder
        self._parts = parts
        self._tools = tools

    def model(self, row: Mapping[str, Any]) -> StagedModel:
        value = self._decoder.value
        first, name, graph = self._table(row["first"]), row["name"], value(row["graph"])
        inputs, outputs = value(row["inputs"]), value(row["outputs"])
        if not isinstance(name, str) or not isinstance(graph, Graph) or not conforms((inputs, outputs), _PORTS):
            raise ValueError("no model in parts")
        return StagedModel(name, graph, inputs, outputs, self._tools, first)

    def _table(self, row: Mapping[str, Any]) -> Following:
        value = self._decoder.value
        table = Following()
        table.kept.update((value(key), self._stage(stage)) for key, stage in row["kept"])
        table.first.update(value(row["first"]))
        table.differ.update(value(row["differ"]))
        table.refused.update(value(row["refused"]))
        found = (tuple(table.kept), table.first, table.differ, tuple(len(s.slots) for s in table.kept.values()))
        if not conforms(found[:3], _FOUND) or [len(key[1]) for key in table.kept] != list(found[3]):
            raise ValueError("no table of parts")
        return table

    def _stage(self, row: Mapping[str, Any]) -> Stage:
        value = self._decoder.value
        told: Mapping[str, Array | list[Any] | None] = value(row["told"])
        return record(
            Stage,
            row["start"],
            None if row["part"] is None else self._parts[row["part"]],
            value(row["takes"]),
            value(row["gives"]),
            value(row["fixed"]),
            told,
            None if row["cut"] is None else _cut(row["cut"]),
            row["place"],
            value(row["decided"]),
            None if row["body"] is None else self.model(row["body"]),
            value(row["slots"]),
            value(row["forms"]),
            self._table(row["following"]),
        )


def _cut_row(cut: CutError) -> dict[str, Any]:
    row: dict[str, Any] = {"kind": type(cut).__name__, "text": str(cut)}
    if isinstance(cut, UndecidedError):
        row |= {"number": cut.number, "most": cut.most, "itself": cut.itself}
    return row


def _cut(row: Mapping[str, Any]) -> CutError:
    kind = _CUTS[row["kind"]]
    if not isinstance(row["text"], str):
        raise ValueError("no text of a cut")
    if kind is not UndecidedError:
        return kind(row["text"])
    cut = UndecidedError(row["text"], number=row["number"], most=row["most"])
    cut.itself = row["itself"]
    return cut
