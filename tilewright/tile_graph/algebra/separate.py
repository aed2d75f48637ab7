"""Algebra of streamed reductions: when a term f(x, v) splits into a(x) ⊗ b(v), old sums can follow a changing v.

If ⊗ distributes over the reduction's ⊕ (products over sums, sums over maxima), a partial result under the old v
becomes one under the new v by ⊗ with b(new) / b(old). Nothing here knows softmax: exp(x - m) splits by the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.bounds import bounds
from tilewright.ir.forms.expr import Const, Expr, Load, Op, Var, cast, const, is_op, op, replace_nodes, select, walk

Split = tuple[Expr | None, Expr | None]  # (part without the variables, part of the variables alone); None is neutral


def mentions(node: Expr, variables: frozenset[Load]) -> bool:
    return any(n in variables for n in walk(node))


def _never(_: Expr) -> bool:
    return False


def split_product(node: Expr, variables: frozenset[Load], at_most_one: Callable[[Expr], bool] = _never) -> Split | None:
    """node = a · b with b free of everything but the variables; None where the rules find no such split. Of some
    values it is known that they never exceed 1, as long as the variables are those of all that was seen so far."""
    if not mentions(node, variables):
        return node, None
    if not _others(node, variables):
        return None, node
    if not isinstance(node, Op):
        return None
    name = node.op.name
    if name in ("mul", "div"):
        left, right = (split_product(a, variables, at_most_one) for a in node.args)
        if left is None or right is None:
            return None
        if left[1] is not None and right[1] is not None and left[1].dtype is not right[1].dtype:
            return None
        return _times(name, left[0], right[0], node), _times(name, left[1], right[1], node)
    if name == "exp":
        inner = split_sum(node.args[0], variables)
        return _each(inner, lambda part: op("exp", part))
    if name in ("neg", "cast"):
        inner = split_product(node.args[0], variables, at_most_one)
        if inner is None:
            return None
        rest = inner[1]
        if name == "cast" and rest is not None:
            # bfloat16 has float32's range, so that its rounding is relative: a factor may as well be applied after it;
            # what float16 rounds to nothing beside 1 stays nothing beside what replaces that 1
            widens = node.dtype.is_float and node.args[0].dtype.is_float and node.dtype.bits > node.args[0].dtype.bits
            fits = node.dtype is dtypes.bfloat16 or (node.dtype is dtypes.float16 and at_most_one(node.args[0]))
            if not widens and not fits:
                return None
            rest = cast(rest, node.dtype) if node.dtype.bits > rest.dtype.bits else rest
        return node.rebuild((inner[0] if inner[0] is not None else const(1, node.args[0].dtype),)), rest
    if name in ("abs", "sqrt", "rsqrt"):
        inner = split_product(node.args[0], variables)
        # the root of a product is the product of roots only where neither factor is negative
        return _each(inner, lambda part: op(name, part)) if name == "abs" or _not_negative(inner) else None
    if name == "pow" and isinstance(node.args[1], Const):
        inner = split_product(node.args[0], variables)
        whole = float(node.args[1].value).is_integer()
        return _each(inner, lambda part: op("pow", part, node.args[1])) if whole or _not_negative(inner) else None
    if name == "select" and not mentions(node.args[0], variables):
        return _split_select(node, variables, at_most_one)
    return None


def _split_select(node: Op, variables: frozenset[Load], at_most_one: Callable[[Expr], bool]) -> Split | None:
    condition, then, otherwise = node.args
    zero = isinstance(otherwise, Const) and otherwise.value == 0
    a = split_product(then, variables, at_most_one)
    b = (otherwise, None) if zero else split_product(otherwise, variables, at_most_one)
    if a is None or b is None:
        return None
    if not zero and a[1] is not b[1]:
        return None
    one = const(1, node.dtype)
    return select(condition, a[0] if a[0] is not None else one, b[0] if b[0] is not None else one), a[1]


def split_sum(node: Expr, variables: frozenset[Load]) -> Split | None:
    """node = a + b with b free of everything but the variables."""
    if not mentions(node, variables):
        return node, None
    if not _others(node, variables):
        return None, node
    if not isinstance(node, Op):
        return None
    name = node.op.name
    if name in ("add", "sub"):
        left, right = (split_sum(a, variables) for a in node.args)
        if left is None or right is None:
            return None
        return _plus(name, left[0], right[0]), _plus(name, left[1], right[1])
    if name == "neg":
        inner = split_sum(node.args[0], variables)
        return _each(inner, lambda part: op("neg", part))
    if name in ("mul", "div") and _is_fixed(node.args[1]):
        inner = split_sum(node.args[0], variables)
        return _each(inner, lambda part: op(name, part, node.args[1]))
    if name == "mul" and _is_fixed(node.args[0]):
        inner = split_sum(node.args[1], variables)
        return _each(inner, lambda part: op(name, node.args[0], part))
    return None


def change(operator: str, factor: Expr, old: Mapping[Expr, Expr], new: Mapping[Expr, Expr]) -> Expr:
    """b(new) / b(old) for a sum, b(new) - b(old) for a maximum or minimum, small arguments kept small."""
    if operator == "add":
        return simplify(_ratio(factor, old, new))
    return simplify(op("sub", replace_nodes(factor, new), replace_nodes(factor, old)))


def _ratio(factor: Expr, old: Mapping[Expr, Expr], new: Mapping[Expr, Expr]) -> Expr:
    if is_op(factor, "exp"):  # exp(p) / exp(q) would overflow where exp(p - q) does not
        inner = factor.args[0]
        return op("exp", op("sub", replace_nodes(inner, new), replace_nodes(inner, old)))
    if is_op(factor, "mul") or is_op(factor, "div"):
        assert isinstance(factor, Op)
        return op(factor.op.name, *(_ratio(a, old, new) for a in factor.args))
    if isinstance(factor, Const):
        return const(1, factor.dtype)
    return op("div", replace_nodes(factor, new), replace_nodes(factor, old))


def _each(split: Split | None, apply: Callable[[Expr], Expr]) -> Split | None:
    """A function that distributes over the split, applied to both parts."""
    if split is None:
        return None
    left, right = split
    return None if left is None else apply(left), None if right is None else apply(right)


def _others(node: Expr, variables: frozenset[Load]) -> bool:
    """Whether anything but the variables takes part: other data, or a position."""
    seen = set[Expr](variables)
    stack = [node]
    while stack:
        current = stack.pop()
        if current in seen:
            continue
        seen.add(current)
        if isinstance(current, Load | Var):
            return True
        stack.extend(current.args)
    return False


def _is_fixed(node: Expr) -> bool:
    """The same number at every element."""
    return not any(isinstance(n, Load | Var) for n in walk(node))


def _not_negative(split: Split | None) -> bool:
    return split is not None and all(part is None or bounds(part)[0] >= 0 for part in split)


def _times(name: str, left: Expr | None, right: Expr | None, node: Expr) -> Expr | None:
    if right is None:
        return left
    if left is None:
        return right if name == "mul" else op("div", const(1, right.dtype), right)
    return op(name, left, right)


def _plus(name: str, left: Expr | None, right: Expr | None) -> Expr | None:
    if right is None:
        return left
    if left is None:
        return right if name == "add" else op("neg", right)
    return op(name, left, right)
