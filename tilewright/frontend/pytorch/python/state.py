"""What branches and loops give: names that both branches bind alike, and what a loop carries from step to step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils import _pytree as pytree

from tilewright.errors import UnsupportedError
from tilewright.frontend.pytorch.own_operators import copied
from tilewright.frontend.pytorch.python.bodies import Pick, Traced
from tilewright.frontend.pytorch.python.containers import CONTAINERS, changed_container
from tilewright.frontend.pytorch.python.exits import FINAL, LEFT, RESULT, RETURNED
from tilewright.frontend.pytorch.python.values import (
    Step,
    Unbound,
    Values,
    is_data,
    is_number,
    is_numeral,
    is_same,
    kind_of,
    kind_of_number,
    made_of,
    number_like,
    numeral,
)


def agreed(
    results: Sequence[Values], names: Sequence[str], where: str, side_that_returns: int | None
) -> tuple[list[list[Pick]], Callable[[Sequence[torch.Tensor]], Values]]:
    """What two branches give under each name: tensors of the same kind come out of the branch, equal values stay. Of
    a side behind which the function is left nothing is read but what it returns."""
    picks: list[list[Pick]] = [[], []]
    made: list[Callable[[Sequence[torch.Tensor]], Any]] = []
    for n, name in enumerate(names):
        pair = [results[0][n], results[1][n]]
        blank = side_that_returns
        if name in (RESULT, FINAL):
            blank = next((k for k in (0, 1) if isinstance(pair[k], Unbound)), None)
        elif name == RETURNED or name.startswith(LEFT):
            blank = None
        if blank is None and (problem := _difference(*pair)) is not None:
            made.append(_always(Unbound(name, f"{problem} in the two branches at {where}: make it the same in both")))
            continue
        kept = pair[0] if blank is None else pair[1 - blank]
        leaves, structure = pytree.tree_flatten(kept)
        others = leaves if blank is not None else pytree.tree_leaves(pair[1])
        places: list[Any] = []
        plain: list[bool] = []
        for k, (leaf, same) in enumerate(zip(leaves, others, strict=True)):
            if blank is not None:
                is_new = is_data(leaf) and not isinstance(kept, Unbound)
            else:  # else both hand on what was there before, or the same number
                is_new = leaf is not same and (is_data(leaf) or is_data(same) or leaf != same)
            places.append(len(picks[0]) if is_new else None)
            plain.append(is_numeral(leaf) and is_numeral(same))
            if is_new:
                like = _common(leaf, same)
                for side in (0, 1):
                    picks[side].append(Pick(n, k, like, side == blank, name == FINAL))

        def build(
            found: Sequence[torch.Tensor], old: Any = leaves, at: Any = places, are: Any = plain, of: Any = structure
        ) -> Any:
            new = [
                x if place is None else numeral(found[place]) if is_plain else found[place]
                for x, place, is_plain in zip(old, at, are, strict=True)
            ]
            return pytree.tree_unflatten(new, of)

        made.append(_always(kept) if not any(p is not None for p in places) else build)
    return picks, lambda found: tuple(build(found) for build in made)


def _blank(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(like.shape, dtype=like.dtype, device=like.device)


def _always(value: Any) -> Callable[[Sequence[torch.Tensor]], Any]:
    return lambda _: value


def _common(one: Any, other: Any) -> torch.Tensor:
    """A tensor, of which nothing but its kind is looked at, of the type that two values have in common."""
    kinds = [kind_of_number(x) for x in (one, other)]
    kind = torch.promote_types(*kinds)
    if is_data(one) != is_data(other):  # a number beside a tensor takes its type
        own = kinds[0] if is_data(one) else kinds[1]
        kind = own if own.is_floating_point or not kind.is_floating_point else kind
    like = next((x for x in (one, other) if is_data(x)), None)
    with disable_proxy_modes_tracing():
        return torch.empty(() if like is None else like.shape, dtype=kind, device=None if like is None else like.device)


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
            if x.shape != y.shape or (x.dtype != y.dtype and x.ndim):
                return f"is {kind_of(x)} and {kind_of(y)}"
        elif is_data(x) or is_data(y):
            tensor, plain = (x, y) if is_data(x) else (y, x)
            if not is_number(plain) or tensor.ndim:
                return f"is {kind_of(tensor)} and a plain value"
        elif x is not y and x != y and not (is_number(x) and is_number(y)):
            return "is another plain value"
    return None


class CarriedNames:
    """What a loop carries: of the names that its body binds, those that it binds anew."""

    def __init__(self, names: Sequence[str], values: Values, augmented: Sequence[str], where: str) -> None:
        self._names, self._where = names, where
        leaves = [pytree.tree_flatten(v) for v in values]
        self._leaves = [list(found) for found, _ in leaves]
        self._structures = [structure for _, structure in leaves]
        self._open = [
            [is_data(x) and (name not in augmented or is_numeral(x)) for x in found]
            for name, found in zip(names, self._leaves, strict=True)
        ]
        self._bound = [not isinstance(v, Unbound) for v in values]
        self._start: dict[tuple[int, int], torch.Tensor] = {}

    def followed(self, body: Step) -> Traced:
        """The body, with numbers that it changes carried as tensors."""
        while True:
            traced = Traced(body, self.values(), self._where)
            if not self._opened(traced.results):
                return traced

    def _opened(self, results: Values) -> bool:
        """Whether there are numbers that a step changes, which are tensors from now on."""
        is_any = False
        for n, found in enumerate(self._leaves):
            new, structure = pytree.tree_flatten(results[n])
            if self._names[n] in (RESULT, FINAL) and not self._bound[n] and not isinstance(results[n], Unbound):
                # read behind the loop where a step has left the function alone
                self._leaves[n] = [_blank(x) if is_data(x) else x for x in new]
                self._open[n] = [is_data(x) for x in new]
                self._structures[n] = structure
                self._bound[n] = is_any = True
                continue
            if not self._bound[n] or structure != self._structures[n]:
                continue
            for k, x in enumerate(found):
                is_one = is_number(x) and (is_number(new[k]) or (is_data(new[k]) and not new[k].ndim))
                if not self._open[n][k] and is_one and not is_same(new[k], x):
                    found[k] = number_like(x, _common(x, new[k]))
                    self._open[n][k] = is_any = True
                    if is_numeral(new[k]):
                        numeral(found[k])
                elif self._open[n][k] and is_numeral(x) and not is_numeral(new[k]):  # a tensor from the first step on
                    found[k] = x.clone()
                    self._start.pop((n, k), None)
                    is_any = True
        return is_any

    def values(self, given: Sequence[torch.Tensor] | None = None) -> Values:
        tensors = iter(self.carried() if given is None else given)
        return tuple(
            pytree.tree_unflatten(
                [made_of(next(tensors), (x,)) if is_open else x for x, is_open in zip(found, opened, strict=True)],
                structure,
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

    def picks(self) -> list[Pick]:
        """What a step gives for the next one."""
        return [
            Pick(n, k, self._leaves[n][k], is_final=self._names[n] == FINAL)
            for n, opened in enumerate(self._open)
            for k, is_open in enumerate(opened)
            if is_open
        ]

    def check(self, results: Values) -> None:
        """What a step gives is like what it was given."""
        for n, (name, found) in enumerate(zip(self._names, self._leaves, strict=True)):
            if not self._bound[n]:
                continue
            new, structure = pytree.tree_flatten(results[n])
            if structure != self._structures[n]:
                raise (
                    changed_container(self._where, name)
                    if name in CONTAINERS
                    else self._refusal(name, "is built otherwise after a step")
                )
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
