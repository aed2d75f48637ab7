"""Folds the lanes of vector accumulators by halves: lane after lane, a wide vector is taken apart through one port of
the processor, and each add waits for the one before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tilewright.ir.forms.dtypes import DType
from tilewright.ir.forms.expr import Axis, Expr, const, load, var
from tilewright.ir.forms.loops import Buffer, Stmt, Store
from tilewright.lower.register_block import RegisterBlock
from tilewright.target.instruction_sets import NARROWEST_BYTES
from tilewright.tile_graph.algebra.propagate import Size

MakeStates = Callable[[tuple[int, ...], str], list[Buffer]]
Update = Callable[[Sequence[Buffer], tuple[Expr, ...], Sequence[Expr]], tuple[Stmt, ...]]
MoreOf = Callable[[Sequence[Buffer], int], tuple[Stmt, ...]]  # what states with so many lanes take beside


@dataclass(frozen=True)
class Halves:
    """What is left to fold lane by lane, and the statements and buffers that led there."""

    body: tuple[Stmt, ...]
    buffers: tuple[Buffer, ...]
    states: Sequence[Buffer]
    chain: tuple[Expr, ...]  # the index of the chain that holds it, where the states still have several
    lanes: int


def halved(
    block: RegisterBlock, states: Sequence[Buffer], chains: int, lanes: int, make: MakeStates, update: Update,
    more_of: MoreOf,
) -> Halves:  # fmt: skip
    """Chains combined vector by vector, then halves of the vector while it is wider than the narrowest; a half takes
    what the sum has left over for so many lanes."""
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
    while lanes > narrowest(s.dtype for s in states):
        lanes //= 2
        half = RegisterBlock(block.env, block.unrolled, Axis("lane", lanes))
        assert half.lane is not None
        low, high = make(half.shape, "low"), make(half.shape, "high")
        for parts, start in ((low, 0), (high, lanes)):
            place = (*block.index, *held, var(half.lane) + start)
            copies = [Store(part, half.index, load(s, place)) for part, s in zip(parts, states, strict=True)]
            body.extend(half.around(*copies))
        body.extend(half.around(*update(low, half.index, [load(b, half.index) for b in high])))
        body.extend(more_of(low, lanes))
        buffers += [*low, *high]
        states, held = low, ()
    return Halves(tuple(body), tuple(buffers), states, held, lanes)


def narrowest(types: Iterable[DType]) -> int:
    """Lanes of the narrowest vectors that hold states of these types."""
    return NARROWEST_BYTES // max(t.bytes for t in types)


def parts_of(length: Size, lanes: int, narrow: int) -> Size:
    """How many halves of a vector, and halves of those down to the narrowest, hold what whole vectors leave over."""
    found: Size = 0
    half = lanes // 2
    while half >= narrow:
        found = found + length // half % 2
        half //= 2
    return found
