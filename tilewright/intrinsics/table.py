"""What an instruction is: its text per dialect, its meaning, where its operands may lie, who executes it together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tilewright.errors import InternalError
from tilewright.ir.forms.bounds import static
from tilewright.ir.forms.loops import Instruction, Memory, Operand, Stmt
from tilewright.ir.meaning.instruct import Meaning


@dataclass(frozen=True)
class OperandRule:
    """An operand: the memories it may lie in, and how many neighbours of the last axis it spans."""

    memories: frozenset[Memory]
    span: int = 1
    written: bool = False


@dataclass(frozen=True)
class Intrinsic:
    """One instruction.

    `text` is a template: {element0} is the operand as a value, {place0} its address, {type0} its element type,
    {tile0} a matrix register, {scalar0} an immediate. `meaning` is what the interpreter of Loops does, for all lanes in
    lock-step. `expand` gives the same as a loop nest, for instructions that each thread runs by itself.
    """

    name: str
    scope: str  # "thread", "warp", "warpgroup"
    operands: tuple[OperandRule, ...]
    scalars: int
    text: Mapping[str, str]
    meaning: Meaning
    expand: Callable[[Instruction], tuple[Stmt, ...]] | None = None
    asynchronous: str | None = None  # how it takes part in asynchronous copies: "issue", "commit", "wait"
    packet_bytes: tuple[int, ...] = field(default=())  # sizes the hardware moves at once, where it matters
    prelude: Mapping[str, str] = field(default_factory=dict)  # what a dialect must declare before the kernel
    permission: str | None = None  # what the system must grant a process before it may run it

    def is_portable(self, source: str) -> bool:
        """Whether a kernel's text spells its instructions by what they mean."""
        return bool(self.prelude.get("portable")) and self.prelude["portable"] in source


def check(intrinsic: Intrinsic, instruction: Instruction) -> None:
    """An instruction that breaks its row is a bug of the lowering."""
    given, rules = instruction.operands, intrinsic.operands
    if len(given) != len(rules) or len(instruction.scalars) != intrinsic.scalars:
        raise InternalError(f"{intrinsic.name} takes {len(rules)} operands and {intrinsic.scalars} scalars")
    for operand, rule in zip(given, rules, strict=True):
        _check_operand(intrinsic, operand, rule)


def check_registers(intrinsic: Intrinsic, instruction: Instruction) -> None:
    """On a CPU a register with lanes is one vector: an instruction fills all of it, and reads no more than it has."""
    for operand, rule in zip(instruction.operands, intrinsic.operands, strict=True):
        buffer = operand.buffer
        if buffer.memory is not Memory.REGISTER:
            continue
        lanes = static(buffer.shape[-1]) if buffer.shape else None
        fits = lanes is not None and (lanes == rule.span or (lanes > rule.span and not rule.written))
        if not fits or static(operand.origin[-1]) != 0:
            raise InternalError(f"{intrinsic.name} takes {rule.span} lanes, {buffer.name} has {lanes}")


def _check_operand(intrinsic: Intrinsic, operand: Operand, rule: OperandRule) -> None:
    buffer = operand.buffer
    if buffer.memory not in rule.memories:
        raise InternalError(f"{intrinsic.name}: {buffer.name} lies in {buffer.memory.value} memory")
    if len(operand.origin) != len(buffer.shape):
        raise InternalError(f"{intrinsic.name}: {buffer.name} has {len(buffer.shape)} axes")
    size = buffer.dtype.bytes * rule.span
    if intrinsic.packet_bytes and size not in intrinsic.packet_bytes:
        raise InternalError(f"{intrinsic.name}: {rule.span} x {buffer.dtype.name} is no packet the hardware moves")
