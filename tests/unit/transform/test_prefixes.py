"""Running sums in blocks: the same numbers, nothing of later steps in earlier ones, and only where that pays."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.cpu_stages import model_of
from tilewright import ops
from tilewright.frontend.onnx.model import load as load_model
from tilewright.ir.analysis.verify import verify_program
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import Map, Program, Scan
from tilewright.ir.forms.expr import Axis, load, op, var
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.meaning.interpret import evaluate
from tilewright.transform.clean.fold import fold_constants
from tilewright.transform.recurrence.prefixes import choose_prefixes


def scans(program: Program) -> list[Scan]:
    return [c for c in program.computes if isinstance(c, Scan)]


def prefer(blocks: bool) -> Callable[[Program], float]:
    return lambda program: 1.0 if bool(scans(program)) == blocks else 0.5


def summed(shape: tuple[int, ...], axis: int, exclusive: int = 0, reverse: int = 0) -> Program:
    steps = [("CumSum", ("x", "axis"), "y", {"exclusive": exclusive, "reverse": reverse})]
    model = model_of(steps, {"x": shape}, {"y": shape}, {"axis": np.array(axis)})
    return fold_constants(ops.lower(load_model(model, {})))


def in_blocks(program: Program) -> Program:
    made = choose_prefixes(program, prefer(blocks=True))
    verify_program(made)
    assert not scans(made) and made.remarks
    return made


@pytest.mark.parametrize("exclusive", [0, 1])
@pytest.mark.parametrize("reverse", [0, 1])
@pytest.mark.parametrize(("shape", "axis"), [((16, 3), 0), ((37, 2), 0), ((3, 50), 1), ((101,), 0)])
def test_sums_are_the_same(shape: tuple[int, ...], axis: int, reverse: int, exclusive: int) -> None:
    program = summed(shape, axis, exclusive, reverse)
    given = {"x": np.random.default_rng(2).standard_normal(shape).astype(np.float32)}
    (wanted,), (found,) = (evaluate(p, given).values() for p in (program, in_blocks(program)))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("shape", "axis", "within"), [((6, 40, 5), 1, (6, 5, 8, 5)), ((40, 6), 0, (5, 8, 6)),
                                                       ((6, 40), 1, (6, 5, 8)), ((6, 37), 1, (6, 6, 7))])  # fmt: skip
def test_blocks_lie_as_what_is_summed(shape: tuple[int, ...], axis: int, within: tuple[int, ...]) -> None:
    """In parts that leave no rest where there are any near, and what a block adds up to is not summed once more."""
    made = in_blocks(summed(shape, axis))
    (inside,) = [t for t in made.tensors() if t.name.endswith("inside")]
    (parts,) = [c for c in made.computes if c.outputs[0].name.endswith("blocks")]
    assert inside.shape == within and isinstance(parts, Map)


@pytest.mark.parametrize("spoilt", [np.nan, np.inf])
def test_no_step_knows_of_a_later_one(spoilt: float) -> None:
    x = np.ones((40, 2), np.float32)
    x[23, 1] = spoilt
    (found,) = evaluate(in_blocks(summed((40, 2), 0)), {"x": x}).values()
    assert np.isfinite(found[:23]).all() and np.isfinite(found[:, 0]).all() and not np.isfinite(found[23:, 1]).any()


def running(operator: str, count: int = 21) -> Program:
    """max, min or product so far, from what the caller gives to start with."""
    kind, axis, t = dtypes.float32, Axis("i", 3), Axis("t", count)
    x, start = Tensor("x", (count, 3), kind), Tensor("start", (3,), kind)
    before, after, all_of = Tensor("before", (3,), kind), Tensor("after", (3,), kind), Tensor("y", (count, 3), kind)
    step = Map(after, (axis,), op(operator, load(x, (var(t), var(axis))), load(before, (var(axis),))))
    scan = Scan(t, (start,), (before,), (step,), (after,), (None,), ((after, all_of),))
    return Program((x, start), (all_of,), (scan,), {})


@pytest.mark.parametrize("operator", ["add", "max", "min"])
def test_a_start_that_the_caller_gives_counts(operator: str) -> None:
    program, random = running(operator), np.random.default_rng(4)
    given = {t.name: random.standard_normal(t.shape).astype(np.float32) for t in program.inputs}
    (wanted,), (found,) = (evaluate(p, given).values() for p in (program, in_blocks(program)))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("program", [running("mul"), running("add", 9)], ids=["products", "few"])
def test_others_stay_steps(program: Program) -> None:
    """Products, which may overflow on the way, and few steps."""
    assert choose_prefixes(program, prefer(blocks=True)) is program


def test_steps_that_are_as_fast_stay() -> None:
    program = summed((40, 2), 0)
    assert choose_prefixes(program, prefer(blocks=False)) is program
