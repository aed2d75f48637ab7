"""Lowers one kernel of a Plan for a CPU: a parallel loop over tiles around the leaves of a tile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tilewright.backend.cpu.amx.tiles import CpuTileInstruction
from tilewright.backend.cpu.depthwise.lower_window import CpuWindow
from tilewright.backend.cpu.dot.instruction import CpuInstruction
from tilewright.backend.cpu.leaf.padding import filled_up
from tilewright.backend.cpu.prefetch.prefetch import with_prefetches
from tilewright.backend.cpu.vector.nest import CpuNest
from tilewright.errors import InternalError
from tilewright.ir.forms.expr import Axis
from tilewright.ir.forms.loops import Alloc, For, ForKind, If, Stmt
from tilewright.ir.forms.tensor import Layout, Tensor
from tilewright.lower.items import Ahead, Item, Loop
from tilewright.lower.kernel import Binding, KernelLowering, ScanView
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.streams import Work
from tilewright.tile_graph.plan.form import Tile
from tilewright.tile_graph.plan.leaf_form import DotForm, LeafForm, TileForm, WindowForm

_LOWERED: Mapping[type[LeafForm], type[CpuNest]] = {
    DotForm: CpuInstruction, TileForm: CpuTileInstruction, WindowForm: CpuWindow,
}  # fmt: skip


class CpuKernel(KernelLowering):
    """Tiles handed out to cores; each keeps what it holds in scratch memory of its own."""

    leaves_out = True

    def grid(self, index: Axis, items: Sequence[Item]) -> tuple[Stmt, ...]:
        body = with_prefetches(self._statements(items), self.plan.prefetched, items, self.access)
        for buffer in reversed(self.kept):
            body = (Alloc(buffer, body),)
        return (For(index, ForKind.PARALLEL, body),)

    def _statements(self, items: Sequence[Item]) -> tuple[Stmt, ...]:
        body: list[Stmt] = []
        for item in items:
            if isinstance(item, Loop):
                body.append(For(item.axis, ForKind.SERIAL, self._statements(item.body)))
            elif isinstance(item, Ahead):
                body.append(If(item.condition, self._statements(item.body)))
            elif isinstance(item, Work):
                body.extend(self._leaf_statements(item))
            else:
                raise InternalError(f"kernel '{self.plan.name}': a core neither meets others nor runs leaves together")
        return tuple(body)

    def _leaf_statements(self, work: Work) -> tuple[Stmt, ...]:
        kind = _LOWERED.get(type(work.leaf.form), CpuNest)
        access = self.access_of(work)
        lowered = kind(work.nest, work.leaf, work.box, dict(work.limits), access, self.names, self.step)
        return (*lowered.statements(), *filled_up(work.nest, work.box, access, work.leaf.lanes))


def lower_cpu_kernel(
    tile: Tile, nests: Sequence[Nest], layout: Callable[[Tensor], Layout], scan: ScanView | None
) -> Binding:
    return CpuKernel(tile, nests, layout, scan).binding()
