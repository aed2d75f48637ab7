"""A loop that uses what it loads, with loads of later parts under way meanwhile, at two levels (ALCOP, MLSys 2023, 4).

What is loaded lies in a ring of `stages` parts: part i in place i mod stages. While part i is used the copies of the
stages - 1 parts behind it are in the air; a part is waited for, then a barrier makes what each thread copied visible
to all, and frees the place of the part before, which the next copies fill. So one barrier a part is enough. No copy is
issued beyond the last part: it would land in memory that is in use for something else by then.

A part is used in `depth` steps, and what a step needs is fetched from the ring into registers during the step before,
across the border of parts too. Copies are issued between the steps, some in each: all at once they would fill the
queue to memory, and the warps would stand still until it drains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.ir.expr import Axis, Expr, const, lt, var
from tilewright.ir.loops import Barrier, For, ForKind, If, Instruction, Scope, Stmt
from tilewright.ir.simplify import simplify

Copies = Callable[[Expr, Expr], Sequence[Sequence[Stmt]]]  # of a part, by its number and its place in the ring
Fetch = Callable[[Expr, int, int], Sequence[Stmt]]  # a step of the part in a place into the registers of a number
Use = Callable[[int], Sequence[Stmt]]  # of the registers of a number


def sync() -> Barrier:
    return Barrier(Scope.BLOCK)


def commit() -> Instruction:
    """The end of a group of copies, which are waited for together."""
    return Instruction("commit", ())


def wait(pending: int) -> Instruction:
    """Until all but the last `pending` groups of this thread's copies have landed."""
    return Instruction("wait", (), (const(pending),))


def pipelined(
    name: str, parts: int, stages: int, depth: int, copies: Copies, fetch: Fetch, use: Use, reused: bool
) -> list[Stmt]:
    """All parts in order; a ring that is to be `reused` is free when this ends. `fetch` and `use` take turns with two
    sets of registers."""
    first = const(0)
    end = [sync()] if reused else []

    def at_once(part: Expr, place: Expr) -> list[Stmt]:
        return [*(s for group in copies(part, place) for s in group), commit()]

    def alone(place: Expr) -> list[Stmt]:
        return [s for step in range(depth) for s in (*fetch(place, step, step % 2), *use(step % 2))]

    if parts == 1:
        return [*at_once(first, first), wait(0), sync(), *alone(first), *end]
    axis = Axis(name, parts)
    part = var(axis)
    if stages == 1 or depth == 1:
        inside = [*at_once(part, first), wait(0), sync(), *alone(first), sync()]
        return [For(axis, ForKind.SERIAL, tuple(inside))]
    ahead = stages - 1
    body: list[Stmt] = []
    for number in range(ahead):
        # a group that is empty keeps the count of those that may be in the air
        body.extend(at_once(const(number), const(number)) if number < parts else (commit(),))
    body.extend((wait(ahead - 1), sync(), *fetch(first, 0, 0)))
    later = simplify(part + ahead)
    groups = [list(group) for group in copies(later, simplify(later % stages))] if ahead < parts else []
    share = -(-len(groups) // (depth - 1))
    inside = []
    for step in range(depth):
        if step < depth - 1:
            inside.extend(fetch(simplify(part % stages), step + 1, (step + 1) % 2))
            now = [s for group in groups[step * share : (step + 1) * share] for s in group]
            inside.extend((If(simplify(lt(later, parts)), tuple(now)),) if now else ())
            inside.extend((commit(),) if step == depth - 2 else ())
        else:
            following = simplify((part + 1) % stages)
            inside.extend((wait(ahead - 1), sync()))
            inside.append(If(simplify(lt(part + 1, parts)), tuple(fetch(following, 0, 0))))
        inside.extend(use(step % 2))
    return [*body, For(axis, ForKind.SERIAL, tuple(inside)), *end]
