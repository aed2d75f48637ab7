"""What statements and expressions do besides giving a value: names that they bind, ways to leave them, changes."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

import torch

_ESCAPES = {ast.Return: "return", ast.Raise: "raise", ast.Yield: "yield", ast.YieldFrom: "yield", ast.Await: "await",
            ast.Delete: "del", ast.Global: "global", ast.Nonlocal: "nonlocal", ast.Break: "break",
            ast.Continue: "continue", ast.Import: "import", ast.ImportFrom: "import",
            ast.ClassDef: "class"}  # fmt: skip
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_OF_TENSORS = frozenset(dir(torch.Tensor)) - {"apply_", "pop", "sort"}
_PURE = {"int", "float", "bool", "len", "abs", "round", "min", "max", "sum", "any", "all", "range", "isinstance", "zip",
         "enumerate", "hasattr", "getattr", "torch", "math", "F"}  # fmt: skip


def may_change(value: ast.expr) -> bool:
    """Whether an expression may change something, whatever its names stand for: it calls more than Python's own
    functions, PyTorch's and methods by names that tensors have."""

    def is_pure(node: ast.Call) -> bool:
        function: ast.expr = node.func
        if isinstance(function, ast.Attribute) and not changes_nothing(node):
            return False
        is_method = isinstance(function, ast.Attribute)
        while isinstance(function, ast.Attribute | ast.Subscript):
            function = function.value
        if isinstance(function, ast.Name) and function.id in _PURE:
            return True
        is_own = isinstance(function, ast.Name) and function.id == "self"
        return is_method and not is_own and node.func.attr in _OF_TENSORS  # type: ignore[attr-defined]

    return any(isinstance(n, ast.Call) and not is_pure(n) for n in ast.walk(value))


def receivers(value: ast.expr) -> set[str]:
    """Names in what an expression calls methods of: where one stands for no tensor, that may change it."""
    called = [n.func.value for n in ast.walk(value) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    return {n.id for each in called for n in ast.walk(each) if isinstance(n, ast.Name)} - _PURE


def changes_nothing(node: ast.AST) -> bool:
    """Whether a call is of a method or function that changes nothing, by its name."""
    function = node.func if isinstance(node, ast.Call) else None
    return isinstance(function, ast.Attribute) and not function.attr.endswith("_")


def inner_functions(body: Sequence[ast.stmt]) -> dict[str, set[str]]:
    """Functions that statements define, by name, and the names that they use of those around."""
    found: dict[str, set[str]] = {}
    for node in (n for s in body for n in ast.walk(s)):
        if isinstance(node, ast.FunctionDef):
            used = {n.id for s in node.body for n in ast.walk(s) if isinstance(n, ast.Name)}
            shared = {name for n in ast.walk(node) if isinstance(n, ast.Nonlocal) for name in n.names}
            found[node.name] = found.get(node.name, set()) | (used - (locals_of(node) - shared))
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
            used = {n.id for n in ast.walk(node.value.body) if isinstance(n, ast.Name)}
            used -= {a.arg for a in node.value.args.args}
            for target in node.targets:
                if isinstance(target, ast.Name):
                    found[target.id] = found.get(target.id, set()) | used
    return found


def locals_of(definition: ast.FunctionDef) -> set[str]:
    arguments = definition.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    more = [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
    return {a.arg for a in (*named, *more)} | set(bound_names(definition.body))


def bound_names(statements: Iterable[ast.stmt]) -> list[str]:
    """Names that statements bind, in the order in which they do; not those of functions inside."""
    found: dict[str, None] = {}

    def look(node: ast.AST) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = None
            return
        if isinstance(node, ast.Lambda):
            return
        if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            for inner in ast.walk(node):  # its own names are of a scope of its own; a walrus binds outside
                if isinstance(inner, ast.NamedExpr):
                    found[inner.target.id] = None
            return
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found[node.id] = None
        if isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            found[node.name] = None
        if isinstance(node, ast.MatchMapping) and node.rest:
            found[node.rest] = None
        for child in ast.iter_child_nodes(node):
            look(child)

    for statement in statements:
        look(statement)
    return list(found)


def augmented_only(statements: Iterable[ast.stmt]) -> set[str]:
    """Names that are bound by `x += ...` alone: of a tensor that is a change in place, and binds nothing new."""
    augmented = {n.target.id for s in statements for n in ast.walk(s)
                 if isinstance(n, ast.AugAssign) and isinstance(n.target, ast.Name)}  # fmt: skip
    plain = [n for s in statements for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    targets = {id(n.target) for s in statements for n in ast.walk(s) if isinstance(n, ast.AugAssign)}
    return augmented - {n.id for n in plain if id(n) not in targets}


def escape(statements: Iterable[ast.stmt]) -> str | None:
    """A word that keeps statements from being a function of their own: they leave it, or change another scope."""

    def look(node: ast.AST, in_loop: bool) -> str | None:
        if isinstance(node, _SCOPES) and not isinstance(node, ast.ClassDef):
            return None
        if type(node) in _ESCAPES and not (in_loop and isinstance(node, ast.Break | ast.Continue)):
            return _ESCAPES[type(node)]
        is_store = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if is_store and not (isinstance(node.value, ast.Name) and node.value.id != "self"):  # type: ignore[attr-defined]
            return f"an assignment to .{node.attr}"  # type: ignore[attr-defined]
        inside = in_loop or isinstance(node, _LOOPS)
        return next((found for child in ast.iter_child_nodes(node) if (found := look(child, inside))), None)

    return next((found for s in statements if (found := look(s, False))), None)
