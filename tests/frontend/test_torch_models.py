"""Networks of the zoo and of Hugging Face, unchanged, through both forms."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

import tilewright
from bench import zoo
from tests.frontend.torch_models import OTHERS, QUICK, build
from tilewright import Options
from tilewright.integrations.torch_backend import tilewright as dynamo_backend

# An operator of transformers' own has no form in ONNX.
NO_ONNX = ("mixtral",)


def agree(found: Any, expected: Any) -> None:
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True)
    for one, other in pairs:
        if isinstance(other, torch.Tensor) and other.is_floating_point():
            assert one.dtype == other.dtype and one.shape == other.shape
            assert float((one - other).norm() / other.norm().clamp(min=1e-9)) < 1e-5


def whole(name: str, options: Options) -> None:
    module, inputs = build(name)
    fast = tilewright.compile(module, inputs, options=options)
    with torch.no_grad():
        agree(fast(**inputs), module(**inputs))


def dynamo(module: torch.nn.Module, options: Options) -> Any:
    torch._dynamo.reset()
    chosen = {"cache_dir": options.cache_dir, "threads": options.threads}
    return torch.compile(module, backend=dynamo_backend, options=chosen)


@pytest.fixture
def options(kernel_cache: Path) -> Options:
    return Options(cache_dir=kernel_cache, threads=2)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "bert" else pytest.mark.slow) for n in QUICK])
def test_whole(name: str, options: Options) -> None:
    pytest.importorskip("transformers")
    whole(name, options)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_further_whole(name: str, options: Options) -> None:
    pytest.importorskip("transformers")
    whole(name, options)


class Leaves(torch.nn.Module):
    """What a model gives, as a tuple of tensors; caches are left out."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x for x in pytree.tree_leaves(self.module(**inputs)) if isinstance(x, torch.Tensor))


@pytest.mark.slow
@pytest.mark.part(3)
@pytest.mark.parametrize("name", [name for name in (*QUICK, *OTHERS) if name not in NO_ONNX])
@torch.no_grad()
def test_through_onnx(name: str, options: Options, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    built, inputs = build(name)
    module = Leaves(built)
    path = tmp_path / f"{name}.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, (), path, kwargs=inputs, dynamo=True, optimize=True)
    model = tilewright.compile(path, options=options)
    arrays = {key: value.numpy() for key, value in inputs.items() if key in {port.name for port in model.inputs}}
    agree([torch.from_numpy(np.asarray(x)) for x in model(**arrays)], module(**inputs))


@pytest.mark.slow
@pytest.mark.part(3)
@pytest.mark.parametrize("name", [*QUICK, *OTHERS])
@torch.no_grad()
def test_through_dynamo(name: str, options: Options) -> None:
    pytest.importorskip("transformers")
    module, inputs = build(name)
    fast = dynamo(module, options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        agree(fast(**inputs), module(**inputs))


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "mmoe" else pytest.mark.slow) for n in zoo.MODELS])
@torch.no_grad()
def test_zoo(name: str, options: Options) -> None:
    module, arrays = zoo.build(name, "small")
    inputs = tuple(torch.from_numpy(a) for a in arrays.values())
    expected = module(*inputs)
    agree(tilewright.compile(module, inputs, options=options)(*inputs), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        agree(dynamo(module, options)(*inputs), expected)
