"""Every row of the ATen tables against PyTorch itself, at odd shapes."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx
from torch.utils import _pytree as pytree

from tests.frontend.torch_cases import CASES, OTHER, WHOLE, Case, case
from tilewright import ops
from tilewright.frontend.pytorch.emitter import find_row, rows
from tilewright.frontend.pytorch.fx import FxParts, make_graph
from tilewright.frontend.pytorch.tensors import array_of
from tilewright.ir.meaning.interpret import evaluate

# Memory that nobody has written, or a layout that the Graph has not: nothing to compare. Places in memory are those of
# arguments that overlap: see test_torch_aliasing.py; sizes that data tell: test_torch_control_source.py.
UNTESTED = {"aten.empty", "aten.empty_like", "aten.new_empty", "aten.empty_strided", "aten.new_empty_strided",
            "aten.empty_permuted", "aten._reshape_alias", "prims.convert_element_type", "prims.iota",
            "aten.as_strided", "aten.as_strided_scatter", "aten.nonzero", "aten.masked_select", "aten.where.default",
            "tilewright.copied", "tilewright.given_back", "tilewright.lent", "tilewright.taken"}  # fmt: skip


# Of these only the first result has a row: the others are for training, or places of maxima.
FIRST_ONLY = ("_native_batch_norm_legit_no_training", "_native_batch_norm_legit", "native_batch_norm",
              "max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_max_pool1d", "adaptive_max_pool2d",
              "adaptive_max_pool3d", "log_sigmoid_forward", "_fused_rms_norm", "native_dropout",
              "_native_batch_norm_legit_functional", "_scaled_dot_product_flash_attention_for_cpu",
              "native_layer_norm", "native_group_norm", "mkldnn_rnn_layer")  # fmt: skip


def traced(case: Case) -> tuple[FxParts, list[torch.Tensor]]:
    """One call of ATen as an fx graph, whose inputs are its tensors, in order."""
    name, overload = case.name.split(".")
    function = getattr(getattr(torch.ops.aten, name), overload)
    graph = fx.Graph()
    given: list[torch.Tensor] = []
    inputs: list[fx.Node] = []

    def placeholder(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        node = graph.placeholder(f"x{len(given)}")
        node.meta["val"] = x
        given.append(x)
        inputs.append(node)
        return node

    args, named = pytree.tree_map(placeholder, (case.args, case.named))
    call = graph.call_function(function, args, named)
    call.meta["val"] = found = function(*copied(case.args), **copied(case.named))
    if isinstance(found, torch.Tensor):
        return FxParts([call], inputs, [call], {}), given
    parts = [graph.call_function(operator.getitem, (call, k)) for k in range(1 if name in FIRST_ONLY else len(found))]
    for part, value in zip(parts, found, strict=False):
        part.meta["val"] = value
    return FxParts([call, *parts], inputs, parts, {}), given


def copied(values: Any) -> Any:
    return pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, values)


def interpreted(parts: FxParts, given: list[torch.Tensor]) -> list[np.ndarray]:
    """What the front end makes of it, through the interpreter."""
    graph = make_graph(parts)
    program = ops.lower(graph)
    found = evaluate(program, {v.name: array_of(x) for v, x in zip(graph.inputs, given, strict=True)})
    return [found[x.name] for x in program.outputs]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
@torch.no_grad()
def test_row(case: Case) -> None:
    parts, given = traced(case)
    expected = [array_of(node.meta["val"]) for node in parts.outputs]
    for one, other in zip(interpreted(parts, given), expected, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        if other.dtype.kind == "f":
            np.testing.assert_allclose(one, other, rtol=case.tolerance, atol=case.tolerance)
        else:
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["and", "or", "xor"])
def test_bits_of_integers(name: str) -> None:
    if ops.find(f"Bitwise{name.title()}") is None:
        pytest.skip("there is no such operator yet")
    test_row(case(f"bitwise_{name}.Tensor", WHOLE, OTHER))


def test_every_row_has_a_case() -> None:
    called = {find_row(f"aten.{case.name}") for case in CASES}
    missing = [name for name in rows() if find_row(f"{name}.default") not in called and find_row(name) not in called]
    assert set(missing) <= UNTESTED, sorted(set(missing) - UNTESTED)
