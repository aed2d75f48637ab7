"""Col2Im: blocks of columns added up in the image that they were taken from."""

from __future__ import annotations

from math import prod

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.expr import Expr, all_of, cast, const, eq, le, load, lt, select
from tilewright.ir.forms.graph import Node
from tilewright.ir.forms.tensor import Tensor
from tilewright.ops.builder import Builder, clamp, dims
from tilewright.ops.registry import operator
from tilewright.ops.windows.geometry import windows


@operator("Col2Im", since=18, constants=(1, 2))
def col2im(b: Builder, node: Node, x: Tensor, image: Tensor, block: Tensor) -> Tensor:
    sizes, kernel = b.integers(image, "image_shape"), b.integers(block, "block_shape")
    shape = windows(b, node, sizes, kernel)
    taps, blocks = prod(kernel), prod(w.out for w in shape)
    if x.rank != 3 or dims(x)[1] % taps or dims(x)[2] != blocks:
        raise b.invalid(f"columns {list(dims(x))} are not those of {blocks} blocks {kernel} of an image {sizes}")
    wide = dtypes.accumulator(x.dtype)

    def element(i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Expr:
        conditions: list[Expr] = []
        flat: Expr = const(0)
        channel = i[1]
        for w, place, tap in zip(shape, i[2:], r, strict=True):
            start = place + w.begin - tap * w.dilation  # of the block that has this pixel at this tap
            conditions += [le(0, start), eq(start % w.stride, 0), lt(start // w.stride, w.out)]
            flat = flat * w.out + clamp(start // w.stride, w.out)
            channel = channel * w.kernel + tap
        value = cast(load(x, (i[0], channel, flat)), wide)
        return select(all_of(conditions), value, const(0, wide))

    out = (dims(x)[0], dims(x)[1] // taps, *sizes)
    total = b.reduce("" if wide is x.dtype else "sum", out, kernel, element, "add")
    return b.cast("", total, x.dtype)
