"""Plans sums over windows that threads keep in registers: a packet of neighbouring channels of neighbouring outputs.

    y[c, i, j] = sum over r, s of x[c, i + r, j + s] w[c, r, s]     vector c x 8; register [j:4]; order i j c r s

A thread has 8 channels of 4 outputs along j. For every r it reads 4 + 6 packets of a row of x and 7 of w, where 8
products of 49 steps each by themselves would read 2 elements a step. Pooling windows and sums of few parts, whose
outputs share nothing, gain by the packets alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from tilewright.backend.gpu.constants import CROWDED_THREADS, FEW_REGISTERS
from tilewright.backend.gpu.maps.plan import busy_threads, in_packets_along, stores_of
from tilewright.intrinsics.gpu_matrix import ROW_BYTES
from tilewright.ir.analysis.simplify import linear, simplify
from tilewright.ir.forms.expr import Axis, Load, Var, axes_of
from tilewright.ir.forms.tensor import Tensor
from tilewright.tile_graph.algebra.context import NestContext, packed_axis
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import Size, extent_of
from tilewright.tile_graph.plan.form import Leaf
from tilewright.tile_graph.plan.leaf_form import ThreadForm

_MOST_TAPS = 16  # of the axis whose steps are written out
_MOST_OUTPUTS = 8  # along the window that a thread may have
_REGISTERS = 136  # of 32 bits for sums and for what a turn reads
_WARPS_BUSY = 2  # times the threads that keep a device busy


@dataclass(frozen=True)
class SharedWindow:
    """How outputs along an axis share what they read: `along` is the reduction axis beside it, in steps of so many."""

    axis: Axis
    along: Axis
    stride: int
    dilation: int

    def places(self, outputs: Size) -> Size:
        """Elements that so many neighbouring outputs read in one turn along the window."""
        return (outputs - 1) * self.stride + (extent_of(self.along.extent) - 1) * self.dilation + 1


def is_window(leaf: Leaf, nest: Nest) -> bool:
    """Whether threads sum up packets of outputs in registers."""
    options = leaf.options(ThreadForm)
    return (nest.monoid is not None and leaf.instruction is None and options.step == 0 and options.split == 1
            and leaf.lanes > 1 and leaf.vector is not None and leaf.vector[0] == "o")  # fmt: skip


def with_window(leaf: Leaf, nest: Nest, free: frozenset[Tensor], context: NestContext) -> Leaf:
    """The leaf with packets of outputs in the registers of a thread, where all that it touches lies in packets, or is
    `free` to lie so."""
    monoid = nest.monoid
    if monoid is None or nest.initial or leaf.vector is None or leaf.vector[0] != "o":
        return leaf
    if leaf.options(ThreadForm).split > 1:
        return leaf
    if len(monoid.left) != 1 or len(nest.elements) != 1 or not leaf.order or leaf.order[-1][0] != "r":
        return leaf
    axis = nest.named(leaf.vector)
    window = window_of(nest, axis)
    inner = window.along if window is not None else nest.named(leaf.order[-1])
    if extent_of(inner.extent) > _MOST_TAPS:
        return leaf
    names = nest.axis_names()
    order = (*(n for n in leaf.order if n != names[inner]), names[inner])
    points = prod(extent_of(a.extent) for a in nest.axes)
    bound = [n for n in nest.element_loads if n.source not in free or packed_axis(n, axis) is None]
    moving = [*stores_of(nest), *(n for n in bound if axis in axes_of(*n.indices))]
    lanes = ROW_BYTES // max(n.dtype.bytes for n in nest.element_loads)
    while lanes > 1:
        enough = points >= _WARPS_BUSY * lanes * busy_threads(context.target) and extent_of(axis.extent) % lanes == 0
        if enough and all(in_packets_along(n, axis, lanes, context) for n in moving):
            break
        lanes //= 2
    if lanes == 1:
        return leaf
    room = points // (_WARPS_BUSY * lanes * busy_threads(context.target))
    outputs = 1 if window is None else _outputs(nest, window, lanes, room)
    register = () if window is None or outputs == 1 else ((names[window.axis], outputs),)
    return replace(leaf, lanes=lanes, register=register, order=order)


def _outputs(nest: Nest, window: SharedWindow, lanes: int, room: int) -> int:
    """Neighbouring outputs of a thread, by what it reads for each: those that share it and that its registers hold."""
    extent = extent_of(window.axis.extent)
    if window.stride >= extent_of(window.along.extent) * window.dilation:
        return 1
    width, taps = max(n.dtype.bytes for n in nest.element_loads), extent_of(window.along.extent)
    best, least = 1, float(2 * taps)
    for count in (n for n in range(2, _MOST_OUTPUTS + 1) if n <= min(extent, room)):
        read = int(window.places(count)) + taps
        kept = lanes * count + lanes * width // 4 * read
        each = read * -(-extent // count) / extent * (CROWDED_THREADS if kept > FEW_REGISTERS else 1.0)
        if kept <= _REGISTERS and each < least:
            best, least = count, each
    return best


def window_of(nest: Nest, vector: Axis) -> SharedWindow | None:
    """The longest window that slides along an output axis; None where nothing does."""
    found: list[tuple[int, SharedWindow]] = []
    for node in nest.element_loads:
        for index in node.indices:
            form = linear(simplify(index))
            terms = {t.axis: c for t, c in form.terms.items() if isinstance(t, Var)}
            outputs = [a for a in terms if a in nest.axes and a is not vector and extent_of(a.extent) > 1]
            taps = [a for a in terms if a in nest.reduce_axes and extent_of(a.extent) > 1]
            if len(terms) == len(form.terms) == 2 and len(outputs) == len(taps) == 1 and min(terms.values()) > 0:
                (axis,), (along,) = outputs, taps
                found.append((nest.axes.index(axis), SharedWindow(axis, along, terms[axis], terms[along])))
    return max(found, key=lambda f: (extent_of(f[1].along.extent), f[0]))[1] if found else None


def reads_of_turn(node: Load, nest: Nest, leaf: Leaf, register: Mapping[Axis, Size]) -> Size:
    """Places of a tensor that a thread reads in one turn along the innermost axis of its sum."""
    window = window_of(nest, nest.named(leaf.vector or ""))
    inner = nest.named(leaf.order[-1])
    taps = extent_of(inner.extent) if inner in axes_of(*node.indices) else 1
    if window is None or window.axis not in axes_of(*node.indices):
        return taps
    outputs = register.get(window.axis, 1)
    return window.places(outputs) if taps > 1 else outputs
