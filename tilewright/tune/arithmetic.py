"""In which order a kernel takes its sums: kernels that take them alike give the same results to the last bit."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

from tilewright.tile_graph.plan.form import Leaf, Plan, Tile


def order_of_sums(kernel: Tile) -> Hashable:
    """Equal for kernels of the same leaves whose results do not differ."""
    carried = tuple(t.sizes for t in kernel.walk() if isinstance(t, Tile) and any(h.mode == "carry" for h in t.holds))
    return sums_of(kernel.leaves), carried


def sums_of(leaves: Sequence[Leaf]) -> Hashable:
    return tuple(map(_sum_of, leaves))


def sums_of_plan(plan: Plan, copies: Collection[str] = ()) -> Hashable:
    """Of all kernels, however the leaves are handed out to them; where `copies` are made, nothing is summed or
    rounded."""
    leaves = {leaf.tensor: _sum_of(leaf) for kernel in plan.kernels for leaf in kernel.leaves
              if leaf.tensor not in copies}  # fmt: skip
    carried = {h.tensor: t.sizes for k in plan.kernels for t in k.walk() if isinstance(t, Tile)
               for h in t.holds if h.mode == "carry"}  # fmt: skip
    return tuple(sorted(leaves.items(), key=lambda item: item[0])), tuple(sorted(carried.items()))


def sums_in_common(one: Plan, other: Plan) -> bool:
    """Whether two plans, perhaps of two Programs, take those sums alike that both of them have."""
    first, second = ({leaf.tensor: _sum_of(leaf) for kernel in plan.kernels for leaf in kernel.leaves}
                     for plan in (one, other))  # fmt: skip
    return all(first[name] == second[name] for name in first.keys() & second.keys())


def _sum_of(leaf: Leaf) -> tuple[Hashable, ...]:
    """Whether vectors are used counts as well: functions of a vector and of a single number are not rounded alike."""
    along = tuple(axis for axis in leaf.order if axis.startswith("r"))
    if not along:
        return (leaf.instruction, leaf.lanes > 1)
    across = leaf.vector is not None and leaf.vector.startswith("r")
    partial = (leaf.vector, leaf.lanes, tuple(size for size in leaf.register if size[0].startswith("r")))
    return (leaf.instruction, leaf.lanes > 1, along, partial if across else (), leaf.form.order_of_sums())
