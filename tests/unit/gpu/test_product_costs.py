"""What products on tensor cores are predicted to cost beside each other, and loads that conditions choose between."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.cpu_stages import model_of
from tests.gpu_stages import compiled, on_emulator, random_inputs
from tilewright.backend.gpu.kernel.tile import _step_cost
from tilewright.backend.gpu.maps.packets import chosen_places
from tilewright.backend.gpu.matrix.cost import BlockedProduct, fragments_for
from tilewright.backend.gpu.matrix.plan import of_equal_warps
from tilewright.backend.gpu.threads.nest import quick_erf
from tilewright.compiler.pipeline import build
from tilewright.frontend.onnx.model import load
from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms.compute import Reduce, plain_monoid
from tilewright.ir.forms.dtypes import float16, float32
from tilewright.ir.forms.expr import Axis, Load, cast, const, is_op, lt, op, select, substitute, var
from tilewright.ir.forms.expr import load as element
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.meaning.interpret import evaluate
from tilewright.options import Options
from tilewright.target import machine
from tilewright.tile_graph.algebra.nest import build_nest
from tilewright.tile_graph.algebra.propagate import Range, whole
from tilewright.tile_graph.plan.form import Leaf, Tile


def product(rows: int, columns: int, work: int) -> BlockedProduct:
    return BlockedProduct(rows, columns, 1, 768, 96, (0, 0), False, (True, False), 8, work)


def test_long_epilogues_go_to_many_warps() -> None:
    """Four warps of 96 elements each have their schedulers to themselves; twelve of 32 keep them busy."""
    target = machine("h200")

    def cycles(rows: int, columns: int, work: int) -> float:
        found = fragments_for(target, "mma_float16", product(rows, columns, work))
        assert found is not None
        return found[1].alone

    few, many = ((64, 192), (192, 64))
    assert cycles(*many, 48) < 0.8 * cycles(*few, 48)
    assert cycles(*many, 48) - cycles(*many, 0) < 0.5 * (cycles(*few, 48) - cycles(*few, 0))


def test_products_of_a_kernel_are_by_as_many_warps() -> None:
    target = machine("h200")
    pair = (("mma_float16", product(32, 384, 48)), ("mma_float16", product(32, 96, 3)))
    apart = [fragments_for(target, *each) for each in pair]
    found = of_equal_warps(target, pair)
    assert found is not None and len({way.warps for way, _ in found}) == 1
    assert sum(cost.alone for _, cost in found) >= sum(each[1].alone for each in apart if each is not None)


def test_conditions_choose_places() -> None:
    """Between elements of one tensor, however many conditions there are; between two tensors they stay."""
    x, y = Tensor("x", (4, 8), float32), Tensor("y", (4, 8), float32)
    i = Axis("i", 24)
    first, last = element(x, (0, var(i))), element(x, (1, var(i) - 16))
    chosen = chosen_places(select(lt(var(i), 8), first, select(lt(var(i), 16), element(x, (3, var(i) - 8)), last)))
    assert isinstance(chosen, Load) and chosen.source is x
    for at, place in ((0, (0, 0)), (9, (3, 1)), (23, (1, 7))):
        assert [simplify(substitute(n, {i: const(at)})) for n in chosen.indices] == [const(n) for n in place]
    apart = select(lt(var(i), 8), first, element(y, (0, var(i))))
    assert chosen_places(apart) is apart


@pytest.mark.sample(2)
@pytest.mark.parametrize("group", [64, 16], ids=["depthwise", "grouped"])
def test_weights_that_threads_read_by_themselves_lie_beside_each_other(group: int, tmp_path: Path) -> None:
    """Neighbouring threads have neighbouring channels, which products beside the convolution leave innermost."""
    rng = np.random.default_rng(0)
    sizes = {"u": (64, 5, 1, 1), "w": (64, 64 // group, 3, 3), "v": (6, 64, 1, 1)}
    weights = {name: rng.standard_normal(size).astype(np.float32) for name, size in sizes.items()}
    steps = [
        ("Conv", ["x", "u"], "a", {}),
        ("Relu", ["a"], "b", {}),
        ("Conv", ["b", "w"], "c", {"group": group, "pads": [1, 1, 1, 1]}),
        ("Relu", ["c"], "d", {}),
        ("Conv", ["d", "v"], "y", {}),
    ]
    model = model_of(steps, {"x": (1, 5, 40, 23)}, {"y": (1, 6, 40, 23)}, weights)
    artifact = compiled(model, "register", tmp_path)
    assert artifact.plan is not None and artifact.program is not None
    leaves = {leaf.tensor: leaf for kernel in artifact.plan.kernels for leaf in kernel.leaves}
    assert leaves["d"].vector == "o1"
    assert dict(artifact.plan.layouts)["w"].order[-1].axis == 0
    given = random_inputs(artifact)
    wanted = evaluate(artifact.program, given)
    np.testing.assert_allclose(on_emulator(artifact, given)["y"], wanted["y"], rtol=1e-4, atol=1e-4)


def test_erf_of_a_quotient_by_a_number_is_of_a_product() -> None:
    x = Tensor("x", (8,), float32)
    node = element(x, (var(Axis("i", 8)),))
    (inside,) = quick_erf(op("erf", op("div", node, const(2**0.5, float32)))).args
    assert is_op(inside, "mul") and inside.args[0] is node
    exact = op("div", node, const(2**0.5, float32))
    assert quick_erf(exact) is exact


def test_windows_cost_the_lines_that_threads_touch() -> None:
    """A box of eight channels has 16 bytes of each line that a warp reads."""
    n, c, i, j = (Axis(name, size) for name, size in zip("ncij", (32, 144, 56, 56), strict=True))
    r, s = Axis("r", 3), Axis("s", 3)
    x, w = Tensor("x", (32, 144, 58, 58), float16), Tensor("w", (144, 3, 3), float16)
    read = element(x, (var(n), var(c), var(i) + var(r), var(j) + var(s)))
    term = cast(read, float32) * cast(element(w, (var(c), var(r), var(s))), float32)
    result = Tensor("y", (32, 144, 56, 56), float32)
    nest = build_nest(Reduce((result,), (n, c, i, j), (r, s), (term,), plain_monoid("add", float32)), (), {})
    leaf = Leaf("y", "y", vector="o1", lanes=8, register=(("o3", 4),), order=("o0", "o2", "o3", "o1", "r0", "r1"))
    slots = []
    for channels in (8, 64, 144):
        box = (whole(1), Range(const(0), channels, 144), whole(56), whole(56))
        slots.append(_step_cost(nest, leaf, {j: 4}, 8, box, machine("h200"))[0])
    assert slots[0] > 1.5 * slots[1] and slots[1] == slots[2]


def test_what_runs_beside_a_product_has_its_threads() -> None:
    """Channels are weighed by two small products before they are multiplied on tensor cores: in one kernel its block
    has enough threads for all, or they are kernels of their own."""
    make, known = helper.make_node, numpy_helper.from_array
    nodes = [make("Conv", ["s", "a"], ["b"]), make("Sigmoid", ["b"], ["c"]), make("Mul", ["b", "c"], ["d"]),
             make("Conv", ["d", "e"], ["f"]), make("Sigmoid", ["f"], ["g"]), make("Mul", ["x", "g"], ["h"]),
             make("Conv", ["h", "w"], ["y"])]  # fmt: skip
    sizes = {"a": (10, 240, 1, 1), "e": (240, 10, 1, 1), "w": (80, 240, 1, 1)}
    rng = np.random.default_rng(0)
    initial = [known((rng.standard_normal(size) / 16).astype(np.float32), name) for name, size in sizes.items()]
    given = [helper.make_tensor_value_info(n, TensorProto.FLOAT, (1, 240, side, side))
             for n, side in (("x", 14), ("s", 1))]  # fmt: skip
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, (1, 80, 14, 14))
    model = helper.make_model(helper.make_graph(nodes, "weighed", given, [result], initial),
                              opset_imports=[helper.make_opsetid("", 17)], ir_version=8)  # fmt: skip
    plan = build(load(model, {}), machine("h200"), Options(target="cuda", precision="float16", stop_after="plan")).plan
    assert plan is not None
    for kernel in plan.kernels:
        (lanes,) = [t.count for t in kernel.body if isinstance(t, Tile) and t.over == "lanes"]
        if any(leaf.instruction for leaf in kernel.leaves) and any(leaf.core == "f" for leaf in kernel.leaves):
            assert lanes >= 128
