"""Equal kernels of a plan as one group: they are tuned together, and a choice for one is a choice for all of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from tilewright.backend import backend_for
from tilewright.backend.cpu.kernel.variants import shared_constants
from tilewright.backend.protocol import Variants
from tilewright.ir.forms.compute import Program, Scan, all_computes
from tilewright.ir.forms.loops import LoopProgram, Memory, Store, statements
from tilewright.ir.forms.tensor import Layout, Tensor
from tilewright.schedule.price import plan_context
from tilewright.schedule.tree import kernel_tile
from tilewright.target import Target
from tilewright.tile_graph.algebra.signature import signature
from tilewright.tile_graph.plan.form import Plan, Tile
from tilewright.tile_graph.traffic.held import plan_nests
from tilewright.tune.parts import Edit, replaced


@dataclass(frozen=True)
class KernelGroup:
    """Kernels of a plan, by position, that are equal but for their tensors; the first stands for all."""

    members: tuple[int, ...]
    variants: tuple[Variants, ...]  # of each member

    @property
    def own(self) -> Tile:
        return self.variants[0].kernel

    def alternatives(self, count: int) -> list[Tile]:
        return self.variants[0].best(count)

    def applied(self, chosen: Tile) -> dict[int, Tile]:
        """The choice, made for the first member, for every member under its own names."""
        return {p: each.like(chosen, self.variants[0]) for p, each in zip(self.members, self.variants, strict=True)}

    def layouts(self, chosen: Tile) -> dict[Tensor, Layout]:
        """Constants as all members read them under this choice."""
        kernels = self.applied(chosen)
        found: dict[Tensor, Layout] = {}
        for position, each in zip(self.members, self.variants, strict=True):
            found.update(each.layouts(kernels[position]))
        return found

    def edits(self, chosen: Tile) -> list[Edit]:
        """What the choice changes in the plan, a member at a time."""
        own = {t.name: None for t in self.layouts(self.own)}
        packed = {t.name: layout for t, layout in self.layouts(chosen).items()}
        kernels = self.applied(chosen)
        names = [each.kernel.name for each in self.variants]
        layouts = [{**own, **packed}, *({} for _ in names[1:])]
        return [Edit(frozenset({name}), (kernels[place],), some)
                for name, place, some in zip(names, self.members, layouts, strict=True)]  # fmt: skip


def find_groups(program: Program, plan: Plan, target: Target) -> list[KernelGroup]:
    """The kernels of a plan, equal ones together; those that share a launch keep the threads they agreed on."""
    computes = all_computes(program)
    shared = shared_constants(program, plan)
    layouts = dict(plan.layouts)
    backend, context = backend_for(target), plan_context(program, plan, target)
    found: dict[Hashable, list[tuple[int, Variants]]] = {}
    sharing = {kernel for launch, _ in plan.calls() if launch.is_launch for kernel in launch.body}
    for position, (kernel, steps) in enumerate(plan.launches()):
        if kernel in sharing:
            continue
        nests = plan_nests(kernel, computes)

        def about(t: Tensor, held: frozenset[str] = kernel.held) -> Hashable:
            # a constant of several kernels keeps its layout, so its readers may have other choices
            kept = t.name if t in shared else t in program.constants
            return (layouts.get(t.name), t.name in held, kept)

        leaves = tuple(replace(n, tensor="", core="", epilogue=(), composed=()) for n in kernel.leaves)
        inside = tuple((t.level, t.over, t.sizes) for t in kernel.walk() if isinstance(t, Tile))
        key = (signature(nests, about), leaves, kernel.cut, steps is not None, inside)
        found.setdefault(key, []).append(
            (position, backend.variants(kernel, nests, program, plan, context, kernel_tile))
        )
    return [KernelGroup(tuple(p for p, _ in members), tuple(v for _, v in members)) for members in found.values()]


def with_choices(program: Program, plan: Plan, choices: Sequence[tuple[KernelGroup, Tile]]) -> Plan:
    """The plan with these groups run another way, their constants packed to suit."""
    return replaced(program, plan, [edit for group, chosen in choices for edit in group.edits(chosen)])


def calls_of(kernels: Sequence[Tile], program: Program, loops: LoopProgram) -> list[int]:
    """Positions of the calls that run some kernels: those that write what the kernels store."""
    names = _aliases(program)
    wanted: set[str] = set()
    for kernel in kernels:
        root = kernel.leaves[-1].tensor
        wanted.update(names.get(root, (root,)))
    written = {
        kernel.name: {
            s.buffer for s in statements(kernel.body) if isinstance(s, Store) and s.buffer.memory is Memory.GLOBAL
        }
        for kernel in loops.kernels
    }
    found = []
    for number, call in enumerate(loops.calls):
        params = loops.kernel(call.kernel).params
        stored = {a for a, p in zip(call.arguments, params, strict=True) if p in written[call.kernel]}
        if stored & wanted:
            found.append(number)
    return found


def _aliases(program: Program) -> dict[str, tuple[str, ...]]:
    """Tensors of a Scan's body are stored under other names: the carried state in turn in two buffers."""
    found: dict[str, tuple[str, ...]] = {}
    for scan in program.computes:
        if not isinstance(scan, Scan):
            continue
        stacked = dict(scan.stacked)
        for carry, following, final in zip(scan.carry, scan.following, scan.finals, strict=True):
            names = [following.name, f"{carry.name}@0", f"{carry.name}@1"]
            names += [final.name] if final is not None else []
            names += [stacked[following].name] if following in stacked else []
            found[following.name] = tuple(names)
        for body, out in scan.stacked:
            found.setdefault(body.name, (body.name, out.name))
    return found
