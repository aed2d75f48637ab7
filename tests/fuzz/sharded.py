"""Brute force for programs over meshes: what may be cut, found by poisoning what a rank would not have; random ways to
share a program out."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.fuzz.programs import random_arrays
from tilewright.ir.analysis.pieces import gives, part_of
from tilewright.ir.forms.compute import Compute, Map, Program, Reduce, reads
from tilewright.ir.forms.expr import Axis
from tilewright.ir.forms.mesh import OPERATORS, Mesh, Part, Spread, slices
from tilewright.ir.forms.sharded import Exchange, Piece, Sharded, Stage, Step
from tilewright.ir.forms.tensor import Tensor, extents
from tilewright.ir.meaning.interpret import bind_inputs, evaluate_computes
from tilewright.tile_graph.sharding.routes import is_held, route
from tilewright.tile_graph.sharding.strategies import strategies

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
    piece = Piece(compute, (cut,), {}, gives(compute, (cut,)))
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
    return Sharded(program, (Stage(mesh, 0, tuple(steps)),))


def kinds(sharded: Sharded) -> set[str]:
    return {step.kind for _, step in sharded.exchanges()}


__all__ = ["Exchange", "Part", "axes_to_cut", "is_enough", "kinds", "random_sharded", "values_of"]
