"""The GPU half of the pipeline: Loops to CUDA C++, and a model that runs on a device or under the emulator."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

from tilewright.backend.gpu.driver import missing_for_cuda
from tilewright.backend.gpu.kernel.limits import limits_of
from tilewright.backend.gpu.kernel.shared_arena import place_shared
from tilewright.backend.gpu.streamed import within_memory
from tilewright.errors import ToolError
from tilewright.ir.forms.compute import Program
from tilewright.ir.forms.expr import axes_of, loads
from tilewright.ir.forms.loops import Buffer, If, Kernel, LoopProgram, Store, statements
from tilewright.ir.forms.tensor import elements
from tilewright.lower.memory import arena
from tilewright.lower.weights import pack_weights
from tilewright.options import Options
from tilewright.render.cuda import render_kernel, written_params
from tilewright.render.launch_shape import launch_shape, meets
from tilewright.runtime import BufferRef, Cache, CacheError, CompileError, ToolchainError, find_compiler, nvrtc
from tilewright.runtime.cores import usable_cores
from tilewright.runtime.emulator import Contract
from tilewright.runtime.gpu_model import EmulatedModel, GpuCall, GpuModelImage, LoadedKernel
from tilewright.runtime.ownership import ForeignError
from tilewright.runtime.weights import weight_bytes
from tilewright.target import GPUS, Target
from tilewright.tile_graph.plan.form import Plan

_CACHE_BYTES = 4 << 30


def early(target: Target, options: Options) -> AbstractContextManager[None]:
    """Nothing is compiled before all is rendered: a device's compiler runs in this process. Nothing is planned either
    where it could not run in the end."""
    missing = missing_for_cuda() if target.name == "cuda" and options.stop_after in (None, "machine") else None
    if missing is not None:
        way_out = "target 'cuda-emulated' runs its code on this CPU, and stop_after='source' shows it"
        raise ToolError(f"target 'cuda' cannot run here: {missing}; {way_out}")
    return nullcontext()


def built_by() -> tuple[str, ...]:
    """The compiler of kernels, and the GPU they run on."""
    from tilewright.runtime.cuda import device_name

    return nvrtc.version(), device_name()


def render(loops: LoopProgram, target: Target, early: None = None) -> dict[str, str]:
    """CUDA source of every distinct kernel."""
    return {k.name: render_kernel(k, place_shared(k).offsets) for k in loops.kernels}


def load(
    sources: dict[str, str], loops: LoopProgram, program: Program, plan: Plan, target: Target, options: Options,
    early: None = None,
) -> Any:  # fmt: skip
    """The model on a device ("cuda") or under the emulator ("cuda-emulated")."""
    if target.name not in GPUS:
        way_out = "--target cuda runs on the GPU that is here, and --stop-after source shows the code for this one"
        raise ToolError(f"'{target.name}' is a description to plan for; {way_out}")
    image = model_image(sources, loops, program, plan)
    if isinstance(options.device_memory, int):
        image = within_memory(image, weight_sizes(image, loops, program, plan), options.device_memory)
    jobs = usable_cores()
    try:
        cache = Cache(options.cache_dir, _CACHE_BYTES)
        if target.name == "cuda":
            from tilewright.runtime.cuda import CudaModel

            return CudaModel(image, cache, jobs=jobs)
        return EmulatedModel(image, cache, find_compiler(options.compiler), jobs, limits=limits_of(target))
    except (ToolchainError, CompileError, CacheError, ForeignError) as error:
        raise ToolError(str(error)) from error


def weight_sizes(image: GpuModelImage, loops: LoopProgram, program: Program, plan: Plan) -> dict[int, int]:
    """Bytes of every weight, by where it begins among all of them."""
    starts = sorted(pack_weights(loops, program, plan)[0].values())
    return {start: end - start for start, end in pairwise([*starts, weight_bytes(image.weights)])}


def _filled(kernel: Kernel) -> tuple[str, ...]:
    """Parameters that a launch writes from end to end: all it writes, but for a Scan's step of a stacked output, and
    what blocks leave out that a run tells."""
    partly: set[Buffer] = set()
    for stmt in statements(kernel.body):
        if isinstance(stmt, If) and any(loads(stmt.condition)):
            partly |= set(written_params(replace(kernel, body=stmt.then)))
    if kernel.step is not None:
        for stmt in statements(kernel.body):
            if isinstance(stmt, Store) and kernel.step in axes_of(*stmt.indices):
                partly.add(stmt.buffer)
    return tuple(p.name for p in written_params(kernel) if p not in partly)


def model_image(sources: dict[str, str], loops: LoopProgram, program: Program, plan: Plan) -> GpuModelImage:
    offsets, arena_bytes = arena(loops)
    weight_offsets, weights = pack_weights(loops, program, plan)
    rows = {t.name: t for t in loops.tensors}
    kernels = {k.name: k for k in loops.kernels}
    shapes = {name: launch_shape(k) for name, k in kernels.items()}
    made = tuple(
        LoadedKernel(
            name, sources[name], shapes[name].threads, place_shared(k).bytes, Contract(writes_all=_filled(k)), meets(k)
        )
        for name, k in kernels.items()
    )
    calls = []
    for call in loops.calls:
        refs = []
        for name in call.arguments:
            row = rows[name]
            if row.role in ("input", "output"):
                refs.append(BufferRef(row.role, row.position))  # type: ignore[arg-type]
            elif row.role == "constant":
                refs.append(BufferRef("weight", weight_offsets[name]))
            else:
                refs.append(BufferRef("arena", offsets[name]))
        x, y, z = (int(e) for e in shapes[call.kernel].grid)  # type: ignore[arg-type]
        step = call.step if kernels[call.kernel].step is not None else None
        calls.append(GpuCall(call.kernel, (x, y, z), tuple(refs), (), step))
    inputs = sorted((t for t in loops.tensors if t.role == "input"), key=lambda t: t.position)
    outputs = sorted((t for t in loops.tensors if t.role == "output"), key=lambda t: t.position)
    return GpuModelImage(
        made, tuple(calls), tuple(elements(t.shape) * t.dtype.bytes for t in inputs),
        tuple(elements(t.shape) * t.dtype.bytes for t in outputs), weights, arena_bytes,
    )  # fmt: skip
