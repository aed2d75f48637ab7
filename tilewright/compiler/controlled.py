"""A Program with loops and branches that data decide: its straight parts go through the stages one by one, what they
became is put together as one list of kernel calls with jumps, and becomes one piece of machine code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tilewright.errors import OptionError
from tilewright.ir.forms.compute import Program, Region
from tilewright.ir.forms.loops import LoopProgram
from tilewright.lower.parts import Ordered, RegionBranches, RegionLoop, Straight, cut
from tilewright.lower.regions import Linker, Lowered, unique_names
from tilewright.tile_graph.plan.form import Hold, Plan, Tile

PlanPart = Callable[[Program, int], Lowered | None]  # of a straight part and its number; None where it stops earlier


@dataclass(frozen=True)
class Linked:
    """All parts together; the Program has their constants too, by the names that the Loops have for them."""

    program: Program
    plan: Plan
    loops: LoopProgram
    parts: tuple[LoopProgram, ...]  # as their kernels are named here


def places(program: Program) -> list[str]:
    """Of each straight part of a Program the loops and branches around it, in words."""
    return [place for _, place in _places(cut(program), "")]


def linked(program: Program, plan_part: PlanPart) -> Linked | None:
    """The parts of a Program planned, lowered and put together; None where `plan_part` stops before that."""
    ordered = cut(program)
    lowered: dict[Straight, Lowered] = {}
    for number, (part, _) in enumerate(_places(ordered, "")):
        planned = plan_part(part.program, number)
        if planned is not None:
            lowered[part] = unique_names(planned, number)
    if not lowered:
        return None
    linker = Linker(lowered)
    loops = linker.linked(ordered)
    constants = {**program.constants, **linker.constants}
    for part_lowered in lowered.values():
        constants.update(part_lowered.program.constants)
    parts = tuple(part_lowered.loops for part_lowered in lowered.values())
    return Linked(replace(program, constants=constants), _plan(ordered, lowered), loops, parts)


def refuse_edits(overridden: bool) -> None:
    if overridden:
        raise OptionError("stages of a model with loops or branches that data decide are those of its parts: none can "
                          "be overridden")  # fmt: skip


def _places(ordered: Ordered, around: str) -> Iterator[tuple[Straight, str]]:
    """Straight parts in order, each with what is around it in words."""
    for item in ordered.items:
        if isinstance(item, Straight):
            yield item, around
        elif isinstance(item, RegionLoop):
            yield from _places(item.body, _inside("in every step of", item.region, around))
        elif isinstance(item, RegionBranches):
            for word, branch in zip(("where true, in", "where false, in"), item.branches, strict=True):
                yield from _places(branch, _inside(word, item.region, around))


def _inside(word: str, region: Region, around: str) -> str:
    return f"{word} {region.origin or region.outputs[0].name}" + (f", {around}" if around else "")


def _plan(ordered: Ordered, lowered: dict[Straight, Lowered]) -> Plan:
    """One tree of all parts: loops and branches are Tiles around theirs."""
    plans = [part.plan for part in lowered.values()]
    first = plans[0]

    def tile(inner: Ordered, over: str, name: str) -> Tile:
        body: list[Tile] = []
        holds: list[Hold] = []
        for item in inner.items:
            if isinstance(item, Straight):
                part = lowered[item].plan.body
                body += [node for node in part.body if isinstance(node, Tile)]
                holds += part.holds
            elif isinstance(item, RegionLoop):
                body.append(tile(item.body, "while", item.region.outputs[0].name))
            elif isinstance(item, RegionBranches):
                branches = [tile(branch, "order", "") for branch in item.branches]
                body.append(Tile(first.body.level, over="branch", body=tuple(branches),
                                 name=item.region.outputs[0].name))  # fmt: skip
        return Tile(first.body.level, over=over, body=tuple(body), holds=tuple(holds), name=name)

    layouts = tuple(layout for plan in plans for layout in plan.layouts)
    return Plan(first.target, first.schedule, tile(ordered, "order", ""), layouts)
