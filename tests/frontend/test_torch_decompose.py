"""Calls written out once a kind: what comes out is what PyTorch makes of the whole module, to the node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch, a development extra")

from torch import Tensor, fx, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

from tilewright.frontend.pytorch.aliases import storages  # noqa: E402
from tilewright.frontend.pytorch.decompose import FOLLOWED, decomposed  # noqa: E402
from tilewright.frontend.pytorch.fx import decompositions, is_check  # noqa: E402


def parts(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    _, c = x.to(torch.float64).tensor_split(2, -1)
    return torch.cat([F.silu(a), b.to(torch.float32).softmax(-1) + c.to(x.dtype)], -1)


def attention(x: Tensor) -> Tensor:
    q = x.reshape(2, 6, 2, 4).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(2, 6, 8) + F.layer_norm(x, (8,))


def copies_and_views(x: Tensor) -> Tensor:
    y = F.dropout(x.contiguous().to(x.dtype), 0.5, False).flatten(1).reshape(2, 6, 8)
    return y.t_copy() if y.dim() == 2 else torch.narrow(torch.cat([y, y.transpose(0, 1).reshape(2, 6, 8)]), 0, 1, 2)


def images(x: Tensor) -> Tensor:
    y = F.group_norm(x.unsqueeze(0), 2)
    y = F.conv2d(y, torch.ones(2, 2, 1, 1))
    return F.instance_norm(y).flatten(0, 1) + F.pad(x, (1, 1))[..., 1:-1]


class Repeated(nn.Module):
    def __init__(self, layer: Callable[[Tensor], Tensor], times: int = 8) -> None:
        super().__init__()
        self.layer, self.times = layer, times

    def forward(self, x: Tensor) -> Any:
        y = x
        for _ in range(self.times):
            y = self.layer(y)
        # a view of an argument, a view of a result, and an argument
        return y, x.reshape(-1), y.to(y.dtype).flatten(1), x.contiguous()


def described(program: torch.export.ExportedProgram) -> list[Any]:
    """Every node: what it calls, of which nodes, how its results lie; at last which outer tensors share memory."""
    place: dict[fx.Node, int] = {}
    found: list[Any] = []
    program.graph.eliminate_dead_code()
    for node in program.graph.nodes:
        if is_check(node):
            continue
        arguments = fx.map_arg((node.args, node.kwargs), lambda n: f"%{place[n]}")
        called = str(node.target) if node.op == "call_function" else ""
        values = pytree.tree_leaves(node.meta.get("val")) if node.op != "output" else []
        lying = [(x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x for x in values]
        found.append((node.op, called, repr(arguments), lying))
        place[node] = len(place)
    outer = [n for n in place if n.op == "placeholder"] + next(n for n in place if n.op == "output").all_input_nodes
    found.append([(place[a], place[b]) for a in outer for b in outer if storages(a) & storages(b)])
    return found


def exported(module: nn.Module, *args: Any, **named: Any) -> torch.export.ExportedProgram:
    with torch.no_grad():
        return torch.export.export(module.eval(), args, strict=False, **named)


@pytest.mark.parametrize("layer", [parts, attention, copies_and_views, images])
def test_it_is_what_pytorch_makes_of_the_whole(layer: Callable[[Tensor], Tensor]) -> None:
    program = exported(Repeated(layer), torch.rand(2, 6, 8))
    whole = described(program.run_decompositions(decompositions()))
    assert decomposed(program) is program  # not followed again
    assert described(program) == whole


def adds_in_place(x: Tensor) -> Tensor:
    y = x * 1
    y[0] += 1
    return y.softmax(-1)


def branches(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: F.silu(x), lambda x: x.softmax(-1), (x,))


def own_constants(x: Tensor) -> Tensor:
    return F.silu(x) * torch.tensor([1.5] * 8)


@pytest.mark.parametrize("layer", [adds_in_place, branches, own_constants])
def test_what_is_more_than_calls_is_right_as_well(layer: Callable[[Tensor], Tensor]) -> None:
    program = exported(Repeated(layer), torch.rand(2, 6, 8))
    whole = described(program.run_decompositions(decompositions()))
    assert described(decomposed(program)) == whole


def test_open_sizes_are_followed_as_a_whole() -> None:
    rows = torch.export.Dim("rows", min=2, max=64)
    program = exported(Repeated(nn.Softmax(-1)), torch.rand(6, 8), dynamic_shapes={"x": {0: rows}})
    assert decomposed(program) is not program


def test_few_calls_of_a_kind_are_followed_as_a_whole() -> None:
    program = exported(Repeated(parts, 1), torch.rand(2, 6, 8))
    calls = [n for n in program.graph.nodes if n.op == "call_function"]
    assert len(calls) < FOLLOWED * len({n.target for n in calls})
    assert decomposed(program) is not program
