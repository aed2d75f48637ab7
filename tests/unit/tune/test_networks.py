"""Networks fitted to measured plans: what they are told, what they learn, and models compiled by them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

import tilewright
from bench.learned.rows import rows_of
from tests.cpu_stages import CPU, model_of, programs
from tilewright import Options
from tilewright.backend import backend_for
from tilewright.errors import OptionError
from tilewright.ir.forms.compute import Program
from tilewright.learn import choose
from tilewright.learn.encode import Encoded, encoded
from tilewright.schedule.planner import make_plan
from tilewright.target import Target, machine
from tilewright.tile_graph.plan.form import Plan
from tilewright.tune import features as features_of
from tilewright.tune.choices import with_choices
from tilewright.tune.features import features
from tilewright.tune.records import Anchor, Machine, Measurement, RecordError, Writer, digest, read
from tilewright.tune.subjects import TunedModel, find_subjects

pytest.importorskip("torch", reason="networks need torch, an extra")

from tilewright.learn.fit import Learned, Sample, fitted

N1 = machine("neoverse_n1")
RNG = np.random.default_rng(5)


def small() -> ModelProto:
    shapes = {"a": (64, 96), "b": (96, 128), "c": (128, 40)}
    weights = {name: (RNG.standard_normal(shape) / 8).astype(np.float32) for name, shape in shapes.items()}
    steps = [("MatMul", ["x", "a"], "p", {}), ("Softmax", ["p"], "q", {"axis": 1}), ("MatMul", ["q", "b"], "r", {}),
             ("Softmax", ["r"], "s", {"axis": 1}), ("MatMul", ["s", "c"], "y", {})]  # fmt: skip
    return model_of(steps, {"x": [48, 64]}, {"y": [48, 40]}, weights)


@pytest.mark.parametrize("name", ["host", "neoverse_n1", "avx2_desktop", "h200"])
def test_every_node_follows_the_tile_around_it(name: str) -> None:
    target = CPU if name == "host" else machine(name)
    program = programs(small(), target)["layout"]
    plan = make_plan(program, target)
    kernels = encoded(program, plan, target)
    assert [k.seconds for k in kernels] == [t.seconds for t in features(program, plan, target)]
    for kernel, tile in zip(kernels, plan.kernels, strict=True):
        assert len(kernel.nodes) == len(list(tile.walk())) == len(kernel.parents) + 1
        assert all(0 <= parent < child for child, parent in enumerate(kernel.parents, 1))
        assert len(kernel.leaves) == len(tile.leaves) and all("is leaf" in kernel.nodes[n] for n in kernel.leaves)
        assert all("is tile" in kernel.nodes[parent] for parent in kernel.parents)
        assert all(reader > read for reader, read in kernel.reads), "leaves read what was stored before"
    joined = [k for k in kernels if len(k.leaves) > 1]
    assert all(k.reads for k in joined), "what is joined reads from each other"


def made_up(seconds: float, lanes: int, held: int, follows: bool) -> Encoded:
    """A kernel of two leaves under a tile; the second reads from the first or beside it."""
    leaf = {"is leaf": 1, "lanes": lanes}
    nodes = ({"is tile": 1, "holds": held}, {"is tile": 1}, leaf, {"is leaf": 1, "lanes": 8})
    return Encoded(seconds, {"time": int(seconds * 1e9)}, nodes, (0, 1, 1), (2, 3), ((3, 2),) if follows else ())


def samples(tasks: range) -> list[Sample]:
    """Plans whose first leaf has few lanes take four times as long as predicted, which predictions have the wrong way
    round."""
    found = []
    for task in tasks:
        for lanes in (1, 2, 4, 8, 16):
            predicted = 1e-6 * (task + 2) * (1 + lanes / 16)
            actual = predicted * (4 if lanes < 4 else 1)
            found.append(Sample(f"task {task}", (made_up(predicted, lanes, task % 3, bool(task % 2)),), 1e6 * actual))
    return found


@pytest.mark.parametrize("kind", ["tree", "graph", pytest.param("both", marks=pytest.mark.slow)])
def test_a_network_learns_which_plan_is_faster(kind: str) -> None:
    learned = fitted(kind, samples(range(12)), members=1)
    unseen = samples(range(12, 18))
    found = learned.log_seconds([s.kernels for s in unseen])[0].reshape(-1, 5)
    measured = np.log2([s.microseconds for s in unseen]).reshape(-1, 5)
    assert (found.argmin(1) == measured.argmin(1)).all()
    assert (found[:, :2].min(1) > found[:, 2:].max(1)).all(), "those with few lanes are all slower"
    again = Learned.loaded(learned.dumped())
    np.testing.assert_array_equal(again.log_seconds([s.kernels for s in unseen]).reshape(-1, 5), found)


def register(plan: Plan) -> int:
    """Elements of all register tiles."""
    leaves = [leaf for kernel in plan.kernels for leaf in kernel.leaves]
    return sum(prod(size for name, size in leaf.register if not name.startswith("r")) for leaf in leaves)


def test_tasks_of_one_plan_say_nothing_of_others() -> None:
    alone = [replace(sample, task=str(number)) for number, sample in enumerate(samples(range(3)))]
    assert np.isfinite(fitted("graph", alone, members=1).log_seconds([s.kernels for s in alone])).all()


@dataclass(frozen=True)
class SmallTiles:
    """Believes that a plan takes as long as its register tiles are large."""

    kind: str = "made up"

    def log_seconds(self, plans: Sequence[Sequence[Encoded]]) -> np.ndarray:
        total = [sum(k.nodes[leaf]["register"] for k in kernels for leaf in k.leaves) for kernels in plans]
        return np.log2(np.array([total, total], np.float64))


@pytest.mark.slow
def test_a_model_is_compiled_by_what_a_network_believes(
    tmp_path: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = Options(cache_dir=kernel_cache, threads=1)
    model = small()
    chosen: list[choose.TunedChoice] = []

    def kept(model: TunedModel, choices: list[choose.TunedChoice], said: dict[str, str]) -> Plan:
        chosen.extend(choices)
        return with_choices(model, choices, said)

    (tmp_path / "a.twr").write_text("")
    monkeypatch.setattr(choose, "learned_from", lambda *_: SmallTiles())
    monkeypatch.setattr(choose, "with_choices", kept)
    made = tilewright.compile(model, options=options.override(cost_model="tree", tune_records=tmp_path / "a.twr"))
    assert any("chosen by the network 'made up'" in k.estimate.reason for k in made.artifact.plan.kernels)
    assert chosen and len({name for c in chosen for name in c.subject.kernels}) == sum(
        len(c.subject.kernels) for c in chosen
    )
    for choice in chosen:
        before, after = register(choice.subject.part.own), register(choice.trial.plan)
        assert after < before and choice.ratio == pytest.approx(after / before)
    x = RNG.standard_normal((48, 64)).astype(np.float32)
    np.testing.assert_array_equal(made(x)[0], tilewright.compile(model, options=options)(x)[0])


def recorded(file: Path, options: Options, target: Target) -> tuple[Program, int]:
    """A file of made-up records of a small model's plans: the model, and how many there are."""
    program = programs(small(), target)["layout"]
    measuring = backend_for(target).measuring(target, options)
    here = Machine.of(target, measuring.processor, measuring.microarchitecture)
    writer, count = Writer(file), 0
    for subject in find_subjects(TunedModel(program, make_plan(program, target), target, False)):
        trials = (subject.following(lambda key: False) for _ in range(8))
        for plan in (subject.part.own, *(trial.plan for trial in trials if trial is not None)):
            told = Measurement(
                digest(subject.part.text), here.digest, json.loads(plan.to_json()), subject.part.task, subject.kind,
                "tuned", 1, "thread", "model", float(register(plan)), 0.01, 9, Anchor(1.0, 1.0),
            )  # fmt: skip
            writer.append(told, subject.part.text, here)
            count += 1
    return program, count


@pytest.mark.slow
def test_records_are_priced_once_for_all_that_learn_from_them(
    tmp_path: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, count = recorded(tmp_path / "a.twr", Options(cache_dir=kernel_cache, threads=1), N1)
    records = read(tmp_path / "a.twr")
    priced: list[object] = []
    price = features_of.price
    monkeypatch.setattr(features_of, "price", lambda *given: priced.append(given) or price(*given))
    rows = rows_of(records, has_trees=True)
    assert len(rows) == len(priced) == count
    samples = list(choose.samples_of(records, set(records.targets)))
    assert [s.kernels for s in samples] == [row.trees for row in rows]
    assert [row.predicted for row in rows] == [1e6 * sum(k.seconds for k in row.trees) for row in rows]


@pytest.mark.slow
def test_a_network_is_fitted_once_to_records(
    tmp_path: Path, fresh_cache: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.twr"
    options = Options(cache_dir=fresh_cache(tmp_path / "cache"), threads=1, cost_model="graph", tune_records=file)
    target = machine("cpu", cache_dir=options.cache_dir)
    program, count = recorded(file, options, target)
    monkeypatch.setattr(choose, "_FEWEST", count)
    monkeypatch.setattr(choose, "fitted", partial(fitted, members=1))
    learned = choose.learned_from(options, target)
    plans = [encoded(program, make_plan(program, target), target)]
    monkeypatch.setattr(choose, "fitted", lambda *_: pytest.fail("the network is kept"))
    np.testing.assert_array_equal(choose.learned_from(options, target).log_seconds(plans), learned.log_seconds(plans))
    with file.open("a") as records:
        records.write("\n")
    with pytest.raises(pytest.fail.Exception, match="kept"):
        choose.learned_from(options, target)  # other records: fitted anew


def test_what_a_network_cannot_learn_from_is_said(tmp_path: Path, kernel_cache: Path) -> None:
    with pytest.raises(OptionError, match="give it as tune_records="):
        Options(cost_model="tree")
    with pytest.raises(OptionError, match="leave tune out"):
        Options(cost_model="tree", tune_records=tmp_path / "a.twr", tune="2m")
    with pytest.raises(OptionError, match="cost_model cannot be 'forest'"):
        Options(cost_model="forest")
    options = Options(cache_dir=kernel_cache, threads=1, cost_model="graph", tune_records=tmp_path / "none.twr")
    with pytest.raises(RecordError, match="cannot read records"):
        tilewright.compile(small(), options=options)
    (tmp_path / "none.twr").write_text("")
    with pytest.raises(RecordError, match="has 0 measured plans .* 30 are the least"):
        tilewright.compile(small(), options=options)
