"""What a copy of a contraction's operand costs, and what the sum saves by it: cycles with and without, on one core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod

from tilewright.ir.analysis.simplify import Linear, linear, simplify
from tilewright.ir.forms.bounds import fixed, static
from tilewright.ir.forms.compute import Map, Program, Reduce, reads
from tilewright.ir.forms.expr import Axis, Expr, Load, Var, axes_of, loads
from tilewright.ir.forms.tensor import Tensor
from tilewright.target import Target
from tilewright.transform.layout.choose import is_depthwise, outputs_of_a_read, runs_along_rows

_COPY_CYCLES = 1.0  # an element of a transposing copy, a square of registers at a time
_RUN_CYCLES = 0.6  # an element of a run that keeps its order
_BLOCK = 8  # positions of a row that one register tile takes
_SLOW = 8.0  # a block that must check every position, against one that checks nothing
_CHECKED = 6.0  # an element of a pooling window that must be checked by itself
_BROADCAST = 1.15  # scalars of a window fetched one by one, where a lane of a vector could be multiplied
_WELL_FILLED = 0.96  # of vectors along positions
_BROADCAST_CHECKED = 1.3  # the same with checks between them
_STRIDED = 1.4  # every step of the sum on another cache line, more of them than stay near; up to 2.5 on far rows
_PAGE = 4096
_NEAR_PAGES = 64  # whose addresses are translated at once
FEW_CHANNELS = 7
_KERNELS = 3.0  # costs of a kernel that all workers share, for the copy
_LEAST_GAIN = 0.95


@dataclass(frozen=True)
class GuardedRead:
    """One guarded read of a contraction: `node` in the element, the read inside it, and the conditions around it."""

    node: Expr
    read: Load
    conditions: tuple[Expr, ...]


def copy_pays(compute: Reduce, found: GuardedRead, axes: Sequence[Axis], program: Program, target: Target) -> bool:
    """Cycles with the copy against cycles without, on one core."""
    if found.read.dtype.bytes == 1:
        return _few_bytes(compute, found.read, program)
    steps = prod(fixed(a.extent) for a in (*compute.axes, *compute.reduce_axes))
    lanes = target.lanes(found.read.dtype.bytes)
    ideal = steps / (lanes * target.pipes)
    kernel = _KERNELS * target.kernel_cost * target.fma_rate / (lanes * target.pipes)
    if len(loads(*compute.elements)) == 1:
        copying = prod(fixed(a.extent) for a in axes) * _RUN_CYCLES
        share = _hanging_over(compute, found) if found.read.source in program.inputs else 0.0
        return copying + kernel < _LEAST_GAIN * share * steps * _CHECKED
    if not any(n.source in program.constants for n in loads(*compute.elements)):
        if found.conditions or _follows_a_reduction(compute, found.read, program):
            return False
        return _is_strided(compute, found.read, target) and _panel_pays(found, ideal, kernel)
    # depthwise on an activation of ours: channels are innermost, and all lanes check alike
    by_channel = found.read.source not in program.inputs and is_depthwise(compute, program)
    along_rows = not by_channel and runs_along_rows(compute, found.read, outputs_of_a_read(compute, program), target)
    moves = not along_rows and _changes_order(compute, found.read, program)
    copied = prod(fixed(a.extent) for a in axes)
    copying = copied * (_COPY_CYCLES if moves else _RUN_CYCLES)
    inside, slow = _borders(compute, found)
    now = ideal * inside * (1.0 + (_SLOW - 1.0) * slow)
    if along_rows and found.conditions:  # every lane checks for itself
        now = ideal * _SLOW
    elif moves:
        uneven = target.lane_multiply and _ends_unevenly(found.read, compute, lanes)
        one_by_one = uneven or _overlaps(compute, found.read)
        now *= _BROADCAST_CHECKED if found.conditions else _BROADCAST if one_by_one else 1.0
        now *= _conflicts(compute, found.read, target)
    return ideal + copying + kernel < _LEAST_GAIN * now


def _hanging_over(compute: Reduce, found: GuardedRead) -> float:
    """Of the windows along a row those that hang over an end of it: vectors along the row check every element there."""
    before, after, count = ends(compute, found)
    return (before + after) / max(1, count)


def ends(compute: Reduce, found: GuardedRead) -> tuple[int, int, int]:
    """How many windows hang over the beginning of a row, over its end, and how many there are."""
    form = linear(simplify(found.read.indices[-1]))
    outputs = [(c, t.axis) for t, c in form.terms.items() if isinstance(t, Var) and t.axis in compute.axes]
    taps = [(c, t.axis) for t, c in form.terms.items() if isinstance(t, Var) and t.axis in compute.reduce_axes]
    if len(outputs) != 1 or len(taps) > 1 or not _is_guarded(form, found):
        return 0, 0, 0
    (step, output), size = outputs[0], int(static(found.read.source.shape[-1]) or 0)
    reach = sum(c * (fixed(a.extent) - 1) for c, a in taps)
    starts = [step * o + form.constant for o in range(fixed(output.extent))]
    return sum(s < 0 for s in starts), sum(s >= 0 and s + reach >= size for s in starts), len(starts)


def _few_bytes(compute: Reduce, read: Load, program: Program) -> bool:
    """Whether the sums of a dot product would be mostly empty, and fuller along a window and its few channels.

    Instructions that sum bytes copy their rows anyway, padding as zeros, so that nothing else speaks for a copy.
    """
    weights = [n for n in loads(*compute.elements) if n is not read]
    if len(weights) != 1 or weights[0].source not in program.constants:
        return False
    own = [i.axis for i in read.indices[:-1] if isinstance(i, Var) and i.axis in compute.reduce_axes]
    shared = {a for a in axes_of(*weights[0].indices) if a in compute.reduce_axes}
    return len(own) == 1 and 1 < fixed(own[0].extent) <= FEW_CHANNELS and set(compute.reduce_axes) <= shared


def _follows_a_reduction(compute: Reduce, read: Load, program: Program) -> bool:
    """Whether the other operand comes from a reduction: joined or streamed with it, the sum runs in blocks that stay
    near, and a copy would stand between them."""
    producers = program.producers()
    waiting = [n.source for n in loads(*compute.elements) if n is not read]
    seen: set[Tensor] = set()
    while waiting:
        made = producers.get(waiting.pop())
        if made is None or made.outputs[0] in seen:
            continue
        if not isinstance(made, Map):
            return True
        seen.add(made.output)
        waiting.extend(reads(made))
    return False


def _is_strided(compute: Reduce, read: Load, target: Target) -> bool:
    """Whether an operand that runs along the vector is read by rows so far apart that the nearest cache loses them."""
    last = read.indices[-1]
    if not isinstance(last, Var) or last.axis is not compute.axes[-1]:
        return False
    nearest = target.nearest
    far: list[int] = []
    for number, index in enumerate(read.indices[:-1]):
        if isinstance(index, Var) and index.axis in compute.reduce_axes:
            inner = prod(int(static(e) or 0) for e in read.source.shape[number + 1 :])
            far.append(inner * read.dtype.bytes)
        elif any(a in compute.reduce_axes for a in axes_of(index)):
            return False
    if len(far) != 1 or len(compute.reduce_axes) != 1 or far[0] < 2 * nearest.transaction:
        return False
    # rows a power of two apart share a few sets of the cache; its other half holds rows of the other operand
    usable = nearest.capacity // max(1, gcd(far[0], _PAGE) // nearest.transaction) // 4
    rows = fixed(compute.reduce_axes[0].extent)
    return rows * nearest.transaction > usable and rows * far[0] > nearest.capacity // 2


def _conflicts(compute: Reduce, read: Load, target: Target) -> float:
    """How much longer a sum over channels takes whose planes share few sets of the cache, or lie on too many pages."""
    nearest = target.nearest
    for number, index in enumerate(read.indices[:-1]):
        if isinstance(index, Var) and index.axis in compute.reduce_axes:
            pitch = prod(int(static(e) or 0) for e in read.source.shape[number + 1 :]) * read.dtype.bytes
            planes = fixed(index.axis.extent)
            usable = nearest.capacity // max(1, gcd(pitch, _PAGE) // nearest.transaction) // 2
            if planes * nearest.transaction > usable or planes * min(pitch, _PAGE) > _NEAR_PAGES * _PAGE:
                return _STRIDED
    return 1.0


def _ends_unevenly(read: Load, compute: Reduce, lanes: int) -> bool:
    """Whether vectors along an image's positions, all of them one run, would be far from full: lanes are then along the
    weights, and positions are fetched one by one."""
    positions = [i.axis for i in read.indices if isinstance(i, Var) and i.axis in compute.axes]
    count = prod(fixed(a.extent) for a in positions)
    return len(positions) > 1 and count < _WELL_FILLED * lanes * -(-count // lanes)


def _panel_pays(found: GuardedRead, ideal: float, kernel: float) -> bool:
    copied = prod(int(static(e) or 0) for e in found.read.source.shape)
    return ideal + copied * _RUN_CYCLES + kernel < _LEAST_GAIN * _STRIDED * ideal


def _changes_order(compute: Reduce, read: Load, program: Program) -> bool:
    """Whether the summed axis that weights share is not innermost, and the tensor's order is not ours to choose."""
    if read.source not in program.inputs:
        return False
    last = linear(simplify(read.indices[-1]))
    own = [t for t in last.terms if isinstance(t, Var) and t.axis in compute.reduce_axes]
    return not (len(own) == 1 and len(last.terms) == 1)


def _overlaps(compute: Reduce, read: Load) -> bool:
    """Whether neighbouring windows read the same elements."""
    for index in read.indices:
        terms = [(t.axis, c) for t, c in linear(simplify(index)).terms.items() if isinstance(t, Var)]
        strides = [c for a, c in terms if a in compute.axes]
        reach = [c * (fixed(a.extent) - 1) for a, c in terms if a in compute.reduce_axes]
        if strides and reach and max(reach) >= min(strides):
            return True
    return False


def _borders(compute: Reduce, found: GuardedRead) -> tuple[float, float]:
    """Of all steps those not skipped along outer axes, and of all blocks of a row those that check every position."""
    inside, slow = 1.0, 0.0
    guarded = [i for i in found.read.indices if _is_guarded(linear(simplify(i)), found)]
    for index in guarded:
        form = linear(simplify(index))
        size = int(static(found.read.source.shape[found.read.indices.index(index)]) or 0)
        outputs = [(c, t.axis) for t, c in form.terms.items() if isinstance(t, Var) and t.axis in compute.axes]
        taps = [(c, t.axis) for t, c in form.terms.items() if isinstance(t, Var) and t.axis in compute.reduce_axes]
        if len(outputs) != 1 or len(taps) != 1:
            continue
        (stride, output), (dilation, tap) = outputs[0], taps[0]
        count, window = fixed(output.extent), fixed(tap.extent)
        starts = [k * dilation + form.constant for k in range(window)]
        if index is guarded[-1]:
            checks = [_checked_blocks(start, stride, count, size) for start in starts]
            slow = sum(checks) / max(1, len(checks))
        else:
            within = sum(0 <= start + stride * o < size for start in starts for o in range(count))
            inside = inside * within / max(1, count * window)
    return inside, slow


def _is_guarded(form: Linear, found: GuardedRead) -> bool:
    axes = {a for c in found.conditions for a in axes_of(c)}
    return any(isinstance(t, Var) and t.axis in axes for t in form.terms)


def _checked_blocks(start: int, stride: int, count: int, size: int) -> float:
    """Of the blocks of a row, under one tap, those that hang over an end by more than one position but not wholly."""
    blocks = -(-count // _BLOCK)
    checked = 0
    for block in range(blocks):
        places = [start + stride * o for o in range(block * _BLOCK, min(count, (block + 1) * _BLOCK))]
        outside = sum(not 0 <= p < size for p in places)
        checked += 1 < outside < len(places)
    return checked / max(1, blocks)
