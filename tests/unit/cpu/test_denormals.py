"""Denormals are flushed by every worker or kept by every worker, and whoever calls finds its own mode unchanged."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto

import tilewright
from tests.cpu_stages import model_of
from tests.native_models import NATIVE, X, Y, kernel
from tilewright import InternalError, OptionError, Options
from tilewright.compiler.verifying import Verifier, difference
from tilewright.frontend.onnx.model import load
from tilewright.ir.meaning.interpret import evaluate
from tilewright.ops import lower
from tilewright.runtime import KernelStage, ModelImage
from tilewright.runtime.cache import Cache
from tilewright.runtime.cpu_model import Denormals, table_source
from tilewright.runtime.toolchain import compile_shared, default_flags, find_compiler, this_machine

SMALLEST = np.finfo(np.float32).smallest_normal
# The register that says how floats are computed with: MXCSR, whose last six bits are what has happened so far, or FPCR.
REGISTER = """
#include <stdint.h>
#define API __attribute__((visibility("default")))
#if defined(__x86_64__)
API uint64_t mode(void) { return __builtin_ia32_stmxcsr() & ~0x3fu; }
API void set_mode(uint64_t m) { __builtin_ia32_ldmxcsr((unsigned)m); }
API uint64_t flushing(void) { return 0x1f80 | 0x8040; }
API uint64_t upwards(void) { return 0x1f80 | 0x4000; }
#elif defined(__aarch64__)
API uint64_t mode(void) { uint64_t m; __asm__ volatile("mrs %0, fpcr" : "=r"(m)); return m; }
API void set_mode(uint64_t m) { __asm__ volatile("msr fpcr, %0" : : "r"(m)); }
API uint64_t flushing(void) { return 1 << 24; }
API uint64_t upwards(void) { return 1 << 22; }
#endif
"""


@pytest.fixture(scope="module")
def register(kernel_cache: Path) -> ctypes.CDLL:
    compiler, machine = find_compiler(), this_machine()
    if machine.architecture not in ("x86_64", "aarch64", "arm64"):
        pytest.skip("no register of that kind is known here")
    flags = default_flags(compiler, machine)
    library = ctypes.CDLL(str(compile_shared(REGISTER, compiler, machine, Cache(kernel_cache), flags=flags, name="r")))
    for name in ("mode", "flushing", "upwards"):
        getattr(library, name).restype = ctypes.c_uint64
    return library


@contextmanager
def in_mode(register: ctypes.CDLL, mode: int) -> Iterator[None]:
    before = register.mode()
    register.set_mode(ctypes.c_uint64(mode))
    try:
        yield
    finally:
        register.set_mode(ctypes.c_uint64(before))


def halves(rows: int, columns: int):  # type: ignore[no-untyped-def]
    """y = x / 2, exact but for what is flushed."""
    shape = {"x": (rows, columns)}
    return model_of([("Mul", ["x", "h"], "y", {})], shape, {"y": (rows, columns)}, {"h": np.array(0.5, np.float32)})


def small(*shape: int) -> np.ndarray:
    """Normal numbers whose halves are denormal."""
    return (SMALLEST * np.random.default_rng(1).uniform(1, 1.99, shape)).astype(np.float32)


@pytest.mark.sample(3)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("columns", [1, 7, 512])
def test_flushed_by_all_workers_or_kept_by_all(columns: int, threads: int, kernel_cache: Path) -> None:
    x = small(301, columns)
    assert (x * np.float32(0.5) > 0).all()
    for denormals in ("flush", "keep"):
        options = Options(cache_dir=kernel_cache, threads=threads, denormals=denormals)
        model = tilewright.compile(halves(301, columns), options=options)
        wanted = np.zeros_like(x) if denormals == "flush" else x * np.float32(0.5)
        for _ in range(3):
            np.testing.assert_array_equal(model(x)[0], wanted)
            np.testing.assert_array_equal(model.run({"x": x})["y"], wanted)
    by_default = tilewright.compile(halves(301, columns), options=Options(cache_dir=kernel_cache, threads=threads))
    np.testing.assert_array_equal(by_default(x)[0], 0)


def test_operands_are_flushed_too(kernel_cache: Path) -> None:
    big = {"big": np.array(2.0**120, np.float32)}
    model = model_of([("Mul", ["x", "big"], "y", {})], {"x": (9,)}, {"y": (9,)}, big)
    x = np.full(9, 2.0**-130, np.float32)
    found = {d: tilewright.compile(model, options=Options(cache_dir=kernel_cache, denormals=d))(x)[0]
             for d in ("flush", "keep")}  # fmt: skip
    assert not found["flush"].any() and (found["keep"] == 2.0**-10).all()


def test_a_masked_softmax_has_zeros(kernel_cache: Path) -> None:
    model = model_of([("Softmax", ["x"], "y", {"axis": -1})], {"x": (5, 33)}, {"y": (5, 33)})
    x = np.zeros((5, 33), np.float32)
    x[:, 3:] = -100
    flush, keep = (tilewright.compile(model, options=Options(cache_dir=kernel_cache, denormals=d))(x)[0]
                   for d in ("flush", "keep"))  # fmt: skip
    assert not flush[:, 3:].any() and keep[:, 3:].all()
    np.testing.assert_array_equal(flush[:, :3], keep[:, :3])


@pytest.mark.parametrize("denormals", ["flush", "keep"])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_callers_mode_is_neither_used_nor_changed(
    denormals: str, threads: int, register: ctypes.CDLL, kernel_cache: Path
) -> None:
    options = Options(cache_dir=kernel_cache, threads=threads, denormals=denormals)
    model = tilewright.compile(halves(301, 512), options=options)
    x = small(301, 512)
    wanted = model(x)[0].tobytes()
    assert np.frombuffer(wanted, np.float32).any() == (denormals == "keep")
    for mode in (register.mode(), register.flushing(), register.upwards()):
        with in_mode(register, mode):
            for call in (lambda: model(x)[0], lambda: model.run({"x": x})["y"], lambda: model.profile(x)):
                found = call()
                assert register.mode() == mode
                assert not isinstance(found, np.ndarray) or found.tobytes() == wanted


def test_from_several_threads_at_once(register: ctypes.CDLL, kernel_cache: Path) -> None:
    """Each thread in a mode of its own, all calling two models, of which one flushes and one keeps."""
    models = [tilewright.compile(halves(77, 512), options=Options(cache_dir=kernel_cache, threads=2, denormals=d))
              for d in ("flush", "keep")]  # fmt: skip
    x = small(77, 512)
    wanted = [m(x)[0].tobytes() for m in models]
    assert wanted[0] != wanted[1]
    modes = [register.mode(), register.flushing(), register.upwards()]
    wrong: list[str] = []
    start = threading.Barrier(len(modes))

    def work(mode: int) -> None:
        start.wait()
        with in_mode(register, mode):
            for _ in range(20):
                for model, right in zip(models, wanted, strict=True):
                    same = model(x)[0].tobytes() == right
                    if not same or register.mode() != mode:
                        wrong.append(f"{mode:#x}: {same}, {register.mode():#x}")

    threads = [threading.Thread(target=work, args=(mode,)) for mode in modes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_half_precision_keeps_its_denormals(kernel_cache: Path) -> None:
    """They are normal numbers of float32, and no mode reaches the conversions."""
    steps = [("Cast", ["x"], "w", {"to": TensorProto.FLOAT}), ("Mul", ["w", "two"], "d", {}),
             ("Cast", ["d"], "y", {"to": TensorProto.FLOAT16})]  # fmt: skip
    kinds = {"x": TensorProto.FLOAT16, "y": TensorProto.FLOAT16}
    model = model_of(steps, {"x": (1037,)}, {"y": (1037,)}, {"two": np.array(2, np.float32)}, kinds)
    x = np.arange(-518, 519, dtype=np.int16).astype(np.float64) * 2.0**-24
    halves = x.astype(np.float16)
    assert (halves[halves != 0] != 0).all() and np.abs(halves).max() < np.finfo(np.float16).smallest_normal
    found = tilewright.compile(model, options=Options(cache_dir=kernel_cache, threads=2))(halves)[0]
    np.testing.assert_array_equal(found.view(np.uint16), (halves * np.float16(2)).view(np.uint16))


def test_in_bfloat16_they_are_flushed_where_they_are_computed_with(kernel_cache: Path) -> None:
    steps = [("Cast", ["x"], "w", {"to": TensorProto.FLOAT}), ("Mul", ["w", "h"], "d", {}),
             ("Cast", ["d"], "y", {"to": TensorProto.BFLOAT16})]  # fmt: skip
    kinds = {"x": TensorProto.BFLOAT16, "y": TensorProto.BFLOAT16}
    model = model_of(steps, {"x": (45,)}, {"y": (45,)}, {"h": np.array(0.5, np.float32)}, kinds)
    x = small(45).astype(ml_dtypes.bfloat16)
    found = {d: tilewright.compile(model, options=Options(cache_dir=kernel_cache, denormals=d))(x)[0]
             for d in ("flush", "keep")}  # fmt: skip
    assert not found["flush"].astype(np.float32).any() and found["keep"].astype(np.float32).all()


# ---- the interpreter and --verify


def logarithm(rows: int):  # type: ignore[no-untyped-def]
    """The logarithm of |x| 10^-40: about -92, and minus infinity where the product is flushed."""
    steps = [("Abs", ["x"], "a", {}), ("Mul", ["a", "s"], "b", {}), ("Mul", ["b", "t"], "c", {}),
             ("Log", ["c"], "y", {})]  # fmt: skip
    constants = {"s": np.array(1e-20, np.float32), "t": np.array(1e-20, np.float32)}
    return model_of(steps, {"x": (rows, 5)}, {"y": (rows, 5)}, constants)


@pytest.mark.parametrize("denormals", ["flush", "keep"])
@pytest.mark.parametrize("made", [halves, logarithm], ids=["halves", "logarithm"])
def test_verify_allows_for_it(made, denormals: str, kernel_cache: Path) -> None:  # type: ignore[no-untyped-def]
    model = made(33, 5) if made is halves else made(33)
    tilewright.compile(model, options=Options(cache_dir=kernel_cache, denormals=denormals, verify=True))


def test_verify_allows_for_nothing_else(kernel_cache: Path) -> None:
    """What flushing explains passes, where machine code may flush; anything else does not."""
    program = lower(load(logarithm(3), {}))
    x = {"x": np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)}
    kept, flushed = (evaluate(program, x, wide=True, flush=f)["y"].astype(np.float32) for f in (False, True))
    assert np.isfinite(kept).all() and (flushed == -np.inf).all()

    class Runner:
        def __init__(self, result: np.ndarray) -> None:
            self.result = result

        def run(self, inputs: list[np.ndarray], outputs: list[np.ndarray]) -> None:
            outputs[0][...] = self.result

    mixed, wrong = kept.copy(), kept.copy()
    mixed[1] = -np.inf
    wrong[1] = np.inf
    for result, may_flush, passes in ((mixed, True, True), (mixed, False, False), (wrong, True, False),
                                      (kept + 1, True, False), (kept, False, True)):  # fmt: skip
        verifier = Verifier(0, flush=may_flush)
        verifier.check("program", program)
        if passes:
            verifier.check("machine", Runner(result))
        else:
            with pytest.raises(InternalError, match="changed the meaning"):
                verifier.check("machine", Runner(result))


def test_results_smaller_than_the_smallest_number_are_the_same() -> None:
    exact, zeros = np.full(4, 1e-40, np.float32), np.zeros(4, np.float32)
    assert not difference(zeros, exact, flush=True).any() and (difference(zeros, exact) == 1).all()
    twice = np.full(4, 2 * SMALLEST, np.float32)
    assert (difference(zeros, twice, flush=True) == 1).all()


def test_the_option_is_one_of_two() -> None:
    with pytest.raises(OptionError, match="denormals cannot be 'ignore': it is one of flush, keep"):
        Options(denormals="ignore")


# ---- the same on x86, emulated

EMULATED = """
#include "driver.h"
#include <stdio.h>
#include <string.h>
int main(void) {
    static float x[6400], y[6400];
    for (int i = 0; i < 6400; i++) x[i] = 1.5f * 0x1p-126f;
    for (int threads = 1; threads <= 3; threads += 2) {
        tw_model *m = tw_create(NULL, 0, threads, 0, 0);
        unsigned modes[] = {0x1f80, 0x9fc0, 0x5f80, 0x1d80}; /* plain, flushing, upwards, with a trap */
        for (int k = 0; k < 4; k++) {
            void *in[] = {x}, *out[] = {y};
            int64_t ns[1];
            memset(y, 0xff, sizeof y);
            __builtin_ia32_ldmxcsr(modes[k]);
            if (k % 2) tw_run_profile(m, in, out, ns);
            else tw_run(m, in, out);
            unsigned after = __builtin_ia32_stmxcsr() & ~0x3fu;
            __builtin_ia32_ldmxcsr(0x1f80);
            int zeros = 0;
            for (int i = 0; i < 6400; i++) {
                uint32_t bits;
                memcpy(&bits, y + i, 4);
                zeros += bits == 0;
            }
            printf("%d %d\\n", after == modes[k], zeros);
        }
        tw_destroy(m);
    }
}
"""


@pytest.mark.slow  # zig builds a C library for x86-64 first
@pytest.mark.parametrize(("denormals", "zeros"), [("flush", 6400), ("keep", 0)])
def test_on_x86_by_emulation(denormals: Denormals, zeros: int, tmp_path: Path) -> None:
    emulator = shutil.which("qemu-x86_64")
    if emulator is None or find_spec("ziglang") is None:
        pytest.skip("needs qemu-x86_64 and the ziglang package")
    halve = kernel("halve", "const float *x = buffers[0]; float *y = buffers[1];\n"
                   "for (int i = tile * 64; i < tile * 64 + 64; i++) y[i] = x[i] * 0.5f;")  # fmt: skip
    image = ModelImage({"halve": halve}, (KernelStage("halve", 100, (X, Y)),), (25600,), (25600,), denormals=denormals)
    for name, text in {"halve": halve, "table": table_source(image), "main": EMULATED}.items():
        (tmp_path / f"{name}.c").write_text(text)
    sources = ["halve.c", "table.c", "main.c", *(str(NATIVE / f"{n}.c") for n in ("driver", "team", "placing"))]
    compile_it = [*find_compiler("zig").argv, "-target", "x86_64-linux-musl", "-O2", "-static", "-w", f"-I{NATIVE}"]
    subprocess.run([*compile_it, *sources, "-o", "program"], cwd=tmp_path, check=True, capture_output=True)
    done = subprocess.run([emulator, "./program"], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert done.stdout.split("\n")[:-1] == [f"1 {zeros}"] * 8
