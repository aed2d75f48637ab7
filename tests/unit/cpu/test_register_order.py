"""The order of a register tile's multiply-adds: it decides what waits in registers, whatever loops stand around it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.cpu_stages import model_of, programs
from tests.plans import resized, with_kernels
from tilewright.backend import backend_for
from tilewright.backend.cpu.kernel.candidates import feasible_plans
from tilewright.backend.cpu.kernel.variants import variants_of
from tilewright.ir.forms.compute import all_computes
from tilewright.ir.forms.expr import walk
from tilewright.ir.forms.loops import For, ForKind, Kernel, Stmt, Store
from tilewright.lower.program import lower_program
from tilewright.schedule.planner import make_plan
from tilewright.target import Target, machine
from tilewright.tile_graph.plan.leaf_form import VectorForm
from tilewright.tile_graph.traffic.held import plan_nests

AVX512 = machine("emerald_rapids")
NEON = machine("neoverse_n1")


def kernel(target: Target, rows: int, vectors: int, rows_inside: bool, sums: int = 128) -> Kernel:
    """A product of 48 rows, so many sums and 96 columns with that register tile."""
    weights = {"w": np.ones((sums, 96), np.float32)}
    model = model_of([("MatMul", ["x", "w"], "y", {})], {"x": (48, sums)}, {"y": (48, 96)}, weights)
    program = programs(model, target)["layout"]
    plan = make_plan(program, target, "none")
    chosen = plan.kernels[0]
    variants = variants_of(chosen, plan_nests(chosen, all_computes(program)), program, plan, target)
    order = ("o1", "o0", "r0") if rows_inside else ("o0", "o1", "r0")
    lanes = target.lanes(4)
    wanted = {"o0": rows, "o1": vectors * lanes}
    nest = next(p for p in feasible_plans(variants.nests[0], variants.context)
                if dict(p.register) == wanted and p.order == order and not p.options(VectorForm).cut)  # fmt: skip
    made = resized(chosen.with_leaves({nest.tensor: nest}), program, wanted)
    layouts = {**dict(plan.layouts), **{t.name: layout for t, layout in variants.layouts(made).items()}}
    changed = replace(with_kernels(plan, [made]), layouts=tuple(sorted(layouts.items())))
    return lower_program(program, changed, backend_for(target).lower_kernel).kernels[0]


def unrolled_around_sums(body: tuple[Stmt, ...], around: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The unrolled axes around every multiply-add of a whole block, the outermost first."""
    found: list[tuple[str, ...]] = []
    for statement in body:
        if isinstance(statement, Store) and any("*" in repr(n) for n in walk(statement.value)):
            found.append(around)
        inside = around
        if isinstance(statement, For) and statement.kind is ForKind.UNROLL:
            inside = (*around, statement.axis.name)
        for part in ("body", "then", "otherwise"):
            found.extend(unrolled_around_sums(getattr(statement, part, ()) or (), inside))
    return found


@pytest.mark.parametrize("rows_inside", [False, True])
def test_broadcasts_come_one_at_a_time(rows_inside: bool) -> None:
    orders = unrolled_around_sums(kernel(AVX512, 12, 2, rows_inside).body)
    assert ("i0_u", "i1_u") in orders and ("i1_u", "i0_u") not in orders


@pytest.mark.parametrize("rows_inside", [False, True])
@pytest.mark.parametrize("sums", [16, 128])
@pytest.mark.parametrize("rows, vectors", [(8, 2), (4, 4)])
def test_rows_read_as_vectors_wait_for_one_vector_at_a_time(
    rows: int, vectors: int, rows_inside: bool, sums: int
) -> None:
    body = kernel(NEON, rows, vectors, rows_inside, sums).body
    orders = [o for o in unrolled_around_sums(body) if {"i0_u", "i1_u"} <= {*o}]
    assert orders
    assert all(next(a for a in o if a in ("i0_u", "i1_u")) == "i1_u" for o in orders)
