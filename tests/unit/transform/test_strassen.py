"""Products by Strassen's algorithm: the rewritten Program means the same, its code agrees, chosen where it pays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

import tilewright
from tests.cpu_stages import CPU, Step, error, evaluated, lowered, model_of, programs, random_inputs, read_back
from tilewright.compiler.pipeline import build
from tilewright.frontend.onnx.model import load
from tilewright.ir.analysis.verify import verify_program
from tilewright.ir.forms.compute import Map, Program, Reduce
from tilewright.ir.forms.graph import Part
from tilewright.options import Options
from tilewright.schedule.planner import predicted_seconds
from tilewright.target import machine
from tilewright.tile_graph.algebra.unswitch import writes_streams
from tilewright.transform.bilinear import strassen
from tilewright.transform.bilinear.strassen import (
    DATA,
    PRODUCTS,
    RESULT,
    WEIGHTS,
    Seconds,
    choose_products,
    find_product,
    worth,
)
from tilewright.transform.layout.choose import choose_layouts
from tilewright.transform.layout.staging import stage_operands

Shape = tuple[int, ...]
N1 = machine("neoverse_n1")


def layer(data: Shape, weights: Shape, operator: str = "MatMul", **attributes: object) -> ModelProto:
    """x -> Relu -> product -> + bias -> Relu: with neighbours, so that layouts are free and something rides along."""
    rng = np.random.default_rng(0)
    columns = weights[0] if operator == "Conv" or attributes.get("transB") else weights[-1]
    sums = int(np.prod(weights)) // columns
    bias = (columns, 1, 1) if operator == "Conv" else (columns,)
    constants = {
        "w": (rng.standard_normal(weights) / np.sqrt(sums)).astype(np.float32),
        "b": np.abs(rng.standard_normal(bias)).astype(np.float32),
    }
    steps: list[Step] = [
        ("Relu", ["x"], "r", {}),
        (operator, ["r", "w"], "c", attributes),
        ("Add", ["c", "b"], "d", {}),
        ("Relu", ["d"], "y", {}),
    ]
    result = (data[0], columns, *data[2:]) if operator == "Conv" else (*data[:-1], columns)
    return model_of(steps, {"x": data}, {"y": result}, constants)


MODELS: dict[str, ModelProto] = {
    "even": layer((8, 12), (12, 16)),
    "odd": layer((9, 7), (7, 11)),
    "odd rows": layer((5, 16), (16, 24)),
    "odd sums": layer((6, 13), (13, 32)),
    "odd columns": layer((6, 16), (16, 9)),
    "one row": layer((1, 10), (10, 14)),
    "one column": layer((6, 10), (10, 1)),
    "batch": layer((3, 10, 8), (8, 20)),
    "lanes": layer((32, 64), (64, 64)),
    "transposed": layer((10, 12), (18, 12), "Gemm", transB=1),
    "window of one": layer((2, 12, 7, 6), (10, 12, 1, 1), "Conv"),
}


def folded(model: ModelProto) -> Program:
    return programs(model, N1)["fold"]


def always_worth_it(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int, int] = (1, 1, 1)) -> None:
    monkeypatch.setattr(strassen, "worth", lambda *_: Seconds((sizes,), 1.0, 2.0))


def forced(program: Program, monkeypatch: pytest.MonkeyPatch) -> Program:
    """The Program with all its products as seven."""
    always_worth_it(monkeypatch)
    result = choose_products(program, lambda _: 0.0)
    verify_program(result)
    return result


def placed(program: Program) -> Program:
    return choose_layouts(stage_operands(program, CPU), CPU)


def test_seven_products_make_four_sums_of_two() -> None:
    """Exactly, in whole numbers."""
    a, b = np.array([[3, -5], [7, 11]]), np.array([[2, 13], [-17, 19]])
    products = [
        sum(s * a[at] for at, s in d.items()) * sum(s * b[at] for at, s in w.items())
        for d, w in zip(DATA, WEIGHTS, strict=True)
    ]
    for at, terms in RESULT.items():
        assert sum(s * products[n] for n, s in terms.items()) == (a @ b)[at]
    assert all(next(iter(terms.values())) == 1 for terms in (*DATA, *WEIGHTS, *RESULT.values()))


@pytest.mark.parametrize("name", MODELS)
def test_rewritten_programs_mean_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folded(MODELS[name])
    fast = forced(program, monkeypatch)
    assert any(t.name.endswith("_strassen_weights") for t in fast.constants)
    inputs = random_inputs(program)
    wanted = evaluated(program, inputs, wide=True)["y"]
    assert error(evaluated(fast, inputs, wide=True)["y"], wanted) < 5e-7  # the weights' sums are rounded to float32
    assert error(evaluated(fast, inputs)["y"], wanted) < 2e-6


SCHEDULES = ("connected", "register", "none")
CODED = [(name, SCHEDULES[i % 3]) for i, name in enumerate(MODELS)]


@pytest.mark.sample(4)
@pytest.mark.parametrize("name, schedule", CODED)
def test_code_computes_what_the_program_says(
    name: str, schedule: str, monkeypatch: pytest.MonkeyPatch, kernel_cache: Path
) -> None:
    program = folded(MODELS[name])
    inputs = random_inputs(program, seed=3)
    wanted = evaluated(program, inputs, wide=True)["y"]
    made = lowered(placed(forced(program, monkeypatch)), schedule)
    assert error(made.on_loops(inputs)["y"], wanted) < 2e-6
    assert error(made.natively(inputs, kernel_cache)["y"], wanted) < 2e-6


def test_products_of_the_same_data_share_its_sums(monkeypatch: pytest.MonkeyPatch, kernel_cache: Path) -> None:
    rng = np.random.default_rng(1)
    weights = {n: rng.standard_normal((12, 16)).astype(np.float32) for n in "uv"}
    steps: list[Step] = [
        ("Relu", ["x"], "r", {}), ("MatMul", ["r", "u"], "a", {}), ("MatMul", ["r", "v"], "b", {}),
        ("Mul", ["a", "b"], "y", {}),
    ]  # fmt: skip
    program = folded(model_of(steps, {"x": (10, 12)}, {"y": (10, 16)}, weights))
    fast = forced(program, monkeypatch)
    assert len([c for c in fast.computes if c.outputs[0].name.endswith("_strassen_sums")]) == 1
    assert len([c for c in fast.computes if c.outputs[0].name.endswith("_strassen_products")]) == 2
    inputs = random_inputs(program)
    wanted = evaluated(program, inputs, wide=True)["y"]
    assert error(lowered(placed(fast)).natively(inputs, kernel_cache)["y"], wanted) < 3e-6


def test_sums_are_written_stream_by_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one stored tensor at a time: no block holds a piece of all seven."""
    program = placed(forced(folded(MODELS["lanes"]), monkeypatch))
    plan = lowered(program, "none").plan
    sums = next(n for k in plan.kernels for n in k.leaves if n.tensor.endswith("_strassen_sums"))
    assert "o0" not in dict(sums.register)
    result = next(c for c in program.computes if isinstance(c, Map) and c.output.name == "c")
    assert not writes_streams({result.axes[0]: 2}, result.value)


OTHERS: dict[str, ModelProto] = {
    "two activations": model_of([("MatMul", ["x", "z"], "y", {})], {"x": (8, 8), "z": (8, 8)}, {"y": (8, 8)}),
    "weights of a batch": model_of(
        [("MatMul", ["x", "w"], "y", {})], {"x": (3, 8, 8)}, {"y": (3, 8, 8)},
        {"w": np.ones((3, 8, 8), np.float32)},
    ),
    "a window": layer((1, 8, 9, 9), (8, 8, 3, 3), "Conv", pads=[1, 1, 1, 1]),
    "every second": layer((1, 8, 9, 9), (8, 8, 1, 1), "Conv", strides=[2, 2]),
    "groups": layer((1, 8, 9, 9), (8, 4, 1, 1), "Conv", group=2),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_other_sums_stay_as_they_are(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folded(OTHERS[kind])
    assert forced(program, monkeypatch) is program


def test_narrow_numbers_stay_as_they_are() -> None:
    options = Options(precision="bfloat16", stop_after="algorithm")
    made = tilewright.compile(layer((256, 1024), (1024, 1024)), options=options)
    assert made.artifact.program is not None
    assert not any("strassen" in t.name for t in made.artifact.program.tensors())


def is_chosen(model: ModelProto) -> bool:
    program = folded(model)
    found = [p for p in (find_product(c, program.constants) for c in program.computes) if p is not None]
    assert len(found) == 1
    return worth(found, (), program, lambda p: predicted_seconds(p, N1, "register")) is not None


def test_large_products_are_done_as_seven() -> None:
    assert is_chosen(layer((512, 1024), (1024, 1024)))


@pytest.mark.parametrize("data, weights", [((512, 64), (64, 64)), ((8, 1024), (1024, 1024)), ((4096, 16), (16, 2048))])
def test_small_ones_are_summed_directly(data: Shape, weights: Shape) -> None:
    assert not is_chosen(layer(data, weights))


def test_a_gain_must_be_worth_it() -> None:
    program = folded(layer((512, 1024), (1024, 1024)))
    found = next(p for p in (find_product(c, program.constants) for c in program.computes) if p is not None)

    def close(tried: Program) -> float:
        return 0.98 if len(tried.computes) > 1 else 1.0

    assert worth([found], (), program, close) is None


def test_dumps_are_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    program = forced(folded(MODELS["odd"]), monkeypatch)
    again = read_back(program)
    inputs = random_inputs(program)
    np.testing.assert_array_equal(evaluated(again, inputs)["y"], evaluated(program, inputs)["y"])


def test_the_option_keeps_sums_direct_and_explain_names_what_was_done(
    kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_worth_it(monkeypatch, (256, 512, 1024))
    model = layer((256, 512), (512, 1024))
    x = np.random.default_rng(2).standard_normal((256, 512)).astype(np.float32)
    results = {}
    for way in ("strassen", "direct"):
        made = tilewright.compile(model, options=Options(cache_dir=kernel_cache, contraction=way, threads=1))
        assert made.artifact.program is not None
        products = [c for c in made.artifact.program.computes if c.outputs[0].name.endswith("_strassen_products")]
        assert len(products) == (1 if way == "strassen" else 0)
        assert ("a product 256 x 512 x 1024 by Strassen's algorithm" in made.explain()) == (way == "strassen")
        results[way] = made.run({"x": x})["y"]
    assert 0 < error(results["strassen"], results["direct"]) < 2e-6


def test_an_edited_algorithm_is_replayed(tmp_path: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    always_worth_it(monkeypatch)
    model = layer((256, 512), (512, 1024))
    base = Options(cache_dir=kernel_cache, threads=1, contraction="strassen")
    first = tilewright.compile(model, options=replace(base, dump=tmp_path))
    file = next(tmp_path.glob("*-algorithm.txt"))
    assert "_strassen_products" in file.read_text()
    again = tilewright.compile(model, options=replace(base, overrides=(("algorithm", file),)))
    x = np.random.default_rng(2).standard_normal((256, 512)).astype(np.float32)
    np.testing.assert_array_equal(again.run({"x": x})["y"], first.run({"x": x})["y"])


@pytest.mark.parametrize("sums, most", [(256, 6e-7), (3072, 2e-6)])
def test_the_error_is_as_stated(sums: int, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    constants = {"w": (rng.standard_normal((sums, 16)) / np.sqrt(sums)).astype(np.float32)}
    program = folded(model_of([("MatMul", ["x", "w"], "y", {})], {"x": (16, sums)}, {"y": (16, 16)}, constants))
    fast = forced(program, monkeypatch)
    inputs = random_inputs(program, seed=5)
    wanted = evaluated(program, inputs, wide=True)["y"]
    assert error(evaluated(fast, inputs)["y"], wanted) < most


def test_every_part_of_a_rewrite_says_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = forced(folded(MODELS["even"]), monkeypatch)
    assert all(c.origin for c in fast.computes if isinstance(c, Map | Reduce))
    assert sum(1 for c in fast.computes if PRODUCTS in c.outputs[0].shape) == 2


def in_seven(model: ModelProto, contraction: str) -> bool:
    made = build(load(model, {}), N1, Options(stop_after="algorithm", contraction=contraction))
    assert made.program is not None
    return any("strassen" in t.name for t in made.program.tensors())


def test_rows_stay_apart_unless_asked_for() -> None:
    """By default a row's error does not depend on its neighbour, and it is a number whatever that one is."""
    assert Options().contraction == "auto"
    rows_are_samples, tokens_of_one = layer((256, 512), (512, 1024)), layer((1, 256, 512), (512, 1024))
    ways = ("auto", "direct", "strassen")
    for model in (rows_are_samples, tokens_of_one):
        assert {way: in_seven(model, way) for way in ways} == {"auto": False, "direct": False, "strassen": True}


def test_rows_that_a_run_may_not_have_are_nobodys_neighbours() -> None:
    """Beyond a count that only the data tells, rows may hold anything: not even where it was asked for."""
    graph = replace(load(layer((1, 256, 512), (512, 1024)), {}), part=Part())
    made = build(graph, N1, Options(stop_after="algorithm", contraction="strassen"))
    assert made.program is not None and not any("strassen" in t.name for t in made.program.tensors())


def chain(readers: int = 1, sizes: tuple[int, int, int] = (10, 12, 16)) -> ModelProto:
    """x -> product -> Relu -> product, the middle also read by others."""
    rng = np.random.default_rng(1)
    rows, outer, inner = sizes
    weights = {n: rng.standard_normal(s).astype(np.float32) for n, s in (("u", (outer, inner)), ("v", (inner, outer)))}
    steps: list[Step] = [("MatMul", ["x", "u"], "a", {}), ("Relu", ["a"], "h", {}), ("MatMul", ["h", "v"], "y", {})]
    results: dict[str, Shape] = {"y": (1, rows, outer)}
    for number in range(1, readers):
        steps.append(("Neg", ["h"], f"z{number}", {}))
        results[f"z{number}"] = (1, rows, inner)
    return model_of(steps, {"x": (1, rows, outer)}, results, weights)


@pytest.mark.parametrize("readers, together", [(1, True), (2, False)])
def test_products_with_maps_between_them_are_decided_together(
    readers: int, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither pays by itself; both do, since what lies between them need not be stored."""
    asked: list[int] = []

    def worth_two(products: list[strassen.WeightedProduct], *_: object) -> Seconds | None:
        asked.append(len(products))
        return Seconds(((1, 1, 1), (2, 2, 2)), 1.0, 2.0) if len(products) == 2 else None

    monkeypatch.setattr(strassen, "worth", worth_two)
    program = folded(chain(readers))
    fast = choose_products(program, lambda _: 0.0)
    assert (2 in asked) == together
    assert len([c for c in fast.computes if c.outputs[0].name.endswith("_strassen_products")]) == 2 * together
    if together:
        assert any("a chain of products 1 x 1 x 1 and 2 x 2 x 2 by Strassen's" in remark for remark in fast.remarks)
        inputs = random_inputs(program)
        wanted = evaluated(program, inputs, wide=True)["y"]
        assert error(evaluated(fast, inputs)["y"], wanted) < 3e-6


def test_a_chain_is_timed_with_what_lies_between() -> None:
    program = folded(chain(sizes=(64, 256, 512)))
    found = [p for p in (find_product(c, program.constants) for c in program.computes) if p is not None]
    between = [c for c in program.computes if isinstance(c, Map)]
    timed: list[Program] = []

    def predict(tried: Program) -> float:
        verify_program(tried)
        timed.append(tried)
        return 0.9 if len(timed) == 2 else 1.0

    assert worth(found, between, program, predict) == Seconds(((64, 256, 512), (64, 512, 256)), 0.9, 1.0)
    direct, seven = timed
    assert direct.computes == program.computes and seven.outputs == direct.outputs == program.outputs
    assert sum(isinstance(c, Reduce) and c.outputs[0].shape[0] == PRODUCTS for c in seven.computes) == 2


def test_a_small_part_of_a_model_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    always_worth_it(monkeypatch)
    rng = np.random.default_rng(1)
    shapes = {"u": (64, 128), "v": (128, 4)}
    weights = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    steps: list[Step] = [("MatMul", ["x", "u"], "a", {}), ("Softmax", ["a"], "h", {}), ("MatMul", ["h", "v"], "y", {})]
    program = folded(model_of(steps, {"x": (1, 40, 64)}, {"y": (1, 40, 4)}, weights))
    fast = choose_products(program, lambda _: 0.0)
    assert len([c for c in fast.computes if c.outputs[0].name.endswith("_strassen_products")]) == 2
    monkeypatch.setattr(strassen, "_LEAST_SHARE", 0.1)
    fast = choose_products(program, lambda _: 0.0)
    assert [c.outputs[0].name for c in fast.computes if "_strassen_products" in c.outputs[0].name] == [
        "a_strassen_products"
    ]


def test_a_chain_through_another_rank_is_predicted() -> None:
    """What lies between two products may have more axes than the first: it is not stored in the first's order."""
    rng = np.random.default_rng(0)
    weights = {f"w{i}": (rng.standard_normal((512, 512)) / 512).astype(np.float32) for i in range(2)}
    weights["shape"] = np.array([2, 64, 512])
    steps: list[Step] = [
        ("Relu", ["x"], "r", {}), ("MatMul", ["r", "w0"], "c", {}), ("Reshape", ["c", "shape"], "s", {}),
        ("Sigmoid", ["s"], "a", {}), ("Mul", ["s", "a"], "g", {}), ("MatMul", ["g", "w1"], "d", {}),
        ("Relu", ["d"], "y", {}),
    ]  # fmt: skip
    program = folded(model_of(steps, {"x": (128, 512)}, {"y": (2, 64, 512)}, weights))
    asked: list[Program] = []

    def predict(part: Program) -> float:
        verify_program(part)
        asked.append(part)
        return 1.0 + predicted_seconds(part, machine("emerald_rapids"), "connected")

    choose_products(program, predict)
    assert any(len(part.computes) > 2 and {t.rank for c in part.computes for t in c.outputs} == {2, 3}
               for part in asked)  # fmt: skip
