"""Exported modules in core ATen: each kind of call is written out once, however many layers make it.

PyTorch's own `run_decompositions` follows the whole module a second time, as long as exporting it took. It is asked
for one call of each kind instead, and what it makes of that stands in the place of all calls of that kind. It follows
the whole where this would not be the same: where something is changed in place, where there are branches and loops,
and where sizes are open.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._C import DispatchKey
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from tilewright.frontend.pytorch.fx import decompositions, is_check
from tilewright.frontend.pytorch.higher_order import closure, is_control
from tilewright.frontend.pytorch.mutations import changed_by

# A kind of call costs as much as this many calls of the whole: SegFormer, 79 kinds among 300 calls, 3.4 CPU s of 3.2.
FOLLOWED = 4


def decomposed(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program without calls that PyTorch decomposes; it is changed itself, but for its signature's names."""
    calls = [n for n in program.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
    calls = [n for n in calls if not is_check(n)]
    if not all(map(_is_plain, program.graph.nodes)) or not all(map(_stands_alone, calls)):
        return program.run_decompositions(decompositions())
    kinds: dict[Hashable, fx.Node] = {}
    composite = {n: _kind(n) for n in calls if _is_composite(n)}
    for node, kind in composite.items():
        kinds.setdefault(kind, node)
    bodies = _bodies(list(kinds.values())) if FOLLOWED * len(kinds) < len(calls) else [None]
    if None in bodies:
        return program.run_decompositions(decompositions())
    of = dict(zip(kinds, bodies, strict=True))
    for node, kind in composite.items():
        body = of[kind]
        assert body is not None
        if not body.is_this(node):
            _write_out(node, body)
    program.graph.lint()
    program.graph_module.recompile()
    return program


def _is_composite(node: fx.Node) -> bool:
    """Whether PyTorch may have an operator as several others: by a table, or by its own implementation."""
    called = node.target
    assert isinstance(called, torch._ops.OpOverload)
    return called in decompositions() or called.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)


def _is_plain(node: fx.Node) -> bool:
    """Whether all of a node's tensors are of fixed sizes, and lie in the usual way."""
    return all(
        x.layout is torch.strided and all(isinstance(n, int) for n in (*x.shape, *x.stride(), x.storage_offset()))
        if isinstance(x, torch.Tensor)
        else isinstance(x, int | float | bool | str | None)
        for x in pytree.tree_leaves(node.meta.get("val"))
    )


def _stands_alone(node: fx.Node) -> bool:
    """Whether a call gives new tensors, or views of those it is given, does nothing else, and is followed by itself."""
    if not isinstance(node.target, torch._ops.OpOverload) or changed_by(node):
        return False
    if not all(isinstance(n.meta.get("val"), torch.Tensor) for n in node.all_input_nodes):
        return False
    is_one = isinstance(node.meta.get("val"), torch.Tensor)
    return is_one or all(user.target is operator.getitem for user in node.users)


def _kind(node: fx.Node) -> Hashable:
    """What tells one call from another: its operator, how the tensors lie that it is given, and its other arguments."""
    arguments, structure = pytree.tree_flatten((node.args, node.kwargs))
    return node.target, str(structure), tuple(map(_like, arguments))


def _like(argument: Any) -> Hashable:
    if not isinstance(argument, fx.Node):
        return type(argument), repr(argument)  # 1, 1.0 and True are equal
    x = argument.meta["val"]
    return x.dtype, tuple(x.shape), x.stride(), x.storage_offset(), x.device


@dataclass(frozen=True)
class _Body:
    """What a call of a kind is written out as: nodes in order, what stands for the tensors it is given, and results."""

    nodes: Sequence[fx.Node]
    tensors: Sequence[fx.Node]
    results: Sequence[fx.Node]

    def is_this(self, call: fx.Node) -> bool:
        """Whether nothing is left to write out."""
        made = [n for n in self.nodes if n.target is not operator.getitem]
        if [n.target for n in made] != [call.target]:
            return False
        places = iter(range(len(self.tensors)))
        given = fx.map_arg((call.args, call.kwargs), lambda _: next(places))
        return bool(fx.map_arg((made[0].args, made[0].kwargs), self.tensors.index) == given)


class _Calls(torch.nn.Module):
    """One call of each kind, on tensors of its own."""

    def __init__(self, calls: Sequence[fx.Node]) -> None:
        super().__init__()
        self._calls = calls

    def forward(self, *tensors: torch.Tensor) -> Any:
        left = iter(tensors)
        found = []
        for call in self._calls:
            args, named = fx.map_arg((call.args, call.kwargs), lambda _: next(left))
            found.append(call.target(*args, **named))  # type: ignore[operator]
        return found


def _bodies(calls: Sequence[fx.Node]) -> list[_Body | None]:
    """What PyTorch makes of each call; None where it holds tensors of its own."""
    with FakeTensorMode():
        examples = [_example(n) for call in calls for n in _tensors(call)]
    with torch.no_grad():
        program = torch.export.export(_Calls(calls), tuple(examples), strict=False)
    program = program.run_decompositions(decompositions())
    given = set(program.graph_signature.user_inputs)
    places = iter([n for n in program.graph.nodes if n.op == "placeholder" and n.name in given])
    results = iter(next(n for n in program.graph.nodes if n.op == "output").args[0])
    found: list[_Body | None] = []
    for call in calls:
        tensors = [next(places) for _ in _tensors(call)]
        own = [next(results) for _ in pytree.tree_leaves(call.meta["val"])]
        found.append(_body(tensors, own, program.graph.nodes))
    return found


def _body(tensors: Sequence[fx.Node], results: Sequence[fx.Node], order: Iterable[fx.Node]) -> _Body | None:
    if not all(isinstance(n, fx.Node) for n in results):
        return None
    needed = closure(results)
    nodes = [n for n in order if n in needed and n not in tensors]
    is_plain = all(n.op == "call_function" and not is_control(n) for n in nodes)
    return _Body(nodes, tensors, results) if is_plain else None


def _tensors(call: fx.Node) -> list[fx.Node]:
    """The tensors that a call is given, one as often as it is."""
    return [n for n in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(n, fx.Node)]


def _example(node: fx.Node) -> torch.Tensor:
    x = node.meta["val"]
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _write_out(call: fx.Node, body: _Body) -> None:
    """The body's nodes in the place of a call."""
    declared = call.meta["val"]
    several = isinstance(declared, tuple | list)
    values = dict(zip(body.results, declared if several else [declared], strict=True))
    made: dict[fx.Node, fx.Node] = dict(zip(body.tensors, _tensors(call), strict=True))
    with call.graph.inserting_before(call):
        for node in body.nodes:
            made[node] = call.graph.call_function(
                node.target,  # type: ignore[arg-type]
                *fx.map_arg((node.args, node.kwargs), made.__getitem__),
            )
            # whose memory it is is known by its values: those between are made of those that the call is given
            value = values[node] if node in values else _value(made[node])
            made[node].meta = {**call.meta, "val": value}
    results = [made[n] for n in body.results]
    for user in list(call.users) if several else ():
        user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
        call.graph.erase_node(user)
    if not several:
        call.replace_all_uses_with(results[0])
    call.graph.erase_node(call)


def _value(node: fx.Node) -> Any:
    args, named = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    modes = [x.fake_mode for x in pytree.tree_leaves((args, named)) if isinstance(x, FakeTensor)]
    with torch.no_grad(), modes[0] if modes else FakeTensorMode():
        return node.target(*args, **named)  # type: ignore[operator]
