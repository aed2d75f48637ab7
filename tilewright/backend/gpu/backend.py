"""NVIDIA GPUs as a backend: tiles handed out to blocks, leaves to their threads, CUDA C++ as source text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tilewright.backend.gpu import machine_code
from tilewright.backend.gpu.constants import STREAM_WORTH
from tilewright.backend.gpu.driver import why_not_here
from tilewright.backend.gpu.kernel.block import finished_leaves, plan_gpu_nest, shared_out
from tilewright.backend.gpu.kernel.busy import LeafAround, warps_of
from tilewright.backend.gpu.kernel.constants import constant_layouts
from tilewright.backend.gpu.kernel.limits import check_limits
from tilewright.backend.gpu.kernel.lower import GpuKernel, lower_gpu_kernel
from tilewright.backend.gpu.kernel.persistent import persistent_scan
from tilewright.backend.gpu.kernel.seconds import gpu_terms
from tilewright.backend.gpu.kernel.tile import choose_gpu_tile, choose_register_stream
from tilewright.backend.gpu.kernel.together import launch_seconds, share_launch
from tilewright.backend.gpu.kernel.trace import MEMORIES, gpu_walk
from tilewright.backend.gpu.kernel.variants import GpuVariants
from tilewright.backend.gpu.matrix.plan import LEAST_ROWS
from tilewright.backend.gpu.stream.form import register_form
from tilewright.backend.protocol import Backend, Choice, KernelWriter, Measuring, PersistentScan, StepKernel
from tilewright.backend.terms import KernelWork, Terms
from tilewright.intrinsics.gpu_matrix import FORMS
from tilewright.ir.forms.compute import Program, Scan
from tilewright.ir.forms.loops import Buffer, LoopProgram, Memory
from tilewright.ir.forms.tensor import Layout, Tensor
from tilewright.lower.kernel import Binding, ScanView
from tilewright.lower.placed import Tree, tree_of
from tilewright.options import Options
from tilewright.target import Target
from tilewright.tile_graph.algebra.context import NestContext
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.streams import Stream, find_stream
from tilewright.tile_graph.plan.form import Leaf, Plan, Tile


class GpuBackend(Backend):
    launch = "blocks"
    source_suffix = "cu"
    flushes_denormals = False
    other_algorithms = False
    most_between = 1 << 62  # a device's memory is a model's own, and has a bound of its own
    runs_regions = False
    fills_by_sample = False
    # more blocks run at a time where each holds less, which the model does not see
    streams_in_registers = True
    ends_loops = False
    compares_places = True
    least_rows = LEAST_ROWS
    stream_worth = STREAM_WORTH

    def plan_leaf(self, nest: Nest, context: NestContext) -> Leaf:
        return plan_gpu_nest(nest, context)

    def constant_layouts(self, nest: Nest, leaf: Leaf, context: NestContext) -> dict[Tensor, Layout]:
        return constant_layouts(nest, leaf, context)

    def choose_tile(
        self, nests: Sequence[Nest], leaves: Sequence[Leaf], context: NestContext, stored: frozenset[Tensor],
        fixed: Mapping[str, int], stream: Stream | None = None, blocks: Sequence[int] = (),
    ) -> Choice | None:  # fmt: skip
        if stream is not None:
            kept = choose_register_stream(nests, leaves, context, stored, fixed, stream)
            if kept is not None:
                return kept
        found = [choose_gpu_tile(nests, leaves, context, stored, fixed, stream, b) for b in blocks or (0,)]
        return min((c for c in found if c is not None), key=lambda c: c.seconds, default=None)

    def stream_in_registers(self, nests: Sequence[Nest], leaves: Sequence[Leaf]) -> Stream | None:
        stream = find_stream(nests) if any(x.instruction in FORMS for x in leaves) else None
        return None if stream is None or register_form(nests, leaves, stream) is None else stream

    def finish(
        self, nests: Sequence[Nest], leaves: tuple[Leaf, ...], choice: Choice, stream: Stream | None,
        context: NestContext, is_step: bool,
    ) -> tuple[tuple[Leaf, ...], int]:  # fmt: skip
        return finished_leaves(nests, leaves, choice, stream, context)

    def bind_units(
        self, kernel: Tile, nests: Sequence[Nest], leaves: tuple[Leaf, ...], choice: Choice, stream: Stream | None,
        context: NestContext,
    ) -> Tile:  # fmt: skip
        return shared_out(kernel, nests, leaves, choice, stream, context)

    def persistent_scan(self, kernels: Sequence[StepKernel], scan: Scan, context: NestContext) -> PersistentScan | None:
        return persistent_scan(kernels, scan, context)

    def share_launch(self, kernels: Sequence[Tile], target: Target) -> tuple[Tile, ...] | None:
        return share_launch(kernels, target)

    def launch_seconds(self, kernels: Sequence[Tile], target: Target) -> float:
        return launch_seconds(kernels, target)

    def lower_kernel(
        self, tile: Tile, nests: Sequence[Nest], layout: Callable[[Tensor], Layout], scan: ScanView | None
    ) -> Binding:
        return lower_gpu_kernel(tile, nests, layout, scan)

    def memory_trace(
        self, tile: Tile, nests: Sequence[Nest], layout: Callable[[Tensor], Layout], scan: ScanView | None,
        target: Target | None = None,
    ) -> Tree:  # fmt: skip
        (lanes,) = (n for n in tile.body if isinstance(n, Tile) and n.over == "lanes")
        shared: list[Buffer] = []
        around = None if target is None else LeafAround(nests, target, tile.tiles, warps_of(tile))
        tree, memories = tree_of(GpuKernel(tile, nests, layout, scan), gpu_walk(lanes, shared.append, around))
        return tree, {**memories, **dict.fromkeys(shared, Memory.SHARED)}

    def kernel_terms(self, work: KernelWork, target: Target) -> Terms:
        return gpu_terms([work], target)

    def launch_terms(self, works: Sequence[KernelWork], target: Target) -> Terms:
        return gpu_terms(works, target)

    def memory_at(self, target: Target, place: int) -> frozenset[Memory] | None:
        return MEMORIES[place - 1] if place <= len(MEMORIES) else None

    def early(self, target: Target, options: Options) -> AbstractContextManager[Any]:
        return machine_code.early(target, options)

    def check_limits(self, loops: LoopProgram, target: Target) -> None:
        check_limits(loops, target)

    def render(self, loops: LoopProgram, target: Target, *, early: Any = None) -> dict[str, str]:
        return machine_code.render(loops, target)

    def load(
        self, sources: dict[str, str], loops: LoopProgram, program: Program, plan: Plan, target: Target,
        options: Options, *, weights_dir: Path | None = None, early: Any = None,
        blocks: Mapping[str, int] | None = None,
    ) -> Any:  # fmt: skip
        assert not blocks, "batches are cut on CPUs"
        return machine_code.load(sources, loops, program, plan, target, options)

    def variants(
        self, kernel: Tile, nests: Sequence[Nest], program: Program, plan: Plan, context: NestContext,
        write: KernelWriter,
    ) -> GpuVariants:  # fmt: skip
        stored = frozenset(t for n in nests if n.tensor.name not in kernel.held for t in n.stores)
        return GpuVariants(kernel, tuple(nests), stored, context, write)

    def untunable(self, target: Target) -> str | None:
        if target.name == "cuda-emulated":
            return "the emulator's times say nothing about a GPU; --target cuda measures on the one that is here"
        return why_not_here(target)

    def measuring(self, target: Target, options: Options) -> Measuring:
        from tilewright.runtime.cuda import device_name

        return Measuring(device_name(), target.architecture, 1, "device")

    def built_by(self, target: Target, options: Options) -> tuple[str, ...]:
        return machine_code.built_by()

    def why_not_here(self, target: Target) -> str | None:
        return why_not_here(target)
