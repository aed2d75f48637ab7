"""Souffle (ASPLOS 2024): V0 to V4, each with one step more of the whole model as one program of tensor expressions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bench.papers.steps import Step, planned
from tilewright.intrinsics.gpu_matrix import FORMS
from tilewright.ir.forms.graph import Graph
from tilewright.options import Options
from tilewright.target import Target
from tilewright.tile_graph.plan.form import COPIES, Hold, Leaf, Plan, Tile
from tilewright.tile_graph.plan.leaf_form import ThreadForm, VectorForm

MODELS = ("bert_384", "swin_b", "lstm", "efficientnet_b0", "resnext101", "mmoe")  # the paper's six
SAID = (
    "Souffle, A100, batch 1, geomean over six models: V1 (horizontal) 2.14x of V0, V2 (vertical) 1.85x of V1, V3 "
    "(barriers of the grid) 1.17x of V2, V4 (reuse and pipelining in the kernel) 1.05x of V3.",
    "Kernels of V4 there: BERT 24, ResNeXt 105, LSTM 1, EfficientNet 66, Swin-B 53, MMoE 1; MB read 227, 470, 10.6, "
    "87, 283, 0.058.",
)


def steps(graph: Graph, target: Target, options: Options) -> Iterator[Step]:
    """Horizontal before vertical, as the paper has them."""
    plain = replace(options, schedule="none", merging="off")
    yield planned("V0 an expression a kernel", graph, target, plain)
    yield planned("V1 + horizontal", graph, target, replace(options, schedule="none"))
    yield planned("V2 + vertical", graph, target, replace(options, schedule="register"))
    whole = planned("V4 + pipelining", graph, target, options)
    yield Step("V3 + joined kernels", whole.program, unpipelined(whole.plan))
    yield whole


def unpipelined(plan: Plan) -> Plan:
    """A plan whose kernels ask for nothing ahead of its use."""
    return replace(plan, body=_unasked(plan.body).map_leaves(_waiting))


def _unasked(tile: Tile) -> Tile:
    body = tuple(_unasked(node) if isinstance(node, Tile) else node for node in tile.body)
    fewest = max((_fewest(leaf) for leaf in tile.leaves), default=1)
    holds = tuple(_in_stages(hold, fewest) for hold in tile.holds if hold.fill != "prefetch")
    return replace(tile, body=body, holds=holds)


def _fewest(leaf: Leaf) -> int:
    """Stages that an instruction cannot do without: four warps as one multiply two parts while another is copied."""
    return 3 if leaf.instruction in FORMS and FORMS[leaf.instruction].warps > 1 else 1


def _in_stages(hold: Hold, fewest: int) -> Hold:
    return replace(hold, stages=min(hold.stages, fewest)) if hold.fill in COPIES else hold


def _waiting(leaf: Leaf) -> Leaf:
    """`at_once` is the ring of a sum through shared memory only where operands pass it in steps."""
    if isinstance(leaf.form, VectorForm):
        return leaf.with_options(VectorForm, ahead=0, soon=0)
    return leaf.with_options(ThreadForm, at_once=1) if leaf.options(ThreadForm).step else leaf
