"""Text from ONNX files with past and present keys and values, as ONNX Runtime writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.decoding import export
from tests.frontend.torch_models import build
from tilewright import ModelError, OptionError, Options
from tilewright.integrations.decoding import from_onnx

pytest.importorskip("transformers")
onnxruntime = pytest.importorskip("onnxruntime")


def continued(session: Any, prompt: np.ndarray, count: int) -> list[int]:
    """The likeliest tokens, with caches that grow."""
    names = [i.name for i in session.get_inputs()][3:]
    past = {name: np.zeros((1, 2, 0, 8), np.float32) for name in names}
    made: list[int] = []
    tokens = prompt
    while len(made) < count:
        done = past[names[0]].shape[2]
        inputs = {"input_ids": tokens[None], "attention_mask": np.ones((1, done + len(tokens)), np.int64),
                  "position_ids": np.arange(done, done + len(tokens))[None]}  # fmt: skip
        scores, *present = session.run(None, {**inputs, **past})
        past = dict(zip(names, present, strict=True))
        made.append(int(scores[0, -1].argmax()))
        tokens = np.array(made[-1:])
    return made


@pytest.mark.slow
@torch.no_grad()
def test_a_file_with_past_and_present(tmp_path: Path, kernel_cache: Path) -> None:
    model, _ = build("llama")
    export(model, tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    decoder = from_onnx(tmp_path / "m.onnx", 48, (4,), Options(cache_dir=kernel_cache, threads=2))
    where = [cache.ctypes.data for cache in decoder.caches]
    for length in (1, 3, 7):
        prompt = np.random.default_rng(length).integers(0, 90, length)
        assert decoder(prompt, 6) == continued(session, prompt, 6)
    assert decoder.compilations == 2
    assert [cache.ctypes.data for cache in decoder.caches] == where
    # a step hands out new rows alone: nothing of the length of a cache
    assert all(48 not in port.shape for m in decoder.models.values() for port in m.outputs)
    with pytest.raises(OptionError, match="do not fit a cache of 48"):
        decoder(np.zeros(45, np.int64), 6)


def test_a_file_without_past_is_named(tmp_path: Path) -> None:
    import onnx
    from onnx import TensorProto, helper

    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 2]) for n in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", ports[:1], ports[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    with pytest.raises(ModelError, match="'m.onnx' has 0 inputs of four dimensions"):
        from_onnx(tmp_path / "m.onnx", 48)
