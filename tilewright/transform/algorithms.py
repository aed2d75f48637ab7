"""Which algorithm computes what: every choice between ways to the same result that is made by predicted time."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.ir.forms.compute import Program
from tilewright.target import Target
from tilewright.transform.bilinear.strassen import choose_products
from tilewright.transform.bilinear.toom_cook import WINDOWED
from tilewright.transform.bilinear.winograd import Predict, choose_convolutions
from tilewright.transform.precision.three_terms import use_three_terms
from tilewright.transform.recurrence.prefixes import choose_prefixes
from tilewright.transform.recurrence.reroll import reroll
from tilewright.transform.recurrence.wavefront import choose_orders
from tilewright.transform.reductions.centred import centre_products
from tilewright.transform.reductions.joined import split_joined
from tilewright.transform.reductions.late_rows import scale_rows_late
from tilewright.transform.reductions.split import Known, split_reductions


def choose_algorithms(
    program: Program, target: Target, convolutions: Predict | None, products: Predict | None,
    recurrences: Predict | None, reductions: Predict | None, known: Known | None = None,
    sizes: Sequence[int] = WINDOWED, terms: Predict | None = None, steps: Predict | None = None,
    rows: Predict | None = None,
) -> Program:  # fmt: skip
    """The Program with steps that were written out as Scans, but few for which `steps` predicts no gain by it, and with
    convolutions by Winograd's algorithms, products by Strassen's, stacked recurrences as wavefronts, running sums in
    blocks and long reductions in parts, where that is predicted to pay, and reductions over joined tensors part by
    part, and float32 products in three terms on tensor cores, and means in constants and rows scaled behind products;
    None, in the place of what predicts the time of any, leaves them as they are. `sizes` are those of Winograd's
    algorithms; `known` keeps what was chosen for convolutions and reductions before."""
    if recurrences is not None:
        program = reroll(program, steps)
    if rows is not None:
        program = scale_rows_late(centre_products(program), rows)
    if convolutions is not None:
        program = choose_convolutions(program, convolutions, sizes, known)
    if recurrences is not None:
        program = choose_prefixes(choose_orders(program, recurrences), recurrences)
    if products is not None:
        program = choose_products(program, products)
    if terms is not None:
        program = use_three_terms(program, target, terms)
    return program if reductions is None else split_reductions(split_joined(program, target), target, reductions, known)
