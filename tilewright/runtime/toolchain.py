"""Finds a C compiler and turns source text into cached objects and shared objects, many at a time. What is compiled
is addressed by its text, the compiler, the flags and this machine's processor, since the code is for it alone."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from threading import Lock
from typing import Literal, Self

from tilewright.errors import ToolError
from tilewright.runtime.cache import Cache, content_key

Kind = Literal["gcc", "clang", "zig"]
Language = Literal["c", "c++"]
# Called after each source: its name, and whether it came from the cache.
Progress = Callable[[str, bool], None]

OWN = "tw_"  # what the names of the runtime's own sources begin with
_SYSTEM_COMPILERS = ("cc", "gcc", "clang")
_MESSAGE_LINES = 8
_SHARED_DEFAULT_FLAGS = ("-O2", "-fPIC")
# Loops come in the order and with the unrolling they were planned with. Looking for better ones takes gcc a sixth of
# its time on long blocks; nearly always it finds nothing, and what it carries from one turn to the next (predictive
# commoning) makes accumulators of a full register tile spill. So does one name for all that an accumulator is in turn
# (coalescing): registers are then chosen badly, and sums of 7 x 12 on a Neoverse N1 run at 89% of its peak, not at 97.
_LEFT_ALONE = (
    "-fno-loop-unroll-and-jam", "-fno-loop-interchange", "-fno-tree-loop-distribution", "-fno-predictive-commoning",
    "-fno-tree-coalesce-vars",
    # Reads that it makes conditional itself, in vectors of its own, lose lanes (gcc 12: three of a row behind a
    # choice); ours that have to be are written as such.
    "-fno-tree-loop-if-convert",
)  # fmt: skip
# What counts for kernels beyond -O1: multiply-adds (an expensive optimisation, gcc says; without them 1.6 times as
# slow) and vectors for the loops that come without. What it is told to leave out finds little in a kernel and is a
# quarter of its time.
_KERNELS = (
    "-O1", "-fexpensive-optimizations", "-fno-tree-pta", "-fno-tree-dominator-opts", "-fno-tree-bit-ccp",
    "-fno-tree-ccp", "-fno-ipa-modref", "-fno-ipa-pure-const", "-fno-ipa-reference", "-fno-tree-copy-prop",
    "-fno-tree-dse", "-fno-tree-phiprop", "-fno-tree-loop-ivcanon", "-ftree-loop-vectorize",
    "-fvect-cost-model=dynamic",
)  # fmt: skip
# Code that is wanted soon: counters of loops from the first that are found, nothing moved or made a choice once
# instructions are chosen. It runs 1.00 to 1.02 times as long as by -O3.
_HURRIED = (
    *_KERNELS, "--param=iv-always-prune-cand-set-bound=1", "-fno-move-loop-invariants", "-fno-if-conversion",
    "-fno-if-conversion2",
)  # fmt: skip
# With these it is as fast as by -O3 (`python -m bench.compiler_passes`), in two thirds of the time: addresses that
# several turns share (PRE, cse), the order of instructions, and vectors of what is written lane by lane (whole numbers
# divided: 5 times as slow without).
_CHOSEN = (
    *_KERNELS, "-fgcse", "-frerun-cse-after-loop", "-fschedule-insns2", "-ftree-pre", "-ftree-slp-vectorize",
)  # fmt: skip
_HOW_TO_GET_ONE = "install gcc or clang, or run: pip install ziglang (which is what 'tilewright[compiler]' brings)"
# What zig keeps of its own, its C library above all: under our cache, unless the user has a place for it. Where it
# finds none that it can write to, it waits for ever.
_ZIG_ENVIRONMENT = 'export ZIG_GLOBAL_CACHE_DIR="${ZIG_GLOBAL_CACHE_DIR:-$0}"; exec "$@"'
_LOG = logging.getLogger("tilewright")


class ToolchainError(ToolError):
    """No usable compiler."""


class CompileError(RuntimeError):
    """The compiler refused a source; it is the generator's fault, never the user's."""


@dataclass(frozen=True)
class Compiler:
    argv: tuple[str, ...]
    kind: Kind
    version: str

    def without_files(self) -> tuple[str, ...]:
        """Flags that keep it from writing to the system's temporary folder, where what a kill leaves stays for good."""
        return ("-pipe", "-fno-lto") if self.kind == "gcc" else ()

    def for_cxx(self) -> tuple[str, ...]:
        """The command of the same compiler's C++ side."""
        if self.kind == "zig":
            return (*self.argv[:-1], "c++")
        *wrapper, program = self.argv
        folder, name = os.path.split(program)
        for c_name, cxx_name in (("clang", "clang++"), ("gcc", "g++"), ("cc", "c++")):
            if c_name in name:
                candidate = os.path.join(folder, name.replace(c_name, cxx_name, 1))
                if shutil.which(candidate):
                    return (*wrapper, candidate)
        raise ToolchainError(f"no C++ compiler beside {program}; install g++ or clang++, or run: pip install ziglang")


@dataclass(frozen=True)
class NativeMachine:
    """What native code depends on."""

    architecture: str
    identity: str
    features: frozenset[str]


def this_machine() -> NativeMachine:
    fields = _processor_fields(Path("/proc/cpuinfo"))
    features = fields.get("flags") or fields.get("Features") or ""
    # Clock readings change from moment to moment and say nothing about the instructions.
    stable = sorted(f"{k}={v}" for k, v in fields.items() if k not in ("processor", "cpu MHz", "BogoMIPS", "bogomips"))
    described = "\n".join((platform.system(), platform.machine(), platform.processor(), *stable))
    identity = hashlib.sha256(described.encode()).hexdigest()[:16]
    return NativeMachine(platform.machine(), identity, frozenset(features.split()))


def _processor_fields(cpuinfo: Path) -> dict[str, str]:
    if not cpuinfo.is_file():
        return {}
    first = cpuinfo.read_text(errors="replace").split("\n\n", 1)[0]
    pairs = (line.partition(":") for line in first.splitlines())
    per_core = ("core id", "apicid", "initial apicid", "physical id")
    return {key.strip(): value.strip() for key, _, value in pairs if key.strip() not in per_core}


def find_compiler(explicit: str | None = None) -> Compiler:
    """The compiler asked for ("zig" means the ziglang package), else the system's, else ziglang's."""
    if explicit is not None:
        return _explicit_compiler(explicit)
    for name in _SYSTEM_COMPILERS:
        program = shutil.which(name)
        compiler = _probe((program,)) if program else None
        if compiler is not None:
            return compiler
    compiler = _ziglang()
    if compiler is None:
        raise ToolchainError(f"no C compiler found; {_HOW_TO_GET_ONE}")
    return compiler


def _explicit_compiler(explicit: str) -> Compiler:
    argv = tuple(shlex.split(explicit))
    if not argv:
        raise ToolchainError(f"the compiler option is empty; {_HOW_TO_GET_ONE}")
    if argv == ("zig",) and not shutil.which("zig"):
        compiler = _ziglang()
    elif os.path.basename(argv[-1]) == "zig":
        compiler = _probe((*argv, "cc"))
    else:
        compiler = _probe(argv)
    if compiler is None:
        raise ToolchainError(f"{explicit!r} is not a working C compiler; {_HOW_TO_GET_ONE}")
    return compiler


def _ziglang() -> Compiler | None:
    spec = importlib.util.find_spec("ziglang")
    if spec is None or spec.origin is None:
        return None
    # Started directly where possible: going through Python costs more than compiling a small kernel.
    program = Path(spec.origin).with_name("zig")
    if program.is_file() and os.access(program, os.X_OK):
        return _probe((str(program), "cc"))
    return _probe((sys.executable, "-m", "ziglang", "cc"))


def _probe(argv: tuple[str, ...]) -> Compiler | None:
    is_zig = len(argv) > 1 and argv[-1] == "cc" and "zig" in "".join(argv[:-1])
    try:
        done = _version_of_zig(argv) if is_zig else _version(argv)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0 or not done.stdout.strip():
        return None
    text = done.stdout.strip()
    # The first line names the release, clang's "Target:" the system it builds for; the rest differs between copies.
    first, *rest = text.splitlines()
    version = " ".join([first, *(line for line in rest if line.startswith("Target:"))])
    if is_zig:
        return Compiler(argv, "zig", version)
    return Compiler(argv, "clang" if "clang" in text.lower() else "gcc", version)


def _version(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*argv, "--version"], capture_output=True, text=True, timeout=60, check=False)


def _version_of_zig(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """zig makes its cache even to tell its version, and tries for ever where the home takes none."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        return _version(_with_cache(argv, folder))


def _with_cache(argv: Sequence[str], folder: str) -> list[str]:
    return ["/bin/sh", "-c", _ZIG_ENVIRONMENT, folder, *argv]


def default_flags(compiler: Compiler, machine: NativeMachine) -> tuple[str, ...]:
    """Flags for code over data: everything this processor can do, and NaN and infinities keep their meaning."""
    is_arm = machine.architecture in ("aarch64", "arm64")
    flags = ["-O3", "-mcpu=native" if is_arm or compiler.kind == "zig" else "-march=native"]
    if "avx512f" in machine.features:
        # Both compilers otherwise split 512-bit vectors in two on most processors.
        flags.append("-mprefer-vector-width=512")
    flags += ["-std=gnu11", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
    # Buffers of different types share scratch memory, one after the other.
    flags += ["-fno-strict-aliasing", "-fPIC", "-fvisibility=hidden", "-Wno-psabi"]
    # Nothing is thrown through a kernel: tables for that are a twentieth of a compiler's time.
    flags += ["-fno-asynchronous-unwind-tables", "-fno-unwind-tables"]
    if compiler.kind == "gcc":
        flags += _LEFT_ALONE
    if is_arm and compiler.kind == "gcc":
        # Scheduling before register allocation spreads loads out and spills accumulators of a full register tile.
        flags.append("-fno-schedule-insns")
    if compiler.kind == "zig":
        # Without it zig adds checks that trap at run time.
        flags.append("-fno-sanitize=all")
    return tuple(flags)


def for_kernels(compiler: Compiler, machine: NativeMachine, hurried: bool = False) -> tuple[str, ...]:
    """The same with the passes that kernels gain by; `hurried`: for code that is wanted soon."""
    # gcc's passes were compared on x86 processors alone: elsewhere code that stays gets all of them.
    chosen: tuple[str, ...] = ("-O3",)
    if hurried:
        chosen = _HURRIED if compiler.kind == "gcc" else ("-O1",)
    elif compiler.kind == "gcc" and machine.architecture in ("x86_64", "AMD64"):
        chosen = _CHOSEN
    return tuple(each for flag in default_flags(compiler, machine) for each in (chosen if flag == "-O3" else (flag,)))


def for_runtime(flags: Sequence[str]) -> tuple[str, ...]:
    """The same for the runtime's own sources, which wait for memory and for each other, and hold no loop over data."""
    return tuple("-O1" if flag == "-O3" else flag for flag in flags)


class ObjectCompiler:
    """Compiles named C sources while more of them are still written; leaving it cancels what has not begun, and waits
    for what has. Started by a name that it has for the same text, it does nothing."""

    def __init__(
        self, compiler: Compiler, flags: Sequence[str], machine: NativeMachine, cache: Cache, *, jobs: int,
        progress: Progress | None = None, file_length: int = 0, own_flags: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        if jobs < 1:
            raise ValueError(f"jobs must be at least 1, not {jobs}")
        self.compiler = compiler
        self.cache = cache
        self.file_length = file_length  # that a model's kernels share files up to
        self._flags = tuple(flags)
        self._own_flags = self._flags if own_flags is None else tuple(own_flags)  # of the runtime's sources
        self._machine = machine
        self._progress = progress
        self._pool = ThreadPoolExecutor(max_workers=jobs)
        self._waiting: list[tuple[int, str, str]] = []  # a heap: the longest text first
        self._lock = Lock()
        self._objects: dict[tuple[str, str], Future[Path]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._waiting.clear()
        self._pool.shutdown(cancel_futures=True)

    def start(self, name: str, text: str) -> None:
        if (name, text) in self._objects:
            return
        self._objects[name, text] = Future()
        with self._lock:
            heappush(self._waiting, (-len(text), name, text))
        try:
            self._pool.submit(self._compile_longest)
        except RuntimeError as error:
            if "thread" not in str(error):
                raise
            raise ToolchainError("the system refuses a thread for the C compiler; end other programs") from error

    def objects(self, sources: Mapping[str, str]) -> dict[str, Path]:
        """One object for each source, in their order; raises what the compiler refused."""
        for name, text in sources.items():
            self.start(name, text)
        return {name: self._objects[name, text].result() for name, text in sources.items()}

    def _compile_longest(self) -> None:
        """The longest of those waiting, so that no worker is left with one of them at the end."""
        with self._lock:
            if not self._waiting:
                return
            _, name, text = heappop(self._waiting)
        made = self._objects[name, text]
        try:
            made.set_result(self._compile_one(name, text))
        except BaseException as error:  # whoever asks for the object raises it
            made.set_exception(error)

    def _compile_one(self, name: str, text: str) -> Path:
        flags = self._own_flags if name.startswith(OWN) else self._flags
        key = content_key("object", text, self.compiler.version, *flags, self._machine.identity, suffix=".o")
        found = self.cache.get(key)
        cached = found is not None
        if found is None:
            command = _command(self.compiler, self.compiler.argv, self.cache)
            arguments = [*command, *flags, *self.compiler.without_files(), "-c"]
            found = self.cache.put(key, lambda out: _compile(arguments, name, text, ".c", out, ()))
        if self._progress is not None:
            self._progress(name, cached)
        return found


def compile_objects(
    sources: Mapping[str, str],
    compiler: Compiler,
    flags: Sequence[str],
    machine: NativeMachine,
    cache: Cache,
    *,
    jobs: int,
    progress: Progress | None = None,
) -> dict[str, Path]:
    """One object for each named C source, in the order of the sources."""
    with ObjectCompiler(compiler, flags, machine, cache, jobs=jobs, progress=progress) as pool:
        return pool.objects(sources)


def link(objects: Mapping[str, Path], compiler: Compiler, cache: Cache) -> Path:
    """One shared object from cached objects; their names in the cache say what they contain."""
    parts = sorted(f"{name}={path.name}" for name, path in objects.items())
    key = content_key("link", *parts, compiler.version, suffix=".so")
    found = cache.get(key)
    if found is not None:
        return found

    def write(out: Path) -> None:
        # The objects of a large model would not fit a command line.
        listing = out.with_name("objects.rsp")
        listing.write_text("\n".join(shlex.quote(str(path.resolve())) for path in objects.values()))
        command = [*_command(compiler, compiler.argv, cache), *compiler.without_files(), "-shared", "-pthread"]
        _run([*command, f"@{listing.name}", "-lm", "-o", out.name], "linking", out.parent)

    return cache.put(key, write)


def compile_shared(
    source: str,
    compiler: Compiler,
    machine: NativeMachine,
    cache: Cache,
    *,
    language: Language = "c",
    include_dirs: Sequence[Path] = (),
    flags: Sequence[str] = _SHARED_DEFAULT_FLAGS,
    name: str = "source",
) -> Path:
    """One self-contained source as a shared object; the headers it may include are part of its address."""
    argv = compiler.for_cxx() if language == "c++" else compiler.argv
    headers = [f"{path.name}\0{path.read_text()}" for folder in include_dirs for path in _headers(folder)]
    key = content_key("shared", language, source, *headers, compiler.version, *flags, machine.identity, suffix=".so")
    found = cache.get(key)
    if found is not None:
        return found
    includes = [f"-I{Path(folder).resolve()}" for folder in include_dirs]
    suffix = ".cpp" if language == "c++" else ".c"
    arguments = [*_command(compiler, argv, cache), *flags, *compiler.without_files(), *includes, "-shared", "-pthread"]
    return cache.put(key, lambda out: _compile(arguments, name, source, suffix, out, ("-lm",)))


def _command(compiler: Compiler, argv: Sequence[str], cache: Cache) -> list[str]:
    if compiler.kind != "zig":
        return list(argv)
    folder, is_new = cache.folder("zig")
    if is_new:
        _LOG.warning("the first compilation by zig takes a minute or two: it compiles a C library of its own, once")
    return _with_cache(argv, str(folder.resolve()))


def _headers(folder: Path) -> list[Path]:
    return sorted(path for path in Path(folder).rglob("*") if path.suffix in (".h", ".hpp", ".cuh", ".inc"))


def _compile(arguments: Sequence[str], name: str, text: str, suffix: str, out: Path, libraries: Sequence[str]) -> None:
    """In the folder of the file that is to be made; relative names keep it out of messages and out of the object."""
    source = out.with_name(f"{name}{suffix}")
    source.write_text(text)
    _run([*arguments, source.name, "-o", out.name, *libraries], name, out.parent)


def _run(command: Sequence[str], name: str, folder: Path) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise ToolchainError(f"cannot start {command[0]}: {error.strerror}; {_HOW_TO_GET_ONE}") from error
    if done.returncode != 0 and os.strerror(errno.ENOSPC) in done.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if done.returncode != 0:
        raise CompileError(f"{name}: {command[0]} failed: {_first_errors(done.stderr, done.returncode)}")


def _first_errors(message: str, status: int) -> str:
    lines = message.strip().splitlines()
    first = next((i for i, line in enumerate(lines) if "error" in line), 0)
    told = [line.strip() for line in lines[first : first + _MESSAGE_LINES]]
    return "; ".join(told) or f"exit status {status} and no message"
