"""The worker team on hand-written kernels: every tile once, barriers, absent workers, concurrent calls, forks."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.native_models import BLUR, COUNT, Builder, X, Y, affine_image, blur_image, blur_reference, builder, kernel
from tilewright.runtime import BufferRef, Cache, CpuModel, DriverJump, KernelStage, ModelImage

THREADS = (1, 2, 3, 5)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    return builder(Cache(tmp_path_factory.mktemp("cache")))


@pytest.mark.sample(3)
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
    stage = KernelStage("count", 57, (Y,), balance=balance)  # type: ignore[arg-type]
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
        KernelStage("set", 1, (arena,)),
        KernelStage("copy", 1, (arena, outs[0])),
        KernelStage("copy", 1, (arena, outs[1]), barrier_before=False),
        KernelStage("copy", 1, (arena, outs[2]), barrier_before=False),
    )
    image = ModelImage({"set": slow, "copy": copy}, stages, (), (4, 4, 4), arena_bytes=64)
    for _ in range(10):
        got = [np.zeros(1, np.int32) for _ in range(3)]
        with CpuModel(built(image), threads) as model:
            model.run([], got)
        assert [int(g[0]) for g in got] == [42, 42, 42]


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("tiles", [1, 2, 57])
def test_stages_are_repeated_while_a_byte_is_true(built: Builder, threads: int, tiles: int) -> None:
    """Counts down in a loop of two stages, which the second of them ends; a stage behind it runs once."""
    down = kernel("down", "int32_t *n = buffers[0]; char *on = buffers[1]; n[0] -= 1; on[0] = n[0] > 0;")
    left, on = BufferRef("arena", 0), BufferRef("arena", 64)
    begin = kernel(
        "begin",
        """int32_t n = *(int32_t *)buffers[0]; *(int32_t *)buffers[1] = n;
                            *(char *)buffers[2] = n > 0;""",
    )
    stages = (KernelStage("begin", 1, (X, left, on)), KernelStage("count", tiles, (Y,)), KernelStage("down", 1, (left,
              on)), KernelStage("count", tiles, (BufferRef("output", 1),)))  # fmt: skip
    jumps = (DriverJump(1, 3, 2, on), DriverJump(3, 1, 0))
    image = ModelImage({"begin": begin, "count": COUNT, "down": down}, stages, (4,), (4 * tiles,) * 2, arena_bytes=128,
                       jumps=jumps)  # fmt: skip
    with CpuModel(built(image), threads) as model:
        for turns in (0, 1, 2, 1000):
            inside, behind = np.zeros(tiles, np.int32), np.zeros(tiles, np.int32)
            model.run([np.array([turns], np.int32)], [inside, behind])
            assert set(inside.tolist()) == {turns} and set(behind.tolist()) == {1}


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
    stage = KernelStage("sleepy", 8, (Y,), scratch_bytes=64, balance=balance)  # type: ignore[arg-type]
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
    count = KernelStage("count", threads, (BufferRef("output", 1),))
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
    stages: list[KernelStage] = []
    extents: list[int] = []
    group = 0
    for i in range(count):
        barrier = bool(random.random() < 0.6)
        group = i if barrier else group
        balance = random.choice(["auto", "static", "dynamic", "serial"]).item()
        tiles = int(random.integers(0, random.choice([3, 6, width + 1])))
        source = BufferRef("arena", 4 * width * int(random.integers(group))) if group else X
        stages.append(
            KernelStage(
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
    stages.append(KernelStage("total", width, (BufferRef("arena", 0), Y), first_extent=len(extents)))
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
