"""What a kernel's Loops ask of a device, and whether the target has it: shared memory, threads, blocks, registers.

Plans are made to fit, so a kernel that does not is a mistake of ours; found here it has a name and numbers, found by
the driver it would be a model that does not load.
"""

from __future__ import annotations

from collections.abc import Collection
from math import prod

from tilewright.backend.gpu.kernel.shared_arena import place_shared
from tilewright.errors import InternalError
from tilewright.intrinsics.gpu_matrix import FORMS
from tilewright.ir.forms.bounds import static, upper
from tilewright.ir.forms.expr import loads
from tilewright.ir.forms.loops import (
    Alloc,
    Buffer,
    For,
    If,
    Instruction,
    Kernel,
    LoopProgram,
    Memory,
    Stmt,
    Store,
    statements,
)
from tilewright.render.launch_shape import launch_shape, meets
from tilewright.runtime.gpu_model import LaunchLimits, why_refused
from tilewright.target import Target

_REGISTER_BYTES = 4


def limits_of(target: Target) -> LaunchLimits:
    return LaunchLimits(target.local.capacity, target.max_threads)


def check_limits(loops: LoopProgram, target: Target) -> None:
    """Raises InternalError that names the first kernel which no device like the target would start."""
    for kernel in loops.kernels:
        reason = why_not_started(kernel, target)
        if reason is not None:
            raise InternalError(f"kernel {kernel.name} {reason}")


def why_not_started(kernel: Kernel, target: Target) -> str | None:
    shape = launch_shape(kernel)
    x, y, z = (int(upper(extent)) for extent in shape.grid)
    shared = place_shared(kernel).bytes
    reason = why_refused((x, y, z), shape.threads, shared, limits_of(target))
    if reason is not None:
        return reason
    # sums that tensor cores add to have no other place than registers; a thread's own arrays may lie in memory
    sums = {s.operands[0].buffer for s in statements(kernel.body) if isinstance(s, Instruction) and s.name in FORMS}
    stores = [s for s in statements(kernel.body) if isinstance(s, Store) and s.buffer.memory is Memory.REGISTER]
    sums |= {s.buffer for s in stores if any(n.source in sums for n in loads(s.value))}  # and what those are added to
    kept, most = kept_registers(kernel.body, sums), min(target.vector_registers, target.register_file // shape.threads)
    if kept > most:
        return f"sums up in {kept} registers a thread, and each of {shape.threads} threads has {most}"
    if meets(kernel):
        places = min(target.resident_threads // shape.threads, target.local.capacity // max(1, shared))
        if x * y * z > places * target.units:
            return f"has {x * y * z} blocks that wait for each other, and {places * target.units} run at a time"
    return None


def kept_registers(body: tuple[Stmt, ...], buffers: Collection[Buffer]) -> int:
    """Registers of 32 bits that these buffers of a thread take at the most at a time."""
    most = 0
    for stmt in body:
        inside = 0
        if isinstance(stmt, If):
            inside = max(kept_registers(stmt.then, buffers), kept_registers(stmt.otherwise, buffers))
        elif isinstance(stmt, For):
            inside = kept_registers(stmt.body, buffers)
        elif isinstance(stmt, Alloc):
            inside = kept_registers(stmt.body, buffers)
            if stmt.buffer in buffers:
                count = prod(static(e) or 0 for e in stmt.buffer.shape)
                inside += -(-count * stmt.buffer.dtype.bytes // _REGISTER_BYTES)
        most = max(most, inside)
    return most
