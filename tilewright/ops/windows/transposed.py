"""Transposed convolutions as ordinary ones: one for every set of output phases that the same taps reach.

Output o gets input p through tap k where p * stride + k * dilation - begin = o. So outputs of one phase, the rest of
o + begin divided by the stride, see every so manyth tap and neighbouring inputs: a dense convolution at stride 1.
Phases that see the same inputs are further output channels of one sum; a map then interleaves the phases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from itertools import product as combinations
from math import gcd, prod

from tilewright.ir.forms.expr import Expr, all_of, const, le, load, lt, select
from tilewright.ir.forms.tensor import Tensor
from tilewright.ops.builder import Builder, dims
from tilewright.ops.reductions.contraction import product
from tilewright.ops.windows.geometry import SlidingAxis


@dataclass(frozen=True)
class _Phases:
    """Neighbouring phases of one axis that read the same inputs; phase first + j begins at tap start + j."""

    first: int
    count: int
    start: int
    step: int  # between taps of a phase
    window: SlidingAxis  # over the input, a position for every stride outputs

    def tap(self, phase: Expr, place: Expr) -> Expr:
        """The tap of the model that a phase, counted from the first, has at a place of its window."""
        return phase + self.start + (self.window.kernel - 1 - place) * self.step


def transposed(b: Builder, hint: str, x: Tensor, weight: Tensor, shape: Sequence[SlidingAxis], group: int) -> Tensor:
    """The sum alone, axes (n, co, spatial...), in the accumulator type."""
    outputs = dims(weight)[1] * group
    axes = [_phases(w) for w in shape]
    if all(w.stride == 1 for w in shape):
        only = [found[0] for found in axes]
        return _convolved(b, hint, x, weight, only, group)
    sums: dict[tuple[_Phases, ...], Tensor] = {}
    for number, choice in enumerate(combinations(*axes)):
        if all(p.window.kernel > 0 for p in choice):
            sums[choice] = _convolved(b, f"phases{number}", x, weight, choice, group)
    some = next(iter(sums.values()))
    out = (dims(x)[0], outputs, *(w.out for w in shape))

    def element(*i: Expr) -> Expr:
        moved = [o + w.begin % w.stride for o, w in zip(i[2:], shape, strict=True)]
        phases = [o % w.stride for o, w in zip(moved, shape, strict=True)]
        places = [o // w.stride for o, w in zip(moved, shape, strict=True)]
        value: Expr = const(0, some.dtype)
        for choice, total in sums.items():
            number: Expr = const(0)
            for phase, found in zip(phases, choice, strict=True):
                number = number * found.count + (phase - found.first)
            apart = total.rank > len(out)
            channel = (number, i[1]) if apart else (number * outputs + i[1],)
            read = load(total, (i[0], *channel, *places))
            value = select(_among(phases, choice, shape), read, value)
        return value

    return b.map(hint, out, element)


def _phases(window: SlidingAxis) -> list[_Phases]:
    """All phases of an axis, those that differ in tap and position alone together."""
    stride, common = window.stride, gcd(window.stride, window.dilation)
    step, dilation = stride // common, window.dilation // common
    first = window.begin // stride  # the position of the first output
    count = (window.begin % stride + window.out - 1) // stride + 1
    starts = {k * window.dilation % stride: k for k in reversed(range(min(step, window.kernel)))}
    ends = {0, stride, *(n for phase in starts for n in (phase, phase + 1))}  # between them no tap reaches a phase
    bounds = sorted(ends)
    found: list[_Phases] = []
    for phase, end in pairwise(bounds):
        start = starts.get(phase, 0)
        taps = len(range(start, window.kernel, step)) if phase in starts else 0
        reach = (phase - start * window.dilation) // stride if taps else 0
        begin = (taps - 1) * dilation - first - reach
        over = SlidingAxis(window.size, taps, 1, dilation, begin, 0, count)
        last = found[-1] if found else None
        if last is not None and last.window == over and (taps == 0 or last.start + last.count == start):
            found[-1] = _Phases(last.first, last.count + end - phase, last.start, step, over)
        else:
            found.append(_Phases(phase, end - phase, start, step, over))
    return found


def _among(phases: Sequence[Expr], choice: Sequence[_Phases], shape: Sequence[SlidingAxis]) -> Expr:
    """Whether phases are among the chosen."""
    conditions = []
    for phase, found, window in zip(phases, choice, shape, strict=True):
        end = found.first + found.count
        conditions += [le(found.first, phase)] if found.first > 0 else []
        conditions += [lt(phase, end)] if end < window.stride else []
    return all_of(conditions)


def _convolved(b: Builder, hint: str, x: Tensor, weight: Tensor, choice: Sequence[_Phases], group: int) -> Tensor:
    """The convolution of some phases: axes (n, phase and channel, position...); of groups phase and channel apart."""
    channels, per_group = dims(weight)[:2]
    inner, outputs = channels // group, per_group * group
    number = prod(p.count for p in choice)
    shape = [p.window for p in choice]
    packed = _packed(b, f"{hint}_weight" if hint else "weight", weight, choice, group)
    lead = _lead(number, outputs, group)

    def element(i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Expr:
        places = [w.place(o, k) for w, o, k in zip(shape, i[1 + len(lead) :], r[1:], strict=True)]
        at = i[len(lead)]  # the channel, or phase and channel in one
        channel = r[0] if group == 1 else at if inner == per_group == 1 else (at // per_group) * inner + r[0]
        conditions = [c for w, p in zip(shape, places, strict=True) for c in w.inside(p)]
        value: Expr = load(x, (i[0], channel, *places))
        if conditions:
            value = select(all_of(conditions), value, const(0, x.dtype))
        return product(value, load(packed, (*i[1 : 1 + len(lead)], *r)))

    out = (dims(x)[0], *lead, *(w.out for w in shape))
    return b.reduce(hint, out, (inner, *(w.kernel for w in shape)), element, "add")


def _packed(b: Builder, hint: str, weight: Tensor, choice: Sequence[_Phases], group: int) -> Tensor:
    """The taps of some phases as weights of an ordinary convolution, in the order its windows have."""
    channels, per_group = dims(weight)[:2]
    inner, outputs = channels // group, per_group * group
    number = prod(p.count for p in choice)
    taps = tuple(p.window.kernel for p in choice)
    lead = _lead(number, outputs, group)

    def element(*i: Expr) -> Expr:
        phase, channel = (i[0] // outputs, i[0] % outputs) if len(lead) == 1 else i[:2]
        within, place = i[-1 - len(taps)], i[-len(taps) :]
        at: list[Expr] = []
        for found, k in zip(reversed(choice), reversed(place), strict=True):
            at.insert(0, found.tap(phase % found.count if found.count > 1 else const(0), k))
            phase = phase // found.count
        source = within if group == 1 else (channel // per_group) * inner + within
        return load(weight, (source, channel % per_group, *at))

    return b.map(hint, (*lead, inner, *taps), element)


def _lead(number: int, outputs: int, group: int) -> tuple[int, ...]:
    """The axes of phases and channels: one where no group ends inside it."""
    return (number, outputs) if group > 1 and number > 1 else (number * outputs,)
