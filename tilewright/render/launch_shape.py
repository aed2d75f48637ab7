"""How many blocks of how many threads a kernel is launched with, and whether its blocks wait for each other."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.errors import InternalError
from tilewright.ir.forms.bounds import static, upper
from tilewright.ir.forms.expr import Axis, Extent
from tilewright.ir.forms.loops import Barrier, For, ForKind, Kernel, Scope, Stmt, statements
from tilewright.target.instruction_sets import MOST_BLOCKS_YZ


@dataclass(frozen=True)
class LaunchShape:
    """How many blocks (x, y, z; expressions where symbols decide) of how many threads."""

    grid: tuple[Extent, Extent, Extent]
    threads: int


def launch_shape(kernel: Kernel) -> LaunchShape:
    """The innermost block axis is x, so neighbours along it run at about the same time and share the L2. Blocks of
    loops beside each other are numbered through."""
    blocks = axes_of_kind(kernel.body, ForKind.BLOCK)
    threads = axes_of_kind(kernel.body, ForKind.THREAD)
    beside = loops_over_blocks(kernel)
    if len(beside) > 1:
        if len(blocks) > len(beside) or len({a.extent for a in threads}) != 1 or len(threads) != len(beside):
            raise InternalError(f"{kernel.name}: blocks beside each other have one axis and as many threads each")
        known = [static(a.extent) for a in blocks]
        blocks = [Axis("block", sum(n for n in known if n is not None))]
        if None in known:
            raise InternalError(f"{kernel.name}: blocks beside each other need fixed numbers of them")
    elif len(blocks) > 3 or len(threads) > 1:
        raise InternalError(f"{kernel.name}: {len(blocks)} block axes and {len(threads)} thread axes")
    count = static(threads[0].extent) if threads else 1
    if count is None or not 1 <= count <= 1024:
        raise InternalError(f"{kernel.name}: a block needs a fixed number of threads, 1 to 1024")
    if any(upper(axis.extent) > MOST_BLOCKS_YZ for axis in blocks[:-1]):
        raise InternalError(f"{kernel.name}: an outer block axis may exceed {MOST_BLOCKS_YZ} blocks")
    x, y, z = (*(axis.extent for axis in reversed(blocks)), 1, 1, 1)[:3]
    return LaunchShape((x, y, z), count)


def axes_of_kind(body: tuple[Stmt, ...], kind: ForKind) -> list[Axis]:
    return [s.axis for s in statements(body) if isinstance(s, For) and s.kind is kind]


def loops_over_blocks(kernel: Kernel) -> list[For]:
    """The outermost loops over blocks: several where kernels share a launch."""
    return [s for s in kernel.body if isinstance(s, For) and s.kind is ForKind.BLOCK]


def meets(kernel: Kernel) -> bool:
    """Whether the blocks of a kernel wait for each other: it takes two words for that behind all else."""
    return any(isinstance(s, Barrier) and s.scope is Scope.GRID for s in statements(kernel.body))
