"""How much one compilation does. A file of some hundred bytes can ask for any amount: functions that call functions,
loops in loops, steps by the million."""

from __future__ import annotations

from tilewright.errors import BudgetError

MOST = 1 << 18  # nodes as they are lowered, more than the largest models have
CALLS_A_NODE = 4  # kernel calls of one run that count as a node: they are rows of a table, and planned once
MOST_IN_A_LOOP = 1 << 16  # kernel calls of one loop in one piece: a longer one runs its body step by step


class Budget:
    """One count over everything that is written out."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._spent = 0

    def spend(self, amount: int, where: str, what: str, way_out: str) -> None:
        """`amount` more for a node; what is too much is refused before it is made."""
        self._spent += amount
        if self._spent > self._most:
            raise BudgetError(f"{where}: {what}, with which the model comes to {self._spent} nodes, {CALLS_A_NODE} "
                              f"kernel calls counted as one; {self._most} are compiled at once: {way_out}")  # fmt: skip
