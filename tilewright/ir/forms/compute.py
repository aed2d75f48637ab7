"""The Program: a model as tensor expressions, each tensor a function of its indices, in a closed list of kinds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from tilewright.ir.forms.dtypes import DType
from tilewright.ir.forms.expr import Axis, Const, Expr, State, const, is_op, loads, op, state
from tilewright.ir.forms.graph import Form
from tilewright.ir.forms.tensor import Layout, Tensor


@dataclass(frozen=True, eq=False)
class Map:
    """output[axes] = value: elementwise over indices; reshapes, slices, pads and gathers are Maps too."""

    output: Tensor
    axes: tuple[Axis, ...]
    value: Expr
    origin: str = ""  # the model's node, for messages alone

    @cached_property
    def outputs(self) -> tuple[Tensor, ...]:
        return (self.output,)

    @cached_property
    def sources(self) -> tuple[Tensor, ...]:
        """Tensors that are read, each once, in order of first use."""
        return tuple(dict.fromkeys(n.source for n in loads(self.value)))


@dataclass(frozen=True)
class Monoid:
    """A tuple-valued reduction: `combine` merges the states `left` and `right`, `final` reads `left`.

    `combine` is associative with `identity` as its neutral element: how a reduction is split is the plan's business.
    """

    left: tuple[State, ...]
    right: tuple[State, ...]
    identity: tuple[Expr, ...]
    combine: tuple[Expr, ...]
    final: tuple[Expr, ...]

    @property
    def operator(self) -> str | None:
        """The scalar operation when this is a plain one-state reduction (add, mul, min, max, and, or)."""
        if len(self.left) != 1 or self.final != (self.left[0],):
            return None
        for name in ("add", "mul", "min", "max", "and", "or"):
            if self.left[0].dtype.kind in _KINDS[name] and self.combine[0] is op(name, self.left[0], self.right[0]):
                return name
        return None


_KINDS = {"add": "fiu", "mul": "fiu", "min": "fiub", "max": "fiub", "and": "b", "or": "b"}


def neutral(operator: str, dtype: DType) -> Const:
    """The neutral element of a named operator on a type."""
    if operator in ("add", "or"):
        return const(0, dtype)
    if operator in ("mul", "and"):
        return const(1, dtype)
    lowest = operator == "max"
    if dtype.is_float:
        return const(-np.inf if lowest else np.inf, dtype)
    if dtype.kind == "b":
        return const(not lowest, dtype)
    info = np.iinfo(dtype.numpy)
    return const(int(info.min if lowest else info.max), dtype)


def plain_monoid(operator: str, dtype: DType) -> Monoid:
    """The one-state monoid of a scalar operator."""
    left, right = state("a0", dtype), state("b0", dtype)
    return Monoid((left,), (right,), (neutral(operator, dtype),), (op(operator, left, right),), (left,))


@dataclass(frozen=True, eq=False)
class Reduce:
    """outputs[axes] = final(combine over reduce_axes of the tuple `elements`)."""

    outputs: tuple[Tensor, ...]
    axes: tuple[Axis, ...]
    reduce_axes: tuple[Axis, ...]
    elements: tuple[Expr, ...]
    monoid: Monoid
    origin: str = ""

    @cached_property
    def sources(self) -> tuple[Tensor, ...]:
        """Tensors that are read, each once, in order of first use."""
        return tuple(dict.fromkeys(n.source for n in loads(*self.elements)))


@dataclass(frozen=True, eq=False)
class Scan:
    """An ordered recurrence along `axis`: `body` computes each step from the `carry` of the step before.

    `initial[i]` gives carry[i] at step 0; after a step carry[i] takes `following[i]`, a tensor of the body.
    `finals[i]` (or None) is carry[i] after the last step; `stacked` are body tensors kept for every step: the
    output has the step as its first axis. The body may read any outer tensor, at the step by `var(axis)`.
    """

    axis: Axis
    initial: tuple[Tensor, ...]
    carry: tuple[Tensor, ...]
    body: tuple[Compute, ...]
    following: tuple[Tensor, ...]
    finals: tuple[Tensor | None, ...]
    stacked: tuple[tuple[Tensor, Tensor], ...]  # (body tensor, output)
    reverse: bool = False  # the step runs from the last index to the first; stacking follows the index
    origin: str = ""

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        return (*(f for f in self.finals if f is not None), *(o for _, o in self.stacked))


@dataclass(frozen=True, eq=False)
class Scatter:
    """A copy of `initial` in which, for all `axes`, element `indices` becomes combine(old, value).

    `operator` None replaces. `unique` promises distinct indices; otherwise updates apply in order of the axes.
    """

    output: Tensor
    initial: Tensor
    axes: tuple[Axis, ...]
    indices: tuple[Expr, ...]
    value: Expr
    operator: str | None = None
    unique: bool = False
    origin: str = ""

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        return (self.output,)


@dataclass(frozen=True, eq=False)
class Sort:
    """Stable sort along `axis` (one of `axes`) by `key`; outputs hold the payloads of the first `keep` places."""

    outputs: tuple[Tensor, ...]
    axes: tuple[Axis, ...]
    axis: Axis
    key: Expr
    payloads: tuple[Expr, ...]
    descending: bool = False
    origin: str = ""


@dataclass(frozen=True, eq=False)
class Region:
    """Control flow: "if" runs branches[0] or [1] by condition; "loop" repeats branches[0] while it holds.

    A branch is a Program; its inputs are matched by position to `captures`, its outputs to `outputs` (for a loop:
    the carried values, whose first output is the next condition).
    """

    kind: str
    condition: Tensor
    captures: tuple[Tensor, ...]
    branches: tuple[Program, ...]
    outputs: tuple[Tensor, ...]
    trip_limit: int | None = None
    origin: str = ""


@dataclass(frozen=True, eq=False)
class Host:
    """A call outside the compiled code: refused by fallback="error"."""

    function: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    attributes: tuple[tuple[str, object], ...] = ()
    origin: str = ""


Compute = Map | Reduce | Scan | Scatter | Sort | Region | Host


@dataclass(frozen=True)
class Program:
    """Inputs, constants and computes in dependency order; `layouts` names only tensors not stored naturally."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    computes: tuple[Compute, ...]
    constants: Mapping[Tensor, np.ndarray] = field(default_factory=dict)
    layouts: Mapping[Tensor, Layout] = field(default_factory=dict)
    input_names: tuple[str, ...] = ()  # the model's own names, where tensor names had to differ
    output_names: tuple[str, ...] = ()
    # copies made for a better order or without padding: never composed into their readers; the planner may pack them
    staged: tuple[Tensor, ...] = ()
    remarks: tuple[str, ...] = ()  # what was decided about it, and why: for people alone
    # of every output, where a run tells its extents: how far they go, by the numbers in the last input; what lies
    # behind is nobody's
    ends: tuple[tuple[Form, ...], ...] = ()

    def layout(self, tensor: Tensor) -> Layout:
        return self.layouts.get(tensor) or Layout.natural(tensor.rank)

    def producers(self) -> dict[Tensor, Compute]:
        return {t: c for c in self.computes for t in c.outputs}

    def consumers(self) -> dict[Tensor, list[Compute]]:
        users: dict[Tensor, list[Compute]] = {}
        for compute in self.computes:
            for tensor in reads(compute):
                users.setdefault(tensor, []).append(compute)
        return users

    def tensors(self) -> Iterator[Tensor]:
        yield from self.inputs
        yield from self.constants
        for compute in self.computes:
            yield from compute.outputs

    def with_computes(self, computes: tuple[Compute, ...]) -> Program:
        return replace(self, computes=computes)


def expressions(compute: Compute) -> tuple[Expr, ...]:
    """The expressions a compute evaluates itself (not those inside a Scan's body or a Region's branches)."""
    if isinstance(compute, Map):
        return (compute.value,)
    if isinstance(compute, Reduce):
        return compute.elements
    if isinstance(compute, Scatter):
        return (*compute.indices, compute.value)
    if isinstance(compute, Sort):
        return (compute.key, *compute.payloads)
    return ()


def factors(compute: Compute) -> tuple[Expr, ...]:
    """The two factors of the products that a Reduce adds up; none where it does something else."""
    if not isinstance(compute, Reduce) or len(compute.outputs) != 1 or compute.monoid.operator != "add":
        return ()
    return compute.elements[0].args if is_op(compute.elements[0], "mul") else ()


def reads(compute: Compute) -> list[Tensor]:
    """Tensors a compute reads from outside itself, each once, in order of first use."""
    if isinstance(compute, Map | Reduce):
        return list(compute.sources)
    found: dict[Tensor, None] = {}
    if isinstance(compute, Scan):
        inner = set(compute.carry)
        found.update(dict.fromkeys(compute.initial))
        for part in compute.body:
            found.update(dict.fromkeys(t for t in reads(part) if t not in inner))
            inner.update(part.outputs)
        found.update(dict.fromkeys(t for t in compute.following if t not in inner))
    elif isinstance(compute, Region):
        found.update(dict.fromkeys((compute.condition, *compute.captures)))
    elif isinstance(compute, Host):
        found.update(dict.fromkeys(compute.inputs))
    else:
        if isinstance(compute, Scatter):
            found[compute.initial] = None
        found.update(dict.fromkeys(n.source for n in loads(*expressions(compute))))
    return list(found)


def all_computes(program: Program) -> dict[str, Compute]:
    """By the name of each output, those inside Scans included."""
    found: dict[str, Compute] = {}
    for compute in program.computes:
        found.update({t.name: compute for t in compute.outputs})
        if isinstance(compute, Scan):
            found.update({t.name: inner for inner in compute.body for t in inner.outputs})
    return found


def all_tensors(program: Program) -> Iterator[Tensor]:
    """Given, computed and carried, those inside Scans included."""
    yield from program.inputs
    yield from program.constants
    for compute in program.computes:
        yield from compute.outputs
        if isinstance(compute, Scan):
            for inner in compute.body:
                yield from inner.outputs
            yield from compute.carry
