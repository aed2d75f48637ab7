"""Random programs over meshes: no cut that propagation finds is wrong, and none is missed; every way to share them out
gives what one process gives."""

from __future__ import annotations

import numpy as np
import pytest

from tests.fuzz.programs import random_arrays, random_program
from tests.fuzz.seeds import seeds
from tests.fuzz.sharded import axes_to_cut, is_enough, random_sharded, run_ranks, values_of
from tests.fuzz.test_programs import told
from tilewright.ir.forms.compute import Map, Reduce, reads
from tilewright.ir.forms.mesh import AxisPart, Mesh, Spread
from tilewright.ir.forms.sharded import from_json
from tilewright.ir.forms.tensor import extents
from tilewright.ir.meaning.interpret import evaluate
from tilewright.ir.meaning.interpret_sharded import evaluate_sharded
from tilewright.tile_graph.sharding.check import check_sharded
from tilewright.tile_graph.sharding.strategies import strategies
from tilewright.transform.clean.fold import fold_constants

ALL, OFTEN = 200, 60
QUICK = (1, 2, 3, 5, 8, 13, 21, 34)
MESHES = ((("a", 2),), (("a", 3),), (("a", 2), ("b", 2)), (("a", 2), ("b", 3)))


@pytest.mark.parametrize("seed", seeds(ALL, OFTEN, QUICK))
def test_cuts_are_those_of_brute_force(seed: int) -> None:
    program = fold_constants(random_program(seed))
    values = values_of(program, seed)
    mesh = Mesh((("a", 2 + seed % 2),))
    with told(seed, program):
        for compute in program.computes:
            if not isinstance(compute, Map | Reduce):
                continue
            found = {way.cuts[0]: way for way in strategies(compute, mesh)}
            for axis in axes_to_cut(compute, mesh.ranks):
                assert axis in found, f"{compute.outputs[0].name} is not cut along {axis}"
                for tensor in reads(compute):
                    spreads = [Spread((AxisPart(dim),)) for dim in range(tensor.rank)]
                    able = [s for s in spreads if s.fits(extents(tensor), mesh)]
                    right = {s for s in able if is_enough(compute, axis, mesh, tensor, s, values)}
                    given = {s for s in found[axis].needs[tensor] if s in able}
                    assert given == right, f"{compute.outputs[0].name} cut along {axis}: {tensor.name}"
                    for spread in found[axis].needs[tensor]:
                        assert is_enough(compute, axis, mesh, tensor, spread, values)


@pytest.mark.parametrize("seed", seeds(ALL, OFTEN, QUICK))
def test_shared_out_at_random_gives_the_same(seed: int) -> None:
    program = fold_constants(random_program(seed))
    inputs = random_arrays(program, seed)
    rng = np.random.default_rng([seed, 11])
    with told(seed, program):
        mesh = Mesh(MESHES[seed % len(MESHES)])
        sharded = random_sharded(program, mesh, rng)
        check_sharded(sharded)
        again = from_json(sharded.to_json(), program)
        assert again == sharded
        right, found = evaluate(program, inputs), evaluate_sharded(again, inputs)
        by_ranks, _ = run_ranks(again, inputs)
        for name, array in right.items():
            tolerance = 2e-2 if array.dtype == np.float16 else 1e-4
            np.testing.assert_allclose(found[name], array, tolerance, tolerance)
            np.testing.assert_allclose(by_ranks[name], array, tolerance, tolerance)
