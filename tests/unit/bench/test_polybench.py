"""PolyBench's kernels as Programs mean what their definitions say."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest

from bench.policies.polybench import SIZES, program
from tilewright.ir.meaning.interpret import evaluate
from tilewright.tile_graph.algebra.propagate import extent_of

ALPHA, BETA = 1.5, 1.2
Arrays = dict[str, np.ndarray]


def _gemver(g: Arrays) -> tuple[np.ndarray, ...]:
    b = g["A"] + np.outer(g["u1"], g["v1"]) + np.outer(g["u2"], g["v2"])
    x = BETA * b.T @ g["y"] + g["z"]
    return b, x, ALPHA * b @ x


def _lower_half(made: np.ndarray, kept: np.ndarray) -> np.ndarray:
    return np.where(np.tri(*made.shape, dtype=bool), made, kept)


def _trmm(g: Arrays) -> np.ndarray:
    unit = np.tril(g["A"], -1) + np.eye(len(g["A"]))
    return ALPHA * unit.T @ g["B"]


def _symm(g: Arrays) -> np.ndarray:
    whole = np.tril(g["A"]) + np.tril(g["A"], -1).T
    return ALPHA * whole @ g["B"] + BETA * g["C"]


def _correlation(g: Arrays) -> np.ndarray:
    centred = g["D"] - g["D"].mean(0)
    spread = g["D"].std(0)
    scaled = centred / (np.sqrt(len(centred)) * np.where(spread <= 0.1, 1.0, spread))
    made = scaled.T @ scaled
    np.fill_diagonal(made, 1.0)
    return made


def _relaxed(array: np.ndarray, steps: int, inside: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    made = array.astype(np.float64)
    for _ in range(2 * steps):
        made[(slice(1, -1),) * made.ndim] = inside(made)
    return made


def _three(a: np.ndarray) -> np.ndarray:
    return 0.33333 * (a[:-2] + a[1:-1] + a[2:])


def _five(a: np.ndarray) -> np.ndarray:
    return 0.2 * (a[1:-1, 1:-1] + a[1:-1, :-2] + a[1:-1, 2:] + a[2:, 1:-1] + a[:-2, 1:-1])


def _seven(a: np.ndarray) -> np.ndarray:
    middle = a[1:-1, 1:-1, 1:-1]
    sides = [(a[2:, 1:-1, 1:-1], a[:-2, 1:-1, 1:-1]), (a[1:-1, 2:, 1:-1], a[1:-1, :-2, 1:-1]),
             (a[1:-1, 1:-1, 2:], a[1:-1, 1:-1, :-2])]  # fmt: skip
    return middle + sum(0.125 * (up - 2 * middle + down) for up, down in sides)


def _fdtd(g: Arrays) -> tuple[np.ndarray, ...]:
    ex, ey, hz = (g[name].astype(np.float64) for name in ("ex", "ey", "hz"))
    for edge in g["f"]:
        ey[0] = edge
        ey[1:] -= 0.5 * (hz[1:] - hz[:-1])
        ex[:, 1:] -= 0.5 * (hz[:, 1:] - hz[:, :-1])
        hz[:-1, :-1] -= 0.7 * (ex[:-1, 1:] - ex[:-1, :-1] + ey[1:, :-1] - ey[:-1, :-1])
    return ex, ey, hz


def _shortest(g: Arrays) -> np.ndarray:
    paths = g["A"].astype(np.float64)
    for k in range(len(paths)):
        paths = np.minimum(paths, paths[:, k : k + 1] + paths[k])
    return paths


def _filtered(rows: np.ndarray) -> np.ndarray:
    """A recursive filter down the rows, and one up, added."""
    padded = np.concatenate([np.zeros_like(rows[:1]), rows, np.zeros_like(rows[:2])])
    down, up = (np.zeros((len(rows) + 4, rows.shape[1])) for _ in range(2))
    for i in range(len(rows)):
        down[i + 2] = 0.5 * padded[i + 1] + 0.2 * padded[i] + 0.3 * down[i + 1] - 0.1 * down[i]
    for i in reversed(range(len(rows))):
        up[i] = 0.4 * padded[i + 2] + 0.1 * padded[i + 3] + 0.3 * up[i + 1] - 0.1 * up[i + 2]
    return down[2:-2] + up[:-4]


DEFINITIONS: Mapping[str, Callable[[Arrays], np.ndarray | tuple[np.ndarray, ...]]] = {
    "gemm": lambda g: ALPHA * g["A"] @ g["B"] + BETA * g["C"],
    "2mm": lambda g: ALPHA * g["A"] @ g["B"] @ g["C"] + BETA * g["D"],
    "3mm": lambda g: (g["A"] @ g["B"]) @ (g["C"] @ g["D"]),
    "atax": lambda g: g["A"].T @ (g["A"] @ g["x"]),
    "bicg": lambda g: (g["r"] @ g["A"], g["A"] @ g["p"]),
    "mvt": lambda g: (g["x1"] + g["A"] @ g["y1"], g["x2"] + g["A"].T @ g["y2"]),
    "gemver": _gemver,
    "gesummv": lambda g: ALPHA * g["A"] @ g["x"] + BETA * g["B"] @ g["x"],
    "syrk": lambda g: _lower_half(ALPHA * g["A"] @ g["A"].T + BETA * g["C"], g["C"]),
    "syr2k": lambda g: _lower_half(ALPHA * (g["A"] @ g["B"].T + g["B"] @ g["A"].T) + BETA * g["C"], g["C"]),
    "trmm": _trmm,
    "symm": _symm,
    "doitgen": lambda g: g["A"] @ g["C"],
    "covariance": lambda g: np.cov(g["D"].T),
    "correlation": _correlation,
    "jacobi-1d": lambda g: _relaxed(g["A"], 3, _three),
    "jacobi-2d": lambda g: _relaxed(g["A"], 3, _five),
    "heat-3d": lambda g: _relaxed(g["A"], 3, _seven),
    "fdtd-2d": _fdtd,
    "floyd-warshall": _shortest,
    "deriche": lambda g: _filtered(_filtered(g["A"]).T).T,
    "trisolv": lambda g: np.linalg.solve(np.tril(g["L"]).astype(np.float64), g["b"]),
}


def test_every_kernel_has_a_definition() -> None:
    assert set(DEFINITIONS) == set(SIZES) and len(SIZES) >= 18


@pytest.mark.parametrize("name", SIZES)
def test_a_kernel_is_what_its_definition_says(name: str) -> None:
    made = program(name, {key: 3 if key == "T" else 7 + 2 * i for i, key in enumerate(SIZES[name])})
    rng = np.random.default_rng(3)
    given = {t.name: rng.uniform(0.5, 1.5, [extent_of(e) for e in t.shape]).astype(np.float32) for t in made.inputs}
    if "L" in given:
        given["L"] += 9 * np.eye(len(given["L"]), dtype=np.float32)
    wanted = DEFINITIONS[name](given)
    found = evaluate(made, given)
    for tensor, array in zip(made.outputs, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        np.testing.assert_allclose(found[tensor.name], array, rtol=2e-4, atol=2e-4)
