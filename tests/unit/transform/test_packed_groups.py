"""Convolutions in groups as products of blocks: the same results, with whatever is behind them, and when."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from tilewright import ops
from tilewright.compiler.pipeline import build
from tilewright.frontend.onnx.model import load
from tilewright.intrinsics.gpu_matrix import FORMS
from tilewright.ir.analysis.verify import verify_program
from tilewright.ir.forms.compute import Program, Reduce
from tilewright.ir.meaning.interpret import evaluate
from tilewright.options import Options
from tilewright.target import machine
from tilewright.tile_graph.plan.leaf_form import ThreadForm
from tilewright.transform.clean.fold import fold_constants
from tilewright.transform.layout.packed_groups import pack_groups
from tilewright.transform.precision.choose import set_precision


def grouped(channels: int, outputs: int, groups: int, batch: int = 2, size: int = 6, behind: str = "") -> ModelProto:
    """A convolution in groups; `behind` it a rectifier, the image where it is added, and the sum itself as a result."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((outputs, channels // groups, 3, 3)) / 3
    arrays = {"w": weight, "b": rng.standard_normal(outputs)}
    nodes = [helper.make_node("Conv", ["x", "w", "b"], ["c"], group=groups, pads=[1] * 4)]
    results = ["c"]
    if "relu" in behind:
        nodes.append(helper.make_node("Relu", ["c"], ["r"]))
        results = ["r"]
    if "add" in behind:
        nodes.append(helper.make_node("Add", ["r", "x"], ["a"]))
        results = ["a"]
    if "both" in behind:
        results = ["c", "r"]
    shapes = {"x": (batch, channels, size, size), **dict.fromkeys(results, (batch, outputs, size, size))}
    ports = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()}
    constants = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "g", [ports["x"]], [ports[name] for name in results], constants)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return onnx.shape_inference.infer_shapes(made)


def narrow(model: ModelProto) -> Program:
    return fold_constants(set_precision(ops.lower(load(model, {})), machine("h200"), "float16"))


def blocks(program: Program) -> float:
    """A prediction that prefers blocks, whatever they cost."""
    return 0.0 if any("_packed" in t.name for t in program.tensors()) else 1.0


@pytest.mark.parametrize(
    "model",
    (
        grouped(32, 32, 8), grouped(32, 16, 4, 1, behind="relu"), grouped(16, 48, 4, behind="relu"),
        grouped(32, 32, 8, behind="relu add"), grouped(24, 24, 6, behind="relu both"), grouped(20, 30, 5, 1),
    ),
)  # fmt: skip
def test_blocks_give_the_same_results(model: ModelProto) -> None:
    program = narrow(model)
    packed = pack_groups(program, blocks)
    verify_program(packed)
    assert packed is not program
    x = np.random.default_rng(1).standard_normal([int(e) for e in program.inputs[0].shape]).astype(np.float32)
    wanted, found = (evaluate(p, {"x": x}) for p in (program, packed))
    for output in program.outputs:
        np.testing.assert_allclose(found[output.name], wanted[output.name], rtol=1e-6, atol=1e-6)


def test_maps_behind_run_on_blocks() -> None:
    """Up to what is a result; a result that is read by others too is made once, from the blocks."""
    packed = pack_groups(narrow(grouped(32, 32, 8, behind="relu add")), blocks)
    assert next(c.outputs[0].name for c in packed.computes if c.outputs[0].rank == 5) == "c_sum_blocks"
    assert packed.computes[-1].outputs[0] in packed.outputs and len(packed.computes[-1].outputs[0].shape) == 4
    both = pack_groups(narrow(grouped(24, 24, 6, behind="relu both")), blocks)
    assert sum(c.outputs[0].name == "c" for c in both.computes) == 1


def test_windows_of_single_channels_and_whole_convolutions_stay() -> None:
    for model in (grouped(16, 16, 16), grouped(16, 32, 16), grouped(16, 16, 1)):
        program = narrow(model)
        assert pack_groups(program, blocks) is program


def test_blocks_of_what_threads_multiply_are_single_groups() -> None:
    program = fold_constants(ops.lower(load(grouped(32, 64, 4, behind="relu"), {})))
    packed = pack_groups(program, blocks)
    (total,) = [c for c in packed.computes if isinstance(c, Reduce)]
    assert [a.extent for a in total.axes[-2:]] == [4, 16] and total.reduce_axes[0].extent == 8
    x = np.random.default_rng(1).standard_normal([int(e) for e in program.inputs[0].shape]).astype(np.float32)
    wanted, found = (evaluate(p, {"x": x}) for p in (program, packed))
    np.testing.assert_allclose(found["r"], wanted["r"], rtol=1e-5, atol=1e-5)


def test_wide_groups_in_float32_share_what_they_read() -> None:
    """Sums of 40 that 160 outputs of a group have in common: through shared memory, not each by itself."""
    options = Options(target="h200", stop_after="plan")
    artifact = build(load(grouped(120, 480, 3, 1, 56), {}), machine("h200"), options)
    assert artifact.plan is not None
    leaves = [leaf for kernel in artifact.plan.kernels for leaf in kernel.leaves]
    assert any(leaf.instruction in FORMS or leaf.options(ThreadForm).step for leaf in leaves)


def test_tensor_cores_take_groups_where_that_pays() -> None:
    model = grouped(256, 256, 64, 1, 56, "relu")
    options = Options(target="h200", precision="float16", stop_after="plan")
    artifact = build(load(model, {}), machine("h200"), options)
    assert artifact.plan is not None and artifact.program is not None
    assert any(leaf.instruction in FORMS for kernel in artifact.plan.kernels for leaf in kernel.leaves)
    (total,) = [c for c in artifact.program.computes if isinstance(c, Reduce)]
    assert len(total.axes) == 5
