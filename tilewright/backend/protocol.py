"""What a kind of machine says about itself: how a leaf is planned and priced, lowered, rendered and run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tilewright.backend.terms import KernelWork, Terms
from tilewright.errors import InternalError
from tilewright.ir.forms.compute import Compute, Program, Scan
from tilewright.ir.forms.expr import Axis
from tilewright.ir.forms.loops import LoopProgram, Memory
from tilewright.ir.forms.tensor import Layout, Tensor
from tilewright.lower.kernel import Binding, ScanView
from tilewright.lower.placed import Tree
from tilewright.options import Options
from tilewright.target import MemoryLevel, Target
from tilewright.tile_graph.algebra.context import NestContext
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.rolling import Overlap
from tilewright.tile_graph.algebra.streams import Stream
from tilewright.tile_graph.plan.form import Estimate, Leaf, Plan, Sizes, Tile


@dataclass(frozen=True)
class Inner:
    """Some of a kernel's nests, one after the other, walked in parts of its tile: what passes between them alone stays
    at a nearer level."""

    first: int  # of the nests
    last: int
    tile: Sizes  # by the axes of the root, those that are cut
    level: str
    footprint: int
    without: float = 0.0  # seconds of the kernel as one tile


@dataclass(frozen=True)
class Choice:
    """The best tile of a group of nests, and what it is predicted to cost."""

    tile: Sizes  # by the axes of the root, those that are cut
    seconds: float
    tiles: int
    footprint: int
    block: int = 0  # elements of a streamed axis at a time; 0: everything is resident
    step: int = 0  # rows of the root that a window moves on by; 0: there is no window
    resident: bool = False  # every tile has a unit to itself, for all steps of a Scan
    level: str = ""  # where intermediates live; empty: the tile level
    inner: Inner | None = None  # nests that are tiled again inside the tile
    unhindered: float = 0.0  # seconds if every tile fitted and intermediates moved in no time; 0: not known
    busy: float = 0.0  # seconds that would be left if nothing waited; 0: not known

    def __post_init__(self) -> None:
        if not self.seconds >= 0:  # a number that has overflowed would be preferred to all others
            raise InternalError(f"a tile is predicted to take {self.seconds} s")


@dataclass(frozen=True)
class StepKernel:
    """One of the kernels of a Scan's step as it was chosen."""

    nests: Sequence[Nest]
    leaves: tuple[Leaf, ...]
    stored: frozenset[Tensor]
    choice: Choice


@dataclass(frozen=True)
class StepPlan:
    """The same once more, knowing that other steps come before and after."""

    leaves: tuple[Leaf, ...]
    seconds: float
    prefetched: tuple[str, ...] = ()


@dataclass(frozen=True)
class PersistentScan:
    """All steps of a Scan in one kernel, whose units stay: the time of the whole, what each copies before, so many
    neighbours at a time, and whether they meet after each step."""

    choice: Choice
    kept: tuple[tuple[Tensor, int], ...]
    meets: bool = True


class KernelWriter(Protocol):
    """Writes a kernel for a choice; `schedule.tree.kernel_tile` does."""

    def __call__(
        self, launch: str, level: str, nests: Sequence[Nest], leaves: Sequence[Leaf], stored: frozenset[Tensor],
        stream: Stream | None, choice: Choice, lanes: int, prefetched: Sequence[str], about: Estimate,
    ) -> Tile:  # fmt: skip
        """The kernel's Tile."""


@dataclass(frozen=True)
class Measuring:
    """What plans are measured on and by."""

    processor: str
    microarchitecture: str
    threads: int
    clock: str  # "thread": processor time of the one thread; "wall": the clock on the wall; "device": events of a GPU


Admits = Callable[[Sequence[Leaf]], bool]  # whether a kernel may run by these leaves


class Variants(Protocol):
    """Other ways to run a kernel of a plan."""

    @property
    def kernel(self) -> Tile:
        """As it is planned."""

    def best(self, count: int) -> list[Tile]:
        """Up to `count` kernels that differ from this one, by predicted time."""

    def ranked(self, admits: Admits) -> Iterator[Tile]:
        """Kernels that differ from this one and whose leaves are admitted, each made when it is asked for, what is
        predicted to be fastest of those looked at so far first."""

    def layouts(self, kernel: Tile) -> dict[Tensor, Layout]:
        """How constants lie for a variant."""

    def like(self, chosen: Tile, other: Any) -> Tile:
        """This kernel run as a variant of another that is equal but for its names."""


class Backend(Protocol):
    """One kind of machine. All it decides goes into the Plan; lowering and rendering decide nothing. What only some
    kinds have, windows, inner tiles, shared launches, is answered here for all others."""

    launch: str  # to whom the tiles of a kernel are handed out
    source_suffix: str  # of files with the source text of a kernel
    flushes_denormals: bool  # its kernels count numbers below the smallest normal one as zeros, where asked to
    most_between: int  # bytes of one tensor between kernels; what is larger is rather held in parts
    runs_regions: bool  # its driver follows loops that data end and branches that data choose
    fills_by_sample: bool  # the work of one sample of a batch is enough for all its units
    other_algorithms: bool  # ways to convolve and to multiply with fewer multiplications are known to pay
    streams_in_registers: bool  # whether there are kernels whose products pass everything to each other so
    ends_loops: bool  # where the run tells how much there is to reduce, no more is walked
    compares_places: bool  # conditions on indices are better than tables of them: kernels leave out what they close
    least_rows: int  # of a product, below which it is slower than with some more
    stream_worth: float  # times as long as everything resident that a stream may be predicted to take, to be preferred

    def plan_leaf(self, nest: Nest, context: NestContext) -> Leaf:
        """How a nest runs as a kernel of its own."""

    def other_leaves(self, nest: Nest, leaf: Leaf, shape: Mapping[Axis, int], context: NestContext) -> Sequence[Leaf]:
        """Leaves that may suit a nest better than its own on parts of this shape, the most promising first."""
        return ()

    def separate_views(self, computes: Sequence[Compute], context: NestContext) -> frozenset[Tensor]:
        """Maps that only move data and are better computed by themselves than composed into what reads them."""
        return frozenset()

    def constant_layouts(self, nest: Nest, leaf: Leaf, context: NestContext) -> dict[Tensor, Layout]:
        """How constants lie in memory for a leaf."""

    def choose_tile(
        self, nests: Sequence[Nest], leaves: Sequence[Leaf], context: NestContext, stored: frozenset[Tensor],
        fixed: Mapping[str, int], stream: Stream | None = None, blocks: Sequence[int] = (),
    ) -> Choice | None:  # fmt: skip
        """The best output tile, with `stream` walked in one of these blocks; None when no tile's intermediates fit."""

    def farthest_hold(self, nests: Sequence[Nest], context: NestContext, stored: frozenset[Tensor]) -> MemoryLevel:
        """The level farthest away at which a kernel may keep what its nests pass to each other."""
        return context.target.local

    def stream_in_registers(self, nests: Sequence[Nest], leaves: Sequence[Leaf]) -> Stream | None:
        """The stream of nests that pass all to each other in registers; None where there is none."""
        return None

    def choose_window(
        self, nests: Sequence[Nest], leaves: Sequence[Leaf], context: NestContext, stored: frozenset[Tensor],
        overlaps: Sequence[Overlap], fixed: Mapping[str, int] | None = None, step: int = 0,
    ) -> Choice | None:  # fmt: skip
        """The best parts and steps of windows that move over some of the nests, or those given; None where none pays or
        fits."""
        return None

    def tile_again(
        self, nests: Sequence[Nest], leaves: Sequence[Leaf], context: NestContext, stored: frozenset[Tensor],
        choice: Choice, inner: Inner | None = None,
    ) -> Choice | None:  # fmt: skip
        """The choice with some of its nests tiled again inside, at a nearer level, as best or as given; None where that
        is not possible."""
        return None

    def finish(
        self, nests: Sequence[Nest], leaves: tuple[Leaf, ...], choice: Choice, stream: Stream | None,
        context: NestContext, is_step: bool,
    ) -> tuple[tuple[Leaf, ...], int]:  # fmt: skip
        """The leaves with what depends on the tile, and the lanes that share them (0: they are not handed out)."""

    def bind_units(
        self, kernel: Tile, nests: Sequence[Nest], leaves: tuple[Leaf, ...], choice: Choice, stream: Stream | None,
        context: NestContext,
    ) -> Tile:  # fmt: skip
        """The kernel with Tiles inside it for units that the leaves are handed out to further, and their operands."""
        return kernel

    def plan_steps(
        self, kernels: Sequence[StepKernel], scan: Scan, context: NestContext
    ) -> tuple[list[StepPlan], tuple[str, ...]]:
        """The kernels of a step that follows another, and weights that stay near from step to step."""
        return [StepPlan(k.leaves, k.choice.seconds) for k in kernels], ()

    def persistent_scan(self, kernels: Sequence[StepKernel], scan: Scan, context: NestContext) -> PersistentScan | None:
        """The steps inside one kernel, where that is possible and predicted to be faster."""

    def share_launch(self, kernels: Sequence[Tile], target: Target) -> tuple[Tile, ...] | None:
        """Kernels that do not wait for each other as they share a launch; None where they are not to."""
        return None

    def launch_seconds(self, kernels: Sequence[Tile], target: Target) -> float:
        """What kernels that share a launch take together."""
        return sum(k.estimate.seconds for k in kernels)

    def lower_kernel(
        self, tile: Tile, nests: Sequence[Nest], layout: Callable[[Tensor], Layout], scan: ScanView | None
    ) -> Binding:
        """A kernel of the Plan as Loops."""

    def memory_trace(
        self, tile: Tile, nests: Sequence[Nest], layout: Callable[[Tensor], Layout], scan: ScanView | None,
        target: Target | None = None,
    ) -> Tree:  # fmt: skip
        """A kernel of the Plan as its traffic is predicted: loops over tiles around what its leaves touch; with a
        target also how long they keep one of its units busy."""

    def kernel_terms(self, work: KernelWork, target: Target) -> Terms:
        """What a kernel takes that does this work."""

    def launch_terms(self, works: Sequence[KernelWork], target: Target) -> Terms:
        """The same of kernels that share a launch."""
        raise InternalError(f"these kernels share no launch: {', '.join(w.name for w in works)}")

    def memory_at(self, target: Target, place: int) -> frozenset[Memory] | None:
        """The memories of the Loops that are at a level next to registers; None: all of them."""
        return None

    def hurried(self, target: Target) -> Target:
        """The target as code that is wanted soon is planned for it."""
        return target

    def early(self, target: Target, options: Options) -> AbstractContextManager[Any]:
        """What can be compiled before all is planned."""

    def check_limits(self, loops: LoopProgram, target: Target) -> None:
        """Raises InternalError that names a kernel which the target cannot start, and what it asks for."""
        return  # whatever fits the memory is started

    def unroll(self, loops: LoopProgram) -> LoopProgram:
        """The Loops with UNROLL loops written out, where the renderer does not leave that to its compiler."""
        return loops

    def join_calls(self, loops: LoopProgram, target: Target) -> LoopProgram:
        """The Loops with calls of vector mathematics side by side, where they are functions of ours."""
        return loops

    def render(self, loops: LoopProgram, target: Target, *, early: Any = None) -> dict[str, str]:
        """The source text of every distinct kernel of Loops that have gone through these two."""

    def load(
        self, sources: dict[str, str], loops: LoopProgram, program: Program, plan: Plan, target: Target,
        options: Options, *, weights_dir: Path | None = None, early: Any = None,
        blocks: Mapping[str, int] | None = None,
    ) -> Any:  # fmt: skip
        """Machine code, loaded and ready to run. Where inputs and outputs have several `blocks`, by name, it runs for
        one after the other."""

    def run_bytes(self, loops: LoopProgram, plan: Plan, options: Options) -> int | None:
        """What a run allocates beside its inputs and outputs; None where that cannot be bounded."""
        return None

    def variants(
        self, kernel: Tile, nests: Sequence[Nest], program: Program, plan: Plan, context: NestContext,
        write: KernelWriter,
    ) -> Variants:  # fmt: skip
        """Other ways to run a kernel of a plan."""

    def untunable(self, target: Target) -> str | None:
        """Why plans cannot be measured inside a model here; None where they can."""
        return None

    def measuring(self, target: Target, options: Options) -> Measuring:
        """What plans would be measured on here, and by which clock."""

    def built_by(self, target: Target, options: Options) -> tuple[str, ...]:
        """What compiles and runs the code, as far as times depend on it."""

    def why_not_here(self, target: Target) -> str | None:
        """What keeps this computer from running the code; None where nothing does."""
