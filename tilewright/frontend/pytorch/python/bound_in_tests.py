"""Names that a test binds on its way, bound before it: `while (n := f(x)) > 0` as a loop that asks inside.

while (n := f(x)) > 0:          while True:
    x = x - n                       n = f(x)
                                    if not n > 0:
                                        break
                                    x = x - n
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def bound_before(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Statements whose tests bind no names, where what they bind is computed first of all in them."""
    found: list[ast.stmt] = []
    for node in body:
        for name in ("body", "orelse", "finalbody"):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and getattr(
                node, name, None
            ):
                setattr(node, name, bound_before(getattr(node, name)))
        if isinstance(node, ast.If):
            before, node.test = _apart(node.test)
            found += before
        elif isinstance(node, ast.While) and not node.orelse:
            before, test = _apart(node.test)
            if before:
                ends = ast.If(ast.UnaryOp(ast.Not(), test), [ast.Break()], [])
                node.test = ast.copy_location(ast.Constant(True), node.test)
                node.body = [*before, ast.copy_location(ends, test), *node.body]
        found.append(ast.fix_missing_locations(node))
    return found


def _apart(value: ast.expr) -> tuple[list[ast.stmt], ast.expr]:
    """What an expression binds before it computes anything else, and the expression with the names in its place."""
    if isinstance(value, ast.NamedExpr):
        before, inner = _apart(value.value)
        bound = ast.copy_location(ast.Assign([value.target], inner), value)
        return [*before, bound], ast.copy_location(ast.Name(value.target.id, ast.Load()), value)
    for owner, name, place in _computed_first(value):
        part = getattr(owner, name) if place is None else getattr(owner, name)[place]
        before, inner = _apart(part)
        if before:
            if place is None:
                setattr(owner, name, inner)
            else:
                getattr(owner, name)[place] = inner
            return before, value
        if not isinstance(part, ast.Name | ast.Constant):
            break  # it is computed before what comes behind it
    return [], value


def _computed_first(value: ast.expr) -> list[tuple[ast.AST, str, int | None]]:
    """The parts of an expression that are computed whatever they are, in order."""
    match value:
        case ast.Compare():
            return [(value, "left", None), (value, "comparators", 0)]
        case ast.BoolOp():
            return [(value, "values", 0)]
        case ast.UnaryOp():
            return [(value, "operand", None)]
        case ast.BinOp():
            return [(value, "left", None), (value, "right", None)]
        case ast.Attribute() | ast.Subscript():
            return [(value, "value", None)]
        case ast.Call():
            return [(value, "func", None), *((value, "args", k) for k in range(len(value.args)))]
    return []
