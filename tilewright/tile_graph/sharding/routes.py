"""From one spread of a tensor to another: which exchanges between ranks, and how many bytes a rank sends in each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod

from tilewright.ir.forms.mesh import WHOLE, AxisPart, Mesh, Spread, inside
from tilewright.ir.forms.sharded import Exchange
from tilewright.ir.forms.tensor import Tensor, extents


def route(tensor: Tensor, have: Spread, want: Spread, mesh: Mesh) -> tuple[tuple[Exchange, ...], Spread]:
    """The exchanges that bring a tensor to where every rank has what `want` says, and the spread it then lies in: that
    one, or one that holds more and costs nothing further."""
    steps, final = _route(extents(tensor), have, want, mesh)
    return tuple(Exchange(kind, tensor, axis, a, b) for kind, axis, a, b in steps), final


@lru_cache(maxsize=1 << 16)
def _route(
    shape: tuple[int, ...], have: Spread, want: Spread, mesh: Mesh
) -> tuple[tuple[tuple[str, int, Spread, Spread], ...], Spread]:
    found: list[tuple[str, int, Spread, Spread]] = []
    now = have
    # from the last mesh axis to the first: blocks of blocks are put together before the blocks
    for axis in reversed(range(len(mesh.axes))):
        for kind, part in _changes(shape, now, want, axis, mesh):
            found.append((kind, axis, now, now.with_part(axis, part)))
            now = found[-1][3]
    return tuple(found), now


def _changes(shape: tuple[int, ...], now: Spread, want: Spread, axis: int, mesh: Mesh) -> list[tuple[str, AxisPart]]:
    own, other = now.parts[axis], want.parts[axis]
    if own.is_whole or (own.operator is None and own.dim == other.dim and _same_blocks(now, want, axis)):
        beyond = own.before < other.before or own.after < other.after
        return [("halo", other)] if not own.is_whole and beyond else []
    if not _can_be_cut(now, want, axis, shape, mesh):
        other = WHOLE
    if own.operator is not None:
        if other.dim is None:
            return [("all-reduce", WHOLE)]
        block = replace(other, before=0, after=0)
        return [("reduce-scatter", block), *([("halo", other)] if other != block else [])]
    if other.dim is None:
        return [("all-gather", WHOLE)]
    block = replace(other, before=0, after=0)
    return [("all-to-all", block), *([("halo", other)] if other != block else [])]


def _same_blocks(now: Spread, want: Spread, axis: int) -> bool:
    """Whether the blocks of a dimension are the same in both: earlier mesh axes cut it alike."""
    dim = now.parts[axis].dim
    outer = [(a.dim == dim) == (b.dim == dim) for a, b in zip(now.parts[:axis], want.parts[:axis], strict=True)]
    return all(outer)


def _can_be_cut(now: Spread, want: Spread, axis: int, shape: tuple[int, ...], mesh: Mesh) -> bool:
    """Whether the blocks of the dimension wanted can be made along this mesh axis: what other axes cut of it now is
    what they cut in the end, and no later one cuts it."""
    dim = want.parts[axis].dim
    if dim is None:
        return False
    inner = any(part.dim == dim for part in now.parts[axis + 1 :])
    alike = all((a.dim == dim) == (b.dim == dim) for a, b in zip(now.parts[:axis], want.parts[:axis], strict=True))
    return not inner and alike and now.with_part(axis, AxisPart(dim)).fits(shape, mesh)


def sent_bytes(step: Exchange, mesh: Mesh) -> int:
    """Bytes that the rank with most to send sends in an exchange, in the way that sends least; of a gather, those that
    come to the first."""
    if step.axis is None:
        return step.tensor.most_bytes
    shape, peers = extents(step.tensor), mesh.sizes[step.axis]
    one = step.tensor.dtype.bytes
    here = _most(step.before, shape, mesh) * one
    if step.kind == "all-reduce":
        return 2 * here * (peers - 1) // peers
    if step.kind in ("all-gather", "gather"):
        return here * (peers - 1)
    if step.kind == "halo":
        return (_most(step.after, shape, mesh) - _most(step.before, shape, mesh)) * one
    return here * (peers - 1) // peers


def handled_bytes(step: Exchange, mesh: Mesh) -> int:
    """Bytes that a rank reads and writes in its own memory besides: what comes is added to what is there, and a rank's
    own part, or one that lies in pieces among the others, is copied. An all-reduce adds up while it passes on."""
    if step.axis is None:
        return 0
    shape, peers = extents(step.tensor), mesh.sizes[step.axis]
    here, passed = _most(step.before, shape, mesh) * step.tensor.dtype.bytes, sent_bytes(step, mesh)
    if step.kind in ("halo", "all-reduce"):
        return 2 * here
    own = here if step.kind in ("all-gather", "gather") else here // peers
    found = 2 * own + (3 * passed if step.before.parts[step.axis].operator else 0)
    if not step.before.parts[step.axis].operator and _in_pieces(step.before, step.axis, shape, mesh):
        found += 2 * passed
    return found + (2 * passed if _in_pieces(step.after, step.axis, shape, mesh) else 0)


def _in_pieces(spread: Spread, axis: int, shape: tuple[int, ...], mesh: Mesh) -> bool:
    """Whether the blocks along a mesh axis are no whole rows of what a rank has: a dimension before is longer."""
    dim = spread.parts[axis].dim
    at = (0,) * len(mesh.axes)
    return dim is not None and any(n > 1 for _, n in spread.place(shape, mesh, at)[:dim])


def is_held(shape: Sequence[int], have: Spread, want: Spread, mesh: Mesh) -> bool:
    """Whether every rank has what another spread says, in the one there is."""
    if have.is_partial:
        return False
    places = [(want.place(shape, mesh, at), have.place(shape, mesh, at)) for at in mesh.coordinates]
    return all(inside(a, b) for a, b in places)


@lru_cache(maxsize=1 << 16)
def _most(spread: Spread, shape: tuple[int, ...], mesh: Mesh) -> int:
    return max(prod(n for _, n in spread.place(shape, mesh, at)) for at in mesh.coordinates)
