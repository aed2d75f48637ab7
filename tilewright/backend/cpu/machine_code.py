"""The CPU half of the pipeline: Loops to C, C to a shared object, and the object loaded with its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from tilewright.errors import ToolError
from tilewright.intrinsics.cpu import CPU
from tilewright.ir.forms.compute import Program
from tilewright.ir.forms.expr import loads
from tilewright.ir.forms.loops import If, Instruction, Kernel, LoopProgram, Memory, Store, statements
from tilewright.ir.forms.tensor import elements
from tilewright.lower.memory import arena, scratch
from tilewright.lower.weights import pack_weights
from tilewright.options import Options
from tilewright.render.c import render_as, render_kernel
from tilewright.runtime import (
    BufferRef,
    Cache,
    CacheError,
    CompileError,
    CpuModel,
    DriverJump,
    KeptWeights,
    KernelStage,
    ModelImage,
    ObjectCompiler,
    ToolchainError,
    build_with,
    default_flags,
    find_compiler,
    runtime_sources,
    this_machine,
)
from tilewright.runtime.cores import usable_cores
from tilewright.runtime.cpu_model import Balance
from tilewright.runtime.ownership import ForeignError
from tilewright.runtime.permissions import PermissionRefused, request
from tilewright.runtime.source_files import files
from tilewright.runtime.toolchain import Compiler, NativeMachine, for_kernels, for_runtime
from tilewright.target import Target, why_not_here
from tilewright.tile_graph.plan.form import Plan

_CACHE_BYTES = 4 << 30
_FILE_LENGTH = 1 << 16  # at least: a compiler's start is then a tenth of its time
_TOGETHER = 1 << 19  # of all files that are compiled at once: few for few cores, and there are files for all cores


def built_by(options: Options) -> tuple[str, ...]:
    """The C compiler with its flags, and this machine."""
    machine, compiler = this_machine(), find_compiler(options.compiler)
    return (compiler.version, *kernel_flags(options, compiler, machine), machine.identity)


def kernel_flags(options: Options, compiler: Compiler, machine: NativeMachine) -> tuple[str, ...]:
    return for_kernels(compiler, machine, hurried=options.effort == "fast")


def early(target: Target, options: Options) -> AbstractContextManager[ObjectCompiler | None]:
    """The C compiler, at work while the pipeline is still busy: the runtime's own sources need no plan, and a kernel
    needs no other kernel. None where no machine code is wanted, or none can be had: `load` then says why."""
    if options.stop_after not in (None, "machine") or why_not_here(target) is not None:
        return nullcontext()
    try:
        objects = _objects(options)
    except (ToolchainError, CacheError):
        return nullcontext()
    for name, text in runtime_sources().items():
        objects.start(name, text)
    return objects


def _objects(options: Options) -> ObjectCompiler:
    machine, compiler = this_machine(), find_compiler(options.compiler)
    cache = Cache(options.cache_dir, _CACHE_BYTES)
    # where plans are tried, one kernel changes at a time: the others are then found in the cache
    jobs = usable_cores()
    together = 0 if options.is_tuned else max(_FILE_LENGTH, _TOGETHER // jobs)
    flags, own = kernel_flags(options, compiler, machine), for_runtime(default_flags(compiler, machine))
    return ObjectCompiler(compiler, flags, machine, cache, jobs=jobs, file_length=together, own_flags=own)


def render(
    loops: LoopProgram, target: Target, dialect: str = "c", early: ObjectCompiler | None = None
) -> dict[str, str]:
    """C source of every distinct kernel, unrolled already; `early` begins with each file of them as soon as it is
    written."""
    sources: dict[str, str] = {}
    first: dict[str, str] = {}  # the kernel that has a text, by that without its name

    def written() -> Iterator[tuple[str, str]]:
        for k in loops.kernels:
            text = render_kernel(k, scratch(k)[0], dialect)
            same = first.setdefault(text.replace(f"void {k.name}(", "void ("), k.name)
            sources[k.name] = text if same == k.name or dialect != "c" else render_as(k.name, same)
            yield k.name, sources[k.name]

    for name, text in files(written(), early.file_length if early is not None else 0):
        if early is not None:
            early.start(name, text)
    return sources


def load(
    sources: dict[str, str], loops: LoopProgram, program: Program, plan: Plan, target: Target, options: Options,
    weights_dir: Path | None = None, early: ObjectCompiler | None = None, blocks: Mapping[str, int] | None = None,
) -> CpuModel:  # fmt: skip
    """Compile what the cache does not hold, link, map the weights and start the workers. Of inputs and outputs that
    have several `blocks`, by name, each run is for one after the other."""
    if (reason := why_not_here(target)) is not None:
        way_out = "stop after stage 'source' (--stop-after source) to have its code without running it"
        raise ToolError(f"the code for target '{target.name}' cannot run here: {reason}; {way_out}")
    try:
        with early or _objects(options) as objects:
            image = model_image(sources, loops, program, plan, options.denormals, blocks)
            for what in image.permissions:
                request(what)  # before anything is compiled for nothing
            built = build_with(objects, image, objects.cache if weights_dir is None else Cache(weights_dir))
        return CpuModel(built, options.threads or usable_cores())
    except (ToolchainError, CompileError, CacheError, PermissionRefused, ForeignError) as error:
        raise ToolError(str(error)) from error


def _permissions(loops: LoopProgram, sources: dict[str, str]) -> tuple[str, ...]:
    """What the instructions of these kernels need; in the portable dialect they are plain C."""
    found: dict[str, None] = {}
    for kernel in loops.kernels:
        for stmt in statements(kernel.body):
            row = CPU.get(stmt.name) if isinstance(stmt, Instruction) else None
            if row is not None and row.permission and not row.is_portable(sources.get(kernel.name, "")):
                found[row.permission] = None
    return tuple(found)


def model_image(
    sources: dict[str, str], loops: LoopProgram, program: Program, plan: Plan, denormals: str = "flush",
    blocks: Mapping[str, int] | None = None,
) -> ModelImage:  # fmt: skip
    several = blocks or {}
    offsets, arena_bytes = arena(loops)
    weight_offsets, weights = pack_weights(loops, program, plan)
    rows = {t.name: t for t in loops.tensors}
    kernels = {k.name: k for k in loops.kernels}
    tiles = {name: _tiles(k) for name, k in kernels.items()}
    scratch_bytes = {name: scratch(k)[1] for name, k in kernels.items()}
    written = {name: _written(k) for name, k in kernels.items()}
    balance: dict[str, Balance] = {name: "dynamic" if _may_skip(k) else "auto" for name, k in kernels.items()}
    stages = []
    hazards = CallHazards()
    steps = max((c.step for c in loops.calls), default=0) + 1
    entered = {place for jump in loops.jumps for place in (jump.at, jump.target)}
    for part, (number, call) in product(range(max(several.values(), default=1)), enumerate(loops.calls)):
        if number in entered:
            hazards = CallHazards()  # the driver has a barrier there
        refs = []
        touches: list[tuple[str, int, int, bool]] = []
        for position, name in enumerate(call.arguments):
            row = rows[name]
            ref = _reference(row.role, row.position, offsets.get(name, 0), weight_offsets.get(name, 0))
            if name in several:
                ref = replace(ref, offset=part * elements(row.shape) * row.dtype.bytes)
            refs.append(ref)
            if row.role != "constant":
                start = ref.value if ref.space == "arena" else (row.position << 48) + ref.offset
                touches.append(
                    (ref.space, start, start + elements(row.shape) * row.dtype.bytes, position in written[call.kernel])
                )
        # In every step of a Scan a worker takes the same tiles: its caches still hold their weights.
        repeated = kernels[call.kernel].step is not None
        stages.append(KernelStage(call.kernel, tiles[call.kernel], tuple(refs), scratch_bytes[call.kernel],
                                  barrier_before=hazards.step(touches), first_extent=call.step,
                                  balance="static" if repeated else balance[call.kernel]))  # fmt: skip
    inputs = sorted((t for t in loops.tensors if t.role == "input"), key=lambda t: t.position)
    outputs = sorted((t for t in loops.tensors if t.role == "output"), key=lambda t: t.position)
    starts = [*sorted(weight_offsets.values()), weights.nbytes]
    ends = dict(pairwise(starts))
    kept = [KeptWeights(start, ends[start] - start, k.tiles)
            for k, steps in plan.launches() if steps is not None
            for start in (weight_offsets[h.tensor] for h in steps.holds)]  # fmt: skip
    sizes = {t.name: elements(t.shape) * t.dtype.bytes * several.get(t.name, 1) for t in (*inputs, *outputs)}

    def where(name: str) -> BufferRef:
        row = rows[name]
        return _reference(row.role, row.position, offsets.get(name, 0), weight_offsets.get(name, 0))

    first = loops.first_jumps()
    jumps = tuple(DriverJump(j.at, j.target, first.get(j.target, 0) + j.passed, None if j.condition is None
                             else where(j.condition)) for j in loops.jumps)  # fmt: skip
    return ModelImage(
        sources, tuple(stages), tuple(sizes[t.name] for t in inputs), tuple(sizes[t.name] for t in outputs), weights,
        arena_bytes, tuple(range(steps)),
        tuple(dict.fromkeys(kept)), "keep" if denormals == "keep" else "flush", _permissions(loops, sources), jumps,
    )  # fmt: skip


def run_bytes(loops: LoopProgram, plan: Plan, options: Options) -> int:
    """What a run allocates beside its inputs and outputs: the arena, every worker's scratch, and weights that
    recurrences keep copies of. The others are a file's pages, which the system reads and drops as it likes."""
    rows = {t.name: t for t in loops.tensors}
    kept = {h.tensor for _, steps in plan.launches() if steps is not None for h in steps.holds}
    copies = sum(elements(rows[name].shape) * rows[name].dtype.bytes for name in kept)
    most = max((scratch(kernel)[1] for kernel in loops.kernels), default=0)
    return arena(loops)[1] + (options.threads or usable_cores()) * most + copies


class CallHazards:
    """Tells which stages must wait: those that touch what one since the last barrier wrote, or write what it read."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int, bool]] = []

    def step(self, touches: list[tuple[str, int, int, bool]]) -> bool:
        clash = any(s[0] == t[0] and s[1] < t[2] and t[1] < s[2] and (s[3] or t[3]) for t in touches for s in self.seen)
        self.seen = list(touches) if clash else [*self.seen, *touches]
        return clash


def _reference(role: str, position: int, arena_offset: int, weight_offset: int) -> BufferRef:
    if role in ("input", "output"):
        return BufferRef(role, position)  # type: ignore[arg-type]
    return BufferRef("weight", weight_offset) if role == "constant" else BufferRef("arena", arena_offset)


def _tiles(kernel: Kernel) -> int:
    grid: Any = kernel.body[0]
    return int(grid.axis.extent)


def _may_skip(kernel: Kernel) -> bool:
    """Whether a run may have nothing to do in some tiles, as it tells itself: workers then take what is left."""
    grid: Any = kernel.body[0]
    return len(grid.body) == 1 and isinstance(grid.body[0], If) and bool(loads(grid.body[0].condition))


def _written(kernel: Kernel) -> set[int]:
    stored = {s.buffer for s in statements(kernel.body) if isinstance(s, Store) and s.buffer.memory is Memory.GLOBAL}
    return {i for i, p in enumerate(kernel.params) if p in stored}
