"""The geometry of sliding windows, shared by convolution and pooling: sizes, pads and in-range conditions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.ir.forms.expr import Expr, le, lt
from tilewright.ir.forms.graph import Node
from tilewright.ops.builder import Builder


@dataclass(frozen=True)
class SlidingAxis:
    """One spatial axis: `size` input places, a kernel of `kernel` taps, and `out` positions."""

    size: int
    kernel: int
    stride: int
    dilation: int
    begin: int  # padding before
    end: int  # padding after
    out: int

    def place(self, position: Expr, tap: Expr) -> Expr:
        """Where a tap of the window at `position` reads."""
        return position * self.stride + tap * self.dilation - self.begin

    def inside(self, place: Expr) -> list[Expr]:
        """Conditions for the sides at which a window really leaves the input."""
        conditions = []
        if self.begin > 0:
            conditions.append(le(0, place))
        if (self.out - 1) * self.stride + (self.kernel - 1) * self.dilation - self.begin >= self.size:
            conditions.append(lt(place, self.size))
        return conditions

    def taps(self, position: int, include_padding: bool) -> int:
        """How many taps of the window at `position` count for an average."""
        low, high = (-self.begin, self.size + self.end) if include_padding else (0, self.size)
        start = position * self.stride - self.begin
        first = max(-(-(low - start) // self.dilation), 0)
        last = min((high - 1 - start) // self.dilation, self.kernel - 1)
        return max(last - first + 1, 0)


def geometry(b: Builder, node: Node, rank: int) -> tuple[list[int], list[int], list[int]]:
    """Strides, dilations and pads of a node, checked."""
    found: list[list[int]] = []
    for name, count, least, default in (("strides", rank, 1, 1), ("dilations", rank, 1, 1), ("pads", 2 * rank, 0, 0)):
        given = [int(v) for v in node.attributes.get(name, [default] * count)] or [default] * count
        if len(given) != count:
            raise b.invalid(f"{name} {given} has {len(given)} numbers; {count} are needed for {rank} spatial axes")
        if any(v < least for v in given):
            raise b.invalid(f"{name} {given} has to be {least} or more on every axis")
        found.append(given)
    strides, dilations, pads = found
    return strides, dilations, pads


def windows(b: Builder, node: Node, sizes: Sequence[int], kernel: Sequence[int]) -> list[SlidingAxis]:
    """The windows of a node's attributes, one a spatial axis."""
    rank = len(sizes)
    if len(kernel) != rank:
        raise b.invalid(f"a kernel of {len(kernel)} axes over {rank} spatial axes")
    strides, dilations, pads = geometry(b, node, rank)
    if any(n < 1 for n in kernel):
        raise b.invalid(f"kernel_shape {list(kernel)} has to be 1 or more on every axis")
    automatic = node.attributes.get("auto_pad", "NOTSET") or "NOTSET"
    if automatic not in ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"):
        raise b.unsupported(f"auto_pad '{automatic}' is not known")
    ceil = bool(node.attributes.get("ceil_mode", 0))
    result = []
    for axis, (size, taps) in enumerate(zip(sizes, kernel, strict=True)):
        stride, dilation = int(strides[axis]), int(dilations[axis])
        span = (taps - 1) * dilation + 1
        if automatic in ("SAME_UPPER", "SAME_LOWER"):
            out = -(-size // stride)
            total = max((out - 1) * stride + span - size, 0)
            begin = total // 2 if automatic == "SAME_UPPER" else total - total // 2
            end = total - begin
        else:
            begin, end = (0, 0) if automatic == "VALID" else (int(pads[axis]), int(pads[axis + rank]))
            room = size + begin + end - span
            if room < 0:
                raise b.invalid(f"a window of {span} does not fit an axis of {size} with pads {begin} and {end}")
            out = (-(-room // stride) if ceil else room // stride) + 1
            # a window that would start in the padding behind the input does not count
            if ceil and (out - 1) * stride >= size + begin:
                out -= 1
        result.append(SlidingAxis(size, int(taps), stride, dilation, begin, end, out))
    return result
