"""What the compiler knows of a machine: memory levels, units, vector registers and costs, as frozen data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class MemoryLevel:
    """One level of the hierarchy, nearest first; `bandwidth` is bytes a second for one unit, all units busy."""

    name: str
    capacity: int  # bytes one unit may use
    transaction: int  # bytes moved at once
    bandwidth: float
    shared_by: int = 1  # units that share the capacity


@dataclass(frozen=True)
class Target:
    name: str  # "cpu", "cuda", "cuda-emulated"
    kind: str  # "cpu" or "gpu"
    architecture: str  # "aarch64", "x86_64", "sm_90"
    units: int  # cores or multiprocessors
    vector_bytes: int  # width of a vector register; on a GPU the widest access of a thread
    vector_registers: int
    fma_rate: float  # float32 multiply-adds a second and unit
    levels: tuple[MemoryLevel, ...]  # registers first, main memory last
    kernel_cost: float  # seconds to start a kernel (CPU: the barrier before it)
    warp: int = 1  # threads that run in lock-step
    max_threads: int = 1  # of a block
    lane_multiply: bool = False  # a multiply-add can take one lane of a register as its scalar operand (NEON)
    features: tuple[str, ...] = ()
    rates: tuple[tuple[str, float], ...] = ()  # multiply-adds a second and unit by instruction, where it has others

    def level(self, name: str) -> MemoryLevel:
        return next(level for level in self.levels if level.name == name)

    @property
    def tile_level(self) -> MemoryLevel:
        """Where intermediate tiles of connected computes live: a core's L2, a block's shared memory."""
        return self.level("shared" if self.kind == "gpu" else "L2")

    @property
    def main(self) -> MemoryLevel:
        return self.levels[-1]

    def rate(self, instruction: str) -> float | None:
        """Multiply-adds a second and unit of an instruction of the intrinsics table; None where there is none."""
        return dict(self.rates).get(instruction)

    def lanes(self, element_bytes: int) -> int:
        return max(1, self.vector_bytes // element_bytes)

    def describe(self) -> dict[str, Any]:
        return asdict(self)
