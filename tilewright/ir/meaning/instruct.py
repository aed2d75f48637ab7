"""How the interpreter of Loops runs instructions: a table from name to meaning, with warp shuffles as first entries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Protocol

import numpy as np

from tilewright.ir.forms.expr import Expr
from tilewright.ir.forms.loops import PREFETCH, PREFETCH_BESIDE, PREFETCH_TILE, Buffer, ForKind, Instruction, Operand

WARP = 32

Value = Any  # an array over the lanes, or a Python number where all lanes agree (indices mostly do)
Mask = np.ndarray | None  # which lanes are active; None is all


@dataclass(frozen=True, eq=False)
class Lanes:
    """A loop in lock-step. A new loop becomes the first dimension, so outer values broadcast as they are."""

    kind: ForKind
    count: int
    position: int  # how many lock-step loops are around

    @cached_property
    def index(self) -> np.ndarray:
        return np.arange(self.count).reshape(self.count, *(1,) * self.position)


class RunsInstructions(Protocol):
    """What an instruction's meaning asks of the machine that runs it."""

    lanes: list[Lanes]
    groups: list[list[tuple[Buffer, Sequence[Value], Value, Mask]]]

    def value(self, root: Expr, mask: Mask) -> Value: ...
    def load(self, buffer: Buffer, indices: Sequence[Value], mask: Mask) -> Value: ...
    def store(self, buffer: Buffer, indices: Sequence[Value], value: Value, mask: Mask) -> None: ...
    def issue(self, buffer: Buffer, indices: Sequence[Value], value: Value, mask: Mask) -> None: ...
    def land(self, pending: int) -> None: ...
    def fault(self, what: str) -> Exception: ...


class InstructionContext:
    """What an instruction's meaning may touch: operands by offsets from their origin, scalars, lanes."""

    def __init__(self, machine: RunsInstructions, instruction: Instruction, mask: Mask) -> None:
        self._machine = machine
        self._mask = mask
        self._operands = instruction.operands
        self._origins = [[machine.value(i, mask) for i in o.origin] for o in instruction.operands]
        self.name = instruction.name
        self.scalars = [machine.value(s, mask) for s in instruction.scalars]

    @property
    def depth(self) -> int:
        """How many lock-step loops are around: trailing dimensions of every value."""
        return len(self._machine.lanes)

    def _run(self, number: int, offsets: np.ndarray) -> list[Value]:
        """Positions that many elements behind the operand's origin in storage."""
        shape = self._operands[number].buffer.shape
        flat: Value = 0
        for index, size in zip(self._origins[number], shape, strict=True):
            flat = flat * size + index
        flat = flat + offsets
        places: list[Value] = []
        for size in reversed(shape[1:]):
            places.append(flat % size)
            flat = flat // size
        return [flat, *reversed(places)]

    def read_run(self, number: int, offsets: np.ndarray) -> np.ndarray:
        return np.asarray(self._machine.load(self._operands[number].buffer, self._run(number, offsets), self._mask))

    def write_run(self, number: int, value: Value, offsets: np.ndarray) -> None:
        self._machine.store(self._operands[number].buffer, self._run(number, offsets), value, self._mask)

    @property
    def mask(self) -> Mask:
        return self._mask

    def operand(self, number: int) -> Operand:
        return self._operands[number]

    def read(self, number: int, offsets: Sequence[Value] = ()) -> np.ndarray:
        buffer = self._operands[number].buffer
        return np.asarray(self._machine.load(buffer, self._places(number, offsets), self._mask))

    def write(self, number: int, value: Value, offsets: Sequence[Value] = ()) -> None:
        self._machine.store(self._operands[number].buffer, self._places(number, offsets), value, self._mask)

    def _places(self, number: int, offsets: Sequence[Value]) -> list[Value]:
        origin = self._origins[number]
        shift = (*(0,) * (len(origin) - len(offsets)), *offsets)
        return [o + s for o, s in zip(origin, shift, strict=True)]

    @property
    def threads(self) -> int:
        return prod(lane.count for lane in self._machine.lanes if lane.kind is ForKind.THREAD)

    def thread_number(self) -> np.ndarray:
        """Of every thread of a block, as values are; the innermost loop counts fastest."""
        number: Value = 0
        for lane in (lane for lane in self._machine.lanes if lane.kind is ForKind.THREAD):
            number = number * lane.count + lane.index
        return np.asarray(number)

    def origin(self, number: int) -> list[Value]:
        return self._origins[number]

    def read_where(self, number: int, offsets: Sequence[Value], condition: Value) -> np.ndarray:
        """What lies there where the condition holds, zero elsewhere."""
        holds = np.asarray(condition, np.bool_)
        mask = holds if self._mask is None else holds & self._mask
        found = self._machine.load(self._operands[number].buffer, self._places(number, offsets), mask)
        return np.where(holds, found, np.zeros_like(found))

    def issue(self, number: int, value: Value, offsets: Sequence[Value]) -> None:
        """A write that happens at the wait for it."""
        self._machine.issue(self._operands[number].buffer, self._places(number, offsets), value, self._mask)

    def commit(self) -> None:
        self._machine.groups.append([])

    def wait(self, pending: int) -> None:
        self._machine.land(pending)

    def by_warp(self, value: np.ndarray) -> np.ndarray:
        """A value of every thread as (warps, lanes, other lock-step loops); a warp takes part as a whole."""
        if self._mask is not None:
            parts = self._front(np.asarray(self._mask)).reshape(-1, WARP, self._others)
            if np.any(parts.any(1) != parts.all(1)):
                raise self._machine.fault(f"{self.name} is executed by a part of a warp")
        if self.threads % WARP:
            raise self._machine.fault(f"{self.name} is executed by a part of a warp")
        return self._front(value).reshape(-1, WARP, self._others)

    def from_warps(self, value: np.ndarray) -> np.ndarray:
        """The same back."""
        lanes = self._machine.lanes
        counts = [lane.count for lane in reversed(lanes)]
        places = self._thread_places()
        rest = [n for d, n in enumerate(counts) if d not in places]
        front = value.reshape([counts[d] for d in places] + rest)
        return np.moveaxis(front, range(len(places)), places)

    @property
    def _others(self) -> int:
        return prod(lane.count for lane in self._machine.lanes if lane.kind is not ForKind.THREAD)

    def _thread_places(self) -> list[int]:
        # lane p is array dimension len(lanes) - 1 - p; outer thread loops first, so the innermost is fastest
        lanes = self._machine.lanes
        return [len(lanes) - 1 - lane.position for lane in lanes if lane.kind is ForKind.THREAD]

    def _front(self, value: np.ndarray) -> np.ndarray:
        """The dimensions of threads first."""
        full = np.broadcast_to(value, [lane.count for lane in reversed(self._machine.lanes)])
        places = self._thread_places()
        return np.moveaxis(full, places, range(len(places)))

    def from_threads(self, value: np.ndarray, partner: np.ndarray) -> np.ndarray:
        """For each thread of a block what thread `partner[thread]` holds; the innermost loop counts fastest."""
        partner_mask = True if self._mask is None else self._permuted(self._mask, partner)
        if self._mask is not None and np.any(self._mask & ~np.asarray(partner_mask)):
            raise self._machine.fault(f"{self.name} reads from a thread that does not take part")
        return self._permuted(value, partner)

    def _permuted(self, value: np.ndarray, partner: np.ndarray) -> np.ndarray:
        places = self._thread_places()
        front = self._front(value)
        flat = front.reshape(len(partner), -1)[partner]
        return np.moveaxis(flat.reshape(front.shape), range(len(places)), places)


Meaning = Callable[[InstructionContext], None]


def _shuffle(context: InstructionContext, partner: np.ndarray, width: int) -> None:
    own = np.arange(context.threads)
    inside = (partner // width == own // width) & (partner < context.threads)
    context.write(0, context.from_threads(context.read(1), np.where(inside, partner, own)))


def _shuffle_xor(context: InstructionContext) -> None:
    mask, *width = (int(s) for s in context.scalars)
    # lanes farther apart than this warp is wide are those of a machine with wider ones
    _shuffle(context, np.arange(context.threads) ^ mask, width[0] if width else max(WARP, 1 << mask.bit_length()))


def _shuffle_down(context: InstructionContext) -> None:
    offset, width = (*context.scalars, WARP)[:2]
    _shuffle(context, np.arange(context.threads) + int(offset), int(width))


def _prefetch(context: InstructionContext) -> None:
    """Only a hint: nothing is read, and the place may lie outside the buffer."""


INSTRUCTIONS: Mapping[str, Meaning] = {
    "shuffle_xor": _shuffle_xor,
    "shuffle_down": _shuffle_down,
    PREFETCH: _prefetch,
    PREFETCH_BESIDE: _prefetch,
    PREFETCH_TILE: _prefetch,
}
