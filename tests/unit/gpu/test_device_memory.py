"""Weights beyond a device's memory: every launch finds its own in the ring, however early or late copies are made, on
the emulator a model gives the same, and a CUDA graph says who waits for whom."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest

import tilewright
from tests.cpu_stages import model_of
from tests.unit.gpu.test_cuda_calls import Driver, driver  # noqa: F401
from tilewright.backend.gpu.streamed import within_memory
from tilewright.errors import OptionError
from tilewright.runtime.cpu_model import BufferRef
from tilewright.runtime.cuda_graph import LaunchGraph
from tilewright.runtime.gpu_model import GpuCall, GpuModelImage, LoadedKernel, WeightCopy

LAYERS, WIDTH = 6, 48


def random_image(rng: np.random.Generator) -> tuple[GpuModelImage, dict[int, int]]:
    """Launches that read some weights each, of which some are read again."""
    sizes = [int(n) * 64 for n in rng.integers(1, 40, rng.integers(2, 12))]
    starts = np.cumsum([0, *sizes])
    calls = []
    for _ in range(int(rng.integers(3, 16))):
        read = rng.choice(len(sizes), int(rng.integers(0, 3)))
        calls.append(GpuCall("k", (1, 1, 1), tuple(BufferRef("weight", int(starts[n])) for n in dict.fromkeys(read))))
    data = rng.integers(0, 256, int(starts[-1]), dtype=np.uint8).tobytes()
    image = GpuModelImage((LoadedKernel("k", "", 32),), tuple(calls), (64,), (64,), data, arena_bytes=512)
    return image, {int(start): size for start, size in zip(starts, sizes, strict=False)}


def finds_its_own(image: GpuModelImage, made: GpuModelImage, sizes: dict[int, int], early: bool) -> None:
    """Every launch with copies made as early, or as late, as may be; a slot that was not filled is of others."""
    weights = np.frombuffer(bytes(image.weights), np.uint8)  # type: ignore[arg-type]
    there = np.zeros(made.resident_bytes, np.uint8)
    for place, piece in made.resident_pieces:
        there[place : place + len(piece)] = np.frombuffer(piece, np.uint8)
    ring = np.zeros(made.ring_bytes, np.uint8)
    waiting = list(made.copies)
    for number, (before, call) in enumerate(zip(image.calls, made.calls, strict=True)):
        while waiting and (waiting[0].after < number if early else waiting[0].first <= number):
            copy = waiting.pop(0)
            ring[copy.place : copy.place + copy.bytes] = weights[copy.source : copy.source + copy.bytes]
        assert not [copy for copy in waiting if copy.first <= number], "a copy waits for what comes after it"
        for old, new in zip(before.buffers, call.buffers, strict=True):
            size = sizes[old.value]
            found = (ring if new.space == "ring" else there)[new.value : new.value + size]
            np.testing.assert_array_equal(found, weights[old.value : old.value + size])


@pytest.mark.parametrize("seed", range(40))
def test_every_launch_finds_its_weights(seed: int) -> None:
    rng = np.random.default_rng([seed, 30])
    image, sizes = random_image(rng)
    whole, fixed = sum(sizes.values()), 512 + 128
    for share in (1.5, 0.8, 0.5, 0.2):
        limit = int(share * whole) + fixed
        try:
            made = within_memory(image, sizes, limit)
        except OptionError as error:
            least = int(str(error).split(" for weights")[0].rsplit(" ", 1)[1]) + fixed
            assert least > limit
            made, limit = within_memory(image, sizes, least), least
        if made.copies:
            assert made.resident_bytes + made.ring_bytes + fixed <= limit
            for early in (True, False):
                finds_its_own(image, made, sizes, early)


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    steps = [("MatMul", [f"x{n}", f"w{n}"], f"x{n + 1}", {}) for n in range(LAYERS)]
    constants = {f"w{n}": (rng.standard_normal((WIDTH, WIDTH)) / 7).astype(np.float32) for n in range(LAYERS)}
    path = tmp_path_factory.mktemp("streamed") / "chain.onnx"
    onnx.save(model_of(steps, {"x0": (4, WIDTH)}, {f"x{LAYERS}": (4, WIDTH)}, constants), path)
    return path


def test_a_model_larger_than_the_device_gives_the_same(chain: Path, tmp_path: Path) -> None:
    about = {"target": "cuda-emulated", "schedule": "none", "contraction": "direct"}
    whole = tilewright.compile(chain, **about)
    inputs = whole.random_inputs(0)
    right = whole.run(inputs)[f"x{LAYERS}"]
    one = WIDTH * WIDTH * 4
    image = whole.artifact.runner.image
    fixed = image.arena_bytes + sum(image.input_bytes) + sum(image.output_bytes)
    bound = tilewright.compile(chain, **about, device_memory=fixed + 4 * one)
    made = bound.artifact.runner.image
    assert made.copies and made.residents
    assert made.resident_bytes + made.ring_bytes + fixed <= fixed + 4 * one
    np.testing.assert_array_equal(bound.run(inputs)[f"x{LAYERS}"], right)
    np.testing.assert_array_equal(bound.run(inputs)[f"x{LAYERS}"], right)  # the ring is as the first run left it
    bound.save(tmp_path / "saved")
    np.testing.assert_array_equal(tilewright.load(tmp_path / "saved").run(inputs)[f"x{LAYERS}"], right)
    with pytest.raises(OptionError, match=r"device_memory=4096 is not enough: it takes \d+ bytes .* give it 1MiB"):
        tilewright.compile(chain, **about, device_memory="4KiB")


def test_what_stays_is_spread_over_the_run() -> None:
    """A third of equal layers: no more than four of the others follow each other."""
    size, count = 4096, 48
    calls = tuple(GpuCall("k", (1, 1, 1), (BufferRef("weight", size * n),)) for n in range(count))
    image = GpuModelImage((LoadedKernel("k", "", 32),), calls, (), (), bytes(size * count))
    made = within_memory(image, {size * n: size for n in range(count)}, size * (count // 3 + 2))
    assert len(made.copies) == count - count // 3
    staying = [-1, *sorted(each.source // size for each in made.residents), count]
    assert max(b - a for a, b in pairwise(staying)) <= 5


def test_it_is_for_gpus() -> None:
    with pytest.raises(OptionError, match="device_memory is what a model may have on a GPU"):
        tilewright.Options(device_memory="1GiB")


def test_a_graph_says_who_waits_for_whom(driver: Driver) -> None:  # noqa: F811
    """Two copies into one slot: the second waits for the first and for the launch that read it; each reader waits for
    its copy and starts when both have ended."""
    copies = (WeightCopy(0, 0, 64, 0, -1), WeightCopy(64, 0, 64, 2, 0))
    calls = tuple(GpuCall("k", (2, 1, 1), (BufferRef("ring", 0),) if number != 1 else ()) for number in range(3))
    image = GpuModelImage(
        (LoadedKernel("k", "", 128, starts_early=True),), calls, (), (), bytes(128), 0, (), copies, 64
    )
    bases = {"weight": 0, "arena": 0, "ring": 4096}
    made = LaunchGraph(image, {"k": SimpleNamespace(handle=7)}, bases, 0, {0: 100, 64: 200})
    kernels = [node.handle for node in made._nodes]
    added = [given for name, given in driver.said if name == "cuGraphAddMemcpyNode"]
    assert [(given[3].srcHost, given[3].dstDevice, given[3].WidthInBytes) for given in added] == [
        (100, 4096, 64), (200, 4096, 64),
    ]  # fmt: skip
    edges = [(given[1][0], given[2][0], hasattr(given[3][0], "from_port")) for name, given in driver.said
             if name.startswith("cuGraphAddDependencies")]  # fmt: skip
    assert added[0][1] == [] and added[1][1][1] == kernels[0] and len(added[1][1]) == 2
    first, second = added[1][1][0], [edge for edge in edges if edge[1] == kernels[2]]
    assert (first, kernels[0], False) in edges
    assert {early for *_, early in second} == {False} and (kernels[0], kernels[1], True) in edges
    driver.said.clear()
    made._launch_each(5, ())
    copy, launch = "cuMemcpyHtoDAsync", "cuLaunchKernelEx"
    assert driver.names() == [copy, launch, launch, copy, launch]
