"""The Programs of the parts of sweeps: fewer indices of every axis, and of what is read the part that is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewright.ir.analysis.pieces import narrowed
from tilewright.ir.forms.compute import Compute, Map, Program, Reduce, reads
from tilewright.ir.forms.mesh import Place, relative
from tilewright.ir.forms.swept import Given, Sweep, Swept, SweptPart
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.text.text import program_text
from tilewright.schedule.sweeps.reach import Places, Reach, whole
from tilewright.schedule.sweeps.search import Chosen


def in_sweeps(program: Program, chosen: Sequence[Chosen]) -> Swept:
    """A Program as sweeps of its computes."""
    reach = Reach()
    return Swept(program, tuple(_sweep(program, each, reach) for each in chosen))


def _sweep(program: Program, chosen: Chosen, reach: Reach) -> Sweep:
    computes = program.computes[chosen.first : chosen.end]
    roots = _roots(program, chosen)
    kinds: dict[str, int] = {}
    programs: list[Program] = []
    parts: list[SweptPart] = []
    for cell in chosen.grid.walk():
        left = {t: place for t in roots if (place := chosen.grid.place(t, cell)) is not None}
        if not left:
            continue
        places = reach.needed(computes, left)
        made = _part(program, computes, places, tuple(left))
        # the text tells constants apart
        kind = kinds.setdefault(program_text(made), len(kinds))
        if kind == len(programs):
            programs.append(made)
        named = {t.name: place for t, place in places.items()}
        takes = tuple(named[t.name] for t in made.inputs)
        gives = tuple(Given(place, relative(place, places[t])) for t, place in left.items())
        parts.append(SweptPart(kind, takes, gives))
    return Sweep(chosen.grid.counts, tuple(programs), tuple(parts))


def _roots(program: Program, chosen: Chosen) -> list[Tensor]:
    """What a sweep leaves for others, and for the caller."""
    later = {t for c in program.computes[chosen.end :] for t in reads(c)} | set(program.outputs)
    return [t for c in program.computes[chosen.first : chosen.end] for t in c.outputs if t in later]


def _part(program: Program, computes: Sequence[Compute], places: Places, left: tuple[Tensor, ...]) -> Program:
    own = {t: t if place == whole(t) else Tensor(t.name, tuple(n for _, n in place), t.dtype)
           for t, place in places.items()}  # fmt: skip
    held: Mapping[Tensor, tuple[Tensor, Place]] = {t: (own[t], place) for t, place in places.items()}
    made: list[Compute] = []
    for compute in computes:
        if not any(t in places for t in compute.outputs):
            continue
        if not isinstance(compute, Map | Reduce):  # which needs all of what it reads, and gives all
            made.append(compute)
            continue
        ranges = dict(zip(compute.axes, places[compute.outputs[0]], strict=True))
        made.append(narrowed(compute, ranges, tuple(own[t] for t in compute.outputs), held))
    inside = {t for compute in made for t in compute.outputs}
    read = dict.fromkeys(t for compute in made for t in reads(compute))
    constants = {t: a for t, a in program.constants.items() if t in read}  # those that every part needs whole
    inputs = tuple(t for t in read if t not in inside and t not in constants)
    return Program(inputs, tuple(own[t] for t in left), tuple(made), constants)
