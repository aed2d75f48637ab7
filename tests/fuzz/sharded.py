"""Brute force for programs over meshes: what may be cut, found by poisoning what a rank would not have; random ways to
share a program out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from tests.fuzz.programs import random_arrays
from tilewright.ir.analysis.pieces import gives, part_of
from tilewright.ir.analysis.verify import verify_program
from tilewright.ir.forms.compute import Compute, Map, Program, Reduce, reads
from tilewright.ir.forms.expr import Axis
from tilewright.ir.forms.mesh import OPERATORS, Mesh, Spread, slices
from tilewright.ir.forms.sharded import PipelineStage, Sharded, ShardedCompute, Step
from tilewright.ir.forms.tensor import Tensor, extents
from tilewright.ir.meaning.interpret import bind_inputs, evaluate, evaluate_computes
from tilewright.tile_graph.sharding.routes import is_held, route
from tilewright.tile_graph.sharding.strategies import strategies
from tilewright.transform.spmd import Segment, Transfer, rank_program

UFUNCS = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}
Values = dict[Tensor, np.ndarray]


def values_of(program: Program, seed: int) -> Values:
    """Every tensor of a program, on random inputs."""
    return evaluate_computes(program.computes, bind_inputs(program, random_arrays(program, seed)))


def axes_to_cut(compute: Compute, parts: int) -> Iterator[Axis]:
    assert isinstance(compute, Map | Reduce)
    summed = compute.reduce_axes if isinstance(compute, Reduce) and compute.monoid.operator in OPERATORS else ()
    for axis in (*compute.axes, *summed):
        if (parts - 1) * -(-int(axis.extent) // parts) < int(axis.extent):  # type: ignore[arg-type]
            yield axis


def is_enough(compute: Compute, cut: Axis, mesh: Mesh, tensor: Tensor, spread: Spread, values: Values) -> bool:
    """Whether every rank's part comes out the same when it has no more of a tensor than a spread says."""
    piece = ShardedCompute(compute, (cut,), {}, gives(compute, (cut,)))
    for at in mesh.coordinates:
        outputs = tuple(Tensor(t.name, tuple(n for _, n in piece.gives.place(extents(t), mesh, at)), t.dtype)
                        for t in compute.outputs)  # fmt: skip
        part = part_of(piece, mesh, at, outputs, {})
        known = {t: values[t] for t in reads(compute)}
        for poison in poisons(values[tensor]):
            mine = poison.copy()
            here = slices(spread.place(extents(tensor), mesh, at))
            mine[here] = values[tensor][here]
            right = evaluate_computes((part,), dict(known))
            found = evaluate_computes((part,), {**known, tensor: mine})
            if any(not np.array_equal(right[t], found[t], equal_nan=True) for t in part.outputs):
                return False
    return True


def poisons(array: np.ndarray) -> list[np.ndarray]:
    if array.dtype.kind == "f":
        return [np.full_like(array, np.nan)]
    if array.dtype.kind == "b":
        return [~array]
    return [array + 1, array - 3]


def random_sharded(program: Program, mesh: Mesh, rng: np.random.Generator) -> Sharded:
    """Every compute shared out in a random way, with the exchanges that it takes."""
    steps: list[Step] = []
    held: dict[Tensor, list[Spread]] = {}
    whole = Spread.whole(mesh)

    def brought(tensor: Tensor, want: Spread) -> Spread:
        have = held[tensor]
        ready = [each for each in have if is_held(extents(tensor), each, want, mesh)]
        if ready:
            return ready[-1]
        exchanges, final = route(tensor, have[0], want, mesh)
        steps.extend(exchanges)
        have.extend(step.after for step in exchanges)
        return final

    for compute in program.computes:
        ways = list(strategies(compute, mesh))
        chosen = ways[int(rng.integers(len(ways)))]
        read_as: dict[Tensor, Spread] = {}
        for tensor, needs in chosen.needs.items():
            want = needs[int(rng.integers(len(needs)))]
            read_as[tensor] = want if tensor not in held else brought(tensor, want)
        steps.append(chosen.piece(compute, read_as))
        for tensor in compute.outputs:
            held[tensor] = [chosen.gives]
    for tensor in program.outputs:
        if tensor in held:
            brought(tensor, whole)
    return Sharded(program, (PipelineStage(mesh, 0, tuple(steps)),))


def run_ranks(sharded: Sharded, inputs: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[int, int]]:
    """All ranks' own Programs by the interpreter, in turns, with what passes between them in boxes. Gives what rank 0
    has in the end, and the bytes of weights on every rank."""
    programs = [rank_program(sharded, rank) for rank in range(sharded.ranks)]
    names = sharded.program.input_names or tuple(t.name for t in sharded.program.inputs)
    given = {t.name: inputs.get(t.name, inputs.get(n)) for t, n in zip(sharded.program.inputs, names, strict=True)}
    values = [dict(given) for _ in programs]
    boxes: dict[tuple[int, int], list[np.ndarray]] = {}
    places = [0] * len(programs)
    sent: set[tuple[int, int]] = set()
    while any(place < len(p.steps) for place, p in zip(places, programs, strict=True)):
        moved = False
        for rank, program in enumerate(programs):
            while (at := places[rank]) < len(program.steps):
                if not _step(program.steps[at], rank, at, values[rank], boxes, sent):
                    break
                places[rank] += 1
                moved = True
        assert moved, "every rank waits for another"
    assert not any(boxes.values()), "something was sent that nobody took"
    known = {t.name: a for t, a in sharded.program.constants.items()} | values[0]
    return {name: known[local] for name, local in programs[0].outputs.items()}, {p.rank: p.weights for p in programs}


def _step(
    step: Segment | Transfer, rank: int, number: int, values: dict[str, np.ndarray],
    boxes: dict[tuple[int, int], list[np.ndarray]], sent: set[tuple[int, int]],
) -> bool:  # fmt: skip
    if isinstance(step, Segment):
        verify_program(step.program)
        values.update(evaluate(step.program, values))
        return True
    everywhere = step.kind == "all-reduce"
    sends = [(peer, ()) for peer in step.peers if peer != rank] if everywhere else step.sends
    if (rank, number) not in sent:
        for peer, place in sends:
            boxes.setdefault((rank, peer), []).append(values[step.source][place])
        sent.add((rank, number))
    takes = [(peer, ()) for peer in step.peers] if everywhere else step.takes
    others = [peer for peer, _ in takes if peer != rank]
    if any(not boxes.get((peer, rank)) for peer in others):
        return False
    if takes:
        found = np.zeros(step.shape, step.dtype)
        for turn, (peer, place) in enumerate(takes):
            own = values[step.source][() if everywhere else step.own] if peer == rank else boxes[peer, rank].pop(0)
            found[place] = own if step.operator is None or not turn else UFUNCS[step.operator](found[place], own)
        values[step.target] = found
    return True
