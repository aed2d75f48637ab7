"""Early exits of a function, `break`, `continue` and `return`, as flags and choices: what they would pass over is run
where no flag is set."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Sequence

RESULT, RETURNED = "_tilewright_result", "_tilewright_returned"
FINAL = "_tilewright_final"  # the result of a function behind which nothing is changed any more
STEP, LEFT, PASSED = "_step_", "_left_", "_passed_"  # the element of a loop, and exits from it, with the loop's number
_OF_THE_FUNCTION = ("super", "__class__", "locals", "vars")  # mean the function that they stand in
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def without_exits(body: list[ast.stmt], result: str = RESULT) -> list[ast.stmt]:
    """The statements of a function with its exits as flags; where that cannot be, as they are."""
    of_it = [n for s in body for n in _inside(s)]
    if any(isinstance(n, ast.Name) and n.id in _OF_THE_FUNCTION for n in of_it):
        return body  # what is moved into a choice is moved into a function of its own
    has_early = any(isinstance(n, ast.Return) and n is not body[-1] for n in of_it)
    if not has_early and not any(isinstance(n, ast.Break | ast.Continue) for n in of_it):
        return body
    if any(isinstance(n, ast.Yield | ast.YieldFrom | ast.Await) for n in of_it):
        return body
    made = copy.deepcopy(body)
    if has_early and not _always(made):
        made.append(_at(ast.Return(None), made[-1]))
    try:
        found, _ = _Exits(has_early, result).block(made, ())
    except _CannotError:
        return body
    if has_early:
        used = {n.id for s in found for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        found = [_bind(RETURNED, False, body[0]), *found] if RETURNED in used else _unset(found, RETURNED)
        found.append(_at(ast.Return(ast.Name(result, ast.Load())), body[-1]))
    return found


def is_range(node: ast.For) -> bool:
    """Whether a loop is over a range."""
    called = isinstance(node.iter, ast.Call) and isinstance(node.iter.func, ast.Name)
    return called and node.iter.func.id == "range" and not node.iter.keywords  # type: ignore[attr-defined]


def side_that_returns(node: ast.If) -> int | None:
    """Of a choice the side behind which nothing of the function is run, so that what it binds is never read."""
    found: int | None = getattr(node, "side_that_returns", None)
    return found


class _CannotError(Exception):
    """An exit from where it cannot be a flag."""


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all inside it that is of the same function."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _SCOPES):
            yield from _inside(child)


def _at(node: ast.stmt, like: ast.AST) -> ast.stmt:
    return ast.fix_missing_locations(ast.copy_location(node, like))


def _bind(name: str, value: ast.expr | bool, like: ast.AST) -> ast.stmt:
    made = ast.Constant(value) if isinstance(value, bool) else value
    return _at(ast.Assign([ast.Name(name, ast.Store())], made), like)


def _not(name: str) -> ast.expr:
    return ast.UnaryOp(ast.Not(), ast.Name(name, ast.Load()))


def _always(statements: Sequence[ast.stmt], kinds: tuple[type[ast.stmt], ...] = (ast.Return,)) -> bool:
    """Whether a block is left on every way through it."""
    return any(
        isinstance(s, kinds) or (isinstance(s, ast.If) and _always(s.body, kinds) and _always(s.orelse, kinds))
        for s in statements
    )


def _unset(statements: Sequence[ast.stmt], flag: str) -> list[ast.stmt]:
    """The statements without a flag that nobody asks for."""

    class Without(ast.NodeTransformer):
        def visit_Assign(self, node: ast.Assign) -> ast.stmt | None:
            (target,) = node.targets[:1]
            is_flag = isinstance(target, ast.Name) and target.id == flag
            return None if is_flag else node

    found = [made for s in statements if (made := Without().visit(s)) is not None]
    for node in (n for s in found for n in ast.walk(s)):
        if isinstance(node, ast.If | ast.For | ast.While | ast.With) and not node.body:
            node.body = [_at(ast.Pass(), node)]
    return found


class _Exits:
    """Blocks of one function; loops are numbered."""

    def __init__(self, has_early: bool, result: str) -> None:
        self._has_early, self._result = has_early, result
        self._count = 0

    def block(self, statements: Sequence[ast.stmt], loops: tuple[int, ...]) -> tuple[list[ast.stmt], dict[str, None]]:
        """A block inside these loops, and the flags that it may set: whichever of them is, what is behind it in the
        blocks around is passed over."""
        found: list[ast.stmt] = []
        for k, node in enumerate(statements):
            rest = statements[k + 1 :]
            match node:
                case ast.Return() if self._has_early:
                    value = node.value or ast.Constant(None)
                    ends = [_bind(f"{LEFT}{n}", True, node) for n in loops]
                    return [*found, _bind(self._result, value, node), *ends, _bind(RETURNED, True, node)], {
                        RETURNED: None
                    }
                case ast.Break() | ast.Continue():
                    name = f"{LEFT if isinstance(node, ast.Break) else PASSED}{loops[-1]}"
                    return [*found, _bind(name, True, node)], {name: None}
                case ast.If():
                    made, flags = self._choice(node, rest, loops)
                    if made is not None:
                        return [*found, *made], flags
                    found.append(node)
                case ast.For() | ast.While():
                    made, flags = self._loop(node, loops)
                    found += made
                case ast.With():
                    node.body, flags = self.block(node.body, loops)
                    found.append(node)
                case _:
                    self._check_plain(node)
                    found.append(node)
                    flags = {}
            if flags:
                behind, more = self.block(rest, loops)
                return [*found, *self._guarded(behind, flags, node)], flags | more
        return found, {}

    def _check_plain(self, node: ast.stmt) -> None:
        if isinstance(node, (*_SCOPES, ast.Return)):
            return
        for n in _inside(node):
            if isinstance(n, ast.Return | ast.Break | ast.Continue):
                raise _CannotError

    def _choice(
        self, node: ast.If, rest: Sequence[ast.stmt], loops: tuple[int, ...]
    ) -> tuple[list[ast.stmt] | None, dict[str, None]]:
        """Where one side is always left, what is behind is on the other side."""
        kinds = (ast.Return, ast.Break, ast.Continue)
        sides = [_always(side, kinds) for side in (node.body, node.orelse)]
        if sides == [True, False]:
            node.orelse = [*node.orelse, *rest]
        elif sides == [False, True]:
            node.body = [*node.body, *rest]
        returns = [_always(side) for side in (node.body, node.orelse)]
        node.body, first = self.block(node.body, loops)
        node.orelse, second = self.block(node.orelse, loops)
        node.body = node.body or [_at(ast.Pass(), node)]
        if returns.count(True) == 1:
            node.side_that_returns = returns.index(True)  # type: ignore[attr-defined]
        return ([node] if any(sides) else None), first | second

    def _guarded(self, rest: list[ast.stmt], flags: dict[str, None], like: ast.AST) -> list[ast.stmt]:
        """What is run where none of these flags is set."""
        if not rest:
            return []
        if RETURNED in flags:
            made = ast.If(_not(RETURNED), rest, [])
            made.side_that_returns = 1  # type: ignore[attr-defined]
            rest = [_at(made, like)]
        for name in flags:
            if name != RETURNED:
                rest = [_at(ast.If(_not(name), rest, []), like)]
        return rest

    def _loop(self, node: ast.For | ast.While, loops: tuple[int, ...]) -> tuple[list[ast.stmt], dict[str, None]]:
        own = [n for s in node.body for n in _inside(s)]
        returns = self._has_early and any(isinstance(n, ast.Return) for n in own)
        if not returns and not any(_exits_of(s) for s in node.body):
            node.body, _ = self.block(node.body, loops)
            node.orelse, flags = self.block(node.orelse, loops)
            return [node], flags
        self._count += 1
        number = self._count
        left, passed = f"{LEFT}{number}", f"{PASSED}{number}"
        body, _ = self.block(node.body, (*loops, number))
        read = {n.id for s in body for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        body = [_bind(passed, False, node), *body] if passed in read else _unset(body, passed)
        is_left = any(isinstance(n, ast.Name) and n.id == left for s in body for n in ast.walk(s))
        made: list[ast.stmt] = [node]
        if is_left:
            made = [_bind(left, False, node), node]
            self._end(node, body, left, number)
        else:
            node.body = body
        flags = {RETURNED: None} if returns else {}
        if node.orelse:
            last, more = self.block(node.orelse, loops)
            node.orelse = []
            made += self._guarded(last, {left: None} if is_left else {}, node)
            flags |= more
        return made, flags

    def _end(self, node: ast.For | ast.While, body: list[ast.stmt], left: str, number: int) -> None:
        """The loop, which ends when its flag is set."""
        if isinstance(node, ast.While):
            test = ast.BoolOp(ast.And(), [_not(left), node.test])
            node.test = ast.fix_missing_locations(ast.copy_location(test, node.test))
            node.body = body
            return
        # what a step is given is bound in steps that are taken alone
        step = f"{STEP}{number}"
        bound = _at(ast.Assign([node.target], ast.Name(step, ast.Load())), node)
        node.target = ast.copy_location(ast.Name(step, ast.Store()), node.target)
        node.body = [_at(ast.If(_not(left), [bound, *body], []), node)]
        node.left = left  # type: ignore[attr-defined]


def _exits_of(node: ast.AST) -> bool:
    """Whether there is an exit of the loop around in it, not of one inside."""
    if isinstance(node, ast.Break | ast.Continue):
        return True
    if isinstance(node, _SCOPES):
        return False
    inner = [*node.orelse] if isinstance(node, _LOOPS) else ast.iter_child_nodes(node)
    return any(_exits_of(child) for child in inner)
