"""Modules of PyTorch to Graphs by torch.export: what is read, what comes out, and what the module changes in place."""

from __future__ import annotations

import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any, Literal

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch._export import non_strict_utils
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from tilewright import errors
from tilewright.errors import ModelError, TilewrightError, UnsupportedError
from tilewright.frontend.pytorch.aliases import (
    OverlapGroup,
    ViewChain,
    laid_out,
    shared_outputs,
    storages,
    view_beside,
    view_of,
)
from tilewright.frontend.pytorch.attributes import Snapshot, snapshot
from tilewright.frontend.pytorch.decompose import decomposed
from tilewright.frontend.pytorch.fx import FxParts, make_graph
from tilewright.frontend.pytorch.higher_order import closure
from tilewright.frontend.pytorch.mutations import Mutation, make_bodies_functional
from tilewright.frontend.pytorch.own_operators import one_of
from tilewright.frontend.pytorch.python.copies import follow_copies
from tilewright.frontend.pytorch.python.module import (
    asks_for_kinds,
    catches_errors,
    loops_over_elements,
    rewritten_control,
)
from tilewright.frontend.pytorch.python.values import CODE_ERRORS, NO_TEXT
from tilewright.frontend.pytorch.tensors import constant_of
from tilewright.ir.forms.graph import Graph

_PLACE = re.compile(r"\.py:\d")
Followed = tuple[torch.export.ExportedProgram, tuple[Mutation, ...]]


@dataclass(frozen=True)
class InputPlace:
    """Where a tensor comes from or goes to: a leaf of the call's arguments,
    the memory of several leaves (an OverlapGroup), a
    result of the Graph, a tensor that the module holds, or a plain value; or a view of one of these."""

    kind: Literal["leaf", "group", "result", "tensor", "value"]
    what: Any
    view: ViewChain | None = None

    def tensor(self, leaves: Sequence[Any], results: Sequence[torch.Tensor]) -> Any:
        match self.kind:
            case "leaf":
                found = leaves[self.what]
            case "group":
                found = self.what.base(leaves)
            case "result":
                found = results[self.what]
            case _:
                found = self.what
        return found if self.view is None else self.view.of(found)


@dataclass(frozen=True)
class Exported:
    """A module for arguments of certain shapes: a Graph, or what has to be cut into several."""

    graph: Graph
    inputs: tuple[InputPlace, ...]  # of the Graph
    outputs: tuple[InputPlace, ...]  # leaves of what the module returns
    structure: Any  # of what it returns
    changes: tuple[
        tuple[InputPlace, int], ...
    ]  # tensors that the module changes in place, and the results that they get
    constants: tuple[torch.Tensor, ...]  # parameters whose values are in the Graph
    bases: Mapping[int, torch.Tensor]  # what results are like in PyTorch that outputs are views of
    copying: Callable[[], Graph] | None  # where outputs are views, a Graph that has them all as results of its own
    mutations: tuple[Mutation, ...]  # what the module changes in place, and what became of that

    @property
    def changes_arguments(self) -> bool:
        return any(place.kind != "tensor" for place, _ in self.changes)

    @property
    def views_arguments(self) -> bool:
        return any(place.view is not None and place.kind in ("leaf", "group") for place in self.outputs)

    def returned(self, leaves: Sequence[Any], results: Sequence[torch.Tensor]) -> list[Any]:
        """What the module returns for these leaves of its arguments, when it has changed what it changes."""
        if not self.changes and not self.bases:
            return [place.tensor(leaves, results) for place in self.outputs]
        with torch.no_grad():
            for target, k in self.changes:
                target.tensor(leaves, results).copy_(results[k])
            found = [laid_out(x, self.bases[k]) if k in self.bases else x for k, x in enumerate(results)]
            return [place.tensor(leaves, found) for place in self.outputs]


def export(
    module: torch.nn.Module, args: Sequence[Any], named: Mapping[str, Any], groups: Sequence[OverlapGroup] = ()
) -> Exported:
    """The module as it runs on arguments like these. Those that overlap, as `groups` tell, are one input; otherwise
    every tensor is one of its own."""
    leaves, structure = pytree.tree_flatten((tuple(args), dict(named)))
    origins = [InputPlace("leaf", k) for k in range(len(leaves))]
    followed = module
    given, by_name = _distinct(tuple(args), dict(named))
    if groups:
        tied = _Tied(module, leaves, structure, groups)
        origins = [*(InputPlace("group", group) for group in groups), *(InputPlace("leaf", k) for k in tied.free)]
        # each begins its memory, so that a place in that is a place in the tensor
        examples = tuple(place.tensor(leaves, ()).detach().clone() for place in origins)
        followed, given, by_name = tied, examples, {}
    name = type(module).__name__
    if loops_over_elements(module):
        found = _with_long_loops(
            module, lambda: _read(followed, *_program(module, followed, given, by_name), origins, name)
        )
        if found is not None:
            return found
    refusal: TilewrightError | None = None
    # where this would not see that something is not followed, the source comes first
    is_misled = catches_errors(module) or asks_for_kinds(module)

    def as_it_is() -> Followed:
        with _texts_refused():
            return _program(module, followed, given, by_name)

    own: Exported | None = None
    if not is_misled:
        try:
            program = as_it_is()
            own = _read(followed, *program, origins, name)
            if not _has_sizes_of_data(program):
                return own
        except (_FollowError, UnsupportedError) as error:
            refusal = error
    # Control that tensors decide is written anew where there is source, and what is done to elements that data choose:
    # to all of them, so that no size hangs on data, for each of which code would be compiled.
    for rolls in (True, False):
        with rewritten_control(module, rolls) as calls:
            try:
                program = _program(module, followed, given, by_name)
                found = _read(followed, *program, origins, name)
                if own is None or not _has_sizes_of_data(program):
                    return found
            except (_FollowError, UnsupportedError) as error:
                # what rewritten code stops at is what is left of the user's own
                if refusal is None or isinstance(refusal, _FollowError) or _PLACE.search(str(error)):
                    refusal = error
        if not calls.rolled:
            break
    if own is not None:
        return own
    if is_misled and isinstance(refusal, _FollowError) and not calls.is_caught:
        return _read(followed, *as_it_is(), origins, name)
    assert refusal is not None
    raise refusal from None


def _with_long_loops(module: torch.nn.Module, read: Callable[[], Exported]) -> Exported | None:
    """The module with long loops over ranges as loops of the graph; None where it is not followed like that."""
    with rewritten_control(module):
        try:
            return read()
        except (_FollowError, UnsupportedError):
            return None


class _FollowError(ModelError):
    """PyTorch's exporter does not follow the module."""


def _program(
    module: torch.nn.Module, followed: torch.nn.Module, given: tuple[Any, ...], by_name: dict[str, Any]
) -> Followed:
    try:
        with torch.no_grad(), _without_own_warnings():
            return _followed(module, followed, given, by_name)
    except UnsupportedError as error:
        where = _place_of(error)
        if type(error) is not UnsupportedError or where is None or _PLACE.search(str(error)):
            raise
        raise UnsupportedError(f"{where}: {error}") from error
    except CODE_ERRORS as error:
        if isinstance(error, TilewrightError):
            raise
        raise _FollowError(_why_not_followed(error, type(module).__name__)) from error


_DATA_DEPENDENT = ("GuardOnDataDependentSymNode", "DataDependentOutputException", "DynamicOutputShapeException")


def _why_not_followed(error: BaseException, name: str) -> str:
    """Whatever the module's own code or the exporter raises, in one line with the place in the user's source."""
    where = _place_of(error)
    kind = type(error).__name__
    reason = (str(error).strip().splitlines() or [kind])[0]
    way_out = 'torch.compile(module, backend="tilewright") runs it in parts'
    if kind in _DATA_DEPENDENT:
        return (
            f"{where or name}: what is done here depends on a number or a size that only the data tell, which compiled "
            f"code cannot know; use tensors of fixed sizes with torch.where and masks, or {way_out}"
        )
    if "fake tensor in the exported program" in reason:
        return (
            f"{where or name}: a tensor made inside a branch or a loop that data decide is used outside of it in a way "
            f"that is not followed; make it before, or {way_out}"
        )
    return f"{f'{where}: ' if where else ''}torch.export cannot follow {name}: {kind}: {reason}"


def _place_of(error: BaseException) -> str | None:
    """The last line of the user's own source that an error came through."""
    own = [f for f in traceback.extract_tb(error.__traceback__) if _is_users(f.filename)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else None


@cache
def _is_users(file: str) -> bool:
    ours, theirs, symbols, python = (Path(m.__file__).parent for m in (errors, torch, sympy, os))  # type: ignore[arg-type]
    packages = str(theirs.parent)  # which lie inside Python's own folder
    is_python = file.startswith((str(python), "<frozen", "<eval_with_key>")) and not file.startswith(packages)
    return not is_python and not file.startswith((str(ours), str(theirs), str(symbols)))


def _followed(
    module: torch.nn.Module, followed: torch.nn.Module, given: tuple[Any, ...], by_name: dict[str, Any]
) -> Followed:
    """What the exporter makes of a module that is, or is inside, `followed`: an error where its code changes an
    attribute with every run, which compiled code would not do."""
    before = snapshot(module)
    with _watched(module) as changed:
        program = _exported(followed, given, by_name)
    if not changed:
        return program
    # It may be something that is made once, at the first run, or the exporter's own doing while it runs the code.
    path = _changed_again(module, followed, given, by_name)
    if path is not None:
        before.put_back()
        raise ModelError(
            f"{type(module).__name__}: forward changes the attribute '{path}', which compiled code would not do; "
            f'keep it in a buffer, return it, or use torch.compile(module, backend="tilewright")'
        )
    with _watched(module):
        return _exported(followed, given, by_name)  # as it runs from the second time on


def _exported(module: torch.nn.Module, given: tuple[Any, ...], by_name: dict[str, Any]) -> Followed:
    with _without_printed_graphs(), _one_of_several():
        program = torch.export.export(module, given, by_name, strict=False)
    follow_copies(program.graph_module)
    mutations = make_bodies_functional(program.graph_module)
    program = decomposed(program)
    program.graph.eliminate_dead_code()
    return program, mutations


def _has_sizes_of_data(program: Followed) -> bool:
    """Whether tensors are made on the way of which only data tell how large they are."""
    found = (node.meta.get("val") for node in program[0].graph.nodes)
    return any(isinstance(x, torch.Tensor) and free_unbacked_symbols(x) for x in found)


@contextmanager
def _watched(module: torch.nn.Module) -> Iterator[list[str]]:
    """Paths of attributes that the module's code changes meanwhile; they are put back. The exporter itself puts some
    back, so that one has to look in between."""
    found: list[str] = []
    before: list[Snapshot] = []
    hook = module.register_forward_hook(lambda *_: found.extend(filter(None, [before[0].changed()])))
    before.append(snapshot(module))  # with the hook, which is no change
    try:
        yield found
    finally:
        before[0].put_back()
        hook.remove()


def _changed_again(
    module: torch.nn.Module, followed: torch.nn.Module, given: tuple[Any, ...], by_name: dict[str, Any]
) -> str | None:
    """An attribute that the second of two runs changes. Arguments, buffers and random numbers stay as they are, and
    what the first run made for later ones stays made."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    with torch.random.fork_rng(devices=[]):
        for _ in range(2):
            args, named = pytree.tree_map_only(torch.Tensor, lambda x: x.detach().clone(), (given, by_name))
            before = snapshot(module)
            followed(*args, **named)
    for buffer, value in buffers:
        buffer.copy_(value)
    return before.changed()


@contextmanager
def _without_own_warnings() -> Iterator[None]:
    """PyTorch's exporter copies what PyTorch itself declared obsolete, and warns of attributes watched here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
        warnings.filterwarnings("ignore", message=".*assigned during export", category=UserWarning)
        yield


@contextmanager
def _texts_refused() -> Iterator[None]:
    """Meanwhile the user's code makes no text of a number that data tell: it would be the name that PyTorch has for
    it."""
    kinds: tuple[Any, ...] = (torch.SymInt, torch.SymFloat, torch.SymBool)
    theirs = [kind.__repr__ for kind in kinds]

    def refusing(own: Callable[[Any], str]) -> Callable[[Any], str]:
        def text(number: Any) -> str:
            if _is_users(sys._getframe(1).f_code.co_filename) and free_unbacked_symbols(number):
                raise UnsupportedError(NO_TEXT)
            return own(number)

        return text

    try:
        for kind, own in zip(kinds, theirs, strict=True):
            kind.__repr__ = refusing(own)
        yield
    finally:
        for kind, own in zip(kinds, theirs, strict=True):
            kind.__repr__ = own


@contextmanager
def _one_of_several() -> Iterator[None]:
    """While it exports, PyTorch puts its own functions, which give new tensors, in the place of Python's max and min.
    Theirs is one of the tensors they are given: a change of it would be forgotten."""
    theirs = getattr(non_strict_utils, "_tensor_min_max", None)
    if theirs is None:
        yield
        return

    def extreme(*args: Any, **named: Any) -> Any:
        found = theirs(*args, **named)
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        is_new = isinstance(found, torch.Tensor) and not any(found is x for x in tensors)
        return one_of(found, tensors) if is_new else found

    non_strict_utils._tensor_min_max = extreme
    try:
        yield
    finally:
        non_strict_utils._tensor_min_max = theirs


@contextmanager
def _without_printed_graphs() -> Iterator[None]:
    """Where PyTorch's exporter fails, it prints all that it had followed by then."""
    printed = StringIO()
    with redirect_stderr(printed):
        yield
    sys.stderr.write(printed.getvalue())


class _Tied(torch.nn.Module):
    """A module as a function of the memory of its overlapping arguments, and of the other tensors."""

    def __init__(
        self, module: torch.nn.Module, leaves: Sequence[Any], structure: Any, groups: Sequence[OverlapGroup]
    ) -> None:
        super().__init__()
        self.module = module
        self._values = [None if isinstance(x, torch.Tensor) else x for x in leaves]
        self._structure, self._groups = structure, tuple(groups)
        tied = {member[0] for group in groups for member in group.members}
        self.free = [k for k, x in enumerate(leaves) if isinstance(x, torch.Tensor) and k not in tied]

    def forward(self, *tensors: torch.Tensor) -> Any:
        leaves: list[Any] = list(self._values)
        count = len(self._groups)
        for group, base in zip(self._groups, tensors[:count], strict=True):
            for place, view in group.views(base).items():
                leaves[place] = view
        for place, tensor in zip(self.free, tensors[count:], strict=True):
            leaves[place] = tensor
        args, named = pytree.tree_unflatten(leaves, self._structure)
        return self.module(*args, **named)


def _distinct(args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments, tensors that share memory as ones that do not: for the exporter they would be one input, and
    it looks at nothing but how they lie."""
    seen: set[int] = set()

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
            return leaf
        memory = leaf.untyped_storage()._cdata
        again = memory in seen
        seen.add(memory)
        return leaf.detach().new_empty_strided(leaf.shape, leaf.stride()) if again else leaf

    found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(own, (args, named))
    return found


def _read(
    module: torch.nn.Module, program: torch.export.ExportedProgram, mutations: tuple[Mutation, ...],
    origins: Sequence[InputPlace], name: str,
) -> Exported:  # fmt: skip
    from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind

    signature = program.graph_signature
    placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
    changed = {s.target for s in signature.output_specs if s.kind is OutputKind.BUFFER_MUTATION}
    leaf = 0
    places: dict[fx.Node, InputPlace] = {}
    inputs: list[fx.Node] = []
    constants: dict[fx.Node, torch.Tensor] = {}
    for node, spec in zip(placeholders, signature.input_specs, strict=True):
        if spec.kind is InputKind.USER_INPUT:
            places[node] = origins[leaf]
            leaf += 1
            node.meta["is_base"] = places[node].kind == "group"
            if node.users and not isinstance(spec.arg, ConstantArgument):
                inputs.append(node)
            continue
        if spec.kind in (InputKind.CUSTOM_OBJ, InputKind.TOKEN) or spec.target is None:
            raise UnsupportedError(f"the module holds '{spec.target or spec.arg.name}', which is no tensor")
        tensor = _held(module, program, spec.target)
        places[node] = InputPlace("tensor", tensor)
        if not node.users:
            continue
        if spec.target in changed:
            inputs.append(node)
        else:
            constants[node] = tensor
    results: list[fx.Node] = []
    outputs: list[InputPlace] = []
    changes: list[tuple[InputPlace, int]] = []
    returned = next(n for n in program.graph.nodes if n.op == "output").args[0]
    pairs = list(zip(returned, signature.output_specs, strict=True))
    for node, spec in pairs:
        if spec.kind is OutputKind.USER_OUTPUT:
            continue
        if spec.kind is OutputKind.BUFFER_MUTATION:
            target = InputPlace("tensor", _held(module, program, spec.target or ""))
        elif spec.kind is OutputKind.USER_INPUT_MUTATION:
            target = places[next(n for n in placeholders if n.name == spec.target)]
        else:
            raise UnsupportedError(f"an output of kind {spec.kind.name.lower()} is not supported; export for inference")
        changes.append((target, _place(results, node)))
        places[node] = target  # the new value is returned as the tensor that has it by then
    views = shared_outputs(returned) | _views_of_changed(returned, pairs, placeholders)
    views = {n: v for n, v in views.items() if not _is_open(n) and not _is_open(v.base)}
    bases: dict[int, torch.Tensor] = {}
    for node, spec in pairs:
        if spec.kind is not OutputKind.USER_OUTPUT:
            continue
        if not isinstance(node, fx.Node):
            outputs.append(InputPlace("value", node))
            continue
        view = ViewChain(node, ()) if node in places else views.get(node, ViewChain(node, ()))
        own = places.get(view.base) or InputPlace("result", _place(results, view.base))
        if view.steps and own.kind == "result":
            bases[own.what] = view.base.meta["val"]
        outputs.append(replace(own, view=view) if view.steps else own)
    arrays = {node: constant_of(tensor, node.name) for node, tensor in constants.items()}

    def graph_of(results: Sequence[fx.Node], inputs: Sequence[fx.Node]) -> Graph:
        needed = closure(results)
        nodes = [n for n in program.graph.nodes if n.op not in ("placeholder", "output") and n in needed]
        return make_graph(FxParts(nodes, inputs, results, {n: a for n, a in arrays.items() if n in needed}), name)

    computed = closure(results)
    read = [n for n in inputs if n in computed]
    graph = graph_of(results, read)
    given = [n for n, spec in pairs if spec.kind is OutputKind.USER_OUTPUT and isinstance(n, fx.Node)]
    apart = [n for n in dict.fromkeys(given) if n not in placeholders]
    copying = (lambda: graph_of(apart, [n for n in inputs if n in closure(apart)])) if views else None
    return Exported(graph, tuple(places[n] for n in read), tuple(outputs), program.call_spec.out_spec, tuple(changes),
                    tuple(t for n, t in constants.items() if n in computed), bases, copying, mutations)  # fmt: skip


def _views_of_changed(
    outputs: Sequence[Any], pairs: Sequence[tuple[Any, Any]], placeholders: Sequence[fx.Node]
) -> dict[fx.Node, ViewChain]:
    """Outputs that share memory with the new value of a tensor which the module changes: views of that tensor."""
    named = {n.name: n for n in placeholders}
    targets = {node: named.get(spec.target or "") for node, spec in pairs if spec.kind.name.endswith("_MUTATION")}
    found: dict[fx.Node, ViewChain] = {}
    for node in dict.fromkeys(n for n in outputs if isinstance(n, fx.Node) and n not in targets):
        changed = next((n for n in targets if storages(n) & storages(node)), None)
        if changed is None:
            continue
        view: ViewChain | None = view_of(node, targets)
        if view is not None and view.base is not changed:
            # seen beside the new value, which has to lie as the tensor that gets it
            target = targets[changed]
            fits = target is None or target.meta["val"].stride() == changed.meta["val"].stride()
            view = view_beside(node, changed) if fits else None
        if view is None:
            raise UnsupportedError(
                f"'{node.name}', a view of a tensor that the module changes in place, is not supported as an output; "
                f"return a copy of it"
            )
        found[node] = view
    return found


def _is_open(node: fx.Node) -> bool:
    """Whether data tell how a tensor lies in memory: it is given as one of its own."""
    value = node.meta["val"]
    return not all(isinstance(n, int) for n in (*value.shape, *value.stride(), value.storage_offset()))


def _held(module: torch.nn.Module, program: torch.export.ExportedProgram, name: str) -> torch.Tensor:
    """The module's own tensor of a name, or one that the exporter found in its code."""
    if name in program.state_dict or name in program.constants:
        path, _, last = name.rpartition(".")
        try:
            found = getattr(module.get_submodule(path), last, None)
        except AttributeError:
            found = None
        tensor = found if isinstance(found, torch.Tensor) else program.state_dict.get(name, program.constants.get(name))
        if isinstance(tensor, torch.Tensor):
            return tensor
    raise UnsupportedError(f"the module holds '{name}', which is no tensor")


def _place(results: list[fx.Node], node: fx.Node) -> int:
    if node not in results:
        results.append(node)
    return results.index(node)
