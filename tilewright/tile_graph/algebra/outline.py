"""What a nest computes, whatever its tensors and axes are called: the part of a signature that is worth keeping."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from tilewright.ir.forms.expr import Axis, Const, Expr, Load, Op, State, Symbol, Var, walk
from tilewright.ir.forms.tensor import Tensor


class Key:
    """A table with many rows as a key: its hash is worked out once, and of equal ones only one table is kept."""

    __slots__ = ("_hash", "_rows")

    def __init__(self, rows: Hashable) -> None:
        self._rows, self._hash = rows, hash(rows)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Key) or self._hash != other._hash:
            return False
        if self._rows is not other._rows:
            if self._rows != other._rows:
                return False
            self._rows = other._rows
        return True


@dataclass(frozen=True, eq=False)
class Outline:
    """`key` is equal for nests that compute the same; it numbers the `tensors` and the axes of others in order."""

    key: Key
    tensors: tuple[Tensor, ...]
    outside: tuple[Axis, ...]  # axes of others that the nest uses: the step of a Scan


def outline(
    axes: Sequence[Axis], reduce_axes: Sequence[Axis], monoid: Hashable, expressions: Sequence[Sequence[Expr]],
    tensors: Sequence[Sequence[Tensor]],
) -> Outline:  # fmt: skip
    own = {axis: number for number, axis in enumerate((*axes, *reduce_axes))}
    numbers: dict[Axis, int] = dict(own)
    places: dict[Tensor, int] = {}

    def place(tensor: Tensor) -> int:
        return places.setdefault(tensor, len(places))

    key = (
        tuple(a.extent for a in axes),
        tuple(a.extent for a in reduce_axes),
        monoid,
        tuple(tuple(_rows(root, place, numbers) for root in group) for group in expressions),
        tuple(tuple(place(t) for t in group) for group in tensors),
    )
    return Outline(Key(key), tuple(places), tuple(a for a in numbers if a not in own))


def _rows(root: Expr, place: Callable[[Tensor], int], axes: dict[Axis, int]) -> Hashable:
    """An expression as a table, a row a node; operands are told by their rows."""
    row_of: dict[Expr, int] = {}
    rows: list[Hashable] = []
    for node in walk(root):
        row_of[node] = len(rows)
        rows.append((*_head(node, place, axes), node.dtype.name, *[row_of[a] for a in node.args]))
    return tuple(rows)


def _head(node: Expr, place: Callable[[Tensor], int], axes: dict[Axis, int]) -> tuple[Hashable, ...]:
    if isinstance(node, Op):
        return ("op", node.op.name)
    if isinstance(node, Const):
        return ("const", repr(node.value))
    if isinstance(node, Var):
        return ("axis", axes.setdefault(node.axis, len(axes)))
    if isinstance(node, Load):
        return ("load", place(node.source))
    if isinstance(node, Symbol):
        return ("symbol", node.name, node.low, node.high)
    assert isinstance(node, State)
    return ("state", node.name)
