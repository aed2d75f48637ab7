"""cond, while_loop, scan and map of PyTorch through both forms."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._higher_order_ops.map import map as map_over
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import tilewright
from tilewright import Options, UnsupportedError
from tilewright.frontend.pytorch.exported import export
from tilewright.integrations.torch_backend import tilewright as dynamo_backend


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(3, 3)


class Counted(Layered):
    """Its condition needs nothing but a counter that starts at a constant."""

    def forward(self, x: torch.Tensor) -> Any:
        def body(i: torch.Tensor, y: torch.Tensor) -> Any:
            return i + 2, torch.tanh(self.inner(y)) + i

        return while_loop(lambda i, y: i < 9, body, (torch.zeros((), dtype=torch.int64), x))


class EndedByData(Layered):
    """A number of steps that is an input, work before and after, and a branch."""

    def forward(self, x: torch.Tensor, count: torch.Tensor) -> Any:
        def body(i: torch.Tensor, y: torch.Tensor) -> Any:
            return i + 1, torch.tanh(self.inner(y)) + i

        start = (torch.zeros((), dtype=torch.int64), self.inner(x).relu())
        i, y = while_loop(lambda i, y: i < count, body, start)
        chosen = torch.cond(y.sum() > 0, lambda y: self.inner(y), lambda y: y - 1, (y,))
        return i, y * 2, chosen


class Nested(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        def positive(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.cond(y.sum() > 0, lambda x: x * 3, lambda x: x.clone(), (x,))

        return torch.cond(x.sum() > 0, positive, lambda x, y: x + y, (x, y))


class Recurrent(Layered):
    def forward(self, state: torch.Tensor, xs: torch.Tensor) -> Any:
        def step(state: torch.Tensor, x: torch.Tensor) -> Any:
            new = torch.tanh(self.inner(state) + x)
            return new, new * 2

        return scan(step, state, xs, dim=1, reverse=True)


class Mapped(nn.Module):
    def forward(self, xs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return map_over(lambda x, y: x.relu() + y, xs, y)


class ByNumber(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return while_loop(lambda i, y: i < 4, lambda i, y: (i + 1, y * 2), (0, x))[1]


ONE, TWO = torch.linspace(0.5, 1, 6).reshape(2, 3), torch.linspace(-1, 1, 24).reshape(2, 4, 3)
CASES = {
    "counted": (Counted, [(ONE,)]),
    "ended by data": (EndedByData, [(ONE, torch.tensor(k)) for k in (0, 1, 5)]),
    "nested": (Nested, [(ONE, ONE), (ONE, -ONE), (-ONE, ONE)]),
    "recurrent": (Recurrent, [(ONE, TWO)]),
    "mapped": (Mapped, [(TWO, TWO[0].clone())]),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_whole(name: str, kernel_cache: Path) -> None:
    kind, calls = CASES[name]
    module = kind().eval()
    fast = tilewright.compile(module, calls[0], options=Options(cache_dir=kernel_cache, threads=2))
    for inputs in calls:
        torch.testing.assert_close(fast(*inputs), module(*inputs))
    assert fast.compilations == 1 and "1 of 1" in fast.explain()


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_through_dynamo(name: str, kernel_cache: Path) -> None:
    kind, calls = CASES[name]
    module = kind().eval()
    torch._dynamo.reset()
    fast = torch.compile(module, backend=dynamo_backend, options={"cache_dir": kernel_cache, "threads": 2})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*left to PyTorch.*")
        for inputs in calls:
            torch.testing.assert_close(fast(*inputs), module(*inputs))


def test_loops_are_in_the_graph_where_they_can_be_counted() -> None:
    graph = export(Counted().eval(), (ONE,), {}).graph
    (loop,) = [n for n in graph.nodes if n.op == "Loop"]
    assert graph.constants[loop.inputs[0]] == np.int64(5)
    scanned = export(Recurrent().eval(), (ONE, TWO), {}).graph
    assert [n.op for n in scanned.nodes].count("Scan") == 1
    ended = export(EndedByData().eval(), (ONE, torch.tensor(2)), {}).graph
    (loop,) = [n for n in ended.nodes if n.op == "Loop"]
    assert not loop.inputs[0] and loop.inputs[1] not in ended.constants


class ShortLoop(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        for k in range(3):
            y[k] = y[k] * x[2 - k]
        return y


def test_short_loops_over_elements_are_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = []
    follow = torch.export.export

    def counted(module: nn.Module, *rest: Any, **named: Any) -> Any:
        modules.append(module)
        return follow(module, *rest, **named)

    monkeypatch.setattr(torch.export, "export", counted)
    module = ShortLoop()
    export(module, (torch.rand(3, 4),), {})
    assert [m for m in modules if m is module] == [module]


def test_a_count_that_is_no_tensor_is_named() -> None:
    with pytest.raises(
        UnsupportedError, match=r"while_loop.*an operand that is no tensor; carry a count as torch.tensor"
    ):
        export(ByNumber().eval(), (ONE,), {})
