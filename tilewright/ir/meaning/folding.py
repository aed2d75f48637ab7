"""What need not be computed at run time: computes of constants alone, and computes that nobody reads."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from math import prod

import numpy as np

from tilewright.ir.forms.bounds import static
from tilewright.ir.forms.compute import (
    Compute,
    Host,
    Map,
    Program,
    Reduce,
    Region,
    Scan,
    Scatter,
    Sort,
    expressions,
    reads,
)
from tilewright.ir.forms.expr import Axis, Expr, Load, axes_of, is_op
from tilewright.ir.forms.spilled import spilled
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.meaning.interpret import evaluate_computes

GROWTH = 4  # a result may be this many times larger than what it is made of...
ALWAYS = 1 << 20  # ...or up to this many bytes in any case
WORK = 1 << 27  # scalar steps the interpreter may spend on one compute
CONVERTED = 1 << 30  # elements that it may convert: weights of any size are kept as they are multiplied
_STEP = 1 << 12  # those that one step of a Scan is worth at least


def foldable(compute: Compute, constants: Mapping[Tensor, np.ndarray]) -> bool:
    """Whether a compute reads constants alone and its result is worth keeping in place of its inputs."""
    if not reads_only(compute, constants):
        return False
    sources = reads(compute)
    sizes = [_static_bytes(t) for t in compute.outputs]
    work = _work(compute)
    limit = CONVERTED if isinstance(compute, Map) and _is_conversion(compute.value) else WORK
    if work is None or work > limit or any(s is None for s in sizes):
        return False
    result = sum(s for s in sizes if s is not None)
    given = sum(constants[t].nbytes for t in sources)
    return result <= ALWAYS or result <= GROWTH * given


def reads_only(compute: Compute, known: Container[Tensor]) -> bool:
    """Whether a compute can be evaluated of these tensors alone."""
    return not isinstance(compute, Host | Region) and all(t in known for t in reads(compute)) and _closed(compute)


def _is_conversion(value: Expr) -> bool:
    """Whether a value is read, and at most given another type."""
    return isinstance(value.args[0] if is_op(value, "cast") else value, Load)


def fold(compute: Compute, constants: Mapping[Tensor, np.ndarray]) -> dict[Tensor, np.ndarray]:
    """The values of a foldable compute's outputs."""
    values = evaluate_computes((compute,), {t: constants[t] for t in reads(compute)})
    # order="C" and not ascontiguousarray, which would give a scalar an axis
    return {t: spilled(np.asarray(values[t], t.dtype.numpy, order="C")) for t in compute.outputs}


def without_dead(program: Program) -> Program:
    """The same Program without computes and constants that no output depends on."""
    wanted = set(program.outputs)
    kept: list[Compute] = []
    for compute in reversed(program.computes):
        if not wanted.isdisjoint(compute.outputs):
            kept.append(compute)
            wanted.update(reads(compute))
    constants = {t: a for t, a in program.constants.items() if t in wanted}
    return replace(program, computes=tuple(reversed(kept)), constants=constants)


def _closed(compute: Compute) -> bool:
    """Whether its expressions use its own axes alone: inside a Scan they may use the step."""
    if isinstance(compute, Scan):
        return True
    own = set(_axes(compute))
    return own.issuperset(axes_of(*expressions(compute)))


def _axes(compute: Compute) -> tuple[Axis, ...]:
    if isinstance(compute, Map | Scatter | Sort):
        return compute.axes
    return (*compute.axes, *compute.reduce_axes) if isinstance(compute, Reduce) else ()


def _static_bytes(tensor: Tensor) -> int | None:
    sizes = [static(s) for s in tensor.shape]
    return None if None in sizes else prod(sizes) * tensor.dtype.bytes  # type: ignore[arg-type]


def _work(compute: Compute) -> int | None:
    """Iterations of a compute, or None where an extent is not known."""
    if isinstance(compute, Scan):
        steps, inner = static(compute.axis.extent), [_work(c) for c in compute.body]
        if steps is None or None in inner:
            return None
        return steps * sum(max(w, _STEP) for w in inner if w is not None)
    extents = [static(a.extent) for a in _axes(compute)]
    return None if None in extents else prod(extents)  # type: ignore[arg-type]
