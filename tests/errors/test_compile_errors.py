"""Exact messages for a model that is not there, is none, or is more than can be compiled, and for wrong options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from onnx import ModelProto

import tilewright
from tilewright import ModelError, OptionError, Options, TilewrightError


def test_missing_file() -> None:
    with pytest.raises(ModelError) as caught:
        tilewright.compile("no/such/model.onnx")
    assert str(caught.value) == "model file 'no/such/model.onnx' does not exist"


def test_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        tilewright.compile(tmp_path)
    assert str(caught.value) == f"'{tmp_path}' is a folder; give the path of an ONNX file"


def test_not_onnx(tmp_path: Path) -> None:
    path = tmp_path / "notes.onnx"
    path.write_text("these are notes, not a model")
    with pytest.raises(ModelError) as caught:
        tilewright.compile(path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"'{path}' is not an ONNX model, or is damaged: ")


def test_unknown_operator_names_the_node(add_model: Callable[..., ModelProto]) -> None:
    with pytest.raises(TilewrightError) as caught:
        tilewright.compile(add_model("Frobnicate"))
    text = str(caught.value)
    assert "\n" not in text
    assert "Frobnicate" in text and "the_sum" in text


def test_torch_module() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(OptionError) as caught:
        tilewright.compile(torch.nn.ReLU())
    assert str(caught.value) == (
        "a torch.nn.Module needs inputs to follow it with: tilewright.compile(module, (x,)), or a dict by name"
    )


WRONG_OPTIONS = [
    (
        {"target": "gpu"},
        "target cannot be 'gpu': it is one of cpu, cuda, cuda-emulated, a100, apple_arm, avx2_desktop, "
        "emerald_rapids, emerald_rapids_avx512, h200, l40s, neoverse_n1, or a .json file that describes a machine; "
        "did you mean 'cuda'?",
    ),
    (
        {"target": "tpu9000"},
        "target cannot be 'tpu9000': it is one of cpu, cuda, cuda-emulated, a100, apple_arm, avx2_desktop, "
        "emerald_rapids, emerald_rapids_avx512, h200, l40s, neoverse_n1, or a .json file that describes a machine",
    ),
    (
        {"schedule": "conected"},
        "schedule cannot be 'conected': it is one of connected, register, none; did you mean 'connected'?",
    ),
    ({"convolution": "fft"}, "convolution cannot be 'fft': it is one of auto, direct, winograd"),
    ({"fallback": "python"}, "fallback cannot be 'python': it is one of host, error"),
    ({"threads": 0}, "threads cannot be 0: it is a whole number, 1 or more"),
    ({"threads": 2.5}, "threads cannot be 2.5: it is a whole number, 1 or more"),
    ({"threads": True}, "threads cannot be True: it is a whole number, 1 or more"),
    (
        {"precision": "float16"},
        "precision 'float16' is for GPUs alone, not 'cpu': there is 'bfloat16'",
    ),
    (
        {"precision": "half"},
        "precision cannot be 'half': it is one of float32, tf32, tf32_convolutions, float16, bfloat16, or left out to "
        "follow the model",
    ),
    (
        {"precision": "int8"},
        "precision 'int8' needs scales that only a quantised model has: quantise the model, for example with "
        "onnxruntime.quantization, and leave precision out",
    ),
    ({"shapes": {"x": "2x3"}}, "the shape of 'x' must be a number or a tuple of them, not '2x3'"),
    ({"shapes": {"x": (2, -1)}}, "the shape of 'x' must be a number or a tuple of them, not (2, -1)"),
    ({"shapes": {"batch": 1.5}}, "the shape of 'batch' must be a number or a tuple of them, not 1.5"),
    ({"shapes": [2, 3]}, "shapes must be a dict from a name to a shape, not a list"),
    ({"options": {"target": "cpu"}}, "options must be a tilewright.Options, not a dict"),
]


@pytest.mark.parametrize(("given", "expected"), WRONG_OPTIONS, ids=lambda value: str(value)[:40])
def test_wrong_options(given: dict[str, object], expected: str, add_file: Path) -> None:
    with pytest.raises(OptionError) as caught:
        tilewright.compile(add_file, **given)  # type: ignore[arg-type]
    assert str(caught.value) == expected


def test_unknown_option() -> None:
    with pytest.raises(OptionError, match="^there is no option 'thread'; the options are target, threads, "):
        Options.from_environment({}, thread=2)


def test_options_from_the_environment() -> None:
    variables = {"TILEWRIGHT_CACHE": "/somewhere", "TILEWRIGHT_CC": "clang -m64", "TILEWRIGHT_THREADS": "3"}
    options = Options.from_environment(variables)
    assert (options.cache_dir, options.compiler, options.threads) == (Path("/somewhere"), "clang -m64", 3)
    assert Options.from_environment(variables, threads=1).threads == 1
    assert Options.from_environment(variables, threads=None).threads == 3
    assert Options.from_environment({"XDG_CACHE_HOME": "/caches"}).cache_dir == Path("/caches/tilewright")
    with pytest.raises(OptionError) as caught:
        Options.from_environment({"TILEWRIGHT_THREADS": "many"})
    assert str(caught.value) == "TILEWRIGHT_THREADS cannot be 'many': it is a whole number, 1 or more"


def test_arguments_overrule_options() -> None:
    base = Options(threads=4, schedule="none")
    assert base.override(threads=2, schedule=None) == Options(threads=2, schedule="none")
