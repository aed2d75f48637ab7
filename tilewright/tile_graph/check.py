"""The grammar of a Plan: every name it uses is of the Program, every axis of its compute, every size possible."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from tilewright.errors import InternalError
from tilewright.intrinsics.cpu import DOTS, TILES, WINDOW_DOTS
from tilewright.ir.compute import Compute, Map, Program, Reduce, all_computes
from tilewright.tile_graph.plan import KernelPlan, NestPlan, Plan

_MODES = ("store", "recompute", "stream")


def check_plan(plan: Plan, program: Program) -> None:
    """Raises InternalError that names the kernel and what is wrong with it."""
    computes = all_computes(program)
    covered: set[str] = set()
    for kernel in plan.kernels:
        try:
            _check_kernel(kernel, computes)
            _check_weights(kernel, program)
        except ValueError as error:
            raise InternalError(f"plan of kernel '{kernel.name}': {error}") from error
        covered.update(nest.tensor for nest in kernel.nests)
    for output in program.outputs:
        compute = computes.get(output.name)
        if isinstance(compute, Map | Reduce) and output.name not in covered and compute.outputs[0].name not in covered:
            raise InternalError(f"plan: no kernel stores output '{output.name}'")


def _check_kernel(kernel: KernelPlan, computes: Mapping[str, Compute]) -> None:
    if not kernel.nests:
        raise ValueError("it has no nests")
    stored = {nest.tensor for nest in kernel.nests}
    for root in kernel.roots:
        if root not in stored:
            raise ValueError(f"root '{root}' is not stored by any of its nests")
    for nest in kernel.nests:
        _check_nest(nest, computes)
    rank = _rank(kernel.nests[-1], computes)
    for axis, size in kernel.tile:
        _check_axis(axis, "o", rank, "tile")
        _check_size(axis, size)
    for edge in kernel.edges:
        if edge.tensor not in computes:
            raise ValueError(f"edge of unknown tensor '{edge.tensor}'")
        if edge.mode not in _MODES:
            raise ValueError(f"edge '{edge.tensor}' has mode '{edge.mode}'; it is one of {', '.join(_MODES)}")
        if edge.mode == "recompute" and not isinstance(computes[edge.tensor], Map):
            raise ValueError(f"edge '{edge.tensor}' cannot be recomputed: it is no map")
    if kernel.scan is None and (kernel.prefetch or any(n.alternate or n.idle is not None for n in kernel.nests)):
        raise ValueError("only the steps of a Scan read ahead, walk to and fro and rest")
    if kernel.scan is None and kernel.keeps:
        raise ValueError("only the steps of a Scan keep weights near")
    if kernel.scan is not None and kernel.warms:
        raise ValueError("a step cannot bring weights near for itself")
    if kernel.stream is not None and kernel.stream.block < 1:
        raise ValueError(f"a stream in blocks of {kernel.stream.block}")


def _check_weights(kernel: KernelPlan, program: Program) -> None:
    constants = {t.name for t in program.constants}
    for name in (*kernel.warms, *kernel.keeps):
        if name not in constants:
            raise ValueError(f"it brings near or keeps '{name}', which is no weight")


def _check_nest(nest: NestPlan, computes: Mapping[str, Compute]) -> None:
    for name in (nest.core, *nest.epilogue):
        if name not in computes:
            raise ValueError(f"nest '{nest.tensor}' uses unknown tensor '{name}'")
    core = computes[nest.core]
    if not isinstance(core, Map | Reduce):
        raise ValueError(f"nest '{nest.tensor}': a {type(core).__name__} has no nest")
    outputs = len(core.axes)
    reductions = len(core.reduce_axes) if isinstance(core, Reduce) else 0
    every = {*(f"o{i}" for i in range(outputs)), *(f"r{i}" for i in range(reductions))}
    if sorted(nest.order) != sorted(every):
        raise ValueError(f"nest '{nest.tensor}': order {list(nest.order)} is not its axes {sorted(every)} once each")
    for axis, size in (*nest.register, *nest.threads):
        if axis not in every:
            raise ValueError(f"nest '{nest.tensor}' has no axis '{axis}'; it has {', '.join(sorted(every))}")
        _check_size(axis, size)
    if nest.vector is not None:
        if nest.vector not in every:
            raise ValueError(f"nest '{nest.tensor}' has no axis '{nest.vector}' to vectorise")
        if nest.lanes < 1 or nest.lanes & (nest.lanes - 1):
            raise ValueError(f"nest '{nest.tensor}': {nest.lanes} lanes; a vector has a power of two")
        if dict(nest.register).get(nest.vector, nest.lanes) % nest.lanes:
            raise ValueError(f"nest '{nest.tensor}': its register tile along {nest.vector} is not whole vectors")
    if nest.stages != 1 or nest.pad != 0:
        raise ValueError(f"nest '{nest.tensor}': pipeline stages and padding are not lowered yet; leave them 1 and 0")
    if nest.instruction is not None:
        _check_instruction(nest, core)
    for axis, size in nest.cut:
        _check_axis(axis, "r", reductions, "cut")
        _check_size(axis, size)
    if nest.cut and (len(nest.cut) > 1 or isinstance(core, Map) or nest.vector is None or nest.vector[0] == "r"):
        raise ValueError(f"nest '{nest.tensor}': passes cut one axis of a reduction whose vector is an output axis")
    for axis in nest.unroll:
        _check_axis(axis, "r", reductions, "unroll")
    if nest.ahead and (nest.vector is None or nest.vector[0] == "r" or len(nest.register) != 2 or nest.ahead < 0):
        raise ValueError(f"nest '{nest.tensor}': panels are asked for by blocks of rows whose vector is an output axis")


def _check_instruction(nest: NestPlan, core: Map | Reduce) -> None:
    known = {**DOTS, **WINDOW_DOTS}
    dot = known.get(nest.instruction or "")
    if dot is None:
        raise ValueError(f"nest '{nest.tensor}': no instruction '{nest.instruction}'; there are {', '.join(known)}")
    if not isinstance(core, Reduce) or nest.vector is None or nest.vector[0] != "o" or nest.order[-1][0] != "r":
        raise ValueError(f"nest '{nest.tensor}': {dot.name} runs a sum of products with its vector along an output")
    if nest.lanes != dot.lanes:
        raise ValueError(f"nest '{nest.tensor}': {dot.name} has {dot.lanes} lanes, not {nest.lanes}")
    register = dict(nest.register)
    sides = [-(-n // (dot.lanes if a == nest.vector else dot.rows)) for a, n in register.items()]
    tiles = prod(sides) + sum(sides) + (2 - len(sides))
    if nest.vector not in register or any(a[0] != "o" for a in register) or (dot.is_tile and tiles > TILES):
        raise ValueError(f"nest '{nest.tensor}': {dot.name} cannot keep a register tile of {register}")


def _rank(nest: NestPlan, computes: Mapping[str, Compute]) -> int:
    core = computes[nest.core]
    assert isinstance(core, Map | Reduce)
    return len(core.axes)


def _check_axis(axis: str, kind: str, count: int, what: str) -> None:
    if axis not in {f"{kind}{i}" for i in range(count)}:
        raise ValueError(f"{what} names axis '{axis}', which is not one of its {count} {kind}-axes")


def _check_size(axis: str, size: int) -> None:
    if size < 1:
        raise ValueError(f"size {size} along {axis}")
