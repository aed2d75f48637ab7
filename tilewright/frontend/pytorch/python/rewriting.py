"""The source of a function with its control written as calls: branches, loops and indices that tensors may decide.

Every `if`, `while` and `for` over a range becomes functions of the names that it binds, and a call that is given them.
What the call meets decides what it does: a plain value takes Python's way, a tensor becomes a branch or a loop of the
traced graph. Statements that cannot be functions (they return, break, ...) stay, and say so where a tensor decides.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Sequence
from types import CellType, CodeType, FunctionType
from typing import Any

from tilewright.errors import UnsupportedError
from tilewright.frontend.pytorch.python.bound_in_tests import bound_before
from tilewright.frontend.pytorch.python.effects import (
    augmented_only,
    bound_names,
    changes_nothing,
    escape,
    inner_functions,
    locals_of,
    may_change,
    receivers,
)
from tilewright.frontend.pytorch.python.exits import FINAL, RESULT, is_range, side_that_returns, without_exits

CALLS = "_tilewright_calls"  # what rewritten functions call by
_ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)


def rewritten_code(function: FunctionType, is_last: bool) -> CodeType:
    """The code of a function with its control as calls, of one behind which nothing is run if it `is_last`; an
    UnsupportedError where there is no source to read."""
    name = f"{function.__module__}.{function.__qualname__}"
    if hasattr(function, "__wrapped__"):
        raise UnsupportedError(f"{name} is wrapped by a decorator, so that its source cannot be rewritten")
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError) as error:
        raise UnsupportedError(f"{name} has no source to read its control from") from error
    definition = next((n for n in tree.body if isinstance(n, ast.FunctionDef)), None)
    if definition is None:
        raise UnsupportedError(f"{name} has no definition of its own in the source")
    ast.increment_lineno(tree, first - 1)
    definition.body = without_exits(bound_before(definition.body), FINAL if is_last else RESULT)
    changed = _Rewriter(inspect.getsourcefile(function) or "", locals_of(definition)).definition(definition)
    # inside a function that has the names of its closure, so that they are free in it too
    free = (CALLS, *function.__code__.co_freevars)
    module = ast.fix_missing_locations(ast.Module([_definition("made", free, [changed])], []))
    whole = compile(module, function.__code__.co_filename, "exec")
    around = next(c for c in whole.co_consts if isinstance(c, CodeType))
    return _named_forward(next(c for c in around.co_consts if isinstance(c, CodeType)))


def _named_forward(code: CodeType) -> CodeType:
    """Code whose lines PyTorch tells of: those of functions of this name."""
    inner = tuple(_named_forward(c) if isinstance(c, CodeType) else c for c in code.co_consts)
    return code.replace(co_name="forward", co_consts=inner)


def _asks(value: ast.expr) -> bool:
    """Whether an expression may change something, or what its names stand for decides that."""
    return may_change(value) or bool(receivers(value))


def _definition(name: str, arguments: Sequence[str], body: list[ast.stmt]) -> ast.FunctionDef:
    """By the parser, since versions of Python differ in what a definition has."""
    (made,) = ast.parse(f"def {name}({', '.join(arguments)}): pass").body
    assert isinstance(made, ast.FunctionDef)
    made.body = body
    return made


def with_code(function: FunctionType, code: CodeType, calls: Any) -> FunctionType:
    """The function with other code, which calls by `calls`: the same globals, closure and defaults."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    closure = tuple(CellType(calls) if n == CALLS else cells[n] for n in code.co_freevars)
    found = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    found.__kwdefaults__ = function.__kwdefaults__
    return found


def _unbinding(value: ast.expr) -> ast.expr:
    """An expression for a function of its own: it binds no names of this one."""
    if any(isinstance(n, ast.NamedExpr) for n in ast.walk(value)):
        raise UnsupportedError("a name is bound in an expression that is not always computed; bind it before")
    return value


# What is called to tell a person something, and what makes text of a value.
_TELLING = ("print", "debug", "info", "warning", "warning_once", "error", "exception", "critical", "log", "warn")
_TEXTS = ("str", "repr", "ascii", "format")


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


class _Rewriter(ast.NodeTransformer):
    def __init__(self, file: str, names: set[str]) -> None:
        self._file, self._names = file, names
        self._count = 0
        self._only_told = False  # what is written here goes to a person, or with an error
        self._inner: dict[str, set[str]] = {}  # functions inside, and the names that they use

    def definition(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.decorator_list, node.returns = [], None
        for each in ast.walk(node.args):
            if isinstance(each, ast.arg):
                each.annotation = None
        node.args.defaults = []
        node.args.kw_defaults = [None] * len(node.args.kwonlyargs)
        # which have defaults is said by the function that this becomes
        self._inner = inner_functions(node.body)
        node.body = self._block(node.body)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        """A function inside has names of its own, and those around it."""
        inner = _Rewriter(self._file, self._names | locals_of(node))
        inner._count = self._count + 1000  # names of what is made are not those around it
        binds_around = any(isinstance(n, ast.Nonlocal) for n in ast.walk(node))
        inner._inner = {**(self._inner if binds_around else {}), **inner_functions(node.body)}
        node.body = inner._block(without_exits(bound_before(node.body)))
        return node

    def _block(self, statements: Sequence[ast.stmt]) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        for statement in statements:
            made = self.visit(statement)
            found += made if isinstance(made, list) else [made]
        return found

    # what is called

    def _call(self, name: str, *args: ast.expr) -> ast.expr:
        return ast.Call(ast.Attribute(ast.Name(CALLS, ast.Load()), name, ast.Load()), list(args), [])

    def _where(self, node: ast.stmt | ast.expr) -> ast.expr:
        return ast.Constant(f"{self._file}:{node.lineno}")

    def _late(self, value: ast.expr) -> ast.expr:
        return ast.Lambda(ast.arguments([], [], None, [], [], None, []), _unbinding(value))

    def _held(self, names: Iterable[str]) -> ast.expr:
        values = [self._call("held", self._late(ast.Name(n, ast.Load())), ast.Constant(n)) for n in names]
        return ast.Tuple(values, ast.Load())

    def _function(self, kind: str, names: Sequence[str], body: list[ast.stmt], like: ast.stmt) -> ast.FunctionDef:
        self._count += 1
        return ast.copy_location(_definition(f"_{kind}_{self._count}", names, body), like)

    def _step(self, kind: str, names: Sequence[str], body: Sequence[ast.stmt], like: ast.stmt) -> ast.FunctionDef:
        """Statements as a function of the names that they bind, which gives these."""
        given = ast.Return(ast.Tuple([ast.Name(n, ast.Load()) for n in names], ast.Load()))
        return self._function(kind, names, [*self._block(body), given], like)

    def _bind(self, names: Sequence[str], value: ast.expr, like: ast.stmt) -> ast.stmt:
        target = ast.Tuple([ast.Name(n, ast.Store()) for n in names], ast.Store())
        made: ast.stmt = ast.Assign([target], value) if names else ast.Expr(value)
        return ast.fix_missing_locations(ast.copy_location(made, like))

    def _read(self, statements: Sequence[ast.AST]) -> list[str]:
        """Names of the function that statements use: what these hold must not change with a branch."""
        used = {n.id for s in statements for n in ast.walk(s) if isinstance(n, ast.Name)}
        return sorted(used & self._names)

    def _used_inside(self, statements: Sequence[ast.stmt]) -> str | None:
        """Why statements that become a function of their own would not be seen by one that they call."""
        called = {n.id for s in statements for n in ast.walk(s) if isinstance(n, ast.Name)} & self._inner.keys()
        used: set[str] = set()
        waiting = list(called)
        while waiting:
            new = self._inner[waiting.pop()] - used
            used |= new
            waiting += new & self._inner.keys()
        own = {n.name for s in statements for n in ast.walk(s) if isinstance(n, ast.FunctionDef)}
        found = sorted(used & set(bound_names(statements)) - own)
        return f"a name bound ('{found[0]}') that a function inside uses" if found else None

    def _names_of(self, names: Iterable[str]) -> ast.expr:
        return ast.Tuple([ast.Constant(n) for n in names], ast.Load())

    def _plain(self, test: ast.expr, why: str, like: ast.stmt) -> ast.expr:
        return self._call("plain", test, ast.Constant(why), self._where(like))

    # statements

    def visit_If(self, node: ast.If) -> Any:
        why = escape([*node.body, *node.orelse]) or self._used_inside([*node.body, *node.orelse])
        read = self._read([*node.body, *node.orelse])
        names = bound_names([*node.body, *node.orelse])
        test = self._test(node.test)
        if why is not None:
            node.test = self._plain(test, why, node)
            node.body, node.orelse = self._block(node.body), self._block(node.orelse)
            return node
        then = self._step("then", names, node.body, node)
        other = self._step("else", names, node.orelse, node)
        value = self._call("branch", test, ast.Name(then.name, ast.Load()), ast.Name(other.name, ast.Load()),
                           self._names_of(names), self._held(names), self._held(read), self._where(node),
                           ast.Constant(side_that_returns(node)))  # fmt: skip
        return [then, other, self._bind(names, value, node)]

    def visit_While(self, node: ast.While) -> Any:
        if node.orelse and not any(isinstance(n, ast.Break) for s in node.body for n in ast.walk(s)):
            last, node.orelse = node.orelse, []
            made = self.visit_While(node)
            return [*(made if isinstance(made, list) else [made]), *self._block(last)]
        why = escape(node.body) or self._used_inside(node.body) or ("else" if node.orelse else None)
        read = self._read([*node.body, node.test])
        names = bound_names(node.body)
        augmented = augmented_only(node.body)
        test = self._test(node.test)
        if why is not None:
            node.test = self._plain(test, why, node)
            node.body, node.orelse = self._block(node.body), self._block(node.orelse)
            return node
        goes_on = self._function("test", names, [ast.Return(_unbinding(test))], node)
        body = self._step("body", names, node.body, node)
        value = self._call("repeat", ast.Name(goes_on.name, ast.Load()), ast.Name(body.name, ast.Load()),
                           self._names_of(names), self._held(names), self._names_of(sorted(augmented)),
                           self._held(read), self._where(node))  # fmt: skip
        return [goes_on, body, self._bind(names, value, node)]

    def visit_For(self, node: ast.For) -> Any:
        is_step = isinstance(node.target, ast.Name) and not escape(node.body) and not self._used_inside(node.body)
        if not is_range(node) or not is_step or node.orelse:
            node.iter = self._call("several", self.visit(node.iter))
            node.body, node.orelse = self._block(node.body), self._block(node.orelse)
            left = getattr(node, "left", None)
            if left is not None:
                is_set = self._call("is_set", ast.Name(left, ast.Load()))
                ends = ast.If(is_set, [ast.Break()], [])
                node.body.insert(0, ast.fix_missing_locations(ast.copy_location(ends, node)))
            return node
        assert isinstance(node.target, ast.Name)
        read = self._read(node.body)
        names = list(dict.fromkeys([node.target.id, *bound_names(node.body)]))
        augmented = augmented_only(node.body) - {node.target.id}
        limits = ast.Tuple([self.visit(a) for a in node.iter.args], ast.Load())  # type: ignore[attr-defined]
        body = self._step("body", names, node.body, node)
        value = self._call("count", limits, ast.Name(body.name, ast.Load()), self._names_of(names), self._held(names),
                           self._names_of(sorted(augmented)), self._held(read), self._where(node))  # fmt: skip
        return [body, self._bind(names, value, node)]

    def visit_Assign(self, node: ast.Assign) -> Any:
        """`x[i] = y` by a call, as a part of a tuple too."""
        found: list[ast.stmt] = []
        # what is between brackets is computed when all targets before are bound
        is_ordered = any(isinstance(n, ast.Subscript) for t in node.targets for n in ast.walk(t)) and (
            len(node.targets) > 1 or not isinstance(node.targets[0], ast.Subscript)
        )

        def without(target: ast.expr) -> ast.expr:
            if isinstance(target, ast.Attribute):
                target = self.visit(target)
            if is_ordered and isinstance(target, ast.Name | ast.Attribute):
                self._count += 1
                name = f"_value_{self._count}"
                found.append(ast.Assign([target], ast.Name(name, ast.Load())))
                return ast.Name(name, ast.Store())
            if isinstance(target, ast.Starred):
                target.value = without(target.value)
            if isinstance(target, ast.Subscript):
                self._count += 1
                name = f"_value_{self._count}"
                put = self._call("put", self.visit(target.value), self._key(target.slice), ast.Name(name, ast.Load()),
                                 self._where(node))  # fmt: skip
                found.append(ast.Expr(put))
                return ast.Name(name, ast.Store())
            if isinstance(target, ast.Tuple | ast.List):
                target.elts = [without(each) for each in target.elts]
            return target

        before = self._same_key(node.targets[0], node) if len(node.targets) == 1 else []
        node.value = self.visit(node.value)
        node.targets = [without(target) for target in node.targets]
        return [*before, node, *(ast.fix_missing_locations(ast.copy_location(s, node)) for s in found)]

    def _same_key(self, target: ast.expr, node: ast.Assign | ast.AugAssign) -> list[ast.stmt]:
        """In `x[m > 0] = y[m > 0] * 2` the mask is one: computed before, where nothing in between can change it."""
        if not isinstance(target, ast.Subscript) or not isinstance(target.value, ast.Name):
            return []
        key = target.slice
        is_plain = all(not isinstance(n, ast.NamedExpr | ast.Call) or changes_nothing(n) for n in ast.walk(node.value))
        text = ast.dump(key)
        same = [n for n in ast.walk(node.value) if isinstance(n, ast.Subscript) and ast.dump(n.slice) == text]
        if not same or not is_plain or not isinstance(key, ast.Compare | ast.BinOp | ast.UnaryOp):
            return []
        self._count += 1
        name = f"_key_{self._count}"
        for each in (target, *same):
            each.slice = ast.Name(name, ast.Load())
        return [self._bind_one(name, self.visit(key), node)]

    def _bind_one(self, name: str, value: ast.expr, like: ast.stmt) -> ast.stmt:
        return ast.fix_missing_locations(ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], value), like))

    def visit_Return(self, node: ast.Return) -> Any:
        node.value = None if node.value is None else self.visit(node.value)
        if isinstance(node.value, ast.Name) and node.value.id in (RESULT, FINAL):
            node.value = ast.copy_location(self._call("given", node.value, self._where(node)), node.value)
        return node

    def visit_Compare(self, node: ast.Compare) -> Any:
        """`a < b < c` asks twice, and computes what is between once."""
        (op, *more), other = node.ops, node.comparators[0]
        pair = (node.left, other)
        if isinstance(op, ast.In | ast.NotIn | ast.Is | ast.IsNot) and not more and not any(map(_is_none, pair)):
            name = "contained" if isinstance(op, ast.In | ast.NotIn) else "same"
            found = self._call(name, *map(self.visit, pair))
            is_not = isinstance(op, ast.NotIn | ast.IsNot)
            return ast.copy_location(self._call("inverse", found) if is_not else found, node)
        if not more or not all(isinstance(op, _ORDERS) for op in node.ops):
            return self.generic_visit(node)
        kinds = ast.Tuple([ast.Constant(type(op).__name__) for op in node.ops], ast.Load())
        values = [self._late(self.visit(v)) for v in (node.left, *node.comparators)]
        return ast.copy_location(self._call("compared", kinds, *values), node)

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        before = self._same_key(node.target, node)
        value = self.visit(node.value)
        kind = ast.Constant(type(node.op).__name__)
        if isinstance(node.target, ast.Subscript):
            owner, key = self.visit(node.target.value), self._key(node.target.slice)
            changed = self._call("put_changed", owner, key, kind, value)
            return [*before, ast.fix_missing_locations(ast.copy_location(ast.Expr(changed), node))]
        if isinstance(node.target, ast.Name):  # of a tensor a change in place, of a number a new one
            made = self._call("changed", ast.Name(node.target.id, ast.Load()), kind, value)
            return [*before, self._bind_one(node.target.id, made, node)]
        assert isinstance(node.target, ast.Attribute)
        self._count += 1
        name = f"_owner_{self._count}"
        owner = self._bind_one(name, self.visit(node.target.value), node)
        old = ast.Attribute(ast.Name(name, ast.Load()), node.target.attr, ast.Load())
        node.target.value = ast.copy_location(ast.Name(name, ast.Load()), node)
        put = ast.Assign([self.visit(node.target)], self._call("changed", old, kind, value))
        return [owner, ast.fix_missing_locations(ast.copy_location(put, node))]

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        node.value = self.visit(node.value)
        if isinstance(node.ctx, ast.Store):
            node.value = self._call("owner", node.value, ast.Constant(node.attr), self._where(node))
        return node

    # expressions

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        """What is made of numbers that data tell is such a number."""
        pair = [self.visit(v) for v in (node.left, node.right)]
        return ast.copy_location(self._call("combined", ast.Constant(type(node.op).__name__), *pair), node)

    def _key(self, key: ast.expr) -> ast.expr:
        """What stands between brackets, as a value."""
        if isinstance(key, ast.Slice):
            parts = [ast.Constant(None) if p is None else self.visit(p) for p in (key.lower, key.upper, key.step)]
            return ast.Call(ast.Name("slice", ast.Load()), parts, [])
        if isinstance(key, ast.Tuple):
            return ast.Tuple([self._key(each) for each in key.elts], ast.Load())
        made: ast.expr = self.visit(key)
        return made

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        if not isinstance(node.ctx, ast.Load):
            return self.generic_visit(node)
        return ast.copy_location(self._call("get", self.visit(node.value), self._key(node.slice)), node)

    def _test(self, node: ast.expr) -> ast.expr:
        """An expression of which nothing but its truth is asked."""
        if isinstance(node, ast.BoolOp):
            name = "all_of" if isinstance(node.op, ast.And) else "any_of"
            return self._asked(name, [], node, self._test)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return ast.copy_location(self._call("inverse", self._test(node.operand)), node)
        made: ast.expr = self.visit(node)
        return made

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        return self._asked("last_of", [ast.Constant(isinstance(node.op, ast.And))], node, self.visit)

    def _asked(self, name: str, first: list[ast.expr], node: ast.BoolOp, visit: Callable[[ast.expr], Any]) -> ast.expr:
        """Values of which one is computed where those before it leave that open."""
        effects = {k: self._effect(k, value) for k, value in enumerate(node.values) if k and _asks(value)}
        read = self._held(self._read([node.values[k] for k in effects]))
        places = ast.Tuple(list(effects.values()), ast.Load())
        late = [self._late(visit(v)) for v in node.values]
        return ast.copy_location(self._call(name, *first, places, read, self._where(node), *late), node)

    def _effect(self, place: int, value: ast.expr) -> ast.expr:
        """The place of a value, where it may change something."""
        named = ast.Constant(place)
        return named if may_change(value) else self._call("if_changed", named, self._held(sorted(receivers(value))))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        if isinstance(node.op, ast.Not):
            return self._test(node)
        operand = self.visit(node.operand)
        if isinstance(operand, ast.Constant):
            return node
        return ast.copy_location(self._call("combined", ast.Constant(type(node.op).__name__), operand), node)

    def visit_FormattedValue(self, node: ast.FormattedValue) -> Any:
        made = self.generic_visit(node)
        if not self._only_told:
            node.value = ast.copy_location(self._call("written", node.value), node.value)
        return made

    def _looked_up(self, node: ast.expr) -> ast.expr:
        """An element of a set or a key of a dict, which are told apart by their values."""
        if isinstance(node, ast.Starred):
            node.value = self._call("keys", self.visit(node.value))
            return node
        return ast.copy_location(self._call("key", self.visit(node)), node)

    def visit_Set(self, node: ast.Set) -> Any:
        node.elts = [self._looked_up(each) for each in node.elts]
        return node

    def visit_Dict(self, node: ast.Dict) -> Any:
        node.keys = [key if key is None else self._looked_up(key) for key in node.keys]
        node.values = [self.visit(value) for value in node.values]
        return node

    def visit_SetComp(self, node: ast.SetComp) -> Any:
        self.generic_visit(node)
        node.elt = self._call("key", node.elt)
        return node

    def visit_DictComp(self, node: ast.DictComp) -> Any:
        self.generic_visit(node)
        node.key = self._call("key", node.key)
        return node

    def visit_Raise(self, node: ast.Raise) -> Any:
        return self._told(node)

    def _told(self, node: ast.AST) -> Any:
        """Numbers that data tell may be in its text: nothing is computed of that."""
        before, self._only_told = self._only_told, True
        made = self.generic_visit(node)
        self._only_told = before
        return made

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        sides = [node.body, node.orelse]
        read = self._held(self._read(sides) if any(map(_asks, sides)) else ())
        late = [self._late(self.visit(v)) for v in sides]
        return ast.copy_location(self._call("choose", self._test(node.test), *late, self._where(node), read), node)

    def visit_Assert(self, node: ast.Assert) -> Any:
        node.test = self._call("assumed", self._test(node.test))
        return node

    def visit_Match(self, node: ast.Match) -> Any:
        node.subject = self._call("matched", self.visit(node.subject), self._where(node))
        for each in node.cases:
            each.body = self._block(each.body)
        return node

    def visit_Try(self, node: ast.Try) -> Any:
        """A refusal goes through."""
        for name in ("body", "orelse", "finalbody"):
            setattr(node, name, self._block(getattr(node, name)))
        for each in node.handlers:
            each.body = self._block(each.body)
        if node.handlers:
            kinds = ast.Attribute(ast.Name(CALLS, ast.Load()), "refusals", ast.Load())
            through = ast.ExceptHandler(kinds, None, [ast.Expr(self._call("caught")), ast.Raise()])
            node.handlers.insert(0, ast.fix_missing_locations(ast.copy_location(through, node)))
        return node

    def visit_Call(self, node: ast.Call) -> Any:
        changed = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if changed.endswith("_") and not changed.endswith("__") and isinstance(node.func.value, ast.Subscript):  # type: ignore[attr-defined]
            part: ast.Subscript = node.func.value  # type: ignore[attr-defined]
            owner, key = self.visit(part.value), self._key(part.slice)
            args = [self.visit(a) for a in node.args]
            call = self._call("change", owner, key, ast.Constant(changed), *args)
            call.keywords = [self.visit(k) for k in node.keywords]  # type: ignore[attr-defined]
            return ast.copy_location(call, node)
        name = node.func.id if isinstance(node.func, ast.Name) else changed
        is_own = isinstance(node.func, ast.Name) and name in ("super", "locals", "globals", "vars")
        made = self._told(node) if name in _TELLING else self.generic_visit(node)
        if is_own or (self._only_told and name in _TEXTS):
            return made
        node.func = ast.copy_location(self._call("called", node.func), node.func)
        return node
