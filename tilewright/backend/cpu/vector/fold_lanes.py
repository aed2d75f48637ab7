"""Folds the lanes of vector accumulators by halves: lane after lane, a wide vector is taken apart through one port of
the processor, and each add waits for the one before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tilewright.ir.forms.expr import Axis, Expr, const, load, var
from tilewright.ir.forms.loops import Buffer, Stmt, Store
from tilewright.lower.register_block import RegisterBlock
from tilewright.target.instruction_sets import NARROWEST_BYTES

MakeStates = Callable[[tuple[int, ...], str], list[Buffer]]
Update = Callable[[Sequence[Buffer], tuple[Expr, ...], Sequence[Expr]], tuple[Stmt, ...]]


@dataclass(frozen=True)
class Halves:
    """What is left to fold lane by lane, and the statements and buffers that led there."""

    body: tuple[Stmt, ...]
    buffers: tuple[Buffer, ...]
    states: Sequence[Buffer]
    chain: tuple[Expr, ...]  # the index of the chain that holds it, where the states still have several
    lanes: int


def halved(
    block: RegisterBlock, states: Sequence[Buffer], chains: int, lanes: int, make: MakeStates, update: Update
) -> Halves:
    """Chains combined vector by vector, then halves of the vector while it is wider than the narrowest."""
    body: list[Stmt] = []
    buffers: list[Buffer] = []
    whole = RegisterBlock(block.env, block.unrolled, Axis("lane", lanes))
    assert whole.lane is not None
    left = chains
    while left > 1:
        half_of_chains = (left + 1) // 2
        for chain in range(left - half_of_chains):
            first, other = ((*block.index, const(c), var(whole.lane)) for c in (chain, chain + half_of_chains))
            body.extend(whole.around(*update(states, first, [load(s, other) for s in states])))
        left = half_of_chains
    held: tuple[Expr, ...] = (const(0),) if chains > 1 else ()
    while lanes * max(s.dtype.bytes for s in states) > NARROWEST_BYTES:
        lanes //= 2
        half = RegisterBlock(block.env, block.unrolled, Axis("lane", lanes))
        assert half.lane is not None
        low, high = make(half.shape, "low"), make(half.shape, "high")
        for parts, start in ((low, 0), (high, lanes)):
            place = (*block.index, *held, var(half.lane) + start)
            copies = [Store(part, half.index, load(s, place)) for part, s in zip(parts, states, strict=True)]
            body.extend(half.around(*copies))
        body.extend(half.around(*update(low, half.index, [load(b, half.index) for b in high])))
        buffers += [*low, *high]
        states, held = low, ()
    return Halves(tuple(body), tuple(buffers), states, held, lanes)
