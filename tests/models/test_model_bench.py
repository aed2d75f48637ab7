"""The benchmark of the cost model: its statistics, its kernels, and a run of two kernels from end to end."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from bench import model
from bench.model_cases import kernels_of, random_kernels, spread
from bench.model_report import KernelReport, PlanTime, ranks, spearman, summarise
from bench.plan_times import Bench, shares
from tests.cpu_stages import CPU, evaluated, lowered, random_inputs
from tilewright.ir.analysis.verify import verify_program
from tilewright.options import Options
from tilewright.tile_graph.check.kernels import check_plan


def test_ranks_share_places() -> None:
    assert ranks([3.0, 1.0, 3.0, 2.0]).tolist() == [3.5, 1.0, 3.5, 2.0]


def test_spearman() -> None:
    rising = [1.0, 5.0, 7.0, 100.0]
    assert spearman(rising, [2.0, 3.0, 4.0, 5.0]) == pytest.approx(1.0)
    assert spearman(rising, [9.0, 8.0, 7.0, 6.0]) == pytest.approx(-1.0)
    # 1 - 6 * sum of squared differences / (n * (n * n - 1)), without ties
    assert spearman([1, 2, 3, 4, 5], [2, 1, 4, 3, 5]) == pytest.approx(1 - 6 * 4 / (5 * 24))
    assert spearman(rising, [1.0, 1.0, 1.0, 1.0]) is None


def test_shares_cover_all_tiles() -> None:
    assert shares(7, 2) == [(0, 4), (4, 7)]
    assert shares(1, 2) == [(0, 1)]


def test_summary() -> None:
    def report(*measured: float) -> KernelReport:
        plan = {"tile": (), "tiles": 1, "nests": []}
        plans = tuple(PlanTime(plan, 1e-6 * (i + 1), 1e-6 * m, 1e-6 * m) for i, m in enumerate(measured))
        return KernelReport("k", "map", plans, 3)

    facts = summarise([report(1.0, 2.0, 3.0, 4.0), report(2.0, 1.0, 3.0, 4.0)])
    assert facts["median_rank_correlation"] == pytest.approx(0.9)
    assert facts["choice_within_10_percent"] == 0.5


def test_random_kernels_stand_alone(tmp_path: Path) -> None:
    """Cut out of its model a kernel is a whole Program, and gives what the interpreter gives for it."""
    cases = random_kernels(8, 3, tmp_path, CPU)
    assert len(cases) == 8 and len({c.kind for c in cases}) >= 2
    assert [c.name for c in cases] == [c.name for c in random_kernels(8, 3, tmp_path, CPU)], "the seed decides"
    for case in cases:
        verify_program(case.program)
        check_plan(case.plan, case.program)
    assert len(spread(cases, 3)) == 3


@pytest.mark.slow
def test_measured_plans(tmp_path: Path, kernel_cache: Path) -> None:
    """Both clocks give every plan a time, and a replay predicts the same plans again."""
    (case, *_) = random_kernels(1, 4, tmp_path, CPU)
    options = Options(cache_dir=kernel_cache, threads=2)
    settings = model.Settings(3, 1, 0.05, 2, 1, True, "cpu", options)
    prepared = model.prepared_plans(case, settings, CPU)
    assert prepared[0].kernel.leaves == case.kernel.leaves
    assert len({(p.kernel.leaves, p.kernel.cut) for p in prepared}) == len(prepared)
    bench = Bench(case.program, prepared, CPU, options)
    for times in (bench.measure_wall(0.05, True), bench.measure_cpu(0.05, False)):
        assert len(times.least) == len(prepared) and all(
            0 < t <= m for t, m in zip(times.least, times.median, strict=True)
        )
    for each in prepared:
        values = json.loads(json.dumps(model.values_of(each.kernel)))
        again = model.from_values(case.kernel, values, case.variants(CPU))
        assert (again.leaves, again.cut, again.tiles) == (each.kernel.leaves, each.kernel.cut, each.kernel.tiles)


@pytest.mark.slow
def test_main_writes_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel_cache: Path) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(kernel_cache))
    common = ["model", "--models", "", "--kernels", "2", "--results", str(tmp_path), "--exports", str(tmp_path)]
    run = [*common, "--plans", "4", "--seconds", "0.05", "--threads", "2", "--jobs", "1", "--clock", "cpu"]
    monkeypatch.setattr("sys.argv", run)
    model.main()
    document = json.loads((tmp_path / "model.json").read_text())
    assert document["summary"]["kernels"] == 2 and "rank correlation" in (tmp_path / "model.md").read_text()
    monkeypatch.setattr("sys.argv", [*common, "--replay", str(tmp_path / "model.json")])
    model.main()


def test_a_cut_out_kernel_is_right(tmp_path: Path) -> None:
    from bench.arithmetic import Contraction
    from bench.kernel_cases import write_model

    path = tmp_path / "one.onnx"
    write_model(Contraction(1, 29, 31, 37, True), path)
    ((_, case),) = kernels_of(path, "one", CPU)
    inputs = random_inputs(case.program, 2)
    found = lowered(case.program, plan=case.plan).on_loops(inputs)
    for name, array in evaluated(case.program, inputs).items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-4)
