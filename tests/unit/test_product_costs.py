"""What products on tensor cores are predicted to cost beside each other, and loads that conditions choose between."""

from __future__ import annotations

from tilewright.backend.gpu.matrix_cost import Product, fragments_for
from tilewright.backend.gpu.matrix_plan import of_equal_warps
from tilewright.backend.gpu.nest import chosen_places
from tilewright.ir.dtypes import float32
from tilewright.ir.expr import Axis, Load, const, lt, select, substitute, var
from tilewright.ir.expr import load as element
from tilewright.ir.simplify import simplify
from tilewright.ir.tensor import Tensor
from tilewright.target import machine


def product(rows: int, columns: int, work: int) -> Product:
    return Product(rows, columns, 1, 768, 96, (0, 0), False, (True, False), 8, work)


def test_long_epilogues_go_to_many_warps() -> None:
    """Four warps of 96 elements each have their schedulers to themselves; twelve of 32 keep them busy."""
    target = machine("h200")

    def cycles(rows: int, columns: int, work: int) -> float:
        found = fragments_for(target, "mma_float16", product(rows, columns, work))
        assert found is not None
        return found[1].alone

    few, many = ((64, 192), (192, 64))
    assert cycles(*many, 48) < 0.8 * cycles(*few, 48)
    assert cycles(*many, 48) - cycles(*many, 0) < 0.5 * (cycles(*few, 48) - cycles(*few, 0))


def test_products_of_a_kernel_are_by_as_many_warps() -> None:
    target = machine("h200")
    pair = (("mma_float16", product(32, 384, 48)), ("mma_float16", product(32, 96, 3)))
    apart = [fragments_for(target, *each) for each in pair]
    found = of_equal_warps(target, pair)
    assert found is not None and len({way.warps for way, _ in found}) == 1
    assert sum(cost.alone for _, cost in found) >= sum(each[1].alone for each in apart if each is not None)


def test_conditions_choose_places() -> None:
    """Between elements of one tensor, however many conditions there are; between two tensors they stay."""
    x, y = Tensor("x", (4, 8), float32), Tensor("y", (4, 8), float32)
    i = Axis("i", 24)
    first, last = element(x, (0, var(i))), element(x, (1, var(i) - 16))
    chosen = chosen_places(select(lt(var(i), 8), first, select(lt(var(i), 16), element(x, (3, var(i) - 8)), last)))
    assert isinstance(chosen, Load) and chosen.source is x
    for at, place in ((0, (0, 0)), (9, (3, 1)), (23, (1, 7))):
        assert [simplify(substitute(n, {i: const(at)})) for n in chosen.indices] == [const(n) for n in place]
    apart = select(lt(var(i), 8), first, element(y, (0, var(i))))
    assert chosen_places(apart) is apart
