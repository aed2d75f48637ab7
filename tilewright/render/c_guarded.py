"""Reads behind a condition on their places: lanes inside are a run, from a first lane up to a last one.

    select(0 <= e and e < 100, p[e], 0.0)    with e = 16*block + lane - 3    reads lanes 3 - 16*block to 103 - 16*block

What lies outside is never read. Written lane by lane, every lane would repeat the condition.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

from tilewright.ir.analysis.simplify import Linear, linear, simplify
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.dtypes import DType
from tilewright.ir.forms.expr import Axis, Expr, const, is_op, maximum, minimum, var, walk
from tilewright.render.c_address import lane_stride


@dataclass(frozen=True)
class LaneRun:
    """Lanes that are at least every `first` and less than every `last`, where all that is `given` holds."""

    first: tuple[Expr, ...] = ()
    last: tuple[Expr, ...] = ()
    given: tuple[Expr, ...] = ()

    def within(self, other: LaneRun | None) -> LaneRun:
        if other is None:
            return self
        return LaneRun(self.first + other.first, self.last + other.last, self.given + other.given)

    def ends(self, lanes: int) -> tuple[Expr, Expr]:
        """The first lane, and the one behind the last, as far as they are lanes at all."""
        return simplify(reduce(maximum, (const(0), *self.first))), simplify(reduce(minimum, (const(lanes), *self.last)))


def run_of(condition: Expr, lane: Axis) -> LaneRun | None:
    """The lanes for which a condition holds, if it compares places alone and they are a run."""
    found = LaneRun()
    stack = [condition]
    while stack:
        node = stack.pop()
        if is_op(node, "and"):
            stack.extend(node.args)
            continue
        one = _compared(node, lane)
        if one is None:
            return None
        found = found.within(one)
    return found


def rest_of(condition: Expr, lane: Axis) -> LaneRun | None:
    """The lanes for which a condition does not hold: a run where it is a single comparison."""
    if is_op(condition, "not"):
        return run_of(condition.args[0], lane)
    if is_op(condition, "lt"):
        return _below(condition.args[1], condition.args[0], 1, lane)
    return _below(condition.args[1], condition.args[0], 0, lane) if is_op(condition, "le") else None


def _compared(node: Expr, lane: Axis) -> LaneRun | None:
    if lane not in node.axes:
        return None if node.reads else LaneRun(given=(node,))
    if is_op(node, "not"):
        return rest_of(node.args[0], lane)
    if is_op(node, "lt"):
        return _below(node.args[0], node.args[1], 0, lane)
    return _below(node.args[0], node.args[1], 1, lane) if is_op(node, "le") else None


def _below(a: Expr, b: Expr, slack: int, lane: Axis) -> LaneRun | None:
    """The lanes with a < b + slack."""
    if a.dtype is not dtypes.index or a.reads or b.reads:
        return None
    gap = linear(simplify(b)).plus(linear(simplify(a)).scaled(-1))  # step * lane + still + slack > 0
    step = lane_stride(gap, lane)
    if not step:
        return None
    still = Linear({t: c for t, c in gap.terms.items() if t is not var(lane)}, gap.constant + slack).expr()
    if step > 0:
        return LaneRun(first=((still * -1) // step + 1,))
    return LaneRun(last=((still - 1) // -step + 1,))


def has_runs(dtype: DType, lanes: int) -> bool:
    """Whether lanes inside are read at once: where vectors are short, a lane at a time is no slower."""
    whole = dtype.kind != "b" and dtype.bytes in (4, 8) and dtype.bits >= 32
    return whole and dtype.bytes * lanes % 32 == 0 and lanes <= 32


def is_short_chain(choice: Expr, lanes: int) -> bool:
    """Whether a choice has few sides: all are computed for all lanes, where a lane by itself computes the one it takes.
    With more sides than lanes the latter was quicker on a Skylake server (24 sides, 16 lanes: 0.24 against 0.70 ms)."""
    return sum(1 for node in walk(choice) if is_op(node, "select")) <= lanes


def run_name(kind: str) -> str:
    return f"tw_run_{kind}"


def inside_name(mask: str) -> str:
    return f"tw_inside_{mask}"


def inside(mask: str, dtype: DType, lanes: int) -> str:
    """A mask of the lanes of a run."""
    numbers = ", ".join(map(str, range(lanes)))
    number = f"int{dtype.bits}_t"
    return (
        f"static inline {mask} {inside_name(mask)}(int64_t first, int64_t last) {{\n"
        f"    const {mask} lane = {{{numbers}}};\n"
        f"    const {number} low = first < 0 ? 0 : first > {lanes} ? {lanes} : first;\n"
        f"    const {number} high = last < 0 ? 0 : last > {lanes} ? {lanes} : last;\n"
        "    return (lane >= low) & (lane < high);\n}\n"
    )


def read(element: str, kind: str, mask: str, dtype: DType, lanes: int) -> str:
    """Reading the lanes of a run, `stride` elements apart, zeros on the others. Neighbours are one masked move where
    the processor has them: it touches nothing beyond."""
    neighbours = _masked(kind, mask, dtype, lanes)
    return (
        f"static inline {kind} {run_name(kind)}"
        f"(const {element} *from, const int64_t stride, int64_t first, int64_t last) {{\n{neighbours}"
        f"    {kind} lanes = {{}};\n"
        f"    for (int i = 0; i < {lanes}; ++i)\n"
        "        if (first <= i && i < last) lanes[i] = from[i * stride];\n"
        "    return lanes;\n}\n"
    )


def _masked(kind: str, mask: str, dtype: DType, lanes: int) -> str:
    size = dtype.bytes * lanes
    letter, number = ("s", "float") if dtype.bytes == 4 else ("d", "double")
    inside = f"const {mask} inside = {inside_name(mask)}(first, last);"
    if size == 32:
        whole = f"{'int' if dtype.bytes == 4 else 'long long'} __attribute__((vector_size(32)))"
        value = f"__builtin_ia32_maskloadp{letter}256((const void *)from, ({whole})inside)"
        return f"#if defined(__AVX__)\n    if (stride == 1) {{ {inside} return ({kind}){value}; }}\n#endif\n"
    each = 64 // dtype.bytes
    vector = f"{number} __attribute__((vector_size(64)))"
    bits = f"uint{each}_t"
    moves = "".join(
        f"        part[{k}] = ({vector})__builtin_ia32_loadup{letter}512_mask"
        f"((const void *)(from + {k * each}), ({vector}){{}}, ({bits})(taken >> {k * each}));\n"
        for k in range(size // 64)
    )
    return (
        "#if defined(__AVX512F__)\n    if (stride == 1) {\n"
        f"        first = first < 0 ? 0 : first > {lanes} ? {lanes} : first;\n"
        f"        last = last < first ? first : last > {lanes} ? {lanes} : last;\n"
        "        const uint64_t taken = (((uint64_t)1 << (last - first)) - 1) << first;\n"
        f"        {kind} lanes;\n        {vector} *part = (void *)&lanes;\n{moves}"
        "        return lanes;\n    }\n#endif\n"
    )
