"""Networks of the zoo and of Hugging Face, unchanged, through both forms."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import tilewright
from bench import zoo
from tests.frontend.torch_models import OTHERS, QUICK, build
from tilewright import Options, UnsupportedError
from tilewright.torch_backend import tilewright as dynamo_backend

# Experts are chosen by a sort of the model's own, and run by a function of transformers: no row for either.
PARTLY = ("mixtral",)


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


@pytest.mark.parametrize("name", QUICK)
def test_whole(name: str, options: Options) -> None:
    pytest.importorskip("transformers")
    whole(name, options)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_further_whole(name: str, options: Options) -> None:
    pytest.importorskip("transformers")
    if name not in PARTLY:
        whole(name, options)
        return
    with pytest.raises(UnsupportedError, match="not covered: "):
        whole(name, options)


@pytest.mark.slow
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
