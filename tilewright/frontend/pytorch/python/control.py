"""What rewritten source calls while a module is followed: control that tensors decide becomes branches and loops of the
traced graph, and is Python's own elsewhere."""

from __future__ import annotations

import operator
import sys
from collections import deque
from collections.abc import Callable, Iterator, KeysView, Sequence, ValuesView
from functools import partial
from inspect import getattr_static
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch._higher_order_ops.while_loop import while_loop
from torch.utils import _pytree as pytree

from tilewright.errors import UnsupportedError
from tilewright.frontend.pytorch.mutations import carry_changed, changed_places, give_changed
from tilewright.frontend.pytorch.python.bodies import (
    Operands,
    Pick,
    Traced,
    check_sizes,
    emit,
    write_back,
)
from tilewright.frontend.pytorch.python.containers import Containers, is_own_object
from tilewright.frontend.pytorch.python.elements import (
    change_part,
    get,
    is_chosen_slot,
    places_of,
    put,
    put_changed,
)
from tilewright.frontend.pytorch.python.exits import LEFT, STEP
from tilewright.frontend.pytorch.python.numbers import Numbers
from tilewright.frontend.pytorch.python.rewriting import CALLS, rewritten_code, with_code
from tilewright.frontend.pytorch.python.state import State, agreed
from tilewright.frontend.pytorch.python.values import (
    CODE_ERRORS,
    REFUSALS,
    Step,
    Unbound,
    Values,
    flag,
    is_data,
    is_number,
    is_numeral,
    kind_of_number,
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
        self._depth = 0  # of branches and loops of the graph that are being followed
        self._iterators: list[Any] = []  # from around them
        self._escaped: BaseException | None = None  # what one of them has raised
        self.is_caught = False  # whether a refusal went through the user's own `try`

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
        if function is next:
            return lambda values, *default: next(self._advanced(values), *default)
        if isinstance(function, FunctionType):
            own = {torch.cond: self.cond, while_loop: self.while_loop}.get(function)
            return own if own is not None else self.rewritten(function)
        if isinstance(function, MethodType) and isinstance(function.__func__, FunctionType):
            made = self.rewritten(function.__func__)
            return function if made is function.__func__ else MethodType(made, function.__self__)
        if type(function) is partial:
            return partial(self.called(function.func), *function.args, **function.keywords)
        own_call = getattr_static(type(function), "__call__", None)
        if isinstance(own_call, FunctionType) and not isinstance(function, torch.nn.Module | type):
            made = self.rewritten(own_call)
            return function if made is own_call else MethodType(made, function)
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

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        """What the user's own `except` may not catch: that the code cannot be followed here says nothing of how it
        runs. Nor may it what a body raises, which data decide."""
        error = sys.exception()
        return (*REFUSALS, *((type(error),) if error is not None and error is self._escaped else ()))

    def caught(self) -> None:
        self.is_caught = True

    def given(self, value: Any, where: str) -> Any:
        """What a function returns whichever way it is left."""
        if isinstance(value, Unbound):
            raise UnsupportedError(f"{where}: what is returned {value.why}")
        return value

    # expressions

    def inverse(self, value: Any) -> Any:
        return torch.logical_not(flag(value)) if is_data(value) else not value

    def all_of(self, effects: Sequence[int], read: Values, where: str, *values: Callable[[], Any]) -> Any:
        return self._joined(True, effects, read, where, values)

    def any_of(self, effects: Sequence[int], read: Values, where: str, *values: Callable[[], Any]) -> Any:
        return self._joined(False, effects, read, where, values)

    def _joined(
        self, goes_on: bool, effects: Sequence[int], read: Values, where: str, values: Sequence[Callable[[], Any]]
    ) -> Any:
        """Whether all values are true, or any is. Those at the places `effects` may change something: they are computed
        where it is still open."""
        join = torch.logical_and if goes_on else torch.logical_or
        found: Any = goes_on
        for place, value in enumerate(values):
            if is_data(found) and place in effects:
                sides = [lambda _, v=value: (flag(v()),), lambda *_: (not goes_on,)]
                then, otherwise = sides if goes_on else reversed(sides)
                (found,) = self.branch(found, then, otherwise, ("the value",), (None,), read, where)
                continue
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

    def last_of(
        self, goes_on: bool, effects: Sequence[int], read: Values, where: str, *values: Callable[[], Any]
    ) -> Any:
        """The value of `a and b`, if it goes on where one is true, or of `a or b`: that of the last that is asked."""
        found = values[0]()
        for place, value in enumerate(values[1:], 1):
            if not is_data(found):
                if bool(found) is not goes_on:
                    return found
                found = value()
                continue
            new = value if place in effects else _always(value())
            if place not in effects and _is_flag(found) and _is_flag(new()):
                both = (flag(found), flag(new()))
                found = numeral(torch.logical_and(*both) if goes_on else torch.logical_or(*both))
                continue
            sides = [lambda _, v=new: (v(),), lambda *_, v=found: (v,)]
            then, otherwise = sides if goes_on else reversed(sides)
            (found,) = self.branch(found, then, otherwise, ("the value",), (None,), read, where)
            if isinstance(found, Unbound):
                raise UnsupportedError(f"{where}: the value of `and` or `or` {found.why}")
        return found

    def compared(self, kinds: Sequence[str], *values: Callable[[], Any]) -> Any:
        """`a < b < c`: each value once, as far as the answer is open."""
        last = values[0]()

        def next_one(kind: str, value: Callable[[], Any]) -> Any:
            nonlocal last
            before, last = last, value()
            return _ORDERS[kind](before, last)

        pairs = zip(kinds, values[1:], strict=True)
        return self.all_of((), (), "", *(lambda k=k, v=v: next_one(k, v) for k, v in pairs))

    def contained(self, item: Any, container: Any) -> Any:
        """`item in container`, where either may be data: whether it equals one of them."""
        if is_data(container):
            return numeral(flag((container == item).any()))
        if isinstance(container, range) and is_data(item) and not item.ndim:
            first, last = sorted((container[0], container[-1])) if container else (1, 0)
            return numeral((item >= first) & (item <= last) & ((item - first) % container.step == 0))
        is_known = isinstance(container, list | tuple | set | frozenset | dict | deque | KeysView | ValuesView)
        if not is_known or not any(is_data(x) for x in (item, *container)):
            return item in container
        if any(x is item for x in container):
            return True

        def is_like(x: Any) -> bool:
            return is_data(x) == is_data(item) or all(is_data(v) or is_number(v) for v in (x, item))

        equal = [item == x for x in container if is_like(x)]
        return self._numbers.called(any)(equal)

    def same(self, one: Any, other: Any) -> Any:
        """`one is other`, where a truth that data tell may be True or False."""
        for value, known in ((one, other), (other, one)):
            if isinstance(known, bool) and is_data(value) and is_numeral(value):
                return numeral(value == known) if value.dtype is torch.bool else False
        return one is other

    def combined(self, kind: str, *operands: Any) -> Any:
        if kind == "Pow" and is_data(operands[1]) and all(map(_is_whole, operands)):
            raise UnsupportedError(
                "a whole number to the power of one that data tell is whole or not as that has it: write 2.0 ** n, or "
                "1 << n"
            )
        return made_of(_COMBINED[kind](*operands), operands)

    def changed(self, value: Any, kind: str, other: Any) -> Any:
        """What a name has behind `name += other`."""
        return self.combined(kind, value, other) if is_numeral(value) else _AUGMENTED[kind](value, other)

    def choose(
        self, test: Any, then: Callable[[], Any], otherwise: Callable[[], Any], where: str, read: Values = ()
    ) -> Any:
        if not is_data(test):
            return then() if test else otherwise()
        steps = (lambda _: (then(),), lambda _: (otherwise(),))
        (value,) = self.branch(test, *steps, ("the value",), (None,), read, where)
        return value

    def plain(self, test: Any, why: str, where: str) -> bool:
        """A test of statements that cannot be a branch."""
        if is_data(test):
            raise UnsupportedError(
                f"{where}: a tensor decides whether this is run, and there is {why} in it, which compiled code cannot "
                f"do; compute both and choose with torch.where, or move it behind the branch or loop"
            )
        return bool(test)

    def assumed(self, test: Any) -> Any:
        """A test of `assert`: what data would fail is not looked at."""
        return True if is_data(test) else test

    def matched(self, subject: Any, where: str) -> Any:
        if any(map(is_data, pytree.tree_leaves(subject))):
            raise UnsupportedError(f"{where}: what is matched is a tensor, or a number that data tell; use if and elif")
        return subject

    def several(self, values: Any) -> Any:
        """What a loop that is written out goes over."""
        return self._advanced(values)

    def _advanced(self, values: Any) -> Any:
        """An iterator of which something is taken, or another value: no iterator from around a body in it."""
        if self._depth and any(values is x for x in self._iterators):
            raise UnsupportedError(
                "an iterator from around a branch or a loop that data decide is read in it, and whether, or how often, "
                "is for the data to tell; take what it gives before, or index a list"
            )
        return values

    def is_set(self, flag: Any) -> bool:
        """Whether a loop has been left for certain."""
        return flag is True

    def owner(self, x: Any, attribute: str, where: str) -> Any:
        """What is given an attribute: in a body no module, and nothing else that is not followed."""
        if self._depth and not is_own_object(x):
            raise UnsupportedError(
                f"{where}: a tensor decides whether this is run, and there is an assignment to .{attribute} in it, "
                f"which compiled code cannot do; change a buffer in place, or assign behind the branch or loop"
            )
        return x

    # elements

    def get(self, x: Any, key: Any) -> Any:
        """x[key], where numbers in the key may be tensors."""
        return get(x, key)

    def put(self, x: Any, key: Any, value: Any, where: str) -> None:
        if is_chosen_slot(x, key) and not all(map(is_numeral, (value, *x))):
            # the list holds the tensor itself
            x[:] = [
                self.choose(at, _always(value), _always(each), where)
                for at, each in zip(places_of(x, key), x, strict=True)
            ]  # fmt: skip
            return
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
        self._iterators += [x for x in read if isinstance(x, Iterator)]
        lists = Containers(read, where)
        steps = [self._inside(lists.around(step)) for step in (then, otherwise)]
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
            if is_left is False:
                return is_inside
            return self.all_of((), (), "", lambda: self.inverse(is_left), lambda: is_inside)

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
        self._iterators += [x for x in read if isinstance(x, Iterator)]
        test, body = self._inside(test), self._inside(body)
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

    def _inside(self, step: Step) -> Step:
        """A step that is followed as a body of the graph."""

        def run(*values: Any) -> Any:
            self._depth += 1
            try:
                return step(*values)
            finally:
                self._depth -= 1
                self._escaped = sys.exception()

        return run

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


def _always(value: Any) -> Callable[[], Any]:
    return lambda: value


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool) or (is_data(value) and not value.ndim and value.dtype is torch.bool)


def _is_whole(value: Any) -> bool:
    return is_numeral(value) and not kind_of_number(value).is_floating_point
