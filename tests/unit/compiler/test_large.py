"""Tensors of more elements than are stored: kernels that hold parts of them alone have code, others are refused."""

from __future__ import annotations

from math import prod

import pytest

from bench.gpu_attention import model_of
from tests import cpu_stages
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


def planned(target: str, causal: bool = False, sizes: tuple[int, int, int] = SIZES, **more: object) -> Artifact:
    precision = "float16" if target in GPUS else "float32"
    options = Options(target=target, precision=precision, stop_after="loops", **more)  # type: ignore[arg-type]
    with no_plan_fails():
        return build(load(model_of(sizes, precision, causal), {}), machine(target), options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "target", ["h200", *(pytest.param(n, marks=_LATER) for n in ("a100", "neoverse_n1", "emerald_rapids"))]
)
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
        planned("h200", schedule="none", sizes=(16, 1 << 17, 128))
    assert "its result would have the shape [1, 16, 131072, 131072], 274877906944 elements; 68719476736 are " \
           "supported of what is stored" in str(error.value)  # fmt: skip


@pytest.mark.parametrize("op", ["Relu", "AveragePool", "ReduceMean"])
def test_places_beyond_32_bits_are_not_counted_in_32(op: str) -> None:
    """2^32 elements, a power of two along each axis, so that every other kind of access is free to be chosen."""
    given: dict[str, object] = {"kernel_shape": [11, 11], "strides": [11, 11]} if op == "AveragePool" else (
        {"axes": [3], "keepdims": 0} if op == "ReduceMean" else {})  # fmt: skip
    shape = (16, 64, 2048, 2048)
    out = {"Relu": shape, "AveragePool": (16, 64, 186, 186), "ReduceMean": shape[:3]}[op]
    model = cpu_stages.model_of([(op, ["x"], "y", given)], {"x": shape}, {"y": out})
    with no_plan_fails():
        loops = build(load(model, {}), machine("h200"), Options(target="h200", stop_after="loops")).loops
    assert loops is not None
    (kernel,) = loops.kernels
    text = source_of(kernel)
    assert "Global<const float, 16, 64, 2048, 2048>" in text and ".apart(" not in text
    nvrtc.compile_to_cubin(text, machine("h200").architecture)
