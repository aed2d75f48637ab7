"""A batch in parts: each has the Program of the first, together they give what all at once gives, no rank waits in a
circle; and what cannot be cut is named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from onnx import ModelProto, TensorProto

from tests.cpu_stages import model_of
from tests.fuzz.sharded import UFUNCS
from tests.unit.cluster.test_found import cluster, program_of, weights
from tilewright.distributed.turns import Turn, Verb, turns
from tilewright.errors import OptionError
from tilewright.ir.forms.compute import Program
from tilewright.ir.forms.mesh import Mesh
from tilewright.ir.forms.sharded import PipelineStage, Sharded
from tilewright.ir.meaning.interpret import evaluate
from tilewright.ir.meaning.interpret_sharded import evaluate_sharded
from tilewright.schedule.batches import Batches, in_parts
from tilewright.schedule.cluster.pipeline import share_out, share_out_by_itself, share_out_in_stages
from tilewright.transform.clean.turned import without_turned
from tilewright.transform.spmd import Segment, Transfer, When, rank_program

pytest.importorskip("scipy", reason="integer programs are scipy's")

RNG = np.random.default_rng(3)
Arrays = dict[str, np.ndarray]


def attention(batch: int, rows: int = 8, width: int = 16, heads: int = 2, layers: int = 2) -> ModelProto:
    """Layers of a transformer on a batch whose rows are merged and split again, with a mask of every sample."""
    depth = width // heads
    merged, split = np.array([batch * rows, width], np.int64), np.array([batch, rows, heads, depth], np.int64)
    constants: Arrays = {"merged": merged, "split": split, "joined": np.array([batch, rows, width], np.int64)}
    turned = {"q": [0, 2, 1, 3], "k": [0, 2, 3, 1], "v": [0, 2, 1, 3]}
    steps: list[tuple[str, list[str], str, dict[str, object]]] = []
    for n in range(layers):
        here = f"x{n}"
        steps.append(("Reshape", [here, "merged"], f"flat{n}", {}))
        for k in "qkv":
            constants[f"w{k}{n}"] = weights(width, width)
            steps.append(("MatMul", [f"flat{n}", f"w{k}{n}"], f"{k}0{n}", {}))
            steps.append(("Reshape", [f"{k}0{n}", "split"], f"{k}1{n}", {}))
        constants |= {f"wo{n}": weights(width, width)}
        steps += [
            *[("Transpose", [f"{k}1{n}"], f"{k}{n}", {"perm": perm}) for k, perm in turned.items()],
            ("MatMul", [f"q{n}", f"k{n}"], f"s{n}", {}),
            ("Add", [f"s{n}", "mask"], f"t{n}", {}), ("Softmax", [f"t{n}"], f"p{n}", {"axis": -1}),
            ("MatMul", [f"p{n}", f"v{n}"], f"a{n}", {}), ("Transpose", [f"a{n}"], f"b{n}", {"perm": [0, 2, 1, 3]}),
            ("Reshape", [f"b{n}", "joined"], f"c{n}", {}), ("MatMul", [f"c{n}", f"wo{n}"], f"o{n}", {}),
            ("Add", [f"o{n}", here], f"x{n + 1}", {}),
        ]  # fmt: skip
    inputs = {"x0": (batch, rows, width), "mask": (batch, 1, 1, rows)}
    return model_of(steps, inputs, {f"x{layers}": (batch, rows, width)}, constants)


def inputs_of(program: Program) -> Arrays:
    return {t.name: RNG.standard_normal([int(n) for n in t.shape]).astype(np.float32) for t in program.inputs}  # type: ignore[arg-type]


def cut(batches: Batches, inputs: Mapping[str, np.ndarray]) -> list[Arrays]:
    """The inputs of every part."""
    pieces = {n: np.split(a, batches.parts, batches.inputs[n]) if n in batches.inputs else [a] * batches.parts
              for n, a in inputs.items()}  # fmt: skip
    return [{name: each[part] for name, each in pieces.items()} for part in range(batches.parts)]


def joined(batches: Batches, found: Sequence[Mapping[str, np.ndarray]]) -> Arrays:
    return {n: np.concatenate([part[n] for part in found], dim) for n, dim in batches.outputs.items()}


def same(found: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> None:
    for name, array in right.items():
        np.testing.assert_allclose(found[name], array, 1e-5, 1e-5 * float(np.abs(array).max()))


@pytest.mark.parametrize("parts", [2, 3, 6])
def test_parts_together_are_the_whole(parts: int) -> None:
    program = program_of(attention(6))
    batches = in_parts(program, parts)
    assert batches.inputs == {"x0": 0, "mask": 0}
    inputs = inputs_of(program)
    found = [evaluate(batches.program, each) for each in cut(batches, inputs)]
    same(joined(batches, found), evaluate(program, inputs))


def test_a_batch_behind_a_sequence_is_found() -> None:
    """The first dimension is summed over by what follows it, so that the second one is the batch."""
    steps = [("Softmax", ["x"], "p", {"axis": 0}), ("MatMul", ["p", "w"], "y", {})]
    program = program_of(model_of(steps, {"x": (8, 4, 16)}, {"y": (8, 4, 16)}, {"w": weights(16, 16)}))
    batches = in_parts(program, 4)
    assert batches.inputs == {"x": 1} and batches.outputs == {"y": 1}
    inputs = inputs_of(program)
    same(joined(batches, [evaluate(batches.program, each) for each in cut(batches, inputs)]), evaluate(program, inputs))


@pytest.mark.parametrize("steps, constants, message", [
    ([("Relu", ["x"], "y", {})], {}, "micro_batches=3: dimension 0 of the output 'y' has 4, take a divisor of it"),
    ([("ReduceSum", ["x", "axes"], "m", {}), ("Sub", ["x", "m"], "y", {})], {"axes": np.array([0, 1])},
     "micro_batches=4: 'm' needs all of 'x'"),
    ([("Add", ["x", "c"], "y", {})], {"c": np.arange(64, dtype=np.float32).reshape(4, 16)},
     "micro_batches=4: the constant 'c' is another one for every part"),
])  # fmt: skip
def test_what_cannot_be_cut_is_named(
    steps: list[tuple[str, list[str], str, dict[str, object]]], constants: Arrays, message: str
) -> None:
    program = program_of(model_of(steps, {"x": (4, 16)}, {"y": (4, 16)}, constants))
    with pytest.raises(OptionError) as error:
        in_parts(program, 3 if "divisor" in message else 4)
    assert str(error.value) == message


@dataclass
class Rank:
    """One rank by the interpreter: its turns, what it has for every part, and how far it is with each other rank."""

    number: int
    sharded: Sharded
    values: list[Arrays]
    turn: Turn | None = None
    asked: dict[int, int] = field(default_factory=dict)  # by rank, arrays that were asked for
    sent: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)  # by step and part

    def __post_init__(self) -> None:
        self.program = rank_program(self.sharded, self.number)
        moves = [step if isinstance(step, Transfer) else None for step in self.program.steps]
        results = set(self.program.outputs.values())
        self.order: Iterator[Turn] = turns(moves, self.program.when, results, self.sharded.parts)
        self.turn = next(self.order, None)


class Together:
    """All ranks in turns. What is sent is gone only when the other has asked for it, as strictly as there can be."""

    def __init__(self, sharded: Sharded, parts: Sequence[Arrays]) -> None:
        self.ranks = [Rank(n, sharded, [dict(each) for each in parts]) for n in range(sharded.ranks)]
        self.boxes: dict[tuple[int, int, bool], list[np.ndarray]] = {}  # what passes between stages has its own
        self.told: set[tuple[int, int, int]] = set()

    def run(self) -> list[Arrays]:
        while any(rank.turn for rank in self.ranks):
            moved = False
            for rank in self.ranks:
                while rank.turn is not None and self._done(rank, rank.turn):
                    rank.turn, moved = next(rank.order, None), True
            assert moved, "every rank waits for another"
        assert not any(self.boxes.values()), "something was sent that nobody took"
        first = self.ranks[0]
        return [{n: part[local] for n, local in first.program.outputs.items()} for part in first.values]

    def _done(self, rank: Rank, turn: Turn) -> bool:
        step, values = rank.program.steps[turn.step], rank.values[turn.part]
        if isinstance(step, Segment):
            values.update(evaluate(step.program, values))
            return True
        if turn.verb is Verb.DO:
            return self._exchanged(rank, turn, step, values)
        if step.takes:
            return self._taken(rank, turn, step, values)
        return self._sent(rank, turn, step, values)

    def _taken(self, rank: Rank, turn: Turn, step: Transfer, values: Arrays) -> bool:
        ((peer, _),) = step.takes
        if turn.verb is Verb.BEGIN:
            rank.asked[peer] = rank.asked.get(peer, 0) + 1
            return True
        if not self.boxes.get((peer, rank.number, True)):
            return False
        values[step.target] = self.boxes[peer, rank.number, True].pop(0)
        return True

    def _sent(self, rank: Rank, turn: Turn, step: Transfer, values: Arrays) -> bool:
        ((peer, _),) = step.sends
        if turn.verb is Verb.FINISH:
            return self.ranks[peer].asked.get(rank.number, 0) > rank.sent[turn.step, turn.part][1]
        number = sum(to == peer for to, _ in rank.sent.values())
        rank.sent[turn.step, turn.part] = peer, number
        self.boxes.setdefault((rank.number, peer, True), []).append(values[step.source])
        return True

    def _exchanged(self, rank: Rank, turn: Turn, step: Transfer, values: Arrays) -> bool:
        everywhere = step.kind == "all-reduce"
        if (rank.number, turn.step, turn.part) not in self.told:
            for peer, place in [(p, ()) for p in step.peers if p != rank.number] if everywhere else step.sends:
                self.boxes.setdefault((rank.number, peer, False), []).append(values[step.source][place])
            self.told.add((rank.number, turn.step, turn.part))
        takes = [(peer, ()) for peer in step.peers] if everywhere else step.takes
        if any(peer != rank.number and not self.boxes.get((peer, rank.number, False)) for peer, _ in takes):
            return False
        found = np.zeros(step.shape, step.dtype)
        for number, (peer, place) in enumerate(takes):
            mine = peer == rank.number
            own = values[step.source][() if everywhere else step.own] if mine else \
                self.boxes[peer, rank.number, False].pop(0)  # fmt: skip
            found[place] = own if step.operator is None or not number else UFUNCS[step.operator](found[place], own)
        values[step.target] = found
        return True


def agrees_in_parts(program: Program, batches: Batches, sharded: Sharded) -> None:
    inputs = inputs_of(program)
    same(joined(batches, Together(sharded, cut(batches, inputs)).run()), evaluate(program, inputs))


@pytest.mark.parametrize("mesh, parts", [
    ({"pp": 2}, 6), ({"pp": 3}, 2), pytest.param({"pp": 2, "tp": 2}, 3, marks=pytest.mark.slow),
])  # fmt: skip
def test_stages_are_at_different_parts_and_give_the_same(mesh: dict[str, int], parts: int) -> None:
    program = program_of(attention(6, layers=3 if mesh["pp"] == 3 else 2))
    batches = in_parts(program, parts)
    sharded = share_out(batches.program, cluster(2e9, 1e-9, **mesh), ["tp"], "pp", parts)
    assert len(sharded.stages) == mesh["pp"]
    agrees_in_parts(program, batches, sharded)
    slowest = max(stage.seconds for stage in sharded.stages)
    assert sharded.seconds == pytest.approx(sum(s.seconds for s in sharded.stages) + (parts - 1) * slowest)


def test_a_table_that_both_ends_read_is_shared_out_to_all_stages() -> None:
    """Words looked up first and compared with last, two thirds of the weights, written both ways round: each of four
    ranks has its quarter once, and with it a stage of the layers between."""
    words, width, layers, ranks, parts = 256, 32, 4, 4, 3
    steps: list[tuple[str, list[str], str, dict[str, object]]] = [("Gather", ["table", "tokens"], "x0", {})]
    for n in range(layers):
        steps += [("MatMul", [f"x{n}", f"w{n}"], f"h{n}", {}), ("Relu", [f"h{n}"], f"x{n + 1}", {})]
    steps.append(("MatMul", [f"x{layers}", "turned"], "y", {}))
    constants = {"table": weights(words, width), **{f"w{n}": weights(width, width) for n in range(layers)}}
    constants["turned"] = np.ascontiguousarray(constants["table"].T)
    ports = {"tokens": (6,)}, {"y": (6, words)}
    written = program_of(model_of(steps, *ports, constants, {"tokens": TensorProto.INT64}))
    program = without_turned(written)
    batches = in_parts(program, parts)
    sharded = share_out(batches.program, cluster(1e12, 1e-12, pp=ranks), (), "pp", parts)
    assert [len(stage.ranks) for stage in sharded.stages] == [ranks, *[1] * ranks, ranks]
    whole = 4 * (words * width + layers * width * width)
    assert sum(array.nbytes for array in program.constants.values()) == whole
    assert [rank_program(sharded, rank).weights for rank in range(ranks)] == [whole // ranks] * ranks
    inputs = {"tokens": RNG.integers(0, words, 6)}
    right = evaluate(written, inputs)
    same(joined(batches, Together(sharded, cut(batches, inputs)).run()), right)
    same(joined(batches, [evaluate_sharded(sharded, each) for each in cut(batches, inputs)]), right)
    busiest = sharded.stages[0].seconds + max(s.seconds for s in sharded.stages[1:-1]) + sharded.stages[-1].seconds
    assert sharded.seconds == pytest.approx(sum(s.seconds for s in sharded.stages) + (parts - 1) * busiest)


def test_ranks_with_several_stages_are_predicted_turn_by_turn() -> None:
    """Rank 0 has the first and the last of three stages. Where rank 1 is the slower one, each further part is as late
    as that; where rank 0 is, it begins the last stage of one part before the first of a later one."""
    alone = Mesh((("tp", 1),))
    stages = tuple(PipelineStage(alone, first, (), seconds) for first, seconds in ((0, 2.0), (1, 3.0), (0, 1.0)))
    program = program_of(attention(1))
    assert [Sharded(program, stages, parts).seconds for parts in (1, 2, 3)] == [6.0, 9.0, 12.0]
    behind = (*stages[:1], PipelineStage(alone, 1, (), 1.0), PipelineStage(alone, 0, (), 3.0))
    assert [Sharded(program, behind, parts).seconds for parts in (1, 2, 3)] == [6.0, 10.0, 15.0]


@pytest.mark.parametrize("sizes", [(2, 1), pytest.param((3, 1, 2), marks=pytest.mark.slow)])
def test_stages_may_have_meshes_of_different_sizes(sizes: tuple[int, ...]) -> None:
    program = program_of(attention(6, layers=len(sizes)))
    batches = in_parts(program, 2)
    meshes = [cluster(1e11, 1e-9, tp=size) for size in sizes]
    along = cluster(1e11, 1e-9, pp=len(sizes)).links[0]
    sharded = share_out_in_stages(batches.program, meshes, along, ["tp"], 2)
    assert tuple(stage.mesh.ranks for stage in sharded.stages) == sizes
    agrees_in_parts(program, batches, sharded)


def test_a_rank_is_one_part_ahead_and_not_more() -> None:
    """Sends of three parts: the first is waited for before the third is begun, the others in the end."""
    send = Transfer("send", "a", "a", (1,), np.dtype(np.float32), sends=((1, (slice(0, 1),)),))
    order = [(turn.verb.value, turn.step, turn.part) for turn in turns([None, send], [When(0, 0)] * 2, (), 3)]
    assert order == [
        ("do", 0, 0), ("begin", 1, 0), ("do", 0, 1), ("begin", 1, 1), ("do", 0, 2), ("finish", 1, 0), ("begin", 1, 2),
        ("finish", 1, 1), ("finish", 1, 2),
    ]  # fmt: skip


def layers_of(count: int, rows: int = 64, width: int = 256) -> Program:
    steps = [("MatMul", [f"x{n}", f"w{n}"], f"x{n + 1}", {}) for n in range(count)]
    return program_of(model_of(steps, {"x0": (rows, width)}, {f"x{count}": (rows, width)},
                               {f"w{n}": weights(width, width) for n in range(count)}))  # fmt: skip


def test_meshes_and_stages_are_found_and_are_no_worse_than_any_that_can_be_said() -> None:
    program = layers_of(4)
    for parts in (1, 8):
        found = share_out_by_itself(program, cluster(1e9, 1e-6, ranks=4), parts)
        tried = [[1], [2], [4], [1, 1], [2, 2], [1, 2], [2, 1], [1, 1, 1, 1], [2, 1, 1]]
        along = cluster(1e9, 1e-6, pp=1).links[0]
        for sizes in tried:
            other = share_out_in_stages(program, [cluster(1e9, 1e-6, ranks=n) for n in sizes], along, (), parts)
            assert found.seconds <= other.seconds * 1.001, sizes
        assert found.ranks > 1 and "was chosen" in found.remarks[0]
        agrees_in_parts(program, Batches(program, 1, {}, {f"x{4}": 0}), Sharded(program, found.stages))


def test_where_links_are_slow_one_rank_is_taken_and_said_so() -> None:
    found = share_out_by_itself(layers_of(2), cluster(1e3, 1.0, ranks=4))
    assert found.ranks == 1 and "one rank alone is predicted to take least" in found.remarks[0]
    assert rank_program(found, 3).steps == ()


def test_weights_that_one_rank_may_not_hold_are_shared_out() -> None:
    program = layers_of(4)
    whole = sum(array.nbytes for array in program.constants.values())
    found = share_out_by_itself(program, cluster(1e3, 1.0, ranks=4), 1, whole / 2)
    assert found.ranks > 1
    assert max(rank_program(found, rank).weights for rank in range(found.ranks)) <= whole / 2
    with pytest.raises(OptionError, match="the weights do not fit: a rank may have 0.1 MiB"):
        share_out_by_itself(program, cluster(1e3, 1.0, ranks=2), 1, whole / 16)
