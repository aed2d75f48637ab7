"""tilewright.compile of a torch.nn.Module: results, structures, changes in place, shapes, parameters, messages."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tilewright
from tilewright import InputError, ModelError, OptionError, Options, UnsupportedError
from tilewright.frontend.pytorch.exported import export


@pytest.fixture
def options(kernel_cache: Path) -> Options:
    return Options(cache_dir=kernel_cache, threads=2)


def compiled(module: nn.Module, inputs: Any, options: Options) -> Any:
    return tilewright.compile(module.eval(), inputs, options=options)


def agree(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.second(self.drop(torch.relu(self.first(x)))) * scale


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def test_it_is_called_like_the_module(net: Net, options: Options) -> None:
    fast = compiled(net, (torch.zeros(4, 5),), options)
    x = torch.randn(4, 5)
    agree(fast(x), net(x).detach())
    assert type(fast(x)) is torch.Tensor and not fast(x).requires_grad
    assert "1 of 1" in fast.explain() and "4, 5" in fast.explain()
    assert fast.profile(x, repeat=1).calls


def test_one_tensor_or_names_will_do(net: Net, options: Options) -> None:
    x = torch.randn(4, 5)
    agree(compiled(net, x, options)(x), net(x).detach())
    agree(compiled(net, {"x": x}, options)(x=x), net(x).detach())


def test_what_is_no_tensor_is_part_of_the_model(net: Net, options: Options) -> None:
    x = torch.randn(4, 5)
    fast = compiled(net, (x, 2.0), options)
    agree(fast(x, 2.0), net(x, 2.0).detach())
    with pytest.warns(UserWarning, match="has not met these shapes"):
        agree(fast(x, 3.0), net(x, 3.0).detach())


class Structured(nn.Module):
    def forward(self, pair: tuple[torch.Tensor, torch.Tensor], more: dict[str, torch.Tensor]) -> Any:
        a, b = pair
        return {"sum": a + b, "rest": (a, None, 3, [more["x"] * 2, a + b])}


def test_structures_come_back(options: Options) -> None:
    a, b, x = torch.randn(2, 3), torch.randn(3), torch.randn(4)
    found = compiled(Structured(), ((a, b), {"x": x}), options)((a, b), {"x": x})
    agree(found["sum"], a + b)
    same, nothing, number, (double, again) = found["rest"]
    assert same is a and nothing is None and number == 3
    agree(double, x * 2)
    agree(again, a + b)


class Difference(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x - 2 * y


def test_one_tensor_given_twice_is_two_inputs(options: Options) -> None:
    x = torch.randn(3)
    agree(compiled(Difference(), (x, x), options)(x, x + 1), x - 2 * (x + 1))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        state.mul_(2)
        part = x[:, 1:]
        part += 1  # a view of a copy
        return x.clone() + self.count + state


def test_changes_in_place_are_written_back(options: Options) -> None:
    module, like = Counting(), Counting()
    x, state = torch.randn(3, 2), torch.ones(2)
    own, other = state.clone(), state.clone()
    fast = compiled(module, (x.clone(), own.clone()), options)
    for _ in range(3):
        mine, theirs = x.clone(), x.clone()
        agree(fast(mine, own), like(theirs, other))
        agree(mine, theirs)
        agree(own, other)
        agree(module.count, like.count)
    assert fast.compilations == 1


def test_other_shapes_are_compiled_once_and_found_again(net: Net, options: Options) -> None:
    fast = compiled(net, (torch.zeros(4, 5),), options)
    with pytest.warns(
        UserWarning, match=r"Net: it has not met these shapes, so it is compiled again \(1 times before\)"
    ):
        agree(fast(torch.ones(6, 5)), net(torch.ones(6, 5)).detach())
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fast(torch.ones(6, 5)), fast(torch.ones(4, 5))
    assert fast.compilations == 2 and len(fast.models) == 2


def test_shapes_are_bounded(net: Net, options: Options) -> None:
    from tilewright.api import compile_graph
    from tilewright.pytorch.module import CompiledModule

    fast = CompiledModule(net, (torch.zeros(1, 5),), {}, lambda graph: compile_graph(graph, options), most_shapes=2)
    with pytest.warns(UserWarning, match="more than 2 sets of shapes: the oldest model is dropped"):
        for rows in (2, 3):
            fast(torch.zeros(rows, 5))
    assert len(fast.models) == 2 and fast.compilations == 3


def test_parameters_are_views_of_the_modules_memory(net: Net) -> None:
    graph = export(net, (torch.zeros(4, 5),), {}).graph
    own = {id(p): p.detach().numpy() for p in net.parameters()}
    shared = [a for a in graph.constants.values() if any(np.shares_memory(a, p) for p in own.values())]
    assert len(shared) == len(own)


def test_changed_parameters_are_noticed(net: Net, options: Options) -> None:
    x = torch.randn(4, 5)
    fast = compiled(net, (x,), options)
    with torch.no_grad():
        net.first.weight.mul_(2)
    with pytest.warns(UserWarning, match="its parameters have changed"):
        agree(fast(x), net(x).detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_tensors_go_in_and_out_without_a_copy(dtype: torch.dtype, options: Options) -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    x = torch.randn(3, 4).to(dtype)
    fast = compiled(Twice(), (x,), options)
    seen: list[int] = []
    (entry,) = fast._entries.values()
    native = entry.call._native
    entry.call._native = lambda inputs, outputs: (seen.extend((*inputs, *outputs)), native(inputs, outputs))
    result = fast(x)
    agree(result, x * 2)
    assert seen == [x.data_ptr(), result.data_ptr()]


def test_transposed_inputs_are_read_as_they_are_meant(net: Net, options: Options) -> None:
    fast = compiled(net, (torch.zeros(4, 5),), options)
    turned = torch.randn(5, 4).T
    agree(fast(turned), net(turned).detach())


def test_calls_from_several_threads(net: Net, options: Options) -> None:
    fast = compiled(net, (torch.zeros(4, 5),), options)
    wrong: list[object] = []

    # while PyTorch traces a module in one thread, that module may not be called in another
    given = [torch.randn(4 + seed % 2, 5) for seed in range(8)]
    wanted = [net(x).detach() for x in given]

    def call(seed: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(20):
                if not torch.allclose(fast(given[seed]), wanted[seed], rtol=1e-4, atol=1e-5):
                    wrong.append(seed)

    threads = [threading.Thread(target=call, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and fast.compilations == 2


# what is refused


class Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.svdvals(torch.special.bessel_j0(torch.special.bessel_j0(x)))


def test_all_missing_operators_are_named_at_once(options: Options) -> None:
    with pytest.raises(UnsupportedError) as caught:
        compiled(Unknown(), (torch.randn(3, 3),), options)
    text = str(caught.value)
    assert "aten.special_bessel_j0.default (2 nodes, first at 'special_bessel_j0')" in text
    assert "aten._linalg_svd.default (1 node" in text
    assert text.endswith('torch.compile(module, backend="tilewright") leaves such to PyTorch') and "\n" not in text


def test_training_mode_is_refused(options: Options) -> None:
    with pytest.raises(ModelError, match=r"Net is in training mode.*call module.eval\(\) first"):
        tilewright.compile(Net().train(), (torch.zeros(4, 5),), options=options)


def test_gradients_are_refused(net: Net, options: Options) -> None:
    fast = compiled(net, (torch.zeros(4, 5),), options)
    x = torch.randn(4, 5, requires_grad=True)
    with pytest.raises(InputError, match="keeps no gradients"):
        fast(x)
    with torch.no_grad():
        agree(fast(x), net(x))


def test_parameters_that_require_gradients_are_told_once(net: Net, options: Options) -> None:
    x = torch.zeros(4, 5)
    fast = compiled(net, (x,), options)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fast(x)
    with pytest.warns(UserWarning, match="Net: its parameters require gradients, and the result .* has none") as caught:
        fast(x), fast(x)
    assert len([w for w in caught if "gradients" in str(w.message)]) == 1


def test_pytorchs_own_deprecations_are_not_the_users(net: Net) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        export(net, (torch.zeros(4, 5),), {})


def test_compilations_at_a_call_are_logged(net: Net, options: Options, caplog: pytest.LogCaptureFixture) -> None:
    fast = compiled(net, (torch.zeros(4, 5),), options)
    with caplog.at_level("INFO", "tilewright"), pytest.warns(UserWarning, match="has not met these shapes"):
        fast(torch.zeros(6, 5))
    (line,) = [r.message for r in caplog.records if r.name == "tilewright"]
    assert line.startswith("compiled Net for 6x5 in ") and line.endswith(" s")


def test_examples_are_needed_and_shapes_are_not(net: Net) -> None:
    with pytest.raises(OptionError, match="needs inputs to follow it with"):
        tilewright.compile(net)  # type: ignore[call-overload]
    with pytest.raises(OptionError, match="shapes are those of the example inputs"):
        tilewright.compile(net, (torch.zeros(4, 5),), shapes={"x": 3})
    with pytest.raises(OptionError, match="example inputs are for modules of PyTorch"):
        tilewright.compile(b"", (1,))  # type: ignore[call-overload]


class Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = torch.cond(x.sum() > 0, lambda x: self.inner(x).relu() + 1, lambda x: x * 2, (x,))
        return chosen + 1


def test_branches_by_torch_cond(options: Options) -> None:
    module = Choosing().eval()
    fast = compiled(module, (torch.ones(2, 3),), options)
    for x in (torch.ones(2, 3), -torch.ones(2, 3)):
        agree(fast(x), module(x).detach())


class Listing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + len(bytes(x.numpy()))


def test_what_torch_export_cannot_follow_is_one_line(options: Options) -> None:
    with pytest.raises(ModelError, match="torch.export cannot follow Listing: ") as caught:
        compiled(Listing(), (torch.zeros(3),), options)
    assert "\n" not in str(caught.value)


def test_the_package_alone_does_not_import_torch() -> None:
    code = "import sys, tilewright, tilewright.integrations.torch_backend; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_module_is_saved_as_a_model(options: Options, tmp_path: Path) -> None:
    module = torch.nn.Linear(4, 3).eval()
    x = torch.randn(2, 4)
    fast = tilewright.compile(module, (x,), options=options)
    fast.save(tmp_path / "saved")
    (found,) = tilewright.load(tmp_path / "saved")(x.numpy())
    np.testing.assert_allclose(found, module(x).detach().numpy(), rtol=1e-5, atol=1e-6)
    with pytest.warns(UserWarning, match="has not met these shapes"):
        fast(torch.randn(3, 4))
    with pytest.raises(OptionError, match="one model for one set of shapes, and this module is 2 for 2"):
        fast.save(tmp_path / "both")


def test_a_module_that_changes_its_buffers_is_not_saved(options: Options, tmp_path: Path) -> None:
    class Counts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return x + self.count

    with pytest.raises(OptionError, match="changes buffers or inputs in place"):
        tilewright.compile(Counts().eval(), (torch.ones(2),), options=options).save(tmp_path / "saved")
