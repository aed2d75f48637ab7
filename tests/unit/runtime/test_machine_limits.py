"""What a machine lacks is said by name: a compiler, a driver, cores for so many threads, a home to write to."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tilewright
from tests.unit.packages.test_stored import dense
from tilewright import OptionError, Options, ToolError
from tilewright.backend.gpu import machine_code
from tilewright.cli import bench, suite
from tilewright.cli.main import main
from tilewright.runtime import Cache, Compiler, ToolchainError, cores, toolchain

pytestmark = pytest.mark.host


def test_a_compiler_is_offered_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain.shutil, "which", lambda _name: None)
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ToolchainError, match=r"no C compiler found; .*pip install ziglang .*tilewright\[compiler\]"):
        toolchain.find_compiler()
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert not any("zig" in each for each in project["dependencies"])
    assert project["optional-dependencies"]["compiler"] == ["ziglang"]


def test_zig_keeps_its_own_under_the_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A stand-in that says where it would keep things; with a home that cannot be written to."""
    zig = tmp_path / "zig"
    says = 'echo "$ZIG_GLOBAL_CACHE_DIR" > "$OUT"'
    zig.write_text(f'#!/bin/sh\n{says}\nwhile [ "$1" != -o ]; do shift; done\necho code > "$2"\n')
    zig.chmod(0o755)
    compiler, cache = Compiler((str(zig), "cc"), "zig", "1"), Cache(tmp_path / "cache")
    machine = toolchain.this_machine()
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING, "tilewright"):
        patch.setenv("OUT", str(tmp_path / "out"))
        patch.setenv("HOME", "/nonexistent")
        patch.delenv("ZIG_GLOBAL_CACHE_DIR", raising=False)
        for number in range(2):
            toolchain.compile_objects({"a": f"int a = {number};"}, compiler, (), machine, cache, jobs=1)
            assert (tmp_path / "out").read_text().strip() == str(tmp_path / "cache" / "zig")
        patch.setenv("ZIG_GLOBAL_CACHE_DIR", "/chosen")
        toolchain.compile_objects({"a": "int a = 3;"}, compiler, (), machine, cache, jobs=1)
        assert (tmp_path / "out").read_text().strip() == "/chosen"
    assert caplog.text.count("the first compilation by zig takes") == 1
    (tmp_path / "cache" / "zig" / "kept").write_text("")
    cache.lock().close()
    cache.clear()
    assert list((tmp_path / "cache").iterdir()) == []


def test_zig_is_asked_for_its_version_with_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes one even then, and where its home takes none it tries for ever."""
    zig = tmp_path / "zig"
    zig.write_text('#!/bin/sh\n[ -d "$ZIG_GLOBAL_CACHE_DIR" ] && echo clang version 0\n')
    zig.chmod(0o755)
    monkeypatch.delenv("ZIG_GLOBAL_CACHE_DIR", raising=False)
    assert toolchain.find_compiler(str(zig)).kind == "zig"
    monkeypatch.setenv("ZIG_GLOBAL_CACHE_DIR", str(tmp_path / "chosen"))
    with pytest.raises(ToolchainError, match="not a working C compiler"):
        toolchain.find_compiler(str(zig))


def test_more_threads_than_cores_are_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, kernel_cache: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _pid: {0, 1})
    monkeypatch.setattr(cores, "quota", lambda *_: None)
    options = Options(cache_dir=kernel_cache, stop_after="source")
    with caplog.at_level(logging.WARNING, "tilewright"):
        tilewright.compile(dense(), options=options, threads=2)
        assert caplog.text == ""
        tilewright.compile(dense(), options=options, threads=1000)
    assert caplog.messages == [
        "threads=1000 on 2 cores: workers will wait for each other; leave it out for one thread a core"
    ]


def test_quotas_bind_the_usual_number_of_threads(
    kernel_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of a model that is compiled, found in the cache, or loaded; of what is timed, and of the suite's processes."""
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _pid: set(range(8)))
    monkeypatch.setattr(cores, "quota", lambda *_: 3)
    monkeypatch.delenv("TILEWRIGHT_THREADS", raising=False)
    options = Options(cache_dir=kernel_cache)
    for _ in range(2):
        model = tilewright.compile(dense(7.0), options=options)
        assert model._runner.threads == 3
    model.save(tmp_path / "saved")
    assert tilewright.load(tmp_path / "saved")._runner.threads == 3
    asked: list[int] = []

    class Enough(Exception):
        pass

    def compare(_path: Path, _runtimes: object, threads: int, **_more: object) -> None:
        asked.append(threads)
        raise Enough

    monkeypatch.setattr(bench, "compare", compare)
    (tmp_path / "m.onnx").write_bytes(dense().SerializeToString())
    with pytest.raises(Enough):
        main(["bench", str(tmp_path / "m.onnx")])
    run_suite = "tilewright.integrations.onnx_suite.run_suite"
    monkeypatch.setattr(run_suite, lambda _options, jobs, **_more: asked.append(jobs) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["suite", "--cases", "nothing"])
    assert asked == [3, 3] and suite.usable_cores() == 3


def test_a_gpu_by_another_name() -> None:
    with pytest.raises(OptionError, match="target cannot be 'gpu'.*did you mean 'cuda'"):
        Options(target="gpu")


def test_cuda_without_a_driver_says_so_before_planning(kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_code, "missing_for_cuda", lambda: "there is no NVIDIA driver")
    planned: list[str] = []
    options = Options(cache_dir=kernel_cache, target="cuda", progress=planned.append)
    with pytest.raises(ToolError, match="target 'cuda' cannot run here: there is no NVIDIA driver; .*cuda-emulated"):
        tilewright.compile(dense(), options=options)
    assert "plan" not in planned


def test_devices_begins_with_what_is_here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
                                          kernel_cache: Path) -> None:  # fmt: skip
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(kernel_cache))
    assert main(["devices", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["devices"]
    here = [each["error"] is None for each in found]
    assert here == sorted(here, reverse=True) and found[0]["name"] in ("cpu", "cuda")


@pytest.mark.slow
def test_zig_works_with_a_home_that_cannot_be_written_to(tmp_path: Path) -> None:
    pytest.importorskip("ziglang")
    script = "import tilewright, sys; from tests.unit.packages.test_stored import dense; tilewright.compile(dense())"
    environment = {"PATH": os.environ["PATH"], "HOME": "/proc/nobody", "TILEWRIGHT_CACHE": str(tmp_path / "cache"),
                   "TILEWRIGHT_CC": "zig", "PYTHONPATH": os.pathsep.join(sys.path)}  # fmt: skip
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "cache" / "zig").is_dir() and "the first compilation by zig" in done.stderr
