"""Long expressions in parts: what has a long text gets a name before the statement that it belongs to.

C repeats a value wherever it is used, so that text would double with every use of what is itself used twice. A part can
be computed beforehand where no condition keeps it from being computed, or where computing it does no harm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from tilewright.ir.forms.bounds import bounds, lower
from tilewright.ir.forms.expr import Const, Expr, Load, Op, walk
from tilewright.ir.forms.loops import Memory
from tilewright.render.c_scope import Scopes
from tilewright.render.c_text import DIVISIONS, TYPES

_LONGEST = 2000  # characters of a part; some compilers take no more than 256 brackets inside each other
_SHORT = 40  # of one that is used more than once in a long text: less than a call of a function


@dataclass(frozen=True, eq=False)
class ExprParts:
    """What of an expression may be computed before it, by the choices that have both of their sides computed.

    An expression may stand inside another one, by lanes or on all of them: in the place of its node `inside`.
    """

    root: Expr
    both: Callable[[Op], bool] = lambda _: False
    around: ExprParts | None = None
    inside: Expr | None = None

    @cached_property
    def computed(self) -> frozenset[Expr]:
        """Nodes that no condition keeps from being computed."""
        if self.around is not None and self.inside not in self.around.computed:
            return frozenset()
        found: set[Expr] = set()
        stack = [self.root]
        while stack:
            node = stack.pop()
            if node in found:
                continue
            found.add(node)
            lazy = isinstance(node, Op) and node.op.name in ("select", "and", "or") and not self.both(node)
            stack.extend(node.args[:1] if lazy else node.args)
        return frozenset(found)

    @cached_property
    def shared(self) -> frozenset[Expr]:
        """Nodes that are written more than once."""
        seen: set[Expr] = {self.root}
        found: set[Expr] = set()
        stack = [self.root]
        while stack:
            node = stack.pop()
            for arg in () if isinstance(node, Load) else node.args:
                (found if arg in seen else seen).add(arg)
                if arg not in found:
                    stack.append(arg)
        return frozenset(found)

    def is_long(self, text: str | None) -> bool:
        """Whether all that is written twice should have a name."""
        return text is not None and len(text) > _LONGEST

    def is_worth_a_name(self, node: Expr, text: str, long: bool) -> bool:
        if len(text) <= (_SHORT if long and node in self.shared else _LONGEST):
            return False
        return isinstance(node, Op) and node is not self.root and (node in self.computed or is_harmless(node))


def is_short(text: str) -> bool:
    """Whether a text may as well be written twice."""
    return len(text) <= _SHORT


def is_harmless(value: Expr) -> bool:
    """Whether all that is read lies inside its buffer, and nothing is divided by what may be zero."""
    for node in walk(value):
        if isinstance(node, Load) and node.source.memory is not Memory.REGISTER:
            for index, extent in zip(node.indices, node.source.shape, strict=True):
                low, high = bounds(index)
                if low < 0 or high >= lower(extent):
                    return False
        divides = isinstance(node, Op) and node.dtype.is_int and node.op.name in (*DIVISIONS, "div")
        if divides and not isinstance(node.args[1], Const):
            return False
    return True


class LongValues:
    """The part of a renderer that writes values in parts."""

    scopes: Scopes
    emit: Callable[[str], None]
    fresh: Callable[[str], str]
    scalar_node: Callable[[Expr, dict[Expr, str]], str]

    def value(self, root: Expr, around: ExprParts | None = None, inside: Expr | None = None) -> str:
        """A scalar for the statement that is written next, in the place of a node of a vector or by itself."""
        parts = ExprParts(root, around=around, inside=inside)
        known = self.scopes.inner.texts
        texts: dict[Expr, str] = {}
        stack = [root]
        long = False
        while stack:
            node = stack[-1]
            if node not in texts and node in known and not long:
                texts[node] = known[node]
            elif node not in texts:
                waiting = [] if isinstance(node, Load) else [a for a in node.args if a not in texts]
                if waiting:
                    stack.extend(waiting)
                    continue
                text = self.scalar_node(node, texts)
                if parts.is_worth_a_name(node, text, long):
                    text = self.named(text, TYPES[node.dtype.name])
                elif isinstance(node, Load) or all(known.get(a) is texts[a] for a in node.args):
                    known[node] = text  # no part of it has a name of this statement alone
                texts[node] = text
            if not long and parts.is_long(texts[node]):
                long, texts, stack = True, {}, [root]  # from the start, with names for what is written twice
                continue
            stack.pop()
        return texts[root]

    def named(self, text: str, kind: str) -> str:
        name = self.fresh("t")
        self.emit(f"const {kind} {name} = {text};")
        return name
