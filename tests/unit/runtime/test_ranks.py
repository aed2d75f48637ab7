"""Processes that run one model together: what they give, and what they say when one is gone, stuck or different."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.cpu_stages import model_of
from tilewright.cli.main import main
from tilewright.distributed.links import link_of
from tilewright.runtime.ranks import RankError, Ranks

pytest.importorskip("torch", reason="ranks pass arrays on by torch.distributed")
pytest.importorskip("scipy", reason="integer programs are scipy's")
pytestmark = [pytest.mark.host, pytest.mark.slow]

WIDTH = 256
ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import os, signal, sys, time
import numpy as np
import tilewright
from tilewright.errors import TilewrightError

def on_tensors():  # as between GPUs, with tensors of the host: segments take and give them, and gloo passes them on
    import torch
    import tilewright.distributed.model as ranked
    from tilewright.runtime.ranks import OnDevice, Ranks

    def caller(step):
        def call(values):
            outputs = [np.empty(shape, dtype) for _, shape, dtype in step.gives]
            step.artifact.runner.run([value.numpy() for value in values], outputs)
            return [torch.from_numpy(array) for array in outputs]

        return call if isinstance(step, ranked.CompiledRank) else None

    ranked._caller, ranked.identity = caller, lambda: b"one"
    Ranks.on_devices = lambda ranks, gpu: OnDevice(ranks._torch, ranks._distributed, None, "cpu")

def planned_for_quick_links(path):
    from tilewright.distributed.compiling import Asked, compile_ranked
    from tilewright.distributed.meshes import parse_mesh
    from tilewright.frontend.onnx.model import load
    from tilewright.options import Options

    asked = Asked(parse_mesh(mesh), int(parts), 5.0, f"{folder}/quick.json")
    return compile_ranked(lambda: load(path, {}), asked, Options(threads=1, effort="fast"))

mode, folder, mesh, parts = sys.argv[1:]
if mode == "tensors":
    on_tensors()
rank = int(os.environ["RANK"])
name = "other.onnx" if mode == "other" and rank == 1 else "model.onnx"
try:
    if mode == "load":
        model = tilewright.load(f"{folder}/saved", timeout=5)
    elif mode == "quick":
        model = planned_for_quick_links(f"{folder}/{name}")
        print(model.explain(), flush=True)
    else:
        about = {"mesh": mesh, "micro_batches": int(parts), "timeout": 5, "threads": 1, "effort": "fast"}
        model = tilewright.compile(f"{folder}/{name}", **about)
    x = np.load(f"{folder}/x.npy") if rank == 0 else None
    (y,) = model(x)
    if rank == 0:
        np.save(f"{folder}/y.npy", y)
    print(f"weights {model.weights}", flush=True)
    if mode in ("killed", "stopped") and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL if mode == "killed" else signal.SIGSTOP)
    if mode == "save":
        model.save(f"{folder}/saved")
    if mode in ("killed", "stopped"):
        model(x)
    model.close()
except TilewrightError as error:
    print(f"told {time.time()} {error}", flush=True)
    sys.exit(2)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("ranks")
    rng = np.random.default_rng(0)
    for name, width in (("model", WIDTH), ("other", WIDTH // 2)):
        constants = {"w": rng.standard_normal((64, width)).astype(np.float32),
                     "v": rng.standard_normal((width, 64)).astype(np.float32)}  # fmt: skip
        steps = [("MatMul", ["x", "w"], "h", {}), ("Relu", ["h"], "g", {}), ("MatMul", ["g", "v"], "y", {})]
        onnx.save(model_of(steps, {"x": (32, 64)}, {"y": (32, 64)}, constants), place / f"{name}.onnx")
        if name == "model":
            x = rng.standard_normal((32, 64)).astype(np.float32)
            np.save(place / "x.npy", x)
            np.save(place / "right.npy", np.maximum(x @ constants["w"], 0) @ constants["v"])
    (place / "script.py").write_text(SCRIPT)
    return place


@contextmanager
def started(folder: Path, mode: str, mesh: str, ranks: int, parts: int = 1) -> Iterator[list[subprocess.Popen[str]]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = []
    for rank in range(ranks):
        about = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        found.append(subprocess.Popen(
            [sys.executable, str(folder / "script.py"), mode, str(folder), mesh, str(parts)], text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**os.environ, **about, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        ))  # fmt: skip
    try:
        yield found
    finally:
        for process in found:
            process.kill()
            process.wait()


def told(output: str) -> tuple[float, str]:
    """When something was told, and what: one line."""
    lines = [line for line in output.splitlines() if line.startswith("told ")]
    assert len(lines) == 1, output
    _, moment, text = lines[0].split(" ", 2)
    return float(moment), text


def ended(processes: Sequence[subprocess.Popen[str]], seconds: float = 600) -> list[str]:
    return [process.communicate(timeout=seconds)[0] for process in processes]


def gives_the_same(folder: Path, mode: str, mesh: str, ranks: int, parts: int = 1) -> list[str]:
    (folder / "y.npy").unlink(missing_ok=True)
    with started(folder, mode, mesh, ranks, parts) as processes:
        outputs = ended(processes)
        assert [p.returncode for p in processes] == [0] * ranks, outputs
    right = np.load(folder / "right.npy")
    np.testing.assert_allclose(np.load(folder / "y.npy"), right, 1e-5, 1e-5 * float(np.abs(right).max()))
    return outputs


@pytest.mark.parametrize("mesh, ranks, parts", [("tp=1", 1, 1), ("tp=2", 2, 1), ("dp=2", 2, 1), ("pp=2", 2, 2)])
def test_arrays_that_stay_on_devices(folder: Path, mesh: str, ranks: int, parts: int) -> None:
    gives_the_same(folder, "tensors", mesh, ranks, parts)


@pytest.mark.parametrize("mesh, ranks, parts", [
    ("tp=2", 2, 1), ("dp=2", 2, 1), ("dp=2,tp=2", 4, 1), ("tp=3", 3, 1), ("pp=2", 2, 1),
    ("pp=2", 2, 4), ("pp=2,tp=2", 4, 8), ("tp=2/tp=1", 3, 2), ("tp=1/dp=2", 3, 32), ("auto", 3, 2),
])  # fmt: skip
def test_several_give_what_one_gives(folder: Path, mesh: str, ranks: int, parts: int) -> None:
    outputs = gives_the_same(folder, "run", mesh, ranks, parts)
    if mesh == f"tp={ranks}":
        held = [int(output.split("weights ")[1].split()[0]) for output in outputs]
        assert max(held) <= 1.05 / ranks * 2 * 64 * WIDTH * 4


def with_quick_links(folder: Path, model: onnx.ModelProto, x: np.ndarray, right: np.ndarray) -> None:
    """A model, its input and what comes of it; links that are described as so quick that all is worth sharing out."""
    onnx.save(model, folder / "model.onnx")
    np.save(folder / "x.npy", x)
    np.save(folder / "right.npy", right)
    host = {"name": "host", "capacity": 1 << 38, "transaction": 64, "bandwidth": 1e10, "latency": 1e-5}
    link = {"name": "ranks", "size": 2, "bandwidth": 1e12, "latency": 1e-12}
    (folder / "quick.json").write_text(json.dumps({"device": "cpu", "host": host, "links": [link]}))
    (folder / "script.py").write_text(SCRIPT)


def test_a_rank_has_a_stage_in_front_and_one_behind(tmp_path: Path) -> None:
    """Four layers of many rows have the time and six of few rows the weights: each rank has a half of both."""
    rng = np.random.default_rng(2)
    shapes = [(32, 16), (16, 32)] * 2 + [(32, 64), (64, 32)] * 3
    layers = [rng.standard_normal(shape).astype(np.float32) / 6 for shape in shapes]
    steps = [("MatMul", [f"x{n}", f"w{n}"], f"x{n + 1}", {}) for n in range(len(layers))]
    steps[4:] = [("ReduceSum", ["x4", "rows"], "y4", {"keepdims": 0}),
                 *[("MatMul", [f"y{n}", f"w{n}"], f"y{n + 1}", {}) for n in range(4, 10)]]  # fmt: skip
    constants = {**{f"w{n}": each for n, each in enumerate(layers)}, "rows": np.array([1], np.int64)}
    model = model_of(steps, {"x0": (8, 64, 32)}, {"y10": (8, 32)}, constants)
    x = rng.standard_normal((8, 64, 32)).astype(np.float32)
    summed = (x @ np.linalg.multi_dot(layers[:4])).sum(1)
    with_quick_links(tmp_path, model, x, np.linalg.multi_dot([summed, *layers[4:]]))
    outputs = gives_the_same(tmp_path, "quick", "pp=2", 2, 4)
    held = [int(output.split("\nweights ")[1]) for output in outputs]
    assert max(held) <= 1.05 / 2 * sum(each.nbytes for each in layers)
    assert all("2 ranks, 3 stages" in output for output in outputs)


def test_ranks_share_what_comes_first_and_last(tmp_path: Path) -> None:
    """Rows of a table looked up and multiplied with, two layers between: what ranks exchange and what stages send pass
    between the same two ranks at a time."""
    rng = np.random.default_rng(1)
    table = rng.standard_normal((128, 16)).astype(np.float32)
    layers = [rng.standard_normal((16, 16)).astype(np.float32) / 4 for _ in range(2)]
    steps = [("Gather", ["table", "x"], "x0", {}), ("MatMul", ["x0", "w0"], "x1", {}),
             ("MatMul", ["x1", "w1"], "x2", {}), ("MatMul", ["x2", "turned"], "y", {})]  # fmt: skip
    constants = {"table": table, "w0": layers[0], "w1": layers[1], "turned": np.ascontiguousarray(table.T)}
    model = model_of(steps, {"x": (8,)}, {"y": (8, 128)}, constants, {"x": onnx.TensorProto.INT64})
    x = rng.integers(0, 128, 8)
    with_quick_links(tmp_path, model, x, table[x] @ layers[0] @ layers[1] @ table.T)
    outputs = gives_the_same(tmp_path, "quick", "pp=2", 2, 4)
    assert all("2 ranks, 4 stages" in output and f"weights {4 * (64 * 16 + 256)}" in output for output in outputs)


def test_saved_ranks_start_without_compiling_and_are_compared(folder: Path) -> None:
    gives_the_same(folder, "save", "pp=2", 2, 4)
    gives_the_same(folder, "load", "", 2)
    with started(folder, "load", "", 3) as processes:
        for output in ended(processes):
            assert "is for 2 ranks, and 3 were started: torchrun --nproc-per-node 2" in told(output)[1]
    other = folder / "saved" / "rank_1"
    kept = other.rename(folder / "kept")
    gives_the_same(folder, "save", "tp=2", 2)
    shutil.rmtree(other)
    kept.rename(other)
    with started(folder, "load", "", 2) as processes:
        for output in ended(processes):
            text = told(output)[1]
            assert text == "rank 1 has another saved model than rank 0: give every rank the same model and options"


def test_a_rank_of_another_model_is_named_before_anything_is_exchanged(folder: Path) -> None:
    with started(folder, "other", "tp=2", 2) as processes:
        for output in ended(processes):
            _, text = told(output)
            assert text == "rank 1 has another model than rank 0: give every rank the same model and options"
        assert [p.returncode for p in processes] == [2, 2]


def test_a_rank_that_is_killed_is_told_at_once(folder: Path) -> None:
    with started(folder, "killed", "tp=2", 2) as processes:
        processes[1].wait(timeout=120)
        gone = time.time()
        assert processes[1].returncode == -signal.SIGKILL
        moment, text = told(ended(processes[:1])[0])
        assert text.startswith("rank 0, ") and "another rank is gone or did not answer within 5 s" in text
        assert moment - gone < 2


def test_a_rank_that_is_stopped_is_told_at_the_timeout(folder: Path) -> None:
    with started(folder, "stopped", "tp=2", 2) as processes:
        assert os.waitpid(processes[1].pid, os.WUNTRACED)[1] & 0xFF == 0x7F
        since = time.time()
        moment, text = told(ended(processes[:1])[0])
        assert text.startswith("rank 0, ") and "another rank is gone or did not answer within 5 s" in text
        assert moment - since < 5 + 2


def test_more_ranks_than_started_are_an_error_that_says_how_many(folder: Path) -> None:
    with started(folder, "run", "tp=4", 2) as processes:
        for output in ended(processes):
            assert told(output)[1] == "the mesh tp=4 has 4 ranks, and 2 were started: torchrun --nproc-per-node 4"


def test_links_are_measured_and_can_be_planned_for(folder: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "-m", "tilewright", "devices", "--links"]
    path = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    told = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=path, check=True).stdout
    (link,) = json.loads(told)["links"]
    assert link["size"] == 2 and link["bandwidth"] > 1e6 and 0 < link["latency"] < 10
    (folder / "pair.json").write_text(told)
    assert main(["explain", str(folder / "model.onnx"), "--cluster", str(folder / "pair.json")]) == 0


def test_a_link_is_its_latency_and_its_bandwidth() -> None:
    link = link_of([3e-3, 3e-3, 9.0], [3e-3 + 2.0, 3e-3 + 2.0, 9.0], 4)
    assert link.size == 4 and link.latency == pytest.approx(1e-3) and link.bandwidth == pytest.approx((2 << 20) / 2.0)


def test_a_process_alone_is_told_how_to_start_several(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RankError, match="start it with torchrun"):
        Ranks.join(1.0)
