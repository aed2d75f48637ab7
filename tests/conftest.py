"""Shared by all tests: `--all`, `--machine`, and a Model whose runner is NumPy, for what needs no compiler."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper

from tests.cross import Elsewhere, elsewhere
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.loops import Call, Kernel, LoopProgram
from tilewright.model import Model
from tilewright.target import machine, stored_machines

ELSEWHERE = pytest.StashKey[Elsewhere]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run the tests marked slow")
    rest = "also run the rest of the seeds of random tests, and of sweeps: hours"
    parser.addoption("--every-seed", action="store_true", help=rest)
    known = ", ".join(stored_machines("cpu"))
    parser.addoption(
        "--machine", metavar="NAME", help=f"plan for this machine instead of the host: {known}, or a .json"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: runs only with --all")
    config.addinivalue_line("markers", "every_seed: runs only with --every-seed, as it is one of very many")
    config.addinivalue_line("markers", "sample(n): without --all only the first of every n of its cases")
    config.addinivalue_line("markers", "part(n): with --all too only the first of every n; all with --every-seed")
    config.addinivalue_line("markers", "host: is about this computer, whatever --machine says")
    if name := config.getoption("--machine"):
        config.stash[ELSEWHERE] = elsewhere(name)
        config.stash[ELSEWHERE].enter()


def pytest_unconfigure(config: pytest.Config) -> None:
    if there := config.stash.get(ELSEWHERE, None):
        there.leave()


def pytest_report_header(config: pytest.Config) -> str | None:
    there = config.stash.get(ELSEWHERE, None)
    return str(there) if there else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    there = item.config.stash.get(ELSEWHERE, None)
    if there is None or item.get_closest_marker("host") is None:
        return (yield)
    there.leave()
    try:
        return (yield)
    finally:
        there.enter()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left: set[pytest.Item] = set()
    if not config.getoption("--every-seed"):
        left.update(item for item in items if item.get_closest_marker("every_seed"))
        left.update(_beyond_first("part", [item for item in items if item not in left]))
    if not config.getoption("--all"):
        left.update(item for item in items if item.get_closest_marker("slow"))
        left.update(_beyond_first("sample", [item for item in items if item not in left]))
    if left:
        config.hook.pytest_deselected(items=[item for item in items if item in left])
        items[:] = [item for item in items if item not in left]


def _beyond_first(marker: str, items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Of tests with such a mark, of a number n, all cases but the first of every n."""
    seen: Counter[str] = Counter()
    for item in items:
        if mark := item.get_closest_marker(marker):
            test = item.nodeid.partition("[")[0]
            if seen[test] % mark.args[0]:
                yield item
            seen[test] += 1


@dataclass
class StubRunner:
    """Gives x + y and remembers the arrays it was handed."""

    received: list[list[np.ndarray]] = field(default_factory=list)

    def run(self, inputs: list[np.ndarray], outputs: list[np.ndarray]) -> None:
        self.received.append(list(inputs))
        np.add(inputs[0], inputs[1], out=outputs[0])

    def profile(self, inputs: list[np.ndarray], outputs: list[np.ndarray]) -> list[int]:
        self.run(inputs, outputs)
        return [3000, 1000 * len(self.received)]


TWO_CALLS = LoopProgram(
    kernels=(Kernel("load", (), ()), Kernel("add", (), ())),
    calls=(Call("load", ()), Call("add", ())),
    tensors=(),
)


@dataclass
class StubArtifact:
    runner: StubRunner | None = field(default_factory=StubRunner)
    inputs: tuple[tuple[str, dtypes.DType, tuple[int, ...]], ...] = (
        ("image", dtypes.float32, (2, 3)),
        ("mask", dtypes.float32, (2, 3)),
    )
    outputs: tuple[tuple[str, dtypes.DType, tuple[int, ...]], ...] = (("sum", dtypes.float32, (2, 3)),)
    loops: LoopProgram = TWO_CALLS
    calls: tuple[Call, ...] = TWO_CALLS.calls


@pytest.fixture
def stub_artifact() -> StubArtifact:
    return StubArtifact()


@pytest.fixture
def stub_model(stub_artifact: StubArtifact) -> Model:
    """(image: float32[2, 3], mask: float32[2, 3]) -> (sum)."""
    return Model(stub_artifact)  # type: ignore[arg-type]


@pytest.fixture
def add_model() -> Callable[..., ModelProto]:
    """An ONNX model of one node, x and y to z; the operator can be chosen."""

    def make(op: str = "Add", shape: tuple[Any, ...] = (2, 3)) -> ModelProto:
        ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", "y")]
        result = helper.make_tensor_value_info("z", TensorProto.FLOAT, shape)
        graph = helper.make_graph([helper.make_node(op, ["x", "y"], ["z"], name="the_sum")], "add", ports, [result])
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    return make


@pytest.fixture
def add_file(tmp_path: Path, add_model: Callable[..., ModelProto]) -> Path:
    path = tmp_path / "add.onnx"
    path.write_bytes(add_model().SerializeToString())
    return path


@pytest.fixture(scope="session", autouse=True)
def _cross_compiled(request: pytest.FixtureRequest, kernel_cache: Path) -> Generator[None, None, None]:
    """What zig keeps stays with the run; what a test knows to compile for another machine holds for all of them."""
    if there := request.config.stash.get(ELSEWHERE, None):
        there.folder = kernel_cache
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZIG_LOCAL_CACHE_DIR", str(kernel_cache.with_name("zig")))
        # zig's own C library takes a minute to compile: once on a machine, not once a cache
        patch.setenv("ZIG_GLOBAL_CACHE_DIR", os.environ.get("ZIG_GLOBAL_CACHE_DIR") or str(Path.home() / ".cache/zig"))
        yield


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all tests of a run keep compiled kernels, on all of its processes: equal kernels are compiled once."""
    root = tmp_path_factory.getbasetemp()
    return (root.parent if root.name.startswith("popen-") else root) / "kernels"


@pytest.fixture(scope="session")
def fresh_cache(kernel_cache: Path) -> Callable[[Path], Path]:
    """Makes a cache that knows this machine, which is measured once in a run, and nothing else."""
    machine("cpu", cache_dir=kernel_cache)

    def make(folder: Path) -> Path:
        for known in kernel_cache.rglob("*.json*"):
            place = folder / known.relative_to(kernel_cache)
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            shutil.copy(known, place)
        return folder

    return make


@pytest.fixture(scope="session")
def zoo_file(kernel_cache: Path) -> Callable[..., Path]:
    """The zoo's models as files, each exported once in a run, for all tests on all of its processes."""
    pytest.importorskip("torch", reason="the zoo needs torch, a development extra")
    from bench import zoo

    folder = kernel_cache.with_name("zoo")
    folder.mkdir(exist_ok=True)

    def export(name: str, exporter: str = "torchscript", size: str = "small") -> Path:
        if exporter == "dynamo":
            pytest.importorskip("onnxscript", reason="the dynamo exporter needs onnxscript")
        path = folder / f"{name}.{size}.{exporter}.onnx"
        if not path.exists():
            written = path.with_name(f"{os.getpid()}.{path.name}")
            zoo.export(name, size, written, exporter=exporter)
            written.replace(path)  # at once, since others may look for it
        return path

    return export
