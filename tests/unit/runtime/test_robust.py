"""A model in use where things go wrong: many threads, forks, interrupts, and a cache that is shared, full, read-only or
damaged. Each runs in a process of its own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import tilewright
from tests.cpu_stages import model_of
from tilewright import Options

pytestmark = pytest.mark.host

ROOT = Path(__file__).resolve().parents[3]
START = """
import os, signal, sys, threading, time
from pathlib import Path
import numpy as np
import tilewright
from tilewright import Options
def compiled(**more):
    return tilewright.compile(sys.argv[1], options=Options(cache_dir=Path(sys.argv[2]), threads=2).override(**more))
def obey_permissions():
    # root may write everywhere, unless it gives that up
    import ctypes
    class Header(ctypes.Structure):
        _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]
    if os.geteuid() != 0: return
    libc, header, data = ctypes.CDLL(None), Header(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(ctypes.byref(header), data) == 0
    data[0] &= ~2
    data[1] &= ~2
    assert libc.capset(ctypes.byref(header), data) == 0
X = np.linspace(-1, 1, 64 * 64, dtype=np.float32).reshape(64, 64)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some products after each other: several kernels, each with tiles for more than one worker."""
    rng = np.random.default_rng(0)
    names = ["x", "a", "b", "c"]
    steps = [("MatMul", [names[i], f"w{i}"], names[i + 1], {}) for i in range(3)]
    steps += [("Softmax", ["c"], "y", {})]
    weights = {f"w{i}": (rng.standard_normal((64, 64)) / 8).astype(np.float32) for i in range(3)}
    path = tmp_path_factory.mktemp("robust") / "model.onnx"
    path.write_bytes(model_of(steps, {"x": (64, 64)}, {"y": (64, 64)}, weights).SerializeToString())
    return path


@pytest.fixture(scope="module")
def filled(model: Path) -> Path:
    """A cache that has the model."""
    cache = model.parent / "filled"
    tilewright.compile(model, options=Options(cache_dir=cache, threads=2))
    return cache


def run(script: str, *arguments: object, **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", START + textwrap.dedent(script), *map(str, arguments)], cwd=ROOT, capture_output=True,
        text=True, timeout=120, check=False, **more,  # type: ignore[call-overload]
    )  # fmt: skip


def check(done: subprocess.CompletedProcess[str], out: str = "fine") -> None:
    assert (done.returncode, done.stdout.strip()) == (0, out), done.stderr


def test_eight_threads_at_once(model: Path, filled: Path) -> None:
    check(run("""
        model = compiled()
        wanted = [model(X * n)[0] for n in range(8)]
        wrong = []
        def call(n):
            out = np.empty((64, 64), np.float32)
            for _ in range(50):
                model.run_into([X * n], [out])
                if not (np.array_equal(model(X * n)[0], wanted[n]) and np.array_equal(out, wanted[n])):
                    wrong.append(n)
        threads = [threading.Thread(target=call, args=(n,)) for n in range(8)]
        for t in threads: t.start()
        for t in threads: t.join()
        print("fine" if not wrong else wrong)
    """, model, filled))  # fmt: skip


@pytest.mark.slow
def test_threads_that_compile_at_once(model: Path, filled: Path, tmp_path: Path) -> None:
    for entry in Path(shutil.copytree(filled, tmp_path / "c")).rglob("*.model*"):
        entry.unlink()
    check(run("""
        made = []
        def call():
            made.append(compiled()(X)[0])
        threads = [threading.Thread(target=call) for _ in range(4)]
        for t in threads: t.start()
        for t in threads: t.join()
        print("fine" if len(made) == 4 and all(np.array_equal(m, made[0]) for m in made) else made)
    """, model, tmp_path / "c"))  # fmt: skip


def test_a_forked_child_calls_the_model(model: Path, filled: Path) -> None:
    """Also when it was forked while another thread was inside a run, or compiled."""
    check(run("""
        model = compiled()
        wanted = model(X)[0]
        stop = threading.Event()
        def keep_running():
            while not stop.is_set(): model(X)
        busy = threading.Thread(target=keep_running)
        busy.start()
        states = []
        for _ in range(5):
            child = os.fork()
            if child == 0:
                signal.alarm(30)
                good = all(np.array_equal(model(X)[0], wanted) for _ in range(3)) and (
                    np.array_equal(compiled()(X)[0], wanted))
                os._exit(0 if good else 1)
            states.append(os.waitpid(child, 0)[1])
        stop.set()
        busy.join()
        print("fine" if not any(states) and np.array_equal(model(X)[0], wanted) else states)
    """, model, filled))  # fmt: skip


def test_an_interrupt_during_runs_leaves_the_model_usable(model: Path, filled: Path) -> None:
    check(run("""
        model = compiled()
        wanted = model(X)[0]
        seen = 0
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        for n in range(20):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.002 + 0.001 * n)
                while True: model(X)
            except KeyboardInterrupt:
                seen += 1
            assert np.array_equal(model(X)[0], wanted)
        print("fine" if seen == 20 else seen)
    """, model, filled))  # fmt: skip


def test_an_interrupt_during_a_compilation_ends_it(
    model: Path, tmp_path: Path, fresh_cache: Callable[[Path], Path]
) -> None:
    cache = fresh_cache(tmp_path / "cache")
    command = [sys.executable, "-u", "-m", "tilewright", "run", str(model)]
    for seconds in (0.0, 0.2, 0.6):
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "TILEWRIGHT_CACHE": str(cache)}, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        assert process.stderr is not None
        if not process.stderr.readline().startswith("compiling"):  # the one before was not stopped in time
            assert process.wait(timeout=60) == 0
            break
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the C compilers too
        _, errors = process.communicate(timeout=60)
        # 0: over before; by the signal: so Python ends if an interrupt met it inside `exec`, also where it was caught
        assert process.returncode in (0, 130, -signal.SIGINT), errors
        assert "Traceback" not in errors
        ended = process.returncode == -signal.SIGINT and "compiling model.onnx: " in errors  # met while Python ends
        if process.returncode and not ended:
            assert errors.strip().endswith("tilewright: interrupted"), errors
    check(run("print('fine' if compiled()(X)[0].shape == (64, 64) else 'wrong')", model, cache))
    assert [p.name for p in cache.rglob("tmp-*")] == []


def test_an_interrupt_while_python_ends_says_nothing(tmp_path: Path) -> None:
    script = """if True:
        import atexit, os, signal, sys, time
        from tilewright.cli.main import command
        atexit.register(lambda: (os.kill(os.getpid(), signal.SIGINT), time.sleep(60)))
        sys.argv = ["tilewright", "--version"]
        command()
    """
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")
    assert done.stdout.startswith("tilewright ")


@pytest.mark.slow
def test_two_processes_compile_the_same_at_once(model: Path, tmp_path: Path) -> None:
    script = START + "print(float(compiled()(X)[0].sum()))"
    command = [sys.executable, "-c", script, str(model), str(tmp_path / "cache")]
    both = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert outputs[0] == outputs[1]
    check(run("""
        steps = []
        compiled(progress=steps.append)
        print("fine" if "plan" not in steps else steps)
    """, model, tmp_path / "cache"))  # fmt: skip
    assert [p.name for p in (tmp_path / "cache").rglob("tmp-*")] == []


# ---- a cache that cannot be written to


def read_only(folder: Path) -> Path:
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    return folder


def test_a_read_only_cache_is_read(model: Path, filled: Path, tmp_path: Path) -> None:
    folder = read_only(Path(shutil.copytree(filled, tmp_path / "cache")))
    done = run("""
        obey_permissions()
        steps = []
        model = compiled(progress=steps.append)
        print("fine" if "plan" not in steps and model(X)[0].shape == (64, 64) else steps)
    """, model, folder)  # fmt: skip
    check(done)
    assert done.stderr == ""


def test_what_a_read_only_cache_lacks_is_compiled_all_the_same(model: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    done = run("""
        obey_permissions()
        model = compiled()
        wanted = model(X)[0]
        again = compiled(schedule="none")
        print("fine" if np.allclose(again(X)[0], wanted, atol=1e-6) else "wrong")
    """, model, read_only(tmp_path / "cache"))  # fmt: skip
    check(done)
    assert re.search(r"the cache in .* cannot be written to \(Permission denied\)", done.stderr)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.slow
def test_a_full_cache_is_no_obstacle(model: Path, tmp_path: Path) -> None:
    """Files of more than some bytes cannot be written, as on a full disk."""
    done = run("""
        import errno
        from tilewright.runtime import cache
        write = Path.write_bytes
        def full(*_, **__):
            raise OSError(errno.ENOSPC, "No space left on device")
        import shutil
        copy = shutil.copyfile
        def copyfile(source, out, **more):
            if str(out).startswith(sys.argv[2]): full()
            return copy(source, out, **more)
        shutil.copyfile = copyfile
        Path.write_bytes = lambda path, data: full() if str(path).startswith(sys.argv[2]) else write(path, data)
        model = compiled()
        print("fine" if model(X)[0].shape == (64, 64) else "wrong")
        model.save(Path(sys.argv[3]))
    """, model, tmp_path / "cache", tmp_path / "saved")  # fmt: skip
    check(done)
    assert "cannot be written to (No space left on device)" in done.stderr
    assert [p.name for p in (tmp_path / "cache").rglob("*") if p.is_file() and p.name != "machine.lock"] == []
    assert (tmp_path / "saved" / "libmodel.so").stat().st_size > 0


def test_a_small_limit_on_files_is_no_obstacle(model: Path, tmp_path: Path) -> None:
    """Where not even the temporary folder takes them, there is one clear line."""
    done = run("""
        import resource
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            compiled()
        except tilewright.ToolError as error:
            print("fine" if "\\n" not in str(error).partition("failed")[0] else error)
    """, model, tmp_path / "cache")  # fmt: skip
    check(done)


@pytest.mark.slow
def test_a_damaged_entry_is_compiled_again(model: Path, filled: Path, tmp_path: Path) -> None:
    """Every file of the cache damaged at once: nothing of it is loaded."""
    folder = Path(shutil.copytree(filled, tmp_path / "cache"))
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix != ".sum" and path.stat().st_size:
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 0xFF
            path.write_bytes(data)
    check(run("""
        steps = []
        model = compiled(progress=steps.append)
        print("fine" if "plan" in steps and model(X)[0].shape == (64, 64) else steps)
    """, model, folder))  # fmt: skip
