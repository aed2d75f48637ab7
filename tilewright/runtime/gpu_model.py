"""A GPU model as the compiler hands it over, and the same description run under the emulator."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from tilewright.errors import InternalError
from tilewright.runtime.cache import Cache
from tilewright.runtime.cpu_model import BufferRef
from tilewright.runtime.emulator import Contract, EmulatedModule
from tilewright.runtime.sweep_order import Queue, SweepStep, check_order, early
from tilewright.runtime.toolchain import Compiler
from tilewright.runtime.weights import Weights, weight_bytes, weight_pieces

if TYPE_CHECKING:
    from tilewright.runtime.swept import Course, Moved

ALIGNMENT = 16  # bytes: what a vector copy needs of every buffer's first byte
MOST_SPREAD = 6  # blocks of a multiprocessor that are kept even; more of them even out as they end
_RESERVED_BYTES = 1024  # of shared memory, for each block that is resident
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class LaunchLimits:
    """What one launch may ask of a device."""

    shared_bytes: int  # of a block
    threads: int = 1024  # of a block
    blocks: tuple[int, int, int] = ((1 << 31) - 1, 65535, 65535)  # of a grid in x, y, z


def why_refused(grid: tuple[int, int, int], threads: int, shared_bytes: int, limits: LaunchLimits) -> str | None:
    """What a launch asks for beyond the limits; None where a device would start it."""
    if shared_bytes > limits.shared_bytes:
        return f"needs {shared_bytes} bytes of shared memory, and a block may have {limits.shared_bytes}"
    if not 1 <= threads <= limits.threads:
        return f"needs {threads} threads, and a block may have {limits.threads}"
    for name, count, most in zip("xyz", grid, limits.blocks, strict=True):
        if count > most:
            return f"needs {count} blocks in {name}, and a grid may have {most}"
    return None


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel's text and the shape of its blocks. It takes buffers, then extents, then the step if it has one."""

    name: str
    source: str
    block: int
    shared_bytes: int = 0
    contract: Contract = field(default_factory=Contract)  # what the emulator also holds it to
    meets: bool = False  # blocks wait for each other: all are resident, and the last parameter is where they meet
    starts_early: bool = False  # its blocks may start while those of the kernel before still run


@dataclass(frozen=True)
class GpuCall:
    """One launch: `grid` counts blocks in x, y, z; `extents` are the values of the kernel's symbols."""

    kernel: str
    grid: tuple[int, int, int]
    buffers: tuple[BufferRef, ...]
    extents: tuple[int, ...] = ()
    step: int | None = None


@dataclass(frozen=True)
class Resident:
    """Weights that stay on the device: where they begin among all weights, and there."""

    source: int
    place: int
    bytes: int


@dataclass(frozen=True)
class WeightCopy:
    """Weights that pass through the ring: where they begin among all weights, and there. The launch `first` is the
    first to read them; they may be copied when the launch `after` has ended, -1 for at once. Copies are in order."""

    source: int
    place: int
    bytes: int
    first: int
    after: int


@dataclass(frozen=True)
class GpuModelImage:
    """Everything that makes a model on a GPU. Without copies all weights are there, as they are in `weights`."""

    kernels: tuple[LoadedKernel, ...]
    calls: tuple[GpuCall, ...]
    input_bytes: tuple[int, ...]
    output_bytes: tuple[int, ...]
    weights: Weights = b""
    arena_bytes: int = 0
    residents: tuple[Resident, ...] = ()
    copies: tuple[WeightCopy, ...] = ()
    ring_bytes: int = 0

    @property
    def resident_bytes(self) -> int:
        """Of weights that stay on the device."""
        if not self.copies:
            return weight_bytes(self.weights)
        return max((each.place + each.bytes for each in self.residents), default=0)

    @property
    def resident_pieces(self) -> Iterator[tuple[int, memoryview]]:
        """Weights that stay, piece by piece, each with its place on the device."""
        at = 0
        for piece in weight_pieces(self.weights):
            if not self.copies:
                yield at, piece
            for each in self.residents:
                if at <= each.source < at + piece.nbytes:
                    yield each.place, piece[each.source - at : each.source - at + each.bytes]
            at += piece.nbytes

    @property
    def passing_pieces(self) -> Iterator[tuple[int, memoryview]]:
        """Weights that pass through the ring, each once, with where it begins among all weights."""
        sizes = {copy.source: copy.bytes for copy in self.copies}
        at = 0
        for piece in weight_pieces(self.weights):
            for source, size in sizes.items():
                if at <= source < at + piece.nbytes:
                    yield source, piece[source - at : source - at + size]
            at += piece.nbytes

    def __post_init__(self) -> None:
        names = [kernel.name for kernel in self.kernels]
        if len(set(names)) != len(names):
            raise InternalError("two GPU kernels have the same name")
        for name in names:
            if not _IDENTIFIER.fullmatch(name) or name.startswith("tw_"):
                raise InternalError(f"GPU kernel name {name!r} is not an identifier of its own (tw_ is taken)")
        limits = {
            "input": len(self.input_bytes),
            "output": len(self.output_bytes),
            "weight": self.resident_bytes + 1,
            "arena": self.arena_bytes + 1,
            "ring": self.ring_bytes + 1,
        }
        known = set(names)
        for position, call in enumerate(self.calls):
            _check_call(f"launch {position} ({call.kernel})", call, known, limits)

    def kernel(self, name: str) -> LoadedKernel:
        return next(k for k in self.kernels if k.name == name)

    def why_refused(self, limits: LaunchLimits) -> str | None:
        """The first launch that asks for too much, and for what; None where a device with these limits runs all."""
        kernels = {k.name: k for k in self.kernels}
        for call in self.calls:
            kernel = kernels[call.kernel]
            reason = why_refused(call.grid, kernel.block, kernel.shared_bytes, limits)
            if reason is not None:
                return f"kernel {call.kernel} {reason}"
        return None


def spread_out(image: GpuModelImage, units: int, shared_bytes: int) -> GpuModelImage:
    """The model with blocks that start early only where they are even over `units` multiprocessors of `shared_bytes`
    each: a block asks for so much that no more of its kernel fit than each is to have. Blocks that start beside those
    of the kernel before would otherwise crowd on those multiprocessors that are free first. Kernels of many blocks
    keep the first cache, which is made of the same memory, and start when the kernel before has ended."""
    largest: dict[str, int] = {}
    for call in image.calls:
        largest[call.kernel] = max(largest.get(call.kernel, 0), prod(call.grid))
    made = []
    for kernel in image.kernels:
        share = -(-largest.get(kernel.name, 0) // units)
        if 1 <= share <= MOST_SPREAD:
            room = shared_bytes // (share + 1) + 1 - _RESERVED_BYTES
            kernel = replace(kernel, shared_bytes=max(kernel.shared_bytes, room), starts_early=True)
        made.append(kernel)
    return replace(image, kernels=tuple(made))


def _check_call(where: str, call: GpuCall, kernels: set[str], limits: Mapping[str, int]) -> None:
    if call.kernel not in kernels:
        raise InternalError(f"{where}: no such kernel")
    if any(count < 0 for count in call.grid):
        raise InternalError(f"{where}: negative grid {call.grid}")
    for ref in call.buffers:
        if not 0 <= ref.value < limits[ref.space]:
            raise InternalError(f"{where}: {ref.space} {ref.value} is out of range")
        if ref.space in ("weight", "arena", "ring") and ref.value % ALIGNMENT:
            raise InternalError(f"{where}: {ref.space} offset {ref.value} is not a multiple of {ALIGNMENT}")


class EmulatedModel:
    """A model run launch by launch under the emulator; a broken rule is an EmulationFault, and what a device of these
    limits would not start is refused."""

    def __init__(
        self, image: GpuModelImage, cache: Cache, compiler: Compiler | None = None, jobs: int = 2, *,
        limits: LaunchLimits,
    ) -> None:  # fmt: skip
        reason = image.why_refused(limits)
        if reason is not None:
            raise InternalError(reason)
        self._image = image
        self._kernels = {k.name: k for k in image.kernels}
        self._module = EmulatedModule({k.name: k.source for k in image.kernels}, cache, compiler, jobs)
        self._weights = _aligned(image.resident_bytes)
        for at, piece in image.resident_pieces:
            self._weights[at : at + piece.nbytes] = piece
        self._host = {source: bytes(piece) for source, piece in image.passing_pieces}

    @property
    def image(self) -> GpuModelImage:
        return self._image

    def run(self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> None:
        self.profile(inputs, outputs)

    def rest(self) -> None:
        """Nothing is kept between runs but the weights."""

    @staticmethod
    def beside(models: Sequence[EmulatedModel]) -> EmulatedSweeps:
        return EmulatedSweeps(models)

    def close(self) -> None:
        """Nothing is kept that the interpreter does not give back by itself."""

    def profile(self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> list[int]:
        """Nanoseconds of each launch: the emulator's own time, which says nothing about a GPU."""
        check_arrays(self._image, inputs, outputs)
        arena = _aligned(self._image.arena_bytes)
        arena.fill(0xFF)  # NaN as a float: a temporary that nobody wrote spoils what reads it
        ring = _aligned(self._image.ring_bytes)
        ring.fill(0xFF)
        waiting = deque(self._image.copies)
        given = [_aligned_copy(a) for a in inputs]
        results = [_aligned(a.nbytes) for a in outputs]
        for result in results:
            result.fill(0xFF)
        spaces: Mapping[str, Callable[[int], np.ndarray]] = {
            "input": lambda n: given[n],
            "output": lambda n: results[n],
            "weight": lambda n: self._weights[n:],
            "arena": lambda n: arena[n:],
            "ring": lambda n: ring[n:],
        }
        times = []
        for number, call in enumerate(self._image.calls):
            # as early as a device may: what is overwritten while it is still read spoils the results
            while waiting and waiting[0].after < number:
                copy = waiting.popleft()
                held = self._host[copy.source]
                ring[copy.place : copy.place + len(held)] = np.frombuffer(held, np.uint8)
            kernel = self._kernels[call.kernel]
            buffers = [spaces[ref.space](ref.value) for ref in call.buffers]
            step = () if call.step is None else (call.step,)
            begin = time.perf_counter_ns()
            self._module.launch(
                call.kernel, call.grid, kernel.block, kernel.shared_bytes, [*buffers, *call.extents, *step],
                kernel.contract,
            )  # fmt: skip
            times.append(time.perf_counter_ns() - begin)
        for output, result in zip(outputs, results, strict=True):
            np.copyto(output, result.view(output.dtype).reshape(output.shape))
        return times


class EmulatedSweeps:
    """Models that run one part each while others are copied; an order that a device need not keep is an OrderFault."""

    def __init__(self, models: Sequence[EmulatedModel]) -> None:
        self._models = tuple(models)

    def sweep(self, course: Course, pack: Moved, unpack: Moved) -> None:
        check_order(course.steps, course.passages)
        slots: dict[tuple[str, int], list[np.ndarray]] = {}

        def do(step: SweepStep) -> None:
            model = self._models[course.passages[step.part].kind]
            gives = course.gives[step.part]
            match step.queue:
                case Queue.PACK:
                    slots["packed", step.slot] = [_aligned(size) for size in model.image.input_bytes]
                    pack(step.part, slots["packed", step.slot])
                case Queue.UP:
                    slots["taken", step.slot] = [_aligned_copy(a) for a in slots["packed", step.slot]]
                case Queue.RUN:
                    results = [_aligned(size) for size in model.image.output_bytes]
                    model.run(slots["taken", step.slot], results)
                    slots["given", step.slot] = results
                case Queue.DOWN:
                    whole = [a.view(r.dtype).reshape(r.shape)
                             for a, (r, _) in zip(slots["given", step.slot], gives, strict=True)]  # fmt: skip
                    slots["fetched", step.slot] = [
                        _aligned_copy(a[own]) for a, (_, own) in zip(whole, gives, strict=True)
                    ]
                case Queue.UNPACK:
                    unpack(step.part, slots["fetched", step.slot])

        early(course.steps, do)

    def rest(self) -> None:
        """Nothing is kept between runs."""


def check_arrays(image: GpuModelImage, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> None:
    for what, arrays, sizes in (("input", inputs, image.input_bytes), ("output", outputs, image.output_bytes)):
        if [a.nbytes for a in arrays] != list(sizes):
            raise InternalError(f"{what} arrays of {[a.nbytes for a in arrays]} bytes, the model has {list(sizes)}")


def _aligned(size: int) -> np.ndarray:
    room = np.empty(size + 128, np.uint8)
    start = -room.ctypes.data % 128
    return room[start : start + size]


def _aligned_copy(array: np.ndarray) -> np.ndarray:
    copy = _aligned(array.nbytes)
    copy[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return copy
