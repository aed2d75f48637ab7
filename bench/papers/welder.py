"""Welder (OSDI 2023): reuse at no level, in registers, at the level of tiles, and at levels nearer and farther."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bench.papers.steps import Step, planned
from tilewright.ir.forms.graph import Graph
from tilewright.options import Options
from tilewright.schedule.inner_tiles import inner_of
from tilewright.target import Target
from tilewright.tile_graph.plan.form import Tile

MODELS = ("nafnet", "vit_s32", "swin_t")  # those of the paper's own ablation
SAID = (
    "Welder, V100, float32, batch 64, mean of NAFNet, ViT and Swin: registers against none latency -52%, launches "
    "-67%, transactions of memory -52%, bytes of intermediates -66%;",
    "shared memory on top of registers a further -29%, -60%, -25%, -65%.",
)


def steps(graph: Graph, target: Target, options: Options) -> Iterator[Step]:
    """All without merging, which is none of Welder's. Without an outer cache nothing can be connected there."""
    options = replace(options, merging="off")
    yield planned("none", graph, target, replace(options, schedule="none"))
    yield planned("registers", graph, target, replace(options, schedule="register"))
    near = planned(f"+ {target.local.name}", graph, without_outer(target), options)
    flat = _flat(near)
    yield flat
    if flat.plan != near.plan:
        yield replace(near, name="+ nearer")
    if target.shared_cache is not None:
        yield planned(f"+ {target.shared_cache.name}", graph, target, options)


def without_outer(target: Target) -> Target:
    return replace(target, levels=tuple(x for x in target.levels if x is not target.shared_cache))


def _flat(step: Step) -> Step:
    """Without the tiles inside those of kernels."""
    kernels = {k.name: _undone(k) for k in step.plan.kernels if inner_of(k) is not None}
    return replace(step, plan=step.plan.with_kernels(kernels))


def _undone(kernel: Tile) -> Tile:
    body: list[object] = []
    holds = list(kernel.holds)
    for node in kernel.body:
        is_inner = isinstance(node, Tile) and node.over == "order" and node.sizes
        body.extend(node.body if is_inner and isinstance(node, Tile) else (node,))
        holds.extend(node.holds if is_inner and isinstance(node, Tile) else ())
    return replace(kernel, body=tuple(body), holds=tuple(holds))  # type: ignore[arg-type]
