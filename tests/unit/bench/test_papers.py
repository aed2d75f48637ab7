"""Ablations of papers: each step does what it is named for, and what the commands print is counted from plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the zoo needs torch, a development extra")

from bench.arithmetic import Contraction
from bench.papers import alcop, roller, souffle, welder
from bench.papers.__main__ import main
from bench.papers.steps import counted, timed
from tilewright import Options
from tilewright.frontend.onnx.model import load
from tilewright.target import machine
from tilewright.tile_graph.plan.form import COPIES, Tile

SMALL = Contraction(1, 256, 256, 1024, True)


@pytest.mark.slow
def test_every_step_of_souffle_launches_no_more(zoo_file: Callable[..., Path]) -> None:
    target = machine("emerald_rapids")
    steps = list(souffle.steps(load(zoo_file("mmoe")), target, Options()))
    counts = [counted(step, target) for step in steps]
    launches = [found.launches for found in counts]
    assert launches == sorted(launches, reverse=True) and launches[0] > launches[1] > launches[2] > launches[3]
    between = [found.between for found in counts]
    assert between == sorted(between, reverse=True) and between[-1] == 0


def test_levels_of_welder_open_one_after_the_other(zoo_file: Callable[..., Path]) -> None:
    target = machine("emerald_rapids")
    plain, registers, near, *_ = welder.steps(load(zoo_file("mmoe")), target, Options())
    assert all(len(k.leaves) == 1 and not k.held for k in plain.plan.kernels)
    assert not any(k.held for k in registers.plan.kernels) and any(k.held for k in near.plan.kernels)
    assert {t.level for k in near.plan.kernels for t in k.walk() if isinstance(t, Tile) and t.holds} == {"L2"}


def test_nothing_is_asked_for_ahead_in_v3() -> None:
    target = machine("h200")
    whole = alcop.planned("", alcop.graph_of(SMALL), target, Options(target="h200", precision="float16"))
    tiles = [n for n in souffle.unpipelined(whole.plan).body.walk() if isinstance(n, Tile)]
    assert max(h.stages for n in whole.plan.body.walk() if isinstance(n, Tile) for h in n.holds) > 1
    assert all(h.stages == 1 and h.fill != "prefetch" for tile in tiles for h in tile.holds)
    large = alcop.planned("", alcop.graph_of(alcop.PROBLEMS[0]), target, Options(target="h200", precision="float16"))
    waiting = souffle.unpipelined(large.plan)
    assert {h.stages for n in waiting.body.walk() if isinstance(n, Tile) for h in n.holds if h.fill in COPIES} == {3}
    assert alcop.lowered(replace(large, plan=waiting), target).kernels  # wgmma takes no fewer


def test_rings_of_alcop_take_shared_memory_by_their_stages() -> None:
    rows = [*alcop.rows(machine("a100"), Options(target="a100"), [SMALL])]
    assert {row.form for row in rows} == {"mma_float16", "threads"}
    by_stages = {(row.form, row.stages): row for row in rows}
    one, two, three = (by_stages["mma_float16", n] for n in (1, 2, 3))
    assert one.shared_bytes * 2 == two.shared_bytes and one.shared_bytes * 3 == three.shared_bytes
    assert (one.levels, two.levels, by_stages["threads", 2].levels) == (0, 2, 1)
    assert by_stages["threads", 1].copies == 0 < by_stages["threads", 2].copies
    assert sum(row.is_chosen for row in rows) == 2


def test_fewer_stages_than_an_instruction_needs_are_told() -> None:
    target, options = machine("h200"), Options(target="h200", precision="float16")
    step = alcop.planned("", alcop.graph_of(alcop.PROBLEMS[0]), target, options)
    row = alcop._row(step, 1, False, target, options, 0)
    assert row.form == "wgmma_float16" and "too few" in row.refused and row.predicted is None


def test_roller_counts_programs_that_differ() -> None:
    (row,) = roller.rows(machine("emerald_rapids"), Options(), [SMALL])
    assert row.programs == roller.MEASURED and row.predicted > 0 and row.best is None


@pytest.mark.slow
def test_steps_are_timed_in_turn(zoo_file: Callable[..., Path], kernel_cache: Path) -> None:
    options = Options(threads=1, cache_dir=kernel_cache)
    target = machine("cpu", cache_dir=kernel_cache)
    steps = list(souffle.steps(load(zoo_file("mmoe")), target, options))
    assert all(taken > 0 for taken in timed(steps, target, options, 0.01))


def test_command_prints_the_paper_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["souffle", "--models", "mmoe", "--size", "small", "--target", "emerald_rapids", "--exports", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "| V1 + horizontal |" in printed and "2.14x of V0" in printed
    with pytest.raises(SystemExit):
        main(["tvm"])


@pytest.mark.slow
def test_control_that_data_decide_is_one_call_across_it(
    capsys: pytest.CaptureFixture[str], kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(kernel_cache))
    main(["tensorssa", "--models", "suppression"])
    printed = capsys.readouterr().out
    assert "| suppression | across control | 1 | 1 |" in printed and "1.34x of the best" in printed
    alone = next(line for line in printed.splitlines() if "PyTorch's alone" in line).split(" | ")
    across = next(line for line in printed.splitlines() if "across control" in line).split(" | ")
    assert int(across[4]) > int(alone[4])  # the loop's kernels are in it
    with pytest.raises(SystemExit):
        main(["tensorssa", "--target", "h200"])
