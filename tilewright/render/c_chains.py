"""Finds calls of vector mathematics from register to register, which are written as one where they stand together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.expr import Load, Op
from tilewright.ir.forms.loops import For, ForKind, Memory, Stmt, Store
from tilewright.ir.forms.scalar import CHAINS
from tilewright.render.c_address import constants, element_name


class RegisterCall(NamedTuple):
    name: str
    argument: str  # the register
    result: str
    lanes: int


def calls_together(body: Sequence[Stmt]) -> list[RegisterCall]:
    """The calls of one function that the statements begin with."""
    calls: list[RegisterCall] = []
    for stmt in body:
        call = register_call(stmt)
        if call is None or (calls and (call.name, call.lanes) != (calls[0].name, calls[0].lanes)):
            break
        calls.append(call)
    return calls


def register_call(stmt: Stmt) -> RegisterCall | None:
    """The call, where the statement is nothing else: result[lane] = function(argument[lane])."""
    if not isinstance(stmt, For) or stmt.kind is not ForKind.VECTOR or len(stmt.body) != 1:
        return None
    store = stmt.body[0]
    if not isinstance(store, Store) or store.buffer.memory is not Memory.REGISTER:
        return None
    call = store.value
    if not isinstance(call, Op) or call.op.name not in CHAINS or call.dtype is not dtypes.float32:
        return None
    argument = call.args[0]
    if not isinstance(argument, Load) or argument.source.memory is not Memory.REGISTER:
        return None
    if stmt.axis not in argument.indices[-1].axes or stmt.axis not in store.indices[-1].axes:
        return None
    return RegisterCall(call.op.name, element_name(argument.source, constants(argument.indices[:-1])),
                        element_name(store.buffer, constants(store.indices[:-1])), int(stmt.axis.extent))  # type: ignore[arg-type]
