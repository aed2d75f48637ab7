"""The compiler: found, told what suits the machine, asked once, and heard when it complains."""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.native_models import NATIVE, affine_image, blur_image, blur_reference, kernel
from tilewright.runtime import (
    Cache,
    CacheError,
    CompileError,
    Compiler,
    CpuModel,
    NativeMachine,
    ObjectCompiler,
    ToolchainError,
    build,
    compile_objects,
    compile_shared,
    default_flags,
    find_compiler,
    this_machine,
)
from tilewright.runtime.cpu_model import library_sources
from tilewright.runtime.toolchain import link


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return Cache(tmp_path_factory.mktemp("cache"))


def test_native_sources_compile_without_warnings(tmp_path: Path) -> None:
    sources = sorted(NATIVE.glob("*.c"))
    assert sources
    for source in sources:
        command = [
            *find_compiler().argv,
            "-std=gnu11",
            "-O2",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-c",
            str(source),
        ]
        done = subprocess.run([*command, "-o", str(tmp_path / "x.o")], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_nothing_is_compiled_twice(cache: Cache) -> None:
    compiler, machine = find_compiler(), this_machine()
    flags = default_flags(compiler, machine)
    image = affine_image(12345, 100)
    first = build(image, compiler, flags, machine, cache, jobs=2)
    events: list[tuple[str, bool]] = []
    second = build(image, compiler, flags, machine, cache, jobs=2, progress=lambda *event: events.append(event))
    assert first == second
    assert sorted(events) == sorted((name, True) for name in library_sources(image))
    elsewhere = replace(machine, identity="another processor")
    other = compile_objects(image.kernels, compiler, flags, elsewhere, cache, jobs=1)
    here = compile_objects(image.kernels, compiler, flags, machine, cache, jobs=1)
    assert other["affine"] != here["affine"]


def test_a_compile_error_names_the_kernel(cache: Cache) -> None:
    compiler, machine = find_compiler(), this_machine()
    sources = {"fine": kernel("fine", ""), "broken": kernel("broken", "int x = undeclared_thing;")}
    with pytest.raises(CompileError, match=r"(?s)broken: .*broken\.c:\d+.*undeclared_thing") as caught:
        compile_objects(sources, compiler, ("-O1",), machine, cache, jobs=2)
    assert len(str(caught.value).splitlines()) <= 9


def test_missing_compilers_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ToolchainError, match="'no-such-compiler' is not a working C compiler.*pip install ziglang"):
        find_compiler("no-such-compiler")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ToolchainError, match="no C compiler found; .*pip install ziglang"):
        find_compiler()


def test_flags_suit_the_machine() -> None:
    gcc = replace(find_compiler(), kind="gcc")
    x86 = NativeMachine("x86_64", "", frozenset({"avx2", "avx512f"}))
    assert {"-march=native", "-mprefer-vector-width=512"} <= set(default_flags(gcc, x86))
    assert "-mprefer-vector-width=512" not in default_flags(gcc, NativeMachine("x86_64", "", frozenset({"avx2"})))
    assert "-mcpu=native" in default_flags(gcc, NativeMachine("aarch64", "", frozenset()))
    assert not [flag for flag in default_flags(gcc, x86) if "fast-math" in flag]


def test_cxx_shared_object_follows_its_headers(cache: Cache, tmp_path: Path) -> None:
    compiler, machine = find_compiler(), this_machine()
    source = '#include "answer.h"\n#include <vector>\nextern "C" int f() { return std::vector<int>(3, ANSWER)[2]; }\n'
    paths = []
    for answer in (41, 42, 42):
        (tmp_path / "answer.h").write_text(f"#define ANSWER {answer}\n")
        path = compile_shared(source, compiler, machine, cache, language="c++", include_dirs=[tmp_path])
        assert ctypes.CDLL(str(path)).f() == answer
        paths.append(path)
    assert paths[0] != paths[1] == paths[2]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="the ziglang package is not installed")
def test_zig_builds_a_model(cache: Cache) -> None:
    compiler, machine = find_compiler("zig"), this_machine()
    assert compiler.kind == "zig"
    files = build(blur_image(33, 7), compiler, default_flags(compiler, machine), machine, cache, jobs=2)
    x = np.arange(33, dtype=np.int32)
    y = np.zeros_like(x)
    with CpuModel(files, 2) as model:
        model.run([x], [y])
    np.testing.assert_array_equal(y, blur_reference(x, 7))


def test_the_longest_source_waiting_is_compiled_first(cache: Cache) -> None:
    compiler, machine = find_compiler(), this_machine()
    done: list[str] = []
    texts = {f"s{n}": f"int s{n}(void) {{ return {n}; }} /*{'x' * n}*/\n" for n in (5, 90, 7, 40)}
    with ObjectCompiler(compiler, ["-O0"], machine, cache, jobs=1, progress=lambda name, _: done.append(name)) as pool:
        for name, text in texts.items():
            pool.start(name, text)
        made = pool.objects(texts)
        again = pool.objects(texts)
    assert list(made) == list(texts) and again == made
    waited = [name for name in done if name != done[0]]  # the first was begun before there was a choice
    assert len(done) == 4 and waited == sorted(waited, key=lambda name: -len(texts[name]))


def test_leaving_the_compiler_begins_nothing_more(cache: Cache) -> None:
    compiler, machine = find_compiler(), this_machine()
    done: list[str] = []
    pool = ObjectCompiler(compiler, ["-O0"], machine, cache, jobs=1, progress=lambda name, _: done.append(name))
    with pytest.raises(KeyboardInterrupt), pool:
        for number in range(40):
            pool.start(f"s{number}", f"int s{number}(void) {{ return 0; }}\n")
        raise KeyboardInterrupt
    assert len(done) < 40
    counted = len(done)
    time.sleep(0.1)
    assert len(done) == counted


def test_nothing_is_written_to_the_temporary_folder(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full one is no obstacle, and a kill leaves nothing there."""
    missing = tmp_path / "missing"
    monkeypatch.setenv("TMPDIR", str(missing))
    monkeypatch.setattr(tempfile, "tempdir", str(missing))
    compiler, machine = find_compiler(), this_machine()
    source = {"one": "int one(void) { return 1; }"}
    objects = compile_objects(source, compiler, ("-O1", "-fPIC"), machine, cache, jobs=1)
    assert ctypes.CDLL(str(link(objects, compiler, cache))).one() == 1


def test_a_full_disk_is_told_in_one_line(tmp_path: Path) -> None:
    script = tmp_path / "cc"
    script.write_text("#!/bin/sh\necho 'cc1: fatal error: error writing to a.s: No space left on device' >&2\n"
                      "echo 'compilation terminated.' >&2\nexit 1\n")  # fmt: skip
    script.chmod(0o755)
    compiler = Compiler((str(script),), "gcc", "none")
    with pytest.raises(CacheError) as caught:
        compile_objects({"one": "int one;"}, compiler, (), this_machine(), Cache(tmp_path / "cache"), jobs=1)
    assert "No space left on device" in str(caught.value) and "\n" not in str(caught.value)
