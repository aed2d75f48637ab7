"""Puts a value in place of an axis and decides selects on the way: arms that are not taken are never looked at."""

from __future__ import annotations

from tilewright.ir.expr import Axis, Const, Expr, ExprLike, Var, as_expr, is_op, substitute
from tilewright.ir.simplify import simplify


def decide(root: Expr, axis: Axis, value: ExprLike) -> Expr:
    """simplify(substitute(root, {axis: value})), quick where selects choose by the axis."""
    done: dict[Expr, Expr] = {}
    chosen: dict[Expr, Expr | None] = {}
    stack = [root]
    while stack:
        node = stack[-1]
        if node in done:
            stack.pop()
        elif axis not in node.axes:
            done[node] = node
        elif isinstance(node, Var):
            done[node] = as_expr(value)
        else:
            if node not in chosen:
                chosen[node] = _taken(node, axis, value)
            taken = chosen[node]
            wanted = node.args if taken is None else (taken,)
            waiting = [a for a in wanted if a not in done]
            if waiting:
                stack.extend(waiting)
            elif taken is None:
                done[node] = node.rebuild(tuple(done[a] for a in node.args))
            else:
                done[node] = done[taken]
    return simplify(done[root])


def _taken(node: Expr, axis: Axis, value: ExprLike) -> Expr | None:
    """The arm of a select whose condition the value decides."""
    if not is_op(node, "select") or axis not in node.args[0].axes:
        return None
    condition = simplify(substitute(node.args[0], {axis: value}))
    return node.args[1 if condition.value else 2] if isinstance(condition, Const) else None
