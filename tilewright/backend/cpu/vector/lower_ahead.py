"""Asks for weights before they are multiplied: in every step of the sum for a few elements of the next panel, and for
the vectors of its own that a later step multiplies."""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms.expr import Axis, Expr, Load, substitute
from tilewright.ir.forms.loops import Instruction, Operand, Stmt
from tilewright.lower.access import Access
from tilewright.target.instruction_sets import LINE_BYTES


def hints(
    hint: str, weights: Load, panel: Mapping[Axis, Expr], step: Expr, share: int, steps: int, access: Access
) -> tuple[Stmt, ...]:
    """What `steps` steps from the `step`th on ask for, `share` elements each, from the beginning of a panel on, which
    is one run of memory. What the last ones ask for lies beyond it."""
    place = access.read[weights.source]
    *outer, innermost = place.indices(tuple(substitute(i, dict(panel)) for i in weights.indices))
    line = LINE_BYTES // weights.dtype.bytes
    asked = []
    for first in range(0, share * steps, line):
        origin = (*outer, simplify(innermost + step * share + first))
        asked.append(Instruction(hint, (Operand(place.buffer, origin),)))
    return tuple(asked)
