"""Fast convolutions: the rewritten Program means the same, its code agrees, and they are chosen where they pay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

import tilewright
from tests.cpu_stages import CPU, error, evaluated, lowered, programs, random_inputs, read_back, run_native
from tilewright.compiler.pipeline import build
from tilewright.frontend.onnx.model import load
from tilewright.ir.analysis.verify import verify_program
from tilewright.ir.forms.compute import Map, Program, Reduce
from tilewright.ir.forms.graph import Part
from tilewright.ir.forms.loops import If, Kernel, Store, statements
from tilewright.ir.text.parse import parse_program
from tilewright.ir.text.text import program_text
from tilewright.lower.unroll import unroll
from tilewright.options import Options
from tilewright.schedule.planner import predicted_seconds
from tilewright.target import machine
from tilewright.transform.bilinear import winograd
from tilewright.transform.bilinear.toom_cook import MATRICES, SIZES, TAPS, WINDOWED, keeps_windows
from tilewright.transform.bilinear.winograd import choose_convolutions, fastest, find_sliding
from tilewright.transform.layout.choose import choose_layouts

# (image, weights, pads, attributes): odd sizes, one-sided pads, batches, channels that fill no vector
SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], list[int]]] = {
    "odd": ((1, 5, 9, 7), (6, 5, 3, 3), [1, 1, 1, 1]),
    "batch, one-sided": ((2, 3, 8, 10), (9, 3, 3, 3), [0, 1, 2, 0]),
    "no pads": ((1, 4, 6, 6), (3, 4, 3, 3), [0, 0, 0, 0]),
    "wide pads": ((1, 2, 5, 4), (4, 2, 3, 3), [2, 2, 2, 2]),
    "lanes": ((1, 16, 12, 8), (16, 16, 3, 3), [1, 1, 1, 1]),
    "long": ((1, 8, 5, 67), (8, 8, 3, 3), [1, 1, 1, 1]),
    "one axis": ((2, 6, 21), (5, 6, 3), [1, 1]),
}


def convolution(
    image: tuple[int, ...], weights: tuple[int, ...], pads: list[int], bias: bool = True, **attributes: object
) -> ModelProto:
    """x -> Relu -> Conv -> Relu: with neighbours, so that layouts are free and something rides along."""
    rng = np.random.default_rng(0)
    scale = 1 / np.sqrt(np.prod(weights[1:]))
    constants = [numpy_helper.from_array((scale * rng.standard_normal(weights)).astype(np.float32), "w")]
    if bias:
        constants.append(numpy_helper.from_array(rng.standard_normal(weights[0]).astype(np.float32), "b"))
    inputs = ["r", "w", "b"] if bias else ["r", "w"]
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("Conv", inputs, ["c"], pads=pads, **attributes),
        helper.make_node("Relu", ["c"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, list(image))
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "convolution", [x], [y], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def folded(model: ModelProto) -> Program:
    return programs(model)["fold"]


def forced(program: Program, m: int, monkeypatch: pytest.MonkeyPatch) -> Program:
    """The Program with all its convolutions as F(m, 3)."""
    monkeypatch.setattr(winograd, "fastest", lambda *_: m)
    result = choose_convolutions(program, lambda _: 0.0)
    verify_program(result)
    return result


@pytest.mark.parametrize("m", SIZES)
def test_matrices_compute_the_correlation(m: int) -> None:
    """Exactly, in fractions: y[u] = sum of d[u + s] g[s]."""
    made = MATRICES[m]
    d = [7 * i * i - 3 * i + 2 for i in range(m + 2)]
    g = [5, -2, 11]
    products = [
        sum(a * b for a, b in zip(row, d, strict=True)) * sum(a * b for a, b in zip(taps, g, strict=True))
        for row, taps in zip(made.input, made.filter, strict=True)
    ]
    for u, row in enumerate(made.output):
        assert sum(a * b for a, b in zip(row, products, strict=True)) == sum(d[u + s] * g[s] for s in range(3))


@pytest.mark.parametrize("m", SIZES)
def test_transforms_hold_no_rounded_coefficient(m: int) -> None:
    made = MATRICES[m]
    for row in (*made.input, *made.output):
        assert all(float(np.float32(float(c))) == c for c in row)


@pytest.mark.parametrize("m", SIZES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rewritten_programs_mean_the_same(shape: str, m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folded(convolution(*SHAPES[shape]))
    fast = forced(program, m, monkeypatch)
    assert any(t.name.endswith("_filters") for t in fast.constants)
    inputs = random_inputs(program)
    wanted = evaluated(program, inputs, wide=True)["y"]
    assert error(evaluated(fast, inputs, wide=True)["y"], wanted) < 1e-6  # the filters are rounded to float32
    assert error(evaluated(fast, inputs)["y"], wanted) < 3e-6


def test_pairs_of_outputs_keep_to_their_windows() -> None:
    assert WINDOWED == (2,)
    assert [keeps_windows(MATRICES[m]) for m in (2, 4)] == [True, False]


# a pixel at every place of a tile of two, and of four, in the middle and at the borders
PLACES = [(6, 6), (6, 7), (7, 6), (7, 7), (8, 9), (0, 0), (0, 11), (11, 5)]


def worst_pixel(found: np.ndarray, wanted: np.ndarray) -> float:
    """The largest relative error of a pixel by itself, over its channels."""
    difference = np.linalg.norm(found.astype(np.float64) - wanted, axis=1)
    return float((difference / np.linalg.norm(wanted, axis=1)).max())


@pytest.mark.parametrize("m", SIZES)
def test_a_large_pixel_leaves_its_neighbours_exact_in_tiles_of_two(m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million times as large as all others. Tiles of four have an error of its size."""
    program = folded(convolution((1, 16, 12, 12), (8, 16, 3, 3), [1, 1, 1, 1], bias=False))
    program = replace(program, outputs=(next(c for c in program.computes if isinstance(c, Reduce)).outputs[0],))
    fast = forced(program, m, monkeypatch)
    errors = []
    for y, x in PLACES:
        inputs = {name: np.abs(array) for name, array in random_inputs(program, seed=y).items()}
        inputs["x"][:, :, y, x] *= 1e6
        wanted = evaluated(program, inputs, wide=True)
        errors += [worst_pixel(a, wanted[n]) for n, a in evaluated(fast, inputs).items()]
    assert max(errors) < 1e-6 if m in WINDOWED else max(errors) > 1e-2


@pytest.mark.sample(2)
@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("rank", [1, 2])
def test_what_is_no_number_stays_in_the_windows_that_hold_it(
    value: float, rank: int, monkeypatch: pytest.MonkeyPatch, kernel_cache: Path
) -> None:
    sizes = (12, 11)[:rank]
    program = folded(convolution((1, 5, *sizes), (6, 5, *[3] * rank), [1] * (2 * rank)))
    made = lowered(choose_layouts(forced(program, 2, monkeypatch), CPU))
    native = made.compiled(kernel_cache)
    inputs = random_inputs(program)
    clean = run_native(native, program, inputs)["y"]
    for place in [(6, 6), (6, 7), (7, 6), (7, 7), (0, 10), (11, 0)]:
        at = place[:rank]
        spoiled = {"x": inputs["x"].copy()}
        spoiled["x"][(0, 2, *at)] = value
        outside = np.ones(clean.shape, bool)
        outside[(slice(None), slice(None), *(slice(max(p - 1, 0), p + 2) for p in at))] = False
        found = run_native(native, program, spoiled)["y"]
        np.testing.assert_array_equal(found[outside], clean[outside])
        assert not np.isfinite(found[~outside]).all()


def growth(m: int) -> float:
    """How far F(m, 3) along both axes magnifies what is rounded between its transforms, for values without correlation:
    the mean over outputs of the squared weights that roundings of products reach them with, a product being one."""
    made = MATRICES[m]
    rows = zip(made.filter, made.input, strict=True)
    sizes = [sum(c * c for c in taps) * sum(c * c for c in values) for taps, values in rows]
    along_one = [sum(a * a * size for a, size in zip(row, sizes, strict=True)) for row in made.output]
    return float(sum(along_one)) / len(along_one) / TAPS


@pytest.mark.parametrize("m, most", [(2, 1.7), (4, 4.8)])
def test_points_let_rounding_grow_little(m: int, most: float) -> None:
    """The direct sum has 3, by its nine times as many products: F(2) is more accurate, F(4) loses less than a digit."""
    assert growth(m) < most


SCHEDULES = ("connected", "register", "none")
# every shape by every size once, the schedules in turn
CODED = [(s, m, SCHEDULES[(i + j) % 3]) for i, s in enumerate(SHAPES) for j, m in enumerate(SIZES)]


@pytest.mark.sample(4)
@pytest.mark.parametrize("shape, m, schedule", CODED)
def test_code_computes_what_the_program_says(
    shape: str, m: int, schedule: str, monkeypatch: pytest.MonkeyPatch, kernel_cache: Path
) -> None:
    program = folded(convolution(*SHAPES[shape]))
    fast = choose_layouts(forced(program, m, monkeypatch), CPU)
    inputs = random_inputs(program, seed=3)
    wanted = evaluated(program, inputs, wide=True)["y"]
    made = lowered(fast, schedule)
    assert error(made.on_loops(inputs)["y"], wanted) < 3e-6
    assert error(made.natively(inputs, kernel_cache)["y"], wanted) < 3e-6


@pytest.mark.parametrize("name", ["neoverse_n1", "emerald_rapids"])
@pytest.mark.parametrize("m", SIZES)
def test_written_out_transforms_choose_nothing_at_run_time(m: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No select on a place within a tile is left, and inside the image no check either."""
    there = machine(name)
    program = folded(convolution((1, 16, 16, 16), (16, 16, 3, 3), [1, 1, 1, 1]))
    made = lowered(choose_layouts(forced(program, m, monkeypatch), there), "register", target=there)
    transforms = [unroll(k) for k in made.loops.kernels if _branches(k)]
    assert len(transforms) == 1, "the input transform alone meets the border"
    for kernel in map(unroll, made.loops.kernels):
        for statement in statements(kernel.body):
            if isinstance(statement, Store):
                assert " == " not in repr(statement.value)
    inside = next(s for s in statements(transforms[0].body) if isinstance(s, If))
    stores = [s for s in statements(inside.then) if isinstance(s, Store)]
    assert len(stores) >= (m + 2) ** 2
    assert not any("select" in repr(s.value) for s in stores)


def _branches(kernel: Kernel) -> bool:
    return any(isinstance(s, If) for s in statements(kernel.body))


def choice(model: ModelProto) -> int:
    program = folded(model)
    found = [s for s in (find_sliding(c, program.constants) for c in program.computes) if s is not None]
    assert len(found) == 1
    return fastest(found[0], program, lambda p: predicted_seconds(p, CPU, "register"))


def test_what_was_chosen_before_is_not_predicted_again() -> None:
    program = folded(convolution((1, 64, 28, 28), (64, 64, 3, 3), [1, 1, 1, 1]))
    asked: list[Program] = []

    def predict(part: Program) -> float:
        asked.append(part)
        return float(len(part.computes))

    known: winograd.Known = {}
    choose_convolutions(program, predict, SIZES, known)
    times = len(asked)
    assert times > 1
    again = choose_convolutions(program, predict, SIZES, known)
    assert len(asked) == times and again is program
    choose_convolutions(program, predict, SIZES[:1], known)
    assert len(asked) > times


def test_many_channels_are_computed_fast() -> None:
    assert choice(convolution((1, 256, 28, 28), (256, 256, 3, 3), [1, 1, 1, 1])) > 0


def test_few_channels_are_summed_directly() -> None:
    assert choice(convolution((1, 3, 64, 64), (16, 3, 3, 3), [1, 1, 1, 1])) == 0


def test_a_tiny_image_is_summed_directly() -> None:
    assert choice(convolution((1, 8, 3, 3), (8, 8, 3, 3), [1, 1, 1, 1])) == 0


OTHERS: dict[str, ModelProto] = {
    "stride 2": convolution((1, 64, 28, 28), (64, 64, 3, 3), [1, 1, 1, 1], strides=[2, 2]),
    "dilation 2": convolution((1, 64, 28, 28), (64, 64, 3, 3), [2, 2, 2, 2], dilations=[2, 2]),
    "grouped": convolution((1, 64, 28, 28), (64, 32, 3, 3), [1, 1, 1, 1], group=2),
    "depthwise": convolution((1, 64, 28, 28), (64, 1, 3, 3), [1, 1, 1, 1], group=64),
    "five taps": convolution((1, 64, 28, 28), (64, 64, 5, 5), [2, 2, 2, 2]),
    "one tap": convolution((1, 64, 28, 28), (64, 64, 1, 1), [0, 0, 0, 0]),
    "one channel": convolution((1, 1, 28, 28), (8, 1, 3, 3), [1, 1, 1, 1]),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_windows_stay_as_they_are(kind: str) -> None:
    program = folded(OTHERS[kind])
    assert choose_convolutions(program, lambda _: 0.0) is program


def test_a_guard_that_says_more_is_left_alone() -> None:
    """A convolution that reads less than its data holds is not the one we know."""
    program = folded(convolution((1, 4, 8, 8), (4, 4, 3, 3), [1, 1, 1, 1]))
    reduce = next(c for c in program.computes if isinstance(c, Reduce))
    assert find_sliding(reduce, program.constants) is not None
    text = program_text(program)
    assert text.count("< 8") == 2
    narrower = parse_program(text.replace("< 8", "< 7", 1), {t.name: a for t, a in program.constants.items()})
    changed = next(c for c in narrower.computes if isinstance(c, Reduce))
    assert find_sliding(changed, narrower.constants) is None


def test_dumps_are_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    program = forced(folded(convolution(*SHAPES["odd"])), 4, monkeypatch)
    again = read_back(program)
    inputs = random_inputs(program)
    np.testing.assert_array_equal(evaluated(again, inputs)["y"], evaluated(program, inputs)["y"])


def tiles(model: ModelProto, way: str, part: Part | None = None, name: str = "neoverse_n1") -> set[int]:
    """The sizes of the tiles of the convolutions that are computed fast."""
    graph = replace(load(model, {}), part=part)
    made = build(graph, machine(name), Options(stop_after="algorithm", convolution=way))
    assert made.program is not None
    products = [c.outputs[0] for c in made.program.computes if c.outputs[0].name.endswith("_products")]
    return {int(t.shape[0]) - TAPS + 1 for t in products}  # type: ignore[call-overload]


@pytest.mark.parametrize("name", ["neoverse_n1", "emerald_rapids_avx512", "avx2_desktop", "apple_arm"])
def test_larger_tiles_are_for_those_who_ask(name: str) -> None:
    """Nor then where pixels beyond those of a run may hold anything."""
    model = convolution((1, 64, 64, 64), (64, 64, 3, 3), [1, 1, 1, 1])
    assert Options().convolution == "auto"
    assert tiles(model, "auto", name=name) <= {*WINDOWED}
    assert tiles(model, "direct", name=name) == set()
    assert tiles(model, "winograd", name=name) == {4}
    assert tiles(model, "winograd", Part(), name) <= {*WINDOWED}


def test_the_option_keeps_sums_direct(kernel_cache: Path) -> None:
    model = convolution((1, 64, 32, 32), (64, 64, 3, 3), [1, 1, 1, 1])
    x = np.random.default_rng(2).standard_normal((1, 64, 32, 32)).astype(np.float32)
    results = {}
    for way in ("winograd", "direct"):
        made = tilewright.compile(model, options=Options(cache_dir=kernel_cache, convolution=way, threads=1))
        assert made.artifact.program is not None
        products = [c for c in made.artifact.program.computes if c.outputs[0].name.endswith("_products")]
        assert not products or way == "winograd"  # where a machine's own instructions are predicted faster, neither
        results[way] = made.run({"x": x})["y"]
    assert error(results["winograd"], results["direct"]) < 2e-5


def test_an_edited_algorithm_is_replayed(tmp_path: Path, kernel_cache: Path) -> None:
    model = convolution((1, 64, 32, 32), (64, 64, 3, 3), [1, 1, 1, 1])
    base = Options(cache_dir=kernel_cache, threads=1)
    first = tilewright.compile(model, options=replace(base, dump=tmp_path))
    file = next(tmp_path.glob("*-algorithm.txt"))
    again = tilewright.compile(model, options=replace(base, overrides=(("algorithm", file),)))
    x = np.random.default_rng(2).standard_normal((1, 64, 32, 32)).astype(np.float32)
    np.testing.assert_array_equal(again.run({"x": x})["y"], first.run({"x": x})["y"])


@pytest.mark.parametrize("m, most", [(2, 9e-7), (4, 3e-6)])
def test_the_error_is_as_stated(m: int, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """512 channels, the largest the docstring speaks of, against float64."""
    program = folded(convolution((1, 512, 8, 8), (8, 512, 3, 3), [1, 1, 1, 1], bias=False))
    fast = forced(program, m, monkeypatch)
    inputs = random_inputs(program, seed=5)
    wanted = evaluated(program, inputs, wide=True)["y"]
    assert error(evaluated(fast, inputs)["y"], wanted) < most


def test_every_map_of_a_rewrite_says_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = forced(folded(convolution(*SHAPES["odd"])), 2, monkeypatch)
    assert all(c.origin for c in fast.computes if isinstance(c, Map | Reduce))


def test_streams_on_the_same_sets_of_the_cache_are_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    """36 streams a power of two apart do not stay in four ways; with ways for all of them they do, and as they are
    stored, an odd number of tiles apart, they do as well."""
    known = machine("neoverse_n1")
    program = folded(convolution((1, 64, 64, 64), (64, 64, 3, 3), [1, 1, 1, 1]))
    fast = choose_layouts(forced(program, 4, monkeypatch), known)
    natural = {t: layout for t, layout in fast.layouts.items() if not t.name.endswith(("_values", "_products"))}
    machines = (known, replace(known, near_ways=64))
    crowded, roomy = (predicted_seconds(replace(fast, layouts=natural), there, "register") for there in machines)
    assert crowded > 1.15 * roomy
    assert predicted_seconds(fast, known, "register") < 1.05 * roomy


@pytest.mark.parametrize("m", SIZES)
@pytest.mark.parametrize("shape", SHAPES)
def test_an_odd_number_of_tiles_lies_between_points(shape: str, m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = forced(folded(convolution(*SHAPES[shape])), m, monkeypatch)
    stored = [layout.storage_shape(t.shape) for t, layout in fast.layouts.items()]
    assert len(stored) == 2  # what is multiplied, and the products
    assert all(int(sizes[-2]) % 2 == 1 for sizes in stored)  # type: ignore[call-overload]
