"""Rows of a product stay in the first cache while panels of weights pass by them, where they are more than it holds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

from tests.cpu_stages import model_of
from tilewright.backend.traffic import traffic_of
from tilewright.compiler.pipeline import Artifact, build
from tilewright.errors import InternalError
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.loops import For, statements
from tilewright.options import Options
from tilewright.target import Target, machine
from tilewright.tile_graph.check.kernels import check_plan
from tilewright.tile_graph.plan.form import Leaf
from tilewright.tile_graph.plan.leaf_form import VectorForm
from tilewright.tile_graph.plan.text import plan_text

N1 = machine("neoverse_n1")
SMALL = replace(N1, levels=tuple(replace(x, capacity=4096) if x.name == "L1" else x for x in N1.levels))


def product(many: int, rows: int, inner: int, columns: int) -> ModelProto:
    weights = np.random.default_rng(0).standard_normal((many, inner, columns)).astype(np.float32)
    shapes = {"x": (many, rows, inner)}, {"y": (many, rows, columns)}
    return model_of([("MatMul", ["x", "w"], "y", {})], *shapes, {"w": weights})


def layer(images: int, rows: int, inner: int, columns: int) -> ModelProto:
    """The same weights for all images, whose rows are walked as one."""
    weights = np.random.default_rng(0).standard_normal((inner, columns)).astype(np.float32)
    shapes = {"x": (images, rows, inner)}, {"y": (images, rows, columns)}
    return model_of([("MatMul", ["x", "w"], "y", {})], *shapes, {"w": weights})


def made(model: ModelProto, target: Target, **options: object) -> Artifact:
    chosen = Options(stop_after="loops", contraction="direct", **options)  # type: ignore[arg-type]
    return build(load(model, {}), target, chosen)


def leaves(artifact: Artifact) -> list[Leaf]:
    assert artifact.plan is not None
    return [leaf for kernel in artifact.plan.kernels for leaf in kernel.leaves]


def part_loops(artifact: Artifact) -> list[For]:
    assert artifact.loops is not None
    found = [s for k in artifact.loops.kernels for s in statements(k.body) if isinstance(s, For)]
    return [s for s in found if s.axis.name.endswith("_part")]


def edited(model: ModelProto, target: Target, folder: Path, **changed: int) -> Artifact:
    """The model by its plan with leaves changed, every stage verified."""
    made(model, target, dump=folder)
    (file,) = folder.glob("*-plan.json")

    def change(node: Any) -> Any:
        if isinstance(node, list):
            return [change(part) for part in node]
        if not isinstance(node, dict):
            return node
        return {k: change(v) for k, v in node.items()} | ({"form": {"vector": changed}} if "register" in node else {})

    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    return made(model, target, overrides=(("plan", file),), verify=True)


def test_rows_that_are_more_than_the_first_cache_stay_in_parts() -> None:
    artifact = made(product(7, 1024, 128, 256), N1)
    (leaf,) = leaves(artifact)
    near, block = leaf.options(VectorForm).near_rows, dict(leaf.register)["o1"]
    assert artifact.plan is not None and f"{near} rows near" in plan_text(artifact.plan)
    assert near > block and near % block == 0
    assert near * 128 * 4 < N1.nearest.capacity and part_loops(artifact)


def test_processors_with_other_caches_have_other_parts() -> None:
    artifact = made(product(7, 4096, 128, 256), machine("avx2_desktop"))
    assert [leaf.options(VectorForm).near_rows for leaf in leaves(artifact)] == [30]


@pytest.mark.parametrize(
    ("shape", "target"),
    [((7, 32, 128, 256), "neoverse_n1"), ((7, 4096, 128, 16), "neoverse_n1"), ((7, 4096, 2048, 256), "neoverse_n1"),
     ((7, 1024, 128, 256), "emerald_rapids")],
    ids=["all stay", "one panel", "few would stay", "panels would bring more"],
)  # fmt: skip
def test_no_parts(shape: tuple[int, int, int, int], target: str) -> None:
    artifact = made(product(*shape), machine(target))
    assert not any(leaf.options(VectorForm).near_rows for leaf in leaves(artifact)) and not part_loops(artifact)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("model", "near"),
    [(layer(1, 1403, 20, 130), 9), (layer(1, 402, 20, 130), 30), (layer(4, 33, 20, 130), 12),
     (product(3, 96, 20, 56), 24)],
    ids=["tiles of two sizes", "rows left over", "axes walked as one", "whole parts"],
)  # fmt: skip
def test_parts_change_nothing(model: ModelProto, near: int, tmp_path: Path) -> None:
    (leaf,) = leaves(made(model, SMALL))
    row = [a for a in leaf.order if a[0] == "o"][-1]
    assert row != leaf.vector
    block = dict(leaf.register)[row]
    assert part_loops(edited(model, SMALL, tmp_path, near_rows=near // block * block))


def test_parts_are_counted_as_traffic() -> None:
    """The first cache takes the rows once instead of once a panel."""
    artifact = made(product(7, 1024, 128, 256), N1)
    plan, program = artifact.plan, artifact.program
    assert plan is not None and program is not None
    (leaf,) = leaves(artifact)
    without = replace(plan, body=plan.body.with_leaves({leaf.tensor: leaf.with_options(VectorForm, near_rows=0)}))
    moved = [traffic_of(program, each, N1).values() for each in (without, plan)]
    before, after = (sum(k.by_level[2].total for k in kernels) for kernels in moved)
    assert after < 0.8 * before


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"near_rows": 7}, "whole register tiles"), ({"ahead": 1}, "blocks of rows are inside its panels")],
    ids=["not whole", "prefetching as well"],
)
def test_what_cannot_be_kept_is_refused(changed: dict[str, int], said: str) -> None:
    artifact = made(product(7, 1024, 128, 256), N1)
    plan, program = artifact.plan, artifact.program
    assert plan is not None and program is not None
    (leaf,) = leaves(artifact)
    wrong = plan.body.with_leaves({leaf.tensor: leaf.with_options(VectorForm, **changed)})
    with pytest.raises(InternalError, match=said):
        check_plan(replace(plan, body=wrong), program)
