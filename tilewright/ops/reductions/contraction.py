"""Matrix products: MatMul, Gemm and Einsum as plain sums of products, read by index and never copied."""

from __future__ import annotations

import numpy as np

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.expr import Expr, cast, load
from tilewright.ir.forms.graph import Node
from tilewright.ir.forms.tensor import Tensor
from tilewright.ops.builder import Builder, Shape, dims
from tilewright.ops.registry import operator


def product(left: Expr, right: Expr) -> Expr:
    """One term of a contraction in the type it is summed in."""
    wide = dtypes.accumulator(left.dtype)
    return cast(left, wide) * cast(right, wide)


def same_type(b: Builder, *tensors: Tensor) -> None:
    if len({t.dtype for t in tensors}) > 1:
        raise b.invalid(f"its inputs differ in type: {', '.join(t.dtype.name for t in tensors)}")


@operator("MatMul")
def matmul(b: Builder, node: Node, x: Tensor, y: Tensor) -> Tensor:
    same_type(b, x, y)
    return b.cast("", matrix_product(b, "" if _narrowest(x) else "sum", x, y), x.dtype)


def _narrowest(x: Tensor) -> bool:
    """Whether sums are kept in the tensor's own type, so that no cast follows."""
    return dtypes.accumulator(x.dtype) is x.dtype


def matrix_product(b: Builder, hint: str, x: Tensor, y: Tensor) -> Tensor:
    """NumPy's matmul, in the accumulator type."""
    if x.rank == 0 or y.rank == 0:
        raise b.invalid("a matrix product of a scalar")
    depth = dims(x)[-1]
    if dims(y)[-2 if y.rank > 1 else 0] != depth:
        raise b.invalid(f"shapes {list(dims(x))} and {list(dims(y))} do not multiply")
    rows, columns = x.rank > 1, y.rank > 1
    try:
        batch = np.broadcast_shapes(dims(x)[:-2], dims(y)[:-2])
    except ValueError:
        raise b.invalid(f"shapes {list(dims(x))} and {list(dims(y))} do not multiply") from None
    shape = (*batch, *((dims(x)[-2],) if rows else ()), *((dims(y)[-1],) if columns else ()))

    def element(i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Expr:
        outer = i[: len(batch)]
        left = (*_aligned(x, outer, batch), *((i[len(batch)],) if rows else ()), r[0])
        right = (*_aligned(y, outer, batch), r[0], *((i[-1],) if columns else ()))
        return product(load(x, left), load(y, right))

    return b.reduce(hint, shape, (depth,), element, "add")


def _aligned(x: Tensor, outer: tuple[Expr, ...], batch: Shape) -> tuple[Expr | int, ...]:
    """Batch indices of one operand: 0 where it alone has extent 1."""
    own = dims(x)[:-2]
    skipped = len(batch) - len(own)
    return tuple(i if n == m else 0 for n, m, i in zip(own, batch[skipped:], outer[skipped:], strict=True))


@operator("Gemm")
def gemm(b: Builder, node: Node, x: Tensor, y: Tensor, bias: Tensor | None = None) -> Tensor:
    same_type(b, x, y)
    if x.rank != 2 or y.rank != 2:
        raise b.invalid(f"needs matrices, not shapes {list(dims(x))} and {list(dims(y))}")
    flip_x, flip_y = bool(node.attributes.get("transA", 0)), bool(node.attributes.get("transB", 0))
    alpha, beta = float(node.attributes.get("alpha", 1.0)), float(node.attributes.get("beta", 1.0))
    rows, depth = dims(x)[::-1] if flip_x else dims(x)
    other, columns = dims(y)[::-1] if flip_y else dims(y)
    if depth != other:
        raise b.invalid(f"shapes {list(dims(x))} and {list(dims(y))} do not multiply")

    def element(i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Expr:
        left = load(x, (r[0], i[0]) if flip_x else (i[0], r[0]))
        right = load(y, (i[1], r[0]) if flip_y else (r[0], i[1]))
        return product(left, right)

    plain = (bias is None or beta == 0) and alpha == 1
    total = b.reduce("" if plain and _narrowest(x) else "sum", (rows, columns), (depth,), element, "add")
    if plain:
        return b.cast("", total, x.dtype)

    def finish(*i: Expr) -> Expr:
        value = b.read(total, i)
        value = value if alpha == 1 else value * _number(alpha, value)
        if bias is not None and beta != 0:
            shift = b.wide(bias, i)
            value = value + (shift if beta == 1 else shift * _number(beta, shift))
        return cast(value, x.dtype)

    return b.map("", (rows, columns), finish)


def _number(factor: float, like: Expr) -> float | int:
    return factor if like.dtype.is_float else int(factor)


@operator("MatMulInteger", since=10)
def matmul_integer(
    b: Builder, node: Node, x: Tensor, y: Tensor, x_zero: Tensor | None = None, y_zero: Tensor | None = None
) -> Tensor:
    left = widened(b, "left", x, x_zero, row=True)
    right = widened(b, "right", y, y_zero, row=False)
    return matrix_product(b, "", left, right)


def widened(b: Builder, hint: str, x: Tensor, zero: Tensor | None, row: bool) -> Tensor:
    """8-bit integers as int32, less their zero point (a scalar, or one a row or column)."""

    def element(*i: Expr) -> Expr:
        value = cast(b.read(x, i), dtypes.int32)
        if zero is None:
            return value
        at = (i[-2] if row else i[-1],) if zero.rank == 1 and x.rank > 1 else i
        return value - cast(b.read(zero, at), dtypes.int32)

    return b.widened_map(x, hint, element)


@operator("Einsum", since=12)
def einsum(b: Builder, node: Node, *tensors: Tensor) -> Tensor:
    same_type(b, *tensors)
    terms, result = _equation(b, node, tensors)
    if len(set(result)) < len(result) or not set(result) <= set("".join(terms)):
        raise b.invalid(f"the result '{result}' of its equation has to name labels of its operands, each once")
    extents: dict[str, int] = {}
    for term, tensor in zip(terms, tensors, strict=True):
        for label, n in zip(term, dims(tensor), strict=True):
            if extents.setdefault(label, n) == 1:
                extents[label] = n
            if n not in (1, extents[label]):
                raise b.invalid(f"label '{label}' has extents {extents[label]} and {n}")
    dtype = tensors[0].dtype
    # pairwise from the left: each step sums what no later operand and no output needs
    current, labels = tensors[0], terms[0]
    for place in range(1, max(len(tensors), 2)):
        later = set(result).union(*terms[place + 1 :])
        operands = [(current, labels)]
        if place < len(tensors):
            operands.append((tensors[place], terms[place]))
        last = place >= len(tensors) - 1
        found = list(dict.fromkeys(label for _, term in operands for label in term))
        labels = result if last else "".join(label for label in found if label in later)
        summed = [label for label in found if label not in labels]
        final = last and (_narrowest(tensors[0]) or not summed)
        current = _contract(b, "" if final else f"sum{place}", operands, labels, summed, extents)
    return b.cast("", current, dtype)


def _contract(
    b: Builder, hint: str, operands: list[tuple[Tensor, str]], labels: str, summed: list[str], extents: dict[str, int]
) -> Tensor:
    def element(i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Expr:
        at = dict(zip([*labels, *summed], [*i, *r], strict=True))
        values = [
            load(t, [0 if n == 1 else at[label] for label, n in zip(term, dims(t), strict=True)])
            for t, term in operands
        ]
        if len(values) == 1:
            return cast(values[0], dtypes.accumulator(values[0].dtype)) if summed else values[0]
        wide = dtypes.accumulator(values[0].dtype)
        return cast(values[0], wide) * cast(values[1], wide)

    shape: Shape = tuple(extents[label] for label in labels)
    if not summed:
        return b.map(hint, shape, lambda *i: cast(element(i, ()), operands[0][0].dtype))
    return b.reduce(hint, shape, [extents[label] for label in summed], element, "add")


def _equation(b: Builder, node: Node, tensors: tuple[Tensor, ...]) -> tuple[list[str], str]:
    """Labels of every operand and of the result; axes under an ellipsis get labels of their own."""
    text = str(node.attributes["equation"]).replace(" ", "")
    left, arrow, right = text.partition("->")
    terms = left.split(",")
    if len(terms) != len(tensors):
        raise b.invalid(f"equation '{text}' does not have {len(tensors)} operands")
    hidden = max(
        (t.rank - len(term.replace("...", "")) for term, t in zip(terms, tensors, strict=True) if "..." in term),
        default=0,
    )
    dots = "".join(chr(0x2460 + k) for k in range(hidden))  # characters no equation uses
    full = []
    for term, tensor in zip(terms, tensors, strict=True):
        count = tensor.rank - len(term.replace("...", ""))
        spelled = term.replace("...", dots[hidden - count :] if count else "")
        if len(spelled) != tensor.rank:
            raise b.invalid(f"term '{term}' of equation '{text}' does not fit shape {list(dims(tensor))}")
        full.append(spelled)
    if arrow:
        return full, right.replace("...", dots)
    letters = "".join(terms).replace(".", "")
    return full, dots + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
