"""What rewritten source calls while a module is followed: control that tensors decide becomes branches and loops of the
traced graph, and is Python's own elsewhere."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch._higher_order_ops.while_loop import while_loop
from torch.utils import _pytree as pytree

from tilewright.errors import UnsupportedError
from tilewright.frontend.pytorch.mutations import carry_changed, changed_places, give_changed
from tilewright.frontend.pytorch.python.bodies import (
    Containers,
    Operands,
    Pick,
    Traced,
    check_sizes,
    emit,
    write_back,
)
from tilewright.frontend.pytorch.python.elements import change_part, get, put, put_changed
from tilewright.frontend.pytorch.python.exits import LEFT, STEP
from tilewright.frontend.pytorch.python.numbers import Numbers
from tilewright.frontend.pytorch.python.rewriting import CALLS, rewritten_code, with_code
from tilewright.frontend.pytorch.python.state import State, agreed
from tilewright.frontend.pytorch.python.values import (
    CODE_ERRORS,
    Step,
    Unbound,
    Values,
    flag,
    is_data,
    is_numeral,
    made_of,
    number,
    numeral,
)

_higher = torch.ops.higher_order
_ARITHMETIC = {
    "Add": "add", "Sub": "sub", "Mult": "mul", "Div": "truediv", "FloorDiv": "floordiv", "Mod": "mod", "Pow": "pow",
    "BitAnd": "and", "BitOr": "or", "BitXor": "xor", "MatMult": "matmul", "LShift": "lshift", "RShift": "rshift",
}  # fmt: skip
_AUGMENTED = {name: getattr(operator, f"__i{function}__") for name, function in _ARITHMETIC.items()}
_COMBINED = {name: getattr(operator, f"__{function}__") for name, function in
             {**_ARITHMETIC, "USub": "neg", "UAdd": "pos", "Invert": "invert"}.items()}  # fmt: skip
_ORDERS = {"Lt": operator.lt, "LtE": operator.le, "Gt": operator.gt, "GtE": operator.ge, "Eq": operator.eq,
           "NotEq": operator.ne}  # fmt: skip
SHORT = 16  # steps of a loop over plain numbers that are written out one by one
FEW = 4  # steps of one that a tensor may end: written out, each of them is a branch


class Calls:
    """What the rewritten functions of one module call."""

    def __init__(self, rolls: bool = True) -> None:
        """Where it `rolls`, the steps of a loop behind the first that a tensor may end are a loop of the graph."""
        self.loops = 0  # over ranges that became loops of the graph
        self.rolled = 0  # of which Python's own could be
        self._rolls = rolls
        self._written_out: set[str] = set()  # where loops stand that cannot be
        self._rewrites: dict[CodeType, CodeType | None] = {}  # None where there is no source
        self._numbers = Numbers()

    # names and functions

    def held(self, value: Callable[[], Any], name: str) -> Any:
        try:
            return value()
        except NameError:
            return Unbound(name, "has no value here on every way that the data may take: bind it before")

    def called(self, function: Any) -> Any:
        """A function as rewritten code calls it: rewritten too, where it is the user's own."""
        numeric = self._numbers.called(function)
        if numeric is not function:
            return numeric
        if isinstance(function, FunctionType):
            own = {torch.cond: self.cond, while_loop: self.while_loop}.get(function)
            return own if own is not None else self.rewritten(function)
        if isinstance(function, MethodType) and isinstance(function.__func__, FunctionType):
            made = self.rewritten(function.__func__)
            return function if made is function.__func__ else MethodType(made, function.__self__)
        return function

    def rewritten(self, function: FunctionType, is_last: bool = False) -> Any:
        home = function.__module__ or ""
        is_known = home.partition(".")[0] in ("torch", "builtins", "typing", "math", "numpy")
        if is_known or home.startswith("tilewright.frontend.") or function.__name__ == "<lambda>":
            return function
        if CALLS in function.__code__.co_freevars:
            return function  # a part of what was rewritten
        code = function.__code__
        if code not in self._rewrites:
            try:
                self._rewrites[code] = rewritten_code(function, is_last)
            except UnsupportedError:
                self._rewrites[code] = None  # it may have no control that tensors decide
        made = self._rewrites[code]
        return function if made is None else with_code(function, made, self)

    def given(self, value: Any, where: str) -> Any:
        """What a function returns whichever way it is left."""
        if isinstance(value, Unbound):
            raise UnsupportedError(f"{where}: what is returned {value.why}")
        return value

    # expressions

    def inverse(self, value: Any) -> Any:
        return torch.logical_not(flag(value)) if is_data(value) else not value

    def all_of(self, *values: Callable[[], Any]) -> Any:
        return self._joined(torch.logical_and, values, True)

    def any_of(self, *values: Callable[[], Any]) -> Any:
        return self._joined(torch.logical_or, values, False)

    def _joined(self, join: Callable[..., Any], values: Sequence[Callable[[], Any]], goes_on: bool) -> Any:
        found: Any = goes_on
        for value in values:
            new = value()
            if is_data(found):
                found = join(found, flag(new))
            elif is_data(new):
                found = flag(new)
            else:
                found = new
                if bool(new) is not goes_on:
                    return new
        return found

    def compared(self, kinds: Sequence[str], *values: Callable[[], Any]) -> Any:
        """`a < b < c`: each value once, as far as the answer is open."""
        last = values[0]()

        def next_one(kind: str, value: Callable[[], Any]) -> Any:
            nonlocal last
            before, last = last, value()
            return _ORDERS[kind](before, last)

        pairs = zip(kinds, values[1:], strict=True)
        return self.all_of(*(lambda k=k, v=v: next_one(k, v) for k, v in pairs))

    def combined(self, kind: str, *operands: Any) -> Any:
        return made_of(_COMBINED[kind](*operands), operands)

    def changed(self, value: Any, kind: str, other: Any) -> Any:
        """What a name has behind `name += other`."""
        return self.combined(kind, value, other) if is_numeral(value) else _AUGMENTED[kind](value, other)

    def choose(self, test: Any, then: Callable[[], Any], otherwise: Callable[[], Any], where: str) -> Any:
        if not is_data(test):
            return then() if test else otherwise()
        (value,) = self.branch(test, lambda _: (then(),), lambda _: (otherwise(),), ("the value",), (None,), (), where)
        return value

    def plain(self, test: Any, why: str, where: str) -> bool:
        """A test of statements that cannot be a branch."""
        if is_data(test):
            raise UnsupportedError(
                f"{where}: a tensor decides whether this is run, and there is {why} in it, which compiled code cannot "
                f"do; compute both and choose with torch.where, or move it behind the branch or loop"
            )
        return bool(test)

    def several(self, values: Any, where: str) -> Any:
        return values

    def is_set(self, flag: Any) -> bool:
        """Whether a loop has been left for certain."""
        return flag is True

    # elements

    def get(self, x: Any, key: Any) -> Any:
        """x[key], where numbers in the key may be tensors."""
        return get(x, key)

    def put(self, x: Any, key: Any, value: Any) -> None:
        put(x, key, value)

    def change(self, x: Any, key: Any, name: str, *args: Any, **named: Any) -> Any:
        return change_part(x, key, name, *args, **named)

    def put_changed(self, x: Any, key: Any, kind: str, value: Any) -> None:
        put_changed(x, key, lambda part, other: self.changed(part, kind, other), value)

    # statements

    def branch(
        self, test: Any, then: Step, otherwise: Step, names: Sequence[str], values: Values, read: Values, where: str,
        side_that_returns: int | None = None,
    ) -> Values:  # fmt: skip
        if not is_data(test):
            found: Values = (then if test else otherwise)(*values)
            return found
        lists = Containers(read, where)
        steps = [lists.around(step) for step in (then, otherwise)]
        given = (*values, *lists.held())
        with lists.put_back():
            seen = [Traced(step, given, where) for step in steps]
            for one in seen:
                one.check_sizes(where)
            outputs, results = agreed([t.results for t in seen], (*names, *lists.names), where, side_that_returns)
            operands = Operands([t.captured for t in seen])
            bodies = [one.body((), operands, picks) for one, picks in zip(seen, outputs, strict=True)]
        shown = [pick.like for pick in outputs[0]]
        changed = changed_places(bodies)
        for graph in bodies:
            give_changed(graph, changed)
        targets = [operands.roots[k] for k in changed]
        emitted = emit(_higher.cond, bodies, (flag(test),), (operands.roots,), [*shown, *targets])
        write_back(targets, emitted[len(shown) :])
        made = results(emitted)
        lists.put(made[len(names) :])
        return made[: len(names)]

    def repeat(
        self, test: Step, body: Step, names: Sequence[str], values: Values, augmented: Sequence[str], read: Values,
        where: str,
    ) -> Values:  # fmt: skip
        while True:
            goes_on = test(*values)
            if is_data(goes_on):
                return self._loop(test, body, names, values, augmented, read, where)
            if not goes_on:
                return values
            values = body(*values)

    def count(
        self, limits: Sequence[Any], body: Step, names: Sequence[str], values: Values, augmented: Sequence[str],
        read: Values, where: str,
    ) -> Values:  # fmt: skip
        start, stop, step = (0, *limits, 1)[:3] if len(limits) == 1 else (*limits, 1)[:3]
        if not any(map(is_data, (start, stop, step))):
            if len(range(start, stop, step)) > SHORT:
                try:
                    return self._counted(start, stop, step, body, names, values, augmented, read, where)
                except UnsupportedError:
                    pass  # what only Python's own loop can do
            left = f"{LEFT}{names[0].removeprefix(STEP)}"
            places = range(start, stop, step)
            for k, place in enumerate(places):
                if k and len(places) - k >= FEW and left in names and is_data(values[names.index(left)]):
                    found = self._rest(places[k:], body, names, values, augmented, read, where)
                    if found is not None:
                        return found
                values = body(place, *values[1:])
                if left in names and values[names.index(left)] is True:
                    break
            return values
        return self._counted(start, stop, step, body, names, values, augmented, read, where)

    def _rest(
        self, places: range, body: Step, names: Sequence[str], values: Values, augmented: Sequence[str], read: Values,
        where: str,
    ) -> Values | None:  # fmt: skip
        """The other steps of a loop that a tensor may end, as a loop of the graph: written out each is a branch around
        the steps behind it. None where it cannot be."""
        if not self._rolls or where in self._written_out:
            return None
        limits = (places.start, places.stop, places.step)
        try:
            found = self._counted(*limits, body, names, values, augmented, read, where)
        except (UnsupportedError, *CODE_ERRORS):
            self._written_out.add(where)  # what only Python's own loop can do, such as to take elements of a list
            return None
        self.rolled += 1
        return found

    def _counted(
        self, start: Any, stop: Any, step: Any, body: Step, names: Sequence[str], values: Values,
        augmented: Sequence[str], read: Values, where: str,
    ) -> Values:  # fmt: skip
        """A loop over a range as one of the graph."""
        if is_data(step):
            raise UnsupportedError(f"{where}: the step of a range is a tensor; make it a number")
        counter = numeral(number(start).clone())
        left = f"{LEFT}{names[0].removeprefix(STEP)}"

        def goes_on(place: Any, *others: Any) -> Any:
            is_inside = place < stop if step > 0 else place > stop
            is_left = left in names and others[names.index(left)]
            return is_inside if is_left is False else self.all_of(lambda: self.inverse(is_left), lambda: is_inside)

        def one(place: Any, _: Any, *others: Any) -> Any:
            return (numeral(place + step), *body(place, *others))

        unset = Unbound(names[0], "has no value behind a loop over a range that data end")
        found = self._loop(
            goes_on, one, ("the counter", *names), (counter, unset, *values[1:]),
            augmented, read, where,
        )  # fmt: skip
        self.loops += 1
        return found[1:]

    def _loop(
        self, test: Step, body: Step, names: Sequence[str], values: Values, augmented: Sequence[str], read: Values,
        where: str,
    ) -> Values:  # fmt: skip
        """A loop that data end. Carried are the tensors and numbers that its body binds anew; what it only changes in
        place is used like any tensor from around it."""
        check_sizes(pytree.tree_leaves(values), where)
        lists = Containers(read, where)
        lists = lists.changed_by(body, values)
        names, own = (*names, *lists.names), len(names)
        test, body = lists.around(test, gives=False), lists.around(body)
        with lists.put_back():
            state = State(names, (*values, *lists.held()), augmented, where)
            step = state.followed(body)
            asked = Traced(lambda *given: (flag(test(*given)).clone(),), state.values(), where)
            seen = [asked, step]
            for each in seen:
                each.check_sizes(where)
            state.check(step.results)
            carried = state.carried()
            operands = Operands([t.captured for t in seen], carried)
            count = len(carried)
            graphs = [
                asked.body(carried, operands, [Pick(0, 0, asked.results[0])]),
                step.body(carried, operands, state.picks()),
            ]
        if changed_places(graphs[:1]):
            raise UnsupportedError(f"{where}: the test of a loop changes a tensor in place; do that in the loop")
        moved = [k - count for k in carry_changed(graphs[0], graphs[1], count, changed_places(graphs))]
        targets = [operands.roots[k] for k in moved]
        left = tuple(x for k, x in enumerate(operands.roots) if k not in moved)
        emitted = emit(_higher.while_loop, graphs, (), ((*carried, *targets), left), [*carried, *targets])
        write_back(targets, emitted[count:])
        found = state.after(emitted[:count])
        lists.put(found[own:])
        return found[:own]

    # PyTorch's own

    def cond(self, test: Any, then: Any, otherwise: Any, operands: Any = ()) -> Any:
        given = tuple(operands)
        one, other = self.called(then), self.called(otherwise)
        (value,) = self.branch(test, lambda _: (one(*given),), lambda _: (other(*given),), ("the value",), (None,), (),
                               "torch.cond")  # fmt: skip
        return value

    def while_loop(self, test: Any, body: Any, carried: Any) -> Any:
        goes_on, step = self.called(test), self.called(body)
        names = tuple(f"carried value {k}" for k in range(len(carried)))
        if not all(is_data(x) for x in pytree.tree_leaves(carried)):
            raise UnsupportedError("while_loop: an operand that is no tensor; carry a count as torch.tensor(0)")

        def one(*state: Any) -> Any:
            found = step(*state)
            return tuple(found) if isinstance(found, tuple | list) else (found,)

        return self._loop(goes_on, one, names, tuple(carried), (), (), "torch.while_loop")
