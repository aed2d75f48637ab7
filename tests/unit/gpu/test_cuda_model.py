"""A GPU model description: checked when made, run under the emulator, refused politely without a GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.gpu_kernels import row_sums, transpose
from tests.gpu_launch import source_of, strict_contract
from tilewright.backend.gpu.kernel.shared_arena import place_shared
from tilewright.errors import InternalError
from tilewright.ir.forms.loops import Kernel
from tilewright.render.cuda import launch_shape
from tilewright.runtime.cache import Cache
from tilewright.runtime.cpu_model import BufferRef
from tilewright.runtime.cuda import CudaError, CudaModel, devices
from tilewright.runtime.gpu_model import EmulatedModel, GpuCall, GpuModelImage, LaunchLimits, LoadedKernel, spread_out

LIMITS = LaunchLimits(shared_bytes=232448)


def gpu_kernel(kernel: Kernel) -> LoadedKernel:
    return LoadedKernel(
        kernel.name,
        source_of(kernel),
        launch_shape(kernel).threads,
        place_shared(kernel).bytes,
        strict_contract(kernel),
    )


def grid(kernel: Kernel) -> tuple[int, int, int]:
    x, y, z = launch_shape(kernel).grid
    assert isinstance(x, int) and isinstance(y, int) and isinstance(z, int)
    return x, y, z


@pytest.fixture
def image() -> GpuModelImage:
    """Row sums of a transposed input, the transpose in the arena; then row sums of a weight into a second output."""
    turn, add = transpose(m=32, n=48).kernel, row_sums(rows=48, columns=32).kernel
    weights = np.arange(48 * 32, dtype=np.float32)
    return GpuModelImage(
        kernels=(gpu_kernel(turn), gpu_kernel(add)),
        calls=(
            GpuCall("transpose", grid(turn), (BufferRef("input", 0), BufferRef("arena", 256))),
            GpuCall("row_sums", grid(add), (BufferRef("arena", 256), BufferRef("output", 0))),
            GpuCall("row_sums", grid(add), (BufferRef("weight", 0), BufferRef("output", 1))),
        ),
        input_bytes=(32 * 48 * 4,),
        output_bytes=(48 * 4, 48 * 4),
        weights=weights.tobytes(),
        arena_bytes=256 + 32 * 48 * 4,
    )


@pytest.mark.parametrize(("blocks", "share"), [(1, 1), (10, 1), (11, 2), (60, 6), (61, 0)])
def test_blocks_that_start_early_are_even_over_the_multiprocessors(blocks: int, share: int) -> None:
    """As many of a kernel fit on each as it is to have, and no more; kernels of many blocks do not start early."""
    room = 233472
    kernel = LoadedKernel("k", "", 128, shared_bytes=64)
    call = GpuCall("k", (blocks, 1, 1), ())
    (made,) = spread_out(GpuModelImage((kernel,), (call, GpuCall("k", (1, 1, 1), ())), (), ()), 10, room).kernels
    assert made.starts_early is (share > 0)
    if share:
        assert share * (made.shared_bytes + 1024) <= room < (share + 1) * (made.shared_bytes + 1024)
    else:
        assert made == kernel


def test_a_model_runs_emulated(image: GpuModelImage, tmp_path: Path) -> None:
    model = EmulatedModel(image, Cache(tmp_path), limits=LIMITS)
    data = np.random.default_rng(13).standard_normal((32, 48), np.float32)
    outputs = [np.zeros(48, np.float32), np.zeros(48, np.float32)]
    model.run([data], outputs)
    np.testing.assert_allclose(outputs[0], data.sum(axis=0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(outputs[1], np.arange(48 * 32, dtype=np.float32).reshape(48, 32).sum(axis=1))
    assert len(model.profile([data], outputs)) == 3
    with pytest.raises(InternalError, match="input arrays"):
        model.run([data[:1]], outputs)


def test_descriptions_are_checked(image: GpuModelImage) -> None:
    first = image.kernels[0]
    with pytest.raises(InternalError, match="same name"):
        GpuModelImage((first, first), (), (), ())
    with pytest.raises(InternalError, match="launch 0 \\(nobody\\): no such kernel"):
        GpuModelImage((first,), (GpuCall("nobody", (1, 1, 1), ()),), (), ())
    with pytest.raises(InternalError, match="arena offset 4 is not a multiple"):
        GpuModelImage((first,), (GpuCall(first.name, (1, 1, 1), (BufferRef("arena", 4),)),), (), (), arena_bytes=64)
    with pytest.raises(InternalError, match="input 1 is out of range"):
        GpuModelImage((first,), (GpuCall(first.name, (1, 1, 1), (BufferRef("input", 1),)),), (4,), ())


@pytest.mark.skipif(bool(devices()), reason="this machine has a GPU")
def test_no_gpu_is_one_clear_error(image: GpuModelImage, tmp_path: Path) -> None:
    with pytest.raises(CudaError, match="cuda"):
        CudaModel(image, Cache(tmp_path))


@pytest.mark.skipif(not devices(), reason="needs a GPU")
def test_a_gpu_agrees_with_the_emulator(image: GpuModelImage, tmp_path: Path) -> None:
    data = np.random.default_rng(13).standard_normal((32, 48), np.float32)
    results = []
    for model in (EmulatedModel(image, Cache(tmp_path), limits=LIMITS), CudaModel(image, Cache(tmp_path))):
        outputs = [np.zeros(48, np.float32), np.zeros(48, np.float32)]
        model.run([data], outputs)
        assert len(model.profile([data], outputs)) == 3
        results.append(outputs)
    for emulated, real in zip(*results, strict=True):
        np.testing.assert_allclose(real, emulated, rtol=1e-6, atol=1e-6)
