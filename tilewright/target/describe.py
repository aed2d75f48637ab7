"""Descriptions of the machines we plan for: this CPU, NVIDIA GPUs by architecture, and what a file describes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tilewright.errors import OptionError
from tilewright.runtime.cores import usable_processors
from tilewright.target import system
from tilewright.target.by_hand import SUFFIX, read_cluster, read_target
from tilewright.target.cluster import Cluster
from tilewright.target.machine import MemoryLevel, Target, usual_costs

_FEATURES = (
    "avx2", "fma", "avx512f", "avx512bw", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8",
    "asimd", "asimddp", "i8mm", "bf16",
)  # fmt: skip
_STORED = Path(__file__).with_name("machines")
_CLUSTERS = _STORED / "clusters"
GPUS = ("cuda", "cuda-emulated")
_USUAL_GPU = "h200"  # what CUDA code is planned for where there is no GPU to ask
_CLOCK = 2.5e9  # a common sustained clock
# By instruction: the feature that gives it, and how many times the float32 multiply-adds it usually does.
_INSTRUCTIONS = {
    "sdot_int8": ("asimddp", 4),
    "vnni_int8": ("avx512_vnni", 4),
    "vdp_bf16": ("avx512_bf16", 1),
    "amx_bf16": ("amx_bf16", 16),
    "amx_int8": ("amx_int8", 32),
}


def machine(
    name: str = "cpu",
    threads: int | None = None,
    *,
    cache_dir: Path | None = None,
    compiler: str | None = None,
    tell: Callable[[str], None] | None = None,
) -> Target:
    """The target of that name: this CPU, a GPU, a description that comes with Tilewright, or one in a .json file.

    With a `cache_dir` this CPU is as measured: once, by a program that the C compiler makes, and kept there. Without,
    it is as its features usually are, which needs nothing and is the same on all machines of a kind.
    `threads` never changes it, because plans must not depend on the thread count.
    """
    if name.endswith(SUFFIX):
        return read_target(Path(name))
    if name == "cpu":
        usual = this_cpu()
        if cache_dir is None:
            return usual
        from tilewright.target.kept import measured

        return measured(usual, cache_dir, compiler, tell=tell)
    if name in GPUS:
        from tilewright.target.gpu import gpu

        return gpu(name, read_target(_STORED / f"{_USUAL_GPU}{SUFFIX}"), cache_dir, tell=tell)
    if name in stored_machines():
        return read_target(_STORED / f"{name}{SUFFIX}")
    known = ", ".join(("cpu", *GPUS, *stored_machines()))
    raise OptionError(f"unknown target '{name}': choose one of {known}, or a {SUFFIX} file")


def cluster(name: str, device: Callable[[str], Target] = machine) -> Cluster:
    """The cluster of that name: a description that comes with Tilewright, or one in a .json file. `device` finds the
    machine that it names."""
    if name.endswith(SUFFIX):
        return read_cluster(Path(name), device)
    known = stored_clusters()
    if name in known:
        return read_cluster(_CLUSTERS / f"{name}{SUFFIX}", device)
    raise OptionError(f"unknown cluster '{name}': choose one of {', '.join(known)}, or a {SUFFIX} file")


def stored_clusters() -> tuple[str, ...]:
    """Names of the clusters whose descriptions come with Tilewright."""
    return tuple(sorted(path.stem for path in _CLUSTERS.glob(f"*{SUFFIX}")))


def stored_machines(kind: str | None = None) -> tuple[str, ...]:
    """Names of the descriptions that come with Tilewright, to plan for a machine that is not at hand."""
    names = sorted(path.stem for path in _STORED.glob(f"*{SUFFIX}"))
    return tuple(n for n in names if kind is None or read_target(_STORED / f"{n}{SUFFIX}").kind == kind)


def this_cpu() -> Target:
    """This computer's processor: sizes from the system, rates from constants."""
    flags = system.cpu_flags()
    architecture = system.architecture()
    vector_bytes, registers = 16, 32
    if architecture == "x86_64":
        vector_bytes, registers = (64, 32) if "avx512f" in flags else (32, 16) if "avx2" in flags else (16, 16)
    usable = usable_processors()
    fma = 2 * (vector_bytes // 4) * _CLOCK  # two vector FMA pipes
    rates = [("fma_float32", fma)]
    rates += [(name, fma * times) for name, (feature, times) in _INSTRUCTIONS.items() if feature in flags]
    if "avx_vnni" in flags and "avx512_vnni" not in flags:
        rates.append(("vnni_int8", fma * 4))
    levels = _cpu_levels(vector_bytes, registers, system.data_caches(usable))
    plain = Target(
        "cpu", "cpu", architecture, len(usable), vector_bytes, registers, fma, levels, 0.5e-6,
        lane_multiply=architecture == "aarch64", features=tuple(f for f in _FEATURES if f in flags),
        rates=tuple(rates),
    )  # fmt: skip
    instructions = system.instruction_cache(usable) or plain.instruction_cache
    return replace(plain, **usual_costs(architecture, levels[1].capacity), instruction_cache=instructions)


def why_not_here(target: Target) -> str | None:
    """A description given by hand may be of another machine, which can be planned for but not run on."""
    here = this_cpu()
    missing = sorted(set(target.features) & set(_FEATURES) - set(here.features)) if here.features else []
    if target.architecture not in (here.architecture, "any"):
        return f"it is {target.architecture} and this machine is {here.architecture}"
    return f"this machine lacks {', '.join(missing)}" if missing else None


def _cpu_levels(vector_bytes: int, registers: int, caches: dict[int, system.CacheFacts]) -> tuple[MemoryLevel, ...]:
    level1 = caches.get(1, system.CacheFacts(32 << 10, 64, 1))
    level2 = caches.get(2, system.CacheFacts(512 << 10, 64, 1))
    outer = caches.get(3)
    levels = [
        MemoryLevel("registers", vector_bytes * registers, vector_bytes, 4e11),
        _cache("L1", level1, 1.2e11),
        _cache("L2", level2, 4e10),
    ]
    # An outer cache of which a core has less than its own L2 holds nothing that the L2 does not.
    if outer is not None and outer.size // outer.shared_by > levels[-1].capacity:
        levels.append(_cache("L3", outer, 2e10))
    return (*levels, MemoryLevel("DRAM", 1 << 40, 64, 1.2e10))


def _cache(name: str, facts: system.CacheFacts, bandwidth: float) -> MemoryLevel:
    return MemoryLevel(name, facts.size // facts.shared_by, facts.line, bandwidth, facts.shared_by)
