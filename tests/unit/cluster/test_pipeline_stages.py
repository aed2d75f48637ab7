"""Stages by dynamic programming against trying everything, and pipelines of models against one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, pairwise
from math import inf

import numpy as np
import pytest

from tests.cpu_stages import model_of
from tests.unit.cluster.test_found import agrees, attention_block, cluster, exchanged, program_of, weights
from tilewright.schedule.cluster.pipeline import share_out
from tilewright.schedule.cluster.stages import Ends, StagePlan, best_stages, even_stages

SIZES = (1, 2, 4, 8)


def every(first: int, layers: int, devices: int) -> Iterator[tuple[StagePlan, ...]]:
    if first == layers:
        if devices == 0:
            yield ()
        return
    for last in range(first + 1, layers + 1):
        for size in SIZES:
            if size <= devices:
                here = StagePlan(first, last, SIZES.index(size))
                yield from ((here, *rest) for rest in every(last, layers, devices - size))


@pytest.mark.parametrize("seed", range(12))
def test_stages_are_those_of_brute_force(seed: int) -> None:
    rng = np.random.default_rng([seed, 9])
    layers, devices, parts = int(rng.integers(1, 7)), int(rng.choice([2, 4, 8])), int(rng.choice([1, 4, 16]))
    work = rng.integers(1, 20, layers)
    known = {(i, j, s): float(work[i:j].sum()) / s**0.8 + float(rng.random()) if rng.random() < 0.9 else inf
             for i in range(layers) for j in range(i + 1, layers + 1) for s in SIZES}  # fmt: skip

    def total(plans: tuple[StagePlan, ...]) -> float:
        times = [known[p.first, p.last, SIZES[p.mesh]] for p in plans]
        return sum(times) + (parts - 1) * max(times)

    right = min(map(total, every(0, layers, devices)), default=inf)
    found = best_stages(layers, devices, SIZES, lambda i, j, mesh: known[i, j, SIZES[mesh]], parts)
    if found is None:
        assert right == inf
    else:
        assert found[0] == pytest.approx(right) and total(found[1]) == pytest.approx(right)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("fewer", [False, True])
def test_stages_that_fit_with_those_behind_them_are_those_of_brute_force(seed: int, fewer: bool) -> None:
    """What a stage holds grows with the stages behind it; all devices, or as many as it takes."""
    rng = np.random.default_rng([seed, 10])
    layers, devices, parts = int(rng.integers(2, 6)), int(rng.choice([2, 4, 8])), int(rng.choice([1, 4, 16]))
    work, held, room = rng.integers(1, 20, layers), rng.integers(1, 9, layers), float(rng.uniform(6, 30))

    def seconds(first: int, last: int, mesh: int) -> float:
        return float(work[first:last].sum()) / SIZES[mesh] ** 0.8

    def fits(first: int, last: int, mesh: int, behind: int) -> bool:
        return float(held[first:last].sum()) * (1 + behind) / SIZES[mesh] <= room

    def total(plans: tuple[StagePlan, ...]) -> float:
        if not all(fits(p.first, p.last, p.mesh, len(plans) - 1 - n) for n, p in enumerate(plans)):
            return inf
        times = [seconds(p.first, p.last, p.mesh) for p in plans]
        return sum(times) + (parts - 1) * max(times)

    used = range(1, devices + 1) if fewer else [devices]
    right = min((total(plans) for count in used for plans in every(0, layers, count)), default=inf)
    found = best_stages(layers, devices, SIZES, seconds, parts, fits=fits, fewer=fewer)
    if found is None:
        assert right == inf
    else:
        assert found[0] == pytest.approx(right) and total(found[1]) == pytest.approx(right)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("is_bound", [False, True])
def test_stages_with_ends_that_all_share_are_those_of_brute_force(seed: int, is_bound: bool) -> None:
    """The quickest within a bound on what a device holds; without one, those that hold an even share, if there are such
    and they are not much slower."""
    rng = np.random.default_rng([seed, 11])
    layers, count = int(rng.integers(3, 7)), int(rng.integers(2, 4))
    work, held, passing = rng.integers(1, 20, layers), 2.0 ** rng.integers(2, 6, layers), float(rng.uniform(0, 5))
    places = [(a, b) for a in range(layers + 1) for b in range(layers + 1)]

    def table(of: Callable[[int, int], float]) -> np.ndarray:
        return np.array([of(a, b) for a, b in places]).reshape(layers + 1, layers + 1)

    def outside(values: np.ndarray, a: int, b: int) -> float:
        return float(values[:a].sum() + values[b:].sum()) / count

    own = Ends(table(lambda a, b: float(work[a:b].sum()) if a < b else inf), table(lambda a, b: float(held[a:b].sum())))
    ends = Ends(table(lambda a, b: outside(work, a, b) + passing * ((a > 0) + (b < layers))),
                table(lambda a, b: outside(held, a, b)))  # fmt: skip

    def told(begins: tuple[int, ...]) -> tuple[float, float]:
        first, last = begins[0], begins[-1]
        return (float(ends.seconds[first, last]) + max(own.seconds[pair] for pair in pairwise(begins)),
                float(ends.held[first, last]) + max(own.held[pair] for pair in pairwise(begins)))  # fmt: skip

    every_one = [told(begins) for begins in combinations(range(layers + 1), count + 1)]
    share = 1.05 * float(held.sum()) / count
    room = float(rng.uniform(0.9, 2)) * share if is_bound else share
    even = min((seconds for seconds, size in every_one if size <= room), default=inf)
    found = even_stages(own, ends, count, room if is_bound else inf)
    if is_bound:
        assert found is None if even == inf else found is not None and told(found)[1] <= room
        assert found is None or told(found)[0] <= 1.002 * even
        return
    assert found is not None
    seconds, size = told(found)
    least = min(s * max(z, share) for s, z in every_one)
    assert (size <= share and seconds <= 1.002 * even) or seconds * max(size, share) <= 1.035 * least


def test_one_batch_in_many_parts_wants_even_stages() -> None:
    """With one part a single stage on all devices; with many, layers that do not scale are put behind each other."""
    def seconds(first: int, last: int, mesh: int) -> float:
        return float(last - first) * (1.0, 0.95, 0.9, 0.89)[mesh]  # hardly quicker on more devices

    one = best_stages(4, 4, SIZES, seconds, 1)
    many = best_stages(4, 4, SIZES, seconds, 64)
    assert one is not None and many is not None
    assert [SIZES[p.mesh] for p in one[1]] == [4]
    assert [SIZES[p.mesh] for p in many[1]] == [1, 1, 1, 1]


@pytest.mark.parametrize("mesh", [{"pp": 2}, {"pp": 2, "tp": 2}])
def test_a_pipeline_gives_what_one_process_gives(mesh: dict[str, int]) -> None:
    """Each stage has about half of the weights, what passes is sent, and results come back to the first rank."""
    pytest.importorskip("scipy", reason="integer programs are scipy's")
    sharded = share_out(program_of(attention_block()), cluster(2e9, 5e-5, **mesh), ["tp"], "pp")
    assert [len(stage.ranks) for stage in sharded.stages] == [mesh.get("tp", 1)] * 2
    assert exchanged(sharded)["send"] >= 1
    agrees(sharded, 0.7 / mesh.get("tp", 1))


def test_what_all_layers_read_does_not_keep_stages_from_being_even() -> None:
    """A mask that every layer reads is computed once and sent along with what passes."""
    width, layers = 96, 4
    steps = [("Mul", ["m", "m"], "mask", {})]
    for n in range(layers):
        steps += [("MatMul", [f"x{n}", f"w{n}"], f"h{n}", {}), ("Mul", [f"h{n}", "mask"], f"x{n + 1}", {})]
    constants = {f"w{n}": weights(width, width) for n in range(layers)}
    model = model_of(steps, {"x0": (64, width), "m": (1, width)}, {f"x{layers}": (64, width)}, constants)
    sharded = share_out(program_of(model), cluster(2e9, 5e-5, pp=2), (), "pp")
    agrees(sharded, 0.5)
