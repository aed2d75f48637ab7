"""Stages by dynamic programming against trying everything, and pipelines of models against one process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Set as AbstractSet
from math import inf

import numpy as np
import pytest
from onnx import ModelProto

from tests.cpu_stages import model_of
from tests.unit.cluster.test_found import agrees, attention_block, cluster, exchanged, program_of, weights
from tilewright.ir.forms.sharded import Exchange
from tilewright.schedule.cluster.even import Shared, even_stages
from tilewright.schedule.cluster.layers import PricedLayers, Runs, in_layers
from tilewright.schedule.cluster.pipeline import share_out
from tilewright.schedule.cluster.planner import MeshPlanner
from tilewright.schedule.cluster.stages import StagePlan, best_stages

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


def every_split(count: int, layers: range, first: int = 0) -> Iterator[dict[int, int]]:
    """Layers among groups, each with one run of what others leave: a run of all, or the ends of one around others."""
    if count == 1:
        if layers:
            yield dict.fromkeys(layers, first)
        return
    for place in range(1, len(layers)):
        for before in range(1, count):
            for a in every_split(before, layers[:place], first):
                yield from ({**a, **b} for b in every_split(count - before, layers[place:], first + before))
    for begin in range(1, len(layers)):
        for end in range(begin + 1, len(layers)):
            own = dict.fromkeys((*layers[:begin], *layers[end:]), first)
            yield from ({**own, **inner} for inner in every_split(count - 1, layers[begin:end], first + 1))


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("is_bound", [False, True])
def test_even_stages_are_those_of_brute_force(seed: int, is_bound: bool) -> None:
    """The quickest within a bound on what a rank holds, or within an even share; where there are none, those with about
    the least product of seconds and of what a rank holds. A weight that two layers read is held once by one that has
    both, and what is large may be shared by all."""
    rng = np.random.default_rng([seed, 11])
    layers, count = int(rng.integers(4, 8)), int(rng.integers(2, 4))
    work, held, passing = rng.integers(1, 20, layers), 2.0 ** rng.integers(2, 6, layers), float(rng.uniform(0, 5))
    results, tied = float(rng.uniform(0, 5)), float(rng.choice([0, 30]))
    twice = rng.choice(layers, 2, replace=False)

    def size_of(numbers: Collection[int]) -> float:
        return float(sum(held[n] for n in numbers)) + tied * any(n in numbers for n in twice)

    def runs(shared: AbstractSet[int] = frozenset()) -> Runs:
        def table(of: Callable[[int, int], float], nothing: float = 0.0) -> np.ndarray:
            return np.array([[of(a, b) if a < b else nothing for b in range(layers + 1)] for a in range(layers + 1)])

        own = [n not in shared for n in range(layers)]
        read = np.array([n in twice and own[n] for n in range(layers)])
        return Runs(
            table(lambda a, b: float(work[a:b] @ own[a:b]), inf),
            table(lambda a, b: passing * (a > 0)), table(lambda a, b: results * (a > 0 and b == layers)),
            table(lambda a, b: size_of([n for n in range(a, b) if own[n]])), ((int(tied), read),),
        )  # fmt: skip

    def sharing(shared: AbstractSet[int]) -> Shared:
        seconds = sum(work[n] / count + passing for n in shared)
        return Shared(shared, float(seconds), size_of(shared) / count, runs(shared))

    def told(split: Mapping[int, int], each: Shared) -> tuple[float, float]:
        seconds, most = [0.0] * count, 0.0
        for group in range(count):
            own = sorted(n for n in split if split[n] == group)
            for begin in (n for n in own if n - 1 not in own):
                end = next(n for n in range(begin, layers + 1) if n not in own)
                ends_there = results * (begin > 0 and end == layers and split[0] != group)
                seconds[group] += float(each.runs.computing[begin, end]) + passing * (begin > 0) + ends_there
            most = max(most, size_of([n for n in own if n not in each.layers]))
        return each.seconds + max(seconds), each.held + most

    def worth(split: Mapping[int, int]) -> float:
        """A rank has two stages only where it is worth them."""
        changes = sum(split[n] != split[n + 1] for n in range(layers - 1))
        return 1.05 if changes >= count else 1.0

    share = 1.05 * size_of(range(layers)) / count
    room = float(rng.uniform(0.9, 2)) * share if is_bound else share
    ratios = [max(size_of([n]) / room, work[n] * count / sum(work)) for n in range(layers)]
    large = [int(n) for n in np.argsort([-each for each in ratios], kind="stable") if ratios[n] > 0.5]
    options = [sharing(frozenset(large[:number])) for number in range(len(large) + 1)]
    every_one = [(*told(split, each), worth(split)) for each in options for split in every_split(count, range(layers))]
    even = min((seconds * more for seconds, size, more in every_one if size <= room), default=inf)
    parts = 1 << 30  # so many that only the slowest rank counts
    answer = even_stages(runs(), sharing, count, parts, room if is_bound else inf)
    if answer is None:
        assert is_bound and even == inf
        return
    found = answer.split
    shared = sharing(frozenset(n for n, group in enumerate(found.groups) if group is None))
    own = [[n for n, group in enumerate(found.groups) if group == each] for each in range(count)]
    seconds, most = found.seconds / parts, shared.held + max(map(size_of, own))
    if not shared.layers:
        split = {n: group for group, each in enumerate(own) for n in each}
        assert (seconds, most) == pytest.approx(told(split, shared))
    if even < inf:
        assert most <= room and seconds <= even * (1 + 1e-6)
    else:
        assert seconds * max(most, share) <= 1.32 * min(s * max(z, share) for s, z, _ in every_one)
    if answer.quicker is not None:
        assert answer.quicker.seconds * 1.5 < found.seconds and answer.quicker.room > room


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
    assert {rank for stage in sharded.stages for rank in stage.ranks} == set(range(2 * mesh.get("tp", 1)))
    assert exchanged(sharded)["send"] >= 1
    agrees(sharded, 1.05 / 2 / mesh.get("tp", 1))


def residual_blocks(blocks: int, levels: int = 3, width: int = 8, side: int = 16) -> ModelProto:
    """Blocks of two convolutions with what went in added. From level to level an image has half the side and twice the
    channels: all take about the same time, and the last ones have most of the weights."""
    steps: list[tuple[str, list[str], str, dict[str, object]]] = []
    constants, last, channels = {}, "x", 3
    for level in range(levels):
        for block in range(blocks):
            name, out, strides = f"{level}{block}", width << level, [2, 2] if level and not block else [1, 1]
            constants |= {f"v{name}": weights(out, channels, 3, 3), f"w{name}": weights(out, out, 3, 3)}
            beside = last
            if out != channels:
                constants[f"u{name}"] = weights(out, channels, 1, 1)
                steps.append(("Conv", [last, f"u{name}"], f"u_{name}", {"strides": strides}))
                beside = f"u_{name}"
            steps += [
                ("Conv", [last, f"v{name}"], f"v_{name}", {"pads": [1, 1, 1, 1], "strides": strides}),
                ("Relu", [f"v_{name}"], f"r_{name}", {}),
                ("Conv", [f"r_{name}", f"w{name}"], f"w_{name}", {"pads": [1, 1, 1, 1]}),
                ("Add", [f"w_{name}", beside], f"y_{name}", {}),
            ]  # fmt: skip
            last, channels = f"y_{name}", out
    ends = side >> (levels - 1)
    return model_of(steps, {"x": (1, 3, side, side)}, {last: (1, channels, ends, ends)}, constants)


@pytest.mark.parametrize("ranks", [3, 4])
def test_every_rank_has_its_share_where_time_is_in_front_and_weights_are_behind(ranks: int) -> None:
    """Stages end inside of residual blocks, and a rank may have one in front and one behind: in weights no rank has
    more than a twentieth above its share, and in time none is far from it."""
    pytest.importorskip("scipy", reason="integer programs are scipy's")
    program = program_of(residual_blocks(ranks - 1))
    sharded = share_out(program, cluster(1e12, 1e-12, pp=ranks), (), "pp", 16)
    agrees(sharded, 1.05 / ranks)
    each = [sum(stage.seconds for stage in sharded.stages_of(rank)) for rank in range(ranks)]
    assert max(each) <= 1.15 * sum(each) / ranks
    assert any(len([s for s in stage.steps if isinstance(s, Exchange)]) > 1 for stage in sharded.stages)


def test_runs_of_layers_take_what_sections_were_decided_to_take() -> None:
    """All layers together are what the integer programs have found, with their exchanges; where a run ends, what lies
    in parts is brought together again."""
    pytest.importorskip("scipy", reason="integer programs are scipy's")
    program, mesh = program_of(attention_block()), cluster(2e9, 5e-5, tp=2)
    planner = MeshPlanner(program, mesh, ("tp",), 5e-5)
    decided = planner.run()
    layers = in_layers(program.computes, dict.fromkeys(program.computes, 1.0), dict.fromkeys(program.computes, 0), 96)
    runs = PricedLayers(planner, decided, layers, mesh.links[0]).runs()
    assert runs.computing[0, -1] == pytest.approx(sum(decided.seconds))
    assert runs.held[0, -1] == pytest.approx(sum(a.nbytes for a in program.constants.values()) / 2, rel=0.01)
    parts = [n for n, layer in enumerate(layers) if decided.ways[layer[-1]].strategy.gives.parts[0].dim is not None]
    assert parts
    for number in parts:
        alone = sum(decided.ways[c].seconds for c in layers[number])
        assert runs.computing[number, number + 1] >= alone + 5e-5


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
