"""Gradients of a Program against PyTorch's, reads turned round against trying every index, and what has none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from tilewright.errors import OptionError, UnsupportedError
from tilewright.ir.analysis.verify import verify_program
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import Map, Program, Reduce, plain_monoid
from tilewright.ir.forms.expr import Axis, Const, Expr, const, load, op, substitute, var
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.meaning.interpret import evaluate
from tilewright.ops import lower
from tilewright.transform.gradient.backward import gradients
from tilewright.transform.gradient.inverse import readings
from tilewright.transform.gradient.optimisers import SGD, Adam
from tilewright.transform.gradient.step import training_step

torch = pytest.importorskip("torch")
F = torch.nn.functional
RNG = np.random.default_rng(0)


class Of(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A function of an input and two weights, made a loss by weights of its own."""

    def __init__(self, function: Callable[..., object], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.first, self.second = (torch.nn.Parameter(torch.randn(shape)) for shape in shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.function(x, self.first, self.second)
        scale = torch.linspace(-1, 1, found.numel()).reshape(found.shape)  # type: ignore[attr-defined]
        return (found * scale).sum() + x.sum()


def check(module: torch.nn.Module, *inputs: torch.Tensor) -> None:
    from tilewright.pytorch.training import trained_graph

    found = trained_graph(module, inputs, 1)
    program = lower(found.graph)
    by_name = {t.name: t for t in program.inputs}
    weights = [by_name[name] for name in found.weights]
    made = gradients(program, program.outputs[0], weights)
    whole = Program(program.inputs, tuple(made.of[w] for w in weights), (*program.computes, *made.computes),
                    program.constants)  # fmt: skip
    verify_program(whole)
    given = dict(zip((t.name for t in program.inputs if t.name not in found.weights), inputs, strict=True))
    results = evaluate(whole, {**{n: x.numpy() for n, x in given.items()}, **found.weights})
    module(*inputs).backward()
    right = dict(module.named_parameters())
    for weight in weights:
        wanted = right[found.names[weight.name]].grad.numpy()
        np.testing.assert_allclose(results[made.of[weight].name], wanted, rtol=2e-4, atol=2e-5, err_msg=weight.name)


CASES: dict[str, tuple[Callable[..., object], tuple[int, ...], tuple[int, ...]]] = {
    "products and a broadcast": (lambda x, w, b: torch.tanh(x @ w) + b, (6, 4), (4,)),
    "a row of both": (lambda x, w, b: (x * w).sum(0) / (1 + b * b), (5, 6), (6,)),
    "softmax": (lambda x, w, b: torch.softmax(x @ w + b, -1), (6, 7), (7,)),
    "the largest": (lambda x, w, b: (x @ w).amax(1) * b, (6, 3), (5,)),
    "scalar functions": (
        lambda x, w, b: torch.exp(-w.abs()) * torch.sigmoid(b) + (b * b + 1).sqrt() ** 3 - torch.erf(w) * torch.cos(b),
        (5, 6), (6,),
    ),
    "reshaped": (lambda x, w, b: (w.reshape(8, 3).t().reshape(4, 6) @ b).reshape(-1), (6, 4), (6, 2)),
    "cut and joined": (lambda x, w, b: torch.cat([w[1:, ::2], b, w[:2, 3:]], 1), (3, 6), (2, 2)),
    "padded": (lambda x, w, b: F.pad(w, (1, 2)) * b, (3, 4), (7,)),
    "looked up": (lambda x, w, b: w[torch.tensor([2, 0, 2, 1])] * b, (3, 5), (5,)),
    "by steps of two": (
        lambda x, w, b: F.conv1d(F.conv1d(x.reshape(1, 3, 10), w, padding=1, stride=2), b, padding=2),
        (4, 3, 3), (2, 4, 3),
    ),
    "pooled": (lambda x, w, b: F.max_pool1d((x[:, :4] @ w).reshape(1, 5, 12), 3, 2, 1) * b, (4, 12), (6,)),
    "normalised": (lambda x, w, b: F.layer_norm(x, (6,), w, b), (6,), (6,)),
}  # fmt: skip


QUICK = ("softmax", "reshaped", "by steps of two")  # each of another kind; the others are for --all


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_gradients_are_those_of_pytorch(name: str) -> None:
    function, *shapes = CASES[name]
    torch.manual_seed(1)
    check(Of(function, *shapes), torch.randn(5, 6))


@pytest.mark.slow
def test_a_tied_parameter_is_one_weight() -> None:
    class Tied(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7, bias=False)
            self.head.weight = self.table.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.head(torch.tanh(self.table(x))), x)

    torch.manual_seed(0)
    check(Tied(), torch.tensor([1, 5, 5, 0]))


a, b, c = Axis("a", 4), Axis("b", 3), Axis("c", 2)


@pytest.mark.parametrize("indices, shape", [
    ((var(a), var(b) * 2 + var(c)), (4, 6)),
    (((var(a) * 3 + var(b)) // 4, (var(a) * 3 + var(b)) % 4), (3, 4)),
    ((((var(a) * 3 + var(b)) * 2 + var(c)) // 12, ((var(a) * 3 + var(b)) * 2 + var(c)) // 4 % 3,
      ((var(a) * 3 + var(b)) * 2 + var(c)) % 4), (2, 3, 4)),
    ((var(a) * 2 + var(b) - 1 + var(c) * 0,), (9,)),
    ((const(3) - var(a), var(c)), (4, 2)),
    ((var(a) + var(b), var(b) + var(c)), (7, 5)),
    ((op("min", var(a) + var(b), const(2)),), (5,)),
    ((const(1), var(b)), (3, 3)),
])  # fmt: skip
def test_a_read_turned_round_finds_every_index_once(indices: tuple[Expr, ...], shape: tuple[int, ...]) -> None:
    """Reads beside the tensor, as those of paddings are, belong to no element."""
    domain = (a, b, c)
    found = readings(indices, shape, domain)
    for element in product(*map(range, shape)):
        right = sorted(at for at in product(range(4), range(3), range(2))
                       if tuple(_value(i, dict(zip(domain, at, strict=True))) for i in indices) == element)  # fmt: skip
        met = []
        for at in product(*(range(int(axis.extent)) for axis in found.left)):  # type: ignore[arg-type]
            env = {**dict(zip(found.axes, element, strict=True)), **dict(zip(found.left, at, strict=True))}
            if _value(found.condition, env):
                met.append(tuple(_value(found.values.get(axis, var(axis)), env) for axis in domain))
        assert sorted(met) == right, element


def _value(expression: Expr, at: dict[Axis, int]) -> int:
    from tilewright.ir.analysis.simplify import simplify

    found = simplify(substitute(expression, at))  # type: ignore[arg-type]
    assert isinstance(found, Const)
    return int(found.value)


def test_what_has_no_gradient_is_named() -> None:
    x, y, loss = (Tensor(n, s, dtypes.float32) for n, s in (("x", (4,)), ("y", ()), ("loss", ())))
    r = Axis("r", 4)
    product_of = Reduce((y,), (), (r,), (load(x, [var(r)]),), plain_monoid("mul", dtypes.float32), "node 'p'")
    program = Program((x,), (loss,), (product_of, Map(loss, (), load(y, []))))
    with pytest.raises(UnsupportedError, match="node 'p': there is no gradient of a reduce by mul"):
        gradients(program, loss, [x])
    with pytest.raises(UnsupportedError, match="'x' is no single number"):
        gradients(program, x, [x])
    with pytest.raises(OptionError, match="depends on no weight"):
        training_step(replace(program, inputs=(x,)), {}, SGD(0.1))


@pytest.mark.parametrize("optimiser", [SGD(0.1), SGD(0.05, 0.9), Adam(0.01)], ids=["sgd", "momentum", "adam"])
def test_optimisers_do_what_those_of_pytorch_do(optimiser: SGD | Adam) -> None:
    w, loss = Tensor("w", (3,), dtypes.float32), Tensor("loss", (), dtypes.float32)
    r = Axis("r", 3)
    square = Reduce((loss,), (), (r,), (load(w, [var(r)]) * load(w, [var(r)]),), plain_monoid("add", dtypes.float32))
    start = RNG.standard_normal(3).astype(np.float32)
    step = training_step(Program((w,), (loss,), (square,)), {"w": start}, optimiser)
    program = replace(step.program, outputs=tuple(step.states.values()))
    state = {t.name: array for t, array in step.initial.items()}
    right = torch.nn.Parameter(torch.tensor(start))
    other = torch.optim.Adam([right], optimiser.rate) if isinstance(optimiser, Adam) else \
        torch.optim.SGD([right], optimiser.rate, optimiser.momentum)  # fmt: skip
    for count in range(1, 6):
        found = evaluate(program, {**state, step.rates.name: optimiser.rates(count)})
        state = {old.name: found[new.name] for old, new in step.states.items()}
        other.zero_grad()
        (right * right).sum().backward()
        other.step()
        np.testing.assert_allclose(state["w"], right.detach().numpy(), rtol=1e-5, atol=1e-6)
    with pytest.raises(OptionError, match="rate of an optimiser is at least 0"):
        SGD(-1.0)
