"""Known ways to share models out are found without knowing an operator: Megatron's split, data parallel, expert
parallel, rows of convolutions with halos; each computes what one process does."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from onnx import ModelProto, TensorProto

from tests.cpu_stages import model_of
from tests.fuzz.sharded import run_ranks
from tilewright import ops
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.compute import Program
from tilewright.ir.forms.mesh import AxisPart
from tilewright.ir.forms.sharded import Sharded, ShardedCompute
from tilewright.ir.meaning.interpret import evaluate
from tilewright.ir.meaning.interpret_sharded import evaluate_sharded
from tilewright.schedule.cluster.pipeline import share_out
from tilewright.target import Cluster, Link, MemoryLevel, machine
from tilewright.transform.clean.fold import fold_constants

pytest.importorskip("scipy", reason="integer programs are scipy's")

DEVICE = machine("emerald_rapids")
HOST = MemoryLevel("host", 1 << 38, 64, 1e10)
RNG = np.random.default_rng(0)


def cluster(bandwidth: float = 1e11, latency: float = 1e-7, **sizes: int) -> Cluster:
    """Unless said otherwise with links so quick that small models are worth sharing out."""
    return Cluster(DEVICE, HOST, tuple(Link(name, size, bandwidth, latency) for name, size in sizes.items()))


def program_of(model: ModelProto) -> Program:
    return fold_constants(ops.lower(load(model, {})))


def weights(*shape: int) -> np.ndarray:
    return (RNG.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32)


def parts(sharded: Sharded) -> dict[str, AxisPart]:
    """How each tensor lies when it is made, over the only mesh axis."""
    (stage,) = sharded.stages
    return {t.name: s.gives.parts[0] for s in stage.steps if isinstance(s, ShardedCompute) for t in s.compute.outputs}


def exchanged(sharded: Sharded) -> Counter[str]:
    return Counter(step.kind for _, step in sharded.exchanges())


def agrees(sharded: Sharded, weights_share: float | None = None) -> None:
    """By the meaning of the whole, and by every rank's own Program."""
    program = sharded.program
    inputs = {t.name: RNG.standard_normal([int(n) for n in t.shape]).astype(np.float32) for t in program.inputs}  # type: ignore[arg-type]
    right, found = evaluate(program, inputs), evaluate_sharded(sharded, inputs)
    by_ranks, held = run_ranks(sharded, inputs)
    for name, array in right.items():
        scale = float(np.abs(array).max())
        np.testing.assert_allclose(found[name], array, 1e-5, 1e-5 * scale)
        np.testing.assert_allclose(by_ranks[name], array, 1e-5, 1e-5 * scale)
    if weights_share is not None:
        assert max(held.values()) <= weights_share * sum(a.nbytes for a in program.constants.values())


def attention_block(rows: int = 96, width: int = 128, heads: int = 4) -> ModelProto:
    """Attention and two layers behind it, each with what went in added: a block of a transformer without its norms."""
    depth = width // heads
    split = np.array([rows, heads, depth], np.int64)
    joined = np.array([rows, width], np.int64)
    steps = [
        *[("MatMul", ["x", f"w{n}"], f"{n}0", {}) for n in "qkv"],
        *[("Reshape", [f"{n}0", "split"], f"{n}1", {}) for n in "qkv"],
        ("Transpose", ["q1"], "q", {"perm": [1, 0, 2]}), ("Transpose", ["k1"], "k", {"perm": [1, 2, 0]}),
        ("Transpose", ["v1"], "v", {"perm": [1, 0, 2]}), ("MatMul", ["q", "k"], "s", {}),
        ("Softmax", ["s"], "p", {"axis": -1}), ("MatMul", ["p", "v"], "a", {}),
        ("Transpose", ["a"], "b", {"perm": [1, 0, 2]}), ("Reshape", ["b", "joined"], "c", {}),
        ("MatMul", ["c", "wo"], "o", {}), ("Add", ["o", "x"], "r", {}),
        ("MatMul", ["r", "w1"], "h", {}), ("Relu", ["h"], "g", {}), ("MatMul", ["g", "w2"], "z", {}),
        ("Add", ["z", "r"], "y", {}),
    ]  # fmt: skip
    constants = {f"w{n}": weights(width, width) for n in "qkvo"}
    constants |= {"w1": weights(width, 4 * width), "w2": weights(4 * width, width), "split": split, "joined": joined}
    return model_of(steps, {"x": (rows, width)}, {"y": (rows, width)}, constants)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_megatron(ranks: int) -> None:
    """Projections by columns, attention by heads, the first layer by columns, the second by rows of its weights, and
    half of all weights on each of two ranks."""
    program = program_of(attention_block())
    sharded = share_out(program, cluster(2e9, 5e-5, tp=ranks), ["tp"])
    found = parts(sharded)
    for name in ("q0", "k0", "v0", "h", "g"):
        assert found[name] == AxisPart(dim=1), name
    for name in ("s", "p", "a"):
        assert found[name] == AxisPart(dim=0), name
    for name in ("o", "z"):
        assert found[name].operator == "add", name
    kinds = exchanged(sharded)
    assert kinds["all-reduce"] * 2 + kinds["reduce-scatter"] + kinds["all-gather"] + kinds["gather"] <= 5
    agrees(sharded, 1.05 / ranks)


def test_data_parallel() -> None:
    """A batch is cut, and nothing passes but the results."""
    steps = [("MatMul", ["x", "w"], "h", {}), ("Relu", ["h"], "g", {}), ("MatMul", ["g", "v"], "y", {})]
    model = model_of(steps, {"x": (512, 64)}, {"y": (512, 64)}, {"w": weights(64, 384), "v": weights(384, 64)})
    sharded = share_out(program_of(model), cluster(dp=2))
    assert all(part == AxisPart(dim=0) for part in parts(sharded).values())
    assert exchanged(sharded) == {"gather": 1}
    agrees(sharded)


def test_expert_parallel() -> None:
    """Experts that all see all tokens and are added up: each rank has some of them, and one sum is left."""
    experts, tokens, width = 4, 32, 96
    steps = [
        ("Unsqueeze", ["x", "zero"], "t", {}), ("MatMul", ["t", "w"], "h", {}), ("Relu", ["h"], "g", {}),
        ("MatMul", ["g", "v"], "e", {}), ("ReduceSum", ["e", "zero"], "y", {"keepdims": 0}),
    ]  # fmt: skip
    constants = {"w": weights(experts, width, 2 * width), "v": weights(experts, 2 * width, width),
                 "zero": np.array([0], np.int64)}  # fmt: skip
    model = model_of(steps, {"x": (tokens, width)}, {"y": (tokens, width)}, constants)
    sharded = share_out(program_of(model), cluster(tp=2), ["tp"])
    found = parts(sharded)
    assert found["h"] == found["g"] == found["e"] == AxisPart(dim=0)
    assert [part.operator for part in found.values()].count("add") == 1
    assert exchanged(sharded) == {"all-reduce": 1}
    agrees(sharded, 0.51)


def test_rows_of_convolutions_with_halos() -> None:
    """Of one image every rank has some rows, and asks its neighbour for what a window reaches into."""
    steps: list[tuple[str, list[str], str, dict[str, object]]] = []
    for number in range(3):
        steps += [("Conv", [f"x{number}", f"w{number}"], f"c{number}", {"pads": [1, 1, 1, 1]}),
                  ("Relu", [f"c{number}"], f"x{number + 1}", {})]  # fmt: skip
    constants = {f"w{n}": weights(64, 64, 3, 3) for n in range(3)}
    model = model_of(steps, {"x0": (1, 64, 48, 48)}, {"x3": (1, 64, 48, 48)}, constants)
    sharded = share_out(program_of(model), cluster(1e10, rows=2))
    assert {part.dim for part in parts(sharded).values()} <= {2, 3}
    assert exchanged(sharded) == {"halo": 2, "gather": 1}
    agrees(sharded)


def test_rows_of_a_table_are_shared_out() -> None:
    """A table read at the places that data says, and used again as weights, so that a rank has half of each."""
    table = weights(400, 64)
    steps = [("Gather", ["table", "ids"], "x", {}), ("MatMul", ["x", "w"], "h", {}),
             ("MatMul", ["h", "v"], "y", {})]  # fmt: skip
    model = model_of(steps, {"ids": (24,)}, {"y": (24, 400)}, {
        "table": table, "w": weights(64, 64), "v": np.ascontiguousarray(table.T)
    }, {"ids": TensorProto.INT64})  # fmt: skip
    program = program_of(model)
    sharded = share_out(program, cluster(tp=2), ["tp"])
    ids = np.arange(24) * 17 % 400
    right, (found, held) = evaluate(program, {"ids": ids}), run_ranks(sharded, {"ids": ids})
    np.testing.assert_allclose(found["y"], right["y"], 1e-5, 1e-5)
    assert max(held.values()) <= 0.525 * sum(a.nbytes for a in program.constants.values())
