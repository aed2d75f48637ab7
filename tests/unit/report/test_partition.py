"""The nested partition: an edge is connected at the nearest level at which its two ends are still in one part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

import pytest
from onnx import ModelProto

from tests.cpu_stages import model_of
from tests.gpu_stages import attention
from tests.unit.report.test_explain import recurrent
from tilewright.compiler.pipeline import Artifact, build
from tilewright.frontend.onnx.model import load
from tilewright.options import Options
from tilewright.report.explain import explain_text
from tilewright.report.explain_html import explain_html
from tilewright.report.facts import explain_json
from tilewright.report.partition import parts_of, parts_text
from tilewright.report.partition_svg import partition_svg
from tilewright.target import machine

MACHINES = ("emerald_rapids", "neoverse_n1", "h200")


def norms() -> ModelProto:
    nodes = [("Softmax", ["x"], "a", {"axis": 1}), ("Relu", ["a"], "b", {}), ("Softmax", ["b"], "y<>", {"axis": 0})]
    return model_of(nodes, {"x": (300, 40)}, {"y<>": (300, 40)})


MODELS = {"attention": lambda: attention(77, 40), "long": lambda: attention(300, 16), "norms": norms,
          "recurrent": recurrent}  # fmt: skip


def planned(name: str, target: str, schedule: str = "connected") -> Artifact:
    return build(load(MODELS[name](), {}), machine(target), Options(stop_after="plan", schedule=schedule))


def meeting(part: dict[str, Any], maker: str, reader: str) -> str | None:
    """The level of the innermost part that both nests are in."""
    if not {maker, reader} <= set(names(part)):
        return None
    inner = (meeting(p, maker, reader) for p in part["parts"] if isinstance(p, dict))
    return next((level for level in inner if level is not None), part["level"])


def names(part: dict[str, Any]) -> Iterator[str]:
    for p in part["parts"]:
        yield from (p,) if isinstance(p, str) else names(p)


@pytest.mark.sample(3)
@pytest.mark.parametrize("target", MACHINES)
@pytest.mark.parametrize("name", MODELS)
def test_edges_meet_where_the_partition_says(name: str, target: str) -> None:
    facts = explain_json(planned(name, target))
    registers = facts["target"]["levels"][0]["name"]
    edges = 0
    for kernel in facts["kernels"]:
        own = set(names(kernel["partition"]))
        for edge in kernel["meets"]:
            edges += 1
            if edge["maker"] == edge["reader"]:
                assert edge["level"] == registers, edge
            elif edge["maker"] in own:
                assert edge["level"] == meeting(kernel["partition"], edge["maker"], edge["reader"]), edge
    assert edges and sum(facts["totals"]["edges"].values()) >= edges


@pytest.mark.parametrize("target", MACHINES)
@pytest.mark.parametrize("name", MODELS)
def test_neighbours_are_told_the_same_level(name: str, target: str) -> None:
    kernels = explain_json(planned(name, target))["kernels"]
    met = {(e["tensor"], e["reader"]): e["level"] for k in kernels for e in k["meets"] if e["maker"] != e["reader"]}
    pairs = {(p["tensor"], p["reader"]): p["level"] for k in kernels for p in k["instances"][0]["neighbours"]}
    told = {key: level for key, level in pairs.items() if key in met}  # of equal kernels the first is looked at alone
    assert told and told == {key: met[key] for key in told}


def test_without_joining_every_nest_is_a_part_of_its_own() -> None:
    facts = explain_json(planned("attention", "neoverse_n1", "none"))
    assert all(len(kernel["partition"]["parts"]) == 1 for kernel in facts["kernels"])
    main = facts["target"]["main_level"]
    assert facts["totals"]["edges"].keys() <= {main, "L2", "L3"} and "edges      connected" in explain_text(
        planned("attention", "neoverse_n1", "none"), 100
    )


def test_tiles_that_only_hand_out_are_no_parts() -> None:
    def leaf(name: str) -> dict[str, Any]:
        return {"kind": "leaf", "tensor": name, "part": "whole"}

    def tile(level: str, body: list[Any], held: tuple[str, ...] = ()) -> dict[str, Any]:
        holds = [{"tensor": name, "fill": None} for name in held]
        return {"kind": "tile", "level": level, "holds": holds, "body": body}

    inner = tile("L1", [leaf("b"), leaf("c")], ("b",))
    tree = tile("L2", [leaf("a"), tile("L2", [inner]), tile("L1", [leaf("d")])], ("a", "c"))
    assert parts_text(parts_of(tree)) == "L2[a L1[b c] d]"


@pytest.mark.parametrize("target", MACHINES)
def test_picture_has_a_box_for_every_nest_inside_those_of_its_parts(target: str) -> None:
    facts = explain_json(planned("norms", target))
    drawn = ElementTree.fromstring(partition_svg(facts))
    space = "{http://www.w3.org/2000/svg}"
    boxes = {r.findtext(f"{space}title"): [float(r.get(n, "nan")) for n in ("x", "y", "width", "height")]
             for r in drawn.iter(f"{space}rect") if r.find(f"{space}title") is not None}  # fmt: skip
    for kernel in facts["kernels"]:
        (around,) = (box for title, box in boxes.items() if title and title.startswith(f"{kernel['name']}:"))
        for nest in names(kernel["partition"]):
            inside = boxes[nest]
            assert around[0] < inside[0] and inside[0] + inside[2] < around[0] + around[2]
            assert around[1] < inside[1] and inside[1] + inside[3] < around[1] + around[3]
    between = [e for k in facts["kernels"] for e in k["meets"] if e["maker"] != e["reader"]]
    assert len(list(drawn.iter(f"{space}path"))) == len(between)


def test_page_shows_the_partition() -> None:
    page = explain_html(planned("norms", "neoverse_n1"))
    assert '<div class="chart" id="partition"><svg' in page and "Nested partition" in page
