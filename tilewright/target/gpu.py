"""The GPU that CUDA code is planned for: this machine's as its driver and the probe tell, or a usual one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from tilewright.runtime import Cache
from tilewright.runtime.cuda_device import CudaDevice, CudaError, devices
from tilewright.runtime.nvrtc import NvrtcError
from tilewright.target.kept import kept
from tilewright.target.machine import MemoryLevel, Target
from tilewright.target.probe import ProbeError, rounded

_BARRIERS = {"grid": "grid_barrier", "cluster": "cluster_barrier", "dependent_launch": "dependent_launch"}
_GROUPS = "wgmma_"
_FIRST = {"mma_e4m3": "sm_89"}  # architecture that has it
_RATES = ("fma_float32", "mma_float16", "mma_bfloat16", "mma_tf32", "mma_int8", "mma_e4m3", "wgmma_float16",
          "wgmma_bfloat16", "wgmma_tf32", "wgmma_int8", "wgmma_e4m3")  # fmt: skip


def gpu(name: str, usual: Target, cache_dir: Path | None, *, tell: Callable[[str], None] | None = None) -> Target:
    """The first GPU of this machine, measured once and kept; the usual one where code is only emulated, where there is
    none, and where nothing may be kept."""
    usual = replace(usual, name=name)
    found = devices() if name == "cuda" and cache_dir is not None else ()
    if not found or cache_dir is None:
        return usual
    device = found[0]
    here = described(usual, device)
    from tilewright.target.gpu_probe import VERSION

    about = (str(VERSION), device.name, device.arch)
    return kept(here, cache_dir, about, lambda cache: _measure(here, device, cache), tell=tell)


def described(usual: Target, device: CudaDevice) -> Target:
    """What the driver says of a device, the rates being the usual ones until they are measured."""
    sizes = {"shared": device.shared_bytes, "L2": device.l2_bytes // device.multiprocessors,
             "DRAM": device.memory_bytes}  # fmt: skip
    levels = tuple(
        replace(level, capacity=sizes.get(level.name, level.capacity),
                shared_by=device.multiprocessors if level.shared_by > 1 else 1)
        for level in usual.levels
    )  # fmt: skip
    # instructions of one architecture alone are none of another's, nor later ones an earlier's
    rates = tuple(
        r for r in usual.rates
        if device.arch == usual.architecture or not (r[0].startswith(_GROUPS) or device.arch < _FIRST.get(r[0], ""))
    )  # fmt: skip
    return replace(usual, architecture=device.arch, units=device.multiprocessors, levels=levels, rates=rates)


def _measure(here: Target, device: CudaDevice, cache: Cache) -> tuple[Target, str]:
    from tilewright.target.gpu_probe import GpuProbe

    try:
        figures = GpuProbe(device.index, cache).figures()
    except (CudaError, NvrtcError) as error:
        raise ProbeError(str(error)) from error
    return with_figures(here, figures), ""


def with_figures(here: Target, figures: Mapping[str, float]) -> Target:
    """The target with rounded figures, those of the whole device shared out over its multiprocessors."""

    def each(name: str) -> float:
        return rounded(figures[name] / here.units)

    def measured(level: MemoryLevel) -> MemoryLevel:
        if f"read_{level.name}" not in figures:
            return level
        write = each(f"write_{level.name}") if f"write_{level.name}" in figures else 0.0
        return replace(level, bandwidth=each(f"read_{level.name}"), write=write,
                       latency=rounded(figures[f"latency_{level.name}"]))  # fmt: skip

    return replace(
        here, fma_rate=each("fma_float32"), clock=rounded(figures["clock"]),
        levels=tuple(measured(level) for level in here.levels),
        kernel_cost=rounded(figures["launch"]),
        rates=tuple((name, each(name)) for name in _RATES if name in figures),
        barriers=tuple((scope, rounded(figures[name])) for scope, name in _BARRIERS.items() if name in figures),
    )  # fmt: skip
