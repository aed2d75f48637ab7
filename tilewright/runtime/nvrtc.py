"""CUDA C++ to machine code by NVRTC, from the `nvidia-cuda-nvrtc` package or a toolkit; needs no driver and no GPU."""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from tilewright.errors import ToolError
from tilewright.runtime.cache import Cache, content_key

HEADER = "tilewright.cuh"
_HEADER_PATH = Path(__file__).parent / "native" / HEADER
# Divisions and roots stay exact and denormals stay numbers (NVRTC's defaults): no fast-math here.
DEFAULT_OPTIONS = ("--std=c++17",)
OLDEST = 80  # Ampere: asynchronous copies into shared memory
_EXACT_FROM = 90  # from Hopper on, wgmma and the like need the architecture itself, not its family
_REPORT = "--ptxas-options=-v"
# With a driver at hand NVRTC 13 keeps results of its own, and what it finds there comes without a report.
_ANEW = "--no-cache"
_LOSS = "Performance Loss"  # products that wait for each other, say
_MESSAGE_LINES = 6


class NvrtcError(ToolError):
    """NVRTC is missing or refused a source."""


@dataclass(frozen=True)
class Resources:
    """What the assembler says a kernel takes: registers of a thread, bytes of its stack and of what it spills, and
    shared memory that is declared in the text (dynamic shared memory is asked for at the launch)."""

    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Cubin:
    """Machine code for one architecture, and what each of its kernels takes."""

    code: bytes
    resources: Mapping[str, Resources]
    remarks: tuple[str, ...] = ()  # of the assembler, where it could not do what a kernel asks for: told when it runs


def exact_architecture(capability: int) -> str:
    """The name to compile for, of a device of compute capability 8.0 (80), 9.0 (90) and so on."""
    return f"sm_{capability}{'a' if capability >= _EXACT_FROM else ''}"


def compile_to_cubin(source: str, arch: str = "sm_90a", options: Sequence[str] = DEFAULT_OPTIONS) -> Cubin:
    """Machine code for exactly this architecture; the text may include our header."""
    anew = [_ANEW] if int(version().partition(".")[0]) >= 13 else []
    code, log = _compile(source, [f"--gpu-architecture={arch}", _REPORT, *anew, *options], "CUBIN")
    return Cubin(code, parse_report(log), tuple(line for line in log.splitlines() if _LOSS in line))


def compile_to_ptx(source: str, arch: str = "sm_90", options: Sequence[str] = DEFAULT_OPTIONS) -> str:
    """PTX for the architecture with the number of `arch`."""
    virtual = arch.replace("sm_", "compute_")
    return _compile(source, [f"--gpu-architecture={virtual}", *options], "PTX")[0].rstrip(b"\0").decode()


def cached_cubin(source: str, arch: str, store: Cache, options: Sequence[str] = DEFAULT_OPTIONS) -> Cubin:
    """As compile_to_cubin, through the cache on disk: the code and, beside it, the assembler's report."""
    about = ("cubin", source, _HEADER_PATH.read_text(), arch, *options, version())
    code_key, report_key = content_key(*about, suffix=".cubin"), content_key(*about, suffix=".json")
    code, report = store.get(code_key), store.get(report_key)
    if code is not None and report is not None:
        rows = json.loads(report.read_text())
        return Cubin(code.read_bytes(), {name: Resources(**row) for name, row in rows.items()})
    made = compile_to_cubin(source, arch, options)
    store.put(report_key, json.dumps({name: asdict(row) for name, row in made.resources.items()}).encode())
    store.put(code_key, made.code)
    return made


def parse_report(log: str) -> dict[str, Resources]:
    """The assembler's report on each kernel of a source."""
    found = {}
    for part in re.split(r"Compiling entry function '", log)[1:]:
        name = part.partition("'")[0]
        numbers = {what: int(n) for n, what in re.findall(r"(\d+) (bytes stack|bytes spill stores|registers)", part)}
        shared = re.search(r"(\d+) bytes smem", part)
        found[name] = Resources(
            numbers.get("registers", 0), numbers.get("bytes stack", 0), numbers.get("bytes spill stores", 0),
            int(shared[1]) if shared else 0,
        )  # fmt: skip
    return found


def version() -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def is_available() -> bool:
    try:
        _library()
    except NvrtcError:
        return False
    return True


@cache
def _library() -> ctypes.CDLL:
    tried = [*_packaged_libraries(), ctypes.util.find_library("nvrtc"), *_toolkit_libraries()]
    for path in tried:
        if path is None:
            continue
        try:
            library = ctypes.CDLL(str(path))
        except OSError:
            continue  # of another architecture, or without the libraries it needs
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        return library
    raise NvrtcError("NVRTC is not installed: pip install nvidia-cuda-nvrtc")


def _toolkit_libraries() -> list[Path]:
    """The CUDA toolkit keeps it beside its compiler."""
    compiler = shutil.which("nvcc")
    if compiler is None:
        return []
    root = Path(compiler).resolve().parents[1]
    return sorted(p for folder in ("lib64", "targets/*/lib") for p in root.glob(f"{folder}/libnvrtc.so"))


def _packaged_libraries() -> list[Path]:
    """NVIDIA's packages put it under nvidia/cu13/lib or nvidia/cuda_nvrtc/lib; the newest first."""
    spec = importlib.util.find_spec("nvidia")
    if spec is None or spec.submodule_search_locations is None:
        return []
    found = [p for root in spec.submodule_search_locations for p in Path(root).glob("*/lib/libnvrtc.so.*")]
    plain = [p for p in found if re.fullmatch(r"libnvrtc\.so\.\d+", p.name)]
    return sorted(plain, key=lambda p: int(p.suffix[1:]), reverse=True)


def _compile(source: str, options: Sequence[str], result: str) -> tuple[bytes, str]:
    """What was asked for, and what the compiler had to say."""
    library = _library()
    program = ctypes.c_void_p()
    headers = (ctypes.c_char_p * 1)(_HEADER_PATH.read_bytes())
    names = (ctypes.c_char_p * 1)(HEADER.encode())
    _check(
        library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 1, headers, names),
        "nvrtcCreateProgram",
    )
    try:
        given = (ctypes.c_char_p * len(options))(*[o.encode() for o in options])
        status = library.nvrtcCompileProgram(program, len(options), given)
        log = _fetch(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        if status != 0:
            raise NvrtcError(f"NVRTC refused a kernel: {_first_errors(log, status)}")
        return _fetch(program, result), log
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _fetch(program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    library = _library()
    _check(library[f"nvrtcGet{what}Size"](program, ctypes.byref(size)), f"nvrtcGet{what}Size")
    data = ctypes.create_string_buffer(size.value)
    _check(library[f"nvrtcGet{what}"](program, data), f"nvrtcGet{what}")
    return data.raw


def _check(status: int, call: str) -> None:
    if status != 0:
        raise NvrtcError(f"{call}: {_library().nvrtcGetErrorString(status).decode()}")


def _first_errors(log: str, status: int) -> str:
    lines = log.splitlines()
    first = next((i for i, line in enumerate(lines) if "error" in line), 0)
    return "\n".join(lines[first : first + _MESSAGE_LINES]) or _library().nvrtcGetErrorString(status).decode()
