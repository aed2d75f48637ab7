"""Names of registers in C: the elements of one buffer never hide those of another."""

from __future__ import annotations

import pytest

from tilewright.errors import InternalError
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.expr import Axis, const, load, var
from tilewright.ir.forms.loops import Alloc, Buffer, For, ForKind, Kernel, Memory, Stmt, Store
from tilewright.lower.register_block import BufferNames
from tilewright.render.c import render_kernel


def nested(first: str, second: str) -> Kernel:
    """Two vectors of one register buffer and, inside, one of another; all three are added up."""
    x = Buffer("x", (12,), dtypes.float32, Memory.GLOBAL)
    y = Buffer("y", (4,), dtypes.float32, Memory.GLOBAL)
    outer = Buffer(first, (2, 4), dtypes.float32, Memory.REGISTER)
    inner = Buffer(second, (4,), dtypes.float32, Memory.REGISTER)

    def lanes(buffer: Buffer, lead: tuple[int, ...], offset: int) -> Stmt:
        lane = Axis("lane", 4)
        at = (*map(const, lead), var(lane))
        return For(lane, ForKind.VECTOR, (Store(buffer, at, load(x, (var(lane) + offset,))),))

    lane = Axis("lane", 4)
    total = load(outer, (const(0), var(lane))) + load(outer, (const(1), var(lane))) + load(inner, (var(lane),))
    added = For(lane, ForKind.VECTOR, (Store(y, (var(lane),), total),))
    body = (lanes(outer, (0,), 0), lanes(outer, (1,), 4), Alloc(inner, (lanes(inner, (), 8), added)))
    return Kernel("k", (x, y), (For(Axis("tile", 1), ForKind.PARALLEL, (Alloc(outer, body),)),))


def test_fresh_names_differ_from_elements() -> None:
    names = BufferNames()
    text = render_kernel(nested(names.fresh("row"), names.fresh("row")), {})
    assert "v4f32 row_0, row_1;" in text and "v4f32 row1;" in text


def test_a_hidden_register_is_refused() -> None:
    with pytest.raises(InternalError, match="k: row_1 would hide another register of the same name"):
        render_kernel(nested("row", "row_1"), {})
