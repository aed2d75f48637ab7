"""The Plan: pure data that says everything about memory and parallelism; prints as text, round-trips through JSON.

Axes are named by position within their compute: o0, o1... are output axes, r0, r1... reduction axes.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from tilewright.errors import InternalError
from tilewright.ir.tensor import Layout, StorageAxis

Sizes = tuple[tuple[str, int], ...]  # axis name -> size, in order


@dataclass(frozen=True)
class NestPlan:
    """How one compute of a kernel runs on its tile."""

    tensor: str  # what the nest stores (its first output)
    core: str  # the reduction at its heart, or the map itself
    epilogue: tuple[str, ...] = ()  # maps applied on registers before the store, in order
    level: str = "DRAM"  # memory level its result is stored at
    phase: str = "tile"  # "tile": once a tile; "stream": in every block of the streamed axis; "final": after it
    vector: str | None = None  # axis whose elements share a vector register
    lanes: int = 1
    register: Sizes = ()  # register tile along output axes
    order: tuple[str, ...] = ()  # loops over blocks, outermost first, then reduction loops
    unroll: tuple[str, ...] = ()  # reduction axes written out
    alternate: bool = False  # blocks are walked backwards in every second step of a Scan
    idle: int | None = None  # the first step of a Scan that begins with zeros: there is nothing to sum up in it
    cut: Sizes = ()  # a reduction axis done in passes of so many elements, partial sums kept in the result's place
    ahead: int = 0  # elements of the next panel of weights asked for in every step of the sum
    row_lanes: int = 1  # steps of the innermost reduction whose broadcast operand is read as one vector
    threads: Sizes = ()  # GPU: threads along output axes; leftover threads take reduction axes
    split: int = 1  # GPU: threads that share one reduction
    pad: int = 0  # elements added to the innermost storage axis against bank conflicts
    stages: int = 1  # pipeline stages of the loads that feed it
    step: int = 0  # reduction elements at a time: staged in a GPU's shared memory, summed up in a CPU's tiles (0: all)
    packs: bool = False  # rows of a matrix instruction are copied block by block, though they could be read in place
    instruction: str | None = None  # the dot-product or matrix instruction of the intrinsics table that runs its core


@dataclass(frozen=True)
class EdgePlan:
    """What happens to one intermediate tensor: kept at a level, recomputed where it is used, or streamed."""

    tensor: str
    level: str
    mode: str  # "store", "recompute", "stream"


@dataclass(frozen=True)
class StreamPlan:
    """A reduction axis walked in blocks, with every dependent reduction carried along."""

    tensor: str  # the tensor whose axis is streamed
    axis: int
    block: int


@dataclass(frozen=True)
class KernelPlan:
    name: str
    roots: tuple[str, ...]  # nest results whose tiles make up the grid
    tile: Sizes  # tile of the root along its output axes
    nests: tuple[NestPlan, ...]
    edges: tuple[EdgePlan, ...] = ()
    stream: StreamPlan | None = None
    block_threads: int = 1
    scan: str | None = None  # first output of the Scan whose body this kernel is part of
    prefetch: tuple[str, ...] = ()  # tensors whose part is asked for before it is needed
    warms: tuple[str, ...] = ()  # weights of the steps that follow, brought near while this kernel computes
    keeps: tuple[str, ...] = ()  # weights that stay in the tile level from step to step, each tile its even part
    predicted_seconds: float = 0.0
    traffic: Sizes = ()  # predicted bytes by level
    footprint: int = 0  # bytes at the tile level
    tiles: int = 1
    reason: str = ""  # why these nests share a kernel and no others; for people alone


@dataclass(frozen=True)
class Plan:
    target: str
    schedule: str
    kernels: tuple[KernelPlan, ...]
    layouts: tuple[tuple[str, Layout], ...] = field(default_factory=tuple)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        try:
            return _plan(json.loads(text))
        except (KeyError, TypeError, ValueError) as error:
            raise InternalError(f"not a plan: {error}") from error

    def text(self) -> str:
        count = f"{len(self.kernels)} kernel{'' if len(self.kernels) == 1 else 's'}"
        lines = [f"plan for {self.target}, schedule {self.schedule}, {count}"]
        for name, layout in self.layouts:
            lines.append(f"  layout {name}: {layout_text(layout)}")
        for kernel in self.kernels:
            lines.extend(_kernel_lines(kernel))
        return "\n".join(lines) + "\n"


def layout_text(layout: Layout) -> str:
    parts = []
    for part in layout.order:
        size = "" if part.size is None else f"%{part.size}"
        parts.append(f"{part.axis}{'' if part.step == 1 else f'/{part.step}'}{size}")
    return "(" + ", ".join(parts) + ")"


def _kernel_lines(kernel: KernelPlan) -> list[str]:
    tile = ", ".join(f"{a}:{n}" for a, n in kernel.tile)
    lines = [f"kernel {kernel.name}  tile [{tile}] x {kernel.tiles}, footprint {kernel.footprint} B"]
    if kernel.scan:
        lines.append(f"  in every step of the scan of {kernel.scan}")
    if kernel.prefetch:
        lines.append(f"  asks early for {', '.join(kernel.prefetch)}")
    if kernel.warms:
        lines.append(f"  brings near {', '.join(kernel.warms)}, for the steps that follow")
    if kernel.keeps:
        lines.append(f"  keeps {', '.join(kernel.keeps)} near from step to step")
    if kernel.stream:
        lines.append(f"  stream {kernel.stream.tensor} axis {kernel.stream.axis} in blocks of {kernel.stream.block}")
    for nest in kernel.nests:
        register = " ".join(f"{a}:{n}" for a, n in nest.register)
        lines.append(f"  [{nest.phase}] {nest.tensor} at {nest.level}: core {nest.core}"
                     f"{''.join(f' + {name}' for name in nest.epilogue)}; vector {nest.vector} x {nest.lanes};"
                     f" register [{register}]; order {' '.join(nest.order)}{' to and fro' if nest.alternate else ''}"
                     f"{f' but at step {nest.idle}' if nest.idle is not None else ''}"
                     f"{' by ' + nest.instruction if nest.instruction else ''}"
                     f"{' cut ' + ' '.join(f'{a}:{n}' for a, n in nest.cut) if nest.cut else ''}"
                     f"{f' {nest.ahead} ahead' if nest.ahead else ''}"
                     f"{' threads ' + str(dict(nest.threads)) if nest.threads else ''}")  # fmt: skip
    for edge in kernel.edges:
        lines.append(f"  edge {edge.tensor}: {edge.mode} at {edge.level}")
    if kernel.reason:
        lines.append(f"  because {kernel.reason}")
    return lines


def _sizes(value: Any) -> Sizes:
    return tuple((str(a), int(n)) for a, n in value)


def _nest(value: dict[str, Any]) -> NestPlan:
    return NestPlan(**{**value, "epilogue": tuple(value["epilogue"]), "register": _sizes(value["register"]),
                       "order": tuple(value["order"]), "unroll": tuple(value["unroll"]),
                       "threads": _sizes(value["threads"]), "cut": _sizes(value["cut"])})  # fmt: skip


def _kernel(value: dict[str, Any]) -> KernelPlan:
    return KernelPlan(**{**value, "roots": tuple(value["roots"]), "tile": _sizes(value["tile"]),
                         "nests": tuple(_nest(n) for n in value["nests"]),
                         "edges": tuple(EdgePlan(**e) for e in value["edges"]),
                         "stream": StreamPlan(**value["stream"]) if value["stream"] else None,
                         "traffic": _sizes(value["traffic"]), "prefetch": tuple(value["prefetch"]),
                         "warms": tuple(value["warms"]), "keeps": tuple(value["keeps"])})  # fmt: skip


def _layout(value: dict[str, Any]) -> Layout:
    return Layout(tuple(StorageAxis(**part) for part in value["order"]), value["fill"], value["swizzle"])


def _plan(value: dict[str, Any]) -> Plan:
    return Plan(value["target"], value["schedule"], tuple(_kernel(k) for k in value["kernels"]),
                tuple((name, _layout(layout)) for name, layout in value["layouts"]))  # fmt: skip
