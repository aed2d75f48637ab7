"""Maps and reductions on a GPU move packets of 16 bytes where memory lies so, and mean what the Program means."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, numpy_helper

from tests.gpu_stages import graph, on_emulator, on_loops, random_inputs
from tests.plans import map_leaves
from tilewright.backend import backend_for
from tilewright.backend.gpu import machine_code
from tilewright.compiler.pipeline import Artifact, build
from tilewright.errors import InternalError
from tilewright.frontend.onnx.model import load
from tilewright.ir.meaning.interpret import evaluate
from tilewright.lower.program import lower_program
from tilewright.options import Options
from tilewright.target import machine
from tilewright.tile_graph.check.kernels import check_plan
from tilewright.tile_graph.plan.form import Tile
from tilewright.tile_graph.plan.leaf_form import ThreadForm
from tilewright.tile_graph.plan.text import plan_text

HALF, FLOAT, BYTE = TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.INT8


def small_device(cache: Path, model: ModelProto, **options: object) -> Artifact:
    """One multiprocessor: few threads keep it busy, so that small tensors are moved as large ones are."""
    target = replace(machine("cuda-emulated"), units=1)
    return build(load(model), target, Options(target="cuda-emulated", cache_dir=cache, **options))


def chain(shape: tuple[int, ...], kind: int = HALF, broadcast: tuple[int, ...] | None = None) -> ModelProto:
    nodes = [("Mul", ["x", "s"], "a", {}), ("Add", ["a", "b"], "c", {}), ("Tanh", ["c"], "y", {})]
    shapes = [("x", shape), ("s", shape[-1:] if broadcast is None else broadcast), ("b", shape)]
    return graph(nodes, shapes, [("y", shape)], dict.fromkeys("xsbacy", kind))


def softmax(shape: tuple[int, ...], kind: int = HALF) -> ModelProto:
    return graph([("Softmax", ["x"], "y", {"axis": -1})], [("x", shape)], [("y", shape)], dict.fromkeys("xy", kind))


def largest(shape: tuple[int, int]) -> ModelProto:
    """A reduction of two states: a value and where it is."""
    kinds = {"x": HALF, "y": TensorProto.INT64}
    return graph([("ArgMax", ["x"], "y", {"axis": 1})], [("x", shape)], [("y", (shape[0], 1))], kinds)


def turned(shape: tuple[int, int, int], perm: list[int], kind: int = HALF) -> ModelProto:
    out = tuple(shape[p] for p in perm)
    nodes = [("Transpose", ["x"], "t", {"perm": perm}), ("Add", ["t", "b"], "y", {})]
    return graph(nodes, [("x", shape), ("b", out)], [("y", out)], dict.fromkeys("xtby", kind))


def mixed(shape: tuple[int, ...]) -> ModelProto:
    """One, two and four bytes an element in one kernel."""
    nodes = [("Cast", ["x"], "a", {"to": FLOAT}), ("Cast", ["n"], "b", {"to": FLOAT}), ("Mul", ["a", "b"], "y", {})]
    kinds = {"x": HALF, "n": BYTE, "a": FLOAT, "b": FLOAT, "y": FLOAT}
    return graph(nodes, [("x", shape), ("n", shape)], [("y", shape)], kinds)


def padded(shape: tuple[int, int]) -> ModelProto:
    """Reads behind a condition are made one by one."""
    nodes = [("Pad", ["x", "pads"], "p", {}), ("Add", ["p", "b"], "y", {})]
    out = (shape[0], shape[1] + 8)
    made = graph(nodes, [("x", shape), ("b", out)], [("y", out)], dict.fromkeys("xpby", HALF))
    from onnx import numpy_helper

    made.graph.initializer.append(numpy_helper.from_array(np.array([0, 3, 0, 5], np.int64), "pads"))
    return made


def rolled(shape: tuple[int, int]) -> ModelProto:
    """Rows from the fourth on before the first three, twice: conditions choose where one tensor is read."""
    from onnx import numpy_helper

    nodes = []
    for number, (source, result) in enumerate((("x", "a"), ("a", "c"))):
        nodes += [("Slice", [source, "three", "end"], f"l{number}", {}), ("Slice", [source, "zero", "three"],
                  f"f{number}", {}), ("Concat", [f"l{number}", f"f{number}"], result, {"axis": 0})]  # fmt: skip
    nodes.append(("Add", ["c", "b"], "y", {}))
    kinds = dict.fromkeys(("x", "b", *(n[2] for n in nodes)), HALF)
    made = graph(nodes, [("x", shape), ("b", shape)], [("y", shape)], kinds)
    for name, value in (("zero", 0), ("three", 3), ("end", shape[0])):
        made.graph.initializer.append(numpy_helper.from_array(np.array([value], np.int64), name))
    return made


# what the last leaf must say: lanes of a packet
CASES: dict[str, tuple[ModelProto, int]] = {
    "half": (chain((32, 64)), 8),
    "float": (chain((16, 64), FLOAT), 4),
    "line with a remainder": (chain((2053,)), 8),
    "rows of a multiple of four": (chain((40, 36)), 4),
    "rows of an odd length": (chain((30, 33)), 1),
    "odd rows that lie alike": (chain((64, 33), HALF, (64, 33)), 8),
    "odd rows with a remainder": (chain((31, 35), HALF, (31, 35)), 8),
    "odd rows in float32": (chain((3, 10, 33), FLOAT, (3, 10, 33)), 4),
    "a factor a row": (chain((32, 64), HALF, (32, 1)), 8),
    "a factor for all": (chain((32, 64), HALF, (1,)), 8),
    "outer axes turned": (turned((6, 8, 64), [1, 0, 2]), 8),
    "inner axes turned": (turned((4, 32, 24), [0, 2, 1]), 8),
    "several widths": (mixed((24, 96)), 4),
    "padded": (padded((40, 64)), 8),
    "rolled": (rolled((40, 64)), 8),
    "softmax": (softmax((24, 64)), 8),
    "softmax of odd rows": (softmax((24, 63)), 1),
    "softmax in float32": (softmax((24, 64), FLOAT), 4),
    "softmax of long rows": (softmax((3, 2048)), 8),  # several warps a row
    "softmax of long rows in float32": (softmax((3, 4096), FLOAT), 4),
    "largest of long rows": (largest((3, 4096)), 8),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CASES)
def test_packets_mean_what_the_program_means(name: str, kernel_cache: Path) -> None:
    model, lanes = CASES[name]
    artifact = small_device(kernel_cache, model)
    assert artifact.plan is not None and artifact.program is not None
    assert artifact.plan.kernels[-1].leaves[-1].lanes == lanes
    inputs = random_inputs(artifact)
    (expected,) = (evaluate(artifact.program, inputs)[t.name] for t in artifact.program.outputs)
    for found in (on_loops(artifact, inputs)["y"], on_emulator(artifact, inputs)["y"]):
        scale = 2e-3 if np.asarray(expected).dtype == np.float16 else 2e-5
        np.testing.assert_allclose(found, expected, rtol=scale, atol=scale)


def test_packets_run_on_over_the_ends_of_rows(kernel_cache: Path) -> None:
    """All is one line where everything lies the same way: whole packets alone, and no element twice."""
    artifact = small_device(kernel_cache, chain((64, 33), HALF, (64, 33)))
    assert artifact.plan is not None and "vector o1 x 8; register []; order o0 o1 flat" in plan_text(artifact.plan)
    (text,) = artifact.sources.values()
    assert "Global<tw::half, 2112>" in text and "% 33" not in text and "copy<8>" in text
    other = small_device(kernel_cache, chain((64, 33), HALF, (33,)))
    assert other.plan is not None and "flat" not in plan_text(other.plan)


def test_whole_packets_are_one_instruction(kernel_cache: Path) -> None:
    (text,) = small_device(kernel_cache, chain((32, 64))).sources.values()
    assert text.count("tw::copy<8>(") == 4  # three operands and the result
    (text,) = small_device(kernel_cache, chain((2053,))).sources.values()
    assert text.count("tw::copy<8>(") == 4 and "else" in text  # and a way for the last elements


def test_several_packets_are_under_way_before_the_first_is_used(kernel_cache: Path) -> None:
    artifact = small_device(kernel_cache, chain((512, 64), HALF, (1,)))
    assert artifact.plan is not None
    leaf = artifact.plan.kernels[0].leaves[0]
    (text,) = artifact.sources.values()
    assert leaf.options(ThreadForm).at_once == 2
    first, last = text.index("turn < 2"), text.rindex("turn < 2")
    assert text.index("tw::copy<8>(", first) < last < text.rindex("tw::tanh")


@pytest.mark.sample(2)
@pytest.mark.parametrize("shape", ((2053,), (40, 36), (30, 33)))
def test_plans_by_hand_are_right_whatever_they_say(shape: tuple[int, ...], kernel_cache: Path) -> None:
    """Lanes and packets at once that the planner would not choose: rows end anywhere, packets begin anywhere."""
    made = small_device(kernel_cache, chain(shape))
    assert made.plan is not None and made.program is not None
    inputs = random_inputs(made)
    (expected,) = (evaluate(made.program, inputs)[t.name] for t in made.program.outputs)
    for lanes, at_once in ((8, 4), (2, 8), (1, 4)):
        form = ThreadForm(at_once=at_once)
        plan = map_leaves(made.plan, lambda leaf, n=lanes, form=form: replace(leaf, lanes=n, form=form))
        check_plan(plan, made.program)
        loops = lower_program(made.program, plan, backend_for(made.target).lower_kernel)
        options = Options(target="cuda-emulated", cache_dir=kernel_cache)
        sources = machine_code.render(loops, made.target)
        runner = machine_code.load(sources, loops, made.program, plan, made.target, options)
        artifact = replace(made, plan=plan, loops=loops, runner=runner)
        np.testing.assert_allclose(on_loops(artifact, inputs)["y"], expected, rtol=2e-3, atol=2e-3)
        np.testing.assert_allclose(on_emulator(artifact, inputs)["y"], expected, rtol=2e-3, atol=2e-3)


def test_a_reduction_has_no_packets_at_once(kernel_cache: Path) -> None:
    made = small_device(kernel_cache, softmax((24, 64)), stop_after="plan")
    assert made.plan is not None and made.program is not None
    plan = map_leaves(made.plan, lambda leaf: leaf.with_options(ThreadForm, at_once=2))
    with pytest.raises(InternalError, match="2 at once"):
        check_plan(plan, made.program)


def test_packets_are_predicted_to_be_faster() -> None:
    """The model sees that a warp asks for sixteen times the bytes, and blocks take what keeps memory busy."""
    target = machine("h200")
    for kind, lanes in ((HALF, 8), (FLOAT, 4)):
        options = Options(target="h200", stop_after="plan")
        even, odd = (build(load(chain((8192, n), kind)), target, options).plan for n in (1024, 1023))
        assert even is not None and odd is not None
        assert [k.leaves[0].lanes for k in (even.kernels[0], odd.kernels[0])] == [lanes, 1]
        assert odd.kernels[0].leaves[0].options(ThreadForm).at_once == 8
        assert even.kernels[0].estimate.seconds < odd.kernels[0].estimate.seconds


def test_exp_is_computed_again_where_rows_come_from_memory() -> None:
    """Holding it would take shared memory and its bandwidth; behind a product it stays where the product lies."""
    from tests.gpu_stages import attention

    def composed(model: ModelProto, name: str) -> list[str]:
        plan = build(load(model), machine(name), Options(target=name, stop_after="plan")).plan
        assert plan is not None
        return [
            leaf.tensor for kernel in plan.kernels for leaf in kernel.leaves if any("exp" in c for c in leaf.composed)
        ]

    rows = softmax((4096, 1024))
    assert composed(rows, "h200") == ["y_sum", "y"]
    assert composed(rows, "neoverse_n1") == composed(attention(384, 64, 12), "h200") == []


def test_weights_of_a_pointwise_convolution_are_moved_in_packets() -> None:
    """Neighbours in memory are neighbours, though dimensions of one element follow them."""
    from tests.gpu_stages import convolution

    model = convolution((1, 64, 28, 28), 128, 1)
    for port in (*model.graph.input, *model.graph.output):
        port.type.tensor_type.elem_type = HALF
    sources = build(load(model), machine("h200"), Options(target="h200", stop_after="source")).sources
    (text,) = (t for t in sources.values() if "mma_float16" in t)
    (name,) = re.findall(r"Global<const tw::half, 128, 64> (\w+)\(", text)
    copies = [line for line in text.splitlines() if f"{name}.at(" in line or f"{name}.apart(" in line]
    assert copies and all("copy_async<8>" in line for line in copies) and f"{name}(" not in text.split(");", 4)[-1]


def test_boxes_that_seldom_begin_with_a_packet_do_without() -> None:
    """Every eighth of images with an odd number of elements begins with a packet: four blocks would move all."""
    options = Options(target="h200", stop_after="plan")
    plan = build(load(chain((32, 37, 41, 37), HALF, (32, 37, 41, 37)), {}), machine("h200"), options).plan
    assert plan is not None and "flat" not in plan_text(plan)
    assert plan.kernels[0].tiles >= machine("h200").units
    long = build(load(chain((8192, 1023), HALF, (8192, 1023)), {}), machine("h200"), options).plan
    assert long is not None and "flat" in plan_text(long)


def test_several_warps_share_long_sums_whichever_way_they_lie() -> None:
    """Columns of 3136 rows, whose neighbours in memory are other columns, as in a pool of channels that lie last."""
    model = graph([("ReduceMean", ["x"], "y", {"axes": [0], "keepdims": 0})], [("x", (3136, 8))], [("y", (8,))],
                  dict.fromkeys("xy", HALF))  # fmt: skip
    artifact = build(load(model), machine("cuda-emulated"), Options(target="cuda-emulated", stop_after="loops"))
    assert artifact.plan is not None and artifact.program is not None
    (leaf,) = artifact.plan.kernels[0].leaves
    assert leaf.options(ThreadForm).split > machine("cuda-emulated").warp and leaf.vector == "o0"
    inputs = random_inputs(artifact)
    (found,) = on_loops(artifact, inputs).values()
    np.testing.assert_allclose(found, evaluate(artifact.program, inputs)["y"], atol=1e-3)


def test_one_thread_takes_a_short_sum() -> None:
    """The ten numbers of a row are few packets; threads that shared them would wait for each other."""
    nodes = [("Mul", ["w", "x"], "p", {}), ("ReduceSum", ["p", "axes"], "y", {"keepdims": 0})]
    model = graph(nodes, [("w", (240, 10)), ("x", (1, 10))], [("y", (240,))], dict.fromkeys("wxpy", HALF))
    model.graph.initializer.append(numpy_helper.from_array(np.array([1]), "axes"))
    plan = build(load(model), machine("h200"), Options(target="cuda", stop_after="plan")).plan
    assert plan is not None and [leaf.options(ThreadForm).split for leaf in plan.kernels[0].leaves] == [1]


@pytest.mark.parametrize(("shape", "perm", "last"), [
    ((2048, 4096), (1, 0), ["o0", "o1"]), ((64, 96, 128), (2, 1, 0), ["o1", "o0", "o2"]),
    ((64, 96, 128), (0, 2, 1), ["o0", "o1", "o2"]), ((96, 64, 128), (1, 0, 2), ["o0", "o1", "o2"]),
])  # fmt: skip
def test_lines_are_stored_whole(shape: tuple[int, ...], perm: tuple[int, ...], last: list[str]) -> None:
    """Where reads and stores lie across each other; what is read beside each other comes before that."""
    nodes = [("Transpose", ["x"], "t", {"perm": perm}), ("Relu", ["t"], "y", {})]
    model = graph(nodes, [("x", shape)], [("y", tuple(shape[p] for p in perm))], dict.fromkeys("xty", FLOAT))
    plan = build(load(model), machine("h200"), Options(target="h200", stop_after="plan")).plan
    assert plan is not None
    assert [list(leaf.order) for leaf in plan.kernels[0].leaves] == [last]


def test_a_map_of_gigabytes_moves_one_packet_a_thread() -> None:
    """Blocks then follow each other through memory; of what a cache holds they may take more."""
    options = Options(target="h200", stop_after="loops")
    artifact = build(load(chain((1 << 20, 1024), FLOAT)), machine("h200"), options)
    assert artifact.plan is not None
    (kernel,) = artifact.plan.kernels
    assert (1 << 30) // kernel.tiles == 256 * 4


def test_threads_share_what_a_step_of_a_stream_has() -> None:
    """Long rows that are walked in blocks of some columns: 256 threads a row would wait for each other at each."""
    from tests.gpu_stages import attention

    plan = build(load(attention(16384, 32, 8)), machine("h200"), Options(target="h200", stop_after="plan")).plan
    assert plan is not None
    streamed = [t for k in plan.kernels for t in k.walk() if isinstance(t, Tile) and "s" in [a.name for a in t.axes]]
    sums = [leaf for tile in streamed for leaf in tile.leaves if leaf.core.endswith(("max", "sum"))]
    assert sums and max(leaf.options(ThreadForm).split for leaf in sums) <= machine("h200").warp


def test_rows_that_are_numbered_anew_are_moved_whole() -> None:
    """Boxes of such rows that do not begin and end with an outer one span many more of them than are read."""
    nodes = [("Transpose", ["x"], "t", {"perm": [1, 0, 2, 3]}), ("Reshape", ["t", "rows"], "r", {}),
             ("Relu", ["r"], "y", {})]  # fmt: skip
    model = graph(nodes, [("x", (256, 8, 512, 256))], [("y", (1 << 20, 256))], dict.fromkeys("xtry", FLOAT))
    model.graph.initializer.append(numpy_helper.from_array(np.array([1 << 20, 256]), "rows"))
    plan = build(load(model), machine("h200"), Options(target="h200", stop_after="plan")).plan
    assert plan is not None
    assert "o1" not in dict(plan.kernels[0].cut)
