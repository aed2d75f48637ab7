"""Puts a value in place of an axis and decides selects on the way: arms that are not taken are never looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms.expr import Axis, Const, Expr, ExprLike, Var, as_expr, is_op


def decide(roots: Sequence[Expr], axis: Axis, value: ExprLike) -> list[Expr]:
    """simplify(substitute(root, {axis: value})) of each root, quick where selects choose by the axis.

    What the roots have in common is looked at once.
    """
    done: dict[Expr, Expr] = {}
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
            wanted = _wanted(node, done)
            waiting = [a for a in wanted if a not in done]
            if waiting:
                stack.extend(waiting)
            elif wanted is node.args:
                done[node] = simplify(node.rebuild(tuple([done[a] for a in wanted])))
            else:
                done[node] = done[wanted[0]]
    return [done[root] for root in roots]


def _wanted(node: Expr, done: Mapping[Expr, Expr]) -> tuple[Expr, ...]:
    """What a node's value depends on: its operands, but of a select first the condition, then the arm it takes."""
    if not is_op(node, "select"):
        return node.args
    condition = done.get(node.args[0])
    if condition is None:
        return node.args[:1]
    if not isinstance(condition, Const):
        return node.args
    return (node.args[1] if condition.value else node.args[2],)
