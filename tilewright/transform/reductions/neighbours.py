"""Parts of a Program as Programs of their own, for what predicts their time."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from tilewright.ir.forms.compute import Compute, Map, Program, Reduce, expressions, reads
from tilewright.ir.forms.expr import Axis, spelled
from tilewright.ir.forms.tensor import Tensor

MOST_COMPUTES = 24  # that lead to a product, looked at together


def alone(computes: Sequence[Compute], program: Program) -> Program:
    """A Program of nothing else: what they read from others is given, and the results of the last are wanted."""
    made = {t for c in computes for t in c.outputs}
    read = dict.fromkeys(t for c in computes for t in reads(c) if t not in made)
    constants = {t: program.constants[t] for t in read if t in program.constants}
    layouts = {t: program.layouts[t] for t in read if t in program.layouts}
    inputs = tuple(t for t in read if t not in constants)
    return Program(inputs, computes[-1].outputs, tuple(computes), constants, layouts)


def leading_to(product: Reduce, program: Program, makers: Mapping[Tensor, Compute]) -> list[Compute]:
    """A product with all that leads to it from the products with constants before it on, in order; nothing where that
    is too much to look at."""
    found: set[Compute] = {product}
    stack: list[Compute] = [product]
    while stack:
        current = stack.pop()
        is_product = isinstance(current, Reduce) and any(t in program.constants for t in reads(current))
        if current is not product and (is_product or not isinstance(current, Map | Reduce)):
            continue
        more = {makers[t] for t in reads(current) if t in makers} - found
        found |= more
        stack.extend(more)
        if len(found) > MOST_COMPUTES:
            return []
    return [c for c in program.computes if c in found]


def is_closed(computes: Sequence[Compute], program: Program, readers: Mapping[Tensor, Sequence[Compute]]) -> bool:
    """Whether nobody else reads what computes give to each other: else it is stored whatever becomes of the last."""
    inside = [t for c in computes[:-1] for t in c.outputs]
    return all(t not in program.outputs and set(computes).issuperset(readers[t]) for t in inside)


def outline(computes: Sequence[Compute], program: Program) -> Hashable:
    """The same for computes that differ in names and in the numbers of their constants alone."""
    names: dict[Any, str] = {}

    def name(of: Any) -> str:
        if of not in names:
            names[of] = f"{len(names)}"
            if isinstance(of, Tensor):
                kind = "c" if of in program.constants else "t"
                names[of] += f"{kind}{of.shape}{of.dtype.name}{program.layouts.get(of)}"
            elif isinstance(of, Axis):
                names[of] += f"a{of.extent}"
        return names[of]

    return tuple(
        (type(c).__name__, *map(name, c.outputs), *(spelled(e, name) for e in expressions(c)),
         c.monoid if isinstance(c, Reduce) else None)
        for c in computes
    )  # fmt: skip
