"""What a Sharded Program may not say is refused by the step; descriptions of clusters by the field."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.cpu_stages import model_of
from tilewright import ops
from tilewright.distributed.meshes import described, parse_mesh
from tilewright.errors import InternalError, OptionError
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.mesh import AxisPart, Mesh, Spread
from tilewright.ir.forms.sharded import Exchange, PipelineStage, Sharded, Step
from tilewright.ir.text.sharded import sharded_text
from tilewright.target import cluster, machine, stored_clusters
from tilewright.tile_graph.sharding.check import check_sharded
from tilewright.tile_graph.sharding.routes import sent_bytes
from tilewright.tile_graph.sharding.strategies import strategies
from tilewright.transform.clean.fold import fold_constants

MESH = Mesh((("tp", 2),))
WHOLE, COLUMNS, TERMS = Spread.whole(MESH), Spread((AxisPart(dim=1),)), Spread((AxisPart(operator="add"),))


def layers() -> Sharded:
    """h by columns, y as terms, all added up."""
    steps = [("MatMul", ["x", "w"], "h", {}), ("MatMul", ["h", "v"], "y", {})]
    constants = {"w": np.ones((8, 16), np.float32), "v": np.ones((16, 8), np.float32)}
    program = fold_constants(ops.lower(load(model_of(steps, {"x": (4, 8)}, {"y": (4, 8)}, constants), {})))
    h, y = program.computes
    ways = [next(w for w in strategies(c, MESH) if w.gives == gives) for c, gives in ((h, COLUMNS), (y, TERMS))]
    pieces = [w.piece(c, {t: needs[0] for t, needs in w.needs.items()}) for w, c in zip(ways, (h, y), strict=True)]
    total = Exchange("all-reduce", y.outputs[0], 0, TERMS, WHOLE)
    return Sharded(program, (PipelineStage(MESH, 0, (*pieces, total)),))


def changed(sharded: Sharded, place: int, change: Callable[[Step], Step | None]) -> Sharded:
    (stage,) = sharded.stages
    step = change(stage.steps[place])
    steps = (*stage.steps[:place], *([] if step is None else [step]), *stage.steps[place + 1 :])
    return replace(sharded, stages=(replace(stage, steps=steps),))


def test_text_and_grammar() -> None:
    sharded = layers()
    check_sharded(sharded)
    assert sharded_text(sharded) == (
        "stage 0: ranks 0 to 1, mesh tp=2\n"
        "  h: cut i1:16 over tp; gives 1 over tp; reads x whole; w 1 over tp\n"
        "  y: cut r0:16 over tp; gives sum over tp; reads h 1 over tp; v 0 over tp\n"
        "  all-reduce y over tp: sum over tp -> whole\n"
    )


@pytest.mark.parametrize("place, change, message", [
    (2, lambda s: None, "the output 'y' is whole nowhere"),
    (1, lambda s: None, "all-reduce of 'y' as .*, and it does not lie so"),
    (0, lambda s: replace(s, gives=WHOLE), "'h' does not lie as it is cut"),
    (1, lambda s: replace(s, reads={**s.reads, next(iter(s.reads)): WHOLE}), "'y' reads 'h' as .*, and it does not"),
    (0, lambda s: replace(s, reads=dict.fromkeys(s.reads, COLUMNS)), "'h' reads more of 'x' than rank"),
    (2, lambda s: replace(s, kind="all-gather"), "no all-gather of 'y' leads from"),
    (2, lambda s: replace(s, kind="whisper"), "there is no exchange 'whisper'"),
    (2, lambda s: replace(s, kind="send", axis=None), "'y' is sent, and no earlier stage has it whole"),
])  # fmt: skip
def test_what_cannot_be_is_refused(place: int, change: Callable[[Step], Step | None], message: str) -> None:
    with pytest.raises(InternalError, match=message):
        check_sharded(changed(layers(), place, change))


def test_nothing_is_computed_twice_or_never() -> None:
    sharded = layers()
    (stage,) = sharded.stages
    with pytest.raises(InternalError, match="'h' is computed twice"):
        check_sharded(replace(sharded, stages=(replace(stage, steps=(stage.steps[0], *stage.steps)),)))
    with pytest.raises(InternalError, match="nobody computes 'h'"):
        check_sharded(replace(sharded, stages=(replace(stage, steps=()),)))


def test_bytes_on_links() -> None:
    """Of 64 elements on four ranks: a ring passes three quarters of them, twice for a sum that all have."""
    (y,) = layers().program.outputs
    mesh = Mesh((("tp", 4),))
    whole, rows, terms = Spread.whole(mesh), Spread((AxisPart(dim=0),)), Spread((AxisPart(operator="add"),))
    wide = replace(y, shape=(8, 8))
    size = 8 * 8 * 4
    assert sent_bytes(Exchange("all-reduce", wide, 0, terms, whole), mesh) == 2 * size * 3 // 4
    assert sent_bytes(Exchange("reduce-scatter", wide, 0, terms, rows), mesh) == size * 3 // 4
    assert sent_bytes(Exchange("all-gather", wide, 0, rows, whole), mesh) == size * 3 // 4
    assert sent_bytes(Exchange("gather", wide, 0, rows, whole), mesh) == size * 3 // 4
    assert sent_bytes(Exchange("all-to-all", wide, 0, rows, Spread((AxisPart(dim=1),))), mesh) == size // 4 * 3 // 4
    halo = Spread((AxisPart(dim=0, before=1, after=1),))
    assert sent_bytes(Exchange("halo", wide, 0, rows, halo), mesh) == 2 * 8 * 4


def test_meshes_and_clusters_that_come_along() -> None:
    for name in stored_clusters():
        about = cluster(name, lambda device: machine("neoverse_n1" if device == "cpu" else device))
        assert about.links and all(link.size > 1 for link in about.links)
    mesh = parse_mesh("dp=2,tp=4")
    assert mesh.stages == ((("dp", 2), ("tp", 4)),) and mesh.ranks == 8
    (found,), _ = described(mesh, "h200_8", machine)
    assert [(link.name, link.size) for link in found.links] == [("dp", 2), ("tp", 4)]
    assert {link.bandwidth for link in found.links} == {4.5e11}


def test_stages_of_a_mesh_are_said_together_or_one_by_one() -> None:
    assert parse_mesh("pp=2,tp=4") == parse_mesh("tp=4/tp=4")
    unequal = parse_mesh("tp=2/dp=3")
    assert unequal.ranks == 5 and str(unequal) == "tp=2/dp=3" and str(parse_mesh("auto")) == "auto"
    stages, along = described(unequal, "h200_8", machine)
    assert [stage.links[0].size for stage in stages] == [2, 3] and (along.name, along.size) == ("pp", 2)
    with pytest.raises(OptionError, match="says its stages twice"):
        parse_mesh("pp=2/tp=2")


@pytest.mark.parametrize("text", ["", "tp", "tp=0", "tp=two", "=2", "tp=2;dp=2"])
def test_a_mesh_that_is_none(text: str) -> None:
    with pytest.raises(OptionError, match="it is names and sizes of axes, as in 'tp=2' or 'dp=2,tp=4'"):
        parse_mesh(text)


@pytest.mark.parametrize("change, message", [
    ({"device": 3}, "the field 'device' must be text, not 3"),
    ({"links": [{"name": "tp", "size": 2, "bandwidth": 1e9}]}, r"the field 'links\[0\].latency' is missing"),
    ({"links": [{"name": "a", "size": 2, "bandwidth": 0, "latency": 0}]}, r"'links\[0\].bandwidth' must be a number"),
    ({"link": []}, "there is no field 'link', did you mean 'links'"),
])  # fmt: skip
def test_a_description_that_is_none(tmp_path: Path, change: dict[str, object], message: str) -> None:
    host = {"name": "host", "capacity": 1 << 30, "transaction": 64, "bandwidth": 1e10}
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"device": "h200", "host": host, "links": []} | change))
    with pytest.raises(OptionError, match=message):
        cluster(str(path))
