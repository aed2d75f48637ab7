"""Puts a value in place of an axis and decides selects on the way: arms that are not taken are never looked at."""

from __future__ import annotations

from collections.abc import Iterable

from tilewright.ir.expr import Axis, Const, Expr, ExprLike, Var, as_expr, is_op, substitute
from tilewright.ir.simplify import simplify


def decide(roots: Iterable[Expr], axis: Axis, value: ExprLike) -> list[Expr]:
    """simplify(substitute(root, {axis: value})) of each root, quick where selects choose by the axis.

    What the roots have in common is looked at once.
    """
    done: dict[Expr, Expr] = {}
    wanted: dict[Expr, tuple[Expr, ...]] = {}
    roots = tuple(roots)
    stack = list(reversed(roots))
    while stack:
        node = stack[-1]
        if node in done:
            stack.pop()
        elif axis not in node.axes:
            done[node] = simplify(node)
        elif isinstance(node, Var):
            done[node] = simplify(as_expr(value))
        else:
            parts = wanted.get(node)
            if parts is None:
                taken = _taken(node, axis, value)
                parts = wanted[node] = node.args if taken is None else (taken,)
            waiting = [a for a in parts if a not in done]
            if waiting:
                stack.extend(waiting)
            elif parts is node.args:
                done[node] = simplify(node.rebuild(tuple([done[a] for a in parts])))
            else:
                done[node] = done[parts[0]]
    return [done[root] for root in roots]


def _taken(node: Expr, axis: Axis, value: ExprLike) -> Expr | None:
    """The arm of a select whose condition the value decides."""
    if not is_op(node, "select") or axis not in node.args[0].axes:
        return None
    condition = simplify(substitute(node.args[0], {axis: value}))
    return node.args[1 if condition.value else 2] if isinstance(condition, Const) else None
