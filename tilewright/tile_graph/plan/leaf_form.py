"""The forms of a Leaf: for each a record of the options that it alone has, with their text; in JSON under its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from math import prod
from typing import Any, Self

from tilewright.errors import InternalError
from tilewright.intrinsics.cpu import DOTS, WINDOW_DOTS
from tilewright.intrinsics.gpu_matrix import FORMS

Sizes = tuple[tuple[str, int], ...]  # axis name -> size, in order


def _option(usual: Any, text: str = "", sums: bool = False) -> Any:
    """What is usual is not told; whether sums are taken in another order by it."""
    return field(default=usual, metadata={"text": text, "sums": sums})


@dataclass(frozen=True)
class LeafForm:
    """How a nest runs beyond its loops. As it is: as its machine runs loops of which nothing more is said."""

    @classmethod
    def of(cls, form: LeafForm) -> Self:
        """The options where they are of this form, else the usual ones: what other forms leave over runs like that."""
        return form if isinstance(form, cls) else cls()

    def text(self) -> str:
        return "".join(option.metadata["text"].format(_words(value)) for option, value in self._said())

    def order_of_sums(self) -> tuple[tuple[str, Any], ...]:
        """Equal where sums are taken alike."""
        return tuple((option.name, value) for option, value in self._said() if option.metadata["sums"])

    def steps_written_out(self, extent: Callable[[str], int]) -> int:
        """Steps of a sum that its innermost body has one behind the other."""
        return 1

    def _said(self) -> list[tuple[Field[Any], Any]]:
        values = [(option, getattr(self, option.name)) for option in fields(self)]
        return [(option, value) for option, value in values if value != option.default]


PLAIN = LeafForm()


@dataclass(frozen=True)
class VectorForm(LeafForm):
    """On the vectors of a CPU: register tiles of sums, and maps."""

    unroll: tuple[str, ...] = _option(())  # reduction axes written out
    # a reduction axis done in passes of so many elements, partial sums kept in the result's place
    cut: tuple[tuple[str, int], ...] = _option((), " cut {}", sums=True)
    # elements of the next panel of weights that a step of a sum prefetches; else rows
    ahead: int = _option(0, " {} ahead")
    # steps of a sum before it multiplies weights of its own panel that it prefetches them, nearer
    soon: int = _option(0, " {} soon")
    together: int = _option(1, " {} together")  # steps of a sum written out in a turn of its innermost loop
    # rows of a sum that every panel of weights takes before the next rows come (0: all of them)
    near_rows: int = _option(0, " {} rows near")
    # vectors of a sum whose results are computed at a time, in a loop (0: all, written out)
    in_turn: int = _option(0, " results {} at a time")
    row_lanes: int = _option(1)  # steps of the innermost reduction whose broadcast operand is read as one vector

    def steps_written_out(self, extent: Callable[[str], int]) -> int:
        return prod(map(extent, self.unroll)) * self.together


@dataclass(frozen=True)
class ThreadForm(LeafForm):
    """On the threads of a GPU: maps in packets, sums that threads share, operands in steps through shared memory."""

    flat: bool = _option(False, " flat")  # vectors of a map run on over the ends of rows: all its axes are one
    at_once: int = _option(1, " {} at once", sums=True)  # vectors of a map, or steps of a sum, under way together
    split: int = _option(1, " split {}", sums=True)  # threads that share one reduction
    step: int = _option(0, " step {}", sums=True)  # reduction elements at a time staged in shared memory (0: none)


@dataclass(frozen=True)
class InstructionForm(LeafForm):
    """By a dot-product or matrix instruction of the intrinsics table."""

    instruction: str = field(metadata={"text": " by {}", "sums": False})

    @classmethod
    def of(cls, form: LeafForm) -> Self:
        if isinstance(form, cls):
            return form
        raise InternalError(f"a leaf of {type(form).__name__} has no options of {cls.__name__}")


@dataclass(frozen=True)
class DotForm(InstructionForm):
    """By dot products of a CPU's vectors."""


@dataclass(frozen=True)
class WindowForm(InstructionForm):
    """By dot products of windows that slide over every channel by itself."""


@dataclass(frozen=True)
class TileForm(InstructionForm):
    """By matrix instructions of a CPU, on tiles of registers."""

    packs: bool = _option(False, " packed")  # rows are copied block by block, though they could be read in place
    step: int = _option(0, " step {}", sums=True)  # reduction elements that are summed up at a time (0: all)


@dataclass(frozen=True)
class FragmentForm(InstructionForm):
    """By the matrix instructions of a GPU's warps, on fragments, which add up their own few elements however many are
    staged at a time."""

    # parts of a sum one after the other in a loop, no turn around their ring written out
    rolled: bool = _option(False, " rolled", sums=True)
    split: int = _option(1, " split {}", sums=True)  # groups of warps that each take some steps of every part
    step: int = _option(0, " step {}")  # reduction elements that are staged in shared memory at a time
    anew: int = _option(0, " anew {}")  # reduction elements after which sums begin anew, added to others (0: never)


LEAF_FORMS: Mapping[str, type[LeafForm]] = {
    "vector": VectorForm, "threads": ThreadForm, "dot": DotForm, "window": WindowForm, "tile": TileForm,
    "fragments": FragmentForm,
}  # fmt: skip


def form_of_older(options: Mapping[str, Any]) -> LeafForm:
    """Plans of older versions have the options of all forms beside each other."""
    name = options.get("instruction")
    form: type[LeafForm] = LeafForm
    if name is not None:
        form = TileForm if name in DOTS and DOTS[name].is_tile else DotForm
        form = FragmentForm if name in FORMS else WindowForm if name in WINDOW_DOTS else form
    elif options:
        form = ThreadForm if options.keys() <= {f.name for f in fields(ThreadForm)} else VectorForm
    return form(**options)


def _words(value: Any) -> Any:
    return " ".join(f"{axis}:{size}" for axis, size in value) if isinstance(value, tuple) else value
