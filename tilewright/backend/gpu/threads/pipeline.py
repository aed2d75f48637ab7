"""A loop that uses what it loads, with loads of later parts under way meanwhile, at two levels (ALCOP, MLSys 2023, 4).

What is loaded lies in a ring of `stages` parts: part i in place i mod stages. While part i is used the copies of the
stages - 1 parts behind it are in the air; a part is waited for, then a barrier makes what each thread copied visible
to all, and frees the place of the part before, which the next copies fill. So one barrier a part is enough. Where every
part has a place of its own all are copied before the first is used. No copy is issued beyond the last part: it would
land in memory that is in use for something else by then.

A part is used in `depth` steps, and what a step needs is fetched from the ring into registers during the step before,
across the border of parts too. Copies are issued between the steps, some in each: all at once they would fill the
queue to memory, and the warps would stand still until it drains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import gcd

from tilewright.errors import InternalError
from tilewright.ir.analysis.simplify import linear, simplify
from tilewright.ir.forms.expr import Axis, Const, Expr, const, eq, lt, var
from tilewright.ir.forms.loops import Barrier, For, ForKind, If, Instruction, Operand, Scope, Stmt

Copies = Callable[[Expr, Expr], Sequence[Sequence[Stmt]]]  # of a part, by its number and its place in the ring
Fetch = Callable[[Expr, int, int], Sequence[Stmt]]  # a step of the part in a place into the registers of a number
Use = Callable[[int], Sequence[Stmt]]  # of the registers of a number
Multiply = Callable[[Expr], Sequence[Sequence[Stmt]]]  # of the part in a place of the ring, turn by turn


@dataclass(frozen=True)
class Gathered:
    """Sums of some parts that are added to others, and begin anew, after every so many parts: by statements of their
    own behind each turn of a part."""

    every: int
    turns: Sequence[Sequence[Stmt]]

    def after(self, part: Expr, turn: int = 0) -> list[Stmt]:
        """What is to be done behind a turn of a part; nothing where the part's number is never a multiple."""
        count = linear(part + 1)
        if count.constant % gcd(self.every, *count.terms.values()):
            return []
        return where(eq((part + 1) % self.every, 0), self.turns[turn])


def sync() -> Barrier:
    return Barrier(Scope.BLOCK)


def commit() -> Instruction:
    """The end of a group of copies, which are waited for together."""
    return Instruction("commit", ())


def wait(pending: int) -> Instruction:
    """Until all but the last `pending` groups of this thread's copies have landed."""
    return Instruction("wait", (), (const(pending),))


def pipelined(
    name: str, parts: int, stages: int, depth: int, copies: Copies, fetch: Fetch, use: Use, reused: bool,
    rolled: bool = False, gathered: Gathered | None = None,
) -> list[Stmt]:  # fmt: skip
    """All parts in order; a ring that is to be `reused` is free when this ends. `fetch` and `use` take turns with two
    sets of registers."""
    first = const(0)
    end = [sync()] if reused else []

    def at_once(part: Expr, place: Expr) -> list[Stmt]:
        return [*(s for group in copies(part, place) for s in group), commit()]

    def alone(place: Expr) -> list[Stmt]:
        return [s for step in range(depth) for s in (*fetch(place, step, step % 2), *use(step % 2))]

    if parts == 1:
        return [*at_once(first, first), wait(0), sync(), *alone(first), *_gathered(gathered, first), *end]
    if stages == 1 or depth == 1:
        axis = Axis(name, parts)
        inside = [*at_once(var(axis), first), wait(0), sync(), *alone(first), *_gathered(gathered, var(axis)), sync()]
        return [For(axis, ForKind.SERIAL, tuple(inside))]
    ahead = parts if parts <= stages else stages - 1
    body = _first_copies(copies, ahead, parts)
    body.extend((wait(ahead - 1), sync(), *fetch(first, 0, 0)))

    def one(part: Expr) -> list[Stmt]:
        later, following_part = simplify(part + ahead), simplify(part + 1)
        place, following_place = simplify(part % stages), simplify(following_part % stages)
        groups = [list(group) for group in copies(later, simplify(later % stages))] if ahead < parts else []
        share = -(-len(groups) // (depth - 1))
        inside: list[Stmt] = []
        for step in range(depth):
            if step < depth - 1:
                inside.extend(fetch(place, step + 1, (step + 1) % 2))
                now = [s for group in groups[step * share : (step + 1) * share] for s in group]
                inside.extend(where(lt(later, parts), now))
                inside.extend((commit(),) if step == depth - 2 else ())
            else:
                following = where(lt(following_part, parts), fetch(following_place, 0, 0))
                inside.extend((wait(ahead - 1), sync(), *following) if following else ())
            inside.extend(use(step % 2))
        return [*inside, *_gathered(gathered, part)]

    return [*body, *_walked(name, parts, stages, one, rolled), *end]


def _walked(name: str, parts: int, stages: int, one: Callable[[Expr], list[Stmt]], rolled: bool) -> list[Stmt]:
    """All parts in order. A turn around the ring is written out: places in it are then numbers, and addresses differ by
    them alone; unless it is to be `rolled`, part after part, which takes fewer registers."""
    if rolled and parts > 1:
        axis = Axis(name, parts)
        return [For(axis, ForKind.SERIAL, tuple(one(var(axis))))]
    body: list[Stmt] = []
    turns = parts // stages if parts >= 2 * stages else 0
    if turns:
        axis = Axis(name, turns)
        turn = [s for place in range(stages) for s in one(simplify(var(axis) * stages + place))]
        body.append(For(axis, ForKind.SERIAL, tuple(turn)))
    for number in range(turns * stages, parts):
        body.extend(one(const(number)))
    return body


def _first_copies(copies: Copies, ahead: int, parts: int) -> list[Stmt]:
    """Of the parts that are under way before the first is used."""
    body: list[Stmt] = []
    for number in range(ahead):
        groups = copies(const(number), const(number)) if number < parts else ()
        # a group that is empty keeps the count of those that may be in the air
        body.extend((*(s for group in groups for s in group), commit()))
    return body


def in_groups(
    name: str, parts: int, stages: int, copies: Copies, multiply: Multiply, sums: tuple[Operand, int], reused: bool,
    rolled: bool = False, gathered: Gathered | None = None,
) -> list[Stmt]:  # fmt: skip
    """The same where what is used is read by units that work on their own: two parts are under way there, so copies go
    into the place of the part before the last, which all threads have seen the end of. Turns of a part end in the same
    registers one after the other: a group adds up one of them while products of another group are under way. Where sums
    begin anew with every part, those of the part before are done when threads meet, so that they meet before they wait
    for this one's."""
    ahead = parts if parts <= stages else stages - 2
    if ahead < 1:
        raise InternalError(f"{stages} stages are too few: two parts are multiplied while others are copied")
    (total, count) = sums

    def finished(pending: int) -> Instruction:
        return Instruction("wgmma_wait", (total,), (const(pending), const(0 if pending else count)))

    # the fence waits as well, so that it comes before the wait for what is multiplied
    arrived = [wait(ahead - 1), Instruction("async_fence", ())]
    body = [*_first_copies(copies, ahead, parts), finished(0), *arrived, sync()]

    is_anew = gathered is not None and gathered.every == 1
    if gathered is not None:
        gathered = replace(gathered, turns=[(finished(0), *turn) for turn in gathered.turns])

    def one(part: Expr) -> list[Stmt]:
        later = simplify(part + ahead)
        groups = copies(later, simplify(later % stages)) if ahead < parts else ()
        inside: list[Stmt] = []
        turns = multiply(simplify(part % stages))
        for turn, products in enumerate(turns):
            inside.extend((Instruction("wgmma_fence", ()), *products, Instruction("wgmma_commit", (total,))))
            if turn == 0:
                inside.extend((*where(lt(later, parts), [s for group in groups for s in group]), commit()))
            if is_anew and turn == len(turns) - 1:
                inside.extend(where(lt(part + 1, parts), [*arrived, sync()]))
            inside.extend(_gathered(gathered, part, turn))
        return [*inside, *([] if is_anew else where(lt(part + 1, parts), [*arrived, finished(1), sync()]))]

    body.extend(_walked(name, parts, stages, one, rolled))
    body.append(finished(0))
    return [*body, *([sync()] if reused else [])]


def _gathered(gathered: Gathered | None, part: Expr, turn: int = 0) -> list[Stmt]:
    return [] if gathered is None else gathered.after(part, turn)


def where(condition: Expr, body: Sequence[Stmt]) -> list[Stmt]:
    known = simplify(condition)
    if isinstance(known, Const):
        return list(body) if known.value else []
    return [If(known, tuple(body))] if body else []
