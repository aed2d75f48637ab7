"""A training step over ranks: some steps of ranks that are threads, with the interpreter as their code, lose what one
rank loses; and what a stage keeps while parts of a batch are under way."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import reduce
from math import inf
from queue import Queue
from typing import Any

import numpy as np
import pytest

from tests.cpu_stages import model_of
from tests.fuzz.sharded import UFUNCS
from tests.unit.cluster.test_found import cluster, program_of, weights
from tilewright.distributed.about import CompiledRank
from tilewright.distributed.training import RankedTraining, one_forward_one_back, rank_steps
from tilewright.errors import OptionError
from tilewright.ir.forms.compute import Program
from tilewright.ir.forms.sharded import Sharded, ShardedCompute, from_json
from tilewright.ir.forms.training import Training, TrainingPhase
from tilewright.ir.meaning.interpret import evaluate
from tilewright.runtime.outputs import ArrayMemory, passing_memory
from tilewright.schedule.cluster.pipeline import share_out_by_itself, share_out_in_stages
from tilewright.target import Link
from tilewright.tile_graph.sharding.check import check_sharded
from tilewright.training import train
from tilewright.transform.gradient.optimisers import SGD, Adam
from tilewright.transform.gradient.step import training_step
from tilewright.transform.spmd import Segment, Transfer, rank_program

pytest.importorskip("scipy", reason="integer programs are scipy's")

ROWS, WIDTH, STEPS = 8, 16, 3
RNG = np.random.default_rng(5)
Arrays = dict[str, np.ndarray]


def layers(parts: int, tied: bool = False, rows: int = ROWS) -> Program:
    """A chain of products that ends in a mean of squares; its first weight may be its last too."""
    names = ["w0", "w1", "w2", "w0" if tied else "w3"]
    steps: list[tuple[str, list[str], str, dict[str, object]]] = []
    for n, name in enumerate(names):
        steps += [("MatMul", [f"x{n}", name], f"h{n}", {}), ("Tanh", [f"h{n}"], f"x{n + 1}", {})]
    steps += [("Sub", ["x4", "y"], "d", {}), ("Mul", ["d", "d"], "s", {}),
              ("ReduceMean", ["s"], "loss", {"keepdims": 0})]  # fmt: skip
    shapes = {"x0": (rows // parts, WIDTH), "y": (rows // parts, WIDTH)}
    inputs = shapes | dict.fromkeys(dict.fromkeys(names), (WIDTH, WIDTH))
    return program_of(model_of(steps, inputs, {"loss": ()}, {}))


def step_of(parts: int, optimiser: SGD | Adam, tied: bool = False, rows: int = ROWS) -> Training:
    program = layers(parts, tied, rows)
    first = {t.name: weights(WIDTH, WIDTH) for t in program.inputs if t.name.startswith("w")}
    return training_step(program, first, optimiser, parts)


@dataclass
class Posts:
    """What `runtime.ranks.Ranks` does, between threads; a rank that waits for nothing fails after some seconds."""

    rank: int
    size: int
    boxes: Mapping[tuple[int, int], Queue[np.ndarray]]
    given: Arrays
    memory: ArrayMemory = field(default_factory=passing_memory)

    def share(self, values: Arrays, wanted: Sequence[Any]) -> None:
        values.update(self.given)

    def begin(self, move: Transfer, values: Arrays, step: str) -> None:
        for peer, place in move.sends:
            self.boxes[self.rank, peer].put(values[move.source][place].copy())

    def finish(self, passing: None, values: Arrays, step: str) -> None:
        pass

    def move(self, move: Transfer, values: Arrays, step: str) -> None:
        if move.kind == "all-reduce":
            whole = tuple(slice(0, n) for n in values[move.source].shape)
            others = tuple((p, whole) for p in move.peers if p != self.rank)
            terms = tuple((p, whole) for p in move.peers)
            move = replace(move, sends=others, takes=terms, own=whole)
        self.begin(move, values, step)
        parts = [values[move.source][move.own or ()] if p == self.rank else self.boxes[p, self.rank].get(timeout=20)
                 for p, _ in move.takes]  # fmt: skip
        if move.takes and move.operator is not None:
            values[move.target] = np.asarray(reduce(UFUNCS[move.operator], parts))
        elif move.takes:
            values[move.target] = np.empty(move.shape, move.dtype)
            for (_, place), part in zip(move.takes, parts, strict=True):
                values[move.target][place] = part


@dataclass(frozen=True)
class Interpreted:
    """A Program in the place of its machine code."""

    program: Program

    @property
    def runner(self) -> Interpreted:
        return self

    def run(self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> None:
        given = {t.name: array for t, array in zip(self.program.inputs, inputs, strict=True)}
        found = evaluate(self.program, given)
        for tensor, output in zip(self.program.outputs, outputs, strict=True):
            output[...] = found[tensor.name]


def compiled(program: Program) -> CompiledRank:
    gives = tuple((t.name, tuple(int(e) for e in t.shape), t.dtype.numpy) for t in program.outputs)  # type: ignore[arg-type]
    return CompiledRank(Interpreted(program), tuple(t.name for t in program.inputs), gives)  # type: ignore[arg-type]


def losses(training: Training, sharded: Sharded, optimiser: SGD | Adam, batches: Sequence[Arrays]) -> list[float]:
    boxes: dict[tuple[int, int], Queue[np.ndarray]] = {
        (a, b): Queue() for a in range(sharded.ranks) for b in range(sharded.ranks)
    }
    names = {t.name: t.name for t in training.states if t.name.startswith("w") and "_" not in t.name}

    def rank(number: int) -> list[float | None]:
        mine = rank_program(sharded, number)
        steps = [compiled(s.program) if isinstance(s, Segment) else s for s in mine.steps]
        posts = Posts(number, sharded.ranks, boxes, {})
        model = RankedTraining(training, sharded, rank_steps(mine, steps), optimiser, names, posts)  # type: ignore[arg-type]
        found: list[float | None] = []
        for batch in batches:
            posts.given = batch
            found.append(model(batch) if number == 0 else model())
        last = model.weights()
        assert number or set(last) == set(names)
        return found

    with ThreadPoolExecutor(sharded.ranks) as pool:
        every = list(pool.map(rank, range(sharded.ranks)))
    assert all(loss is None for others in every[1:] for loss in others)
    return [loss for loss in every[0] if loss is not None]


def shared(training: Training, axes: Mapping[str, int], stages: int, parts: int) -> Sharded:
    about = replace(cluster(**axes), links=tuple(Link(n, size, 1e13, 1e-9) for n, size in axes.items()))
    along = Link("pp", stages, 1e12, 1e-9)
    made = share_out_in_stages(training.program, [about] * stages, along, ("tp",), parts, training)
    again = from_json(made.to_json(), training.program)
    check_sharded(again)
    assert again == made
    return again


@pytest.mark.parametrize("axes, stages, parts, tied, optimiser", [
    ({"tp": 2}, 1, 1, False, Adam(0.02)),
    ({"dp": 2}, 1, 2, False, SGD(0.5, 0.9)),
    ({"tp": 1}, 2, 4, False, Adam(0.02)),
    ({"tp": 1}, 3, 4, True, SGD(0.5)),
    pytest.param({"tp": 2}, 2, 2, False, Adam(0.02), marks=pytest.mark.slow),
    pytest.param({"dp": 2}, 4, 8, True, Adam(0.02), marks=pytest.mark.slow),
])  # fmt: skip
def test_ranks_lose_what_one_loses(
    axes: Mapping[str, int], stages: int, parts: int, tied: bool, optimiser: SGD | Adam
) -> None:
    batches = [{n: RNG.uniform(-0.5, 0.5, (ROWS, WIDTH)).astype(np.float32) for n in ("x0", "y")}] * STEPS
    one = step_of(1, optimiser, tied)
    right = losses(one, shared(one, {"tp": 1}, 1, 1), optimiser, batches)
    training = step_of(parts, optimiser, tied)
    training = replace(training, initial={t: _of(one, t.name) for t in training.initial})
    sharded = shared(training, axes, stages, parts)
    found = losses(training, sharded, optimiser, batches)
    np.testing.assert_allclose(found, right, rtol=1e-5)
    assert right[-1] < right[0]
    if axes.get("tp", 1) > 1:
        kept = [rank_program(sharded, rank).kept for rank in range(sharded.ranks)]
        mine = max(sum(np.prod([n for _, n in k.place]) for k in each) for each in kept)
        assert mine <= 1.05 * sum(array.size for array in training.initial.values()) / sharded.ranks


def test_a_large_batch_is_cut_and_its_gradients_are_added_up() -> None:
    """Data parallel by itself: each rank has half of the rows, and what passes is as large as the weights."""
    rows, optimiser = 2048, SGD(0.5, 0.9)
    training = step_of(1, optimiser, rows=rows)
    sharded = shared(training, {"dp": 2}, 1, 1)
    (stage,) = sharded.stages
    gives = {t.name: s.gives.parts[0] for s in stage.steps if isinstance(s, ShardedCompute) for t in s.compute.outputs}
    assert [gives[f"h{n}"].dim for n in range(4)] == [0, 0, 0, 0]
    passed = [step for _, step in sharded.exchanges()]
    assert {"all-reduce", "reduce-scatter"} & {step.kind for step in passed}
    assert all(step.tensor.most_bytes <= WIDTH * WIDTH * 4 for step in passed)
    batches = [{n: RNG.uniform(-0.5, 0.5, (rows, WIDTH)).astype(np.float32) for n in ("x0", "y")}] * STEPS
    right = losses(training, shared(training, {"tp": 1}, 1, 1), optimiser, batches)
    np.testing.assert_allclose(losses(training, sharded, optimiser, batches), right, rtol=1e-5)


def test_a_stage_fits_with_what_its_parts_under_way_need() -> None:
    """Each weight takes four times its bytes with its gradient and moments; of two stages the first has two parts under
    way, and what the second of them needs for its way back counts too."""
    training = step_of(4, Adam(0.02))

    def fits(most: int, parts: int) -> bool:
        along = Link("pp", 2, 1e12, 1e-9)
        try:
            share_out_in_stages(training.program, [cluster(tp=1)] * 2, along, (), parts, training, most)
        except OptionError as error:
            assert "no 2 stages fit: a rank may have 0.0 MiB" in str(error)
            return False
        return True

    one, several = (bisect_left(range(1 << 16), True, key=lambda most: fits(most, parts)) for parts in (1, 4))
    weight, rows = 4 * WIDTH * WIDTH, 4 * WIDTH * ROWS // 4
    assert one >= 2 * 4 * weight
    assert several >= one + rows


def test_meshes_of_a_step_are_found_within_their_memory() -> None:
    """No mesh that is said is predicted to take less, and with half of the least that is enough there is none."""
    training = step_of(4, Adam(0.02), rows=512)
    whole = replace(cluster(tp=4), links=(Link("tp", 4, 1e13, 1e-9),))

    def found(most: float) -> Sharded | None:
        try:
            return share_out_by_itself(training.program, whole, 4, most, training)
        except OptionError as error:
            assert "take more ranks or give more memory" in str(error)
            return None

    free = found(inf)
    most, bound = next((1 << n, made) for n in range(12, 24) if (made := found(1 << n)) is not None)
    assert free is not None and free.seconds <= bound.seconds
    for size, stages in ((1, 4), (2, 2), (4, 1)):
        about = replace(whole, links=(Link("tp", size, 1e13, 1e-9),))
        for room, own in ((inf, free), (most, bound)):
            try:
                said = share_out_in_stages(
                    training.program, [about] * stages, whole.links[0], ("tp",), 4, training, room
                )
            except OptionError:
                continue
            assert own.seconds <= said.seconds * 1.001


def _of(training: Training, name: str) -> np.ndarray:
    return next(array for t, array in training.initial.items() if t.name == name)


@pytest.mark.parametrize("behind, parts", [(0, 1), (0, 5), (1, 4), (3, 8), (5, 2)])
def test_a_stage_keeps_as_many_parts_as_stages_are_behind_it_and_its_own(behind: int, parts: int) -> None:
    order = list(one_forward_one_back(behind, parts))
    for turn in (TrainingPhase.FORWARD, TrainingPhase.BACKWARD):
        assert [part for own, part in order if own is turn] == list(range(parts))
    under_way = [sum(1 if own is TrainingPhase.FORWARD else -1 for own, _ in order[: n + 1]) for n in range(len(order))]
    assert min(under_way) == 0 and max(under_way) == min(behind + 1, parts)


def test_a_module_that_is_changed_later_is_no_longer_what_is_trained() -> None:
    torch = pytest.importorskip("torch")

    class Loss(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 2)

        def forward(self, x: Any) -> Any:
            return (self.layer(x) ** 2).mean()

    module, x = Loss(), torch.ones(4, 3)
    with torch.no_grad():
        want = float(module(x))
        step = train(module, (x,), SGD(0.1))
        module.layer.weight.fill_(7.0)
        assert step(x) == pytest.approx(want, rel=1e-5)
