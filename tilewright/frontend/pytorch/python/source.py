"""What the source of a module has in it, before it is followed."""

from __future__ import annotations

import ast
import inspect
import textwrap
from types import FunctionType

from tilewright.frontend.pytorch.python.exits import is_range

_NUMBERS = ("int", "float", "bool")


def loops_over_elements(kind: type | FunctionType) -> bool:
    """Whether the source of a class or a function, or of a function beside it that it names, has a loop over a range
    that takes or writes elements of local names by it: over parts of tensors, such as steps in time, not over layers
    that it has."""
    return any(isinstance(n, ast.For) and is_range(n) and _takes_elements(n) for n in _source(kind))


def catches_errors(kind: type | FunctionType) -> bool:
    """Whether there is an `except` in it."""
    return any(isinstance(n, ast.ExceptHandler) for n in _source(kind))


def asks_for_kinds(kind: type | FunctionType) -> bool:
    """Whether numbers are taken out of tensors in it, and something is asked that is one thing for a number and another
    for what stands for one while it is followed."""
    source = _source(kind)
    called = [(n.func, n) for n in source if isinstance(n, ast.Call)]
    named = [(f.id, n) for f, n in called if isinstance(f, ast.Name)]
    takes = any(isinstance(f, ast.Attribute) and f.attr in ("item", "tolist") for f, _ in called)
    if not takes and not any(name in _NUMBERS and n.args for name, n in named):
        return False
    kinds = [n for name, call in named if name == "isinstance" for a in call.args[1:] for n in ast.walk(a)]
    is_asked = any(isinstance(n, ast.Name) and n.id in _NUMBERS for n in kinds) or any(n == "type" for n, _ in named)
    return is_asked or any(isinstance(n, ast.Match) or _is_truth(n) for n in source)


def _is_truth(node: ast.AST) -> bool:
    """`x is True` and the like."""
    if not isinstance(node, ast.Compare) or not any(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
        return False
    return any(isinstance(v, ast.Constant) and isinstance(v.value, bool) for v in (node.left, *node.comparators))


def _source(kind: type | FunctionType) -> list[ast.AST]:
    """All in the source of a class or a function, and of the functions beside it that it names."""
    try:
        own = ast.parse(textwrap.dedent(inspect.getsource(kind)))
        file = ast.parse(inspect.getsource(inspect.getmodule(kind)))  # type: ignore[arg-type]
    except (OSError, TypeError, SyntaxError):
        return []
    named = {n.id for n in ast.walk(own) if isinstance(n, ast.Name)}
    called = [n for n in file.body if isinstance(n, ast.FunctionDef) and n.name in named]
    return [n for tree in (own, *called) for n in ast.walk(tree)]


def _takes_elements(node: ast.For) -> bool:
    counter = node.target.id if isinstance(node.target, ast.Name) else None
    inner = [n for s in node.body for n in ast.walk(s) if isinstance(n, ast.Subscript)]
    slices = [n.slice for n in inner if isinstance(n.value, ast.Name)]
    return any(isinstance(n, ast.Name) and n.id == counter for each in slices for n in ast.walk(each))
