"""A loaded model on hand-written kernels: what reaches the kernels, what is refused, and use from C."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.native_models import COUNT, NATIVE, Builder, X, Y, affine_image, builder, kernel
from tilewright.runtime import (
    BufferRef,
    Cache,
    CpuModel,
    KeptWeights,
    KernelStage,
    ModelImage,
    ModelImageError,
    ModelRunError,
    WeightsError,
    find_compiler,
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    return builder(Cache(tmp_path_factory.mktemp("cache")))


def test_weights_extents_and_scratch_reach_the_kernel(built: Builder) -> None:
    body = """int64_t *y = buffers[1]; const unsigned char *w = buffers[0];
    memset(scratch, (int)tile, 5000); unsigned sum = 0; for (int i = 0; i < 5000; i++) sum += (unsigned char)scratch[i];
    y[tile] = (int64_t)sum + w[tile] + extents[2]
        + 1000000 * (((uintptr_t)scratch | (uintptr_t)w) % 64 != 0);"""
    weights = bytes(64) + bytes(range(40))
    stage = KernelStage("k", 40, (BufferRef("weight", 64), Y), scratch_bytes=5000)
    image = ModelImage({"k": kernel("k", body)}, (stage,), (), (320,), weights=weights, extents=(0, 0, 11))
    y = np.zeros(40, np.int64)
    with CpuModel(built(image), 3) as model:
        model.run([], [y])
    tiles = np.arange(40)
    np.testing.assert_array_equal(y, 5000 * tiles + tiles + 11)


@pytest.mark.sample(2)
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_kept_weights_are_the_same_in_their_new_place(built: Builder, parts: int) -> None:
    """Some are cut into whole pages and some are not; a stage may begin in the middle of what is kept."""
    body = """const unsigned char *w = buffers[0]; uint64_t *y = buffers[1]; uint64_t sum = 0;
    for (int64_t i = 0; i < extents[0]; i++) sum = 31 * sum + w[i];
    y[tile] = sum; y[2] = (uintptr_t)w;"""
    sizes = (6 * 4096 * 64, 5000 * 64, 64)
    starts = np.cumsum([0, *sizes])
    data = np.random.default_rng(2).integers(0, 256, int(starts[-1]) + 64, np.uint8)
    kept = tuple(KeptWeights(int(at), size, parts) for at, size in zip(starts, sizes, strict=False))
    kernels = {"k": kernel("k", body)}

    def seen(kept: tuple[KeptWeights, ...]) -> tuple[list[int], list[int]]:
        sums, places = [], []
        for start in (0, 64, 64 * 4096 * 5, int(starts[1]), int(starts[2]), int(starts[3])):
            stage = KernelStage("k", 2, (BufferRef("weight", start), Y), first_extent=0)
            image = ModelImage(kernels, (stage,), (), (24,), weights=data.tobytes(), extents=(64,), kept=kept)
            y = np.zeros(3, np.uint64)
            with CpuModel(built(image), 2) as model:
                model.run([], [y])
            assert y[0] == y[1]
            sums.append(int(y[0]))
            places.append(int(y[2]))
        return sums, places

    plain, moved = seen(()), seen(kept)
    assert plain[0] == moved[0]
    assert all(place % 64 == 0 for place in moved[1])


def test_profile_gives_the_time_of_each_stage(built: Builder) -> None:
    spin = kernel("spin", "volatile int64_t n = extents[0]; while (n > 0) n--; ((int32_t *)buffers[0])[tile] = 5;")
    image = ModelImage(
        {"spin": spin, "count": COUNT},
        (KernelStage("spin", 4, (Y,)), KernelStage("count", 4, (Y,))),
        (),
        (16,),
        extents=(100_000,),
    )
    y = np.zeros(4, np.int32)
    with CpuModel(built(image), 2) as model:
        model.run([], [y])
        times = model.profile([], [y])
    assert y.tolist() == [6] * 4
    assert times.shape == (2,)
    assert times[0] > times[1] > 0


def test_nan_and_infinity_keep_their_meaning(built: Builder) -> None:
    body = """float x = ((const float *)buffers[0])[tile];
    ((float *)buffers[1])[tile] = x != x ? 1.0f : x - x == 0.0f ? 2.0f : 3.0f;"""
    image = ModelImage({"classify": kernel("classify", body)}, (KernelStage("classify", 4, (X, Y)),), (16,), (16,))
    x = np.array([np.nan, np.inf, -np.inf, 1e-42], np.float32)
    y = np.zeros(4, np.float32)
    with CpuModel(built(image), 1) as model:
        model.run([x], [y])
    assert y.tolist() == [1, 3, 3, 2]


def test_wrong_calls_are_refused(built: Builder) -> None:
    files = built(affine_image(8, 4))
    model = CpuModel(files, 2)
    good = np.zeros(8, np.float32)
    with pytest.raises(ModelRunError, match="1 inputs and 1 outputs, called with 2 and 1"):
        model.run([good, good], [good])
    with pytest.raises(ModelRunError, match="array of 32 bytes, got 28 bytes"):
        model.run([good[:7]], [good])
    with pytest.raises(ModelRunError, match="not contiguous"):
        model.run([np.zeros(16, np.float32)[::2]], [good])
    with pytest.raises(ModelRunError, match="got list"):
        model.run([[0.0] * 8], [good])  # type: ignore[list-item]
    model.close()
    model.close()
    with pytest.raises(ModelRunError, match="closed"):
        model.run([good], [good])
    with pytest.raises(ModelRunError, match="threads must be"):
        CpuModel(files, 0)


def test_wrong_weights_file_is_refused(built: Builder, tmp_path: Path) -> None:
    files = built(affine_image(8, 4))
    other = tmp_path / "other.weights"
    other.write_bytes(b"12")
    with pytest.raises(WeightsError, match="has 2 bytes of weights, the model was compiled with 0"):
        CpuModel(replace(files, weights=other), 1)
    with pytest.raises(WeightsError, match="cannot read"):
        CpuModel(replace(files, weights=tmp_path / "missing"), 1)


def test_a_saved_model_runs_from_c(built: Builder, tmp_path: Path) -> None:
    files = built(affine_image(37, 4))
    program = """#include <dlfcn.h>
#include <stdio.h>
#include "driver.h"
int main(int argc, char **argv) {
    void *library = dlopen(argv[1], RTLD_NOW);
    if (argc != 3 || !library) return 1;
    tw_model *(*open_model)(const char *, int) = (tw_model *(*)(const char *, int))dlsym(library, "tw_open");
    int (*run)(tw_model *, void *const *, void *const *) =
        (int (*)(tw_model *, void *const *, void *const *))dlsym(library, "tw_run");
    void (*destroy)(tw_model *) = (void (*)(tw_model *))dlsym(library, "tw_destroy");
    float x[37], y[37];
    for (int i = 0; i < 37; i++) x[i] = (float)i;
    void *inputs[] = {x}, *outputs[] = {y};
    tw_model *model = open_model(argv[2], 2);
    if (!model || run(model, inputs, outputs)) return 2;
    destroy(model);
    printf("%g %g", y[0], y[36]);
    return 0;
}
"""
    (tmp_path / "main.c").write_text(program)
    command = [*find_compiler().argv, f"-I{NATIVE}", "main.c", "-o", "main", "-ldl"]
    subprocess.run(command, cwd=tmp_path, check=True)
    arguments = [str(tmp_path / "main"), str(files.library), str(files.weights)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stdout) == (0, "1 73")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kernels": {}}, "stage 0 .affine.: no such kernel"),
        ({"kernels": {"affine": "", "9x": ""}}, "'9x' is not a C identifier"),
        ({"stages": (KernelStage("affine", -1, ()),)}, "negative"),
        ({"stages": (KernelStage("affine", 1, (BufferRef("input", 1),)),)}, "input 1 is out of range"),
        ({"stages": (KernelStage("affine", 1, (BufferRef("arena", 65),)),)}, "arena 65 is out of range"),
        (
            {"stages": (KernelStage("affine", 1, (BufferRef("weight", 4),)),), "weights": bytes(64)},
            "not a multiple of 64",
        ),
    ],
)
def test_contradictory_images_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ModelImageError, match=message):
        replace(affine_image(8, 4), **change)  # type: ignore[arg-type]
