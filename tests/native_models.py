"""Models of hand-written kernels, for tests of what runs them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from tilewright.runtime import (
    BufferRef,
    BuiltModel,
    Cache,
    KernelStage,
    ModelImage,
    build,
    default_flags,
    find_compiler,
    this_machine,
)

NATIVE = Path(__file__).parents[1] / "tilewright" / "runtime" / "native"
SIGNATURE = "(void *const *buffers, const int64_t *extents, int64_t tile, char *scratch)"
X, Y = BufferRef("input", 0), BufferRef("output", 0)
Builder = Callable[[ModelImage], BuiltModel]


def builder(cache: Cache) -> Builder:
    compiler, machine = find_compiler(), this_machine()
    flags = default_flags(compiler, machine)
    return lambda image: build(image, compiler, flags, machine, cache, jobs=2)


def kernel(name: str, body: str) -> str:
    unused = "(void)buffers; (void)extents; (void)tile; (void)scratch;"
    return f"#include <stdint.h>\n#include <string.h>\nvoid {name}{SIGNATURE}\n{{ {unused}\n{body}\n}}\n"


AFFINE = kernel(
    "affine",
    """const float *x = buffers[0]; float *y = buffers[1];
    int64_t from = tile * extents[1], to = from + extents[1] < extents[0] ? from + extents[1] : extents[0];
    for (int64_t i = from; i < to; i++) y[i] = 2.0f * x[i] + 1.0f;""",
)
# Each element needs its neighbours of the stage before: a missing barrier shows.
BLUR = kernel(
    "blur",
    """const int32_t *x = buffers[0]; int32_t *y = buffers[1]; int64_t n = extents[0];
    y[tile] = 3 * x[tile] + x[(tile + 1) % n] + 7 * x[(tile + n / 2) % n];""",
)
COUNT = kernel("count", "((int32_t *)buffers[0])[tile] += 1;")


def affine_image(n: int, tile: int, **options: object) -> ModelImage:
    stage = KernelStage("affine", -(-n // tile), (X, Y), **options)  # type: ignore[arg-type]
    return ModelImage({"affine": AFFINE}, (stage,), (4 * n,), (4 * n,), extents=(n, tile))


def blur_image(n: int, rounds: int) -> ModelImage:
    ends = [X, *(BufferRef("arena", 4096 * (i % 2)) for i in range(rounds - 1)), Y]
    stages = tuple(KernelStage("blur", n, (ends[i], ends[i + 1])) for i in range(rounds))
    return ModelImage({"blur": BLUR}, stages, (4 * n,), (4 * n,), arena_bytes=8192, extents=(n,))


def blur_reference(x: np.ndarray, rounds: int) -> np.ndarray:
    for _ in range(rounds):
        x = 3 * x + np.roll(x, -1) + 7 * np.roll(x, -(x.size // 2))
    return x
