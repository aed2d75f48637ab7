"""The explanation of a compilation: numbers that follow from the forms, text that fits, a page that stands alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from tests.cpu_stages import CPU, model_of
from tests.fuzz.test_programs import prepared
from tests.fuzz.test_trees import random_tree
from tests.gpu_stages import attention, graph, softmax_of_matmul
from tests.plans import map_tiles
from tests.unit.transform.test_wavefront import stacked
from tilewright.calls.profiles import KernelTime, Profile
from tilewright.cli.main import main
from tilewright.compiler.pipeline import Artifact, build
from tilewright.frontend.onnx.model import load
from tilewright.options import Options
from tilewright.report.explain import explain_text, size_text, time_text
from tilewright.report.explain_html import explain_html
from tilewright.report.facts import explain_json
from tilewright.schedule.planner import make_plan
from tilewright.schedule.trials import Trials
from tilewright.target import MemoryLevel, Target, machine
from tilewright.tile_graph.plan.form import Plan
from tilewright.tile_graph.plan.text import plan_text

LEVELS = (
    MemoryLevel("registers", 512, 16, 4e11),
    MemoryLevel("L1", 32 << 10, 64, 1.2e11),
    MemoryLevel("L2", 512 << 10, 64, 4e10),
    MemoryLevel("DRAM", 1 << 40, 64, 1.2e10),
)
TARGET = Target("cpu", "cpu", "any", 2, 16, 32, 2e10, LEVELS, 0.5e-6)


def explained(model: ModelProto, schedule: str = "connected", stop_after: str = "loops") -> Artifact:
    return build(load(model, {}), TARGET, Options(schedule=schedule, stop_after=stop_after))


def recurrent(steps: int = 5) -> ModelProto:
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((1, 8, 4)), "r": rng.standard_normal((1, 8, 8))}
    node = helper.make_node("RNN", ["x", "w", "r"], ["y"], hidden_size=8)
    ports = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [steps, 1, 4])]
    results = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [steps, 1, 1, 8])]
    constants = [numpy_helper.from_array(a.astype(np.float32), n) for n, a in weights.items()]
    whole = helper.make_graph([node], "recurrent", ports, results, constants)
    return helper.make_model(whole, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_intermediates_stay_on_chip_or_do_not() -> None:
    model = softmax_of_matmul(4, 8, 6)
    between = 4 * (4 * 6 + 4 + 4 * 6 + 4)  # scores, their maxima, exponentials and sums
    joined = explain_json(explained(model))
    assert joined["kernels_distinct"] == 1 and joined["calls"] == 1
    assert joined["totals"]["intermediate_bytes"] == between
    assert joined["totals"]["intermediate_bytes_on_chip"] == between
    assert joined["totals"]["arena_bytes"] == 0
    apart = explain_json(explained(model, "none"))
    assert apart["kernels_distinct"] == apart["computes"] == 5
    assert apart["totals"]["intermediate_bytes_stored"] == between


def test_what_is_told_of_main_memory_is_what_is_told_of_its_level() -> None:
    model = softmax_of_matmul(900, 8, 400)  # scores of 1.4 MB: more than the caches have
    moved = {}
    for schedule in ("none", "connected"):
        facts = explain_json(explained(model, schedule, "plan"))
        moved[schedule] = facts["totals"]["traffic_bytes"]
        last = facts["totals"]["levels"][-1]
        assert last["level"] == "DRAM" and moved[schedule] == last["read_bytes"] + last["written_bytes"]
        assert moved[schedule] == sum(k["traffic_bytes"] for k in facts["kernels"])
    assert moved["none"] > 2 * moved["connected"]


def test_kernels_that_only_move_data_are_told(add_model: Callable[..., ModelProto]) -> None:
    node = helper.make_node("Transpose", ["x"], ["y"], perm=[1, 0], name="swap")
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", [5, 7]), ("y", [7, 5]))]
    graph = helper.make_graph([node], "swapped", ports[:1], ports[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    assert "1 kernel to move data alone: k0" in explain_text(explained(model), width=100)
    assert "no kernel only moves data" in explain_text(explained(add_model()), width=100)


def test_a_kernel_says_what_it_computes_and_why() -> None:
    facts = explain_json(explained(softmax_of_matmul(4, 8, 6)))
    kernel = facts["kernels"][0]
    assert kernel["root"] == "o" and kernel["root_shape"] == [4, 6]
    assert [n.split(" node ")[0] for n in kernel["nodes"]] == ["MatMul", "Softmax"]
    assert kernel["summary"] == "MatMul, Softmax"
    assert {e["tensor"]: (e["mode"], e["level"]) for e in kernel["edges"]}["s"] == ("store", "L2")
    assert kernel["footprint_bytes"] > 0 and kernel["footprint_level"] == "L2"
    assert kernel["reason"].startswith("joined: the prediction is ")


def test_equal_kernels_are_one_row() -> None:
    shape = (64, 64)
    nodes = [("MatMul", ["x", "a"], "p", {}), ("MatMul", ["y", "b"], "q", {})]
    model = graph(nodes, [(n, shape) for n in "xayb"], [("p", shape), ("q", shape)])
    facts = explain_json(explained(model, "none"))
    assert facts["kernels_planned"] == 2 and facts["kernels_distinct"] == 1
    only = facts["kernels"][0]
    assert only["calls"] == 2 and [i["root"] for i in only["instances"]] == ["p", "q"]
    assert only["predicted_us_all_calls"] == pytest.approx(2 * only["predicted_us"], rel=1e-3)


def test_a_scan_counts_its_steps() -> None:
    artifact = explained(recurrent(5))
    facts = explain_json(artifact)
    assert artifact.loops is not None and facts["calls"] == len(artifact.loops.calls)
    steps = [k for k in facts["kernels"] if k["scan"]]
    assert steps and all(k["calls"] == 5 for k in steps)
    called = {c.kernel for c in artifact.loops.calls}
    assert {k["name"] for k in facts["kernels"]} == called
    assert "in every step of" in explain_text(artifact)
    readers = {p["reader_kernel"] for k in facts["kernels"] for i in k["instances"] for p in i["neighbours"]}
    assert readers and readers <= called


def test_streaming_is_shown() -> None:
    artifact = explained(attention(300, 16), stop_after="plan")
    assert artifact.program is not None
    artifact = replace(artifact, plan=make_plan(artifact.program, artifact.target, streaming="always"))
    kernel = next(k for k in explain_json(artifact)["kernels"] if k["stream"])
    assert kernel["stream"]["block"] > 0
    assert "stream" in {e["mode"] for e in kernel["edges"]}
    assert "streamed at L2" in explain_text(artifact)


def test_windows_are_where_they_are_held() -> None:
    rng = np.random.default_rng(0)
    weights = {f"w{n}": rng.standard_normal((8, 8, 3, 3)).astype(np.float32) for n in range(2)}
    pads = {"pads": [1, 1, 1, 1]}
    steps = [("Conv", ["x", "w0"], "c", pads), ("Relu", ["c"], "r", {}), ("Conv", ["r", "w1"], "y", pads)]
    shape = (1, 8, 256, 256)
    model = model_of(steps, {"x": shape}, {"y": shape}, weights)
    artifact = build(load(model), machine("emerald_rapids"), Options(stop_after="loops"))
    (kernel,) = explain_json(artifact)["kernels"]
    assert {n["tensor"]: n["level"] for n in kernel["nests"]}["r_staged"] == "L2"
    assert {e["tensor"]: e["mode"] for e in kernel["edges"] if e["mode"] != "recompute"} == {
        "x_staged": "window", "r": "store", "r_staged": "window"}  # fmt: skip
    assert "a window of it at L2: x_staged" in explain_text(artifact, 120)


@pytest.mark.parametrize("width", (100, 80))
def test_text_fits_the_terminal(width: int) -> None:
    for model in (attention(77, 40), recurrent()):
        text = explain_text(explained(model), width)
        longest = max(text.splitlines(), key=len)
        assert len(longest) <= max(width, 96), longest
    assert "stay on chip" in text


def test_json_is_plain() -> None:
    facts = explain_json(explained(attention(13, 5)))
    assert json.loads(json.dumps(facts)) == facts


def test_an_early_stop_is_explained() -> None:
    artifact = explained(softmax_of_matmul(4, 8, 6), stop_after="fold")
    assert explain_json(artifact)["kernels"] == []
    assert "compilation stopped before it" in explain_text(artifact)
    assert "compilation stopped before it" in explain_html(artifact)


def test_loops_that_do_not_follow_the_plan_are_still_explained() -> None:
    artifact = explained(softmax_of_matmul(4, 8, 6), "none")
    assert artifact.loops is not None
    fewer = replace(artifact.loops, calls=artifact.loops.calls[:2])
    names = [k["name"] for k in explain_json(replace(artifact, loops=fewer))["kernels"]]
    assert names == ["k0", "k1", "k2", "k3", "k4"]


def test_reasons_survive_json() -> None:
    plan = explained(attention(77, 40), stop_after="plan").plan
    assert plan is not None and any(k.estimate.reason for k in plan.kernels)
    assert Plan.from_json(plan.to_json()) == plan
    silent = map_tiles(plan, lambda tile: replace(tile, estimate=replace(tile.estimate, reason="")))
    assert all(k.estimate.reason == "" for k in Plan.from_json(silent.to_json()).kernels)


class Page(HTMLParser):
    """Open tags must be closed in order, and nothing may come from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.texts: dict[str, str] = {}  # of scripts, by their ids
        self._script = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        assert tag not in ("link", "img", "iframe", "object") and not {"src", "href", "action"} & given.keys()
        self.ids.append(given.get("id") or "")
        self._script = given.get("id") or ""
        if tag not in ("meta", "br", "input"):
            self.open.append(tag)

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.texts[self._script] = data

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(text: str) -> Page:
    page = Page()
    page.feed(text)
    assert not page.open
    return page


def test_the_page_stands_alone() -> None:
    artifact = explained(softmax_of_matmul(4, 8, 6), "none", "source")
    awkward = replace(artifact, graph=replace(artifact.graph, name="<script>alert('&')</script>"))
    text = explain_html(awkward)
    page = parsed(text)
    assert "url(" not in text and "@import" not in text and "fetch(" not in text and "import(" not in text
    assert text.replace("http://www.w3.org/2000/svg", "").count("http") == 0
    assert "&lt;script&gt;" in text and "<script>alert" not in text
    facts = json.loads(page.texts["facts"])
    assert facts == json.loads(json.dumps(explain_json(awkward)))
    assert json.loads(page.texts["sources"]) == artifact.sources and len(artifact.sources) == len(facts["kernels"])


def test_scripts_and_page_agree() -> None:
    """What the scripts look for is there; what is drawn is tested in a browser (test_page.py, with --all)."""
    text = explain_html(explained(attention(77, 40), stop_after="source"), "café & co.onnx")
    assert "<title>café &amp; co.onnx for " in text and "<h1>café &amp; co.onnx for " in text
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
    page = parsed(text)
    wanted = set(re.findall(r'getElementById\("([a-z]+)"\)', page.texts[""]))
    assert len(wanted) > 8 and wanted <= set(page.ids)
    fixed = [int(n) for n in re.findall(r"[^-]width: ?(\d+)px", text)]
    assert max(fixed, default=0) < 400


def test_the_tree_says_what_is_held_where() -> None:
    artifact = explained(attention(300, 16), stop_after="plan")
    assert artifact.program is not None
    artifact = replace(artifact, plan=make_plan(artifact.program, artifact.target, streaming="always"))
    kernel = next(k for k in explain_json(artifact)["kernels"] if k["stream"])
    tree = kernel["tree"]
    assert tree["level"] == "L2" and tree["over"] == "cores" and tree["parts"] == kernel["tiles"]
    (walked,) = [n for n in tree["body"] if n["kind"] == "tile"]
    block = kernel["stream"]["block"]
    assert walked["sizes"][0]["size"] == block and walked["parts"] == -(-300 // block)
    modes = {h["tensor"]: h["mode"] for h in walked["holds"]}
    assert "carry" in modes.values() and "store" in modes.values()
    parts = {n["tensor"]: n["shape"] for n in walked["body"]}
    for hold in walked["holds"]:
        if hold["mode"] == "store":  # scores and their exponentials: a block of them for the rows of a tile
            assert parts[hold["tensor"]][-1] == block
            assert hold["bytes"] == 4 * np.prod(parts[hold["tensor"]]) < hold["whole_bytes"]
    assert "input" in {r["role"] for r in kernel["reads"]}
    assert [w["tensor"] for w in kernel["writes"]] == [t.name for t in artifact.program.outputs]


def test_any_tree_is_explained() -> None:
    """Kernels cut twice, leaves at either level: nothing is held that is larger than all of it."""
    example = explained(softmax_of_matmul(4, 8, 6), stop_after="plan")
    for seed in range(4):
        program = prepared(seed)
        artifact = replace(example, program=program, plan=random_tree(program, seed), target=CPU)
        stack = [k["tree"] for k in explain_json(artifact)["kernels"]]
        while stack:
            tile = stack.pop()
            assert all(0 < h["bytes"] <= h["whole_bytes"] for h in tile["holds"])
            assert tile["parts"] == np.prod([-(-z["extent"] // z["size"]) for z in tile["sizes"]])
            stack.extend(n for n in tile["body"] if n["kind"] == "tile")
        assert explain_text(artifact)


def pairs_of(artifact: Artifact) -> dict[tuple[str, str], dict[str, dict[str, Any]]]:
    """What was tried for every pair of neighbours, by level."""
    kernels = explain_json(artifact)["kernels"]
    pairs = [p for k in kernels for i in k["instances"] for p in i["neighbours"]]
    assert all(sum(t["chosen"] for t in p["tried"]) == 1 for p in pairs)
    return {(p["tensor"], p["reader"]): {t["level"]: t for t in p["tried"]} for p in pairs}


def test_neighbours_that_meet_say_what_it_saves() -> None:
    artifact = explained(softmax_of_matmul(64, 80, 60))
    pairs = pairs_of(artifact)
    tried = pairs["s", "o_max"]
    assert tried["L2"]["chosen"] and 0 < tried["L2"]["predicted_us"] < tried["DRAM"]["predicted_us"]
    assert "its reader reduces again" in tried["registers"]["reason"]
    assert "at L2" in explain_text(artifact) and "not at registers: " in explain_text(artifact)


def test_neighbours_that_do_not_meet_say_why() -> None:
    """Softmax over both axes of a matrix whose columns no tile can hold: the refusal names the room there is."""
    nodes = [("Softmax", ["x"], "a", {"axis": 0}), ("Softmax", ["a"], "y", {"axis": 1})]
    artifact = explained(graph(nodes, [("x", (8192, 8192))], [("y", (8192, 8192))]), stop_after="plan")
    pairs = pairs_of(artifact)
    apart = {pair: tried for pair, tried in pairs.items() if tried["DRAM"]["chosen"]}
    assert any("bytes at L2, which has 524288" in tried["L2"]["reason"] for tried in apart.values())
    assert all(tried["L2"]["reason"] for tried in apart.values())
    apart_all = pairs_of(explained(softmax_of_matmul(4, 8, 6), "none", "plan"))
    assert all(t["L2"]["reason"] == "schedule none joins no kernels" for t in apart_all.values())


def test_a_prediction_that_is_no_faster_is_told_with_both_times() -> None:
    """A product whose result is read in a product again gives up its own tiles when both share a kernel."""
    nodes = [("MatMul", ["x", "v"], "h", {}), ("MatMul", ["h", "w"], "y", {})]
    weights = {"v": np.ones((300, 900), np.float32), "w": np.ones((900, 300), np.float32)}
    model = model_of(nodes, {"x": (300, 300)}, {"y": (300, 300)}, weights)
    tried = pairs_of(explained(model, stop_after="plan"))["h", "y"]
    assert tried["DRAM"]["chosen"] and tried["L2"]["reason"] == "it is predicted to be no faster"
    assert tried["L2"]["predicted_us"] > tried["DRAM"]["predicted_us"]


@pytest.mark.parametrize("name", ["neoverse_n1", "emerald_rapids", "h200"])
def test_what_is_tried_again_costs_what_was_planned(name: str) -> None:
    """Neighbours in one kernel cost what that kernel does, neighbours in two what these do together."""
    nodes = [("MatMul", ["x", "v"], "h", {}), ("Softmax", ["h"], "s", {"axis": -1}), ("MatMul", ["s", "w"], "y", {})]
    weights = {"v": np.ones((70, 900), np.float32), "w": np.ones((900, 300), np.float32)}
    model = model_of(nodes, {"x": (50, 70)}, {"y": (50, 300)}, weights)
    artifact = build(load(model, {}), machine(name), Options(stop_after="plan"))
    kernels = explain_json(artifact)["kernels"]
    times = {i["plan"]: k["predicted_us"] for k in kernels for i in k["instances"]}
    tried = [(i["plan"], p) for k in kernels for i in k["instances"] for p in i["neighbours"]]
    assert len(tried) >= 4
    for plan, pair in tried:
        chosen = next(t for t in pair["tried"] if t["chosen"])
        whole = times[plan] + (times[pair["reader_plan"]] if pair["reader_plan"] != plan else 0.0)
        assert chosen["predicted_us"] == pytest.approx(whole, rel=1e-3)


def test_what_stays_in_the_shared_cache_between_kernels_is_told() -> None:
    """Small tensors are found in the outer cache by who reads them; large ones have passed by then."""
    nodes = [("Softmax", ["x"], "a", {"axis": 0}), ("Softmax", ["a"], "y", {"axis": 1})]
    for size, stays in ((512, True), (4096, False)):
        model = graph(nodes, [("x", (size, size))], [("y", (size, size))])
        artifact = build(load(model, {}), machine("neoverse_n1"), Options(schedule="register", stop_after="plan"))
        pairs = pairs_of(artifact)
        assert len(pairs) == 10 and {tried["L3"]["chosen"] for tried in pairs.values()} == {stays}
        if not stays:
            assert all("pass before it is read for the last time" in t["L3"]["reason"] for t in pairs.values())
        places = {w["tensor"]: w["level"] for k in explain_json(artifact)["kernels"] for w in k["writes"]}
        assert places["a"] == ("L3" if stays else "DRAM") and places["y"] == "DRAM"


def test_measured_times_stand_beside_predictions() -> None:
    artifact = explained(recurrent(5))
    names = [call.kernel for call in artifact.calls]
    profile = Profile(tuple(KernelTime(i, name, 2000) for i, name in enumerate(names)), 1)
    facts = explain_json(artifact, profile)
    assert facts["totals"]["measured_us"] == 2 * len(names)
    for kernel in facts["kernels"]:
        assert kernel["measured_us"] == 2 and kernel["measured_us_all_calls"] == 2 * kernel["calls"]
    assert "2.0 us a call" in explain_text(artifact, measured=profile)
    other = Profile((KernelTime(0, "another", 2000),), 1)
    assert explain_json(artifact, other)["totals"]["measured_us"] is None


def test_operations_and_memory_follow_from_the_model() -> None:
    nodes = [("MatMul", ["x", "a"], "p", {}), ("MatMul", ["p", "b"], "q", {}), ("Slice", ["q", "s", "e"], "y", {})]
    ends = {"s": np.array([0, 0]), "e": np.array([8, 64])}
    model = model_of(nodes, dict.fromkeys("xab", (64, 64)), {"y": (8, 64)}, ends)
    (joined,) = explain_json(explained(model))["kernels"]
    assert joined["operations"] == 2 * (2 * 8 * 64 * 64)  # of the first eight rows alone
    facts = explain_json(explained(model, "none"))
    assert [k["operations"] for k in facts["kernels"]] == [2 * 8 * 64 * 64] * 2 + [0]
    memory = facts["memory"]
    assert memory["bytes"] == facts["totals"]["arena_bytes"] and len(facts["order"]) == facts["calls"]
    for tensor in memory["tensors"]:
        assert 0 <= tensor["first"] <= tensor["last"] < facts["calls"]
        assert tensor["offset"] + tensor["bytes"] <= memory["bytes"]


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, page = tmp_path / "m.onnx", tmp_path / "m.html"
    model.write_bytes(softmax_of_matmul(4, 8, 6).SerializeToString())
    stopped = ["explain", str(model), "--stop-after", "plan"]
    assert main([*stopped, "--html", str(page)]) == 0
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "<h1>m.onnx for " in page.read_text(encoding="utf-8")
    assert main([*stopped, "--html", str(tmp_path / "nowhere" / "m.html")]) == 2
    assert "cannot write" in capsys.readouterr().err
    assert main([*stopped, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kernels"]


def test_quantities() -> None:
    assert [size_text(n) for n in (0, 999, 1000, 4_190_000, 999_900, 2e9)] == [
        "0 B", "999 B", "1 kB", "4.19 MB", "1000 kB", "2 GB",
    ]  # fmt: skip
    assert [time_text(t) for t in (0.6, 999.9, 1268.4, 30100)] == ["0.6 us", "999.9 us", "1268 us", "30.1 ms"]


def test_a_kernel_is_not_said_to_lack_room_that_it_has() -> None:
    """A row of a normalisation is small: where no tile will do all the same, it is for what tensor cores take."""
    ports = [("x", (256, 768)), ("s", (768,)), ("b", (768,)), ("w", (768, 512))]
    nodes = [("LayerNormalization", ["x", "s", "b"], "n", {}), ("MatMul", ["n", "w"], "y", {})]
    target = machine("h200")
    options = Options(stop_after="plan", precision="float16", target="h200")
    made = build(load(graph(nodes, ports, [("y", (256, 512))])), target, options)
    assert made.plan is not None and made.program is not None
    connector = Trials(made.program, made.plan, target)._sides[None].connector
    reason = connector.costs.why_not([n for n in connector.nests if n.tensor.name != "w_float16"])
    assert re.search(r"no tile that \w+ can be cut into leaves room at shared", reason), reason


def test_steps_inside_a_kernel_are_explained() -> None:
    target = replace(machine("h200"), kernel_cost=5e-5, barriers=(("grid", 1e-6),))
    made = build(load(stacked("LSTM", 2, hidden=24, steps=9)), target, Options(stop_after="loops", target="h200"))
    assert made.plan is not None and "barrier of all blocks" in plan_text(made.plan)
    assert "kernel" in explain_text(made)
    assert "barrier of all blocks" in explain_html(made)
