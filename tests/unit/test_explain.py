"""The explanation of a compilation: numbers that follow from the forms, text that fits, a page that stands alone."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from tests.cpu_stages import model_of
from tests.gpu_stages import attention, graph, softmax_of_matmul
from tests.plans import map_tiles
from tilewright.cli.main import main
from tilewright.compiler import Artifact, build
from tilewright.frontend.onnx import load
from tilewright.options import Options
from tilewright.report.explain import explain_text, size_text, time_text
from tilewright.report.explain_html import explain_html
from tilewright.report.facts import explain_json
from tilewright.schedule.planner import make_plan
from tilewright.target import MemoryLevel, Target
from tilewright.tile_graph.plan import Plan

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
    assert apart["totals"]["traffic_bytes"] > joined["totals"]["traffic_bytes"]


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


def test_streaming_is_shown() -> None:
    artifact = explained(attention(300, 16), stop_after="plan")
    assert artifact.program is not None
    artifact = replace(artifact, plan=make_plan(artifact.program, artifact.target, streaming="always"))
    kernel = explain_json(artifact)["kernels"][0]
    assert kernel["stream"]["block"] > 0
    assert "stream" in {e["mode"] for e in kernel["edges"]}
    assert "streamed at L2" in explain_text(artifact)


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
        self.classes: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img", "iframe") and "src" not in dict(attrs) and "href" not in dict(attrs)
        self.classes.append(dict(attrs).get("class") or "")
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_stands_alone() -> None:
    artifact = explained(softmax_of_matmul(4, 8, 6), "none")
    awkward = replace(artifact, graph=replace(artifact.graph, name="<script>alert('&')</script>"))
    text = explain_html(awkward)
    page = Page()
    page.feed(text)
    assert not page.open
    assert "url(" not in text and "http" not in text
    kernels = page.classes.count("kernel")
    assert kernels >= 4 and page.classes.count("nest") >= kernels and page.classes.count("amount") == 2 * kernels
    assert "<code>o</code>" in text and "&lt;script&gt;" in text


def test_the_page_fits_any_width_and_cuts_nothing() -> None:
    """Boxes grow with their labels and wrap: no picture of a fixed width, no label shortened to fit one."""
    long = "Sigmoid"
    nodes = [(long, [f"t{n}" if n else "x"], f"t{n + 1}", {}) for n in range(12)]
    text = explain_html(explained(model_of(nodes, {"x": (4, 6)}, {"t12": (4, 6)}), "none"), "café & co.onnx")
    assert "<title>café &amp; co.onnx for " in text and "<h1>café &amp; co.onnx for " in text
    assert '<meta name="viewport" content="width=device-width">' in text
    assert "<svg" not in text and "\u2026" not in text
    fixed = [int(n) for n in re.findall(r"[^-]width: ?(\d+)px", text)]
    assert max(fixed, default=0) < 400


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
