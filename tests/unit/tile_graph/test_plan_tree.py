"""The grammar of plans: trees that cannot be meant are refused, each with one line that says what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

import tilewright
from tests.cpu_stages import model_of, programs
from tests.plans import map_leaves, map_tiles, step_kernels
from tilewright import Options
from tilewright.errors import InternalError, OptionError
from tilewright.ir.forms.compute import Program
from tilewright.schedule.planner import make_plan
from tilewright.target import machine
from tilewright.tile_graph.check.kernels import check_plan
from tilewright.tile_graph.plan.form import Bind, Estimate, Hold, Leaf, Plan, Tile, TileAxis
from tilewright.tile_graph.plan.leaf_form import (
    LEAF_FORMS,
    DotForm,
    FragmentForm,
    LeafForm,
    ThreadForm,
    TileForm,
    VectorForm,
    WindowForm,
)
from tilewright.tile_graph.plan.text import plan_text

N1, CUDA = machine("neoverse_n1"), machine("cuda")


def attention(length: int, head: int) -> ModelProto:
    """Keys already transposed, so that everything is one kernel."""
    return model_of(
        [("MatMul", ["q", "k"], "s", {}), ("Softmax", ["s"], "p", {"axis": -1}), ("MatMul", ["p", "v"], "o", {})],
        {"q": (2, length, head), "k": (2, head, length), "v": (2, length, head)}, {"o": (2, length, head)},
    )  # fmt: skip


def recurrence() -> ModelProto:
    rng = np.random.default_rng(0)
    constants = {n: rng.standard_normal(s).astype(np.float32) for n, s in
                 {"w": (1, 20, 3), "r": (1, 20, 5), "b": (1, 40)}.items()}  # fmt: skip
    return model_of(
        [("LSTM", ["x", "w", "r", "b"], "h", {"hidden_size": 5})], {"x": (4, 2, 3)}, {"h": (4, 1, 2, 5)}, constants
    )


@pytest.fixture(scope="module")
def streamed() -> tuple[Program, Plan]:
    program = programs(attention(300, 16), N1)["layout"]
    return program, make_plan(program, N1, streaming="always")


@pytest.fixture(scope="module")
def stepped() -> tuple[Program, Plan]:
    program = programs(recurrence(), N1)["layout"]
    return program, make_plan(program, N1)


# --- trees that are meant


def stream_of(plan: Plan) -> Tile:
    (kernel,) = plan.kernels
    assert kernel.stream is not None
    return kernel.stream


def test_a_stream_is_a_tile_inside_its_kernel(streamed: tuple[Program, Plan]) -> None:
    program, plan = streamed
    check_plan(plan, program, N1)
    (kernel,), stream = plan.kernels, stream_of(plan)
    assert stream in kernel.body and stream.over == "order" and stream.sizes[0][1] < stream.axes[0].extent == 300
    carried = [h.tensor for h in stream.holds if h.mode == "carry"]
    assert carried == ["p_max", "p_sum", "o"]
    parts = [(n.part, n.tensor) for n in kernel.walk() if isinstance(n, Leaf) and n.tensor in carried]
    for part in ("start", "step", "finish"):
        assert [tensor for each, tensor in parts if each == part] == carried
    assert all(n.part in ("whole", "step") for n in stream.body if isinstance(n, Leaf))
    assert len(kernel.leaves) == len({leaf.tensor for leaf in kernel.leaves})  # once a nest


def test_steps_are_a_tile_around_their_kernels(stepped: tuple[Program, Plan]) -> None:
    program, plan = stepped
    check_plan(plan, program, N1)
    assert [steps.scan if steps else None for _, steps in plan.launches()] == [None, "h_forward_steps", None]
    (kernel,) = step_kernels(plan)
    assert plan.scan_of(kernel) == "h_forward_steps" and plan.scan_of(plan.kernels[0]) is None
    assert kernel.held == {"h_forward_gates"}
    (near,) = plan.body.body
    assert isinstance(near, Tile) and near.level == "L3"
    held = ["h_forward_input", "h_forward_next_c", "h_forward_next_h"]
    assert sorted(h.tensor for t in (plan.body, near) for h in t.holds) == held


def test_threads_of_a_block_are_a_tile() -> None:
    program = programs(attention(13, 6), CUDA)["layout"]
    plan = make_plan(program, CUDA)
    check_plan(plan, program, CUDA)
    (kernel,) = plan.kernels
    (lanes,) = kernel.body
    assert kernel.over == "blocks" and isinstance(lanes, Tile) and lanes.over == "lanes" and lanes.count > 1


@pytest.mark.parametrize("which", ["streamed", "stepped"])
def test_json_round_trip(which: str, request: pytest.FixtureRequest) -> None:
    plan = request.getfixturevalue(which)[1]
    again = Plan.from_json(plan.to_json())
    assert again == plan and again.to_json() == plan.to_json() and plan_text(again) == plan_text(plan)


def everything(form: LeafForm) -> Plan:
    """One of each: what no planner gives has a text and survives JSON, too."""
    leaf = Leaf("y", "c", ("e",), ("m",), "whole", "o1", 4, (("o0", 2), ("o1", 8)), ("o0", "o1", "r0"), True, 3, form)
    axis = TileAxis("rows", 12, (Bind("y", "o0"), Bind("x", "o1", 2, -1)))
    inner = Tile("L1", (("rows", 2),), body=(replace(leaf, part="step"),), holds=(Hold("x", "rolling", "rows"),))
    walked = Tile("L1", (("s", 4),), body=(leaf, inner), holds=(Hold("y", "carry", "s"),))
    lanes = Tile("L2", over="lanes", count=8, body=(replace(leaf, part="start"), walked, replace(leaf, part="finish")))
    about = Estimate(2.5e-6, 64, "it is the only one")
    kernel = Tile("L2", (("rows", 4),), "cores", (lanes,), (Hold("x"), Hold("h", fill="prefetch")), (axis,), "k1",
                  estimate=about)  # fmt: skip
    steps = Tile("L2", over="steps", body=(kernel,), holds=(Hold("w", fill="prefetch", issue="k0"),), scan="z")
    return Plan("by hand", "connected", Tile("DRAM", body=(steps,), holds=(Hold("y"),)))


FORMS = {
    "plain": (LeafForm(), ""),
    "vector": (
        VectorForm(("r0",), (("r0", 16),), 7, 8, 2, 6, 3, 4),
        " cut r0:16 7 ahead 8 soon 2 together 6 rows near results 3 at a time",
    ),
    "threads": (ThreadForm(True, 5, 2, 32), " flat 5 at once split 2 step 32"),
    "dot": (DotForm("neon_int8"), " by neon_int8"),
    "window": (WindowForm("vnni_int8_lanes"), " by vnni_int8_lanes"),
    "tile": (TileForm("amx_int8", True, 64), " by amx_int8 packed step 64"),
    "fragments": (FragmentForm("mma_float16", True, 2, 64, 128), " by mma_float16 rolled split 2 step 64 anew 128"),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_field_survives_json(name: str) -> None:
    plan = everything(FORMS[name][0])
    assert Plan.from_json(plan.to_json()) == plan
    assert {*LEAF_FORMS} == FORMS.keys() - {"plain"}


@pytest.mark.parametrize(
    ("options", "form"),
    [
        ({}, LeafForm()),
        ({"unroll": ["r0"], "cut": [["r0", 16]]}, VectorForm(("r0",), (("r0", 16),))),
        ({"split": 32}, ThreadForm(split=32)),
        ({"instruction": "mma_float16", "step": 64, "rolled": True}, FragmentForm("mma_float16", True, step=64)),
        ({"instruction": "amx_bf16", "packs": True}, TileForm("amx_bf16", packs=True)),
        ({"instruction": "neon_int8"}, DotForm("neon_int8")),
    ],
)
def test_plans_of_older_versions(options: dict[str, Any], form: LeafForm) -> None:
    """They had the options of all forms beside each other."""
    plan = everything(form)

    def older(node: Any) -> Any:
        if isinstance(node, list):
            return [older(part) for part in node]
        if not isinstance(node, dict):
            return node
        if "leaf" in node:
            return {"leaf": {k: v for k, v in node["leaf"].items() if k != "form"} | options}
        return {name: older(part) for name, part in node.items()}

    assert Plan.from_json(json.dumps(older(json.loads(plan.to_json())))) == plan


def test_options_of_another_form_are_refused() -> None:
    text = everything(ThreadForm(split=2)).to_json().replace('"split": 2', '"ahead": 2')
    with pytest.raises(InternalError, match="not a plan: .*ahead"):
        Plan.from_json(text)
    with pytest.raises(InternalError, match="a leaf of ThreadForm has no options of FragmentForm"):
        everything(ThreadForm(split=2)).kernels[0].leaves[0].options(FragmentForm)


@pytest.mark.parametrize("name", FORMS)
def test_text(name: str) -> None:
    told = """\
plan for by hand, schedule connected, 1 kernel
DRAM in order
  holds y
  L2 every step of z
    holds w by prefetch in k0
    kernel k1: L2 tile [rows by 4 of 12] x 3 over cores
      axis rows: y.o0, x.o1 * 2 + -1
      holds x, h by prefetch
      L2 over 8 threads
        start y
        L1 tile [s by 4] in order
          holds y carried along s
          leaf y: HOW
          L1 tile [rows by 2] in order
            holds x rolling along rows
            step y: HOW
        finish y
      predicted 2.5 us, footprint 64 B
      because it is the only one
"""
    form, options = FORMS[name]
    how = f"core c + e with m; vector o1 x 4; register [o0:2 o1:8]; order o0 o1 r0 to and fro but at step 3{options}"
    assert plan_text(everything(form)) == told.replace("HOW", how)


def test_how_a_kernel_is_cut_by_the_axes_of_its_result() -> None:
    plan = everything(LeafForm())
    (kernel,) = plan.kernels
    assert kernel.cut == (("o0", 4),) and kernel.tiles == 3
    assert plan.issued_in("k0") == ("w",) and kernel.prefetched == ("h",) and kernel.held == {"x"}


# --- trees that cannot be meant

Change = Callable[[Tile], Tile]


def in_kernels(change: Change) -> Change:
    return lambda tile: change(tile) if tile.is_kernel else tile


def in_stream(change: Change) -> Change:
    return lambda tile: change(tile) if any(h.mode == "carry" for h in tile.holds) else tile


def without(tensor: str) -> Change:
    return lambda tile: replace(tile, holds=tuple(h for h in tile.holds if h.tensor != tensor))


def holding(hold: Hold) -> Change:
    return lambda tile: replace(tile, holds=(*tile.holds, hold))


def split_rows(kernel: Tile) -> Tile:
    """Parts of eight rows, and inside them parts of three."""
    axis = TileAxis("rows", 300, (Bind("o", "o1"),))
    inner = Tile(kernel.level, (("rows", 3),), body=kernel.body)
    return replace(kernel, axes=(axis,), sizes=(("rows", 8),), body=(inner,))


def step_outside(kernel: Tile) -> Tile:
    """A step of the largest score before the Tile that carries it."""
    first = next(leaf for leaf in kernel.leaves if leaf.part == "step")
    return replace(kernel, body=(first, *kernel.body))


REFUSED: dict[str, tuple[Change, str]] = {
    "unknown level": (
        in_kernels(lambda t: replace(t, level="L9")),
        "the target has no level 'L9'; it has registers, L1, L2, L3, DRAM",
    ),
    "level outer to its parent's": (
        in_stream(lambda t: replace(t, level="DRAM")),
        "a tile at DRAM inside one at L2: levels go inwards",
    ),
    "sizes that do not divide": (in_kernels(split_rows), "parts of 3 along rows do not fill parts of 8"),
    "size below one": (in_stream(lambda t: replace(t, sizes=(("s", 0),))), "size 0 along s"),
    "axis from nowhere": (
        in_stream(lambda t: replace(t, sizes=(("rows", 2),))),
        "it cuts axis 'rows', which no tile around it brings in",
    ),
    "axis of a nest that is not there": (
        in_kernels(lambda t: replace(t, axes=(TileAxis("t0", 2, (Bind("q", "o0"),)),), sizes=(("t0", 1),))),
        "axis t0 runs along 'q', which no leaf below stores",
    ),
    "axis that its nest has not": (
        in_kernels(lambda t: replace(t, axes=(TileAxis("t0", 2, (Bind("o", "o3"),)),), sizes=(("t0", 1),))),
        "axis t0 names axis 'o3', which is not one of its 3 o-axes",
    ),
    "handed out to nobody": (
        in_stream(lambda t: replace(t, over="everyone")),
        "a tile is handed out to one of order, cores, blocks, lanes, warps, steps, while, branch, not 'everyone'",
    ),
    "kernel inside a kernel": (
        in_stream(lambda t: replace(t, over="cores", name="k9")),
        "plan of kernel 'k9': a kernel inside a kernel",
    ),
    "kernel without leaves": (in_kernels(lambda t: replace(t, body=())), "it has no leaves"),
    "threads that are not counted": (
        in_stream(lambda t: replace(t, over="lanes")),
        "threads are counted where a tile is handed out to lanes, and only there",
    ),
    "steps of nothing": (
        in_stream(lambda t: replace(t, over="steps")),
        "steps are those of a Scan, and a Scan has steps",
    ),
    "steps of what is no Scan": (
        in_stream(lambda t: replace(t, over="steps", scan="p_max")),
        "'p_max' is no Scan",
    ),
    "tile for nothing": (
        in_kernels(lambda t: replace(t, body=(Tile(t.level, body=t.body),))),
        "a tile that neither cuts nor holds anything",
    ),
    "result without a place": (in_stream(without("s")), "nothing holds 's'"),
    "unknown mode": (
        in_kernels(holding(Hold("s", "lend"))),
        "'s' is held by 'lend'; it is one of store, carry, rolling",
    ),
    "unknown tensor": (in_kernels(holding(Hold("nothing"))), "it holds unknown tensor 'nothing'"),
    "unknown way to bring": (
        in_kernels(holding(Hold("q", fill="post"))),
        "'q' is brought by 'post', which there is not",
    ),
    "carried along no axis": (
        in_stream(holding(Hold("s", "carry"))),
        "'s' is carried along an axis, or stored along none",
    ),
    "carried along another axis": (
        in_stream(holding(Hold("s", "carry", "t1"))),
        "'s' is carried along 't1', which this tile does not walk",
    ),
    "prefetch without steps": (
        in_kernels(holding(Hold("q", fill="prefetch"))),
        "only the steps of a Scan prefetch what they read",
    ),
    "leaf of no kernel": (
        lambda t: t if t.is_kernel or not any(k.is_kernel for k in t.body if isinstance(k, Tile))
        else replace(t, body=(Leaf("o", "o"), *t.body)),
        "plan: leaf 'o' is part of no kernel",
    ),
    "step outside what carries it": (
        in_kernels(step_outside),
        "leaf 'p_max' is a step where a tile carries it along, and only there",
    ),
    "no step where a tile carries": (
        in_stream(lambda t: t.map_leaves(lambda leaf: replace(leaf, part="whole"))),
        "leaf 'p_max' is a step where a tile carries it along, and only there",
    ),
    "unknown part": (
        in_kernels(lambda t: t.map_leaves(lambda leaf: replace(leaf, part="half") if leaf.part == "finish" else leaf)),
        "leaf 'p_max' is a 'half'; it is one of whole, start, step, finish, copy",
    ),
    "no kernel stores an output": (
        in_kernels(holding(Hold("o"))),
        "plan: no kernel stores output 'o'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, streamed: tuple[Program, Plan]) -> None:
    program, plan = streamed
    change, message = REFUSED[name]
    with pytest.raises(InternalError) as caught:
        check_plan(map_tiles(plan, change), program, N1)
    place = "" if message.startswith("plan") else "plan of kernel 'k0': "
    assert str(caught.value) == place + message


def test_what_no_hold_serves_cannot_be_read() -> None:
    """The result of one kernel that another reads, and main memory that does not hold it."""
    program = programs(attention(13, 6), N1)["layout"]
    plan = make_plan(program, N1, "none")
    check_plan(plan, program, N1)
    # stored by a kernel of its own, yet held there alone: it is gone when the next one asks
    lost = map_tiles(plan, lambda t: without("s")(t) if not t.is_kernel else
                     holding(Hold("s"))(t) if t.leaves[-1].tensor == "s" else t)  # fmt: skip
    with pytest.raises(InternalError) as caught:
        check_plan(lost, program, N1)
    assert str(caught.value) == "plan of kernel 'k1': leaf 'p_max' reads 's', and nothing holds it"


LEAVES: dict[str, tuple[dict[str, object], str]] = {
    "unknown core": ({"core": "nothing"}, "leaf 'p' uses unknown tensor 'nothing'"),
    "unknown epilogue": ({"epilogue": ("nothing",)}, "leaf 'p' uses unknown tensor 'nothing'"),
    "sum composed": ({"composed": ("s",)}, "'s' cannot be computed again where it is read: it is no map"),
    "order": ({"order": ("o0", "o1")}, "leaf 'p': order ['o0', 'o1'] is not its axes ['o0', 'o1', 'o2'] once each"),
    "register": ({"register": (("r0", 4),)}, "leaf 'p' has no axis 'r0'; it has o0, o1, o2"),
    "vector": ({"vector": "o7"}, "leaf 'p' has no axis 'o7' to vectorise"),
    "lanes": ({"lanes": 3}, "leaf 'p': 3 lanes; a vector has a power of two"),
    "half a vector": (
        {"register": (("o2", 6),), "vector": "o2", "lanes": 4},
        "leaf 'p': its register tile along o2 is not whole vectors",
    ),
    "passes of a map": (
        {"form": VectorForm(cut=(("r0", 4),))},
        "cut names axis 'r0', which is not one of its 0 r-axes",
    ),
    "unroll": ({"form": VectorForm(unroll=("r1",))}, "unroll names axis 'r1', which is not one of its 0 r-axes"),
    "ahead": (
        {"form": VectorForm(ahead=-1)},
        "leaf 'p': rows prefetch what comes next where the vector is an output axis",
    ),
    "to and fro": ({"alternate": True}, "only the steps of a Scan walk to and fro and rest"),
    "idle": ({"idle": 0}, "only the steps of a Scan walk to and fro and rest"),
}


@pytest.mark.parametrize("name", LEAVES)
def test_leaves_that_are_refused(name: str) -> None:
    program = programs(attention(13, 6), N1)["layout"]
    plan = make_plan(program, N1, "none")
    change, message = LEAVES[name]
    kernel = next(k.name for k in plan.kernels if k.leaves[-1].tensor == "p")
    wrong = map_leaves(plan, lambda leaf: replace(leaf, **change) if leaf.tensor == "p" else leaf)  # type: ignore[arg-type]
    with pytest.raises(InternalError) as caught:
        check_plan(wrong, program, N1)
    assert str(caught.value) == f"plan of kernel '{kernel}': {message}"


@pytest.mark.parametrize(
    ("found", "put", "message"),
    [
        ('"level": "L2"', '"level": "L9"', "the target has no level 'L9'"),
        ('"leaf"', '"twig"', "a plan is made of tiles and leaves, not 'twig'"),
        ('"vector": "', '"wector": "', "unexpected keyword argument 'wector'"),
    ],
)
def test_an_edited_plan_is_the_editors_to_mend(
    found: str, put: str, message: str, tmp_path: Path, kernel_cache: Path
) -> None:
    model = attention(13, 6)
    options = Options(dump=tmp_path, stop_after="plan", cache_dir=kernel_cache)
    tilewright.compile(model, options=options)
    (path,) = tmp_path.glob("*-plan.json")
    text = path.read_text()
    assert found in text
    path.write_text(text.replace(found, put))
    with pytest.raises(OptionError, match=message):
        tilewright.compile(model, options=Options(cache_dir=kernel_cache, overrides=(("plan", path),)))
