"""Runs CUDA kernels without a GPU: the kernel's own text, compiled by the host's C++ compiler against checked views.

Stricter than the hardware: every access is bounds-checked per dimension, memory starts poisoned, conflicting accesses
without a barrier between them are faults, asynchronous copies land only at their wait.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tilewright.errors import InternalError, ToolError
from tilewright.runtime.cache import Cache
from tilewright.runtime.ownership import load_library
from tilewright.runtime.toolchain import Compiler, compile_shared, find_compiler, this_machine

_NATIVE = Path(__file__).parent / "native"
# No contraction: an emulated result must not depend on whether this host has fused multiply-add.
_FLAGS = ("-std=c++17", "-fPIC", "-fwrapv", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-exceptions",
          "-fvisibility=hidden", "-fno-sanitize=undefined", "-w")  # fmt: skip
_KERNELS_A_FILE = 12  # one compiler run parses the header once for this many kernels
_MOST_FAULTS = 64
_GRID_BARRIER = "tw::grid_barrier("  # blocks that wait for each other are all alive at a time
_DIMENSIONS = 8

KINDS = (
    "out of bounds", "uninitialised", "race", "misaligned", "divergent barrier", "broken shuffle", "never written",
    "never read", "overwritten unread", "asynchronous copy", "too small", "aliased",
)  # fmt: skip


@dataclass(frozen=True)
class Contract:
    """What a launch promises beyond safe accesses; names are the kernel's parameters."""

    writes_all: tuple[str, ...] = ()  # every element is written, none written again before it was read
    reads_all: tuple[str, ...] = ()  # every element is read by somebody
    uses_all: bool = False  # every element of shared memory and registers that is written is read by somebody


@dataclass(frozen=True)
class Fault:
    """One thing a kernel did that it must not do."""

    kind: str
    buffer: str  # empty for barriers and shuffles
    index: tuple[int, ...]
    block: tuple[int, int, int]
    thread: int  # -1 for what is found after the launch
    other_block: tuple[int, int, int] | None
    other_thread: int | None

    def __str__(self) -> str:
        where = f"{self.buffer}[{', '.join(map(str, self.index))}]" if self.buffer else "the block"
        text = f"{self.kind}: {where}"
        if self.thread >= 0:
            text += f" by thread {self.thread} of block {self.block}"
        if self.other_thread is not None and self.other_thread >= 0:
            text += f" against thread {self.other_thread} of block {self.other_block}"
        return text


class EmulationFault(InternalError):
    """A kernel broke a rule of the machine under the emulator."""

    def __init__(self, kernel: str, faults: Sequence[Fault]) -> None:
        self.kernel = kernel
        self.faults = tuple(faults)
        super().__init__(f"kernel {kernel}: " + "; ".join(str(f) for f in self.faults[:4]))


class _CFault(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int),
        ("rank", ctypes.c_int),
        ("name", ctypes.c_char * 64),
        ("index", ctypes.c_longlong * _DIMENSIONS),
        ("thread", ctypes.c_int),
        ("block", ctypes.c_int * 3),
        ("other_thread", ctypes.c_int),
        ("other_block", ctypes.c_int * 3),
    ]


class _CLaunch(ctypes.Structure):
    _fields_ = [
        ("entry", ctypes.c_void_p),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("grid", ctypes.c_int * 3),
        ("threads", ctypes.c_int),
        ("shared_bytes", ctypes.c_longlong),
        ("arrays", ctypes.c_int),
        ("addresses", ctypes.POINTER(ctypes.c_void_p)),
        ("sizes", ctypes.POINTER(ctypes.c_longlong)),
        ("writes_all", ctypes.POINTER(ctypes.c_char_p)),
        ("reads_all", ctypes.POINTER(ctypes.c_char_p)),
        ("uses_all", ctypes.c_int),
        ("most_faults", ctypes.c_int),
        ("faults", ctypes.POINTER(_CFault)),
        ("fault_count", ctypes.c_int),
        ("bank_conflicts", ctypes.c_longlong),
        ("waits", ctypes.c_int),
    ]


class EmulatedModule:
    """Kernels compiled for the emulator. Launches hold the interpreter lock, so they run one at a time.

    `optimise=0` compiles three times faster, for kernels that run once on little data. `bank_conflicts` counts the
    turns that reads of matrices in the last launch waited for each other in shared memory.
    """

    bank_conflicts = 0

    def __init__(
        self,
        sources: Mapping[str, str],
        cache: Cache,
        compiler: Compiler | None = None,
        jobs: int = 2,
        optimise: int = 1,
    ) -> None:
        chosen = compiler if compiler is not None else find_compiler()
        machine = this_machine()
        names = list(sources)
        self._waiting = {name for name, text in sources.items() if _GRID_BARRIER in text}
        groups = [names[i : i + _KERNELS_A_FILE] for i in range(0, len(names), _KERNELS_A_FILE)]
        texts = [_unit_text({name: sources[name] for name in group}) for group in groups]
        engine_text = (_NATIVE / "emulate.cpp").read_text()

        # Neither the engine nor a kernel needs C++'s library, which zig would first have to build.
        alone = ("-nostdlib++", "-nostdinc++") if chosen.kind == "zig" else ()

        def build(text: str, level: int) -> Path:
            flags = (*_FLAGS, *alone, f"-O{level}")
            return compile_shared(
                text, chosen, machine, cache, language="c++", include_dirs=(_NATIVE,), flags=flags, name="emulated"
            )

        levels = [2, *(optimise for _ in texts)]
        with ThreadPoolExecutor(jobs) as pool:
            paths = list(pool.map(build, [engine_text, *texts], levels))
        # PyDLL, not CDLL: the engine has one running launch, and the lock is what keeps a second one out.
        self._engine = load_library(paths[0], ctypes.PyDLL)
        self._engine.tw_engine.restype = ctypes.c_void_p
        engine = ctypes.c_void_p(self._engine.tw_engine())
        self._libraries: dict[str, ctypes.PyDLL] = {}
        for group, path in zip(groups, paths[1:], strict=True):
            library = load_library(path, ctypes.PyDLL)
            library.tw_attach(engine)
            self._libraries |= dict.fromkeys(group, library)

    def launch(
        self,
        name: str,
        grid: tuple[int, int, int],
        block: int,
        shared_bytes: int,
        args: Sequence[np.ndarray | int],
        contract: Contract | None = None,
    ) -> None:
        """Run a kernel; EmulationFault if it broke a rule."""
        faults = self.inspect(name, grid, block, shared_bytes, args, contract)
        if faults:
            raise EmulationFault(name, faults)

    def inspect(
        self,
        name: str,
        grid: tuple[int, int, int],
        block: int,
        shared_bytes: int,
        args: Sequence[np.ndarray | int],
        contract: Contract | None = None,
    ) -> tuple[Fault, ...]:
        """Run a kernel and give the faults found: the first three of each kind and buffer."""
        library = self._libraries[name]
        wanted = library[f"tw_parameters_{name}"]()
        if name in self._waiting and wanted == len(args) + 1:
            args = (*args, 0)  # where blocks meet on a device; the engine knows who waits
        if wanted != len(args):
            raise InternalError(f"kernel {name} takes {wanted} arguments, got {len(args)}")
        contract = contract or Contract()
        arrays = [a for a in args if isinstance(a, np.ndarray)]
        for array in arrays:
            if not array.flags.c_contiguous:
                raise InternalError(f"kernel {name}: arguments must be contiguous")
        slots = [_slot(a) for a in args]
        faults = (_CFault * _MOST_FAULTS)()
        launch = _CLaunch(
            entry=ctypes.cast(library[f"tw_call_{name}"], ctypes.c_void_p),
            arguments=(ctypes.c_void_p * max(1, len(slots)))(*[ctypes.addressof(s) for s in slots]),
            grid=(ctypes.c_int * 3)(*grid),
            threads=block,
            shared_bytes=shared_bytes,
            arrays=len(arrays),
            addresses=(ctypes.c_void_p * max(1, len(arrays)))(*[a.ctypes.data for a in arrays]),
            sizes=(ctypes.c_longlong * max(1, len(arrays)))(*[a.nbytes for a in arrays]),
            writes_all=_strings(contract.writes_all),
            reads_all=_strings(contract.reads_all),
            uses_all=contract.uses_all,
            most_faults=_MOST_FAULTS,
            faults=faults,
            waits=name in self._waiting,
        )
        if self._engine.tw_run(ctypes.byref(launch)) != 0:
            raise ToolError(f"kernel {name}: not enough memory to emulate {block} threads")
        self.bank_conflicts = launch.bank_conflicts
        return tuple(_fault(f) for f in faults[: launch.fault_count])


def _slot(value: np.ndarray | int) -> ctypes.c_void_p | ctypes.c_longlong:
    if isinstance(value, np.ndarray):
        return ctypes.c_void_p(value.ctypes.data)
    return ctypes.c_longlong(value)  # an int parameter reads the low half: emulation hosts are little-endian


def _strings(names: Sequence[str]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * (len(names) + 1))(*[n.encode() for n in names], None)


def _fault(raw: _CFault) -> Fault:
    alone = raw.other_thread < 0 and raw.other_block[0] < 0
    return Fault(
        kind=KINDS[raw.kind],
        buffer=raw.name.decode(),
        index=tuple(raw.index[: raw.rank]),
        block=(raw.block[0], raw.block[1], raw.block[2]),
        thread=raw.thread,
        other_block=None if alone else (raw.other_block[0], raw.other_block[1], raw.other_block[2]),
        other_thread=None if alone else raw.other_thread,
    )


def _unit_text(sources: Mapping[str, str]) -> str:
    entries = "".join(f"TW_ENTRY({name})\n" for name in sources)
    return "\n".join(sources.values()) + "\n" + entries + "TW_ATTACH\n"
