"""Tensors of more elements than are stored: kernels that hold parts of them alone have code, others are refused."""

from __future__ import annotations

from math import prod

import pytest

from bench.gpu_attention import model_of
from tests.gpu_launch import source_of
from tests.gpu_stages import no_plan_fails
from tilewright.compiler.pipeline import Artifact, build
from tilewright.errors import UnsupportedError
from tilewright.frontend.onnx.model import load
from tilewright.options import Options
from tilewright.runtime import nvrtc
from tilewright.target import machine

SIZES = (16, 16384, 128)  # heads, rows, columns: 2^32 scores
GPUS = ("h200", "a100")
_LATER = pytest.mark.slow


def planned(target: str, causal: bool = False, **more: object) -> Artifact:
    precision = "float16" if target in GPUS else "float32"
    options = Options(target=target, precision=precision, stop_after="loops", **more)  # type: ignore[arg-type]
    with no_plan_fails():
        return build(load(model_of(SIZES, precision, causal), {}), machine(target), options)


@pytest.mark.parametrize("target", ["h200", *(pytest.param(n, marks=_LATER) for n in ("a100", "neoverse_n1"))])
@pytest.mark.parametrize("causal", [False, pytest.param(True, marks=_LATER)])
def test_scores_in_parts_are_as_many_as_there_are(target: str, causal: bool) -> None:
    loops = planned(target, causal).loops
    assert loops is not None
    assert all(prod(t.shape) < prod(SIZES) * SIZES[1] // SIZES[2] for t in loops.tensors)
    if target not in GPUS:
        return
    assert {t.name for t in loops.tensors if t.role != "constant"} == {"q", "k", "v", "o"}
    (kernel,) = loops.kernels
    made = nvrtc.compile_to_cubin(source_of(kernel), machine(target).architecture)
    assert made.resources[kernel.name].spill_bytes == 0


def test_what_is_stored_is_refused() -> None:
    with pytest.raises(UnsupportedError) as error:
        planned("h200", schedule="none")
    assert "its result would have the shape [1, 16, 16384, 16384], 4294967296 elements; 2147483648 are supported of " \
           "what is stored" in str(error.value)  # fmt: skip
