"""Who shares memory with whom: results that are views, arguments that overlap, attributes that forward changes.

Most of it runs by the interpreter: what is said here is made around a model, whatever runs it.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tilewright
from tests.frontend.torch_programs import Interpreted, Program, make, same
from tilewright import InputError, ModelError, Options
from tilewright.pytorch.backend import compile_for_dynamo
from tilewright.pytorch.module import compile_module


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


class Module(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def by_dynamo(function: Callable[..., Any], *_: Any) -> Any:
    return torch.compile(function, backend=partial(compile_for_dynamo, build=Interpreted))


def by_export(function: Callable[..., Any], *args: Any) -> Any:
    return compile_module(Module(function).eval(), args, Interpreted)


WAYS = pytest.mark.parametrize("way", [by_export, by_dynamo])
ONE_WAY = pytest.mark.parametrize("way", [pytest.param(by_export, marks=pytest.mark.slow), by_dynamo])


def views(x: torch.Tensor) -> Any:
    y = x * 2
    return y, y[1:], y.t(), y.view(-1), x[1], x.t().unsqueeze(0), (x + 1).expand(2, 3, 3), y


def changed(x: torch.Tensor) -> Any:
    x.add_(1)
    return x[1], x, x.t(), x * 2


def written(x: torch.Tensor) -> Any:
    y = x * 2
    x.copy_(y)
    return y, y[0], x


def one_of_several(x: torch.Tensor) -> Any:
    """Calls that give several results: tensors of their own, and views."""
    y = torch.nn.functional.layer_norm(x, (3,))
    first, second, _ = y.split(1)
    return y, y[0], first, second[0], x.max(0).values.unsqueeze(0)


@pytest.mark.sample(3)
@WAYS
@pytest.mark.parametrize("function", [views, pytest.param(changed, marks=pytest.mark.slow), written, one_of_several])
def test_results_share_memory_as_in_pytorch(way: Any, function: Any) -> None:
    def arguments() -> Any:
        return (torch.arange(9.0).reshape(3, 3),)

    fast = way(function, *arguments())
    for _ in range(2):
        assert same(Program(function.__name__, function), fast, arguments) is None


@ONE_WAY
def test_a_base_that_is_not_contiguous_is_laid_out_as_in_pytorch(way: Any) -> None:
    def function(x: torch.Tensor) -> Any:
        y = x.t() * 2
        return y.t().view(-1), y

    def arguments() -> Any:
        return (torch.arange(6.0).reshape(2, 3),)

    assert same(Program("", function), way(function, *arguments()), arguments) is None


def changed_by_a_later_piece(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    v = y[0]
    print(end="")  # dynamo breaks the graph here
    v.add_(10)
    return y.sum()


def changed_in_a_branch(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    v = y[0]
    if x.sum() > 0:
        v.add_(10)
    return y * 1


@pytest.mark.parametrize("function", [changed_by_a_later_piece, changed_in_a_branch])
def test_views_of_an_earlier_piece_are_changed(function: Any) -> None:
    x = torch.ones(2, 2)
    assert torch.equal(by_dynamo(function)(x), function(x))


def adding(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.add_(1)
    return b * 2


OVERLAPS: dict[str, Callable[[torch.Tensor], Any]] = {
    "same": lambda z: (z, z),
    "shifted": lambda z: (z[1:], z[:-1]),
    "part": lambda z: (z[:2], z),
    "apart": lambda z: (z[:2], z[2:]),
    "turned": lambda z: (z.view(2, 2).t(), z),
    "read": lambda z: (z.clone(), z),
}


@ONE_WAY
def test_overlapping_arguments_change_together(way: Any) -> None:
    """Whichever way they overlapped when the function was compiled."""
    check_overlaps(way, "shifted", ("shifted", "read", "turned"))


@pytest.mark.slow
@WAYS
@pytest.mark.parametrize("first", OVERLAPS)
def test_overlaps_in_any_order(way: Any, first: str) -> None:
    check_overlaps(way, first, (first, *OVERLAPS))


def check_overlaps(way: Any, first: str, overlaps: Sequence[str]) -> None:
    fast = way(adding, *OVERLAPS[first](torch.zeros(4)))
    for overlap in overlaps:
        z, own = torch.arange(4.0), torch.arange(4.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = fast(*OVERLAPS[overlap](own))
        assert torch.equal(found, adding(*OVERLAPS[overlap](z))) and torch.equal(own, z), (first, overlap)


def test_an_argument_that_is_a_buffer_of_the_module_is_named() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return x + self.count

    module = Counting().eval()
    fast = compile_module(module, (torch.zeros(3),), Interpreted)
    with pytest.raises(InputError, match=r"tensor 0 of the arguments shares memory with one that the module holds"):
        fast(module.count)
    assert torch.equal(module.count, torch.zeros(3)) and torch.equal(fast(torch.zeros(3)), torch.ones(3))


def test_arguments_of_other_strides_are_viewed_as_in_pytorch() -> None:
    fast = by_export(lambda x: x.reshape(-1), torch.zeros(2, 3))
    for given in (torch.arange(6.0).reshape(2, 3), torch.arange(6.0).reshape(3, 2).t()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = fast(given)
        wanted = given.reshape(-1)
        assert torch.equal(found, wanted)
        assert (found.data_ptr() == given.data_ptr()) == (wanted.data_ptr() == given.data_ptr())


@pytest.mark.slow
def test_what_shares_memory_is_saved_as_results_of_its_own(kernel_cache: Path, tmp_path: Path) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    options = Options(cache_dir=kernel_cache, threads=2)
    fast = tilewright.compile(Module(lambda x: (x[1], x * 2, (x * 2)[0])).eval(), (x,), options=options)
    fast.save(tmp_path / "saved")
    found = tilewright.load(tmp_path / "saved")(x.numpy())
    for one, other in zip(found, (x[1], x * 2, (x * 2)[0]), strict=True):
        np.testing.assert_array_equal(one, other)


# attributes


class Keeping(nn.Module):
    def __init__(self, change: Callable[[Any], None]) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.n, self.rows, self.table, self.queue = 0, [1, [2]], {"a": {"b": 3}}, deque([4])
        self.own = nn.Module()
        self.own.n = 5
        self.seen: Any = None
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x) * (self.n + self.rows[0] + self.table["a"]["b"])
        self.change(self)
        return y


def _count(module: Any) -> None:
    module.n += 1


def _nested(module: Any) -> None:
    module.table["a"]["b"] += 1


CHANGES: list[tuple[str, Callable[[Any], None]]] = [
    ("n", _count),
    ("rows[1][2]", lambda m: m.rows[1].append(3)),
    ("table['a']['b']", _nested),
    ("queue[2]", lambda m: m.queue.append(5)),
    ("own.n", lambda m: setattr(m.own, "n", m.own.n + 6)),
    ("seen", lambda m: setattr(m, "seen", torch.ones(2))),
]


@pytest.mark.parametrize(
    ("path", "change"),
    [pytest.param(*case, id=case[0], marks=() if k < 3 else pytest.mark.slow) for k, case in enumerate(CHANGES)],
)
def test_a_changed_attribute_is_an_error_that_names_it(path: str, change: Callable[[Any], None]) -> None:
    module = Keeping(change).eval()
    before = (module.n, str(module.rows), str(module.table), str(module.queue), module.own.n, module.seen)
    with pytest.raises(ModelError) as caught:
        compile_module(module, (torch.ones(1, 2),), Interpreted)
    assert f"Keeping: forward changes the attribute '{path}', which compiled code would not do" in str(caught.value)
    after = (module.n, str(module.rows), str(module.table), str(module.queue), module.own.n, module.seen)
    assert after == before and not hasattr(module, "new")


def test_attributes_that_stay_are_no_error() -> None:
    def replaced_by_equals(module: Any) -> None:
        module.n, module.rows, module.seen = 0, [1, [2]], None

    module = Keeping(replaced_by_equals).eval()
    compile_module(module, (torch.ones(1, 2),), Interpreted)


# random programs


def check(seed: int, way: Any, breaks: bool) -> None:
    program, arguments = make(seed, breaks)
    fast = way(program.run, *arguments())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            assert same(program, fast, arguments) is None


@WAYS
@pytest.mark.parametrize("seed", [3])
def test_random_programs(seed: int, way: Any) -> None:
    check(seed, way, way is by_dynamo)


@pytest.mark.slow
@pytest.mark.part(5)
@WAYS
@pytest.mark.parametrize("seed", range(200))
def test_many_random_programs(seed: int, way: Any) -> None:
    check(seed, way, way is by_dynamo)


class Once(torch.nn.Module):
    """Keeps from its first run what later ones use, and counts runs in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table: dict[str, torch.Tensor] = {}
        self.is_ready = False
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        if not self.is_ready:
            self.is_ready, self.table["bias"] = True, torch.arange(3.0)
            return x
        return x + self.table["bias"]


def test_what_a_module_makes_at_its_first_run_is_no_change() -> None:
    """It is compiled as it runs from then on."""
    module = Once().eval()
    compiled = compile_module(module, (torch.ones(2, 3),), Interpreted)
    assert module.is_ready and module.runs == 0
    np.testing.assert_array_equal(compiled(torch.ones(2, 3)).numpy(), np.tile(np.arange(1.0, 4.0), (2, 1)))
    assert module.runs == 1


def test_recurrent_modules_keep_books_on_their_weights() -> None:
    module = torch.nn.LSTM(3, 4, batch_first=True).eval()
    x = torch.randn(1, 2, 3)
    with torch.no_grad():
        wanted = module(x)[0].numpy()
        np.testing.assert_allclose(compile_module(module, (x,), Interpreted)(x)[0].numpy(), wanted, atol=1e-6)
