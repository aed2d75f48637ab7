"""Alike computes as one: the merged Program means the same bit for bit, only what may be merged is, and it is merged
where that is predicted to take no longer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, helper

import tilewright
from tests import gpu_stages
from tests.cpu_stages import CPU, error, evaluated, lowered, model_of, programs, random_inputs, read_back
from tilewright.compiler.pipeline import Artifact, build
from tilewright.errors import OptionError
from tilewright.frontend.onnx.model import load
from tilewright.ir.analysis.verify import verify_program
from tilewright.ir.forms.compute import Map, Program, Reduce, Scan, factors, reads
from tilewright.ir.forms.expr import Load
from tilewright.ir.forms.tensor import Layout
from tilewright.ir.meaning.machine import TensorValues
from tilewright.options import Options
from tilewright.target import machine
from tilewright.transform.analysis import analyse
from tilewright.transform.layout.choose import choose_layouts
from tilewright.transform.layout.staging import stage_operands
from tilewright.transform.merge.alike import MergeGroup
from tilewright.transform.merge.concatenate import Joiner
from tilewright.transform.merge.horizontal import Predict, merge_alike

RNG = np.random.default_rng(3)


def weights(*shape: int) -> np.ndarray:
    return (RNG.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)


def projections(widths: tuple[int, ...], rows: int = 5, inner: int = 12, bias: bool = True, transposed: str = "",
                given: str = "x") -> ModelProto:  # fmt: skip
    """Products of one x, each then squashed, so that no result of the model is a product itself. A letter of
    `transposed` t: that product's weights are stored the other way round."""
    steps, arrays, outputs = [], {}, {}
    for n, width in enumerate(widths):
        turned = n < len(transposed) and transposed[n] == "t"
        arrays[f"w{n}"] = weights(width, inner) if turned else weights(inner, width)
        if turned:
            steps.append(("Gemm", [given, f"w{n}"], f"p{n}", {"transB": 1}))
        else:
            steps.append(("MatMul", [given, f"w{n}"], f"p{n}", {}))
        if bias:
            arrays[f"b{n}"] = weights(width)
            steps.append(("Add", [f"p{n}", f"b{n}"], f"s{n}", {}))
        steps.append(("Tanh", [f"s{n}" if bias else f"p{n}"], f"t{n}", {}))
        steps.append(("Mul", [f"t{n}", f"t{n}"], f"y{n}", {}))
        outputs[f"y{n}"] = (rows, width)
    return model_of(steps, {"x": (rows, inner)}, outputs, arrays)


def attention(length: int = 6, width: int = 12, heads: int = 3, kept: int = 3) -> ModelProto:
    """An attention block; with fewer heads `kept` for K and V, each is read by several heads of Q."""
    size = width // heads
    wide, narrow = heads * size, kept * size
    arrays = {"wq": weights(width, wide), "wk": weights(width, narrow), "wv": weights(width, narrow),
              "bq": weights(wide), "bk": weights(narrow), "bv": weights(narrow), "wo": weights(wide, width),
              "q_shape": np.array([1, length, kept, heads // kept, size]),
              "k_shape": np.array([1, length, kept, 1, size]), "o_shape": np.array([1, length, wide])}  # fmt: skip
    steps = []
    for t, shape, order in (("q", "q_shape", (0, 2, 3, 1, 4)), ("k", "k_shape", (0, 2, 3, 4, 1)),
                            ("v", "k_shape", (0, 2, 3, 1, 4))):  # fmt: skip
        steps += [("MatMul", ["x", f"w{t}"], f"{t}p", {}), ("Add", [f"{t}p", f"b{t}"], f"{t}s", {}),
                  ("Reshape", [f"{t}s", shape], f"{t}r", {}), ("Transpose", [f"{t}r"], t, {"perm": order})]  # fmt: skip
    steps += [("MatMul", ["q", "k"], "s", {}), ("Softmax", ["s"], "a", {"axis": -1}), ("MatMul", ["a", "v"], "c", {}),
              ("Transpose", ["c"], "ct", {"perm": [0, 3, 1, 2, 4]}), ("Reshape", ["ct", "o_shape"], "cr", {}),
              ("MatMul", ["cr", "wo"], "y", {})]  # fmt: skip
    return model_of(steps, {"x": (1, length, width)}, {"y": (1, length, width)}, arrays)


def experts(batch: int = 3, count: int = 4, tasks: int = 2, layers: int = 1) -> ModelProto:
    """Experts of one or more layers and a gate a task, all of one input."""
    arrays: dict[str, np.ndarray] = {"axes": np.array([1]), "last": np.array([2])}
    steps, stacked, outputs = [], [], {}
    for n in range(count):
        before, width = "x", 10
        for layer in range(layers):
            arrays |= {f"w{n}_{layer}": weights(8, width), f"b{n}_{layer}": weights(8)}
            steps += [("Gemm", [before, f"w{n}_{layer}", f"b{n}_{layer}"], f"e{n}_{layer}", {"transB": 1}),
                      ("Relu", [f"e{n}_{layer}"], f"r{n}_{layer}", {})]  # fmt: skip
            before, width = f"r{n}_{layer}", 8
        steps.append(("Unsqueeze", [before, "axes"], f"u{n}", {}))
        stacked.append(f"u{n}")
    steps.append(("Concat", stacked, "experts", {"axis": 1}))
    for task in range(tasks):
        arrays |= {f"g{task}": weights(10, count), f"v{task}": weights(8, 5)}
        steps += [("MatMul", ["x", f"g{task}"], f"l{task}", {}), ("Softmax", [f"l{task}"], f"p{task}", {"axis": -1}),
                  ("Unsqueeze", [f"p{task}", "last"], f"q{task}", {}), ("Mul", [f"q{task}", "experts"], f"m{task}", {}),
                  ("ReduceSum", [f"m{task}", "axes"], f"h{task}", {"keepdims": 0}),
                  ("MatMul", [f"h{task}", f"v{task}"], f"y{task}", {})]  # fmt: skip
        outputs[f"y{task}"] = (batch, 5)
    return model_of(steps, {"x": (batch, 10)}, outputs, arrays)


def branches(channels: tuple[int, ...] = (5, 8, 3), rows: int = 7, window: int = 1) -> ModelProto:
    """Convolutions of one image beside each other, then concatenated; one of them goes on."""
    arrays, steps = {}, []
    pads = [window // 2] * 4
    for n, width in enumerate(channels):
        arrays |= {f"w{n}": weights(width, 6, window, window), f"b{n}": weights(width)}
        steps += [("Conv", ["x", f"w{n}", f"b{n}"], f"c{n}", {"pads": pads}), ("Relu", [f"c{n}"], f"r{n}", {})]
    arrays["w"] = weights(4, sum(channels), 3, 3)
    steps += [("Concat", [f"r{n}" for n in range(len(channels))], "all", {"axis": 1}),
              ("Conv", ["all", "w"], "y", {"pads": [1, 1, 1, 1]})]  # fmt: skip
    return model_of(steps, {"x": (1, 6, rows, rows)}, {"y": (1, 4, rows, rows)}, arrays)


def groups(count: int = 4, inside: int = 3, outside: int = 2, rows: int = 6) -> ModelProto:
    """A grouped convolution as it was before frameworks had one: split, convolve, concatenate."""
    arrays = {f"w{n}": weights(outside, inside, 3, 3) for n in range(count)}
    arrays |= {f"b{n}": weights(outside) for n in range(count)}
    arrays["w"] = weights(5, count * outside, 1, 1)
    nodes = [helper.make_node("Split", ["x"], [f"x{n}" for n in range(count)], name="split", axis=1)]
    for n in range(count):
        nodes += [helper.make_node("Conv", [f"x{n}", f"w{n}", f"b{n}"], [f"c{n}"], name=f"conv{n}", pads=[1, 1, 1, 1]),
                  helper.make_node("Relu", [f"c{n}"], [f"r{n}"], name=f"relu{n}")]  # fmt: skip
    nodes.append(helper.make_node("Concat", [f"r{n}" for n in range(count)], ["all"], name="concat", axis=1))
    nodes.append(helper.make_node("Conv", ["all", "w"], ["y"], name="mix"))
    model = model_of([], {"x": (1, count * inside, rows, rows)}, {"y": (1, 5, rows, rows)}, arrays)
    model.graph.node.extend(nodes)
    return model


CASES: dict[str, tuple[Callable[[], ModelProto], int]] = {
    "three projections": (lambda: projections((8, 8, 8)), 1),
    "of different widths": (lambda: projections((16, 4, 4)), 1),
    "of odd widths": (lambda: projections((5, 7, 1), rows=3, inner=11), 1),
    "stored both ways": (lambda: projections((6, 9, 4), transposed="t-t"), 1),
    "without biases": (lambda: projections((6, 9), bias=False), 1),
    "of a row": (lambda: projections((6, 9, 4), rows=1), 1),
    "attention": (attention, 2),
    "attention with few keys": (lambda: attention(heads=6, width=24, kept=2), 2),
    "experts and gates": (experts, 2),
    "experts of two layers": (lambda: experts(layers=2), 3),
    "branches": (branches, 2),
    "branches with windows": (lambda: branches((4, 4), window=3), 2),
    "groups": (groups, 2),
    "groups of one channel": (lambda: groups(3, 1, 1), 2),
}  # fmt: skip


def always(program: Program) -> Program:
    return merge_alike(program, None, lambda _: {})


def products(program: Program) -> list[Reduce]:
    """Sums over weights."""
    return [c for c in program.computes if isinstance(c, Reduce) and factors(c)
            and any(isinstance(f, Load) and f.source in program.constants for f in factors(c))]  # fmt: skip


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CASES)
def test_merged(name: str, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As few products as can be, the same bits from the interpreter, and code that agrees."""
    # sums in the order that the Program gives: a library's product has one of its own for every shape
    monkeypatch.setattr(TensorValues, "_product", lambda *_: None)
    make, count = CASES[name]
    folded = programs(make())["fold"]
    merged = always(folded)
    verify_program(merged)
    assert len(products(merged)) == count < len(products(folded))
    inputs = random_inputs(folded)
    before, after = evaluated(folded, inputs), evaluated(read_back(merged), inputs)
    for key, array in before.items():
        np.testing.assert_array_equal(array, after[key])
    final = choose_layouts(stage_operands(merged, CPU), CPU)
    made = lowered(final)
    expected = evaluated(folded, inputs, wide=True)
    for found in (made.on_loops(inputs), made.natively(inputs, kernel_cache)):
        assert all(error(found[key], expected[key]) < 1e-5 for key in expected)


@pytest.mark.parametrize("machine_name", ["neoverse_n1", "emerald_rapids"])
def test_slices_of_a_stored_tensor(machine_name: str) -> None:
    """A kernel that reads a slice of what others read too leaves the rest of it written all the same."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["p"], name="product"),
             helper.make_node("Tanh", ["p"], ["t"], name="tanh"),
             helper.make_node("Split", ["t"], ["a", "b", "c"], name="split", axis=1)]  # fmt: skip
    model = model_of([], {"x": (5, 12)}, {"a": (5, 8), "b": (5, 8), "c": (5, 8)}, {"w": weights(12, 24)})
    model.graph.node.extend(nodes)
    target = machine(machine_name)
    program = choose_layouts(programs(model)["fold"], target)
    inputs = random_inputs(program)
    expected = evaluated(program, inputs, wide=True)
    found = lowered(program, target=target).on_loops(inputs)
    assert all(error(found[key], expected[key]) < 1e-5 for key in expected)


# --- what is not merged


def unlike() -> dict[str, ModelProto]:
    """Pairs of products of which none can be merged."""
    w, v = weights(8, 8), weights(8, 8)
    shapes = {"x": (4, 8)}, {"y": (4, 8)}
    after = [("MatMul", ["x", "w"], "a", {}), ("MatMul", ["a", "v"], "b", {}), ("Add", ["a", "b"], "y", {})]
    both = [("MatMul", ["x", "w"], "a", {}), ("MatMul", ["z", "v"], "b", {}), ("Add", ["a", "b"], "y", {})]
    among = [("Tanh", ["x"], "z", {}), ("MatMul", ["x", "w"], "a", {}), ("MatMul", ["z", "v"], "b", {}),
             ("Add", ["a", "b"], "y", {})]  # fmt: skip
    turned = [("Transpose", ["x"], "z", {"perm": [1, 0]}), ("MatMul", ["x", "w"], "a", {}),
              ("MatMul", ["z", "v"], "b", {}), ("Add", ["a", "b"], "y", {})]  # fmt: skip
    square = {"x": (8, 8)}, {"y": (8, 8)}
    return {
        "one after the other": model_of(after, *shapes, {"w": w, "v": v}),
        "different inputs": model_of(both, {"x": (4, 8), "z": (4, 8)}, {"y": (4, 8)}, {"w": w, "v": v}),
        "another function of the input": model_of(among, *shapes, {"w": w, "v": v}),
        "the input read another way": model_of(turned, *square, {"w": w, "v": v}),
        "weights that are data": model_of([both[0], ("MatMul", ["x", "v"], "b", {}), both[2]],
                                          {"x": (4, 8), "w": (8, 8), "v": (8, 8)}, {"y": (4, 8)}, {}),
    }  # fmt: skip


@pytest.mark.parametrize("name", unlike())
def test_not_merged(name: str) -> None:
    folded = programs(unlike()[name])["fold"]
    assert always(folded) is folded


@pytest.mark.parametrize("name", CASES)
def test_members_are_independent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No member of a group waits for another, on whatever way."""
    folded = programs(CASES[name][0]())["fold"]
    facts = analyse(folded)
    groups: list[MergeGroup] = []
    join = Joiner.join
    monkeypatch.setattr(Joiner, "join", lambda self, group: (groups.append(group), join(self, group))[1])
    always(folded)
    assert groups
    for group in groups:
        for one, other in combinations(group.members, 2):
            assert facts.independent(one.place, other.place)


# --- the choice


def test_refused_where_it_is_predicted_to_be_slower() -> None:
    folded = programs(projections((8, 8, 8)))["fold"]
    fewest = len(always(folded).computes)

    def predicting(together: float, kernels: int) -> Predict:
        return lambda part, _: (1.0, 3) if len(products(part)) > 1 else (together, kernels)

    for slower in (predicting(1.01, 1), predicting(0.99, 3), predicting(1.0, 3)):
        assert merge_alike(folded, slower, lambda _: {}) is folded
    for faster in (predicting(1.0, 2), predicting(0.9, 3)):
        assert len(merge_alike(folded, faster, lambda _: {}).computes) == fewest


def test_of_ways_that_are_near_each_other_the_one_with_known_constants_is_taken() -> None:
    """Forms of a model that share their weights had better merge the same ones."""
    folded = programs(projections((8, 8, 8)))["fold"]
    merged = always(folded)
    (joined,) = (t for t in merged.constants if t.rank > 1 and t not in folded.constants)
    packed = {joined.name: Layout.natural(joined.rank)}

    def predicting(together: float) -> Predict:
        return lambda part, _: (1.0, 3) if len(products(part)) > 1 else (together, 3)

    assert merge_alike(folded, predicting(1.03), lambda _: {}) is folded
    assert joined.name in {t.name for t in merge_alike(folded, predicting(1.03), lambda _: {}, packed).constants}
    assert merge_alike(folded, predicting(1.2), lambda _: {}, packed) is folded
    apart = {t.name: Layout.natural(t.rank) for t in folded.constants if t.rank > 1}
    assert merge_alike(folded, predicting(0.97), lambda _: {}, apart) is folded


def test_equal_groups_are_judged_once() -> None:
    steps, arrays = [], {}
    for layer in range(6):
        given = f"y{layer - 1}" if layer else "x"
        for n in range(3):
            arrays[f"w{layer}{n}"] = weights(8, 8)
            steps.append(("MatMul", [given, f"w{layer}{n}"], f"p{layer}{n}", {}))
        steps += [("Add", [f"p{layer}0", f"p{layer}1"], f"a{layer}", {}),
                  ("Add", [f"a{layer}", f"p{layer}2"], f"y{layer}", {})]  # fmt: skip
    folded = programs(model_of(steps, {"x": (4, 8)}, {"y5": (4, 8)}, arrays))["fold"]
    asked: list[Program] = []

    def predict(program: Program, connecting: bool) -> tuple[float, int]:
        asked.append(program)
        return 1.0, len(products(program))

    merged = merge_alike(folded, predict, lambda _: {})
    assert len(products(merged)) == 6
    # the first reads an input and the last gives an output: three kinds of neighbourhoods, each apart and in two ways
    assert len(asked) <= 9


def copies(artifact: Artifact) -> list[str]:
    """Kernels that only move data."""
    assert artifact.plan is not None and artifact.program is not None
    made = {t.name: c for c in artifact.program.computes for t in c.outputs}
    found = []
    for kernel in artifact.plan.kernels:
        cores = [made[n.core] for n in kernel.leaves]
        if all(isinstance(c, Map) and isinstance(c.value, Load) and not n.epilogue
               for c, n in zip(cores, kernel.leaves, strict=True)):  # fmt: skip
            found.append(kernel.name)
    return found


MACHINES = ("neoverse_n1", "emerald_rapids", "avx2_desktop", "h200")


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("kept", [12, 4])
def test_projections_of_attention_are_one_product(name: str, kept: int) -> None:
    """Q, K and V are one product in the plan, nothing is copied, and attention is connected as before."""
    graph = load(attention(128, 768, 12, kept), {})
    # directly: a product by Strassen's algorithm has sums before it and after it
    on, off = (build(graph, machine(name), Options(merging=merging, contraction="direct", stop_after="plan"))
               for merging in ("auto", "off"))  # fmt: skip
    assert on.program is not None and off.program is not None and on.plan is not None and off.plan is not None
    assert (len(products(off.program)), len(products(on.program))) == (4, 2)
    assert len(on.plan.kernels) < len(off.plan.kernels)
    assert not copies(on)
    assert seconds(on) <= seconds(off)


def seconds(artifact: Artifact) -> float:
    assert artifact.plan is not None
    return sum(k.estimate.seconds for k in artifact.plan.kernels)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MACHINES)
def test_groups_are_one_convolution(name: str) -> None:
    """Split, convolve and concatenate gives the plan of a grouped convolution: nothing is split or put together."""
    graph = load(groups(16, 8, 8, 14), {})
    made = build(graph, machine(name), Options(stop_after="plan"))
    assert made.program is not None and len(products(made.program)) == 2
    assert not copies(made)


def test_off_leaves_the_model_as_it_is() -> None:
    graph = load(attention(64, 64, 2, 2), {})
    made = build(graph, machine("h200"), Options(merging="off", stop_after="merge"))
    assert made.program is not None and len(products(made.program)) == 4
    made = build(graph, machine("h200"), Options(stop_after="merge"))
    assert made.program is not None and len(products(made.program)) == 2
    with pytest.raises(OptionError, match="merging cannot be 'always': it is one of auto, off"):
        Options(merging="always")


# --- whole graphs


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["of odd widths", "attention with few keys", "experts of two layers", "groups"])
def test_agrees_with_onnx_runtime(name: str, kernel_cache: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model = CASES[name][0]()
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(1)
    inputs = {v.name: rng.standard_normal(v.shape).astype(np.float32) for v in session.get_inputs()}
    compiled = tilewright.compile(model, options=Options(cache_dir=kernel_cache, verify=True))
    for found, expected in zip(compiled(inputs), session.run(None, inputs), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["attention", "attention with few keys", "branches", "groups"])
def test_on_a_gpu(name: str, kernel_cache: Path) -> None:
    model = CASES[name][0]()
    made = gpu_stages.compiled(model, "connected", kernel_cache, stop_after="loops")
    folded = programs(model)["fold"]
    assert made.program is not None and len(products(made.program)) < len(products(folded))
    inputs = random_inputs(folded)
    expected = evaluated(folded, inputs, wide=True)
    found = gpu_stages.on_loops(made, inputs)
    assert all(error(found[key], expected[key]) < 1e-5 for key in expected)


# --- recurrences


def directions(steps: int = 5, width: int = 6, hidden: int = 4) -> ModelProto:
    """An LSTM both ways: two projections of one sequence."""
    arrays = {"w": weights(2, 4 * hidden, width), "r": weights(2, 4 * hidden, hidden), "b": weights(2, 8 * hidden)}
    node = helper.make_node("LSTM", ["x", "w", "r", "b"], ["y"], name="both", direction="bidirectional",
                            hidden_size=hidden)  # fmt: skip
    model = model_of([], {"x": (steps, 1, width)}, {"y": (steps, 2, 1, hidden)}, arrays)
    model.graph.node.append(node)
    return model


def gates_in_a_loop(steps: int = 5, width: int = 6) -> ModelProto:
    """A Scan whose body multiplies its state by three matrices of its own."""
    arrays = {f"w{n}": weights(width, width) for n in range(3)}
    nodes = [helper.make_node("MatMul", ["h", f"w{n}"], [f"p{n}"], name=f"gate{n}") for n in range(3)]
    nodes += [helper.make_node("Sigmoid", ["p0"], ["z"]), helper.make_node("Tanh", ["p1"], ["t"]),
              helper.make_node("Mul", ["z", "t"], ["m"]), helper.make_node("Add", ["m", "p2"], ["a"]),
              helper.make_node("Add", ["a", "v"], ["s"]), helper.make_node("Tanh", ["s"], ["n"]),
              helper.make_node("Identity", ["n"], ["o"])]  # fmt: skip
    value = helper.make_tensor_value_info
    body = helper.make_graph(nodes, "body", [value("h", 1, [1, width]), value("v", 1, [1, width])],
                             [value("n", 1, [1, width]), value("o", 1, [1, width])])  # fmt: skip
    scan = helper.make_node("Scan", ["h0", "x"], ["last", "y"], name="loop", body=body, num_scan_inputs=1)
    model = model_of([], {"h0": (1, width), "x": (steps, 1, width)}, {"last": (1, width), "y": (steps, 1, width)},
                     arrays)  # fmt: skip
    model.graph.node.append(scan)
    return model


@pytest.mark.parametrize(("make", "before", "after"), [(directions, 4, 3), (gates_in_a_loop, 3, 1)])
def test_recurrences(make: Callable[[], ModelProto], before: int, after: int, kernel_cache: Path) -> None:
    """Projections that Scans read, and products inside a body: the bodies read slices, nothing is copied for them."""
    folded = programs(make())["fold"]
    merged = always(folded)
    verify_program(merged)

    def sums(program: Program) -> int:
        bodies = [c for s in program.computes if isinstance(s, Scan) for c in s.body]
        return sum(bool(factors(c)) for c in (*program.computes, *bodies))

    assert (sums(folded), sums(merged)) == (before, after)
    moving = [c for c in merged.computes if isinstance(c, Map) and c.output not in merged.outputs]
    read = {t for c in merged.computes if isinstance(c, Scan) for t in reads(c)}
    assert not any(c.output in read and isinstance(c.value, Load) for c in moving)
    inputs = random_inputs(folded)
    expected = evaluated(folded, inputs, wide=True)
    found = [evaluated(read_back(merged), inputs), lowered(choose_layouts(merged, CPU)).natively(inputs, kernel_cache)]
    for results in found:
        assert all(error(results[key], expected[key]) < 1e-5 for key in expected)
