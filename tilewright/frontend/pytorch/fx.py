"""Graphs of torch.fx, in core ATen, to Graphs: every call through its row, parameters as views of their memory."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.utils import _pytree as pytree

from tilewright.errors import UnsupportedError
from tilewright.frontend.pytorch import aten, aten_nn, aten_reduce, aten_rnn, aten_shape  # noqa: F401  (their rows)
from tilewright.frontend.pytorch.aliases import view_of
from tilewright.frontend.pytorch.aten import dtype_of
from tilewright.frontend.pytorch.emitter import Emitted, Emitter, Row, Size, find_row, size_of
from tilewright.frontend.pytorch.higher_order import Known, emit_control, is_control, why_no_control
from tilewright.frontend.pytorch.mutations import source_of
from tilewright.frontend.pytorch.tensors import constant_of
from tilewright.ir.forms import dtypes
from tilewright.ir.forms import graph as ir

# Checks on shapes and types that held when the module was exported; they give nothing.
_CHECKS = ("aten._assert", "aten.sym_constrain_range", "aten._assert_async", "aten._assert_scalar",
           "aten._assert_tensor_metadata", "aten.sym_constrain_range_for_size")  # fmt: skip


@cache
def decompositions() -> dict[Any, Any]:
    """How PyTorch writes out what is not core ATen; what has a row stays whole."""
    return {op: function for op, function in torch.export.default_decompositions().items() if find_row(str(op)) is None}


def is_check(node: fx.Node) -> bool:
    name = str(node.target)
    return node.op == "call_function" and (name in _CHECKS or name.rpartition(".")[0] in _CHECKS)


@dataclass(frozen=True)
class FxParts:
    """Some nodes of an fx graph in order, what they read from outside, and what is read of them.

    A tensor from outside is an input, or a constant when its values are given.
    """

    nodes: Sequence[fx.Node]
    inputs: Sequence[fx.Node]
    outputs: Sequence[fx.Node]
    constants: Mapping[fx.Node, np.ndarray]


def make_graph(parts: FxParts, name: str = "module") -> ir.Graph:
    """The Graph of these nodes; an UnsupportedError names every call that has no row."""
    missing = uncovered(parts.nodes)
    if missing:
        raise UnsupportedError(missing_text(missing))
    m = Emitter()
    known: dict[fx.Node, Known] = {}
    inputs = []
    for node in parts.inputs:
        value = _declared(node, m.unique(node.name))
        inputs.append(ir.Value(value.name, value.dtype, value.shape))
        known[node] = value
    for node, array in parts.constants.items():
        value = _declared(node, m.constant(array, node.name))
        known[node] = value
    _emit_all(m, parts.nodes, known)
    found = [known[node] for node in parts.outputs]
    outputs = tuple(value.name for value in found if isinstance(value, Emitted))
    return ir.Graph(name, tuple(inputs), outputs, tuple(m.nodes), m.constants, {v.name: v for v in inputs})


def _emit_all(m: Emitter, nodes: Iterable[fx.Node], known: dict[fx.Node, Known]) -> None:
    """All nodes in order."""
    for node in nodes:
        if node.op == "get_attr":
            tensor = held_tensor(node)
            if tensor is not None:
                known[node] = _declared(node, m.constant(constant_of(tensor, node.name), node.name))
        elif is_size(node):
            known[node] = _emit_size(m, node, known)
        elif not is_check(node) and not isinstance(node.meta.get("val"), torch.SymBool):
            known[node] = emit(m, node, known)
            _note_sizes(m, known[node])


def is_size(node: fx.Node) -> bool:
    """Whether a node is a number that data tell, or is made of such."""
    return node.op == "call_function" and isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat)


def _emit_size(m: Emitter, node: fx.Node, known: Mapping[fx.Node, Known]) -> Emitted:
    """A number as a tensor that holds it."""
    m.enter(f"{node.target} '{label(node)}'", node.name)
    size = size_of(node.meta["val"].node.expr)
    source = known.get(node.args[0]) if node.args else None  # type: ignore[arg-type]
    if node.target is torch.ops.aten._local_scalar_dense.default:
        assert isinstance(source, Emitted)
        dtype = dtypes.int64 if isinstance(node.meta["val"], torch.SymInt) else source.dtype
        number = Emitted(m.reshape(m.typed(source, dtype), ()), dtype, ())
        if isinstance(size, Size):
            m.knows(size, number.name)
        return number
    if isinstance(node.meta["val"], torch.SymFloat):
        raise m.refuse("arithmetic with a number that data tell is not supported; use tensors")
    return Emitted(m.size(size), dtypes.int64, ())


def _note_sizes(m: Emitter, found: Known) -> None:
    """A tensor knows its own extents."""
    for value in found if isinstance(found, tuple) else (found,):
        for axis, extent in enumerate(value.shape if value is not None else ()):
            if isinstance(extent, Size):
                m.knows(extent, (value.name, axis))  # type: ignore[union-attr]


def held_tensor(node: fx.Node) -> torch.Tensor | None:
    """The tensor of the module that a get_attr names, such as one that its code wrote down; None of a body."""
    found: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, torch.Tensor) else None


def emit(m: Emitter, node: fx.Node, known: Mapping[fx.Node, Known]) -> Known:
    """The nodes that stand for one call, and what it gives."""
    if node.target is operator.getitem:
        source, place = node.args
        found = known[source]  # type: ignore[index]
        part = found[place] if isinstance(found, tuple) else None  # type: ignore[index]
        if part is None:
            raise UnsupportedError(f"{label(node)}: result {place} of {source} is not supported")
        return part
    if is_control(node):
        wanted = declared(node)
        assert isinstance(wanted, tuple)
        return emit_control(m, node, known, wanted, _emit_all)
    row = find_row(str(node.target))
    assert row is not None
    base = node.name
    m.enter(f"{node.target} '{label(node)}'", base)
    if str(node.target).startswith("aten.as_strided"):
        _check_whole(m, node.args[0])
    args = _with_values(node.args, known)
    named = _with_values(node.kwargs, known)
    wanted = declared(node)
    results = _called(row, node, m, wanted, args, named)
    if isinstance(wanted, Emitted):
        assert isinstance(results, str)
        return Emitted(results, wanted.dtype, wanted.shape)
    pairs = zip(results, wanted, strict=False)
    return tuple(None if n is None or w is None else Emitted(n, w.dtype, w.shape) for n, w in pairs)


def _check_whole(m: Emitter, node: Any) -> None:
    """Places in memory are places in a tensor only where that is all of its memory, in order. A module's argument may
    be a part of any."""
    value = node.meta.get("val")
    is_part = node.op == "placeholder" and not node.meta.get("is_base")
    if is_part or not value.is_contiguous() or value.storage_offset() or view_of(node).steps:
        raise m.refuse("a view of memory that is not all the tensor's own is not supported")


def _with_values(arguments: Any, known: Mapping[fx.Node, Known]) -> Any:
    def value(node: fx.Node) -> Any:
        return known[node]

    return fx.map_arg(arguments, value)


def _called(row: Row, node: fx.Node, m: Emitter, wanted: Known, args: Any, named: Any) -> Any:
    arguments = {k: v for k, v in named.items() if k not in ("device", "layout", "pin_memory", "memory_format")}
    try:
        return row(m, wanted, *args, **arguments)
    except TypeError as error:
        values = pytree.tree_leaves((wanted, args, named))
        if any(isinstance(n, Size) for v in values for n in (*getattr(v, "shape", ()), v)):
            raise UnsupportedError(
                f"{source_of(node)}: {node.target} of a size that data tell is not supported; use tensors of fixed "
                f"sizes and masks"
            ) from error
        # an overload whose arguments the row does not know
        raise UnsupportedError(f"{node.target} '{label(node)}': {str(error).partition(') ')[2] or error}") from error


def _declared(node: fx.Node, name: str) -> Emitted:
    value = declared(node)
    if not isinstance(value, Emitted):
        raise UnsupportedError(f"'{node.name}' is no tensor")
    return Emitted(name, value.dtype, value.shape)


def declared(node: fx.Node) -> Known:
    """What PyTorch says of a node's result."""
    meta = held_tensor(node) if node.op == "get_attr" else node.meta.get("val")
    if isinstance(meta, tuple | list):
        return tuple(_value(part, node) if isinstance(part, torch.Tensor) else None for part in meta)
    if isinstance(meta, torch.SymInt | torch.SymFloat):
        return Emitted(node.name, dtypes.int64 if isinstance(meta, torch.SymInt) else dtypes.float32, ())
    if not isinstance(meta, torch.Tensor):
        raise UnsupportedError(f"{label(node)}: a result that is a {type(meta).__name__} is not supported")
    return _value(meta, node)


def _value(meta: torch.Tensor, node: fx.Node) -> Emitted:
    dtype = dtype_of(meta.dtype)
    if dtype is None or meta.layout is not torch.strided:
        raise UnsupportedError(
            f"{node.target} '{label(node)}': a tensor of {meta.dtype} ({meta.layout}) is not supported"
        )
    return Emitted(node.name, dtype, tuple(n if isinstance(n, int) else size_of(n.node.expr) for n in meta.shape))


# what is covered


def why_uncovered(node: fx.Node) -> str | None:
    """Why a call cannot be compiled; None where it can. Tried alone, since a row may decline some arguments."""
    if node.op == "get_attr":
        return _why_not_held(node)
    if node.op != "call_function":
        return f"{node.op} '{node.target}'"
    if is_check(node) or isinstance(node.meta.get("val"), torch.SymBool):
        return None
    if is_size(node):
        return None if isinstance(node.meta["val"], torch.SymInt) or _is_number(node) else str(node.target)
    if is_control(node):
        return why_no_control(node, uncovered)
    if node.target is not operator.getitem and find_row(str(node.target)) is None:
        return str(node.target)
    try:
        emit(Emitter(is_trial=True), node, {n: _assumed(n) for n in node.all_input_nodes})
    except UnsupportedError as error:
        return str(error)
    return None


def _is_number(node: fx.Node) -> bool:
    return node.target is torch.ops.aten._local_scalar_dense.default


def _why_not_held(node: fx.Node) -> str | None:
    if all(is_control(n) for n in node.users):
        return None
    tensor = held_tensor(node)
    if tensor is None:
        return f"{node.op} '{node.target}'"
    try:
        declared(node)
        constant_of(tensor, node.name)
    except UnsupportedError as error:
        return str(error)
    return None


def _assumed(node: fx.Node) -> Known:
    """A node's result as another would see it; of a call with several, those that its row gives."""
    if node.op != "call_function" or node.target is operator.getitem or find_row(str(node.target)) is None:
        return declared(node)  # of a higher-order operator too
    if isinstance(node.meta.get("val"), tuple | list):
        return emit(Emitter(is_trial=True), node, {n: declared(n) for n in node.all_input_nodes})
    return declared(node)


def uncovered(nodes: Iterable[fx.Node]) -> dict[str, list[fx.Node]]:
    """Calls that cannot be compiled, by reason: the name of one that has no row, else what its row says."""
    found: dict[str, list[fx.Node]] = {}
    for node in nodes:
        reason = why_uncovered(node)
        if reason is not None:
            found.setdefault(reason, []).append(node)
    return found


def missing_text(missing: Mapping[str, Sequence[fx.Node]]) -> str:
    """One line that names them all, how many there are and where the first one is."""
    parts = []
    for reason, nodes in missing.items():
        if ": " in reason:
            parts.append(reason)
            continue
        count = f"{len(nodes)} node{'s' if len(nodes) > 1 else ''}"
        parts.append(f"{reason} ({count}, first at '{label(nodes[0])}')")
    what = "operators of the module are" if len(parts) > 1 else "an operator of the module is"
    way_out = 'torch.compile(module, backend="tilewright") leaves such to PyTorch'
    return f"{what} not covered: {'; '.join(parts)}; {way_out}"


def label(node: fx.Node) -> str:
    """The path of the module that makes a call, and the call's name."""
    stack = node.meta.get("nn_module_stack") or {}
    path = str(next(reversed(stack.values()))[0]) if stack else ""
    for prefix in ("L['self']", "L['fn']"):
        path = path.removeprefix(prefix)
    path = path.strip(".").replace("._modules['", ".").replace("']", "")
    return f"{path}/{node.name}" if path else node.name
