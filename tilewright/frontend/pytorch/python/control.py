"""What rewritten source calls while a module is followed: control that tensors decide becomes branches and loops of the
traced graph, and is Python's own elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
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
from tilewright.frontend.pytorch.python.expressions import Expressions
from tilewright.frontend.pytorch.python.rewriting import CALLS, rewritten_code, with_code
from tilewright.frontend.pytorch.python.state import CarriedNames, agreed
from tilewright.frontend.pytorch.python.values import (
    CODE_ERRORS,
    REFUSALS,
    Step,
    Unbound,
    Values,
    flag,
    is_data,
    is_numeral,
    number,
    numeral,
)

_higher = torch.ops.higher_order
SHORT = 16  # steps of a loop over plain numbers that are written out one by one
FEW = 4  # steps of one that a tensor may end: written out, each of them is a branch


class Calls(Expressions):
    """What the rewritten functions of one module call."""

    def __init__(self, rolls: bool = True) -> None:
        """Where it `rolls`, the steps of a loop behind the first that a tensor may end are a loop of the graph."""
        super().__init__()
        self.rolled = 0  # of which Python's own could be
        self._rolls = rolls
        self._written_out: set[str] = set()  # where loops stand that cannot be
        self._rewrites: dict[CodeType, CodeType | None] = {}  # None where there is no source
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

    # statements that stay

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
                self.choose(at, partial(_given, value), partial(_given, each), where)
                for at, each in zip(places_of(x, key), x, strict=True)
            ]
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
        return self._loop(
            goes_on, one, ("the counter", *names), (counter, unset, *values[1:]),
            augmented, read, where,
        )[1:]  # fmt: skip

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
            state = CarriedNames(names, (*values, *lists.held()), augmented, where)
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


def _given(x: Any) -> Any:
    return x
