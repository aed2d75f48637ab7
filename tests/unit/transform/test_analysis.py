"""What is said of computes before anything is chosen, against what brute force finds on small random Programs."""

from __future__ import annotations

import time
from itertools import combinations, pairwise

import numpy as np
import pytest

from tests.cpu_stages import model_of, programs
from tests.fuzz.programs import Writer
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.bounds import upper
from tilewright.ir.forms.compute import Map, Program, Reduce, expressions, reads
from tilewright.ir.forms.expr import Axis, Const, Expr, Op, Var, load, loads, op, var
from tilewright.ir.forms.tensor import Tensor
from tilewright.target import machine
from tilewright.transform.analysis import (
    LiveRange,
    Relies,
    analyse,
    compulsory_bytes,
    intensity,
    is_compute_bound,
    operations,
    peak_bytes,
)

SEEDS = range(60)


def values_of(root: Expr, places: dict[Axis, np.ndarray]) -> np.ndarray:
    if isinstance(root, Const):
        return np.asarray(root.value)
    if isinstance(root, Var):
        return places[root.axis]
    assert isinstance(root, Op)
    return np.asarray(root.op.numpy(*(values_of(a, places) for a in root.args)))


def elements_read(compute: Map | Reduce, tensor: Tensor, guarded: bool = False) -> np.ndarray | None:
    """For every element of the result the elements of a tensor it reads, as places in the flat tensor, with `guarded`
    -1 outside of it; None where data say which."""
    summed = compute.reduce_axes if isinstance(compute, Reduce) else ()
    axes = (*compute.axes, *summed)
    grids = np.meshgrid(*(np.arange(int(upper(a.extent))) for a in axes), indexing="ij") if axes else []
    places = dict(zip(axes, grids, strict=True))
    shape = tuple(int(upper(a.extent)) for a in axes)
    own = int(np.prod([int(upper(a.extent)) for a in compute.axes]))
    found = []
    for node in loads(*expressions(compute)):
        if node.source is not tensor:
            continue
        if any(i.reads for i in node.indices):
            return None
        flat = np.zeros(shape, np.int64)
        inside = np.ones(shape, bool)  # elsewhere a condition around the read says that there is nothing to read
        for index, extent in zip(node.indices, tensor.shape, strict=True):
            here = values_of(index, places)
            inside &= (here >= 0) & (here < int(upper(extent)))
            flat = flat * int(upper(extent)) + here
        if guarded:
            flat = np.where(inside, flat, -1)
        found.append(flat.reshape(own, -1))
    return np.concatenate(found, axis=1)


@pytest.mark.parametrize("seed", SEEDS)
def test_agrees_with_brute_force(seed: int) -> None:
    program = Writer(seed).program()
    found = analyse(program)
    count = len(program.computes)
    maker = {t: p for p, c in enumerate(program.computes) for t in c.outputs}
    # reachability by closure
    reach = np.zeros((count, count), bool)
    for place, compute in enumerate(program.computes):
        for tensor in reads(compute):
            if tensor in maker:
                reach[maker[tensor], place] = True
    for middle in range(count):
        reach |= reach[:, middle : middle + 1] & reach[middle : middle + 1, :]
    for one, other in combinations(range(count), 2):
        assert found.independent(one, other) == (not reach[one, other] and not reach[other, one])
        assert found.independent(other, one) == found.independent(one, other)
        assert not reach[one, other] or found.depth[one] < found.depth[other]
    # life by asking every compute
    for tensor, start in {**dict.fromkeys(program.inputs, -1), **maker}.items():
        users = [p for p, c in enumerate(program.computes) if tensor in reads(c)]
        end = count if tensor in program.outputs else max((start, *users))
        assert found.live[tensor] == LiveRange(start, end)
    assert set(found.live) == {*program.inputs, *maker}
    # dependence by looking at every element
    for (place, tensor), relation in found.relations.items():
        compute = program.computes[place]
        if not isinstance(compute, Map | Reduce):
            continue
        elements = elements_read(compute, tensor)
        if elements is not None:
            most = max(len(set(row)) for row in elements)
            assert relation is (Relies.ONE if most == 1 else Relies.MANY), (compute.outputs[0].name, tensor.name)


@pytest.mark.parametrize("seed", SEEDS)
def test_bytes_are_those_of_elements_that_are_read(seed: int) -> None:
    """Never fewer than every element once, and no more than the tensors hold."""
    program = Writer(seed).program()
    for compute in program.computes:
        if not isinstance(compute, Map | Reduce):
            continue
        given = sum(int(np.prod(t.shape)) * t.dtype.bytes for t in compute.outputs)
        least = most = float(given)
        for tensor in reads(compute):
            elements = elements_read(compute, tensor, guarded=True)
            size = int(np.prod(tensor.shape)) * tensor.dtype.bytes
            least += 0 if elements is None else len(np.unique(elements[elements >= 0])) * tensor.dtype.bytes
            most += size
        assert least <= compulsory_bytes(compute) <= most
        assert operations(compute) >= 0


def test_a_product_and_its_bias() -> None:
    model = model_of([("MatMul", ["x", "w"], "p", {}), ("Add", ["p", "b"], "y", {})], {"x": (64, 128)}, {"y": (64, 32)},
                     {"w": np.ones((128, 32), np.float32), "b": np.ones(32, np.float32)})  # fmt: skip
    program = programs(model)["fold"]
    product, bias = program.computes
    assert operations(product) == 2 * 64 * 128 * 32
    assert compulsory_bytes(product) == 4 * (64 * 128 + 128 * 32 + 64 * 32)
    assert operations(bias) == 64 * 32
    found = analyse(program)
    assert {r for (p, _), r in found.relations.items() if p == 0} == {Relies.MANY}
    assert {r for (p, _), r in found.relations.items() if p == 1} == {Relies.ONE}
    assert intensity(product) > 9 > 1 > intensity(bias)
    assert peak_bytes(program) == 4 * 64 * 32


@pytest.mark.parametrize("name", ["neoverse_n1", "emerald_rapids", "h200"])
def test_large_products_are_bound_by_computing(name: str) -> None:
    arrays = {"w": np.ones((1024, 1024), np.float32)}
    large, small = (
        programs(model_of([("MatMul", ["x", "w"], "y", {})], {"x": (rows, 1024)}, {"y": (rows, 1024)}, arrays))["fold"]
        for rows in (4096, 1)
    )
    assert is_compute_bound(large.computes[0], machine(name))
    assert not is_compute_bound(small.computes[0], machine(name))


def test_long_programs_take_time_in_proportion() -> None:
    """20,000 computes in a chain, asked a thousand times who depends on whom."""
    tensors = [Tensor(f"t{n}", (4,), dtypes.float32) for n in range(20_001)]
    computes = []
    for before, after in pairwise(tensors):
        axis = Axis("i", 4)
        computes.append(Map(after, (axis,), op("neg", load(before, (var(axis),)))))
    start = time.process_time()
    found = analyse(Program((tensors[0],), (tensors[-1],), tuple(computes)))
    assert found.depth[-1] == 20_000
    assert not any(found.independent(n, n + 10) for n in range(0, 10_000, 10))
    assert time.process_time() - start < 10
