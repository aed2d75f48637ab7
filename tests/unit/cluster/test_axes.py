"""Meshes of several axes: few ways of every compute are looked at together, what is found is right, and nearly as good
as the best of all ways where these can be tried."""

from __future__ import annotations

import pytest
from onnx import ModelProto

from tests.cpu_stages import model_of
from tests.unit.cluster.test_found import agrees, attention_block, cluster, exchanged, program_of, weights
from tilewright.ir.forms.mesh import AxisPart
from tilewright.ir.forms.sharded import ShardedCompute, from_json
from tilewright.report.ranks import ranks_text
from tilewright.schedule.cluster import pipeline, planner
from tilewright.schedule.cluster.choices import Choices, FoundChoices

pytest.importorskip("scipy", reason="integer programs are scipy's")


class Problems:
    """Every problem that is solved, in place of `solve`; one with many choices of a node is not waited for."""

    def __init__(self) -> None:
        self.seen: list[Choices] = []
        self._solve = planner.solve

    def __call__(self, problem: Choices) -> FoundChoices | None:
        assert max(map(len, problem.seconds)) <= 8
        self.seen.append(problem)
        return self._solve(problem)

    @property
    def routes(self) -> int:
        return sum(len(row) for problem in self.seen for hub in problem.hubs for row in hub.seconds)


@pytest.fixture
def problems(monkeypatch: pytest.MonkeyPatch) -> Problems:
    found = Problems()
    monkeypatch.setattr(planner, "solve", found)
    return found


def two_layers(rows: int = 512) -> ModelProto:
    steps = [("MatMul", ["x", "w"], "h", {}), ("Relu", ["h"], "g", {}), ("MatMul", ["g", "v"], "y", {})]
    return model_of(steps, {"x": (rows, 64)}, {"y": (rows, 64)}, {"w": weights(64, 512), "v": weights(512, 64)})


@pytest.mark.slow
def test_two_axes_look_at_about_as_many_ways_as_one_does(problems: Problems) -> None:
    """A block of a transformer: its products have five ways along one axis, twenty-five along two, and the tables
    between them the squares of these for each way that what goes in and out may lie."""
    program = program_of(attention_block(32, 64))
    pipeline.share_out(program, cluster(tp=2), ["tp"])
    one = problems.routes
    problems.seen.clear()
    sharded = pipeline.share_out(program, cluster(dp=2, tp=2), ["tp"])
    assert problems.routes <= 16 * one
    agrees(sharded, 0.53)
    assert "one mesh axis after the other" in ranks_text(sharded)
    assert from_json(sharded.to_json(), program).remarks == sharded.remarks


@pytest.mark.slow
def test_three_axes_end_too(problems: Problems) -> None:
    sharded = pipeline.share_out(program_of(attention_block(32, 64)), cluster(a=2, b=2, tp=2), ["tp"])
    assert problems.seen
    agrees(sharded, 0.53)


def test_one_by_one_finds_data_and_tensor_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch over one axis, columns and rows of weights over the other: as when all ways are looked at."""
    program, links = program_of(two_layers()), cluster(dp=2, tp=2)
    best = pipeline.share_out(program, links, ["tp"])
    assert not best.remarks
    monkeypatch.setattr(planner, "_AT_A_TIME", 0)
    found = pipeline.share_out(program, links, ["tp"])
    assert found.remarks
    assert found.seconds == pytest.approx(best.seconds)
    pieces = {s.compute.outputs[0].name: s.gives.parts for s in found.stages[0].steps if isinstance(s, ShardedCompute)}
    assert pieces["h"] == pieces["g"] == (AxisPart(dim=0), AxisPart(dim=1))
    assert pieces["y"] == (AxisPart(dim=0), AxisPart(operator="add"))
    assert exchanged(found) == exchanged(best)
    agrees(found, 0.51)


def test_a_search_that_ends_at_its_bound_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    solve = planner.solve

    def bounded(problem: Choices) -> FoundChoices | None:
        found = solve(problem)
        return None if found is None else found._replace(is_least=False)

    monkeypatch.setattr(planner, "solve", bounded)
    told = ranks_text(pipeline.share_out(program_of(two_layers()), cluster(tp=2), ["tp"]))
    assert "ended at its bound" in told
