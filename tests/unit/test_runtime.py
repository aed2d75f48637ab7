"""The CPU runtime on hand-written kernels: compiler, worker team, concurrent calls, forks."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tilewright.runtime import (
    BufferRef,
    BuiltModel,
    Cache,
    CompileError,
    CpuModel,
    KeptWeights,
    Machine,
    ModelImage,
    ModelImageError,
    ModelRunError,
    Stage,
    ToolchainError,
    WeightsError,
    build,
    compile_objects,
    compile_shared,
    default_flags,
    find_compiler,
    this_machine,
)

THREADS = (1, 2, 3, 5)
NATIVE = Path(__file__).parents[2] / "tilewright" / "runtime" / "native"
SIGNATURE = "(void *const *buffers, const int64_t *extents, int64_t tile, char *scratch)"
X, Y = BufferRef("input", 0), BufferRef("output", 0)
Builder = Callable[[ModelImage], BuiltModel]


def kernel(name: str, body: str) -> str:
    unused = "(void)buffers; (void)extents; (void)tile; (void)scratch;"
    return f"#include <stdint.h>\n#include <string.h>\nvoid {name}{SIGNATURE}\n{{ {unused}\n{body}\n}}\n"


AFFINE = kernel(
    "affine",
    """const float *x = buffers[0]; float *y = buffers[1];
    int64_t from = tile * extents[1], to = from + extents[1] < extents[0] ? from + extents[1] : extents[0];
    for (int64_t i = from; i < to; i++) y[i] = 2.0f * x[i] + 1.0f;""",
)
# Each element needs its neighbours of the stage before: a missing barrier shows.
BLUR = kernel(
    "blur",
    """const int32_t *x = buffers[0]; int32_t *y = buffers[1]; int64_t n = extents[0];
    y[tile] = 3 * x[tile] + x[(tile + 1) % n] + 7 * x[(tile + n / 2) % n];""",
)
COUNT = kernel("count", "((int32_t *)buffers[0])[tile] += 1;")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return Cache(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def built(cache: Cache) -> Builder:
    compiler, machine = find_compiler(), this_machine()
    flags = default_flags(compiler, machine)
    return lambda image: build(image, compiler, flags, machine, cache, jobs=2)


def affine_image(n: int, tile: int, **options: object) -> ModelImage:
    stage = Stage("affine", -(-n // tile), (X, Y), **options)  # type: ignore[arg-type]
    return ModelImage({"affine": AFFINE}, (stage,), (4 * n,), (4 * n,), extents=(n, tile))


def blur_image(n: int, rounds: int) -> ModelImage:
    ends = [X, *(BufferRef("arena", 4096 * (i % 2)) for i in range(rounds - 1)), Y]
    stages = tuple(Stage("blur", n, (ends[i], ends[i + 1])) for i in range(rounds))
    return ModelImage({"blur": BLUR}, stages, (4 * n,), (4 * n,), arena_bytes=8192, extents=(n,))


def blur_reference(x: np.ndarray, rounds: int) -> np.ndarray:
    for _ in range(rounds):
        x = 3 * x + np.roll(x, -1) + 7 * np.roll(x, -(x.size // 2))
    return x


# ---- worker team ----


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("balance", ["auto", "static", "dynamic", "serial"])
def test_tiles_cover_everything_once(built: Builder, threads: int, balance: str) -> None:
    for n, tile in ((1, 4), (7, 4), (37, 4), (1003, 10)):
        x = np.arange(n, dtype=np.float32)
        y = np.zeros_like(x)
        with CpuModel(built(affine_image(n, tile, balance=balance)), threads) as model:
            for _ in range(3):
                y[:] = -1
                model.run([x], [y])
                np.testing.assert_array_equal(y, 2 * x + 1)


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("balance", ["static", "dynamic"])
def test_each_tile_runs_exactly_once_in_every_run(built: Builder, threads: int, balance: str) -> None:
    stage = Stage("count", 57, (Y,), balance=balance)  # type: ignore[arg-type]
    image = ModelImage({"count": COUNT}, (stage,) * 4, (), (57 * 4,))
    counts = np.zeros(57, np.int32)
    with CpuModel(built(image), threads) as model:
        for run in range(1, 101):
            model.run([], [counts])
            assert set(counts.tolist()) == {4 * run}


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("n", [2, 5, 64])
def test_stages_see_all_of_the_stage_before(built: Builder, threads: int, n: int) -> None:
    x = np.random.default_rng(1).integers(-100, 100, n, np.int32)
    rounds = 200
    y = np.zeros_like(x)
    with CpuModel(built(blur_image(n, rounds)), threads) as model:
        for _ in range(5):
            model.run([x], [y])
            np.testing.assert_array_equal(y, blur_reference(x, rounds))


@pytest.mark.parametrize("threads", THREADS)
def test_serial_groups_do_not_lose_a_needed_barrier(built: Builder, threads: int) -> None:
    """set runs slowly on worker 0; of the next group, one stage runs elsewhere and needs what set wrote."""
    slow = kernel(
        "set",
        "volatile int32_t wait = 0; for (int i = 0; i < 20000; i++) wait += i; *(int32_t *)buffers[0] = 42;",
    )
    copy = kernel("copy", "((int32_t *)buffers[1])[0] = *(int32_t *)buffers[0]; *(int32_t *)buffers[0] += 0;")
    arena = BufferRef("arena", 0)
    outs = [BufferRef("output", i) for i in range(3)]
    stages = (
        Stage("set", 1, (arena,)),
        Stage("copy", 1, (arena, outs[0])),
        Stage("copy", 1, (arena, outs[1]), barrier_before=False),
        Stage("copy", 1, (arena, outs[2]), barrier_before=False),
    )
    image = ModelImage({"set": slow, "copy": copy}, stages, (), (4, 4, 4), arena_bytes=64)
    for _ in range(10):
        got = [np.zeros(1, np.int32) for _ in range(3)]
        with CpuModel(built(image), threads) as model:
            model.run([], got)
        assert [int(g[0]) for g in got] == [42, 42, 42]


@pytest.mark.parametrize("balance", ["static", "dynamic"])
def test_a_worker_held_up_in_a_tile_keeps_only_that_tile(built: Builder, balance: str) -> None:
    """Tile 0 sleeps; the tiles its worker has not started are taken over and finish long before it."""
    sleepy = "#include <time.h>\n" + kernel(
        "sleepy",
        """struct timespec t = {0, 300000000}; int64_t *y = buffers[0];
        if (tile == 0) nanosleep(&t, 0);
        clock_gettime(CLOCK_MONOTONIC, &t);
        y[2 * tile] = t.tv_sec * 1000000000 + t.tv_nsec; y[2 * tile + 1] = (int64_t)(uintptr_t)scratch;""",
    )
    stage = Stage("sleepy", 8, (Y,), scratch_bytes=64, balance=balance)  # type: ignore[arg-type]
    image = ModelImage({"sleepy": sleepy}, (stage,), (), (128,))
    y = np.zeros((8, 2), np.int64)
    with CpuModel(built(image), 2) as model:
        for _ in range(2):
            model.run([], [y])
            finished, worker = y[:, 0], y[:, 1]
            assert finished[1:].max() < finished[0] - 100_000_000
            assert int(worker[0]) not in worker[1:4].tolist()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system does not bind processes to processors")
@pytest.mark.parametrize("threads", [2, 3, 5])
def test_a_march_goes_on_without_a_worker_that_is_away(built: Builder, threads: int) -> None:
    """Workers march through stages of one tile each; here they have to share a processor, which they learn too late."""
    rounds = 300
    count = Stage("count", threads, (BufferRef("output", 1),))
    blur = blur_image(threads, rounds)
    stages = tuple(s for stage in blur.stages for s in (stage, count))
    image = replace(blur, kernels={"blur": BLUR, "count": COUNT}, stages=stages, output_bytes=(4 * threads,) * 2)
    x = np.random.default_rng(4).integers(-100, 100, threads, np.int32)
    y, counts = np.zeros_like(x), np.zeros_like(x)
    allowed = os.sched_getaffinity(0)
    with CpuModel(built(image), threads) as model:
        try:
            os.sched_setaffinity(0, {min(allowed)})  # before the first run, which starts the other workers
            for run in range(1, 31):
                (model.profile if run % 7 == 3 else model.run)([x], [y, counts])
                np.testing.assert_array_equal(y, blur_reference(x, rounds))
                assert set(counts.tolist()) == {run * rounds}
        finally:
            os.sched_setaffinity(0, allowed)


def random_image(seed: int, width: int = 48, count: int = 30) -> ModelImage:
    """Stages of all kinds in groups of random length; each reads a group before its own, the last sums them all up.

    A serial stage's result depends on the order of its tiles."""
    mix = kernel(
        "mix",
        """const uint32_t *x = buffers[0]; uint32_t *y = buffers[1]; int64_t n = extents[0];
        memset(scratch, (int)tile, 64);
        uint32_t v = 31 * x[(7 * tile + 3) % n] + x[(tile + extents[1]) % n] + (unsigned char)scratch[63];
        if (extents[2]) y[0] = 5 * y[0] + v; else y[tile] = v;""",
    )
    total = kernel(
        "total",
        """const uint32_t *x = buffers[0]; uint32_t sum = 0;
        for (int64_t i = 0; i < extents[1]; i++) sum = 3 * sum + x[i * extents[0] + tile];
        ((uint32_t *)buffers[1])[tile] = sum;""",
    )
    random = np.random.default_rng(seed)
    stages: list[Stage] = []
    extents: list[int] = []
    group = 0
    for i in range(count):
        barrier = bool(random.random() < 0.6)
        group = i if barrier else group
        balance = random.choice(["auto", "static", "dynamic", "serial"]).item()
        tiles = int(random.integers(0, random.choice([3, 6, width + 1])))
        source = BufferRef("arena", 4 * width * int(random.integers(group))) if group else X
        stages.append(
            Stage(
                "mix",
                tiles,
                (source, BufferRef("arena", 4 * width * i)),
                scratch_bytes=64,
                barrier_before=barrier,
                balance=balance,
                first_extent=len(extents),
            )
        )
        extents += [width, int(random.integers(width)), int(balance == "serial")]
    stages.append(Stage("total", width, (BufferRef("arena", 0), Y), first_extent=len(extents)))
    extents += [width, count]
    return ModelImage(
        {"mix": mix, "total": total},
        tuple(stages),
        (4 * width,),
        (4 * width,),
        arena_bytes=4 * width * count,
        extents=tuple(extents),
    )


@pytest.mark.parametrize("seed", range(6))
def test_any_number_of_threads_gives_the_serial_result(built: Builder, seed: int) -> None:
    """Fresh arrays in every run and timed runs in between: a worker late from the run before would show."""
    files = built(random_image(seed))
    inputs = np.random.default_rng(seed).integers(0, 2**32, (300, 48), np.uint32)

    def results(threads: int) -> list[bytes]:
        outputs = []
        with CpuModel(files, threads) as model:
            for i, x in enumerate(inputs):
                y = np.zeros_like(x)
                (model.profile if i % 11 == 7 else model.run)([x.copy()], [y])
                outputs.append(y.tobytes())
        return outputs

    expected = results(1)
    for threads in THREADS[1:]:
        assert results(threads) == expected


def test_every_stage_is_timed_whoever_runs_it(built: Builder) -> None:
    image = random_image(0)
    x = np.zeros(48, np.uint32)
    for threads in THREADS:
        with CpuModel(built(image), threads) as model:
            start = time.perf_counter_ns()
            times = model.profile([x], [np.zeros_like(x)])
            elapsed = time.perf_counter_ns() - start
        assert times.shape == (len(image.stages),)
        assert times.min() >= 0
        assert 0 < times.sum() <= elapsed


def test_weights_extents_and_scratch_reach_the_kernel(built: Builder) -> None:
    body = """int64_t *y = buffers[1]; const unsigned char *w = buffers[0];
    memset(scratch, (int)tile, 5000); unsigned sum = 0; for (int i = 0; i < 5000; i++) sum += (unsigned char)scratch[i];
    y[tile] = (int64_t)sum + w[tile] + extents[2]
        + 1000000 * (((uintptr_t)scratch | (uintptr_t)w) % 64 != 0);"""
    weights = bytes(64) + bytes(range(40))
    stage = Stage("k", 40, (BufferRef("weight", 64), Y), scratch_bytes=5000)
    image = ModelImage({"k": kernel("k", body)}, (stage,), (), (320,), weights=weights, extents=(0, 0, 11))
    for map_file in (True, False):
        y = np.zeros(40, np.int64)
        with CpuModel(built(image), 3, map_file=map_file) as model:
            model.run([], [y])
        tiles = np.arange(40)
        np.testing.assert_array_equal(y, 5000 * tiles + tiles + 11)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_kept_weights_are_the_same_in_their_new_place(built: Builder, parts: int) -> None:
    """Some are cut into whole pages and some are not; a stage may begin in the middle of what is kept."""
    body = """const unsigned char *w = buffers[0]; uint64_t *y = buffers[1]; uint64_t sum = 0;
    for (int64_t i = 0; i < extents[0]; i++) sum = 31 * sum + w[i];
    y[tile] = sum; y[2] = (uintptr_t)w;"""
    sizes = (6 * 4096 * 64, 5000 * 64, 64)
    starts = np.cumsum([0, *sizes])
    data = np.random.default_rng(2).integers(0, 256, int(starts[-1]) + 64, np.uint8)
    kept = tuple(KeptWeights(int(at), size, parts) for at, size in zip(starts, sizes, strict=False))
    kernels = {"k": kernel("k", body)}

    def seen(kept: tuple[KeptWeights, ...]) -> tuple[list[int], list[int]]:
        sums, places = [], []
        for start in (0, 64, 64 * 4096 * 5, int(starts[1]), int(starts[2]), int(starts[3])):
            stage = Stage("k", 2, (BufferRef("weight", start), Y), first_extent=0)
            image = ModelImage(kernels, (stage,), (), (24,), weights=data.tobytes(), extents=(64,), kept=kept)
            y = np.zeros(3, np.uint64)
            with CpuModel(built(image), 2) as model:
                model.run([], [y])
            assert y[0] == y[1]
            sums.append(int(y[0]))
            places.append(int(y[2]))
        return sums, places

    plain, moved = seen(()), seen(kept)
    assert plain[0] == moved[0]
    assert all(place % 64 == 0 for place in moved[1])


def test_concurrent_callers_take_turns(built: Builder) -> None:
    model = CpuModel(built(blur_image(33, 20)), 2)
    failures: list[int] = []

    def call(seed: int) -> None:
        x = np.random.default_rng(seed).integers(-9, 9, 33, np.int32)
        expected = blur_reference(x, 20)
        for _ in range(200):
            y = np.zeros_like(x)
            model.run([x], [y])
            if not np.array_equal(y, expected):
                failures.append(seed)

    callers = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=60)
    assert not any(caller.is_alive() for caller in callers)
    assert failures == []
    model.close()


def _exit_code_of_child(work: Callable[[], bool]) -> int:
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        os._exit(0 if work() else 3)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_forked_child_gets_a_team_of_its_own(built: Builder) -> None:
    x = np.arange(64, dtype=np.int32)
    expected = blur_reference(x, 20)
    model = CpuModel(built(blur_image(64, 20)), 3)

    def right() -> bool:
        y = np.zeros_like(x)
        model.run([x], [y])
        return np.array_equal(y, expected)

    def right_and_closed() -> bool:
        ok = right() and right()
        model.close()
        return ok

    assert right()
    assert _exit_code_of_child(right_and_closed) == 0
    stop = threading.Event()

    def keep_running() -> None:
        while not stop.is_set():
            right()

    busy = threading.Thread(target=keep_running)
    busy.start()
    codes = [_exit_code_of_child(right) for _ in range(10)]
    stop.set()
    busy.join()
    assert codes == [0] * 10
    assert right()
    model.close()


def test_an_idle_model_uses_no_processor_time(built: Builder) -> None:
    x = np.zeros(64, np.int32)
    with CpuModel(built(blur_image(64, 3)), 2) as model:
        model.run([x], [np.zeros_like(x)])
        time.sleep(0.05)
        before = time.process_time()
        time.sleep(0.4)
        assert time.process_time() - before < 0.1


def test_profile_gives_the_time_of_each_stage(built: Builder) -> None:
    spin = kernel(
        "spin", "volatile int64_t n = extents[0]; while (n > 0) n--; ((int32_t *)buffers[0])[tile] = 5;"
    )
    image = ModelImage(
        {"spin": spin, "count": COUNT},
        (Stage("spin", 4, (Y,)), Stage("count", 4, (Y,))),
        (),
        (16,),
        extents=(100_000,),
    )
    y = np.zeros(4, np.int32)
    with CpuModel(built(image), 2) as model:
        model.run([], [y])
        times = model.profile([], [y])
    assert y.tolist() == [6] * 4
    assert times.shape == (2,)
    assert times[0] > times[1] > 0


def test_nan_and_infinity_keep_their_meaning(built: Builder) -> None:
    body = """float x = ((const float *)buffers[0])[tile];
    ((float *)buffers[1])[tile] = x != x ? 1.0f : x - x == 0.0f ? 2.0f : 3.0f;"""
    image = ModelImage({"classify": kernel("classify", body)}, (Stage("classify", 4, (X, Y)),), (16,), (16,))
    x = np.array([np.nan, np.inf, -np.inf, 1e-42], np.float32)
    y = np.zeros(4, np.float32)
    with CpuModel(built(image), 1) as model:
        model.run([x], [y])
    assert y.tolist() == [1, 3, 3, 2]


def test_wrong_calls_are_refused(built: Builder) -> None:
    files = built(affine_image(8, 4))
    model = CpuModel(files, 2)
    good = np.zeros(8, np.float32)
    with pytest.raises(ModelRunError, match="1 inputs and 1 outputs, called with 2 and 1"):
        model.run([good, good], [good])
    with pytest.raises(ModelRunError, match="array of 32 bytes, got 28 bytes"):
        model.run([good[:7]], [good])
    with pytest.raises(ModelRunError, match="not contiguous"):
        model.run([np.zeros(16, np.float32)[::2]], [good])
    with pytest.raises(ModelRunError, match="got list"):
        model.run([[0.0] * 8], [good])  # type: ignore[list-item]
    model.close()
    model.close()
    with pytest.raises(ModelRunError, match="closed"):
        model.run([good], [good])
    with pytest.raises(ModelRunError, match="threads must be"):
        CpuModel(files, 0)


def test_wrong_weights_file_is_refused(built: Builder, tmp_path: Path) -> None:
    files = built(affine_image(8, 4))
    other = tmp_path / "other.weights"
    other.write_bytes(b"12")
    with pytest.raises(WeightsError, match="has 2 bytes of weights, the model was compiled with 0"):
        CpuModel(replace(files, weights=other), 1)
    with pytest.raises(WeightsError, match="cannot read"):
        CpuModel(replace(files, weights=tmp_path / "missing"), 1)


def test_a_saved_model_runs_from_c(built: Builder, tmp_path: Path) -> None:
    files = built(affine_image(37, 4))
    program = """#include <dlfcn.h>
#include <stdio.h>
#include "driver.h"
int main(int argc, char **argv) {
    void *library = dlopen(argv[1], RTLD_NOW);
    if (argc != 3 || !library) return 1;
    tw_model *(*open_model)(const char *, int) = (tw_model *(*)(const char *, int))dlsym(library, "tw_open");
    int (*run)(tw_model *, void *const *, void *const *) =
        (int (*)(tw_model *, void *const *, void *const *))dlsym(library, "tw_run");
    void (*destroy)(tw_model *) = (void (*)(tw_model *))dlsym(library, "tw_destroy");
    float x[37], y[37];
    for (int i = 0; i < 37; i++) x[i] = (float)i;
    void *inputs[] = {x}, *outputs[] = {y};
    tw_model *model = open_model(argv[2], 2);
    if (!model || run(model, inputs, outputs)) return 2;
    destroy(model);
    printf("%g %g", y[0], y[36]);
    return 0;
}
"""
    (tmp_path / "main.c").write_text(program)
    command = [*find_compiler().argv, f"-I{NATIVE}", "main.c", "-o", "main", "-ldl"]
    subprocess.run(command, cwd=tmp_path, check=True)
    arguments = [str(tmp_path / "main"), str(files.library), str(files.weights)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stdout) == (0, "1 73")


def test_native_sources_compile_without_warnings(tmp_path: Path) -> None:
    for source in ("driver.c", "placing.c", "team.c"):
        command = [
            *find_compiler().argv,
            "-std=gnu11",
            "-O2",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-c",
            str(NATIVE / source),
        ]
        done = subprocess.run(
            [*command, "-o", str(tmp_path / "x.o")], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kernels": {}}, "stage 0 .affine.: no such kernel"),
        ({"kernels": {"affine": "", "9x": ""}}, "'9x' is not a C identifier"),
        ({"stages": (Stage("affine", -1, ()),)}, "negative"),
        ({"stages": (Stage("affine", 1, (BufferRef("input", 1),)),)}, "input 1 is out of range"),
        ({"stages": (Stage("affine", 1, (BufferRef("arena", 65),)),)}, "arena 65 is out of range"),
        (
            {"stages": (Stage("affine", 1, (BufferRef("weight", 4),)),), "weights": bytes(64)},
            "not a multiple of 64",
        ),
    ],
)
def test_contradictory_images_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ModelImageError, match=message):
        replace(affine_image(8, 4), **change)  # type: ignore[arg-type]


# ---- toolchain ----


def test_nothing_is_compiled_twice(cache: Cache) -> None:
    compiler, machine = find_compiler(), this_machine()
    flags = default_flags(compiler, machine)
    image = affine_image(12345, 100)
    first = build(image, compiler, flags, machine, cache, jobs=2)
    events: list[tuple[str, bool]] = []
    second = build(
        image, compiler, flags, machine, cache, jobs=2, progress=lambda *event: events.append(event)
    )
    assert first == second
    assert sorted(events) == [(name, True) for name in ("affine", "tw_driver", "tw_placing", "tw_table", "tw_team")]
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
    with pytest.raises(
        ToolchainError, match="'no-such-compiler' is not a working C compiler.*pip install ziglang"
    ):
        find_compiler("no-such-compiler")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ToolchainError, match="no C compiler found; .*pip install ziglang"):
        find_compiler()


def test_flags_suit_the_machine() -> None:
    gcc = replace(find_compiler(), kind="gcc")
    x86 = Machine("x86_64", "", frozenset({"avx2", "avx512f"}))
    assert {"-march=native", "-mprefer-vector-width=512"} <= set(default_flags(gcc, x86))
    assert "-mprefer-vector-width=512" not in default_flags(gcc, Machine("x86_64", "", frozenset({"avx2"})))
    assert "-mcpu=native" in default_flags(gcc, Machine("aarch64", "", frozenset()))
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


@pytest.mark.skipif(
    importlib.util.find_spec("ziglang") is None, reason="the ziglang package is not installed"
)
def test_zig_builds_a_model(cache: Cache) -> None:
    compiler, machine = find_compiler("zig"), this_machine()
    assert compiler.kind == "zig"
    files = build(blur_image(33, 7), compiler, default_flags(compiler, machine), machine, cache, jobs=2)
    x = np.arange(33, dtype=np.int32)
    y = np.zeros_like(x)
    with CpuModel(files, 2) as model:
        model.run([x], [y])
    np.testing.assert_array_equal(y, blur_reference(x, 7))
