"""Same model, same options, same machine description: same bytes of source, whatever Python's hashes are."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

from tests.cpu_stages import lowered, model_of, programs, random_inputs

ROOT = Path(__file__).resolve().parents[3]

# Everything a compilation gives up to source text, for all schedules and both backends, digested form by form.
DIGEST = """
import hashlib, sys
from pathlib import Path
from tilewright.compiler.pipeline import build
from tilewright.frontend.onnx.model import load
from tilewright.ir.text import text
from tilewright.options import Options
from tilewright.target import machine
for path in sys.argv[1:]:
    for target in ("cpu", "cuda"):
        for schedule in ("none", "connected"):
            options = Options(schedule=schedule, target=target, stop_after="source")
            made = build(load(Path(path), {}), machine(target), options)
            forms = [text.program_text(made.program), made.plan.to_json(), text.loops_text(made.loops),
                     *(f"{k}\\n{v}" for k, v in made.sources.items())]
            print(Path(path).name, target, schedule, *(hashlib.sha256(f.encode()).hexdigest()[:16] for f in forms))
"""


def digests(paths: list[Path], seed: str) -> list[str]:
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", DIGEST, *map(str, paths)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def small_models() -> dict[str, ModelProto]:
    rng = np.random.default_rng(0)

    def weights(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    return {
        "block": model_of(
            [("Conv", ["x", "w"], "y", {"pads": [1, 1, 1, 1]}), ("Clip", ["y", "zero", "six"], "c", {}),
             ("Conv", ["c", "d"], "e", {"pads": [1, 1, 1, 1], "group": 8}), ("Conv", ["e", "p"], "f", {}),
             ("Add", ["f", "x"], "o", {})],
            {"x": (1, 4, 9, 9)}, {"o": (1, 4, 9, 9)},
            {"w": weights(8, 4, 3, 3), "d": weights(8, 1, 3, 3), "p": weights(4, 8, 1, 1),
             "zero": np.array(0, np.float32), "six": np.array(6, np.float32)}),
        "attention": model_of(
            [("Transpose", ["k"], "t", {"perm": [0, 2, 1]}), ("MatMul", ["q", "t"], "s", {}),
             ("Softmax", ["s"], "p", {"axis": -1}), ("MatMul", ["p", "v"], "o", {})],
            {"q": (2, 40, 8), "k": (2, 40, 8), "v": (2, 40, 8)}, {"o": (2, 40, 8)}),
        "recurrence": model_of(
            [("LSTM", ["x", "w", "r", "b"], "h", {"hidden_size": 8})],
            {"x": (4, 2, 3)}, {"h": (4, 1, 2, 8)},
            {"w": weights(1, 32, 3), "r": weights(1, 32, 8), "b": weights(1, 64)}),
    }  # fmt: skip


def test_two_compilations_give_the_same_bytes(tmp_path: Path) -> None:
    """In fresh processes whose sets and dicts are ordered differently."""
    paths = []
    for name, model in small_models().items():
        paths.append(tmp_path / f"{name}.onnx")
        paths[-1].write_bytes(model.SerializeToString())
    first, second = digests(paths, "1"), digests(paths, "2")
    assert first == second
    assert len(first) == 4 * len(paths) and len({line.split(" ", 1)[0] for line in first}) == len(paths)


@pytest.mark.slow
def test_zoo_gives_the_same_bytes(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the zoo needs torch, a development extra")
    from bench import zoo

    paths = []
    for name in zoo.MODELS:
        paths.append(tmp_path / f"{name}.onnx")
        zoo.export(name, "small", paths[-1])
    assert digests(paths, "1") == digests(paths, "2")


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", small_models())
def test_threads_and_repeats_give_the_same_bits(name: str, kernel_cache: Path) -> None:
    program = programs(small_models()[name])["layout"]
    inputs = random_inputs(program)
    low = lowered(program)
    seen = set()
    for threads in (1, 2, 3, 3):
        found = low.natively(inputs, kernel_cache, threads)
        seen.add(hashlib.sha256(b"".join(a.tobytes() for a in found.values())).hexdigest())
    assert len(seen) == 1


def test_plans_do_not_depend_on_threads() -> None:
    from tilewright.target import machine

    assert machine("cpu", 1) == machine("cpu", 7)
