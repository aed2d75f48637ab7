"""Names that expressions bind on their way, bound by statements before: `while (n := f(x)) > 0` as a loop that asks
inside, and what is computed in some cases alone as a choice.

while (n := f(x)) > 0:          while True:
    x = x - n                       n = f(x)
                                    if not n > 0:
                                        break
                                    x = x - n

if a and (n := b) > 0:          asked = a
    x = x - n                   if asked:
                                    n = b
                                    asked = n > 0
                                if asked:
                                    x = x - n
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from itertools import count

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_OWN_SCOPES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_VALUES = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Return)  # statements whose value comes first


def bound_before(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Statements whose expressions bind no names, where these are bound by statements before."""
    return _Apart().block(body)


class _Apart:
    def __init__(self) -> None:
        self._numbers = count(1)

    def block(self, body: Sequence[ast.stmt]) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        for node in body:
            for part in () if isinstance(node, _SCOPES) else _blocks(node):
                part[:] = self.block(part)
            found += [ast.fix_missing_locations(each) for each in self._statement(node)]
        return found

    def _statement(self, node: ast.stmt) -> list[ast.stmt]:
        if isinstance(node, ast.If):
            return self._choice(node)
        if isinstance(node, ast.While) and node.orelse and _binds(node.test) and not _may_break(node):
            last, node.orelse = node.orelse, []
            return [*self._statement(node), *last]
        if isinstance(node, ast.While) and not node.orelse:
            before, test = self._apart(node.test)
            if before:
                ends = ast.If(ast.UnaryOp(ast.Not(), test), [ast.Break()], [])
                node.test = ast.copy_location(ast.Constant(True), node.test)
                node.body = [*before, ast.copy_location(ends, test), *node.body]
            return [node]
        if isinstance(node, _VALUES) and node.value is not None:
            before, node.value = self._apart(node.value)
            return [*before, node]
        if isinstance(node, ast.For):
            before, node.iter = self._apart(node.iter)
            return [*before, node]
        return [node]

    def _choice(self, node: ast.If) -> list[ast.stmt]:
        test = node.test
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) and not node.orelse and _binds(test):
            # what the second binds is used where the first is true alone
            inner = node.body
            for value in reversed(test.values):
                before, own = self._apart(value)
                inner = [*before, ast.copy_location(ast.If(own, inner, []), node)]
            return inner
        before, node.test = self._apart(test)
        return [*before, node]

    def _apart(self, value: ast.expr) -> tuple[list[ast.stmt], ast.expr]:
        """What binds the names that an expression binds, and the expression without."""
        if not _binds(value):
            return [], value
        match value:
            case ast.NamedExpr():
                before, inner = self._apart(value.value)
                bound = ast.copy_location(ast.Assign([value.target], inner), value)
                return [*before, bound], ast.copy_location(ast.Name(value.target.id, ast.Load()), value)
            case ast.BoolOp():
                return self._in_turn(value)
            case ast.IfExp():
                before, test = self._apart(value.test)
                name = self._name()
                sides = [self._bound(name, side) for side in (value.body, value.orelse)]
                return [*before, ast.copy_location(ast.If(test, *sides), value)], _read(name, value)
            case ast.Compare() if len(value.ops) > 1 and any(map(_binds, value.comparators[1:])):
                return self._in_turn(self._pairs(value))
        return self._in_order(value)

    def _in_turn(self, value: ast.BoolOp) -> tuple[list[ast.stmt], ast.expr]:
        """`a and b and c`: each where it is still open."""
        name = self._name()
        found: list[ast.stmt] = []
        for part in reversed(value.values):
            asked = _read(name, value) if isinstance(value.op, ast.And) else ast.UnaryOp(ast.Not(), _read(name, value))
            rest = [ast.copy_location(ast.If(ast.copy_location(asked, value), found, []), value)] if found else []
            found = [*self._bound(name, part), *rest]
        return found, _read(name, value)

    def _pairs(self, value: ast.Compare) -> ast.BoolOp:
        """`a < b < c` as `a < (t := b) and t < c`."""
        left: ast.expr = value.left
        parts: list[ast.expr] = []
        for k, (op, right) in enumerate(zip(value.ops, value.comparators, strict=True)):
            name = self._name()
            is_last = k == len(value.ops) - 1
            bound = right if is_last else ast.NamedExpr(ast.Name(name, ast.Store()), right)
            parts.append(ast.copy_location(ast.Compare(left, [op], [ast.copy_location(bound, right)]), value))
            left = _read(name, value)
        return ast.copy_location(ast.BoolOp(ast.And(), parts), value)

    def _in_order(self, value: ast.expr) -> tuple[list[ast.stmt], ast.expr]:
        """Parts that are all computed: those before one that binds a name are kept under names."""
        parts = list(_parts(value))
        last = max((k for k, (owner, name, place) in enumerate(parts) if _binds(_get(owner, name, place))), default=-1)
        before: list[ast.stmt] = []
        for owner, name, place in parts[: last + 1]:
            part = _get(owner, name, place)
            if isinstance(part, ast.Constant):
                continue
            more, part = self._apart(part)
            before += more
            if (owner, name, place) != parts[last] and not isinstance(part, ast.Attribute | ast.Slice):
                kept = self._name()
                before.append(_bind(kept, part))
                part = _read(kept, part)
            _set(owner, name, place, part)
        return before, value

    def _bound(self, name: str, value: ast.expr) -> list[ast.stmt]:
        before, own = self._apart(value)
        return [*before, _bind(name, own)]

    def _name(self) -> str:
        return f"_asked_{next(self._numbers)}"


def _blocks(node: ast.stmt) -> list[list[ast.stmt]]:
    own = [getattr(node, name, None) for name in ("body", "orelse", "finalbody")]
    inner = [each.body for name in ("handlers", "cases") for each in getattr(node, name, ())]
    return [each for each in (*own, *inner) if each]


def _binds(value: ast.AST) -> bool:
    """Whether an expression binds names of the function that it stands in."""
    if isinstance(value, _OWN_SCOPES):
        return False  # a comprehension's walrus stays in it, where Python binds it outside
    return isinstance(value, ast.NamedExpr) or any(map(_binds, ast.iter_child_nodes(value)))


def _may_break(node: ast.While) -> bool:
    return any(isinstance(n, ast.Break) for s in node.body for n in ast.walk(s))


def _parts(value: ast.AST) -> Iterator[tuple[ast.AST, str, int | None]]:
    """The places of the expressions right inside one, in the order in which they are computed."""
    for name, field in ast.iter_fields(value):
        for place, part in enumerate(field) if isinstance(field, list) else ((None, field),):
            if isinstance(part, ast.keyword | ast.Starred | ast.FormattedValue):
                yield from _parts(part)
            elif isinstance(part, ast.expr):
                yield value, name, place


def _get(owner: ast.AST, name: str, place: int | None) -> ast.expr:
    found = getattr(owner, name)
    part: ast.expr = found if place is None else found[place]
    return part


def _set(owner: ast.AST, name: str, place: int | None, part: ast.expr) -> None:
    if place is None:
        setattr(owner, name, part)
    else:
        getattr(owner, name)[place] = part


def _bind(name: str, value: ast.expr) -> ast.stmt:
    return ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], value), value)


def _read(name: str, like: ast.AST) -> ast.expr:
    return ast.copy_location(ast.Name(name, ast.Load()), like)
