"""What the compiler knows of a machine: memory levels, units, vector registers and costs, as frozen data."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from math import gcd
from typing import Any

CONSTANTS = "constants"
_INSTRUCTION_BYTES = 6  # four on Arm; on x86 5 to 6 with wide vectors, by what compilers make of vector mathematics


@dataclass(frozen=True)
class MemoryLevel:
    """One level of the hierarchy, nearest first; `bandwidth` is bytes read a second by one unit, all units busy."""

    name: str
    capacity: int  # bytes one unit may use; of a level that several share, its part
    transaction: int  # bytes moved at once
    bandwidth: float
    shared_by: int = 1  # units that share the level: together they have capacity x shared_by
    alone: float = 0.0  # bytes read a second by one unit while the others rest; 0: not measured
    write: float = 0.0  # bytes written a second by one unit, all units busy; 0: not measured
    latency: float = 0.0  # seconds from a read to the next that depends on it; 0: not measured
    scratchpad: bool = False  # holds what kernels copy there themselves; a cache keeps what passes through it

    @property
    def writing(self) -> float:
        return self.write or self.bandwidth


def usual_costs(architecture: str, near_capacity: int) -> dict[str, Any]:
    """Fields of a Target that are not measured yet, as processors of an architecture usually are.

    Arm loads into a lane; x86 loads and inserts, all inserts through one port: 0.9 cycles a lane with registers to
    spare, 1.7 without, in the code of gcc 12 for AVX-512 by llvm-mca, where two reads a cycle are the measure. On x86
    a way of the first cache is a page, on Arm four ways are usual. A Neoverse N1's prefetcher loses rows a few lines
    long that take turns; on x86 it follows one stream a page, more of them than a register tile has rows.
    """
    if architecture != "x86_64":
        return {}
    return {"gathered_reads": 2.2, "near_ways": max(1, near_capacity // 4096), "stream_cost": 0.0}


@dataclass(frozen=True)
class Target:
    name: str  # "cpu", "cuda", "cuda-emulated", or a name of its own for a CPU described by hand
    kind: str  # "cpu" or "gpu"
    architecture: str  # "aarch64", "x86_64", "sm_90"; "any" for a CPU whose code is to run wherever it can
    units: int  # cores or multiprocessors
    vector_bytes: int  # width of a vector register; on a GPU the widest access of a thread
    vector_registers: int
    fma_rate: float  # float32 multiply-adds a second and unit, all units busy
    # Registers first, main memory last. What a level is for follows from what it is, not from its name: `nearest`,
    # `local` and `shared_cache` are a core's L1, its L2 and the L3; a block's shared memory, the same, and the L2.
    levels: tuple[MemoryLevel, ...]
    kernel_cost: float  # seconds to start a kernel (CPU: the barrier before it)
    warp: int = 1  # threads that run in lock-step
    max_threads: int = 1  # of a block
    schedulers: int = 1  # of a unit, each of which issues for warps of its own
    resident_threads: int = 1  # of a unit at a time
    register_file: int = 1  # registers of 32 bits that a unit's threads share
    written_copies: int = 1 << 20  # of a sum written out, beyond which the assembler runs out of registers
    under_way: int = 16  # bytes that a thread asks for before it uses the first of them
    lane_multiply: bool = False  # a multiply-add can take one lane of a register as its scalar operand (NEON)
    features: tuple[str, ...] = ()
    rates: tuple[tuple[str, float], ...] = ()  # multiply-adds a second and unit by instruction, where it has others
    fma_alone: float = 0.0  # fma_rate while the other units rest; 0: not measured
    pipes: int = 2  # vector multiply-adds that begin in a cycle, and vectors that are loaded
    fma_chains: int = 8  # independent vector multiply-adds that must be under way at once to reach fma_rate
    clock: float = 0.0  # cycles a second; 0: not measured
    tile_cost: float = 60e-9  # seconds to start a tile of a kernel; as measured, to hand out one that does nothing
    gathered_reads: float = 1.5  # reads that a lane costs whose element is no neighbour of the one before
    near_ways: int = 4  # ways of the first cache
    instruction_cache: int = 32768  # bytes of a unit's first cache of instructions
    stream_cost: float = 0.12  # of the time rows take from main memory, what each further row beside the first adds
    lane_check: float = 0.8  # cycles of a lane that asks by itself which of several places it reads
    foreign: float = 0.5  # the part of an activation that another unit wrote, where there are many
    cold_start: float = 0.25e-6  # seconds until a kernel has its code and the first lines it reads, others having run
    link: float = 0.0  # of a GPU: bytes a second between its memory and the host's, in each direction; 0: not known
    barriers: tuple[tuple[str, float], ...] = ()  # of a GPU: seconds by what waits (grid, cluster, dependent launch)
    source: str = field(default=CONSTANTS, compare=False)  # where the numbers come from; the same machine all the same

    def level(self, name: str) -> MemoryLevel:
        return next(level for level in self.levels if level.name == name)

    def place(self, level: MemoryLevel) -> int:
        """Of a level among all of them, registers being the first."""
        return self.levels.index(level)

    def nearer(self, level: MemoryLevel) -> tuple[MemoryLevel, ...]:
        """The memories between the registers and a level."""
        return self.levels[1 : self.place(level)]

    def beyond(self, level: MemoryLevel) -> tuple[MemoryLevel, ...]:
        """The memories farther away than a level, main memory last."""
        return self.levels[self.place(level) + 1 :]

    def with_level(self, level: MemoryLevel, **changes: Any) -> Target:
        """The same machine but for one of its levels."""
        place = self.place(level)
        return replace(self, levels=(*self.levels[:place], replace(level, **changes), *self.levels[place + 1 :]))

    @property
    def registers(self) -> MemoryLevel:
        return self.levels[0]

    @property
    def nearest(self) -> MemoryLevel:
        """The memory next to the registers."""
        return self.levels[1]

    @cached_property
    def caches(self) -> tuple[MemoryLevel, ...]:
        """The levels that keep what passes through them, nearest first."""
        return tuple(level for level in self.nearer(self.main) if not level.scratchpad)

    @cached_property
    def local(self) -> MemoryLevel:
        """Where a unit keeps the tiles of connected computes: its scratchpad; else the farthest cache that it has to
        itself, the nearest apart, which is for what a register tile reads; else the nearest but one."""
        scratchpad = next((level for level in reversed(self.levels) if level.scratchpad), None)
        if scratchpad is not None:
            return scratchpad
        first = next((self.place(level) for level in self.caches if level.shared_by > 1), 0)  # that units share
        return self.levels[max(2, first - 1)]

    @property
    def copies_tiles(self) -> bool:
        """Whether kernels copy operands into a unit's memory themselves; a cache fills by itself."""
        return self.local.scratchpad

    @property
    def lanes_are_threads(self) -> bool:
        """Whether the lanes of a vector are threads that read each for itself; registers hold neighbours in memory."""
        return self.warp > 1

    @cached_property
    def beyond_local(self) -> MemoryLevel:
        """Where a unit finds what it does not keep: the cache that units share, or main memory."""
        return self.beyond(self.local)[0]

    @cached_property
    def shared_cache(self) -> MemoryLevel | None:
        """The cache that units share before main memory, where it is large enough to count."""
        return self.beyond_local if self.beyond_local is not self.main else None

    @cached_property
    def shared_room(self) -> int:
        """Bytes of the shared cache that may be counted on between two uses, all units together: half of it, the rest
        is for what passes."""
        return 0 if self.shared_cache is None else self.shared_cache.capacity * self.shared_cache.shared_by // 2

    @cached_property
    def main(self) -> MemoryLevel:
        return self.levels[-1]

    def rate(self, instruction: str) -> float | None:
        """Multiply-adds a second and unit of an instruction of the intrinsics table; None where there is none."""
        return dict(self.rates).get(instruction)

    @property
    def fma_clock(self) -> float:
        """Cycles a second while vectors are multiplied."""
        return self.fma_rate / (self.pipes * self.lanes(4))

    @property
    def fma_latency(self) -> float:
        """Cycles from one multiply-add to the next on its result."""
        return self.fma_chains / self.pipes

    def lines_held(self, step: int) -> int:
        """Lines so many bytes apart that the first cache holds beside what else is read: they fall on some of its
        sets alone."""
        near = self.nearest
        way = near.capacity // self.near_ways
        return way // max(gcd(step, way), near.transaction) * max(1, self.near_ways * 3 // 4)

    @property
    def longest_loop(self) -> int:
        """Instructions of a loop that stays in the instruction cache."""
        return self.instruction_cache // _INSTRUCTION_BYTES

    @property
    def calls_together(self) -> int:
        """Functions of vector mathematics that run side by side, as many as the registers hold with their constants."""
        return 4 if self.vector_registers >= 32 else 2

    def lanes(self, element_bytes: int) -> int:
        return max(1, self.vector_bytes // element_bytes)

    def describe(self) -> dict[str, Any]:
        return asdict(self) | {"rates": dict(self.rates), "barriers": dict(self.barriers)}

    def to_json(self) -> str:
        """The description as text; `tilewright.target.by_hand.from_json` reads it back."""
        return json.dumps(self.describe(), indent=2) + "\n"
