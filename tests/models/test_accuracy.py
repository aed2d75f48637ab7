"""Whole networks at full size: our error against float64 beside PyTorch's own, kernels and traffic, threads.

The models of the zoo run with --all. The quick run takes the demonstration's MobileNet-V2, which needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import tilewright
from tilewright import Options
from tilewright.examples import mobilenet
from tilewright.ir.meaning.traffic import count_traffic

NAMES = ("mobilenet_v2", "bert_base", "lstm", "mmoe")
MORE = (
    "resnet50",
    "efficientnet_b0",
    "vit_s32",
    "unet",
    "nerf",
    "resnext101",
    "swin_t",
    "swin_b",
    "mobilevit_s",
    "nafnet",
    "bert_384",
    "conformer",
    "bsrn",
    "restormer",
)
SCHEDULES = ("none", "connected")


@pytest.fixture(scope="module")
def demonstration():
    model = mobilenet.build()
    image = np.random.default_rng(7).standard_normal((1, 3, 224, 224)).astype(np.float32)
    return model, image


@pytest.mark.parametrize("schedule", [pytest.param("none", marks=pytest.mark.slow), "connected"])
def test_demonstration_agrees_with_onnxruntime(demonstration, schedule: str, kernel_cache: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="a second runtime to compare with")
    model, image = demonstration
    ours = tilewright.compile(model, options=Options(schedule=schedule, cache_dir=kernel_cache))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (wanted,) = session.run(None, {session.get_inputs()[0].name: image})
    (found,) = ours(image)
    assert np.linalg.norm(found - wanted) <= 1e-5 * np.linalg.norm(wanted)
    assert np.argmax(found) == np.argmax(wanted)


@pytest.mark.slow
def test_demonstration_is_the_same_on_any_number_of_threads(demonstration, kernel_cache: Path) -> None:
    model, image = demonstration
    runs = [tilewright.compile(model, options=Options(cache_dir=kernel_cache, threads=n))(image)[0] for n in (1, 2, 3)]
    assert runs[0].tobytes() == runs[1].tobytes() == runs[2].tobytes()


@dataclass(frozen=True)
class Full:
    path: Path
    inputs: dict[str, np.ndarray]
    reference: dict[str, np.ndarray]
    float32: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory):
    zoo = pytest.importorskip("bench.zoo", reason="the zoo needs torch, a development extra", exc_type=ImportError)

    @cache
    def make(name: str) -> Full:
        module, inputs = zoo.build(name, "full")
        path = tmp_path_factory.mktemp("full") / f"{name}.onnx"
        zoo.export_module(module, inputs, path)
        return Full(path, inputs, zoo.reference(module, inputs), zoo.float32_outputs(module, inputs))

    return make


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "schedule"), [*((n, s) for n in NAMES for s in SCHEDULES), *((n, "connected") for n in MORE)]
)
def test_full_size_is_as_accurate_as_float32_can_be(full, name: str, schedule: str, kernel_cache: Path) -> None:
    from bench import zoo

    made = full(name)
    model = tilewright.compile(made.path, options=Options(schedule=schedule, cache_dir=kernel_cache))
    error = zoo.relative_error(model.run(made.inputs), made.reference)
    limit = max(1e-5, 3 * zoo.relative_error(made.float32, made.reference))
    print(f"{name} {schedule}: error {error:.2e}, limit {limit:.2e}")
    assert error <= limit


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_full_size_connected_moves_less(full, name: str, kernel_cache: Path) -> None:
    made = full(name)
    loops = {}
    for schedule in SCHEDULES:
        options = Options(schedule=schedule, cache_dir=kernel_cache, stop_after="loops")
        loops[schedule] = tilewright.compile(made.path, options=options).artifact.loops
    plain, connected = (loops[s] for s in SCHEDULES)
    assert plain is not None and connected is not None
    assert len(connected.calls) < len(plain.calls)
    assert count_traffic(connected).intermediate < count_traffic(plain).intermediate


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_full_size_on_any_number_of_threads(full, name: str, kernel_cache: Path) -> None:
    made = full(name)
    seen = set()
    for threads in (1, 2, 3):
        model = tilewright.compile(made.path, options=Options(cache_dir=kernel_cache, threads=threads))
        seen.add(b"".join(a.tobytes() for a in model.run(made.inputs).values()))
    assert len(seen) == 1
