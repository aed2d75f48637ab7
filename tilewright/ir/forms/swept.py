"""A Program in sweeps: computes that are done part by part, each part fused through all of them, with its halo.

    sweep of c1, c2, c3 in 4 x 4 parts:   part (1, 2) takes x[1022:2050, ..] from the host and leaves y[512:1024, ..]

What passes between sweeps lies with inputs and results in the host's memory, where a device's is the smaller one; the
parts alone have to fit there. Each part is an ordinary Program, and those of equal parts are one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from tilewright.ir.forms.compute import Program
from tilewright.ir.forms.mesh import Place
from tilewright.ir.forms.tensor import Tensor


@dataclass(frozen=True)
class Given:
    """What a part leaves of a tensor on the host: where it lies there, and where in the part's own result."""

    place: Place
    own: Place


@dataclass(frozen=True)
class SweptPart:
    """One part: which Program of its sweep it is, what that takes of the tensors on the host, in the order of the
    Program's inputs, and what it leaves there, in the order of its outputs."""

    kind: int
    takes: tuple[Place, ...]
    gives: tuple[Given, ...]


@dataclass(frozen=True)
class Sweep:
    """Some computes part by part, in the order of `parts`."""

    counts: tuple[int, ...]  # of parts along each dimension of the largest result
    programs: tuple[Program, ...]
    parts: tuple[SweptPart, ...]

    def copied_in(self) -> Iterator[tuple[Tensor, Place]]:
        """What is brought from the host, copy by copy."""
        for part in self.parts:
            yield from zip(self.programs[part.kind].inputs, part.takes, strict=True)

    def copied_out(self) -> Iterator[tuple[Tensor, Place]]:
        """What is left there."""
        for part in self.parts:
            gives = [given.place for given in part.gives]
            yield from zip(self.programs[part.kind].outputs, gives, strict=True)


@dataclass(frozen=True)
class Swept:
    """All sweeps of a Program, in order. A tensor has one name in all of them and on the host."""

    program: Program
    sweeps: tuple[Sweep, ...]

    @property
    def link_bytes(self) -> tuple[int, int]:
        """What passes from the host to the parts in a run, and back."""
        ways = ([s.copied_in() for s in self.sweeps], [s.copied_out() for s in self.sweeps])
        into, back = (sum(_bytes(t, place) for copies in way for t, place in copies) for way in ways)
        return into, back


def _bytes(tensor: Tensor, place: Place) -> int:
    return prod(count for _, count in place) * tensor.dtype.bytes
