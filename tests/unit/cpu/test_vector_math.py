"""Our vector functions inside kernels against correctly rounded results: at most 4 ulp, ends included."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from tests.cpu_stages import Lowered, lowered, model_of, programs, run_native

COUNT = 1 << 15
MOST_ULP = 4.0
OPERATORS = {"exp": "Exp", "log": "Log", "tanh": "Tanh", "erf": "Erf", "sigmoid": "Sigmoid", "sin": "Sin", "cos": "Cos",
             "sqrt": "Sqrt"}  # fmt: skip
POSITIVE = ("log", "sqrt")  # NaN for almost every negative argument


def hard_values() -> np.ndarray:
    """Zeros, denormals, infinities, NaN, both sides of every border where a result over- or underflows."""
    tiny = np.float32(np.finfo(np.float32).tiny)
    least = np.float32(1e-45)
    borders = [88.72283, 88.72284, 89.0, -87.33654, -87.33655, -103.97, -103.98, -104.0, 0.6328125, 0.9296875, 4.0,
               3.9192059, 9.010913, 16.635532, 0.34657359, 0.70710678, 1.4142135, 1.0, 0.5, 2.0]  # fmt: skip
    values = [0.0, -0.0, np.inf, -np.inf, np.nan, least, -least, tiny, -tiny, tiny / 2, np.finfo(np.float32).max,
              -np.finfo(np.float32).max, 1e-30, -1e-30, 1e30, -1e30]  # fmt: skip
    for border in borders:
        for sign in (1, -1):
            value = np.float32(sign * border)
            values += [value, np.nextafter(value, np.float32(np.inf)), np.nextafter(value, np.float32(-np.inf))]
    return np.array(values, np.float32)


def random_values(name: str) -> np.ndarray:
    """Dense where the function moves, and over all exponents."""
    rng = np.random.default_rng(8)
    bits = rng.integers(0, 1 << 32, COUNT // 2, dtype=np.uint32).view(np.float32)
    near = rng.uniform(-6, 6, COUNT).astype(np.float32)
    far = rng.uniform(-110, 95, COUNT).astype(np.float32)
    ones = (1 + rng.uniform(-0.5, 1, COUNT)).astype(np.float32)
    parts = [hard_values(), near, far, ones, bits]
    if name in POSITIVE:
        parts = [*(np.abs(p) for p in parts), -near[:64]]
    return np.concatenate(parts)


def wanted(name: str, x: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        wide = x.astype(np.float64)
        if name == "erf":
            return np.array([math.erf(v) for v in wide])
        if name == "sigmoid":
            return 1 / (1 + np.exp(-wide))
        return getattr(np, name)(wide)


def ulps(found: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Distance in units of the last place of the exact result; below the normal range the last denormal place."""
    with np.errstate(all="ignore"):
        rounded = exact.astype(np.float32)
        unit = np.spacing(np.abs(rounded)).astype(np.float64)
        away = np.abs(found.astype(np.float64) - exact) / unit
    same = (found == rounded) | (np.isnan(found) & np.isnan(exact))
    return np.where(same, 0.0, np.where(np.isnan(away), np.inf, away))


@pytest.fixture(scope="module")
def functions(kernel_cache: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Arguments and results of every function, all in one compiled model."""
    given = {name: random_values(name) for name in OPERATORS}
    size = min(len(v) for v in given.values())
    shape = {f"{name}_x": (size,) for name in OPERATORS}
    model = model_of([(o, [f"{n}_x"], n, {}) for n, o in OPERATORS.items()], shape, dict.fromkeys(OPERATORS, (size,)))
    low: Lowered = lowered(programs(model)["layout"], "none")
    inputs = {f"{name}_x": v[:size] for name, v in given.items()}
    found = run_native(low.compiled(kernel_cache, 2, "keep"), low.program, inputs)
    return {name: (inputs[f"{name}_x"], found[name]) for name in OPERATORS}


@pytest.mark.parametrize("name", OPERATORS)
def test_within_bounds(name: str, functions: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    x, found = functions[name]
    error = ulps(found, wanted(name, x))
    worst = int(np.argmax(error))
    print(f"{name}: at most {error[worst]:.2f} ulp at {x[worst]!r}, {np.mean(error):.3f} in the mean")
    assert error[worst] <= MOST_ULP, f"{name}({x[worst]!r}) = {found[worst]!r} is {error[worst]:.1f} ulp away"


ENDS = {
    "exp": [(np.inf, np.inf), (-np.inf, 0.0), (0.0, 1.0), (-0.0, 1.0), (200.0, np.inf), (-200.0, 0.0)],
    "log": [(np.inf, np.inf), (0.0, -np.inf), (-0.0, -np.inf), (1.0, 0.0), (-1.0, np.nan), (-np.inf, np.nan)],
    "tanh": [(np.inf, 1.0), (-np.inf, -1.0), (0.0, 0.0), (-0.0, -0.0), (50.0, 1.0)],
    "erf": [(np.inf, 1.0), (-np.inf, -1.0), (0.0, 0.0), (-0.0, -0.0), (9.0, 1.0)],
    "sigmoid": [(np.inf, 1.0), (-np.inf, 0.0), (0.0, 0.5), (200.0, 1.0), (-200.0, 0.0)],
    "sin": [(np.inf, np.nan), (-np.inf, np.nan), (0.0, 0.0), (-0.0, -0.0), (1e-45, 1e-45)],
    "cos": [(np.inf, np.nan), (-np.inf, np.nan), (0.0, 1.0), (-0.0, 1.0), (1e-45, 1.0)],
    "sqrt": [(np.inf, np.inf), (-np.inf, np.nan), (0.0, 0.0), (-0.0, -0.0), (4.0, 2.0), (-1.0, np.nan)],
}


@pytest.mark.parametrize("name", OPERATORS)
def test_ends(name: str, kernel_cache: Path) -> None:
    """What must be exact is exact to the bit; NaN stays NaN."""
    given = np.array([x for x, _ in ENDS[name]] + [np.nan], np.float32)
    exact = np.array([y for _, y in ENDS[name]] + [np.nan], np.float32)
    size = 16
    x = np.resize(given, size)
    model = model_of([(OPERATORS[name], ["x"], "y", {})], {"x": (size,)}, {"y": (size,)})
    found = lowered(programs(model)["layout"], "none").natively({"x": x}, kernel_cache, denormals="keep")["y"]
    np.testing.assert_array_equal(found[: len(exact)], exact)
    signed = ~np.isnan(exact)
    np.testing.assert_array_equal(np.signbit(found[: len(exact)][signed]), np.signbit(exact[signed]))


def test_scalars_and_vectors_agree(kernel_cache: Path) -> None:
    """A tail of single elements is not another function: same input, same bits wherever it stands."""
    x = np.resize(np.array([-3.3, 0.7, 88.0, 1e6, 1e-40], np.float32), 35)
    names = [n for n in OPERATORS if n not in POSITIVE]
    steps: list[tuple[str, list[str], str, dict[str, object]]] = [(OPERATORS[n], ["x"], n, {}) for n in names]
    steps += [(OPERATORS[n], ["p"], n, {}) for n in POSITIVE] + [("Pow", ["p", "x"], "pow", {})]
    outputs = [*OPERATORS, "pow"]
    model = model_of(steps, {"x": (35,), "p": (35,)}, dict.fromkeys(outputs, (35,)))  # type: ignore[arg-type]
    found = lowered(programs(model)["layout"], "none").natively({"x": x, "p": np.abs(x)}, kernel_cache)
    for name in outputs:
        bits = found[name].view(np.uint32).reshape(7, 5)
        np.testing.assert_array_equal(bits, np.broadcast_to(bits[0], bits.shape), err_msg=name)


def test_a_single_sigmoid_reaches_the_denormals(kernel_cache: Path) -> None:
    """1 / (1 + e^-x) would overflow to 0 below -88.7; the last element of an odd length is left to a scalar."""
    x = np.full(33, -90, dtype=np.float32)
    model = model_of([("Sigmoid", ["x"], "y", {})], {"x": (33,)}, {"y": (33,)})  # type: ignore[arg-type]
    found = lowered(programs(model)["layout"], "none").natively({"x": x}, kernel_cache, denormals="keep")["y"]
    assert (found > 0).all()
    assert ulps(found, wanted("sigmoid", x)).max() <= MOST_ULP
