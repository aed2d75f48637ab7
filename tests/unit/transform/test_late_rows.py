"""Means taken from a product's constants and rows scaled behind products: the same numbers, one pass over a row, and
left alone where something else reads what would go, or constants would lose digits."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto

from tests.cpu_stages import Step, error, evaluated, model_of, random_inputs
from tilewright import ops
from tilewright.frontend.onnx.model import load as load_model
from tilewright.ir.analysis.verify import verify_program
from tilewright.ir.forms.compute import Program, Reduce, reads
from tilewright.transform.clean.fold import fold_constants
from tilewright.transform.reductions.centred import centre_products
from tilewright.transform.reductions.late_rows import scale_rows_late

ROWS, D, HIDDEN, OUT = 9, 6, 37, 5
FIRST: list[Step] = [("MatMul", ("x", "w"), "h", {})]
WITH_BIAS: list[Step] = [("MatMul", ("x", "w"), "m", {}), ("Add", ("m", "a"), "h", {})]
NORM: list[Step] = [("LayerNormalization", ("h", "g", "b"), "n", {"axis": -1})]
ROOT: list[Step] = [("Mul", ("h", "h"), "q", {}), ("ReduceMean", ("q",), "v", {"axes": [-1], "keepdims": 1}),
                    ("Sqrt", ("v",), "r", {}), ("Div", ("h", "r"), "n", {})]  # fmt: skip
LAST: list[Step] = [("MatMul", ("n", "u"), "y", {})]


def constants(half: bool = False, **others: np.ndarray) -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    shapes = {"w": (D, HIDDEN), "g": (HIDDEN,), "b": (HIDDEN,), "a": (HIDDEN,), "u": (HIDDEN, OUT)}
    found = {name: random.standard_normal(shape) for name, shape in shapes.items()} | others
    return {name: values.astype(np.float16 if half else np.float32) for name, values in found.items()}


def program_of(steps: list[Step], given: dict[str, np.ndarray], **outputs: tuple[int, ...]) -> Program:
    half = given["w"].dtype == np.float16
    types = dict.fromkeys(("x", "y"), TensorProto.FLOAT16) if half else None
    read = {name for _, sources, _, _ in steps for name in sources}
    given_in = {name: (ROWS, D) for name in "xz" if name in read}
    model = model_of(steps, given_in, outputs or {"y": (ROWS, OUT)},
                     {n: a for n, a in given.items() if n in read}, types)  # fmt: skip
    return fold_constants(ops.lower(load_model(model, {})))


def pays(program: Program) -> float:
    return 1.0 if any(t.name.endswith("_unscaled") for c in program.computes for t in c.outputs) else 2.0


def changed(program: Program) -> Program:
    made = scale_rows_late(centre_products(program), pays)
    verify_program(made)
    return made


def passes(program: Program) -> int:
    return sum(isinstance(c, Reduce) for c in program.computes)


def equal(made: Program, program: Program, limit: float) -> None:
    given = random_inputs(program)
    found, wanted = evaluated(made, given), evaluated(program, given, wide=True)
    assert all(error(found[name], wanted[name]) < limit for name in wanted)


@pytest.mark.parametrize("half", [False, True], ids=["float32", "float16"])
@pytest.mark.parametrize("first", [FIRST, WITH_BIAS], ids=["plain", "bias"])
@pytest.mark.parametrize(("norm", "before"), [(NORM, 4), (ROOT, 3)], ids=["layer", "root"])
def test_rows_between_products_are_read_once(
    norm: list[Step], before: int, first: list[Step], half: bool
) -> None:
    program = program_of(first + norm + LAST, constants(half))
    made = changed(program)
    assert passes(program) == before and passes(made) == 3
    assert "n" not in {t.name for c in made.computes for t in c.outputs} and made.remarks
    equal(made, program, 4e-3 if half else 3e-6)


def test_a_mean_of_a_thousand_deviations_costs_no_digits() -> None:
    """The model's own way rounds sums that are a thousand times what is left of them."""
    random = np.random.default_rng(5)
    far = 1000 * random.standard_normal((D, 1)) + random.standard_normal((D, HIDDEN))
    given = constants(w=far)
    program = program_of(FIRST + NORM + LAST, given)
    x = random_inputs(program)
    w, g, b, u = (given[name].astype(np.float64) for name in "wgbu")
    h = x["x"].astype(np.float64) @ w
    h -= h.mean(-1, keepdims=True)
    wanted = (h / np.sqrt((h * h).mean(-1, keepdims=True) + 1e-5) * g + b) @ u
    assert error(evaluated(changed(program), x)["y"], wanted) < 3e-6
    assert error(evaluated(program, x)["y"], wanted) > 3e-6


def test_what_is_read_elsewhere_stays() -> None:
    shape = (ROWS, HIDDEN)
    hidden = program_of(FIRST + NORM + LAST, constants(), y=(ROWS, OUT), h=shape)
    assert centre_products(hidden) is hidden
    weights = program_of([*FIRST, *NORM, *LAST, ("MatMul", ("z", "w"), "v", {})], constants(), y=(ROWS, OUT), v=shape)
    assert centre_products(weights) is weights
    normed = program_of(FIRST + NORM + LAST, constants(), y=(ROWS, OUT), n=shape)
    assert passes(changed(normed)) == 3 and not changed(normed).remarks  # centred, but not scaled late
    equal(changed(normed), normed, 3e-6)


def test_rows_of_tables_are_centred_in_the_tables() -> None:
    looked_up: list[Step] = [("Gather", ("t", "i"), "p", {"axis": 0}), ("Add", ("p", "s"), "h", {})]
    tables = {"t": np.random.default_rng(1).standard_normal((11, HIDDEN)).astype(np.float32)}
    tables |= {"i": np.array([3, 0, 7]), "s": tables["t"][:3] + 1, "g": constants()["g"], "b": constants()["b"]}
    model = model_of(looked_up + NORM, {"i": (3,)}, {"n": (3, HIDDEN)}, {k: v for k, v in tables.items() if k != "i"},
                     {"i": TensorProto.INT64})  # fmt: skip
    program = fold_constants(ops.lower(load_model(model, {})))
    made = centre_products(program)
    assert passes(program) == 2 and passes(made) == 1
    given = {"i": tables["i"]}
    assert error(evaluated(made, given)["n"], evaluated(program, given, wide=True)["n"]) < 3e-6


def test_what_is_no_product_of_constants_is_centred_before_the_next() -> None:
    """Subtracted behind the product, a large mean would cancel there."""
    bent: list[Step] = [("MatMul", ("x", "w"), "m", {}), ("Relu", ("m",), "h", {})]
    program = program_of(bent + NORM + LAST, constants())
    made = changed(program)
    (product,) = (c for c in made.computes if c.outputs[0].name == "y_unscaled")
    assert {t.name for t in reads(product)} == {"n_centred", "u_scaled"}
    equal(made, program, 3e-6)


def test_constants_keep_their_digits() -> None:
    """In float16 1e-4 times 1e-4 is below its smallest normal number: scaled apart neither is."""
    small = constants(half=True, g=np.full(HIDDEN, 1e-4), u=constants()["u"] * 1e-4)
    program = program_of(FIRST + ROOT[:-1] + [("Div", ("h", "r"), "p", {}), ("Mul", ("p", "g"), "n", {})] + LAST, small)
    assert changed(program) is program


def test_rows_stay_where_that_is_faster() -> None:
    program = program_of(FIRST + ROOT + LAST, constants())
    assert scale_rows_late(program, lambda _: 1.0) is program
