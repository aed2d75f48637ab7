"""Our vector functions over the whole range of float32: a sample every time, every single argument with --all."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.vector_math import BLOCK, FUNCTIONS, Worst, applied, built, worst_of, worst_of_pairs

MOST_ULP = 4.0
LANES = 4
SAMPLE_STEP = 1009  # a prime: all exponents and most patterns of low bits
PAIRS = 1 << 18
ALL_PAIRS = 100_000_000

SPECIAL = np.array(
    [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 0.5, -0.5, 2.0, -2.0, 3.0, -3.0, 1e-45, -1e-45, 1e-40,
     1.1754944e-38, 3.4028235e38, -3.4028235e38, 4194303.5, 8388607.0, 8388607.5, 8388608.0, 8388609.0, -8388609.0,
     16777215.0, -16777215.0, 16777216.0, 16777218.0, 1.5, -1.5, 0.99999994, 1.0000001, -0.99999994, -1.0000001, 1e38,
     -1e38, 127.0, 128.0, 129.0, -126.0, -149.0, -150.0, -151.0, 0.33333334, 1e9, -1e9, 1e-9, 131071.99, 131072.0,
     -131072.0, 104.0, -104.0, 89.0, -87.5, 88.72284],
    np.float32,
)  # fmt: skip


def in_blocks(values: np.ndarray) -> np.ndarray:
    return np.resize(values.astype(np.float32), -(-values.size // BLOCK) * BLOCK)


def checked(name: str, worst: Worst) -> None:
    print(f"{name}: at most {worst}")
    assert worst.ulp <= MOST_ULP, f"{name}: {worst}"


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_sample_of_the_range(name: str, kernel_cache: Path) -> None:
    count = (1 << (31 if FUNCTIONS[name].parity else 32)) // SAMPLE_STEP // BLOCK * BLOCK
    checked(name, worst_of(built(name, LANES, kernel_cache), 0, count, SAMPLE_STEP))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_ends_of_the_range(name: str, kernel_cache: Path) -> None:
    """Zero and the smallest denormals, the largest numbers, infinity and NaN; results of 0 by their sign too."""
    library = built(name, LANES, kernel_cache)
    for first in (0, 0x7F800000 - BLOCK, *(() if FUNCTIONS[name].parity else (1 << 31, 0xFF800000 - BLOCK))):
        checked(name, worst_of(library, first, 2 * BLOCK))


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_with_denormals_flushed(name: str, kernel_cache: Path) -> None:
    """As kernels run: the same bound, on arguments and results that are taken as zeros where they are too small."""
    library = built(name, LANES, kernel_cache, flush=True)
    count = (1 << (31 if FUNCTIONS[name].parity else 32)) // SAMPLE_STEP // BLOCK * BLOCK
    checked(name, worst_of(library, 0, count, SAMPLE_STEP))
    # zeros, and both sides of the smallest normal number
    for first in (0, 0x00800000 - BLOCK, *(() if FUNCTIONS[name].parity else (0x80800000 - BLOCK,))):
        checked(name, worst_of(library, first, 2 * BLOCK))


def test_small_exponentials_are_zeros_where_denormals_are_flushed(kernel_cache: Path) -> None:
    x = np.linspace(-110, -80, 4096, dtype=np.float32)
    flushed, kept = (applied(built("exp", LANES, kernel_cache, flush=f), x) for f in (True, False))
    smallest = np.finfo(np.float32).smallest_normal
    exact = np.exp(x.astype(np.float64))
    sure = np.abs(exact / smallest - 1) > 1e-5
    np.testing.assert_array_equal(flushed[sure], np.where(exact < smallest, 0, kept)[sure])
    assert kept[(x > -103) & (x < -88)].all() and not flushed[x < -87.4].any()


def test_powers_with_denormals_flushed(kernel_cache: Path) -> None:
    rng = np.random.default_rng(11)
    x, y = (in_blocks(grid.ravel()) for grid in np.meshgrid(SPECIAL, SPECIAL))
    library = built("pow", LANES, kernel_cache, flush=True)
    checked("pow", worst_of_pairs(library, x, y))
    near = in_blocks(np.exp2(rng.uniform(-40, 40, PAIRS)))
    checked("pow", worst_of_pairs(library, near, in_blocks(-126.0 / np.log2(near) * rng.uniform(0.5, 1.3, near.size))))


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument(name: str, kernel_cache: Path) -> None:
    """Where a function is odd or even, the harness compares the negative half with the positive one to the bit."""
    count = 1 << (31 if FUNCTIONS[name].parity else 32)
    checked(name, worst_of(built(name, LANES, kernel_cache), 0, count))


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [*FUNCTIONS, "pow"])
def test_any_number_of_lanes_gives_the_same_bits(name: str, kernel_cache: Path) -> None:
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 1 << 32, 2048, dtype=np.uint32).view(np.float32)
    x = np.concatenate([SPECIAL, rng.uniform(-100, 90, 2048).astype(np.float32), bits])
    arguments = (x, rng.permutation(x)) if name == "pow" else (x,)
    first, *others = (applied(built(name, lanes, kernel_cache), *arguments) for lanes in (4, 8, 16))
    number = ~np.isnan(first)
    for other in others:
        np.testing.assert_array_equal(np.isnan(other), ~number)
        np.testing.assert_array_equal(other[number].view(np.uint32), first[number].view(np.uint32))


def test_powers_of_special_values(kernel_cache: Path) -> None:
    x, y = (in_blocks(grid.ravel()) for grid in np.meshgrid(SPECIAL, SPECIAL))
    checked("pow", worst_of_pairs(built("pow", LANES, kernel_cache), x, y))


Pairs = Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]


def any_bits(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32)


def to_every_result(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Exponents chosen so that the results are spread over the whole range, denormals included."""
    x = np.exp(rng.uniform(-87, 88, count)).astype(np.float32)
    return x, rng.uniform(-150, 129, count) / np.log2(x.astype(np.float64))


PAIRS_OF: dict[str, Pairs] = {
    "any bits": lambda rng, n: (any_bits(rng, n), any_bits(rng, n)),
    "usual": lambda rng, n: (rng.uniform(0, 10, n), rng.uniform(-40, 40, n)),
    "near one": lambda rng, n: (1 + rng.normal(0, 1e-3, n), rng.normal(0, 3e4, n)),
    "next to one": lambda rng, n: (1 + rng.normal(0, 1e-6, n), rng.normal(0, 3e7, n)),
    "whole exponents": lambda rng, n: (rng.uniform(-10, 10, n), rng.integers(-40, 40, n)),
    "denormals": lambda rng, n: (rng.integers(0, 1 << 23, n, dtype=np.uint32).view(np.float32), rng.uniform(-1, 1, n)),
    "every result": to_every_result,
}


def worst_power(kind: str, seed: int, count: int, kernel_cache: Path) -> Worst:
    with np.errstate(all="ignore"):
        x, y = (np.ascontiguousarray(a, np.float32) for a in PAIRS_OF[kind](np.random.default_rng(seed), count))
    return worst_of_pairs(built("pow", LANES, kernel_cache), x, y)


@pytest.mark.parametrize("kind", PAIRS_OF)
def test_powers(kind: str, kernel_cache: Path) -> None:
    checked(f"pow, {kind}", worst_power(kind, 1, PAIRS, kernel_cache))


@pytest.mark.slow
@pytest.mark.parametrize("kind", PAIRS_OF)
def test_many_powers(kind: str, kernel_cache: Path) -> None:
    runs = range(2, 2 + ALL_PAIRS // len(PAIRS_OF) // (4 * PAIRS))
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda seed: worst_power(kind, seed, 4 * PAIRS, kernel_cache), runs))
    checked(f"pow, {kind}", max(found, key=lambda w: float(w.ulp)))
