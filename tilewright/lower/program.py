"""Plan to Loops for a whole model: every kernel lowered once, equal ones shared, Scans written out as steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import prod

from tilewright.errors import InternalError
from tilewright.ir.analysis.live import Ends, Needs, needed
from tilewright.ir.forms.compute import Compute, Program, Scan, all_tensors
from tilewright.ir.forms.expr import Axis, substitute, var
from tilewright.ir.forms.loops import Buffer, Call, Kernel, LoopProgram, Memory, Storage
from tilewright.ir.forms.tensor import Layout, Tensor, elements
from tilewright.lower.access import global_place
from tilewright.lower.kernel import Binding, ScanView
from tilewright.lower.live import ended, storage_ends
from tilewright.lower.persistent import in_stages, steps_inside, walked_inside
from tilewright.lower.prefetch_weights import prefetch_weights
from tilewright.lower.together import beside
from tilewright.tile_graph.algebra.idle import idle_step
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.occurrences import unique_names
from tilewright.tile_graph.algebra.propagate import extent_of
from tilewright.tile_graph.algebra.signature import signature
from tilewright.tile_graph.plan.form import COPIED, COPIES, Leaf, Plan, Tile, UnitBarrier
from tilewright.tile_graph.traffic.held import plan_nests

LowerKernel = Callable[[Tile, list[Nest], Callable[[Tensor], Layout], ScanView | None], Binding]


@dataclass
class _State:
    program: Program
    plan: Plan
    layouts: dict[Tensor, Layout]
    computes: dict[str, Compute]
    kernels: dict[Hashable, Kernel]
    calls: list[Call]
    places: dict[Hashable, tuple[int, ...]] = field(default_factory=dict)  # of a kernel's arguments among its tensors
    needs: Needs = field(default_factory=dict)  # how far tensors are needed, where a run tells

    def layout(self, tensor: Tensor) -> Layout:
        return self.layouts.get(tensor) or Layout.natural(tensor.rank)


def lower_program(program: Program, plan: Plan, lower_kernel: LowerKernel) -> LoopProgram:
    """The kernels and calls of a plan; `lower_kernel` is the backend's."""
    _check_lowered(plan)
    plan = in_stages(plan)
    computes = {t.name: c for c in _all_computes(program) for t in c.outputs}
    tensors = {t.name: t for t in all_tensors(program)}
    layouts = {tensors[name]: layout for name, layout in plan.layouts if name in tensors}
    state = _State(program, plan, layouts, computes, {}, [], needs=needed(program))
    temporaries: dict[str, Tensor] = {}
    for steps, kernels in groupby(plan.calls(), key=lambda launch: launch[1]):
        if steps is None:
            for kernel, _ in kernels:
                if kernel.is_launch:
                    _call_together(state, kernel, lower_kernel)
                    continue
                kernel = unique_names(kernel)
                inside = steps_inside(kernel)
                if inside is None:
                    _call(state, kernel, lower_kernel)
                else:
                    temporaries.update(_call_persistent(state, kernel, inside, lower_kernel))
        else:
            temporaries.update(_lower_scan(state, steps, [kernel for kernel, _ in kernels], lower_kernel))
    storage = _storage(state, temporaries)
    return LoopProgram(tuple(state.kernels.values()), tuple(state.calls), tuple(storage))


def _check_lowered(plan: Plan) -> None:
    """What is said of memory beyond one device, and of extents that are not known, is interpreted so far."""
    if plan.cases:
        raise InternalError("plan: a kernel has one tree; `Plan.at` gives that of an extent")

    def below(tile: Tile) -> None:
        if tile.is_kernel:
            return
        if tile.sizes or any(h.fill == COPIED for h in tile.holds):
            raise InternalError(f"plan: no kernel is launched for parts of a tile around it, at {tile.level}; "
                                "`interpret_tree` runs such a plan")  # fmt: skip
        for node in tile.body:
            if isinstance(node, Tile):
                below(node)

    below(plan.body)


def _key(
    state: _State, plan: Tile, nests: Sequence[Nest], issued: Sequence[str], scan: ScanView | None = None
) -> Hashable:
    """The same for equal nests and equal plans."""
    held, prefetched = plan.held, plan.prefetched
    return (
        signature(nests, lambda t: (state.layout(t), t.name in held, scan is not None and t in scan.stacked,
                                    t.name in prefetched)),
        shape_of(plan, {leaf.tensor: number for number, leaf in enumerate(plan.leaves)}),
        tuple(b.shape for b in _warmed(state, issued)), None if scan is None else scan.step.extent,
    )  # fmt: skip


def _bind(state: _State, plan: Tile, nests: list[Nest], scan: ScanView | None, lower: LowerKernel) -> Binding:
    """The kernel for these nests, lowered once for equal nests and equal plans."""
    issued = state.plan.issued_in(plan.name)
    ends = {} if scan is not None else _ends(state, nests)
    key = (_key(state, plan, nests, issued, scan), tuple(ends.values()))
    # tensors in the order the nests meet them: equal keys, equal places
    met = list(dict.fromkeys((*(t.name for n in nests for t in (*n.reads(), *n.stores)), *issued)))
    met += [state.program.inputs[-1].name] if ends and state.program.inputs[-1].name not in met else []
    if scan is None and key in state.places:
        return Binding(state.kernels[key], tuple(met[place] for place in state.places[key]))
    binding = lower(replace(plan, name="kernel"), nests, state.layout, scan)
    kernel = prefetch_weights(binding.kernel, _warmed(state, issued))
    binding = _ended(state, replace(binding, kernel=kernel, arguments=(*binding.arguments, *issued)), ends)
    if key not in state.kernels:
        state.kernels[key] = replace_name(binding.kernel, f"k{len(state.kernels)}")
    if scan is None:
        state.places[key] = tuple(met.index(name) for name in binding.arguments)
    return Binding(state.kernels[key], binding.arguments)


def _ends(state: _State, nests: Sequence[Nest]) -> dict[str, tuple[Ends | None, ...]]:
    """By name how far what a kernel stores is needed; nothing where a run needs all of it."""
    found = {t.name: state.needs.get(t, (None,) * t.rank) for n in nests for t in n.stores}
    return found if any(end is not None for ends in found.values() for end in ends) else {}


def _ended(state: _State, binding: Binding, ends: Mapping[str, tuple[Ends | None, ...]]) -> Binding:
    """The kernel with loops that end with what is needed; it takes the numbers then."""
    if not ends:
        return binding
    kernel, arguments = binding.kernel, binding.arguments
    told = state.program.inputs[-1]
    if told.name not in arguments:
        numbers = global_place(told, state.layout(told), "numbers").buffer
        kernel, arguments = replace(kernel, params=(*kernel.params, numbers)), (*arguments, told.name)
    tensors = {t.name: t for t in all_tensors(state.program)}
    of_buffers = {
        buffer: storage_ends(tensors[name], state.layout(tensors[name]), ends[name])
        for buffer, name in zip(kernel.params, arguments, strict=True) if name in ends
    }  # fmt: skip
    held = [(place, storage_ends(t, place.layout, state.needs[t])) for t, place in binding.held if t in state.needs]
    made = ended(kernel, of_buffers, held, kernel.params[arguments.index(told.name)], binding.stream)
    return binding if made is kernel else Binding(made, arguments)


def shape_of(node: Tile | Leaf | UnitBarrier, numbers: Mapping[str, int]) -> Hashable:
    """A Tile without names and estimates: its nests by number."""
    if isinstance(node, UnitBarrier):
        return node
    if isinstance(node, Leaf):
        return numbers[node.tensor], replace(node, tensor="", core="", epilogue=(), composed=())
    axes = tuple(
        (a.name, a.extent, tuple((numbers[b.tensor], b.axis, b.scale, b.offset) for b in a.binds)) for a in node.axes
    )
    holds = (frozenset((numbers.get(h.tensor), h.mode, h.axis, h.fill, h.stages) for h in node.holds),
             tuple((h.fill, h.stages, h.layout) for h in node.holds if h.fill in COPIES))  # fmt: skip
    body = tuple(shape_of(inner, numbers) for inner in node.body)
    return node.level, node.sizes, node.over, node.count, node.runs, axes, holds, body


def _warmed(state: _State, names: Sequence[str]) -> list[Buffer]:
    """Weights the kernel brings near, as they lie in memory."""
    constants = {t.name: t for t in state.program.constants}
    found = []
    for number, name in enumerate(names):
        tensor = constants[name]
        size = prod(extent_of(e) for e in state.layout(tensor).storage_shape(tensor.shape))
        found.append(Buffer(f"w{number}", (size,), tensor.dtype, Memory.GLOBAL))
    return found


def replace_name(kernel: Kernel, name: str) -> Kernel:
    return Kernel(name, kernel.params, kernel.body, kernel.symbols, kernel.step)


def _call(state: _State, plan: Tile, lower: LowerKernel) -> None:
    binding = _bind(state, plan, plan_nests(plan, state.computes), None, lower)
    state.calls.append(Call(binding.kernel.name, binding.arguments))


def _call_together(state: _State, launch: Tile, lower: LowerKernel) -> None:
    """Kernels that share a launch: one call, whose blocks are numbered through."""
    plans = [unique_names(kernel) for kernel in launch.body if isinstance(kernel, Tile)]
    nests = [plan_nests(plan, state.computes) for plan in plans]
    ends = [_ends(state, own) for own in nests]
    key = tuple((_key(state, plan, own, ()), tuple(end.values()))
                for plan, own, end in zip(plans, nests, ends, strict=True))  # fmt: skip
    bound = [_ended(state, lower(replace(plan, name="kernel"), own, state.layout, None), end)
             for plan, own, end in zip(plans, nests, ends, strict=True)]  # fmt: skip
    if key not in state.kernels:
        state.kernels[key] = replace_name(beside([b.kernel for b in bound]), f"k{len(state.kernels)}")
    arguments = tuple(name for b in bound for name in b.arguments)
    state.calls.append(Call(state.kernels[key].name, arguments))


def _call_persistent(state: _State, plan: Tile, steps: Tile, lower: LowerKernel) -> dict[str, Tensor]:
    """A kernel that walks the steps of a Scan itself: one call, its states beside the other temporaries."""
    nests, view = walked_inside(plan_nests(plan, state.computes), _scan(state, steps))
    binding = _bind(state, plan, nests, view, lower)
    state.calls.append(Call(binding.kernel.name, binding.arguments))
    return {t.name: t for t in view.states.values()}


def _scan(state: _State, steps: Tile) -> Scan:
    scan = state.computes.get(steps.scan or "")
    if not isinstance(scan, Scan):
        raise InternalError(f"'{steps.scan}' is not a Scan")
    if not isinstance(scan.axis.extent, int):
        raise InternalError(f"scan {steps.scan} has a symbolic number of steps")
    return scan


def _lower_scan(state: _State, walked: Tile, plans: list[Tile], lower: LowerKernel) -> dict[str, Tensor]:
    """Steps of a Scan: each reads the carried state from one buffer and writes it to another, in turn."""
    scan = _scan(state, walked)
    steps = scan.axis.extent
    assert isinstance(steps, int)
    step = Axis("step", steps)
    view = ScanView(step, dict(scan.stacked))
    bindings = []
    for plan in map(unique_names, plans):
        found = plan_nests(plan, state.computes)
        _check_idle(plan, found, scan, state.program)
        nests = [at_step(n, scan.axis, step) for n in found]
        bindings.append(_bind(state, plan, nests, view, lower))
    temporaries: dict[str, Tensor] = {}
    buffers: list[tuple[str, str]] = []
    for carry in scan.carry:
        pair = (f"{carry.name}@0", f"{carry.name}@1")
        for item in pair:
            temporaries[item] = Tensor(item, carry.shape, carry.dtype)
        buffers.append(pair)
    for number in range(steps):
        rename: dict[str, str] = {}
        for i, (initial, carry, following) in enumerate(zip(scan.initial, scan.carry, scan.following, strict=True)):
            rename[carry.name] = initial.name if number == 0 else buffers[i][(number - 1) % 2]
            final = scan.finals[i]
            rename[following.name] = final.name if final is not None and number == steps - 1 else buffers[i][number % 2]
        index = steps - 1 - number if scan.reverse else number
        for binding in bindings:
            arguments = tuple(rename.get(a, a) for a in binding.arguments)
            state.calls.append(Call(binding.kernel.name, arguments, index))
    return temporaries


def _check_idle(plan: Tile, nests: list[Nest], scan: Scan, program: Program) -> None:
    """A plan made for other values of the same shapes may count on zeros that are none here."""
    for part, nest in zip(plan.leaves, nests, strict=True):
        if part.idle is not None and part.idle != idle_step(nest, scan, program.constants):
            raise InternalError(f"plan of kernel '{plan.name}': nest '{part.tensor}' has something to sum up at step "
                                f"{part.idle}; plan the model anew")  # fmt: skip


def at_step(nest: Nest, axis: Axis, step: Axis) -> Nest:
    now = {axis: var(step)}
    return replace(
        nest,
        elements=tuple(substitute(e, now) for e in nest.elements),
        values=tuple(substitute(v, now) for v in nest.values),
    )


def _all_computes(program: Program) -> Iterable[Compute]:
    for compute in program.computes:
        yield compute
        if isinstance(compute, Scan):
            yield from compute.body


def _storage(state: _State, temporaries: dict[str, Tensor]) -> list[Storage]:
    program = state.program
    used = {a for call in state.calls for a in call.arguments}
    by_name = {t.name: t for t in all_tensors(program)} | temporaries
    inputs = {t.name: i for i, t in enumerate(program.inputs)}
    outputs = {t.name: i for i, t in enumerate(program.outputs)}
    constants = {t.name for t in program.constants}
    rows = []
    for name in sorted(used | set(outputs) | set(inputs)):
        tensor = by_name[name]
        shape = state.layout(tensor).storage_shape(tensor.shape)
        elements(shape)
        role = (
            "input"
            if name in inputs
            else "constant"
            if name in constants
            else "output"
            if name in outputs
            else "temporary"
        )
        rows.append(Storage(name, shape, tensor.dtype, role, inputs.get(name, outputs.get(name, 0))))  # type: ignore[arg-type]
    return rows
