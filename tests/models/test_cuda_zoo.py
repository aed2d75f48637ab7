"""NVRTC compiles every kernel of the zoo's full-size models for Ampere and Hopper, and contractions spill nothing."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # exporters warn about themselves

pytest.importorskip("torch", reason="the zoo needs torch, a development extra")

from bench import zoo  # noqa: E402
from tilewright.compiler.pipeline import build  # noqa: E402
from tilewright.frontend.onnx.model import load  # noqa: E402
from tilewright.intrinsics.gpu_matrix import FORMS  # noqa: E402
from tilewright.ir.forms.loops import Instruction, statements  # noqa: E402
from tilewright.options import Options  # noqa: E402
from tilewright.runtime.nvrtc import compile_to_cubin  # noqa: E402
from tilewright.target import machine  # noqa: E402


@pytest.mark.parametrize(("model", "name"), [(m, n) for m in zoo.MODELS for n in ("a100", "h200")])
def test_nvrtc_compiles_the_zoo(model: str, name: str, tmp_path: Path) -> None:
    module, inputs = zoo.build(model, "full")
    path = tmp_path / "model.onnx"
    zoo.export_module(module, inputs, path)
    target = machine(name)
    options = Options(target=name, precision="float16", stop_after="source", cache_dir=tmp_path)
    made = build(load(path, {}), target, options)
    assert made.loops is not None and made.sources
    on_matrices = {
        kernel.name
        for kernel in made.loops.kernels
        if any(isinstance(s, Instruction) and s.name in FORMS for s in statements(kernel.body))
    }
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        cubins = pool.map(lambda source: compile_to_cubin(source, target.architecture), made.sources.values())
        for kernel, cubin in zip(made.sources, cubins, strict=True):
            (used,) = cubin.resources.values()
            assert used.registers <= 255, kernel
            if kernel in on_matrices:
                assert used.spill_bytes == used.stack_bytes == 0, kernel
