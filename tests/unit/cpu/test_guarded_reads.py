"""Reads behind a condition on their places: vectors of the lanes inside."""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

import tilewright
from tests.cpu_stages import model_of
from tilewright.compiler.pipeline import build
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.expr import Axis, Expr, all_of, const, le, lt, op, var
from tilewright.options import Options
from tilewright.render.c_guarded import LaneRun, rest_of, run_of
from tilewright.target import machine

RNG = np.random.default_rng(3)
LANES = 16
LANE, OUTER = Axis("lane", LANES), Axis("outer", 9)


def value(node: Expr, lane: int, outer: int) -> Any:
    """What an expression of places is, by the table of operations."""
    if node is var(LANE) or node is var(OUTER):
        return lane if node is var(LANE) else outer
    if not node.args:
        return node.value  # type: ignore[attr-defined]
    return node.op.numpy(*(np.asarray(value(a, lane, outer)) for a in node.args))  # type: ignore[attr-defined]


def lanes_of(run: LaneRun, outer: int) -> set[int]:
    first, last = (int(value(end, 0, outer)) for end in run.ends(LANES))
    return set(range(first, last)) if all(value(each, 0, outer) for each in run.given) else set()


def place(step: int, start: int) -> Expr:
    return var(LANE) * step + var(OUTER) * 7 + start


CONDITIONS = {
    "below": lt(place(1, -20), const(13)),
    "at least": le(const(-3), place(1, -31)),
    "between": all_of((le(const(0), place(1, -30)), lt(place(1, -30), const(12)))),
    "steps of three": all_of((lt(place(3, -70), const(0)), lt(const(-40), place(3, -70)))),
    "backwards": lt(place(-2, 3), const(20)),
    "one for all lanes": all_of((lt(var(OUTER), const(4)), lt(place(1, 0), const(25)))),
    "not below": op("not", lt(place(2, -9), const(13))),
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_the_lanes_of_a_condition_are_a_run(name: str) -> None:
    condition = CONDITIONS[name]
    run, rest = run_of(condition, LANE), rest_of(condition, LANE)
    assert run is not None
    for outer in range(9):
        held = {lane for lane in range(LANES) if value(condition, lane, outer)}
        assert lanes_of(run, outer) == held
        assert rest is None or lanes_of(rest, outer) == set(range(LANES)) - held


def test_what_is_no_run() -> None:
    odd = lt(place(1, 0) % 2, const(1))
    assert run_of(odd, LANE) is None and rest_of(odd, LANE) is None
    assert rest_of(CONDITIONS["between"], LANE) is None


def joined(*widths: int) -> ModelProto:
    names = [f"x{k}" for k in range(len(widths))]
    shapes = {name: (5, width) for name, width in zip(names, widths, strict=True)}
    return model_of([("Concat", names, "y", {"axis": 1})], shapes, {"y": (5, sum(widths))})


def padded_pool() -> ModelProto:
    """Whole numbers, converted behind the condition."""
    more = {"kernel_shape": [5, 5], "pads": [2, 2, 2, 2]}
    steps = [("Cast", ["x"], "h", {"to": 7}), ("Cast", ["h"], "k", {"to": 1}), ("MaxPool", ["k"], "y", more)]
    return model_of(steps, {"x": (1, 1, 3, 301)}, {"y": (1, 1, 3, 301)})


def frames(count: int, hop: int, pieces: int) -> ModelProto:
    """Overlapping frames of a signal, as exporters put them together: pieces of one hop, one behind the other."""
    length = (count + pieces - 1) * hop
    constants: dict[str, Any] = {"rows": np.array([count + pieces - 1, hop]), "axes": np.array([0])}
    steps: list[Any] = [("Reshape", ["x", "rows"], "r", {})]
    for k in range(pieces):
        constants |= {f"s{k}": np.array([k]), f"e{k}": np.array([k + count])}
        steps.append(("Slice", ["r", f"s{k}", f"e{k}", "axes"], f"p{k}", {}))
    steps.append(("Concat", [f"p{k}" for k in range(pieces)], "y", {"axis": 1}))
    return model_of(steps, {"x": (length,)}, {"y": (count, pieces * hop)}, constants)


CASES = {
    "joined": joined(7, 19, 50),
    "several": joined(*[40] * 10),
    "many": joined(*range(1, 25)),
    "padded": padded_pool(),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["emerald_rapids", "avx2_desktop", "neoverse_n1"])
@pytest.mark.parametrize("case", CASES)
def test_every_form_agrees(name: str, case: str) -> None:
    build(load(CASES[case], {}), machine(name), Options(stop_after="source", verify=True))


def kernels_of(model: ModelProto, name: str) -> str:
    texts = build(load(model, {}), machine(name), Options(stop_after="source")).sources.values()
    return "".join(text.split("void k", 1)[1] for text in texts)


@pytest.mark.parametrize("name", ["emerald_rapids", "avx2_desktop"])
def test_lanes_inside_are_read_at_once(name: str) -> None:
    """Where tiles end anywhere in the pieces of long rows."""
    assert "tw_run_" in kernels_of(joined(7, 700_001, 50), name)


def normalised(pieces: int) -> ModelProto:
    """The pieces of a DenseNet's layer, channels last: scaled by column and clamped."""
    names = [f"x{k}" for k in range(pieces)]
    steps = [("Concat", names, "c", {"axis": 1}), ("Mul", ["c", "w"], "m", {}), ("Add", ["m", "b"], "a", {}),
             ("Relu", ["a"], "y", {})]  # fmt: skip
    weights = {n: RNG.random(32 * pieces, dtype=np.float32) for n in "wb"}
    return model_of(steps, dict.fromkeys(names, (196, 32)), {"y": (196, 32 * pieces)}, weights)


@pytest.mark.parametrize("name", ["emerald_rapids", "avx2_desktop", "neoverse_n1"])
@pytest.mark.parametrize(
    "model", [joined(*[40] * 10), joined(*[64] * 60), normalised(24)], ids=["ten", "sixty", "scaled"]
)
def test_of_pieces_of_many_tensors_each_is_read_where_it_is(model: ModelProto, name: str) -> None:
    text = kernels_of(model, name)
    assert "tw_run_" not in text and "tw_select_" not in text and " ? " not in text


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "name", ["emerald_rapids", "avx2_desktop", pytest.param("neoverse_n1", marks=pytest.mark.slow), "here"]
)
@pytest.mark.parametrize("case", ["several", pytest.param("many", marks=pytest.mark.slow), "padded"])
def test_the_text_runs_here(name: str, case: str, tmp_path: Path, kernel_cache: Path) -> None:
    """Vectors of another machine's width, of which any compiler makes what it can."""
    options = Options(cache_dir=kernel_cache)
    if name != "here":
        wide = replace(machine(name), name="wide", architecture=platform.machine(), features=(), rates=())
        (tmp_path / "wide.json").write_text(wide.to_json())
        options = replace(options, target=str(tmp_path / "wide.json"))
    model = tilewright.compile(CASES[case], options=options)
    inputs = [RNG.standard_normal(p.shape).astype(np.float32) * 50 for p in model.inputs]
    if case != "padded":
        np.testing.assert_array_equal(model(*inputs)[0], np.concatenate(inputs, 1))
        return
    whole = np.pad(np.trunc(inputs[0][0, 0]), 2, constant_values=-np.inf)
    wanted = np.lib.stride_tricks.sliding_window_view(whole, (5, 5)).max((2, 3))
    np.testing.assert_array_equal(model(*inputs)[0][0, 0], wanted)


def test_pieces_of_one_tensor_that_follow_each_other_are_one_read(kernel_cache: Path) -> None:
    """However many pieces a frame is put together from, it is read at one place."""
    sources = [build(load(frames(40, 32, n), {}), machine("emerald_rapids"), Options(stop_after="source")).sources
               for n in (2, 8)]  # fmt: skip
    few, many = (len("".join(each.values())) for each in sources)
    assert many < 1.5 * few
    model = tilewright.compile(frames(40, 32, 8), options=Options(cache_dir=kernel_cache))
    x = RNG.standard_normal(model.inputs[0].shape).astype(np.float32)
    wanted = np.lib.stride_tricks.sliding_window_view(x, 8 * 32)[::32][:40]
    np.testing.assert_array_equal(model(x)[0], wanted)
