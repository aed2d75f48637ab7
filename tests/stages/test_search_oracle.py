"""The search beside brute force: on small graphs no partition or tile is predicted to be much better than what it
finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from onnx import ModelProto

from tests.cpu_stages import model_of
from tests.oracle import best_of_all, found_by_search, planned_by_search
from tilewright import ops
from tilewright.frontend.onnx.model import load
from tilewright.target import Target, machine
from tilewright.transform.clean.fold import fold_constants
from tilewright.transform.layout.choose import choose_layouts

MOST_NESTS = 6
GRAPHS = 40
AGAIN = 20  # with tiles inside tiles, which take much longer
QUICK = 6


def graph(seed: int) -> ModelProto:
    """Products, sums over rows and columns, softmaxes and maps on small matrices, with branches and residuals."""
    rng = np.random.default_rng(seed)
    rows, columns = (int(n) for n in rng.choice([17, 32, 48, 64, 100, 129, 256], 2))
    shapes = {"x": (rows, columns)}
    constants: dict[str, np.ndarray] = {}
    steps: list[tuple[str, list[str], str, dict[str, object]]] = []
    last = "x"
    for number in range(int(rng.integers(2, 5))):
        name, (m, n) = f"t{number}", shapes[last]
        kind = rng.choice(["product", "softmax", "mean", "map", "residual", "transpose"])
        if kind == "product":
            width = int(rng.choice([16, 33, 64, 128]))
            constants[f"w{number}"] = (rng.standard_normal((n, width)) / np.sqrt(n)).astype(np.float32)
            steps.append(("MatMul", [last, f"w{number}"], name, {}))
            shapes[name] = (m, width)
        elif kind == "softmax":
            steps.append(("Softmax", [last], name, {"axis": int(rng.integers(0, 2))}))
            shapes[name] = (m, n)
        elif kind == "mean":
            steps.append(("ReduceMean", [last], f"{name}_mean", {"axes": [int(rng.integers(0, 2))]}))
            steps.append(("Sub", [last, f"{name}_mean"], name, {}))
            shapes[name] = (m, n)
        elif kind == "residual":
            others = [t for t, s in shapes.items() if s == (m, n)]
            steps.append(("Add", [last, str(rng.choice(others))], name, {}))
            shapes[name] = (m, n)
        elif kind == "transpose":
            steps.append(("Transpose", [last], name, {"perm": [1, 0]}))
            shapes[name] = (n, m)
        else:
            steps.append((str(rng.choice(["Relu", "Tanh", "Exp"])), [last], name, {}))
            shapes[name] = (m, n)
        last = name
    return model_of(steps, {"x": (rows, columns)}, {last: shapes[last]}, constants)


def images(seed: int) -> ModelProto:
    """Convolutions of small images: windows of one and of three, padded, of every channel by itself too, with
    activations, residuals and means between them."""
    rng = np.random.default_rng(seed)
    channels, size = int(rng.choice([8, 16, 24, 40])), int(rng.choice([13, 20, 28, 32]))
    shapes = {"x": (1, channels, size, size)}
    constants: dict[str, np.ndarray] = {}
    steps: list[tuple[str, list[str], str, dict[str, object]]] = []
    last = "x"
    for number in range(int(rng.integers(2, 5))):
        name, shape = f"t{number}", shapes[last]
        kind = rng.choice(["1x1", "3x3", "depthwise", "map", "residual", "mean"])
        shapes[name] = shape
        if kind in ("1x1", "3x3", "depthwise"):
            window, groups = (1, 1) if kind == "1x1" else (3, shape[1] if kind == "depthwise" else 1)
            out = shape[1] if groups > 1 else int(rng.choice([8, 16, 33, 48]))
            weight = rng.standard_normal((out, shape[1] // groups, window, window)).astype(np.float32)
            constants[f"w{number}"] = weight
            steps.append(("Conv", [last, f"w{number}"], name, {"pads": [window // 2] * 4, "group": groups}))
            shapes[name] = (1, out, *shape[2:])
        elif kind == "residual":
            steps.append(("Add", [last, str(rng.choice([t for t, s in shapes.items() if s == shape and t != name]))],
                          name, {}))  # fmt: skip
        elif kind == "mean":
            steps.append(("ReduceMean", [last], f"{name}_mean", {"axes": [2, 3]}))
            steps.append(("Mul", [last, f"{name}_mean"], name, {}))
        else:
            steps.append((str(rng.choice(["Relu", "Tanh", "Sigmoid"])), [last], name, {}))
        last = name
    return model_of(steps, {"x": shapes["x"]}, {last: shapes[last]}, constants)


def stacks(seed: int) -> ModelProto:
    """Matrices in stacks, two or three times softmaxed, centred over rows or columns, or multiplied: tiles hold whole
    matrices where a sum takes all of them, and sums over rows want little at a time."""
    rng = np.random.default_rng(seed)
    shape = int(rng.choice([4, 8, 24])), int(rng.choice([33, 49, 101])), int(rng.choice([49, 64, 131]))
    inputs = {"x": shape}
    constants: dict[str, np.ndarray] = {}
    steps: list[tuple[str, list[str], str, dict[str, object]]] = []
    last = "x"
    for number in range(int(rng.integers(2, 4))):
        name = f"t{number}"
        kind = rng.choice(["softmax", "softmax", "mean", "product", "map"])
        if kind == "softmax":
            steps.append(("Softmax", [last], name, {"axis": int(rng.integers(1, 3))}))
        elif kind == "mean":
            steps.append(("ReduceMean", [last], f"{name}_mean", {"axes": [int(rng.integers(1, 3))]}))
            steps.append(("Sub", [last, f"{name}_mean"], name, {}))
        elif kind == "product":
            width = int(rng.choice([16, 33]))
            constants[f"w{number}"] = rng.standard_normal((shape[2], width)).astype(np.float32)
            steps.append(("MatMul", [last, f"w{number}"], name, {}))
            shape = (*shape[:2], width)
        else:
            steps.append((str(rng.choice(["Tanh", "Exp"])), [last], name, {}))
        last = name
    return model_of(steps, inputs, {last: shape}, constants)


def small_caches(name: str) -> Target:
    """The machine with caches in which tiles of these graphs do not stay as they are."""
    target = machine(name)
    outer = "" if target.shared_cache is None else target.shared_cache.name
    sizes = {target.nearest.name: 4 << 10, target.local.name: 48 << 10, outer: 192 << 10}
    return replace(target, levels=tuple(replace(x, capacity=sizes.get(x.name, x.capacity)) for x in target.levels))


def ratios(graphs: int, target: Target, graph: Callable[[int], ModelProto] = graph, again: bool = False) -> list[float]:
    """What the search found over the best there is, of so many graphs of several nests; with tiles inside tiles where
    it looks for those `again`."""
    found: list[float] = []
    seed = 0
    while len(found) < graphs:
        program = choose_layouts(fold_constants(ops.lower(load(graph(seed)))), target)
        seed += 1
        searched, nests = found_by_search(program, target, again)
        if (3 if again else 2) <= nests <= MOST_NESTS:
            best = best_of_all(program, target, again)
            if searched > best:  # what is planned again for its tile may make up for it
                searched = max(best, min(searched, planned_by_search(program, target)))
            found.append(searched / best)
    return found


def judge(found: list[float]) -> None:
    assert max(found) <= 1.10, sorted(found)[-5:]
    assert np.exp(np.mean(np.log(found))) <= 1.03, sorted(found)
    assert min(found) >= 1 - 1e-6  # else brute force has not looked at everything


def test_the_search_is_near_the_best_of_all_plans() -> None:
    judge(ratios(QUICK, machine("neoverse_n1")))


def test_the_search_is_near_the_best_of_all_plans_of_convolutions() -> None:
    judge(ratios(QUICK, machine("avx2_desktop"), images))


@pytest.mark.slow
def test_the_search_is_near_the_best_of_all_tiles_inside_tiles() -> None:
    judge(ratios(QUICK, small_caches("neoverse_n1"), stacks, again=True))


@pytest.mark.slow
@pytest.mark.parametrize("made", [graph, images, stacks])
@pytest.mark.parametrize("name", ["neoverse_n1", "avx2_desktop"])
def test_the_search_is_near_the_best_of_all_tiles_inside_tiles_of_many_graphs(
    name: str, made: Callable[[int], ModelProto]
) -> None:
    judge(ratios(AGAIN, small_caches(name), made, again=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["neoverse_n1", "emerald_rapids", "h200"])
def test_the_search_is_near_the_best_of_all_plans_of_many_graphs(name: str) -> None:
    judge(ratios(GRAPHS, machine(name)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["neoverse_n1", "emerald_rapids", "avx2_desktop"])
def test_the_search_is_near_the_best_of_all_plans_of_many_convolutions(name: str) -> None:
    judge(ratios(GRAPHS, machine(name), images))
