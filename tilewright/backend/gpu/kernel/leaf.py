"""Lowers a leaf by the form that its plan gives it: tensor cores, sums through shared memory, packets, or threads."""

from __future__ import annotations

from tilewright.backend.gpu.matrix.group import contract_of
from tilewright.backend.gpu.threads.contract import GpuContract
from tilewright.backend.gpu.threads.elementwise import PackedMap
from tilewright.backend.gpu.threads.nest import GpuNest
from tilewright.backend.gpu.threads.window import WindowSum
from tilewright.backend.gpu.threads.window_plan import is_window
from tilewright.ir.forms.loops import Stmt
from tilewright.lower.nesting import alloc


def leaf_statements(nest: GpuNest) -> tuple[Stmt, ...]:
    if nest.warps is not None:
        return contract_of(nest, nest.warps, nest.operands).statements()
    if nest.options.step:
        body = GpuContract(nest).statements()
    elif nest.nest.monoid is None and (nest.plan.lanes > 1 or nest.options.at_once > 1):
        body = PackedMap(nest).statements()
    elif is_window(nest.plan, nest.nest):
        body = WindowSum(nest).statements()
    else:
        body = nest.statements()
    return alloc(nest.shared, body)
