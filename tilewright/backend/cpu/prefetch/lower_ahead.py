"""Asks for the weights of the next panel while this one is multiplied: a few elements in every step of the sum."""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms.expr import Axis, Expr, Load, substitute
from tilewright.ir.forms.loops import PREFETCH_TILE, Instruction, Operand, Stmt
from tilewright.lower.access import Access
from tilewright.lower.memory import ALIGNMENT


def hints(
    weights: Load, panel: Mapping[Axis, Expr], step: Expr, share: int, steps: int, access: Access
) -> tuple[Stmt, ...]:
    """What `steps` steps from the `step`th on ask for, `share` elements each, from the beginning of a panel on. Steps
    are counted over all blocks of rows, and a panel is one run of memory. The last panel's hints go beyond it."""
    place = access.read[weights.source]
    *outer, innermost = place.indices(tuple(substitute(i, dict(panel)) for i in weights.indices))
    line = ALIGNMENT // weights.dtype.bytes
    asked = []
    for first in range(0, share * steps, line):
        origin = (*outer, simplify(innermost + step * share + first))
        asked.append(Instruction(PREFETCH_TILE, (Operand(place.buffer, origin),)))
    return tuple(asked)
