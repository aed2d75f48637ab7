"""CPUs as a backend: tiles handed out to cores, leaves on vector and matrix registers, C as source text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilewright.backend.cpu import machine_code
from tilewright.backend.cpu.kernel.chains import join_calls
from tilewright.backend.cpu.kernel.inner import tile_again
from tilewright.backend.cpu.kernel.lower import CpuKernel, lower_cpu_kernel
from tilewright.backend.cpu.kernel.panels import constant_layouts
from tilewright.backend.cpu.kernel.persistent import persistent_scan
from tilewright.backend.cpu.kernel.residency import farthest_hold
from tilewright.backend.cpu.kernel.seconds import cpu_terms
from tilewright.backend.cpu.kernel.select import select_plan
from tilewright.backend.cpu.kernel.steps import plan_steps
from tilewright.backend.cpu.kernel.tile import choose_tile, choose_window, weights_ahead
from tilewright.backend.cpu.kernel.variants import CpuVariants, variants_of
from tilewright.backend.cpu.leaf.replan import other_leaves
from tilewright.backend.cpu.leaf.separate_views import separate_views
from tilewright.backend.cpu.leaf.trace import cpu_walk
from tilewright.backend.cpu.leaf.vectorise import streamed_leaves
from tilewright.backend.cpu.vector.in_turn import in_blocks, in_turn
from tilewright.backend.protocol import (
    Backend,
    Choice,
    Inner,
    KernelWriter,
    Measuring,
    PersistentScan,
    StepKernel,
    StepPlan,
)
from tilewright.backend.terms import KernelWork, Terms
from tilewright.ir.forms.compute import Compute, Program, Scan
from tilewright.ir.forms.expr import Axis
from tilewright.ir.forms.loops import LoopProgram
from tilewright.ir.forms.tensor import Layout, Tensor
from tilewright.lower.kernel import Binding, ScanView
from tilewright.lower.placed import Tree, tree_of
from tilewright.lower.unroll import unroll
from tilewright.options import Options
from tilewright.runtime.cores import usable_cores
from tilewright.runtime.processor import microarchitecture, processor_name
from tilewright.target import MemoryLevel, Target, why_not_here
from tilewright.tile_graph.algebra.context import NestContext
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.rolling import Overlap
from tilewright.tile_graph.algebra.streams import Stream
from tilewright.tile_graph.plan.form import Leaf, Plan, Tile

_ENOUGH_REGISTERS = 16  # for a dozen accumulators


class CpuBackend(Backend):
    launch = "cores"
    source_suffix = "c"
    flushes_denormals = True
    other_algorithms = True
    most_between = 1 << 32  # whose pages take longer to come by than a model's call, and which others want too
    runs_regions = True
    fills_by_sample = True
    streams_in_registers = False
    ends_loops = True
    compares_places = False
    least_rows = 1
    stream_worth = 1.0

    def plan_leaf(self, nest: Nest, context: NestContext) -> Leaf:
        return select_plan(nest, context)

    def other_leaves(self, nest: Nest, leaf: Leaf, shape: Mapping[Axis, int], context: NestContext) -> Sequence[Leaf]:
        return other_leaves(nest, leaf, shape, context)

    def separate_views(self, computes: Sequence[Compute], context: NestContext) -> frozenset[Tensor]:
        return separate_views(computes, context)

    def constant_layouts(self, nest: Nest, leaf: Leaf, context: NestContext) -> dict[Tensor, Layout]:
        return constant_layouts(nest, leaf, context)

    def choose_tile(
        self, nests: Sequence[Nest], leaves: Sequence[Leaf], context: NestContext, stored: frozenset[Tensor],
        fixed: Mapping[str, int], stream: Stream | None = None, blocks: Sequence[int] = (),
    ) -> Choice | None:  # fmt: skip
        leaves = streamed_leaves(nests, leaves, stream, context)
        return choose_tile(nests, leaves, context, stored, fixed, stream, blocks)

    def farthest_hold(self, nests: Sequence[Nest], context: NestContext, stored: frozenset[Tensor]) -> MemoryLevel:
        return farthest_hold(nests, context, stored)

    def choose_window(
        self, nests: Sequence[Nest], leaves: Sequence[Leaf], context: NestContext, stored: frozenset[Tensor],
        overlaps: Sequence[Overlap], fixed: Mapping[str, int] | None = None, step: int = 0,
    ) -> Choice | None:  # fmt: skip
        return choose_window(nests, leaves, context, stored, overlaps, fixed, step)

    def tile_again(
        self, nests: Sequence[Nest], leaves: Sequence[Leaf], context: NestContext, stored: frozenset[Tensor],
        choice: Choice, inner: Inner | None = None,
    ) -> Choice | None:  # fmt: skip
        return tile_again(nests, leaves, context, stored, choice, inner)

    def finish(
        self, nests: Sequence[Nest], leaves: tuple[Leaf, ...], choice: Choice, stream: Stream | None,
        context: NestContext, is_step: bool,
    ) -> tuple[tuple[Leaf, ...], int]:  # fmt: skip
        if stream is not None:
            leaves = streamed_leaves(nests, leaves, stream, context)
            return tuple(in_blocks(n, leaf, choice.block, stream) for n, leaf in zip(nests, leaves, strict=True)), 0
        if is_step:
            return leaves, 0
        leaves = tuple(in_turn(n, leaf, context.target) for n, leaf in zip(nests, leaves, strict=True))
        return weights_ahead(nests, leaves, choice, context), 0

    def plan_steps(
        self, kernels: Sequence[StepKernel], scan: Scan, context: NestContext
    ) -> tuple[list[StepPlan], tuple[str, ...]]:
        return plan_steps(kernels, scan, context)

    def persistent_scan(self, kernels: Sequence[StepKernel], scan: Scan, context: NestContext) -> PersistentScan | None:
        return persistent_scan(kernels, scan, context)

    def lower_kernel(
        self, tile: Tile, nests: Sequence[Nest], layout: Callable[[Tensor], Layout], scan: ScanView | None
    ) -> Binding:
        return lower_cpu_kernel(tile, nests, layout, scan)

    def memory_trace(
        self, tile: Tile, nests: Sequence[Nest], layout: Callable[[Tensor], Layout], scan: ScanView | None,
        target: Target | None = None,
    ) -> Tree:  # fmt: skip
        return tree_of(CpuKernel(tile, nests, layout, scan), cpu_walk(target))

    def kernel_terms(self, work: KernelWork, target: Target) -> Terms:
        return cpu_terms(work, target)

    def hurried(self, target: Target) -> Target:
        # a dozen accumulators keep multiply-adds under way: more of them read less, and are as much more text
        return replace(target, vector_registers=min(target.vector_registers, _ENOUGH_REGISTERS))

    def early(self, target: Target, options: Options) -> AbstractContextManager[Any]:
        return machine_code.early(target, options)

    def unroll(self, loops: LoopProgram) -> LoopProgram:
        return replace(loops, kernels=tuple(map(unroll, loops.kernels)))

    def join_calls(self, loops: LoopProgram, target: Target) -> LoopProgram:
        joined = tuple(join_calls(k, target.calls_together) for k in loops.kernels)
        return loops if joined == loops.kernels else replace(loops, kernels=joined)

    def render(self, loops: LoopProgram, target: Target, *, early: Any = None) -> dict[str, str]:
        return machine_code.render(loops, target, early=early)

    def load(
        self, sources: dict[str, str], loops: LoopProgram, program: Program, plan: Plan, target: Target,
        options: Options, *, weights_dir: Path | None = None, early: Any = None,
        blocks: Mapping[str, int] | None = None,
    ) -> Any:  # fmt: skip
        return machine_code.load(sources, loops, program, plan, target, options, weights_dir, early, blocks)

    def run_bytes(self, loops: LoopProgram, plan: Plan, options: Options) -> int | None:
        return machine_code.run_bytes(loops, plan, options)

    def variants(
        self, kernel: Tile, nests: Sequence[Nest], program: Program, plan: Plan, context: NestContext,
        write: KernelWriter,
    ) -> CpuVariants:  # fmt: skip
        return variants_of(kernel, nests, program, plan, context.target)

    def measuring(self, target: Target, options: Options) -> Measuring:
        threads = options.threads or usable_cores()
        return Measuring(processor_name(), microarchitecture(), threads, "thread" if threads == 1 else "wall")

    def built_by(self, target: Target, options: Options) -> tuple[str, ...]:
        return machine_code.built_by(options)

    def why_not_here(self, target: Target) -> str | None:
        return why_not_here(target)
