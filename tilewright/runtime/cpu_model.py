"""A compiled CPU model: the description that the compiler hands over, its build into one shared object and one
weights file, and the loaded model that runs on a team of worker threads."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from pathlib import Path
from threading import Lock, get_ident
from typing import Any, Literal, Protocol, Self

import numpy as np
from numpy import ndarray
from numpy.typing import NDArray

from tilewright.errors import CancelledError, ToolError
from tilewright.runtime.cache import Cache
from tilewright.runtime.ownership import load_library
from tilewright.runtime.permissions import request
from tilewright.runtime.source_files import files
from tilewright.runtime.toolchain import OWN, Compiler, NativeMachine, ObjectCompiler, Progress, link
from tilewright.runtime.weights import (
    WEIGHT_ALIGNMENT,
    MappedWeights,
    Weights,
    map_weights,
    store_weights,
    weight_bytes,
)

Space = Literal["input", "output", "weight", "arena", "ring"]  # weights pass through the ring, on GPUs
Balance = Literal["auto", "static", "dynamic", "serial"]
Denormals = Literal["flush", "keep"]

RUN_SPIN_MICROSECONDS = 100.0
IDLE_SPIN_MICROSECONDS = 50.0
MAX_THREADS = 1024

_NO_THREADS, _CANCELLED = 1, 3  # TW_NO_THREADS and TW_CANCELLED in native/driver.h
_Watch = ctypes.CFUNCTYPE(ctypes.c_int)  # tw_watch
_NEEDED = ("tw_describe", "tw_create", "tw_run", "tw_run_profile", "tw_run_objects", "tw_run_tuple", "tw_destroy")
_WEIGHT = 2  # TW_WEIGHT
_READY_FLAGS = 0x101  # NumPy's C_CONTIGUOUS and ALIGNED
_WRITEABLE_FLAG = 0x400

_NATIVE = Path(__file__).with_name("native")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SPACES: Mapping[str, str] = {
    "input": "TW_INPUT",
    "output": "TW_OUTPUT",
    "weight": "TW_WEIGHT",
    "arena": "TW_ARENA",
}
_BALANCES: Mapping[str, str] = {
    "auto": "TW_AUTO",
    "static": "TW_STATIC",
    "dynamic": "TW_DYNAMIC",
    "serial": "TW_SERIAL",
}


class ModelImageError(ValueError):
    """The compiler handed over a description that contradicts itself."""


class ModelRunError(ToolError):
    """A model could not be loaded or run."""


@dataclass(frozen=True)
class BufferRef:
    """value: the position of an input or output, or a byte offset into the weights or the arena. offset: bytes into the
    input or output."""

    space: Space
    value: int
    offset: int = 0


@dataclass(frozen=True)
class KernelStage:
    """One kernel over independent tiles. barrier_before=False: needs nothing from the stages since the last barrier.

    balance: "static" gives every worker one run of neighbouring tiles, which others take over only from a worker that
    stays away; "dynamic" lets a worker that is done take tiles of the others; "auto" is dynamic where there are many
    tiles; "serial" keeps tiny work in one piece.
    `first_extent`: the kernel sees the image's extents from this position on."""

    kernel: str
    tiles: int
    buffers: tuple[BufferRef, ...]
    scratch_bytes: int = 0
    barrier_before: bool = True
    balance: Balance = "auto"
    first_extent: int = 0


@dataclass(frozen=True)
class KeptWeights:
    """Weights that stages read again and again, each worker one of so many equal parts: worth a place of their own."""

    offset: int
    bytes: int
    parts: int


@dataclass(frozen=True)
class DriverJump:
    """In front of a stage, or behind the last, the run goes on in front of another: always, or where a byte is 0. Those
    in front of one stage are looked at in order; at the target from number `next` on."""

    stage: int
    target: int
    next: int
    condition: BufferRef | None = None


@dataclass(frozen=True)
class ModelImage:
    """Everything that makes a model: kernels (name to C source), stages in order, and what their buffers refer to."""

    kernels: Mapping[str, str]
    stages: tuple[KernelStage, ...]
    input_bytes: tuple[int, ...]
    output_bytes: tuple[int, ...]
    weights: Weights = b""
    arena_bytes: int = 0
    extents: tuple[int, ...] = ()
    kept: tuple[KeptWeights, ...] = ()
    denormals: Denormals = "flush"
    permissions: tuple[str, ...] = ()  # that the system grants when asked (see `permissions`)
    jumps: tuple[DriverJump, ...] = ()  # by stage

    def __post_init__(self) -> None:
        for name in self.kernels:
            if not _IDENTIFIER.fullmatch(name) or name.startswith(OWN):
                raise ModelImageError(f"kernel name {name!r} is not a C identifier of its own (tw_ is taken)")
        limits = {
            "input": len(self.input_bytes),
            "output": len(self.output_bytes),
            "weight": weight_bytes(self.weights) + 1,
            "arena": self.arena_bytes + 1,
        }
        for position, stage in enumerate(self.stages):
            _check_stage(position, stage, self.kernels, limits)
        for jump in self.jumps:
            _check_jump(jump, len(self.stages), limits)
        if any(a.stage > b.stage for a, b in pairwise(self.jumps)):
            raise ModelImageError("jumps are not in the order of their stages")
        for kept in self.kept:
            if kept.offset < 0 or kept.bytes < 1 or kept.parts < 1 or kept.offset + kept.bytes >= limits["weight"]:
                raise ModelImageError(f"kept weights {kept} are out of range")


def _check_stage(position: int, stage: KernelStage, kernels: Mapping[str, str], limits: Mapping[str, int]) -> None:
    where = f"stage {position} ({stage.kernel})"
    if stage.kernel not in kernels:
        raise ModelImageError(f"{where}: no such kernel")
    if stage.tiles < 0 or stage.scratch_bytes < 0:
        raise ModelImageError(f"{where}: negative tiles or scratch")
    if stage.balance not in _BALANCES:
        raise ModelImageError(f"{where}: unknown balance {stage.balance!r}")
    for ref in stage.buffers:
        _check_reference(where, ref, limits)


def _check_jump(jump: DriverJump, stages: int, limits: Mapping[str, int]) -> None:
    where = f"jump in front of stage {jump.stage}"
    if not 0 <= jump.stage <= stages or not 0 <= jump.target <= stages:
        raise ModelImageError(f"{where}: to stage {jump.target} of {stages}")
    if jump.condition is not None:
        _check_reference(where, jump.condition, limits)


def _check_reference(where: str, ref: BufferRef, limits: Mapping[str, int]) -> None:
    if ref.space not in limits:
        raise ModelImageError(f"{where}: unknown space {ref.space!r}")
    if not 0 <= ref.value < limits[ref.space]:
        raise ModelImageError(f"{where}: {ref.space} {ref.value} is out of range")
    if ref.offset < 0 or (ref.offset and ref.space not in ("input", "output")):
        raise ModelImageError(f"{where}: an offset of {ref.offset} into {ref.space}")
    if ref.space == "weight" and ref.value % WEIGHT_ALIGNMENT:
        raise ModelImageError(f"{where}: weight offset {ref.value} is not a multiple of {WEIGHT_ALIGNMENT}")


@dataclass(frozen=True)
class BuiltModel:
    """The two files of a model, and what the system must grant a process that runs it (see `permissions`); copied
    elsewhere together they load without a compiler."""

    library: Path
    weights: Path
    permissions: tuple[str, ...] = ()
    held: object = field(default=None, compare=False, repr=False)  # what the files' folder lasts as long as
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)  # of the library, in C
    trust: bool = False  # whosever the files are, the user wants them run
    unchecked: Callable[[], None] | None = field(default=None, compare=False, repr=False)
    """What is to be looked at before weights are used first: large ones take longer to check than a model to start."""


def table_source(image: ModelImage) -> str:
    """The stage table as C text; it includes the driver's header."""
    used = sorted({stage.kernel for stage in image.stages})
    declarations = [
        f"void {name}(void *const *buffers, const int64_t *extents, int64_t tile, char *scratch);" for name in used
    ]
    refs = [ref for stage in image.stages for ref in stage.buffers]
    stages = []
    first = 0
    for stage in image.stages:
        barrier = int(stage.barrier_before)
        stages.append(
            f"{{{stage.kernel}, {stage.tiles}, {first}, {len(stage.buffers)}, {barrier}, {_BALANCES[stage.balance]}, "
            f"{stage.first_extent}}}"
        )
        first += len(stage.buffers)
    jumps = []
    for jump in image.jumps:
        jumps.append(f"{{{jump.stage}, {jump.target}, {jump.next}, {-1 if jump.condition is None else len(refs)}}}")
        refs += [] if jump.condition is None else [jump.condition]
    scratch = max((stage.scratch_bytes for stage in image.stages), default=0)
    counts = (
        len(stages), len(refs), len(image.extents), len(image.input_bytes), len(image.output_bytes), len(image.kept),
    )  # fmt: skip
    sizes = (weight_bytes(image.weights), image.arena_bytes, scratch, int(image.denormals == "keep"))
    numbers = ", ".join(str(number) for number in (*counts, *sizes))
    arrays = f"stages, buffers, extents, input_bytes, output_bytes, kept, {len(jumps)}, jumps"
    return "\n".join(
        [
            '#include "driver.h"',
            *declarations,
            _array("tw_stage", "stages", stages),
            _array("tw_buffer", "buffers", [f"{{{_SPACES[ref.space]}, {ref.value}, {ref.offset}}}" for ref in refs]),
            _array("int64_t", "extents", [str(extent) for extent in image.extents]),
            _array("int64_t", "input_bytes", [str(size) for size in image.input_bytes]),
            _array("int64_t", "output_bytes", [str(size) for size in image.output_bytes]),
            _array("tw_kept", "kept", [f"{{{k.offset}, {k.bytes}, {k.parts}}}" for k in image.kept]),
            _array("tw_jump", "jumps", jumps),
            f"const tw_table tw_model_table = {{{numbers}, {arrays}}};",
            "",
        ]
    )


def _array(c_type: str, name: str, items: Sequence[str]) -> str:
    # C has no empty arrays; the counts in the table say how many items are meant.
    body = ",\n    ".join(items) if items else "0"
    return f"static const {c_type} {name}[] = {{\n    {body}\n}};"


def _with_headers(source: str) -> str:
    """The source with our own headers in place, so that its text alone determines the object."""
    for name in ("model.h", "arithmetic.h", "driver.h", "placing.h", "team.h"):
        source = source.replace(f'#include "{name}"', (_NATIVE / name).read_text())
    return source


def runtime_sources() -> dict[str, str]:
    """The C sources that are the same in every model."""
    # what runs a model shares a file: the system's headers take as long to read as the code takes to compile
    files = {"driver": ("driver", "prepare", "weights_file", "objects", "placing"), "team": ("team",)}
    return {f"tw_{name}": "".join(_with_headers((_NATIVE / f"{part}.c").read_text()) for part in parts)
            for name, parts in files.items()}  # fmt: skip


def library_sources(image: ModelImage, file_length: int = 0) -> dict[str, str]:
    """Every C source of the model's shared object; each is complete without a header of ours."""
    kernels = dict(files(image.kernels.items(), file_length))
    return {**kernels, **runtime_sources(), "tw_table": _with_headers(table_source(image))}


def driver_header() -> str:
    """How a shared object is called, in C."""
    return (_NATIVE / "driver.h").read_text()


def build(
    image: ModelImage,
    compiler: Compiler,
    flags: Sequence[str],
    machine: NativeMachine,
    cache: Cache,
    *,
    jobs: int,
    progress: Progress | None = None,
    weights_cache: Cache | None = None,
) -> BuiltModel:
    """Compile and link what the cache does not have yet. Weights that are not worth keeping may go elsewhere."""
    with ObjectCompiler(compiler, flags, machine, cache, jobs=jobs, progress=progress) as objects:
        return build_with(objects, image, weights_cache or cache)


def build_with(objects: ObjectCompiler, image: ModelImage, weights_cache: Cache) -> BuiltModel:
    """The same with a compiler at work, which may have begun with some of the sources. Weights are written out
    meanwhile."""
    sources = library_sources(image, objects.file_length)
    for name, text in sources.items():
        objects.start(name, text)
    weights = store_weights(image.weights, weights_cache)
    library = link(objects.objects(sources), objects.compiler, objects.cache)
    objects.cache.prune()
    held = (objects.cache.spare, weights_cache.spare)
    return BuiltModel(library, weights, image.permissions, held=held, sources=sources)


class _Buffer(ctypes.Structure):
    """tw_buffer in native/driver.h."""

    _fields_ = [("space", ctypes.c_int32), ("value", ctypes.c_int64), ("offset", ctypes.c_int64)]


class _Kept(ctypes.Structure):
    """tw_kept in native/driver.h."""

    _fields_ = [(name, ctypes.c_int64) for name in ("offset", "bytes", "parts")]


class _Piece(ctypes.Structure):
    """tw_piece in native/driver.h."""

    _fields_ = [("begin", ctypes.c_int64), ("data", ctypes.c_void_p)]


class _Table(ctypes.Structure):
    """tw_table in native/driver.h; the array of stages is not read here."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("stages", "buffers", "extents", "inputs", "outputs", "kept")),
        *((name, ctypes.c_int64) for name in ("weight_bytes", "arena_bytes", "scratch_bytes", "keeps_denormals")),
        ("stage", ctypes.c_void_p),
        ("buffer", ctypes.POINTER(_Buffer)),
        ("extent", ctypes.c_void_p),
        *((name, ctypes.POINTER(ctypes.c_int64)) for name in ("input_bytes", "output_bytes")),
        ("kept_weights", ctypes.POINTER(_Kept)),
    ]


def _begins(table: Any) -> list[int]:
    """Places among the weights where nothing is read across: where a constant begins."""
    if not table.weight_bytes:
        return []
    read = {b.value for b in table.buffer[: table.buffers] if b.space == _WEIGHT}
    kept = [range(k.offset + 1, k.offset + k.bytes) for k in table.kept_weights[: table.kept]]
    return sorted({0, *(place for place in read if not any(place in whole for whole in kept))})


class _Array(ctypes.Structure):
    """tw_array in native/driver.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_int),
        ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
        ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
        *((name, ctypes.c_void_p) for name in ("base", "element_type")),
        ("flags", ctypes.c_int),
    ]


class _Form(ctypes.Structure):
    """tw_form in native/driver.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("type", "element_type")),
        *((name, ctypes.c_int64) for name in ("rank", "flags")),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
    ]


class _Caller(ctypes.Structure):
    """tw_caller in native/driver.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("model", "forms")),
        *((name, ctypes.c_int64) for name in ("header", "first_item")),
    ]


def _forms(ports: Sequence[tuple[tuple[int, ...], np.dtype[Any]]], inputs: int) -> ctypes.Array[_Form]:
    """What tw_run_tuple compares with; it refers to the types in `ports` by address."""
    forms = (_Form * max(len(ports), 1))()
    for number, (shape, dtype) in enumerate(ports):
        extents = (ctypes.c_int64 * max(len(shape), 1))(*shape)
        flags = _READY_FLAGS if number < inputs else _READY_FLAGS | _WRITEABLE_FLAG
        forms[number] = _Form(id(ndarray), id(dtype), len(shape), flags, extents)
    return forms


def _first_item_bytes() -> int:
    """Where a tuple keeps its items, one pointer each, after the length that follows its header."""
    offset = tuple.__basicsize__
    probe = (object(), object())
    words = (ctypes.c_ssize_t * 2).from_address(id(probe) + offset)
    length = ctypes.c_ssize_t.from_address(id(probe) + object.__basicsize__).value
    if length != 2 or list(words) != [id(item) for item in probe]:
        raise ModelRunError("this Python lays out its tuples in a way not known here")
    return offset


def _header_bytes() -> int:
    """The size of an object's header, after which NumPy's binary interface promises every extension module the
    fields of an array. Reading them there is ten times faster than asking the array for its attributes."""
    header = object.__basicsize__
    probe = np.zeros((2, 3), np.uint8)
    array = _Array.from_address(id(probe) + header)
    kind = ctypes.c_void_p.from_address(id(probe) + header - ctypes.sizeof(ctypes.c_void_p)).value
    found = (array.data, array.rank, array.element_type, array.flags, kind)
    if found != (probe.ctypes.data, 2, id(probe.dtype), probe.flags.num, id(ndarray)) or array.shape[:2] != [2, 3]:
        raise ModelRunError("this Python or NumPy lays out its arrays in a way not known here")
    return header


class CpuModel:
    """A loaded model. run may be called from several threads at once; the calls take turns."""

    def __init__(
        self,
        built: BuiltModel,
        threads: int,
        *,
        run_spin_microseconds: float = RUN_SPIN_MICROSECONDS,
        idle_spin_microseconds: float = IDLE_SPIN_MICROSECONDS,
    ) -> None:
        """Raises ForeignError where the files are another user's, and none is trusted."""
        self._handle: ctypes.c_void_p | None = None
        if not 1 <= threads <= MAX_THREADS:
            raise ModelRunError(f"threads must be between 1 and {MAX_THREADS}, not {threads}")
        for what in built.permissions:
            request(what)
        try:
            library = load_library(built.library, ctypes.CDLL, trust=built.trust)
        except OSError as error:
            raise ModelRunError(f"cannot load the model: {error}") from error
        if missing := next((name for name in _NEEDED if not hasattr(library, name)), None):
            raise ModelRunError(f"cannot load the model: {built.library} is no library of one, it has no '{missing}'")
        self.threads = threads
        self.built = built
        self._library = library
        self._read_table()
        self._spins = [ctypes.c_int64(int(us * 1000)) for us in (run_spin_microseconds, idle_spin_microseconds)]
        self._weights = map_weights(built.weights, self._weight_bytes, trust=built.trust)
        self._handle = self._created(self._weights)
        self._header = ctypes.c_int64(_header_bytes())
        self._run_objects = library.tw_run_objects
        self._unchecked = built.unchecked
        self._checking = Lock()
        # the quick way has no model before its weights are checked
        self._caller = _Caller(None if self._unchecked else self._handle, None, self._header.value, _first_item_bytes())
        self._pack = struct.Struct(f"{len(self.input_bytes) + len(self.output_bytes)}P").pack
        self._raised: dict[int, BaseException] = {}  # by a signal's handler during a run, by thread
        self._watch = _Watch(_watching(self._raised).__next__)
        self._library.tw_set_watch(self._handle, self._watch)

    def _created(self, weights: MappedWeights) -> ctypes.c_void_p:
        pieces = (_Piece * max(len(weights.pieces), 1))(*(_Piece(p.begin, p.data.ctypes.data) for p in weights.pieces))
        create = self._library.tw_create
        create.restype = ctypes.c_void_p
        handle = create(pieces, ctypes.c_int64(len(weights.pieces)), ctypes.c_int(self.threads), *self._spins)
        if not handle:
            raise ModelRunError("not enough memory for the model's activations")
        # Ready-made ctypes values and no argtypes: conversions would double the cost of a call.
        return ctypes.c_void_p(handle)

    def share_weights(self, others: Sequence[CpuModel]) -> None:
        """Weights that others have, too, are read where those lie from here on. Nothing of this model may run."""
        own = self._weights.cut(self.weight_begins)
        weights = own.shared([other.weights.cut(other.weight_begins) for other in others])
        if self._handle is None or all(a is b for a, b in zip(own.pieces, weights.pieces, strict=True)):
            return
        handle = self._created(weights)
        self.close()
        self._handle, self._weights = handle, weights
        self._caller.model = None if self._unchecked else handle
        self._library.tw_set_watch(handle, self._watch)

    def cancel(self) -> None:
        """End the run in progress, if there is one, from another thread."""
        if self._handle is not None:
            self._library.tw_cancel(self._handle)

    def _failed(self, status: int) -> BaseException:
        """What a run that did not go through is told by."""
        if status == _CANCELLED:
            return self._raised.pop(get_ident(), None) or CancelledError("the run was cancelled")
        return ModelRunError(f"the system refused to start {self.threads - 1} worker threads; try fewer threads")

    def _read_table(self) -> None:
        self._library.tw_describe.restype = ctypes.POINTER(_Table)
        table = self._library.tw_describe().contents
        self.input_bytes: tuple[int, ...] = tuple(table.input_bytes[: table.inputs])
        self.output_bytes: tuple[int, ...] = tuple(table.output_bytes[: table.outputs])
        self.stage_count: int = table.stages
        self.arena_bytes: int = table.arena_bytes
        self.scratch_bytes: int = table.scratch_bytes
        self.denormals: Denormals = "keep" if table.keeps_denormals else "flush"
        self._weight_bytes: int = table.weight_bytes
        self.weight_begins = _begins(table)
        self._sizes = self.input_bytes + self.output_bytes

    @property
    def weights(self) -> MappedWeights:
        """All packed weights, read-only."""
        return self._weights

    def run(self, inputs: Sequence[NDArray[Any]], outputs: Sequence[NDArray[Any]]) -> None:
        """Fill outputs. Arrays are C-contiguous and of the compiled sizes; what they mean is the caller's affair."""
        status = self._run_objects(self._handle, self._pack(*self._checked(inputs, outputs)), self._header)
        if status != 0:
            raise self._failed(status)

    def quick_caller(self, ports: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> Callable[[tuple[Any, ...]], bool]:
        """A function of a tuple: the inputs, then the outputs to fill. It tells whether it has run: it does nothing
        unless each is a NumPy array of just the type and shape in `ports`, ready to be read or written in place.

        Native code looks at the arrays: asking them for attributes costs more than a small model's arithmetic."""
        if len(ports) != len(self._sizes):
            raise ModelRunError(f"the model has {len(self._sizes)} inputs and outputs, not {len(ports)}")
        caller, run = self._caller, self._library.tw_run_tuple
        self._kept = (tuple(ports), forms := _forms(ports, len(self.input_bytes)))
        caller.forms = ctypes.addressof(forms)
        reference, py_object = ctypes.byref(caller), ctypes.py_object

        def call(arrays: tuple[Any, ...]) -> bool:
            status: int = run(reference, py_object(arrays))
            if status in (_NO_THREADS, _CANCELLED):
                raise self._failed(status)
            return status == 0

        return call

    def address_caller(self) -> Callable[[Sequence[int], Sequence[int]], None]:
        """A function of the addresses of inputs and of outputs. What lies there, contiguous and of the compiled sizes,
        and that outputs lie apart, is the caller's affair."""
        pack_inputs = struct.Struct(f"{len(self.input_bytes)}P").pack
        pack_outputs = struct.Struct(f"{len(self.output_bytes)}P").pack
        run = self._library.tw_run

        def call(inputs: Sequence[int], outputs: Sequence[int]) -> None:
            if self._handle is None:
                raise ModelRunError("the model is closed")
            if self._unchecked is not None:
                self._check_weights()
            status = run(self._handle, pack_inputs(*inputs), pack_outputs(*outputs))
            if status != 0:
                raise self._failed(status)

        return call

    def profile(self, inputs: Sequence[NDArray[Any]], outputs: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
        """Run once with a barrier around every stage; nanoseconds of each stage."""
        self._checked(inputs, outputs)
        stage_ns = np.zeros(max(self.stage_count, 1), np.int64)
        status = self._library.tw_run_profile(
            self._handle, _pointers(inputs), _pointers(outputs), ctypes.c_void_p(stage_ns.ctypes.data)
        )
        if status != 0:
            raise self._failed(status)
        return stage_ns[: self.stage_count]

    def _checked(self, inputs: Sequence[NDArray[Any]], outputs: Sequence[NDArray[Any]]) -> list[int]:
        """The addresses of the array objects, inputs first. Small models notice every step here."""
        if self._handle is None:
            raise ModelRunError("the model is closed")
        if self._unchecked is not None:
            self._check_weights()
        if len(inputs) != len(self.input_bytes) or len(outputs) != len(self.output_bytes):
            expected = f"{len(self.input_bytes)} inputs and {len(self.output_bytes)} outputs"
            raise ModelRunError(f"the model has {expected}, called with {len(inputs)} and {len(outputs)}")
        objects = []
        sizes = iter(self._sizes)
        for arrays in (inputs, outputs):
            for array in arrays:
                size = next(sizes)
                if not isinstance(array, ndarray) or array.nbytes != size or not array.flags.c_contiguous:
                    raise ModelRunError(f"expected a C-contiguous NumPy array of {size} bytes, got {_describe(array)}")
                objects.append(id(array))
        return objects

    def _check_weights(self) -> None:
        with self._checking:
            if self._unchecked is not None:
                self._unchecked()
                self._unchecked = None
                self._caller.model = self._handle

    def close(self) -> None:
        """Stop the workers and free the memory. No other thread may be inside run."""
        if self._handle is not None:
            self._caller.model = None
            self._library.tw_destroy(self._handle)
            self._handle = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _watching(raised: dict[int, BaseException]) -> Iterator[int]:
    """What the thread of a long run looks at from time to time: whether to end it. Python runs the handlers of signals
    that have come where it goes on here, inside the try; a function would run them at its entrance, in front of one."""
    ends = 0
    while True:
        try:
            while True:
                yield ends
                ends = 0
        except GeneratorExit:
            return
        except BaseException as error:  # whatever a handler raises, Ctrl-C's KeyboardInterrupt above all, ends the run
            raised[get_ident()] = error
            ends = 1


class _Sized(Protocol):
    @property
    def input_bytes(self) -> tuple[int, ...]: ...
    @property
    def output_bytes(self) -> tuple[int, ...]: ...


def fits(model: _Sized, inputs: Sequence[tuple[Any, Any, Any]], outputs: Sequence[tuple[Any, Any, Any]]) -> bool:
    """Whether arrays of these types and shapes are of the sizes that the model's own code reads and writes."""
    sides = ((inputs, model.input_bytes), (outputs, model.output_bytes))
    return all(tuple(prod(shape) * dtype.bytes for _, dtype, shape in side) == sizes for side, sizes in sides)


def _pointers(arrays: Sequence[NDArray[Any]]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * max(len(arrays), 1))(*(array.ctypes.data for array in arrays))


def _describe(array: object) -> str:
    if not isinstance(array, ndarray):
        return type(array).__name__
    return f"{array.nbytes} bytes{'' if array.flags.c_contiguous else ', not contiguous'}"
