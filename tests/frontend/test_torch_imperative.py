"""Imperative programs, whole and through dynamo: values, changes of arguments and of what the module keeps.

They run by the interpreter: what is said here is made before and around a model, whatever runs it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from tests.frontend.torch_imperative import CASES, Case
from tests.frontend.torch_programs import interpreted
from tilewright.errors import TilewrightError
from tilewright.pytorch.backend import compile_for_dynamo
from tilewright.pytorch.module import compile_module

QUICK = ("python_if_with_view", "python_while_with_view", "boxes_masked")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


def by_export(module: nn.Module, case: Case) -> Any:
    return compile_module(module, case.calls[0](), interpreted)


def by_dynamo(module: nn.Module, case: Case) -> Any:
    return torch.compile(module, backend=partial(compile_for_dynamo, build=interpreted))


def tensors(*values: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(values) if isinstance(x, torch.Tensor)]


def check(case: Case, way: Any) -> None:
    """Two modules, one compiled: each call has arguments of its own, and what the module keeps goes on."""
    plain, own = case.make().eval(), case.make().eval()
    fast = way(own, case)
    for arguments in case.calls:
        for _ in range(2):
            wanted_of, found_of = arguments(), arguments()
            wanted = tensors(plain(*wanted_of), wanted_of, list(plain.buffers()), vars(plain))
            found = tensors(fast(*found_of), found_of, list(own.buffers()), vars(own))
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.sample(3)
@pytest.mark.parametrize("way", [by_export, by_dynamo])
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES])
def test_programs(name: str, way: Any) -> None:
    case = CASES[name]
    if way is by_export and case.error:
        with pytest.raises(TilewrightError, match=case.error):
            check(case, way)
    else:
        check(case, way)
