"""The explanation's page in a real browser, at the width of a desk and of a phone: nothing clipped, nothing wrong."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

from tests.browser import Browser, find_browser
from tests.cpu_stages import model_of
from tests.gpu_stages import attention
from tests.unit.report.test_explain import explained, recurrent
from tests.unit.tile_graph.test_rolling import chain, rolled
from tilewright.calls.profiles import KernelTime, Profile
from tilewright.compiler.pipeline import Artifact, build
from tilewright.frontend.onnx.model import load
from tilewright.options import Options
from tilewright.report.explain_html import explain_html
from tilewright.schedule.planner import make_plan
from tilewright.target import machine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_browser() is None, reason="no browser of the Chromium family is installed"),
]

WIDTHS = (1400, 400)
MANY = 300

# Texts that do not lie inside the window, or that what is around them cuts off; code may be moved sideways.
CLIPPED = """(() => {
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const near = node.parentElement;
    if (!node.textContent.trim() || near.closest("script, style, pre, noscript, #tip, option")) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const r of range.getClientRects()) {
      if (!r.width) continue;
      if (r.left < -1 || r.right > innerWidth + 1) found.push([node.textContent, r.left, r.right]);
      for (let up = near; up && up !== document.body; up = up.parentElement) {
        const box = up.getBoundingClientRect();
        if (getComputedStyle(up).display === "inline" || !box.width) continue;
        if (r.left < box.left - 1.5 || r.right > box.right + 1.5)
          found.push([node.textContent, r.left, r.right, up.outerHTML.slice(0, 60), box.left, box.right]);
      }
    }
  }
  for (const e of document.body.querySelectorAll("*"))
    if (e.clientWidth && e.scrollWidth > e.clientWidth + 1 && !e.closest("pre, svg"))
      found.push([e.tagName, e.className, e.scrollWidth, e.clientWidth]);
  return found.slice(0, 8);
})()"""
# Boxes of levels that do not lie inside the box around them, or whose level lies farther out.
MISPLACED = """(() => {
  const order = facts.target.levels.map(l => l.name), found = [];
  for (const e of document.querySelectorAll(".box .box")) {
    const out = e.parentElement.closest(".box"), a = e.getBoundingClientRect(), b = out.getBoundingClientRect();
    if (a.left < b.left || a.right > b.right || a.top < b.top || a.bottom > b.bottom) found.push([e.dataset.level, a]);
    if (order.indexOf(e.dataset.level) > order.indexOf(out.dataset.level)) found.push([e.dataset.level, "outside"]);
  }
  return found;
})()"""
SMALLEST = """Math.min(...[...document.querySelectorAll("body *")].filter(e => e.clientWidth && e.textContent.trim())
  .map(e => parseFloat(getComputedStyle(e).fontSize)))"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_browser()
    assert program is not None
    with Browser(program, tmp_path_factory.mktemp("browser")) as made:
        yield made


@pytest.fixture(autouse=True)
def no_errors(browser: Browser) -> Iterator[None]:
    browser.errors.clear()
    yield
    assert browser.errors == []


def timed(artifact: Artifact) -> Profile:
    """A profile as if every call had taken as long as its number."""
    calls = enumerate(artifact.calls)
    return Profile(tuple(KernelTime(i, call.kernel, 1000 * (i + 1)) for i, call in calls), 1)


def streamed() -> Artifact:
    artifact = explained(attention(300, 16), stop_after="plan")
    assert artifact.program is not None
    return replace(artifact, plan=make_plan(artifact.program, artifact.target, streaming="always"))


def window() -> Artifact:
    program = chain(3, 12, 9, 3, 1, 1)
    target = machine("neoverse_n1")
    plan = rolled(make_plan(program, target, "register"), program, 6, 2)
    return replace(explained(attention(13, 5), stop_after="plan"), program=program, plan=plan, target=target)


def for_a_gpu() -> Artifact:
    return build(load(attention(77, 40), {}), machine("h200"), Options(stop_after="source"))


def long_names() -> Artifact:
    names = ["x", *(f"encoder.layers.{n}.attention.output.dense.activation_of_everything" for n in range(4))]
    nodes = [("Softmax", [names[n]], names[n + 1], {"axis": n % 2}) for n in range(4)]
    model = model_of(nodes, {"x": (40, 60)}, {names[-1]: (40, 60)})
    return build(load(model, {}), machine("neoverse_n1"), Options(schedule="none", stop_after="source"))


def many_kernels() -> Artifact:
    """A chain of kernels, no two of them alike: every other one makes the tensor longer."""
    pads = {"pads": np.array([0, 0, 0, 1])}
    steps = [(f"t{n}" if n else "x", f"t{n + 1}") for n in range(MANY)]
    nodes = [("Pad", [a, "pads"], b, {}) if n % 2 else ("Tanh", [a], b, {}) for n, (a, b) in enumerate(steps)]
    model: ModelProto = model_of(nodes, {"x": (3, 16)}, {f"t{MANY}": (3, 16 + MANY // 2)}, pads)
    return build(load(model, {}), machine("neoverse_n1"), Options(schedule="none", stop_after="source"))


def written(artifact: Artifact, folder: Path, name: str, measured: Profile | None = None) -> Path:
    path = folder / "page.html"
    path.write_text(explain_html(artifact, name, measured), encoding="utf-8")
    return path


def open_all(browser: Browser) -> None:
    """Every kernel with all that can be opened in it."""
    browser.run("kernels.slice(0, 8).forEach(k => openKernel(k.name))")
    browser.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    browser.run("new Promise(done => setTimeout(done, 300))")


CASES = {
    "attention": lambda: explained(attention(77, 40), stop_after="source"),
    "stream": streamed,
    "window": window,
    "scan": lambda: explained(recurrent(5), stop_after="source"),
    "gpu": for_a_gpu,
    "long names": long_names,
}


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_clipped_and_levels_are_inside_each_other(name: str, browser: Browser, tmp_path: Path) -> None:
    artifact = CASES[name]()
    page = written(artifact, tmp_path, "a model & its <file>.onnx", timed(artifact) if artifact.loops else None)
    for width in WIDTHS:
        browser.open(page, width)
        assert browser.run("document.querySelector('h1').textContent").startswith("a model & its <file>.onnx for ")
        assert browser.run("document.title").startswith("a model & its <file>.onnx for ")
        open_all(browser)
        assert browser.run("document.documentElement.scrollWidth") <= browser.run("innerWidth")
        assert browser.run(CLIPPED) == []
        assert browser.run("document.querySelectorAll('.box').length") >= 3 * browser.run("rows.size")
        assert browser.run(MISPLACED) == []
        assert browser.run(SMALLEST) >= 12


def test_pictures_show_every_kernel(browser: Browser, tmp_path: Path) -> None:
    artifact = explained(attention(77, 40), "none", "source")
    browser.open(written(artifact, tmp_path, "m.onnx", timed(artifact)), 1400)
    kernels = browser.run("kernels.length")
    assert browser.run("document.querySelectorAll('#roofline circle').length") == browser.run(
        "kernels.filter(k => k.operations && k.traffic_bytes).length"
    )
    assert len(set(browser.run("[...document.querySelectorAll('#time rect')].map(r => r.dataset.kernel)"))) == kernels
    assert browser.run("document.querySelectorAll('#memory rect').length") == browser.run("facts.memory.tensors.length")
    widths = browser.run(
        "[...document.querySelectorAll('#time svg, #roofline svg, #memory svg')].map(s => s.clientWidth)"
    )
    assert min(widths) > 300
    outside = """[...document.querySelectorAll('svg text')].filter(t => { const a = t.getBoundingClientRect(),
        b = t.ownerSVGElement.getBoundingClientRect(); return a.left < b.left - 1 || a.right > b.right + 1 ||
        a.top < b.top - 1 || a.bottom > b.bottom + 1 }).map(t => t.textContent)"""
    assert browser.run(outside) == []
    browser.open(tmp_path / "page.html", 400)
    assert browser.run(outside) == []


def test_a_kernel_shows_what_it_holds_its_neighbours_and_its_code(browser: Browser, tmp_path: Path) -> None:
    artifact = explained(attention(77, 40), stop_after="source")
    browser.open(written(artifact, tmp_path, "m.onnx"), 1400)
    facts: list[dict[str, Any]] = browser.run("kernels")
    for kernel in facts:
        open_all(browser)
        text: str = browser.run(f"document.getElementById('kernel-{kernel['name']}').textContent")
        held = [h["tensor"] for h in kernel["tree"]["holds"]]
        assert held and all(tensor in text for tensor in held)
        for pair in kernel["instances"][0]["neighbours"]:
            assert all(t["reason"] in text for t in pair["tried"] if not t["chosen"])
        code = browser.run(f"document.querySelector('#kernel-{kernel['name']} pre').textContent")
        assert code == artifact.sources[kernel["name"]]


def test_light_and_dark(browser: Browser, tmp_path: Path) -> None:
    page = written(explained(attention(13, 5)), tmp_path, "m.onnx")
    paper = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
    browser.open(page, 400, dark=True)
    assert max(browser.run(paper)) < 80
    browser.run("document.getElementById('theme').click()")
    assert min(browser.run(paper)) > 200
    browser.open(page, 400)
    assert min(browser.run(paper)) > 200


def test_a_stopped_compilation_has_a_page_too(browser: Browser, tmp_path: Path) -> None:
    browser.open(written(explained(attention(13, 5), stop_after="fold"), tmp_path, "m.onnx"), 400)
    assert "stopped before it" in browser.run("document.body.innerText")
    assert browser.run(CLIPPED) == []


def test_three_hundred_kernels(browser: Browser, tmp_path: Path) -> None:
    artifact = many_kernels()
    page = written(artifact, tmp_path, "many.onnx", timed(artifact))
    for width in WIDTHS:
        start = time.monotonic()
        browser.open(page, width)
        assert time.monotonic() - start < 20
        assert browser.run("document.querySelectorAll('.kernel').length") == MANY
        spent = browser.run("[...document.querySelectorAll('.kernel')].map(e => spent(byName.get(e.id.slice(7))))")
        assert spent == sorted(spent, reverse=True)
        assert browser.run("document.documentElement.scrollWidth") <= browser.run("innerWidth")
        assert browser.run(CLIPPED) == []
        assert browser.run("document.querySelectorAll('*').length") < 60 * MANY  # what is closed is not there yet
    find = "(found.value = {!r}, found.dispatchEvent(new Event('input')), list.children.length)"
    assert browser.run(find.format("t77")) == len([n for n in range(1, MANY + 1) if "t77" in f"t{n}"])
    assert browser.run(find.format("no such thing")) == 0
    assert browser.run("document.getElementById('shown').textContent").startswith(f"0 of {MANY}")
    assert browser.run(find.format("")) == MANY
    browser.run("order.value = 'order', order.dispatchEvent(new Event('change'))")
    names = browser.run("[...document.querySelectorAll('.kernel .name')].map(e => e.textContent)")
    assert names == json.loads(browser.run("JSON.stringify(kernels.map(k => k.name))"))
    name = browser.run("kernels[200].name")
    browser.run(find.format("t3"))
    browser.run(f"openKernel({name!r})")  # what was searched for gives way to what is wanted
    assert browser.run(f"document.getElementById('kernel-{name}').open") is True
    assert browser.run("location.hash") == f"#{name}"
