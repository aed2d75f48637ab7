"""The measured machine: what is measured is plausible, is kept and read back, and failures leave the usual numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tilewright.runtime import Cache, ToolchainError, find_compiler, this_machine
from tilewright.target import from_json, kept, machine, probe, this_cpu
from tilewright.target.machine import Target
from tilewright.target.probe import Figure, ProbeError

pytestmark = pytest.mark.host
X86 = frozenset({"avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"})


@pytest.fixture(scope="session")
def measured(kernel_cache: Path) -> Target:
    return machine("cpu", cache_dir=kernel_cache)


def test_figures_are_plausible(measured: Target) -> None:
    """Loose: the machine may be busy with anything. A nearer level is never slower than a farther one."""
    assert measured.source.startswith("measured 20")
    assert 1e9 < measured.fma_rate <= measured.fma_alone < 1e12
    assert 5e8 < measured.clock < 1e10
    assert 2 <= measured.fma_chains <= 32
    moving = measured.levels[1:]
    for near, far in pairwise(moving):
        assert near.bandwidth >= far.bandwidth and near.alone >= far.alone and near.write >= far.write
    assert all(1e8 < level.bandwidth <= level.alone < 1e13 for level in moving)
    assert moving[0].alone > 1.2 * moving[-1].alone, "the nearest cache is faster than main memory"
    assert 1e-9 <= measured.kernel_cost < 1e-2 and 1e-10 <= measured.tile_cost < 1e-3
    assert measured.rate("fma_float32") == measured.fma_rate
    if "asimddp" in this_cpu().features:
        assert measured.fma_rate < (measured.rate("sdot_int8") or 0) < 20 * measured.fma_rate


def test_sizes_are_the_systems(measured: Target) -> None:
    usual = this_cpu()
    sizes = [[(level.name, level.capacity, level.shared_by) for level in t.levels] for t in (usual, measured)]
    assert sizes[0] == sizes[1]
    assert (measured.units, measured.vector_bytes) == (usual.units, usual.vector_bytes)


def test_figures_are_rounded(measured: Target) -> None:
    numbers = [measured.fma_rate, measured.fma_alone, measured.clock, measured.kernel_cost, measured.tile_cost]
    numbers += [rate for _, rate in measured.rates]
    numbers += [value for level in measured.levels[1:] for value in (level.bandwidth, level.alone, level.write)]
    assert all(number == float(f"{number:.1e}") for number in numbers)


class Counting:
    """Stands for the probe; every measuring gives other numbers."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, usual: Target, compiler: str | None, cache: Cache) -> tuple[Target, str]:
        self.runs += 1
        return replace(usual, fma_rate=1e9 * self.runs), ""


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    stand_in = Counting()
    monkeypatch.setattr(kept, "probe", stand_in)
    return stand_in


def kept_file(root: Path) -> Path:
    (path,) = [path for path in root.rglob("*.json") if path.is_file()]
    return path


def test_measured_once(counting: Counting, tmp_path: Path) -> None:
    steps: list[str] = []
    first = machine("cpu", cache_dir=tmp_path, tell=steps.append)
    second = machine("cpu", cache_dir=tmp_path, tell=steps.append)
    assert (first, first.source) == (second, second.source)
    assert (counting.runs, steps) == (1, ["measuring the machine"])
    assert from_json(kept_file(tmp_path).read_text()) == first
    assert kept.measured(this_cpu(), tmp_path, anew=True).fma_rate == 2e9
    assert machine("cpu", cache_dir=tmp_path).fma_rate == 2e9


def test_without_a_cache_nothing_is_measured(counting: Counting) -> None:
    assert machine("cpu") == this_cpu()
    assert counting.runs == 0


def test_a_damaged_file_is_measured_again(counting: Counting, tmp_path: Path) -> None:
    machine("cpu", cache_dir=tmp_path)
    kept_file(tmp_path).write_text('{"name": "cp')
    assert machine("cpu", cache_dir=tmp_path).fma_rate == 2e9


@pytest.mark.parametrize("text", ["", "[]", '{"name": "cpu"}', "\0" * 100])
def test_a_file_that_is_no_description_is_measured_again(counting: Counting, tmp_path: Path, text: str) -> None:
    machine("cpu", cache_dir=tmp_path)
    Cache(tmp_path).put(kept_file(tmp_path).name, text.encode())
    assert machine("cpu", cache_dir=tmp_path).fma_rate == 2e9


def test_another_machines_description_is_not_taken(counting: Counting, tmp_path: Path) -> None:
    machine("cpu", cache_dir=tmp_path)
    other = replace(this_cpu(), units=999)
    Cache(tmp_path).put(kept_file(tmp_path).name, other.to_json().encode())
    assert machine("cpu", cache_dir=tmp_path).units == this_cpu().units
    assert counting.runs == 2


def test_no_compiler_leaves_the_usual_numbers(tmp_path: Path) -> None:
    target = machine("cpu", cache_dir=tmp_path, compiler="no-such-compiler")
    assert target == this_cpu()
    assert target.source.startswith("constants, not measured: 'no-such-compiler' is not a working C compiler; install")
    assert not list(tmp_path.rglob("*.json")), "the next time there may be one"


def test_a_failed_measurement_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise ProbeError("the measuring program died of SIGILL before clock was measured")

    monkeypatch.setattr(kept, "probe", fail)
    first = machine("cpu", cache_dir=tmp_path)
    monkeypatch.setattr(kept, "probe", None)
    second = machine("cpu", cache_dir=tmp_path)
    assert first == second == this_cpu()
    assert second.source == "constants, not measured: the measuring program died of SIGILL before clock was measured"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "not measured: the cache in" in machine("cpu", cache_dir=tmp_path / "here").source


def test_a_cache_that_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    path.write_text("")
    target = machine("cpu", cache_dir=path)
    assert target == this_cpu() and "not measured: the cache in" in target.source


def library_that(tmp_path: Path, body: str) -> Path:
    """A stand-in for the probe's library."""
    source = f"#include <stdio.h>\n#include <stdlib.h>\nint tw_probe(int threads) {{ (void)threads; {body} }}\n"
    from tilewright.runtime import compile_shared

    return compile_shared(source, find_compiler(), this_machine(), Cache(tmp_path))


def lines(names: list[str]) -> str:
    return "".join(f'puts("{name} 4e9 2e9"); ' for name in names) + "fflush(stdout); "


def test_a_crash_costs_only_what_comes_after_it(tmp_path: Path) -> None:
    usual = this_cpu()
    needed = probe._needed(usual)
    library = library_that(tmp_path, lines([*needed, "sdot_int8"]) + 'printf("amx_bf16 4e9 2"); abort();')
    figures, ended = probe.run_probe(library, usual)
    assert set(figures) == {*needed, "sdot_int8"}
    assert ended == "the measuring program died of SIGABRT"
    early = library_that(tmp_path, lines(needed[:1]) + "abort();")
    with pytest.raises(ProbeError, match="^the measuring program died of SIGABRT before fma_chain was measured$"):
        probe.run_probe(early, usual)


def test_an_instruction_that_did_not_run_is_no_feature() -> None:
    usual = replace(this_cpu(), features=("avx512f", "avx512_vnni", "amx_tile", "amx_bf16"))
    figures = {name: Figure(4e9, 2e9) for name in [*probe._needed(usual), "vnni_int8"]}
    target = probe.with_figures(usual, figures, None)
    assert target.features == ("avx512f", "avx512_vnni", "amx_tile")
    assert target.rates == (("fma_float32", 2e9), ("vnni_int8", 2e9))
    assert (target.kernel_cost, target.tile_cost) == (usual.kernel_cost, usual.tile_cost)


def test_noise_does_not_make_a_near_level_slow() -> None:
    usual = this_cpu()
    figures = {name: Figure(4e9, 2e9) for name in probe._needed(usual)}
    figures["read_L2"] = Figure(3e9, 1e9)
    level = probe.with_figures(usual, figures, (1e-7, 1e-9)).local
    assert (level.bandwidth, level.alone) == (2e9, 4e9)


def test_a_machine_too_busy_to_measure_is_not_taken_as_slow() -> None:
    assert probe.plausible("fma_float32", Figure(4e9, 3e9), 2) == Figure(4e9, 3e9)
    assert probe.plausible("fma_float32", Figure(4e9, 1e8), 2) == Figure(4e9, 4e9)
    assert probe.plausible("read_DRAM", Figure(4e9, 1e9), 8) == Figure(4e9, 1e9)
    assert probe.plausible("read_DRAM", Figure(4e9, 1e8), 8) == Figure(4e9, 5e8)


def test_sets_stay_where_they_are_measured() -> None:
    for target in (this_cpu(), replace(this_cpu(), units=96)):
        near, middle, outer, far = probe.sets(target, 64 << 30)
        assert near < target.nearest.capacity < middle < target.local.capacity
        assert outer == 0 or outer > target.local.capacity
        assert far * target.units <= max(1 << 30, target.units * (8 << 20))


def test_workers_that_waited_for_a_core_did_not_meet() -> None:
    """On a busy machine a kernel would seem to cost a millisecond, and all would be joined into few of them."""
    a_run = 200 * 0.4e-6
    assert probe.meeting_seconds([(a_run, 1.0), (2 * a_run, 0.95), (a_run / 5, 0.0)]) == pytest.approx(0.4e-6)
    assert probe.meeting_seconds([(0.128, 1.0), (0.2, 0.97), (a_run / 5, 0.0)]) is None


def test_who_met() -> None:
    marks = np.zeros(4 * 2 * 16, np.uint64)
    marks[::16] = [1, 2, 2, 1, 1, 1, 1, 2]
    assert probe.met(marks, 2) == 0.75


def test_a_compiler_that_knows_less(monkeypatch: pytest.MonkeyPatch, kernel_cache: Path) -> None:
    """The plain figures are measured all the same."""
    usual = this_cpu()
    seen: list[frozenset[str]] = []
    compile_probe = probe.compile_probe

    def refuse(target: Target, features: frozenset[str], *rest: object) -> Path:
        seen.append(features)
        if features & set(probe._EXTENSIONS) or len(seen) == 1:
            raise probe.CompileError("unknown instruction")
        return compile_probe(target, features, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(probe, "compile_probe", refuse)
    monkeypatch.setattr(probe, "_PASSES", 1)
    monkeypatch.setattr(probe, "_PATIENCE_SECONDS", 0.0)
    target, remark = probe.probe(usual, None, Cache(kernel_cache))
    assert len(seen) == 2 and not seen[1] & set(probe._EXTENSIONS)
    assert remark.startswith("the C compiler does not know all of its instructions")
    assert [name for name, _ in target.rates] == ["fma_float32"]


def cross_compile(tmp_path: Path, cpu: str, target: Target, features: frozenset[str], *flags: str) -> str:
    if find_spec("ziglang") is None:
        pytest.skip("ziglang is not installed")
    source, out = tmp_path / "probe.c", tmp_path / "probe.s"
    source.write_text(probe.probe_source())
    command = [sys.executable, "-m", "ziglang", "cc", *flags, f"-mcpu={cpu}", "-O3", "-std=gnu11", "-Wall", "-Wextra"]
    command += [
        "-Werror",
        "-Wno-unused-command-line-argument",
        "-ffp-contract=fast",
        *probe.probe_flags(target, features),
        "-S",
        "-o",
        str(out),
    ]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out.read_text()


def test_it_compiles_for_a_server(tmp_path: Path) -> None:
    target = replace(this_cpu(), vector_bytes=64, vector_registers=32)
    text = cross_compile(tmp_path, "sapphirerapids", target, X86, "-target", "x86_64-linux-gnu")
    for instruction in ("vfmadd", "vpdpbusd", "vdpbf16ps", "tdpbf16ps", "tdpbssd", "ldtilecfg"):
        assert instruction in text
    assert "zmm23" in text, "the chains of multiply-adds stay in registers"


@pytest.mark.parametrize(
    ("cpu", "width", "registers", "features", "system"),
    [
        ("alderlake", 32, 16, frozenset({"avx_vnni"}), "x86_64-linux-gnu"),
        ("x86_64", 16, 16, frozenset(), "x86_64-linux-gnu"),
        ("neoverse_n1", 16, 32, frozenset({"asimddp"}), "aarch64-linux-gnu"),
        ("apple_m1", 16, 32, frozenset({"asimddp"}), "aarch64-macos"),
    ],
)
def test_it_compiles_for_others(
    tmp_path: Path, cpu: str, width: int, registers: int, features: frozenset[str], system: str
) -> None:
    target = replace(this_cpu(), vector_bytes=width, vector_registers=registers)
    text = cross_compile(tmp_path, cpu, target, features, "-target", system)
    assert ("vpdpbusd" in text, "sdot" in text) == ("avx_vnni" in features, "asimddp" in features)


def test_compilers_are_still_reported(tmp_path: Path) -> None:
    """What fails for want of a compiler fails by name, not by falling back silently."""
    with pytest.raises(ToolchainError):
        probe.probe(this_cpu(), "no-such-compiler", Cache(tmp_path))
