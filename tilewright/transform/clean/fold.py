"""Constant folding, merging of equal computes and removal of dead ones and of dead parts, on a Program."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tilewright.ir.forms.bounds import fixed, static
from tilewright.ir.forms.compute import (
    Compute,
    Map,
    Monoid,
    Program,
    Reduce,
    Region,
    Scan,
    Scatter,
    Sort,
    expressions,
    reads,
)
from tilewright.ir.forms.expr import Axis, Expr, Extent, Load, const, load, rewrite, substitute, var
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.meaning.folding import fold, foldable, without_dead
from tilewright.transform.clean.narrow import narrow


def fold_constants(program: Program, least: int = 1) -> Program:
    """An equal Program in which what can be known is known, nothing is computed twice and nothing in vain: of a tensor
    that is read in part little more than that part, `least` elements of an axis."""
    constants, merged = _merged_constants(program)
    outputs = set(program.outputs)
    kept: list[Compute] = []
    seen: dict[Any, Compute] = {}
    pool: dict[tuple[int, Extent], Axis] = {}
    for original in program.computes:
        compute = replace_tensors(original, merged)
        if _is_empty(compute):
            constants.update({t: _no_elements(t) for t in compute.outputs if t not in outputs})
            kept += [_without_elements(t, compute.origin) for t in compute.outputs if t in outputs]
            continue
        keeps = not outputs.isdisjoint(compute.outputs)
        if not keeps and foldable(compute, constants):
            constants.update(fold(compute, constants))
            continue
        key = _key(compute, pool)
        same = seen.get(key) if key is not None else None
        if same is not None and not keeps:
            merged.update(zip(compute.outputs, same.outputs, strict=True))
            continue
        if key is not None:
            seen.setdefault(key, compute)
        kept.append(compute)
    return narrow(without_dead(replace(program, computes=tuple(kept), constants=constants)), least)


def _is_empty(compute: Compute) -> bool:
    """Whether there is nothing to compute: no result has an element."""
    return all(any(static(extent) == 0 for extent in tensor.shape) for tensor in compute.outputs)


def _no_elements(tensor: Tensor) -> np.ndarray:
    return np.zeros(tuple(fixed(extent) for extent in tensor.shape), tensor.dtype.numpy)


def _without_elements(output: Tensor, origin: str) -> Map:
    """A result without elements needs no input, and no plan that divides by their number."""
    axes = tuple(Axis(f"o{place}", extent) for place, extent in enumerate(output.shape))
    return Map(output, axes, const(0, output.dtype), origin)


def replace_tensors(compute: Compute, merged: dict[Tensor, Tensor]) -> Compute:
    """The compute reading other tensors in place of some."""
    if not merged or not any(t in merged for t in reads(compute)):
        return compute

    def rename(root: Expr) -> Expr:
        return rewrite(
            root, lambda n: load(merged[n.source], n.args) if isinstance(n, Load) and n.source in merged else None
        )

    def pick(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(merged.get(t, t) for t in tensors)

    if isinstance(compute, Map):
        return replace(compute, value=rename(compute.value))
    if isinstance(compute, Reduce):
        return replace(compute, elements=tuple(map(rename, compute.elements)))
    if isinstance(compute, Scatter):
        return replace(
            compute,
            initial=pick((compute.initial,))[0],
            indices=tuple(map(rename, compute.indices)),
            value=rename(compute.value),
        )
    if isinstance(compute, Sort):
        return replace(compute, key=rename(compute.key), payloads=tuple(map(rename, compute.payloads)))
    if isinstance(compute, Scan):
        body = tuple(replace_tensors(c, merged) for c in compute.body)
        return replace(compute, initial=pick(compute.initial), body=body, following=pick(compute.following))
    if isinstance(compute, Region):
        return replace(compute, condition=pick((compute.condition,))[0], captures=pick(compute.captures))
    return replace(compute, inputs=pick(compute.inputs))


def _merged_constants(program: Program) -> tuple[dict[Tensor, np.ndarray], dict[Tensor, Tensor]]:
    """Constants without repeats; a fingerprint of a few elements spares most full comparisons."""
    constants: dict[Tensor, np.ndarray] = {}
    merged: dict[Tensor, Tensor] = {}
    groups: dict[Any, list[Tensor]] = {}
    for tensor, array in program.constants.items():
        flat = array.reshape(-1)
        sample = flat[:: max(flat.size // 16, 1)]
        group = groups.setdefault((tensor.dtype.name, array.shape, sample.tobytes()), [])
        twin = next((t for t in group if _identical(constants[t], array)), None)
        if twin is not None and tensor not in program.outputs:
            merged[tensor] = twin
        else:
            group.append(tensor)
            constants[tensor] = array
    return constants, merged


def _identical(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal bit by bit: NaN equals itself and -0.0 is not 0.0."""
    return a is b or a.tobytes() == b.tobytes()


def _key(compute: Compute, pool: dict[tuple[int, Extent], Axis]) -> Any:
    """Equal for computes that do the same; None where comparing would not be cheap."""
    if not isinstance(compute, Map | Reduce):
        return None
    axes = (*compute.axes, *(compute.reduce_axes if isinstance(compute, Reduce) else ()))
    places = {a: var(pool.setdefault((n, a.extent), Axis(f"p{n}", a.extent))) for n, a in enumerate(axes)}
    values = tuple(substitute(e, places) for e in expressions(compute))
    shapes = tuple(a.extent for a in compute.axes), tuple(a.extent for a in axes)
    monoid: Monoid | None = compute.monoid if isinstance(compute, Reduce) else None
    # the expressions themselves are in the key, which keeps them alive: identity is equality only while they live
    return type(compute).__name__, shapes, values, monoid
