"""A directory with a model in parts, read back: it runs these parts as they are; a part that a call needs and the
directory has not is compiled then."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.dynamic.borders import Border
from tilewright.dynamic.conforming import conforms, record
from tilewright.dynamic.encoding import RecordDecoder
from tilewright.dynamic.model import Compiled
from tilewright.dynamic.parts import tools_for
from tilewright.dynamic.saved_parts import DATA, FORMAT, KIND, PARTS, PLAN
from tilewright.dynamic.staged_model import StagedModel, Tools
from tilewright.dynamic.stages import BODIES, Following, ModelStage
from tilewright.errors import CutError, ModelError, OutsideError, RegionError, UndecidedError
from tilewright.ir.forms.graph import Graph
from tilewright.options import Options
from tilewright.packages.directory import check_files, read_manifest
from tilewright.packages.manifest import file_sums, unsealed
from tilewright.version import VERSION

if TYPE_CHECKING:
    from tilewright.calls.arguments import Array

_FOUND = tuple[tuple[tuple[Any, tuple[Any, ...]], ...], dict[Any, tuple[int, ...]], dict[Any, set[int]]]
_PORTS = tuple[tuple[Border, ...], tuple[Border, ...]]
_CUTS: dict[str, type[CutError]] = {kind.__name__: kind for kind in (UndecidedError, RegionError, OutsideError)}


def load(
    folder: Path, load_part: Callable[[Path], Compiled], compile_graph: Callable[[Graph, Options], Compiled],
    threads: int | None, *, trust: bool = False,
) -> StagedModel:  # fmt: skip
    """The model of a directory, after a look at every file; nothing is compiled and nothing unpickled."""
    row = unsealed(read_manifest(folder, trust=trust), f"'{folder}'", VERSION, KIND, FORMAT)
    damaged = ModelError(f"'{folder}': its {PLAN} does not fit this version; save the model again")
    try:
        check_files(folder, file_sums(row["files"]), trust=trust)
        parts = [load_part(folder / PARTS / str(number)) for number in range(int(row["parts"]))]
        chosen = Options.from_environment(**{**row["options"], **({} if threads is None else {"threads": threads})})
        tools = tools_for(chosen, lambda graph: compile_graph(graph, chosen))
        size = (folder / DATA).stat().st_size
        data = np.memmap(folder / DATA, np.uint8, "r") if size else np.zeros(0, np.uint8)
        plan = json.loads((folder / PLAN).read_text(encoding="utf-8"))
        return _Reader(RecordDecoder(data), parts, tools).model(plan)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise damaged from error


def _check_order(model: StagedModel) -> None:
    """Nodes read what is there, inputs, constants and results of nodes before them, and make what is not."""
    known = {"", *model.graph.constants, *model.graph.inputs, *(port.name for port in model.inputs)}
    for node in model.graph.nodes:
        if not known.issuperset(node.inputs):
            raise ValueError(f"node {node.name} reads what is not computed before it")
        made = [name for name in node.outputs if name]
        if len(set(made)) < len(made) or not known.isdisjoint(made):
            raise ValueError(f"node {node.name} makes what is there already")
        known.update(made)
    if not known.issuperset(model.graph.outputs):
        raise ValueError("an output is not computed")


def _check_stages(table: Following, graph: Graph) -> None:
    """Parts are of the graph: they end at its nodes, ask for its values, take and give as much as their code does."""
    names = {name for node in graph.nodes for name in (*node.inputs, *node.outputs)} | {"", *graph.constants}
    for stage in table.kept.values():
        ends = () if stage.cut is None else graph.nodes[stage.place : stage.place + 1]
        if stage.place < 0 or stage.start < 0 or (stage.cut is not None and not ends):
            raise ValueError("a part ends behind the graph")
        if stage.bodies and len(stage.bodies) != len(BODIES.get(ends[0].op, ()) if ends else ()):
            raise ValueError("bodies of another node")
        if isinstance(stage.cut, UndecidedError) and stage.cut.itself not in names:
            raise ValueError("a part asks for what there is not")
        inputs, outputs = ((), ()) if stage.model is None else (stage.model.inputs, stage.model.outputs)
        if list(stage.takes.values()) != [tuple(port.shape) for port in inputs]:
            raise ValueError("a part that takes something else")
        ranks = {name: len(port.shape) for name, port in zip(stage.gives, outputs, strict=True)}
        if any(len(stage.forms[name]) != rank for name, rank in ranks.items() if name in stage.forms):
            raise ValueError("extents of another value")
        _check_stages(stage.following, graph)


def is_in_parts(manifest: str) -> bool:
    """Whether a manifest is one of these; what is wrong with it is told by whoever reads it."""
    return f'"{KIND}"' in manifest


class _Reader:
    def __init__(self, decoder: RecordDecoder, parts: list[Compiled], tools: Tools) -> None:
        self._decoder = decoder
        self._parts = parts
        self._tools = tools

    def model(self, row: Mapping[str, Any]) -> StagedModel:
        value = self._decoder.value
        first, name, graph = self._table(row["first"]), row["name"], value(row["graph"])
        inputs, outputs = value(row["inputs"]), value(row["outputs"])
        if not isinstance(name, str) or not isinstance(graph, Graph) or not conforms((inputs, outputs), _PORTS):
            raise ValueError("no model in parts")
        model = StagedModel(name, graph, inputs, outputs, self._tools, first)
        _check_order(model)
        _check_stages(first, graph)
        return model

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

    def _stage(self, row: Mapping[str, Any]) -> ModelStage:
        value = self._decoder.value
        told: Mapping[str, Array | list[Any] | None] = value(row["told"])
        return record(
            ModelStage,
            row["start"],
            None if row["part"] is None else self._parts[row["part"]],
            value(row["takes"]),
            value(row["gives"]),
            value(row["fixed"]),
            told,
            None if row["cut"] is None else _cut(row["cut"]),
            row["place"],
            value(row["decided"]),
            tuple(self.model(body) for body in row["bodies"]),
            value(row["slots"]),
            value(row["forms"]),
            self._table(row["following"]),
        )


def _cut(row: Mapping[str, Any]) -> CutError:
    kind = _CUTS[row["kind"]]
    if not isinstance(row["text"], str):
        raise ValueError("no text of a cut")
    if kind is not UndecidedError:
        return kind(row["text"])
    number, most, itself = row["number"], row["most"], row["itself"]
    if not conforms((number, most, itself), tuple[int, int | None, str]):
        raise ValueError("no question of a cut")
    cut = UndecidedError(row["text"], number=number, most=most)
    cut.itself = itself
    return cut
