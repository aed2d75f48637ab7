"""Operations that fail one after the other: the first of a scenario, then the second, until it comes to its end.

    python -m tests.faults_io                  every scenario, every kind, every operation
    python -m tests.faults_io compile calls 17 one of them again

A fault may end the scenario with a TilewrightError in one line, or a MemoryError where memory was short; or it may be
worked around. Afterwards, without faults, the same folders must serve: nothing half-written is ever taken for whole.

Kinds: `calls` are those that Python itself announces (opening, renaming, removing, making folders, starting a
program, loading a library); `writes`, `memory` and `threads` are calls of the C library, of anything in the process,
which a shim in front of it counts. It runs in a process of its own."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

KINDS = ("calls", "writes", "memory", "threads")
SCENARIOS = ("compile", "cached", "save", "load", "run")
# What the file system may refuse, and what it refuses it with.
ANNOUNCED = {
    "open": errno.EMFILE, "os.mkdir": errno.ENOSPC, "os.rename": errno.EIO, "os.remove": errno.EACCES,
    "os.chmod": errno.EPERM, "os.listdir": errno.EACCES, "os.scandir": errno.EACCES, "os.utime": errno.EACCES,
    "tempfile.mkdtemp": errno.ENOSPC, "subprocess.Popen": errno.EAGAIN, "ctypes.dlopen": errno.ENOMEM,
    "mmap.__new__": errno.ENOMEM,
}  # fmt: skip
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <unistd.h>

#define LARGE (64 << 10)
static atomic_long hits;
static long fail_at;
static int armed_kind; /* 0: none, 1: writes, 2: memory, 3: threads */

void tw_arm(int kind, long at) { armed_kind = 0; hits = 0; fail_at = at; armed_kind = kind; }
long tw_hits(void) { return hits; }

static int fails(int kind) { return armed_kind == kind && atomic_fetch_add(&hits, 1) + 1 == fail_at; }
static int is_file(int fd) { struct stat s; return fstat(fd, &s) == 0 && S_ISREG(s.st_mode); }
#define REAL(type, name, ...) static type (*real)(__VA_ARGS__); if (!real) real = dlsym(RTLD_NEXT, #name)

ssize_t write(int fd, const void *b, size_t n)
{ REAL(ssize_t, write, int, const void *, size_t);
  if (armed_kind == 1 && is_file(fd) && fails(1)) { errno = ENOSPC; return -1; } return real(fd, b, n); }
ssize_t sendfile(int o, int i, off_t *f, size_t n)
{ REAL(ssize_t, sendfile, int, int, off_t *, size_t);
  if (fails(1)) { errno = ENOSPC; return -1; } return real(o, i, f, n); }
ssize_t copy_file_range(int i, off_t *a, int o, off_t *b, size_t n, unsigned f)
{ REAL(ssize_t, copy_file_range, int, off_t *, int, off_t *, size_t, unsigned);
  if (fails(1)) { errno = ENOSPC; return -1; } return real(i, a, o, b, n, f); }
size_t fwrite(const void *p, size_t s, size_t n, FILE *f)
{ REAL(size_t, fwrite, const void *, size_t, size_t, FILE *);
  if (armed_kind == 1 && is_file(fileno(f)) && fails(1)) { errno = ENOSPC; return 0; } return real(p, s, n, f); }
void *mmap(void *a, size_t n, int p, int f, int d, off_t o)
{ REAL(void *, mmap, void *, size_t, int, int, int, off_t);
  if (n >= LARGE && fails(2)) { errno = ENOMEM; return MAP_FAILED; } return real(a, n, p, f, d, o); }
void *malloc(size_t n)
{ REAL(void *, malloc, size_t); if (n >= LARGE && fails(2)) { errno = ENOMEM; return NULL; } return real(n); }
void *realloc(void *p, size_t n)
{ REAL(void *, realloc, void *, size_t);
  if (n >= LARGE && fails(2)) { errno = ENOMEM; return NULL; } return real(p, n); }
int pthread_create(pthread_t *t, const pthread_attr_t *a, void *(*f)(void *), void *x)
{ REAL(int, pthread_create, pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
  if (fails(3)) return EAGAIN; return real(t, a, f, x); }
"""


@dataclass
class Announced:
    """Fails the n-th announced operation on what lies in `folders`; a hook of Python's cannot be taken back, so this
    one sleeps until it is armed."""

    folders: tuple[str, ...]
    at: int = 0
    hits: int = 0

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self.at or event not in ANNOUNCED:
            return
        if event not in ("subprocess.Popen", "ctypes.dlopen", "mmap.__new__"):
            path = next((os.fspath(a) for a in arguments if isinstance(a, str | bytes | os.PathLike)), "")
            text = os.fsdecode(path)
            if not text.startswith(self.folders):
                return
        self.hits += 1
        if self.hits == self.at:
            raise OSError(ANNOUNCED[event], os.strerror(ANNOUNCED[event]), event)


class Faults:
    """Arms a fault, and says how many operations there were."""

    def __init__(self, folders: tuple[str, ...]) -> None:
        self._announced = Announced(folders)
        self._shim = ctypes.CDLL(None)
        sys.addaudithook(self._announced)

    @contextlib.contextmanager
    def failing(self, kind: str, at: int) -> Iterator[Callable[[], int]]:
        if kind == "calls":
            self._announced.hits, self._announced.at = 0, at
            try:
                yield lambda: self._announced.hits
            finally:
                self._announced.at = 0
            return
        self._shim.tw_arm(KINDS.index(kind), ctypes.c_long(at))
        try:
            yield self._shim.tw_hits
        finally:
            self._shim.tw_arm(0, ctypes.c_long(0))


class Bench:
    """Folders in a known state, and what is done in them."""

    def __init__(self, root: Path, seed: Path) -> None:
        import tilewright
        from tests.cpu_stages import model_of

        rng = np.random.default_rng(0)
        x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((96, 256), (256, 256)))
        model = model_of([("MatMul", ["x", "w"], "y", {}), ("Relu", ["y"], "z", {})], {"x": x.shape}, {"z": x.shape},
                         {"w": w})  # fmt: skip
        self.root, self.seed, self.x, self.tilewright = root, seed, x, tilewright
        self.cache, self.saved, self.out, self.temporary = (root / n for n in ("cache", "saved", "out", "tmp"))
        self.file = root / "dense.onnx"
        self.file.write_bytes(model.SerializeToString())
        self.temporary.mkdir()
        tempfile.tempdir = str(self.temporary)
        options = tilewright.Options(cache_dir=seed, threads=2)
        self.expected = tilewright.compile(self.file, options=options)(x)[0]
        tilewright.compile(self.file, options=options).save(self.saved)
        self.options = tilewright.Options(cache_dir=self.cache, threads=2)
        self.held = tilewright.load(self.saved, threads=2)

    def reset(self, scenario: str) -> None:
        shutil.rmtree(self.cache, ignore_errors=True)
        shutil.rmtree(self.out, ignore_errors=True)
        shutil.copytree(self.seed, self.cache)
        if scenario == "compile":  # all but the runtime's own objects, which take the C compiler longest
            kernels = sorted((f for f in self.cache.rglob("*.o")), key=lambda f: f.stat().st_size)[:1]
            made = (".so", ".model", ".weights", ".texts")
            for file in (*kernels, *(f for f in list(self.cache.rglob("*")) if f.suffix in made)):
                file.unlink()
        if scenario == "run":
            self.held = self.tilewright.load(self.saved, threads=2)

    def do(self, scenario: str) -> None:
        """Gives the right answer, or raises."""
        if scenario == "load":
            model = self.tilewright.load(self.saved, threads=2)
        elif scenario == "run":
            model = self.held
        else:
            model = self.tilewright.compile(self.file, options=self.options)
            if scenario == "save":
                model.save(self.out)
                model = self.tilewright.load(self.out, threads=2)
        np.testing.assert_array_equal(model(self.x)[0], self.expected)

    def check_after(self, scenario: str) -> None:
        """The next try works, and what is there is whole."""
        from tilewright.runtime import Cache

        if self.out.exists():
            np.testing.assert_array_equal(self.tilewright.load(self.out)(self.x)[0], self.expected)
        left = [p.name for p in self.root.iterdir() if p.name not in {"cache", "saved", "out", "tmp", "dense.onnx"}]
        assert not [n for n in left if n != "seed"], f"left behind: {left}"
        self.do(scenario)
        cache = Cache(self.cache)
        for file in self.cache.rglob("*"):
            if Path(f"{file}.sum").exists() and not file.name.startswith("tmp-"):
                assert cache.get(file.name) == file, f"{file.name} is not whole"


def inject(bench: Bench, faults: Faults, scenario: str, kind: str, at: int) -> bool:
    """One fault; whether there was an operation to fail."""
    from tilewright import TilewrightError

    bench.reset(scenario)
    with faults.failing(kind, at) as hits:
        try:
            bench.do(scenario)
        except TilewrightError as error:
            assert "\n" not in str(error) and str(error).strip(), f"no line to act on: {error!r}"
        except MemoryError:
            assert kind == "memory"
        count = hits()
    bench.check_after(scenario)
    return count >= at


def run(scenarios: Sequence[str], kinds: Sequence[str], first: int, last: int, step: int, root: Path) -> list[str]:
    """Everything that went wrong, a line each; the operations are tried from `first` until there are no more."""
    import logging

    logging.disable(logging.WARNING)
    wrong: list[str] = []
    seed = root / "seed"
    bench = Bench(root, seed)
    faults = Faults((str(root),))
    for scenario in scenarios:
        for kind in kinds:
            at, start = first, time.process_time()
            while at <= last:
                try:
                    if not inject(bench, faults, scenario, kind, at):
                        break
                except Exception as error:
                    text = " ".join(str(error).split())[:300]
                    ours = [f for f in traceback.extract_tb(error.__traceback__) if "tilewright" in f.filename]
                    place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "here"
                    wrong.append(f"{scenario} {kind} {at}: {type(error).__name__} at {place}: {text}")
                at += step
            print(f"{scenario} {kind}: {at - first} operations, {time.process_time() - start:.1f} s", flush=True)
    return wrong


def shimmed(arguments: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """This module in a process of its own, behind the shim."""
    from tilewright.runtime import find_compiler

    (folder / "shim.c").write_text("#include <stdio.h>\n" + SHIM)
    library = folder / "shim.so"
    command = [*find_compiler().argv, "-O1", "-w", "-shared", "-fPIC", "-fno-builtin", str(folder / "shim.c"), "-ldl"]
    subprocess.run([*command, "-o", str(library)], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": os.pathsep.join(sys.path)}
    module = [sys.executable, "-m", "tests.faults_io", *arguments, "--behind", str(folder)]
    return subprocess.run(module, env=environment, capture_output=True, text=True, check=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", nargs="?", choices=SCENARIOS)
    parser.add_argument("kind", nargs="?", choices=KINDS)
    parser.add_argument("at", nargs="?", type=int)
    parser.add_argument("--step", type=int, default=1, help="try every so many operations")
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--behind", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.behind is None:
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            done = shimmed(sys.argv[1:], Path(folder))
            print(done.stdout + done.stderr)
            return done.returncode
    os.environ.pop("LD_PRELOAD")  # programs that are started run as they are
    root = given.behind / "bench"
    root.mkdir()
    if (given.behind / "seed").exists():
        shutil.copytree(given.behind / "seed", root / "seed")
    wrong = run([given.scenario] if given.scenario else SCENARIOS, [given.kind] if given.kind else KINDS,
                given.at or given.first, given.at or 1 << 30, given.step, root)  # fmt: skip
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
