"""Sums that a stream takes in blocks run on vectors, and the Plan says so: an instruction takes whole sums alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.cpu_stages import Lowered, evaluated, lowered, random_inputs
from tests.gpu_stages import attention
from tilewright.backend import backend_for
from tilewright.compiler.pipeline import build
from tilewright.errors import InternalError
from tilewright.frontend.onnx.model import load
from tilewright.lower.program import lower_program
from tilewright.options import Options
from tilewright.target import machine
from tilewright.tile_graph.check.kernels import check_plan
from tilewright.tile_graph.plan.form import Leaf, Tile

SERVER = machine("emerald_rapids")


def streamed(length: int, head: int) -> tuple[Lowered, Tile]:
    """Attention in bfloat16, its scores in blocks whatever is predicted of that; and the kernel that streams them."""
    options = Options(precision="bfloat16", stop_after="layout")
    program = build(load(attention(length, head, 1)), SERVER, options).program
    assert program is not None
    made = lowered(program, streaming="always", target=SERVER)
    (kernel,) = (k for k in made.plan.kernels if k.stream is not None)
    return made, kernel


def test_the_plan_says_how_each_sum_runs() -> None:
    made, kernel = streamed(97, 40)
    assert [leaf.instruction for leaf in kernel.leaves if leaf.core == "s"] == ["amx_bf16"]  # blocks of whole sums
    carried = [leaf for leaf in kernel.leaves if leaf.part == "step"]
    assert carried and not any(leaf.instruction for leaf in carried)
    inputs = random_inputs(made.program)
    expected = evaluated(made.program, inputs)
    for name, found in made.on_loops(inputs).items():
        np.testing.assert_allclose(found, expected[name], rtol=2e-2, atol=2e-2)


def test_an_instruction_in_a_stream_is_refused() -> None:
    """By the grammar; and lowering makes nothing else of it."""
    made, kernel = streamed(97, 40)
    whole = next(leaf for leaf in kernel.leaves if leaf.instruction)

    def by_instruction(leaf: Leaf) -> Leaf:
        wanted = leaf.part == "step" and leaf.vector == "o3"
        return replace(leaf, form=whole.form, lanes=whole.lanes) if wanted else leaf

    wrong = made.plan.with_kernels({kernel.name: kernel.map_leaves(by_instruction)})
    assert wrong != made.plan
    with pytest.raises(InternalError, match="amx_bf16 takes whole sums, and those of a stream come in blocks"):
        check_plan(wrong, made.program, SERVER)
    with pytest.raises(InternalError, match="amx_bf16 takes whole sums of products alone"):
        lower_program(made.program, wrong, backend_for(SERVER).lower_kernel)
