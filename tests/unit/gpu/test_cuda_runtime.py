"""A model on a real GPU as its callers use it: arrays of any library, pointers that change, streams, threads."""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewright
from tests.cpu_stages import model_of
from tilewright.errors import InputError
from tilewright.options import Options
from tilewright.runtime.cuda import devices

pytestmark = pytest.mark.skipif(not devices(), reason="needs a GPU")
WEIGHT = np.random.default_rng(3).standard_normal((40, 24)).astype(np.float32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tilewright.Model:
    """relu(x w), and its row maxima after a softmax: kernels that hand on through the arena, two outputs."""
    steps = [("MatMul", ["x", "w"], "h", {}), ("Relu", ["h"], "y", {}), ("Softmax", ["y"], "s", {"axis": -1}),
             ("Transpose", ["s"], "z", {"perm": [1, 0]})]  # fmt: skip
    made = model_of(steps, {"x": (33, 40)}, {"y": (33, 24), "z": (24, 33)}, {"w": WEIGHT})
    options = Options(target="cuda", cache_dir=tmp_path_factory.mktemp("cuda"))
    return tilewright.compile(made, options=options)


def given(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((33, 40)).astype(np.float32)


def wanted(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    y = np.maximum(x.astype(np.float64) @ WEIGHT, 0)
    e = np.exp(y - y.max(1, keepdims=True))
    return y, (e / e.sum(1, keepdims=True)).T


def agree(found: Any, x: np.ndarray) -> None:
    for one, other in zip(found, wanted(x), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_arrays_on_the_host(model: tilewright.Model) -> None:
    for seed in range(3):
        agree(model(given(seed)), given(seed))


def test_tensors_are_read_where_they_lie(model: tilewright.Model) -> None:
    import torch

    kept = [torch.from_numpy(given(seed)).cuda() for seed in range(5)]  # other pointers each time
    results = [model(x) for x in kept]
    results += [model(x=x) for x in kept] + [list(model.run({"x": x}).values()) for x in kept]
    for number, found in enumerate(results):
        assert all(type(one) is torch.Tensor and one.is_cuda for one in found)
        agree([one.cpu().numpy() for one in found], given(number % 5))


def test_outputs_of_the_callers_own(model: tilewright.Model) -> None:
    import torch

    outputs = [torch.full((33, 24), np.nan, device="cuda"), torch.full((24, 33), np.nan, device="cuda")]
    stream = torch.cuda.Stream()
    x = torch.from_numpy(given(1)).cuda()
    torch.cuda.synchronize()
    model.run_into([x], outputs, stream=stream)
    stream.synchronize()
    agree([one.cpu().numpy() for one in outputs], given(1))
    with pytest.raises(InputError, match="output 'y' must have shape"):
        model.run_into([x], outputs[::-1])
    with pytest.raises(InputError, match="lies in the memory of input 'x'"):
        model.run_into([x], [x.reshape(-1)[: 33 * 24].reshape(33, 24), outputs[1]])


def test_streams_at_once(model: tilewright.Model) -> None:
    import torch

    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                x = torch.from_numpy(given(seed)).cuda()
                for _ in range(50):
                    found = model(x)
                torch.cuda.current_stream().synchronize()
                agree([one.cpu().numpy() for one in found], given(seed))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(12)]  # more than keep an arena
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_inside_a_graph_of_the_callers(model: tilewright.Model) -> None:
    import torch

    x = torch.from_numpy(given(0)).cuda()
    outputs = [torch.empty((33, 24), device="cuda"), torch.empty((24, 33), device="cuda")]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        model.run_into([x], outputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        model.run_into([x], outputs)
    x.copy_(torch.from_numpy(given(4)))
    graph.replay()
    torch.cuda.synchronize()
    agree([one.cpu().numpy() for one in outputs], given(4))


def test_the_same_bits_every_time(model: tilewright.Model) -> None:
    import torch

    x = torch.from_numpy(given(0)).cuda()
    first = model(x)
    for _ in range(200):
        assert all(torch.equal(one, other) for one, other in zip(model(x), first, strict=True))


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="needs CuPy")
def test_cupy(model: tilewright.Model) -> None:
    import cupy

    found = model(cupy.asarray(given(2)))
    assert all(isinstance(one, cupy.ndarray) for one in found)
    agree([cupy.asnumpy(one) for one in found], given(2))


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs JAX")
def test_jax(model: tilewright.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    found = model(jax.device_put(given(2), jax.devices("gpu")[0]))
    assert all(isinstance(one, jax.Array) for one in found)
    agree([np.asarray(one) for one in found], given(2))


def test_arrays_that_begin_inside_a_packet(model: tilewright.Model) -> None:
    import torch

    def apart(*shape: int) -> Any:
        return torch.empty(int(np.prod(shape)) + 1, device="cuda")[1:].reshape(shape)

    x, y, z = apart(33, 40), apart(33, 24), apart(24, 33)
    assert all(array.data_ptr() % 16 for array in (x, y, z))
    for seed in range(3):
        x.copy_(torch.from_numpy(given(seed)))
        model.run_into([x], [y, z])
        agree([y.cpu().numpy(), z.cpu().numpy()], given(seed))
        agree([one.cpu().numpy() for one in model(x)], given(seed))


def test_wrong_arrays_are_refused(model: tilewright.Model) -> None:
    import torch

    with pytest.raises(InputError, match="input 'x' must be float32, not float16"):
        model(torch.zeros(33, 40, device="cuda", dtype=torch.float16))
    with pytest.raises(InputError, match="input 'x' must be contiguous"):
        model(torch.zeros(40, 33, device="cuda").t())
    with pytest.raises(InputError, match="input 'x' must have shape"):
        model(torch.zeros(33, 41, device="cuda"))


def test_kernels_say_what_they_take(model: tilewright.Model) -> None:
    resources = model.artifact.runner.resources
    assert resources and all(row.registers > 0 and row.spill_bytes == 0 for row in resources.values())


def test_a_profile_has_every_launch(model: tilewright.Model) -> None:
    assert len(model.profile(given(0), repeat=3).calls) == len(model.calls)


def test_too_little_memory_is_said_before_anything_is_launched(tmp_path: Path) -> None:
    rows, count = 1 << 15, 80  # products of 4 gigabytes each, all of them kept for the sum
    weights = {f"w{number}": np.full((1, rows), number, np.float32) for number in range(count)}
    steps = [("MatMul", ["x", name], f"{name}_y", {}) for name in weights]
    steps += [("Sum", [f"{name}_y" for name in weights], "z", {})]
    made = model_of(steps, {"x": (rows, 1)}, {"z": (rows, rows)}, weights)
    with pytest.raises(tilewright.TilewrightError, match="the model needs .* on the GPU, which has .* free"):
        tilewright.compile(made, options=Options(target="cuda", schedule="none", cache_dir=tmp_path))
