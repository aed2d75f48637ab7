"""Measures this computer's processor: bursts of arithmetic and of memory traffic by a small C program, in a process of
its own since an instruction may turn out not to be there; and what meeting costs, as the team of workers does it."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tilewright.runtime import (
    BufferRef,
    Cache,
    CompileError,
    Compiler,
    CpuModel,
    KernelStage,
    ModelImage,
    ModelRunError,
    NativeMachine,
    build,
    compile_shared,
    default_flags,
    find_compiler,
    this_machine,
)
from tilewright.runtime.cores import usable_cores
from tilewright.runtime.ownership import ForeignError, loadable_name, opened
from tilewright.target.machine import MemoryLevel, Target

VERSION = 2  # of what is measured, and how: kept figures of another version are measured again
_SOURCE = Path(__file__).with_name("native") / "probe.c"
# The instruction by the feature that gives it, and the macro that has it measured.
_EXTENSIONS = {
    "asimddp": ("sdot_int8", "TW_SDOT"),
    "avx512_vnni": ("vnni_int8", "TW_VNNI"),
    "avx_vnni": ("vnni_int8", "TW_AVX_VNNI"),
    "avx512_bf16": ("vdp_bf16", "TW_VDP_BF16"),
    "amx_bf16": ("amx_bf16", "TW_AMX_BF16"),
    "amx_int8": ("amx_int8", "TW_AMX_INT8"),
}
_PASSES = 3
_PATIENCE_SECONDS = 3.0
_FIGURE_SECONDS = 0.010
_TIMEOUT_SECONDS = 30.0
_MOST_MEMORY = 1 << 30
_LEAST_FAR = 8 << 20
_LEAST_BUSY = 0.4  # of what a unit does alone
_SHARED = ("read_L3", "read_DRAM", "write_L3", "write_DRAM")
_DISTURBED = "other programs kept it from measuring all units at once; 'tilewright devices --probe' measures anew"
_DIGITS = 2  # more would be noise, and another plan each time the machine is measured
_CALL = (
    "import ctypes, sys; a = sys.argv; size = ctypes.c_int64; "
    "sys.exit(ctypes.CDLL(a[1]).tw_probe(int(a[2]), *(size(int(v)) for v in a[3:7]), int(a[7]), "
    "*(ctypes.c_double(float(v)) for v in a[8:10])))"
)

_MEETINGS = 200
_TILES = 4000
_RUNS = 60
_MET = 0.9  # of the stages of a run, where every worker did its own tile
_LONGEST_MEETING = 50e-6  # seconds: hundreds of cores take some ten; more is a wait for what other programs have
_SLOT = 16  # elements that keep two workers' marks on different cache lines
# Each worker has a scratch of its own: its address in the slot of stage and tile tells who was there.
_VISIT = """#include <stdint.h>
void visit(void *const *buffers, const int64_t *extents, int64_t tile, char *scratch)
{
    ((uint64_t *)buffers[0])[(extents[0] + tile) * %d] = (uint64_t)(uintptr_t)scratch;
}
"""
_EMPTY = """#include <stdint.h>
void empty(void *const *buffers, const int64_t *extents, int64_t tile, char *scratch)
{
    (void)buffers, (void)extents, (void)tile, (void)scratch;
}
"""


class ProbeError(RuntimeError):
    """The machine could not be measured; the text says why."""


@dataclass(frozen=True)
class Figure:
    """Of one unit: multiply-adds, bytes or cycles a second, alone and with all units busy."""

    alone: float
    busy: float


def probe(usual: Target, compiler_name: str | None, cache: Cache) -> tuple[Target, str]:
    """The machine with measured rates in place of the usual ones, and a remark on what could not be measured.

    Raises ProbeError, or what the toolchain and the cache raise."""
    compiler, machine = find_compiler(compiler_name), this_machine()
    features = frozenset(usual.features)
    try:
        library, remark = compile_probe(usual, features, compiler, machine, cache), ""
    except CompileError:
        features = features - set(_EXTENSIONS)
        library = compile_probe(usual, features, compiler, machine, cache)
        remark = "the C compiler does not know all of its instructions"
    found, ended = run_probe(library, usual)
    figures = {name: plausible(name, figure, usual.units) for name, figure in found.items()}
    disturbed = _DISTURBED if figures != found else ""
    costs = meeting_costs(usual.units, compiler, machine, cache)
    if costs is None:
        disturbed = _DISTURBED
    return with_figures(usual, figures, costs), "; ".join(filter(None, (remark, ended, disturbed)))


def plausible(name: str, figure: Figure, units: int) -> Figure:
    """The figure; of all units busy a guess, where other programs must have kept some of them from running.

    What units share is at least as fast for all together as for one. What a unit has for itself may be halved by
    another thread of the same core, and lose some clock."""
    if name in _SHARED:
        return replace(figure, busy=max(figure.busy, figure.alone / units))
    return figure if figure.busy >= _LEAST_BUSY * figure.alone else replace(figure, busy=figure.alone)


def probe_flags(target: Target, features: frozenset[str]) -> tuple[str, ...]:
    macros = [macro for feature, (_, macro) in _EXTENSIONS.items() if feature in features]
    sizes = (f"-DVECTOR_BYTES={target.vector_bytes}", f"-DVECTOR_REGISTERS={target.vector_registers}")
    return (*sizes, *(f"-D{macro}" for macro in macros))


def probe_source() -> str:
    return _SOURCE.read_text()


def compile_probe(
    target: Target, features: frozenset[str], compiler: Compiler, machine: NativeMachine, cache: Cache
) -> Path:
    flags = (*default_flags(compiler, machine), *probe_flags(target, features))
    return compile_shared(probe_source(), compiler, machine, cache, flags=flags, name="probe")


def sets(target: Target, physical_bytes: int) -> tuple[int, int, int, int]:
    """Bytes one worker moves at L1, L2, the outer cache (0: there is none) and in main memory.

    Half a cache is surely in it; beyond the L2 a set must not fit the L2, and in main memory not the outer cache."""
    near, middle = target.nearest.capacity, target.local.capacity
    outer = target.shared_cache.capacity if target.shared_cache is not None else 0
    far = max(4 * max(outer, middle), _LEAST_FAR)
    far = min(far, max(_LEAST_FAR, min(_MOST_MEMORY, physical_bytes // 8) // target.units))
    return near // 2, middle // 2, max(outer // 2, 2 * middle) if outer else 0, far


def run_probe(library: Path, target: Target) -> tuple[dict[str, Figure], str]:
    """What the program printed, and how it ended where it did not end well."""
    numbers = (target.units, *sets(target, physical_memory()), _PASSES, _PATIENCE_SECONDS, _FIGURE_SECONDS)
    call = [sys.executable, "-I", "-S", "-c", _CALL]
    try:
        with opened(library) as file:
            command = [*call, loadable_name(file, library), *(str(n) for n in numbers)]
            done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_SECONDS, check=False,
                                  pass_fds=(file.fileno(),))  # fmt: skip
        printed, status = done.stdout, done.returncode
    except subprocess.TimeoutExpired as late:
        printed, status = late.stdout or b"", None
    except ForeignError as error:
        raise ProbeError(str(error)) from error
    except OSError as error:
        raise ProbeError(f"the measuring program cannot be started: {error.strerror}") from error
    figures = parse_figures(printed.decode(errors="replace"))
    if missing := [name for name in _needed(target) if name not in figures]:
        raise ProbeError(f"the measuring program {_ending(status)} before {missing[0]} was measured")
    return figures, "" if status == 0 else f"the measuring program {_ending(status)}"


def parse_figures(text: str) -> dict[str, Figure]:
    """`name alone busy` lines, the last of a name counts; the line that a crash cut off does not."""
    figures: dict[str, Figure] = {}
    for line in text.splitlines():
        parts = line.split()
        try:
            name, alone, busy = parts[0], float(parts[1]), float(parts[2])
        except (IndexError, ValueError):
            continue
        if len(parts) == 3 and 0 < alone < math.inf and 0 < busy < math.inf:
            figures[name] = Figure(max(alone, busy), busy)
    return figures


def with_figures(usual: Target, figures: Mapping[str, Figure], costs: tuple[float, float] | None) -> Target:
    """The target with rounded figures. An instruction that did not run is not a feature of this machine."""
    fma, clock = figures["fma_float32"], figures["clock"]
    extensions = {instruction: feature for feature, (instruction, _) in _EXTENSIONS.items()}
    rates = [("fma_float32", rounded(fma.busy))]
    rates += [(name, rounded(figures[name].busy)) for name in extensions if name in figures]
    absent = {f for f, (instruction, _) in _EXTENSIONS.items() if instruction not in figures}
    kernel_cost, tile_cost = costs or (usual.kernel_cost, usual.tile_cost)
    return replace(
        usual,
        fma_rate=rounded(fma.busy),
        fma_alone=rounded(fma.alone),
        fma_chains=max(1, round(fma.alone / figures["fma_chain"].alone)),
        clock=rounded(clock.alone),
        levels=_measured_levels(usual.levels, figures),
        features=tuple(f for f in usual.features if f not in absent),
        rates=tuple(rates),
        kernel_cost=rounded(kernel_cost),
        tile_cost=rounded(tile_cost),
    )


def _measured_levels(levels: Sequence[MemoryLevel], figures: Mapping[str, Figure]) -> tuple[MemoryLevel, ...]:
    """From main memory inwards: a nearer level is never slower than a farther one, only measured worse."""
    measured: list[MemoryLevel] = []
    least = MemoryLevel("", 0, 0, 0.0)
    for level in reversed(levels):
        if f"read_{level.name}" not in figures:
            measured.append(level)
            continue
        reading, writing = figures[f"read_{level.name}"], figures[f"write_{level.name}"]
        least = replace(
            level,
            bandwidth=max(least.bandwidth, rounded(reading.busy)),
            alone=max(least.alone, rounded(reading.alone)),
            write=max(least.write, rounded(writing.busy)),
        )
        measured.append(least)
    return tuple(reversed(measured))


def meeting_costs(workers: int, compiler: Compiler, machine: NativeMachine, cache: Cache) -> tuple[float, float] | None:
    """Seconds from one stage to the next, and to hand out a tile that does nothing; None without threads, and where
    other programs had the cores: a worker that waits for one makes a meeting last a thousand times as long."""
    marks = np.zeros(_MEETINGS * workers * _SLOT, np.uint64)
    visits = tuple(
        KernelStage("visit", workers, (BufferRef("output", 0),), scratch_bytes=64, balance="static", first_extent=i)
        for i in range(_MEETINGS)
    )
    extents = tuple(i * workers for i in range(_MEETINGS))
    meeting = ModelImage({"visit": _VISIT % _SLOT}, visits, (), (marks.nbytes,), extents=extents)
    handing = ModelImage({"empty": _EMPTY}, (KernelStage("empty", _TILES * workers, ()),), (), ())

    def model(image: ModelImage) -> CpuModel:
        flags = default_flags(compiler, machine)
        return CpuModel(build(image, compiler, flags, machine, cache, jobs=usable_cores()), workers)

    try:
        with model(meeting) as stages, model(handing) as tiles:
            runs = [(_elapsed(lambda: stages.run((), (marks,))), met(marks, workers)) for _ in range(_RUNS)]
            handed = min(_elapsed(lambda: tiles.run((), ())) for _ in range(_RUNS))
    except ModelRunError:
        return None
    a_meeting = meeting_seconds(runs)
    return None if a_meeting is None else (a_meeting, handed / _TILES)


def meeting_seconds(runs: Sequence[tuple[float, float]]) -> float | None:
    """Of one meeting, from the seconds of runs and the share of stages where workers met; None where they never did:
    where a worker is away the others do its tiles and wait for nobody, or wait as long as another program has its
    core."""
    together = [seconds / _MEETINGS for seconds, share in runs if share >= _MET]
    return min((seconds for seconds in together if seconds <= _LONGEST_MEETING), default=None)


def met(marks: NDArray[np.uint64], workers: int) -> float:
    """The share of the stages where every tile was done by another worker."""
    who = marks[::_SLOT].reshape(-1, workers)
    return float(np.mean([len(set(row.tolist())) == workers for row in who]))


def _elapsed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS - 1}e}")


def physical_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 1 << 30


def _needed(target: Target) -> list[str]:
    levels = [level.name for level in target.levels[1:]]
    return ["clock", "fma_chain", "fma_float32", *(f"{way}_{name}" for way in ("read", "write") for name in levels)]


def _ending(status: int | None) -> str:
    if status is None:
        return f"did not end within {_TIMEOUT_SECONDS:.0f} s"
    if status < 0:
        return f"died of {signal.Signals(-status).name}"
    return f"ended with status {status}"
