"""The integer program against trying everything."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from tilewright.schedule.cluster.choices import Choices, Hub, TensorReader, solve_as_program, solve_by_trying
from tilewright.schedule.cluster.reduced import Reduced, solve

pytest.importorskip("scipy", reason="integer programs are scipy's")


def random_choices(seed: int) -> Choices:
    """Up to ten nodes in a random order of reading, tensors with several readers, some with a limit on bytes."""
    rng = np.random.default_rng([seed, 3])
    count = int(rng.integers(2, 11))
    sizes = [int(rng.integers(1, 4 if count > 7 else 5)) for _ in range(count)]
    seconds = tuple(tuple(float(x) for x in rng.integers(0, 9, n)) for n in sizes)
    weights = tuple(tuple(int(x) for x in rng.integers(0, 9, n)) for n in sizes)
    hubs = []
    for maker in (None, *range(count - 1)):
        later = list(range(0 if maker is None else maker + 1, count))
        readers = sorted(rng.choice(later, int(rng.integers(1, min(3, len(later)) + 1)), replace=False).tolist())
        spreads, needs = int(rng.integers(1, 4)), int(rng.integers(1, 4))
        gives = tuple(int(x) for x in rng.integers(0, spreads, 1 if maker is None else sizes[maker]))
        found = tuple(TensorReader(r, tuple(int(x) for x in rng.integers(0, needs, sizes[r]))) for r in readers)
        table = rng.integers(0, 12, (spreads, needs)) * rng.integers(0, 2, (spreads, needs))
        hubs.append(Hub(maker, gives, found, tuple(tuple(float(x) for x in row) for row in table)))
    least, most = sum(map(min, weights)), sum(map(max, weights))
    limit = inf if rng.random() < 0.5 else float(rng.integers(least - 1, most + 2))
    return Choices(seconds, weights, tuple(hubs), limit)


@pytest.mark.parametrize("seed", [pytest.param(s, marks=() if s < 12 else pytest.mark.slow) for s in range(100)])
def test_the_integer_program_finds_what_trying_everything_finds(seed: int) -> None:
    problem = random_choices(seed)
    right, found = solve_by_trying(problem), solve_as_program(problem)
    if right is None or found is None:
        assert right is None and found is None
        return
    assert found[0] == pytest.approx(right[0], rel=1e-3)
    assert problem.cost(found[1]) == found[0]
    best = solve(problem)
    assert best is not None and best[0] == pytest.approx(right[0], rel=1e-3)


def test_a_tensor_is_exchanged_once_for_all_that_need_the_same() -> None:
    hub = Hub(None, (0,), (TensorReader(0, (0,)), TensorReader(1, (0,))), ((5.0,),))
    problem = Choices(((1.0,), (1.0,)), ((0,), (0,)), (hub,))
    found = solve_as_program(problem)
    assert found is not None and found[0] == 7.0


def test_a_chain_is_decided_without_an_integer_program() -> None:
    rng = np.random.default_rng(5)
    sizes = [4] * 9
    seconds = tuple(tuple(float(x) for x in rng.integers(0, 9, n)) for n in sizes)
    table = [tuple(tuple(float(x) for x in row) for row in rng.integers(0, 9, (4, 4))) for _ in range(8)]
    hubs = tuple(Hub(i, (0, 1, 2, 3), (TensorReader(i + 1, (0, 1, 2, 3)),), table[i]) for i in range(8))
    problem = Choices(seconds, tuple((0,) * n for n in sizes), hubs)
    assert not Reduced(problem).left()[1]
    right, found = solve_as_program(problem), solve(problem)
    assert right is not None and found is not None and found[0] == pytest.approx(right[0])


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("bound", [{"variables": 0}, {"work": 0}])
def test_a_search_that_is_cut_short_still_finds_choices_that_can_be(seed: int, bound: dict[str, int]) -> None:
    problem = random_choices(seed)
    right, found = solve_by_trying(problem), solve_as_program(problem, **bound)
    if right is None or found is None:
        assert right is None and found is None
        return
    assert problem.cost(found.chosen) == pytest.approx(found.seconds)
    assert right.seconds <= found.seconds + 1e-9
    assert found.is_least <= (found.seconds == pytest.approx(right.seconds, rel=1e-3))
    for node, choices in enumerate(problem.seconds):  # no other choice of one node is better
        others = [problem.cost([*found.chosen[:node], c, *found.chosen[node + 1 :]]) for c in range(len(choices))]
        assert min(others) >= found.seconds - 1e-9
