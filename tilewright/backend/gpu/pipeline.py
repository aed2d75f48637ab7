"""A loop that uses what it loads, with the loads of later parts under way meanwhile (ALCOP, MLSys 2023, section 4).

What is loaded lies in a ring of `stages` parts: part i in place i mod stages. While part i is used the copies of the
stages - 1 parts behind it are in the air; a part is waited for, then a barrier makes what each thread copied visible
to all, and frees the place of the part before, which the next copies fill. So one barrier a part is enough. No copy is
issued beyond the last part: it would land in memory that is in use for something else by then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.ir.expr import Axis, Expr, const, lt, var
from tilewright.ir.loops import Barrier, For, ForKind, If, Instruction, Scope, Stmt
from tilewright.ir.simplify import simplify

SYNC = Barrier(Scope.BLOCK)
COMMIT = Instruction("commit", ())

Part = Callable[[Expr, Expr], Sequence[Stmt]]  # statements for a part's number and its place in the ring


def wait(pending: int) -> Instruction:
    """Until all but the last `pending` groups of this thread's copies have landed."""
    return Instruction("wait", (), (const(pending),))


def pipelined(name: str, parts: int, stages: int, produce: Part, consume: Part, reused: bool) -> list[Stmt]:
    """`produce` and `consume` for every part in order; a ring that is to be `reused` is free when this ends."""
    first = const(0)
    end = [SYNC] if reused else []
    if parts == 1:
        return [*produce(first, first), COMMIT, wait(0), SYNC, *consume(first, first), *end]
    axis = Axis(name, parts)
    part = var(axis)
    if stages == 1:
        inside = [*produce(part, first), COMMIT, wait(0), SYNC, *consume(part, first), SYNC]
        return [For(axis, ForKind.SERIAL, tuple(inside))]
    ahead = stages - 1
    body: list[Stmt] = []
    for number in range(ahead):
        # a group that is empty keeps the count of those that may be in the air
        body.extend((*(produce(const(number), const(number)) if number < parts else ()), COMMIT))
    later = simplify(part + ahead)
    issued = tuple(produce(later, simplify(later % stages)))
    ahead_of_it: tuple[Stmt, ...] = (If(simplify(lt(later, parts)), issued),) if ahead < parts else ()
    inside = [wait(ahead - 1), SYNC, *ahead_of_it, COMMIT, *consume(part, simplify(part % stages))]
    return [*body, For(axis, ForKind.SERIAL, tuple(inside)), *end]
