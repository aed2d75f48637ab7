"""Training steps of layers over meshes, by the costs of Alpa's public tests of its solver: as little is sent as there;
and stages on the numbers of its test of the dynamic programming.

What is compared are facts of those tests: sizes, meshes, and which exchanges are left. As there, products are cut along
every mesh axis, all else is free, and new weights lie as the old ones did.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise, product

import numpy as np
import pytest

from tests.cpu_stages import model_of
from tests.unit.cluster.test_found import cluster, program_of, weights
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import Program, Reduce
from tilewright.ir.forms.expr import Expr, load
from tilewright.ir.forms.tensor import Tensor
from tilewright.ops.builder import Builder
from tilewright.schedule.cluster.choices import Choices, Hub, TensorReader
from tilewright.schedule.cluster.pipeline import share_out
from tilewright.schedule.cluster.planner import MeshPlanner, Section
from tilewright.schedule.cluster.reduced import solve
from tilewright.schedule.cluster.stages import best_stages
from tilewright.target import Cluster, Link, MemoryLevel, machine
from tilewright.tile_graph.sharding.routes import sent_bytes
from tilewright.tile_graph.sharding.strategies import cut_choices

pytest.importorskip("scipy", reason="integer programs are scipy's")

_NEVER = 1e7  # more than anything here, and not so much that a solver's tolerance hides the rest


def training_step(layers: int, batch: int, width: int) -> tuple[Program, list[tuple[Tensor, Tensor]]]:
    """Layers without anything between them, the gradients of a squared error, and weights less these."""
    b = Builder()
    x, y = (Tensor(b.unique(name), (batch, width), dtypes.float32) for name in "xy")
    given = [Tensor(b.unique(f"given{n}"), (width, width), dtypes.float32) for n in range(layers)]
    weights = [b.map(f"w{n}", (width, width), lambda *i, t=t: load(t, i)) for n, t in enumerate(given)]

    def product(name: str, one: Tensor, other: Tensor, flip: tuple[bool, bool] = (False, False)) -> Tensor:
        rows = one.shape[1 if flip[0] else 0]
        columns = other.shape[0 if flip[1] else 1]
        inner = one.shape[0 if flip[0] else 1]

        def element(i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Expr:
            left = load(one, (r[0], i[0]) if flip[0] else (i[0], r[0]))
            return left * load(other, (i[1], r[0]) if flip[1] else (r[0], i[1]))

        return b.reduce(name, (rows, columns), (inner,), element, "add")

    values = [x]
    for number, weight in enumerate(weights):
        values.append(product(f"h{number}", values[-1], weight))
    gradient = b.map("loss", (batch, width), lambda *i: (load(values[-1], i) - load(y, i)) * 0.5)
    pairs = []
    for number in reversed(range(layers)):
        of_weight = product(f"g{number}", values[number], gradient, (True, False))
        old = weights[number]
        new = b.map(f"n{number}", (width, width), lambda *i, o=old, g=of_weight: load(o, i) - load(g, i))
        pairs.append((old, new))
        if number:
            gradient = product(f"d{number}", gradient, old, (False, True))
    return Program((x, y, *given), (), tuple(b.computes), b.constants), pairs


def least_sent(layers: int, batch: int, width: int, *sizes: int) -> float:
    """Bytes by the costs of each mesh axis; the second one is a hundred times as quick, where there is one."""
    program, pairs = training_step(layers, batch, width)
    links = tuple(Link(f"a{n}", size, 1.0 if n == 0 else 100.0, 0.0) for n, size in enumerate(sizes))
    host = MemoryLevel("host", 1 << 38, 64, 1e10)
    planner = MeshPlanner(program, Cluster(machine("neoverse_n1"), host, links), (), 0.0)
    for compute in program.computes:
        found = (planner._way(compute, cuts) for cuts in product(*cut_choices(compute, planner.mesh)))
        ways = [way for way in found if way is not None]
        cut = [w for w in ways if all(w.strategy.cuts)] if isinstance(compute, Reduce) else ways
        planner.ways[compute] = [replace(way, seconds=0.0) for way in cut]
    problem, _ = planner._problem(Section(program.computes, None, None), None, None, float("inf"))
    found = solve(with_pairs(problem, program, planner, pairs))
    assert found is not None
    return found[0]


def with_pairs(problem: Choices, program: Program, planner: MeshPlanner, pairs: list[tuple[Tensor, Tensor]]) -> Choices:
    """New weights lie as the old ones do."""
    numbers = {t: i for i, c in enumerate(program.computes) for t in c.outputs}
    hubs = list(problem.hubs)
    for old, new in pairs:
        lies = [[way.strategy.gives for way in planner.ways[program.computes[numbers[t]]]] for t in (old, new)]
        spreads = list(dict.fromkeys((*lies[0], *lies[1])))
        table = tuple(tuple(0.0 if a == b else _NEVER for b in spreads) for a in spreads)
        reader = TensorReader(numbers[new], tuple(map(spreads.index, lies[1])))
        hubs.append(Hub(numbers[old], tuple(map(spreads.index, lies[0])), (reader,), table))
    return replace(problem, hubs=tuple(hubs))


def all_reduce(elements: int, size: int) -> float:
    return 2 * (size - 1) / size * 4 * elements


def test_stages_on_the_numbers_of_its_test_are_the_best_there_are() -> None:
    """Eight layers on eight devices in meshes of any size, 16 parts, five costs of each stage from its seed: the least
    of all 3,432 ways."""
    layers = devices = 8
    costs = np.random.RandomState(42).rand(layers, layers, devices, 5).min(axis=3)

    def ways(total: int, count: int) -> list[tuple[int, ...]]:
        return [(0, *inner, total) for inner in combinations(range(1, total), count - 1)]

    def total(ends: tuple[int, ...], used: tuple[int, ...]) -> float:
        stages = zip(pairwise(ends), pairwise(used), strict=True)
        times = [float(costs[first, last - 1, after - before - 1]) for (first, last), (before, after) in stages]
        return sum(times) + 15 * max(times)

    every = [total(a, b) for n in range(1, 9) for a in ways(layers, n) for b in ways(devices, n)]
    found = best_stages(layers, devices, range(1, 9), lambda a, b, mesh: float(costs[a, b - 1, mesh]), 16)
    assert len(every) == 3432 and found is not None and found[0] <= min(every) * (1 + 1e-3)


@pytest.mark.parametrize("layers", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_a_large_batch_exchanges_gradients_alone(layers: int) -> None:
    assert least_sent(layers, 1024, 128, 4) <= 1.001 * layers * all_reduce(128 * 128, 4)


@pytest.mark.parametrize("layers", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_wide_layers_exchange_activations_alone(layers: int) -> None:
    assert least_sent(layers, 128, 1024, 4) <= 1.001 * (layers - 1) * all_reduce(128 * 1024, 4)


def attention(batch: int, rows: int, width: int, heads: int) -> Program:
    """Projections, attention by heads and the last projection."""
    split, joined = [batch, rows, heads, width // heads], [batch, rows, width]
    turned = {"q": [0, 2, 1, 3], "k": [0, 2, 3, 1], "v": [0, 2, 1, 3]}
    steps: list[tuple[str, list[str], str, dict[str, object]]] = []
    for n, perm in turned.items():
        steps += [("MatMul", ["x", f"w{n}"], f"{n}0", {}), ("Reshape", [f"{n}0", "split"], f"{n}1", {}),
                  ("Transpose", [f"{n}1"], n, {"perm": perm})]  # fmt: skip
    steps += [("MatMul", ["q", "k"], "s", {}), ("Softmax", ["s"], "p", {"axis": -1}), ("MatMul", ["p", "v"], "a", {}),
              ("Transpose", ["a"], "b", {"perm": [0, 2, 1, 3]}), ("Reshape", ["b", "joined"], "c", {}),
              ("MatMul", ["c", "wo"], "y", {})]  # fmt: skip
    constants = {f"w{n}": weights(width, width) for n in "qkvo"}
    constants |= {"split": np.array(split), "joined": np.array(joined)}
    return program_of(model_of(steps, {"x": (batch, rows, width)}, {"y": (batch, rows, width)}, constants))


def test_attention_exchanges_what_heads_add_up_to() -> None:
    """On four devices with a quarter of the weights each: no more than one all-reduce of the result."""
    sharded = share_out(attention(4, 128, 512, 16), cluster(tp=4), ["tp"])
    (stage,) = sharded.stages
    sent = sum(sent_bytes(step, stage.mesh) for _, step in sharded.exchanges())
    assert 0 < sent <= 1.001 * all_reduce(4 * 128 * 512, 4)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(4, 8), (8, 4), (3, 4)])
def test_a_mesh_of_two_axes_exchanges_both(sizes: tuple[int, int]) -> None:
    gradients = 2 * all_reduce(128 * 128, sizes[0]) / sizes[1]
    activations = all_reduce(1024 * 128, sizes[1]) / sizes[0] / 100
    assert least_sent(2, 1024, 128, *sizes) <= 1.001 * (gradients + activations)
