"""Where the elements of a buffer are: flat offsets as sums of terms, strides between lanes, names of registers."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.errors import InternalError
from tilewright.ir.analysis.simplify import Linear, join_divisions, linear, simplify
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.expr import Axis, Const, Expr, Load, Var, const, is_op, loads
from tilewright.ir.forms.loops import Buffer, For, ForKind, Kernel, Memory, Store, statements, stmt_exprs


def flat(buffer: Buffer, indices: tuple[Expr, ...]) -> Linear:
    """Where an element is, counted from the start of the buffer."""
    if not all(isinstance(e, int) for e in buffer.shape):
        offset: Expr = const(0)
        for index, extent in zip(indices, buffer.shape, strict=True):
            offset = offset * extent + index
        return join_divisions(linear(simplify(offset)))
    # one dictionary for all of it: there is an offset for every read that is written out
    terms: dict[Expr, int] = {}
    constant = 0
    for index, pitch in zip(indices, _pitches(buffer.shape), strict=True):  # type: ignore[arg-type]
        total = linear(index)
        constant += total.constant * pitch
        for term, coefficient in total.terms.items():
            if isinstance(term, Var):  # the common case
                terms[term] = terms.get(term, 0) + coefficient * pitch
                continue
            part = linear(simplify(term))
            constant += part.constant * coefficient * pitch
            for inner, times in part.terms.items():
                terms[inner] = terms.get(inner, 0) + times * coefficient * pitch
    return join_divisions(Linear({t: c for t, c in terms.items() if c}, constant))


def _pitches(shape: Sequence[int]) -> list[int]:
    """Elements between neighbours along each axis."""
    pitches = [1]
    for extent in reversed(shape[1:]):
        pitches.append(pitches[-1] * extent)
    return pitches[: len(shape)][::-1]


def lane_buffers(kernel: Kernel) -> dict[Buffer, int]:
    """Register buffers whose last axis is the lanes of a vector."""
    lanes: dict[Buffer, int] = {}
    body = list(statements(kernel.body))
    vector_axes = {s.axis for s in body if isinstance(s, For) and s.kind is ForKind.VECTOR}
    for stmt in body:
        accesses = [(n.source, n.indices) for n in loads(*stmt_exprs(stmt))]
        if isinstance(stmt, Store):
            accesses.append((stmt.buffer, stmt.indices))
        for buffer, indices in accesses:
            last = indices[-1] if indices and buffer.memory is Memory.REGISTER else None
            if isinstance(last, Var) and last.axis in vector_axes:
                own = whole_vector(int(last.axis.extent))  # type: ignore[arg-type]
                lanes[buffer] = max(own, lanes.get(buffer, 1))  # a shorter vector reads a part of it
    return lanes


def whole_vector(lanes: int) -> int:
    """The power of two that holds so many lanes."""
    return 1 << (lanes - 1).bit_length()


def lane_stride(offset: Linear, lane: Axis) -> int | None:
    """Elements between neighbouring lanes; None when it is not one number."""
    stride = 0
    for term, coefficient in offset.terms.items():
        if isinstance(term, Var) and term.axis is lane:
            stride = coefficient
        elif lane in term.axes:
            return None
    return stride


def constants(indices: tuple[Expr, ...]) -> tuple[int, ...]:
    result = []
    for index in indices:
        known = index if isinstance(index, Const) else simplify(index)
        if not isinstance(known, Const):
            raise InternalError(f"register index {index} is not a constant")
        result.append(int(known.value))
    return tuple(result)


def element_name(buffer: Buffer, position: tuple[int, ...]) -> str:
    return "_".join([buffer.name, *map(str, position)])


def compares_places(condition: Expr) -> bool:
    """Whether a condition is about indices, not about what is read at them or numbers made of them."""
    seen: set[Expr] = set()
    stack = [condition]
    while stack:
        node = stack.pop()
        if node.dtype is dtypes.index:
            return True
        if node in seen or isinstance(node, Load) or is_op(node, "cast"):
            continue
        seen.add(node)
        stack.extend(node.args)
    return False
