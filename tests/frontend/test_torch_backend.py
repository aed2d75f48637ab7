"""torch.compile(module, backend="tilewright"): results, what is left to PyTorch, changes in place, sizes."""

from __future__ import annotations

import re
import tomllib
import warnings
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.frontend.torch_programs import Interpreted
from tilewright import OptionError
from tilewright.errors import InternalError
from tilewright.integrations.torch_backend import tilewright as dynamo_backend
from tilewright.ir.forms.graph import Room
from tilewright.pytorch import backend


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def compiled(kernel_cache: Path) -> Any:
    return partial(torch.compile, backend=dynamo_backend, options={"cache_dir": str(kernel_cache), "threads": 2})


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The Graphs that are compiled."""
    made: list[Any] = []
    import tilewright.integrations.torch_backend as module

    inner = module.compile_whole

    def kept(graph: Any, options: Any) -> Any:
        made.append(graph)
        return inner(graph, options)

    monkeypatch.setattr(module, "compile_whole", kept)
    return made


def agree(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


@torch.no_grad()
def test_a_module(compiled: Any, parts: list[Any]) -> None:
    net, x = Net().eval(), torch.randn(4, 5)
    fast = compiled(net)
    for _ in range(3):
        agree(fast(x), net(x))
    assert len(parts) == 1 and [v.shape for v in parts[0].inputs] == [(4, 5)]  # parameters are constants


def test_inference_mode(compiled: Any, parts: list[Any]) -> None:
    net = Net().eval()
    fast = compiled(net)
    with torch.inference_mode():
        x = torch.randn(4, 5)
        for _ in range(2):
            agree(fast(x), net(x))
    assert len(parts) == 1


@torch.no_grad()
def test_parameters_are_views_of_the_modules_memory(compiled: Any, parts: list[Any]) -> None:
    net = Net().eval()
    compiled(net)(torch.randn(4, 5))
    own = [p.detach().numpy() for p in net.parameters()]
    assert sum(any(np.shares_memory(a, p) for p in own) for a in parts[0].constants.values()) == len(own)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        middle = torch.special.bessel_j0(torch.tanh(self.before(x)))
        return self.after(middle.transpose(0, 1)).relu() + middle


@torch.no_grad()
def test_what_is_not_covered_is_left_to_pytorch(compiled: Any, parts: list[Any]) -> None:
    net, x = Mixed().eval(), torch.randn(4, 4)
    fast = compiled(net)
    with pytest.warns(
        UserWarning, match=r"left to PyTorch: 1 operation of a graph: aten.special_bessel_j0.default \(1\)$"
    ):
        agree(fast(x), net(x))
    agree(fast(x), net(x))
    assert len(parts) == 2
    with torch.no_grad():
        net.after.weight.mul_(3)
    with pytest.warns(UserWarning, match="parameters have changed"):
        agree(fast(x), net(x))  # not what the parts of before say


@torch.no_grad()
def test_nothing_covered_is_pytorch_alone(compiled: Any, parts: list[Any]) -> None:
    x = torch.randn(4, 4)
    fast = compiled(torch.special.bessel_j0)
    with pytest.warns(UserWarning, match="left to PyTorch"):
        agree(fast(x), torch.special.bessel_j0(x))
    assert not parts


@torch.no_grad()
def test_a_mistake_of_ours_leaves_the_graph_to_pytorch() -> None:
    def fails(graph: Any) -> Any:
        raise InternalError("no window moves over 'addmm'")

    net, x = Net().eval(), torch.randn(4, 5)
    fast = torch.compile(net, backend=partial(backend.compile_for_dynamo, build=fails))
    with pytest.warns(UserWarning) as caught:
        agree(fast(x), net(x))
        agree(fast(x), net(x))
    told = [str(w.message) for w in caught if "left to PyTorch" in str(w.message)]
    assert len(told) == 1 and "by a mistake of tilewright: no window moves over 'addmm'; please report" in told[0]


@torch.no_grad()
def test_what_is_left_is_one_line_with_counts(compiled: Any) -> None:
    def many(x: torch.Tensor) -> torch.Tensor:
        for name in ("bessel_j0", "bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1", "i0", "airy_ai"):
            x = getattr(torch.special, name)(x.abs() + 1)
        return x

    x = torch.rand(3)
    with pytest.warns(UserWarning) as caught:
        agree(compiled(many)(x), many(x))
    (told,) = [str(w.message) for w in caught if "left to PyTorch" in str(w.message)]
    assert "operations of a graph: aten.special_bessel_j0.default (2), " in told and "other kinds" in told
    assert "\n" not in told and len(told) < 300


@torch.no_grad()
def test_each_compilation_is_a_line_of_the_log(compiled: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "tilewright"):
        compiled(Net().eval())(torch.randn(4, 5))
    (line,) = [r.message for r in caplog.records if r.name == "tilewright"]
    assert re.fullmatch(r"compiled a graph of torch.compile, \d+ operations on 4x5, in \d+\.\d\d s", line)


@torch.no_grad()
def test_a_tensor_that_the_code_writes_down_is_covered() -> None:
    """As caches of transformers do, which begin as nothing."""

    def joined(x: torch.Tensor) -> torch.Tensor:
        empty = torch.tensor([], dtype=x.dtype)
        return torch.cat([empty, x], dim=-1) * torch.tensor([1.0, 2.0, 3.0])

    x = torch.randn(2, 3)
    fast = torch.compile(joined, backend=partial(backend.compile_for_dynamo, build=Interpreted))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        agree(fast(x), joined(x))


def steps(x: torch.Tensor) -> torch.Tensor:
    """Covered by rows, but with a running sum of flags in between that depends on data only for its values."""
    y = x * 2
    print(end="")  # dynamo breaks the graph here
    return y.cumsum(0) + 1


@torch.no_grad()
def test_graphs_that_dynamo_breaks(compiled: Any, parts: list[Any]) -> None:
    x = torch.randn(4, 3)
    agree(compiled(steps)(x), steps(x))
    assert len(parts) == 2


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> Any:
        self.count.add_(1)
        state.mul_(2)
        return x + self.count + state, x.view(-1), state


@torch.no_grad()
def test_changes_in_place_and_views(compiled: Any, parts: list[Any]) -> None:
    module, like = Counting(), Counting()
    fast = compiled(module)
    x, own, other = torch.randn(3, 2), torch.ones(2), torch.ones(2)
    for _ in range(3):
        found, view, state = fast(x, own)
        agree(found, like(x, other)[0])
        agree(own, other)
        agree(module.count, like.count)
        assert view.data_ptr() == x.data_ptr() and state is own
    assert len(parts) == 1


@torch.no_grad()
def test_open_dimensions_are_compiled_for_all_sizes_around_those_that_come(compiled: Any, parts: list[Any]) -> None:
    net = Net().eval()
    fast = compiled(net, dynamic=True)
    for rows in (4, 6, 2, 9, 8, 17, 1):
        x = torch.randn(rows, 5)
        agree(fast(x), net(x))
    rooms = [None if graph.part is None else graph.part.rooms for graph in parts]
    assert rooms == [(Room(2, 8),), (Room(9, 64),), None]


@torch.no_grad()
def test_numbers_that_are_arguments_are_left_to_the_run(compiled: Any, parts: list[Any]) -> None:
    def scaled(x: torch.Tensor, times: int) -> torch.Tensor:
        return x * times + 1

    fast, x = compiled(scaled, dynamic=True), torch.randn(3, 3)
    for times in (3, 5, 8):
        agree(fast(x, times), scaled(x, times))
    assert len(parts) == 1


@torch.no_grad()
def test_what_differs_in_more_than_numbers_is_compiled_for_the_sizes_that_come(compiled: Any, parts: list[Any]) -> None:
    def uneven(x: torch.Tensor) -> torch.Tensor:
        return x[::2] * 2

    fast = compiled(uneven, dynamic=True)
    for rows in (5, 8, 5):
        x = torch.randn(rows, 1)
        agree(fast(x), uneven(x))
    assert [graph.inputs[0].shape[0] for graph in parts if graph.part is None] == [5, 8]


@torch.no_grad()
def test_sizes_are_bounded(compiled: Any, parts: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "MOST_SHAPES", 2)
    fast = compiled(lambda x: x[::2] * 2, dynamic=True)
    with pytest.warns(UserWarning, match="more than 2 sizes of one graph"):
        for rows in (4, 6, 9):
            agree(fast(torch.ones(rows, 3)), torch.full((-(-rows // 2), 3), 2.0))
    fast(torch.ones(9, 3))
    assert len([graph for graph in parts if graph.part is None]) == 3


@torch.no_grad()
def test_changed_parameters_are_noticed(compiled: Any, parts: list[Any]) -> None:
    net, x = Net().eval(), torch.randn(4, 5)
    fast = compiled(net)
    fast(x)
    net.first.weight.mul_(2)
    with pytest.warns(UserWarning, match="parameters have changed"):
        agree(fast(x), net(x))
    net.load_state_dict(Net().state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        agree(fast(x), net(x))
    assert len(parts) == 3


def test_training_is_left_to_pytorch(compiled: Any, parts: list[Any]) -> None:
    net, x = Net(), torch.randn(4, 5)
    fast = compiled(net)
    with pytest.warns(UserWarning, match="compiles for inference.*torch.no_grad"):
        fast(x).sum().backward()
    assert net.first.weight.grad is not None and not parts
    with torch.no_grad():
        agree(fast(x), net(x))
    assert len(parts) == 1


def test_modes_of_inductor_are_refused() -> None:
    with pytest.raises(OptionError, match="mode 'max-autotune' is of PyTorch's own backend"):
        dynamo_backend(torch.fx.GraphModule({}, torch.fx.Graph()), [], mode="max-autotune")


def test_pytorch_finds_the_backend_by_name() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    module, _, name = project["project"]["entry-points"]["torch_dynamo_backends"]["tilewright"].partition(":")
    assert getattr(import_module(module), name) is dynamo_backend


def test_sizes_that_belong_together_are_compiled_as_they_come() -> None:
    """Rows of experts: each number may be another one, their sum may not."""

    def by_part(x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        return torch.cat([part * (n + 1) for n, part in enumerate(x.split(sizes))])

    compiled = torch.compile(by_part, backend="tilewright", dynamic=True)
    x = torch.randn(24, 5)
    for sizes in ([4, 9, 11], [12, 5, 7], [3, 3, 18]):
        torch.testing.assert_close(compiled(x, sizes), by_part(x, sizes))
