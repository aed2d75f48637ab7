"""Windows that slide over every channel by itself, run by dot products: each lane sums up to four taps of its channel.

c[plain, row, channel] = sum over two window axes of a[.., row·step + outer, .. inner .., channel] * b[channel, inner,
outer], 8-bit a and b, channels side by side in a. Taps along `inner` are interleaved once for each position of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilewright.backend.cpu.dot.contraction import narrow_product
from tilewright.intrinsics.cpu import Dot
from tilewright.ir.analysis.simplify import linear, simplify
from tilewright.ir.forms.expr import Axis, Expr, Load, Var, axes_of, flattened, is_op
from tilewright.ir.forms.tensor import Layout, StorageAxis
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import Size, extent_of

CHANNELS = 16  # a register of bytes, interleaved together


@dataclass(frozen=True, eq=False)
class DepthwiseWindow:
    a: Load
    b: Load
    conditions: tuple[Expr, ...]  # where an element counts
    channel: Axis
    row: Axis  # the output axis along which neighbours share interleaved taps
    step: int  # positions of a between neighbours of the row
    along: Axis  # the window axis along the row
    inner: Axis  # and the other one
    terms: tuple[Axis, ...] = ()  # of the sum, along which b alone changes

    def groups(self, dot: Dot) -> int:
        return -(-extent_of(self.inner.extent) // dot.group)

    def layout(self, dot: Dot) -> Layout:
        """b as (.., outer, group of taps, channel, tap)."""
        place = {i.axis: d for d, i in enumerate(self.b.indices) if isinstance(i, Var)}
        n, k, r = place[self.channel], place[self.inner], place[self.along]
        rest = [d for d in range(len(self.b.indices)) if d not in (n, k, r)]
        return Layout((
            *(StorageAxis(d) for d in rest), StorageAxis(r), StorageAxis(k, dot.group), StorageAxis(n),
            StorageAxis(k, 1, dot.group),
        ))  # fmt: skip


def window_of(nest: Nest) -> DepthwiseWindow | None:
    """The nest as such a window; None where it is not one."""
    found = narrow_product(nest)
    if found is None:
        return None
    conditions, left, right = found
    for a, b in ((left, right), (right, left)):
        if isinstance(a, Load) and isinstance(b, Load):
            made = _as_window(nest, a, b, tuple(c for whole in conditions for c in flattened(whole, "and")))
            if made is not None:
                return made
    return None


def _as_window(nest: Nest, a: Load, b: Load, conditions: tuple[Expr, ...]) -> DepthwiseWindow | None:
    plain = [i.axis for i in b.indices if isinstance(i, Var)]
    across = [r for r in nest.reduce_axes if r in axes_of(a, *conditions)]
    terms = tuple(r for r in nest.reduce_axes if r not in across)
    if any(axes_of(i) and not isinstance(i, Var) for i in b.indices):
        return None
    if len(across) != 2 or len(plain) != 3 + len(terms):
        return None
    channels = [x for x in plain if x in nest.axes]
    if len(channels) != 1 or set(plain) != {*channels, *nest.reduce_axes}:
        return None
    (channel,) = channels
    if sum(channel in axes_of(i) for i in a.indices) != 1 or channel in axes_of(*conditions):
        return None
    if not any(isinstance(i, Var) and i.axis is channel for i in a.indices) or extent_of(channel.extent) < CHANNELS:
        return None
    for row in reversed([x for x in nest.axes if x is not channel and extent_of(x.extent) > 1]):
        made = _along(across, a, b, conditions, channel, row)
        if made is not None:
            return replace(made, terms=terms)
    return None


def _along(
    across: Sequence[Axis], a: Load, b: Load, conditions: tuple[Expr, ...], channel: Axis, row: Axis
) -> DepthwiseWindow | None:
    """The window with its interleaved taps shared along one output axis."""
    at = [i for i in a.indices if row in axes_of(i)]
    if len(at) != 1:
        return None
    terms = linear(simplify(at[0])).terms
    outer = next((r for r in across if set(axes_of(at[0])) == {row, r}), None)
    if outer is None or sum(outer in axes_of(i) for i in a.indices) != 1:
        return None
    known = {t.axis: c for t, c in terms.items() if isinstance(t, Var)}
    if set(known) != {row, outer} or len(terms) != 2 or known[outer] != 1 or known[row] < 1:
        return None
    (inner,) = (r for r in across if r is not outer)
    if not all(_follows(c, row, outer, known[row]) for c in conditions):
        return None
    return DepthwiseWindow(a, b, conditions, channel, row, known[row], outer, inner)


def _follows(condition: Expr, row: Axis, outer: Axis, step: int) -> bool:
    """Whether a condition asks for the position row·step + outer and nothing else of the two."""
    if row not in axes_of(condition) and outer not in axes_of(condition):
        return True
    if not (is_op(condition, "le") or is_op(condition, "lt")):
        return False
    gap = linear(simplify(condition.args[1])).plus(linear(simplify(condition.args[0])).scaled(-1))
    known = {t.axis: c for t, c in gap.terms.items() if isinstance(t, Var)}
    return set(known) == {row, outer} == set(axes_of(condition)) and known[row] == step * known[outer]


def splits_well(size: Size, extent: int) -> Size:
    """Whether every tile of so many channels holds a block of them."""
    last = extent % size
    return (size >= CHANNELS) & ((last == 0) | (last >= CHANNELS))
