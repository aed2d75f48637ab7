"""What branches and loops give: names that both branches bind alike, and what a loop carries from step to step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tilewright.errors import UnsupportedError
from tilewright.frontend.pytorch.own_operators import copied
from tilewright.frontend.pytorch.python.bodies import Traced
from tilewright.frontend.pytorch.python.values import Step, Unbound, Values, is_data, is_same, kind_of


def picked(results: Values, pick: tuple[int, ...]) -> torch.Tensor:
    name, leaf = pick
    found = pytree.tree_leaves(results[name])[leaf]
    return found if isinstance(found, torch.Tensor) else torch.full((), found)


def agreed(
    results: Sequence[Values], names: Sequence[str], where: str
) -> tuple[list[list[tuple[int, ...]]], Callable[[Sequence[torch.Tensor]], Values]]:
    """What two branches give under each name: tensors of the same kind come out of the branch, equal values stay."""
    picks: list[tuple[int, ...]] = []
    made: list[Callable[[Sequence[torch.Tensor]], Any]] = []
    for number, name in enumerate(names):
        one, other = results[0][number], results[1][number]
        problem = _difference(one, other)
        if problem is not None:
            made.append(_always(Unbound(name, f"{problem} in the two branches at {where}: make it the same in both")))
            continue
        leaves, structure = pytree.tree_flatten(one)
        places: list[Any] = []
        for k, (leaf, same) in enumerate(zip(leaves, pytree.tree_leaves(other), strict=True)):
            is_new = is_data(leaf) and leaf is not same  # else both hand on what was there before
            places.append(len(picks) if is_new else None)
            if is_new:
                picks.append((number, k))

        def build(found: Sequence[torch.Tensor], old: Any = leaves, at: Any = places, of: Any = structure) -> Any:
            new = [x if place is None else found[place] for x, place in zip(old, at, strict=True)]
            return pytree.tree_unflatten(new, of)

        made.append(build)
    return [picks, picks], lambda found: tuple(build(found) for build in made)


def _always(value: Any) -> Callable[[Sequence[torch.Tensor]], Any]:
    return lambda _: value


def _difference(one: Any, other: Any) -> str | None:
    """Why a name cannot be told what it is whichever branch is taken."""
    if isinstance(one, Unbound) or isinstance(other, Unbound):
        return None if one is other else "is bound in one only"
    mine, structure = pytree.tree_flatten(one)
    theirs, like = pytree.tree_flatten(other)
    if structure != like:
        return "is built otherwise"
    for x, y in zip(mine, theirs, strict=True):
        if is_data(x) and is_data(y):
            if x.shape != y.shape or x.dtype != y.dtype:
                return f"is {x.dtype}{list(x.shape)} and {y.dtype}{list(y.shape)}"
        elif is_data(x) or is_data(y):
            return "is a tensor and a plain value"
        elif x is not y and x != y:
            return "is another plain value (make it a tensor)"
    return None


class State:
    """What a loop carries: of the names that its body binds, those that it binds anew."""

    def __init__(self, names: Sequence[str], values: Values, augmented: Sequence[str], where: str) -> None:
        self._names, self._where = names, where
        leaves = [pytree.tree_flatten(v) for v in values]
        self._leaves = [list(found) for found, _ in leaves]
        self._structures = [structure for _, structure in leaves]
        self._open = [
            [is_data(x) and name not in augmented for x in found]
            for name, found in zip(names, self._leaves, strict=True)
        ]
        self._bound = [not isinstance(v, Unbound) for v in values]
        self._start: dict[tuple[int, int], torch.Tensor] = {}

    def followed(self, body: Step) -> Traced:
        """The body, with numbers that it changes carried as tensors."""
        while True:
            traced = Traced(body, self.values())
            if not self._opened(traced.results):
                return traced

    def _opened(self, results: Values) -> bool:
        """Whether there are numbers that a step changes, which are tensors from now on."""
        is_any = False
        for n, found in enumerate(self._leaves):
            new, structure = pytree.tree_flatten(results[n])
            if not self._bound[n] or structure != self._structures[n]:
                continue
            for k, x in enumerate(found):
                is_number = isinstance(x, int) and isinstance(new[k], int | torch.Tensor)
                if not self._open[n][k] and is_number and not is_same(new[k], x):
                    found[k] = torch.full((), x, dtype=torch.bool if isinstance(x, bool) else torch.int64)
                    self._open[n][k] = is_any = True
        return is_any

    def values(self, given: Sequence[torch.Tensor] | None = None) -> Values:
        tensors = iter(self.carried() if given is None else given)
        return tuple(
            pytree.tree_unflatten(
                [next(tensors) if is_open else x for x, is_open in zip(found, opened, strict=True)], structure
            )
            for found, opened, structure in zip(self._leaves, self._open, self._structures, strict=True)
        )

    def carried(self) -> list[torch.Tensor]:
        """The tensors it begins with, copies since the loop makes new ones."""
        found = []
        for n, opened in enumerate(self._open):
            for k, is_open in enumerate(opened):
                if is_open:
                    if (n, k) not in self._start:
                        self._start[n, k] = copied(self._leaves[n][k])
                    found.append(self._start[n, k])
        return found

    def leaves(self, results: Values) -> list[Any]:
        found = []
        for n, opened in enumerate(self._open):
            new = pytree.tree_leaves(results[n])
            for k, is_open in enumerate(opened):
                if is_open:
                    found.append(new[k] if is_data(new[k]) else torch.full((), new[k], dtype=self._leaves[n][k].dtype))
        return found

    def check(self, results: Values) -> None:
        """What a step gives is like what it was given."""
        for n, (name, found) in enumerate(zip(self._names, self._leaves, strict=True)):
            if not self._bound[n]:
                continue
            new, structure = pytree.tree_flatten(results[n])
            if structure != self._structures[n]:
                raise self._refusal(name, "is built otherwise after a step")
            for k, x in enumerate(found):
                if self._open[n][k]:
                    y = new[k]
                    if is_data(y) and (y.shape != x.shape or y.dtype != x.dtype):
                        raise self._refusal(name, f"changes from {kind_of(x)} to {kind_of(y)} with a step")
                    if not is_data(y) and not isinstance(y, bool | int | float):
                        raise self._refusal(name, f"changes from {kind_of(x)} to a {type(y).__name__} with a step")
                elif is_data(x) and new[k] is not x:
                    raise self._refusal(name, "is bound anew by an operation in place")
                elif not is_data(x) and not is_same(new[k], x):
                    raise self._refusal(name, f"is a {type(x).__name__} that changes with a step; make it a tensor")

    def _refusal(self, name: str, what: str) -> UnsupportedError:
        return UnsupportedError(f"{self._where}: '{name}' {what}, and a tensor decides how many steps there are")

    def after(self, found: Sequence[torch.Tensor]) -> Values:
        values = list(self.values(found))
        for n, is_bound in enumerate(self._bound):
            if not is_bound:
                values[n] = Unbound(self._names[n], f"is bound inside the loop at {self._where} only: bind it before")
        return tuple(values)
