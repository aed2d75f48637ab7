"""Running sums and products: step by step along an axis, a long one in blocks side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt

from tilewright.ir.analysis.parts import even_part
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import Scan, neutral
from tilewright.ir.forms.dtypes import DType
from tilewright.ir.forms.expr import Axis, Expr, cast, load, lt, maximum, minimum, op, select, var
from tilewright.ir.forms.graph import Node
from tilewright.ir.forms.tensor import Tensor
from tilewright.ops.builder import Builder, Shape, dims
from tilewright.ops.reductions.reduction import reduced_shape
from tilewright.ops.registry import operator

_LONGEST = 1 << 11  # steps that are made one after the other; a longer axis is cut into blocks
_BLOCK = 1 << 9  # steps of a block at most


@operator("CumSum", since=11, constants=(1,))
def cum_sum(b: Builder, node: Node, x: Tensor, axis_input: Tensor) -> Tensor:
    return _running(b, node, x, b.axis(b.integers(axis_input, "axis")[0], x.rank), "add")


@operator("CumProd", since=26, constants=(1,))
def cum_prod(b: Builder, node: Node, x: Tensor, axis_input: Tensor) -> Tensor:
    return _running(b, node, x, b.axis(b.integers(axis_input, "axis")[0], x.rank), "mul")


def _running(b: Builder, node: Node, x: Tensor, axis: int, operator: str) -> Tensor:
    """Steps have their axis first; a Map puts it back."""
    exclusive, reverse = bool(node.attributes.get("exclusive", 0)), bool(node.attributes.get("reverse", 0))
    rest, count = reduced_shape(x, [axis], False), dims(x)[axis]
    wide = dtypes.accumulator(x.dtype)
    run = _Run(b, operator, wide)

    def given(step: Expr, *i: Expr) -> Expr:
        return cast(load(x, (*i[:axis], step, *i[axis:])), wide)

    if count > _LONGEST:
        steps = run.in_blocks("steps", rest, count, given, exclusive, reverse)
    elif axis == 0 and wide is x.dtype:
        return run.in_steps("", rest, count, given, exclusive, reverse)
    else:
        steps = run.in_steps("steps", rest, count, given, exclusive, reverse)
    return b.map("", dims(x), lambda *i: cast(b.read(steps, (i[axis], *i[:axis], *i[axis + 1 :])), x.dtype))


@dataclass(frozen=True)
class _Run:
    """Makes [count, rest] of what is `given` at a step and the indices of the rest; the exclusive ones leave their own
    step out."""

    b: Builder
    operator: str
    wide: DType

    def in_steps(
        self, hint: str, rest: Shape, count: int, given: Callable[..., Expr], exclusive: bool, reverse: bool = False
    ) -> Tensor:
        b, step = self.b, Axis("t", count)
        start = b.filled(rest, neutral(self.operator, self.wide).value, self.wide, "start")
        carry = b.tensor("carry", rest, self.wide)
        following = b.map_compute("next", rest, lambda *i: op(self.operator, load(carry, i), given(var(step), *i)))
        body, kept = [following], following.output
        if exclusive:
            before = b.map_compute("before", rest, lambda *i: load(carry, i))
            body.append(before)
            kept = before.output
        stacked = b.tensor(hint, (count, *rest), self.wide)
        b.emit(Scan(step, (start,), (carry,), tuple(body), (following.output,), (None,), ((kept, stacked),), reverse,
                    b.origin))  # fmt: skip
        return stacked

    def in_blocks(
        self, hint: str, rest: Shape, count: int, given: Callable[..., Expr], exclusive: bool, reverse: bool = False
    ) -> Tensor:
        """All blocks side by side, then what is before each block: a few steps of many elements, where one after the
        other there would be many of few."""
        b, size = self.b, even_part(count, min(_BLOCK, isqrt(count - 1) + 1))
        blocks = -(-count // size)
        nothing = neutral(self.operator, self.wide)

        def at(place: Expr) -> Expr:
            return count - 1 - place if reverse else place

        def in_block(step: Expr, block: Expr, *i: Expr) -> Expr:
            place = block * size + step
            value = given(at(minimum(place, count - 1)), *i)
            return select(lt(place, count), value, nothing) if blocks * size > count else value

        inside = self.in_steps(f"{hint}_inside", (blocks, *rest), size, in_block, False)
        run = self.in_blocks if blocks > _LONGEST else self.in_steps
        before = run(f"{hint}_before", rest, blocks, lambda k, *i: load(inside, (size - 1, k, *i)), True)

        def element(place: Expr, *i: Expr) -> Expr:
            block, step = at(place) // size, at(place) % size
            behind = load(before, (block, *i))
            if not exclusive:
                return op(self.operator, behind, load(inside, (step, block, *i)))
            own = op(self.operator, behind, load(inside, (maximum(step - 1, 0), block, *i)))
            return select(lt(0, step), own, behind)

        return b.map(hint, (count, *rest), element)
