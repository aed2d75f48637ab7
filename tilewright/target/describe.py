"""Descriptions of the machines we plan for: this CPU, read from the system, and NVIDIA GPUs by architecture."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from tilewright.errors import OptionError
from tilewright.target.machine import MemoryLevel, Target

_FEATURES = (
    "avx2", "fma", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8",
    "asimd", "asimddp", "i8mm", "bf16",
)  # fmt: skip
_SYSFS = Path("/sys/devices/system/cpu/cpu0/cache")


def machine(name: str = "cpu", threads: int | None = None) -> Target:
    """The target of that name; `threads` never changes it, because plans must not depend on the thread count."""
    if name == "cpu":
        return _this_cpu()
    if name in ("cuda", "cuda-emulated"):
        return _hopper(name)
    raise OptionError(f"unknown target '{name}': choose cpu, cuda or cuda-emulated")


def _this_cpu() -> Target:
    architecture = platform.machine()
    flags = _cpu_flags()
    vector_bytes, registers = 16, 32
    if architecture in ("x86_64", "AMD64"):
        architecture = "x86_64"
        vector_bytes, registers = (64, 32) if "avx512f" in flags else (32, 16) if "avx2" in flags else (16, 16)
    caches = _cache_sizes()
    level1 = caches.get(1, 32 << 10)
    level2 = caches.get(2, 512 << 10)
    fma = 2 * (vector_bytes // 4) * 2.5e9  # two vector FMA pipes at a common sustained clock
    levels = (
        MemoryLevel("registers", vector_bytes * registers, vector_bytes, 4e11),
        MemoryLevel("L1", level1, 64, 1.2e11),
        MemoryLevel("L2", level2, 64, 4e10),
        MemoryLevel("DRAM", 1 << 40, 64, 1.2e10),
    )
    features = tuple(f for f in _FEATURES if f in flags)
    return Target("cpu", "cpu", architecture, _usable_cores(), vector_bytes, registers, fma, levels, 0.5e-6,
                  lane_multiply=architecture == "aarch64", features=features)  # fmt: skip


def _hopper(name: str) -> Target:
    """An H200: 132 multiprocessors, 227 KB of shared memory a block, 64K registers; rates measured."""
    levels = (
        MemoryLevel("registers", 255 * 4, 4, 1e13),
        MemoryLevel("shared", 227 << 10, 128, 2.0e11),
        MemoryLevel("DRAM", 141 << 30, 32, 4.3e12 / 132),
    )
    return Target(name, "gpu", "sm_90", 132, 16, 255, 128 * 1.755e9, levels, 0.55e-6, warp=32, max_threads=1024)


def _usable_cores() -> int:
    """The cores this process may run on, which a container or taskset may have made fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.lower().startswith(("flags", "features")):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()


def _cache_sizes() -> dict[int, int]:
    """Data cache bytes by level, as the kernel tells them; a private cache only where it says so."""
    sizes: dict[int, int] = {}
    for index in sorted(_SYSFS.glob("index*")):
        try:
            if (index / "type").read_text().strip() == "Instruction":
                continue
            text = (index / "size").read_text().strip()
            level = int((index / "level").read_text())
        except (OSError, ValueError):
            continue
        factor = {"K": 1 << 10, "M": 1 << 20}.get(text[-1], 1)
        sizes[level] = int(text.rstrip("KM")) * factor
    return sizes
