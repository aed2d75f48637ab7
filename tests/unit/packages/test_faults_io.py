"""Every operation of a compilation, save, load and run failing in turn: one clear line, and the next try works."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import tilewright
from tests.cpu_stages import model_of
from tests.faults_io import shimmed
from tilewright.runtime import find_compiler

pytestmark = pytest.mark.host


def check(arguments: list[str], tmp_path: Path, fresh_cache: Callable[[Path], Path]) -> str:
    fresh_cache(tmp_path / "seed")
    done = shimmed(arguments, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_loading_and_running_with_faults(tmp_path: Path, fresh_cache: Callable[[Path], Path]) -> None:
    told = check(["load"], tmp_path, fresh_cache)
    assert "load calls: 0" not in told and "load memory: 0" not in told and "load threads: 1" in told


def test_a_sample_of_faults_while_compiling(tmp_path: Path, fresh_cache: Callable[[Path], Path]) -> None:
    assert "compile calls" in check(["compile", "--step", "41", "--first", "3"], tmp_path, fresh_cache)


HARNESS = r"""
#include "model.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <pthread.h>
static long hits, fail_at;
static int fails(void) { return ++hits == fail_at; }
void *__real_malloc(size_t); void *__real_calloc(size_t, size_t); int __real_posix_memalign(void **, size_t, size_t);
void *__real_aligned_alloc(size_t, size_t); void *__real_mmap(void *, size_t, int, int, int, off_t);
int __real_pthread_create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
void *__wrap_malloc(size_t n) { return fails() ? NULL : __real_malloc(n); }
void *__wrap_calloc(size_t n, size_t s) { return fails() ? NULL : __real_calloc(n, s); }
void *__wrap_aligned_alloc(size_t a, size_t n) { return fails() ? NULL : __real_aligned_alloc(a, n); }
int __wrap_posix_memalign(void **p, size_t a, size_t n) { return fails() ? ENOMEM : __real_posix_memalign(p, a, n); }
void *__wrap_mmap(void *a, size_t n, int p, int f, int d, off_t o)
{ return fails() ? MAP_FAILED : __real_mmap(a, n, p, f, d, o); }
int __wrap_pthread_create(pthread_t *t, const pthread_attr_t *a, void *(*f)(void *), void *x)
{ return fails() ? EAGAIN : __real_pthread_create(t, a, f, x); }

int main(int count, char **arguments)
{
    static float x[1 << 20], z[1 << 20];
    void *inputs[] = {x}, *outputs[] = {z};
    if (count < 3) return 9;
    for (long n = 1; n < 10000; n++) {
        hits = 0, fail_at = n;
        tw_model *model = tw_open(arguments[1], 3);
        int status = model ? tw_run(model, inputs, outputs) : -1;
        long seen = hits;
        fail_at = 0;
        if (model && status != TW_OK && tw_run(model, inputs, outputs) != TW_OK) return 2; /* the next try works */
        if (model) tw_destroy(model);
        if (seen < n) return status == TW_OK ? printf("%ld operations\\n", n - 1), 0 : 3;
    }
    return 4;
}
"""


@pytest.mark.sample(2)
@pytest.mark.parametrize("size", ["right", "short", "empty", "missing"])
def test_the_native_side_under_sanitizers(saved: Path, tmp_path: Path, size: str) -> None:
    """A program in C, every allocation, mapping and thread of the model's own code failing in turn; and weights that
    are not the model's."""
    weights = tmp_path / "weights"
    whole = (saved / "model.weights").read_bytes()
    if size != "missing":
        weights.write_bytes({"right": whole, "short": whole[:-1], "empty": b""}[size])
    done = subprocess.run([str(harness(saved)), str(weights), "x"], capture_output=True, text=True, check=False,
                          env={**os.environ, "ASAN_OPTIONS": "detect_leaks=1", "UBSAN_OPTIONS": "halt_on_error=1"},
                          timeout=120)  # fmt: skip
    if "LeakSanitizer has encountered a fatal error" in done.stderr:
        pytest.skip("leaks cannot be looked for here")
    assert "ERROR" not in done.stderr and "runtime error" not in done.stderr, done.stderr[-3000:]
    assert done.returncode == (0 if size == "right" else 3), (done.returncode, done.stdout, done.stderr)
    assert size != "right" or int(done.stdout.split()[0]) > 5


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Path:
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((96, 256), (256, 256)))
    model = model_of([("MatMul", ["x", "w"], "y", {}), ("Relu", ["y"], "z", {})], {"x": x.shape}, {"z": x.shape},
                     {"w": w})  # fmt: skip
    folder = tmp_path_factory.mktemp("native") / "saved"
    tilewright.compile(model, options=tilewright.Options(cache_dir=kernel_cache)).save(folder)
    return folder


def harness(saved: Path) -> Path:
    program = saved.parent / "harness"
    if program.exists():
        return program
    compiler = find_compiler()
    if compiler.kind == "zig":
        pytest.skip("zig brings no address sanitizer")
    (saved.parent / "harness.c").write_text(HARNESS)
    flags = json.loads((saved / "manifest.json").read_text())["flags"]
    flags = [f for f in flags if f not in ("-O3", "-fvisibility=hidden")]
    names = ("malloc", "calloc", "posix_memalign", "aligned_alloc", "mmap", "pthread_create")
    wrapped = [f"-Wl,--wrap={name}" for name in names]
    command = [*compiler.argv, *flags, "-O1", "-g", "-w", "-fsanitize=address,undefined", f"-I{saved}", *wrapped,
               str(saved.parent / "harness.c"), *map(str, sorted((saved / "source").iterdir())), "-pthread", "-lm"]
    done = subprocess.run([*command, "-o", str(program)], capture_output=True, text=True, check=False)
    if done.returncode != 0 and "cannot find" in done.stderr:
        pytest.skip("the sanitizers are not installed")
    assert done.returncode == 0, done.stderr[-2000:]
    return program


@pytest.mark.slow
def test_every_fault(tmp_path: Path, fresh_cache: Callable[[Path], Path]) -> None:
    told = check([], tmp_path, fresh_cache)
    assert told.count("operations") == 20
