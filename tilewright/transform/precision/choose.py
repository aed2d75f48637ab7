"""Precision of a Program: contractions of quantised operands in integers, and others in fewer bits where asked for.

In bfloat16 and float16 the operands of contractions and convolutions are kept in 16 bits and their sums in float32; in
tf32 operands are kept as float32 numbers that are rounded to 11 significant bits. Everything elementwise, softmax and
normalisations stay float32, and so do the model's inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tilewright.errors import OptionError
from tilewright.ir.analysis.products import factors, is_zero
from tilewright.ir.analysis.simplify import linear
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.bounds import upper
from tilewright.ir.forms.compute import Compute, Program, Reduce, Scan
from tilewright.ir.forms.dtypes import DType
from tilewright.ir.forms.expr import Axis, Const, Expr, Load, Var, axes_of, cast, is_op, rewrite, select
from tilewright.ir.forms.tensor import Tensor
from tilewright.target import Target
from tilewright.transform.precision.late_factors import apply_factors_late
from tilewright.transform.quantise.before_moves import round_before_moves
from tilewright.transform.quantise.extremes import extremes_of_bytes
from tilewright.transform.quantise.float8 import multiply_codes
from tilewright.transform.quantise.packed import in_one_step, keep_packed
from tilewright.transform.quantise.quantise import form_of, use_integers
from tilewright.transform.quantise.requantise import merge_steps
from tilewright.transform.storage import Encoding, all_computes, change_storage, converted

_NARROW = {"bfloat16": dtypes.bfloat16, "float16": dtypes.float16, "tf32": dtypes.tf32}
_CONVOLUTIONS = "tf32_convolutions"
_INTEGERS = "mma_int8"  # what makes integers pay on a GPU
_SMALL_FLOATS = "mma_e4m3"  # and floats of 8 bits
_LEAST_SUMMED = 7  # of the 32 elements that a row of a matrix register has: with fewer it mostly multiplies zeros


def set_precision(program: Program, target: Target, precision: str | None) -> Program:
    """`precision` None: as the model says; float32: no integers in its place; others as above."""
    if precision != "float32" and (target.kind == "cpu" or target.rate(_INTEGERS)):
        program = use_integers(program, form_of(target))
        # kernels of a GPU end with what they store; on CPUs moves are copies that round on the way
        program = merge_steps(extremes_of_bytes(program if target.kind == "cpu" else round_before_moves(program)))
    if precision != "float32" and target.rate(_SMALL_FLOATS):
        program = multiply_codes(program)
    if precision in ("tf32", _CONVOLUTIONS, "float16") and target.kind == "cpu":
        raise OptionError(f"precision {precision!r} is for GPUs alone, not {target.name!r}: there is 'bfloat16'")
    if precision in _NARROW:
        program = use_narrow(program, target, _NARROW[precision])
    if precision == _CONVOLUTIONS:
        program = use_narrow(program, target, dtypes.tf32, is_convolution)
    if target.kind != "cpu":
        program = keep_packed(apply_factors_late(in_one_step(program)))
    return _with_guards_outside(program)


def use_narrow(
    program: Program, target: Target, narrow: DType, which: Callable[[Reduce, tuple[Load, Load]], bool] | None = None
) -> Program:
    """Operands of float32 contractions, or of some, in fewer bits; what produces them rounds once, as it stores. Where
    matrix registers multiply them, sums that those cannot take stay as they are: vectors would have to widen every
    operand."""
    has_matrices = "amx_bf16" in target.features
    wanted: dict[Tensor, Encoding] = {}
    direct: set[Tensor] = set()
    for compute in all_computes(program):
        operands = contracted(compute)
        if operands is None or any(n.dtype is not dtypes.float32 for n in operands):
            continue
        if has_matrices and not _is_matrix_product(compute, operands):
            continue
        if which is not None and not (isinstance(compute, Reduce) and which(compute, operands)):
            continue
        direct.update(compute.outputs)
        wanted.update((n.source, converted(narrow, dtypes.float32)) for n in operands)
    return change_storage(program, wanted, direct)[0]


def _is_matrix_product(compute: Compute, operands: tuple[Load, Load]) -> bool:
    """Whether one operand has a column of its own for every result, and rows of the other are long enough to fill a
    matrix register."""
    assert isinstance(compute, Reduce)
    for columns, rows in (operands, operands[::-1]):
        own, along = _own(columns), _own(rows) | _apart(rows)
        length = max((_extent(r) for r in compute.reduce_axes if r in along), default=0)
        others = axes_of(*rows.indices)
        has_columns = any(a in own and a not in others and _extent(a) > 1 for a in compute.axes)
        if has_columns and length >= _LEAST_SUMMED and all(r in own for r in compute.reduce_axes):
            return True
    return False


def is_convolution(compute: Reduce, operands: tuple[Load, Load]) -> bool:
    """Whether one operand is weights of windows, of one element too: a channel of the result and one that is summed
    over, in either order, and then the window, beside images of as many dimensions."""
    results, summed = set(compute.axes), set(compute.reduce_axes)
    for weights, images in (operands, operands[::-1]):
        if weights.source.rank < 3 or weights.source.rank != images.source.rank:
            continue
        first, second, *window = (set(axes_of(i)) for i in weights.indices)
        channels = any(a and b and a <= results and b <= summed for a, b in ((first, second), (second, first)))
        if channels and all(w <= summed for w in window):
            return True
    return False


def _own(read: Load) -> set[Axis]:
    """Axes that are an index by themselves, and in no other."""
    plain = {i.axis for i in read.indices if isinstance(i, Var)}
    return {a for a in plain if sum(a in axes_of(i) for i in read.indices) == 1}


def _apart(read: Load) -> set[Axis]:
    """Axes of windows that do not lie over each other: r of x * size(r) + r is as good as an index by itself."""
    found = set()
    for form in map(linear, read.indices):
        for term, factor in form.terms.items():
            if isinstance(term, Var) and factor == 1 and _extent(term.axis) in form.terms.values():
                found.add(term.axis)
    return found


def _extent(axis: Axis) -> int:
    return axis.extent if isinstance(axis.extent, int) else int(upper(axis.extent))


def contracted(compute: Compute) -> tuple[Load, Load] | None:
    """The two reads of a sum of products, each over something summed; None for any other compute."""
    if not isinstance(compute, Reduce) or compute.monoid.operator != "add":
        return None
    product = factors(compute.elements[0], compute.axes, compute.reduce_axes)
    parts = [f for f in product if not isinstance(f.value, Const)]
    if len(parts) != 2 or not all(f.reductions for f in parts):
        return None
    left, right = (_read(f.value) for f in parts)
    if left is None or right is None or left is right:
        return None
    return left, right


def _read(value: Expr) -> Load | None:
    """The read below conversions and conditions that put 0 in its place."""
    while not isinstance(value, Load):
        if is_op(value, "cast"):
            value = value.args[0]
        elif is_op(value, "select") and is_zero(value.args[2]):
            value = value.args[1]
        elif is_op(value, "select") and is_zero(value.args[1]):
            value = value.args[2]
        else:
            return None
    return value


def _with_guards_outside(program: Program) -> Program:
    """cast(select(c, x, 0)) under a sum as select(c, cast(x), 0): one spelling of a guarded, widened read."""

    def rule(node: Expr) -> Expr | None:
        if not is_op(node, "cast") or not is_op(node.args[0], "select") or not is_zero(node.args[0].args[2]):
            return None
        condition, then, otherwise = node.args[0].args
        return select(condition, cast(then, node.dtype), cast(otherwise, node.dtype))

    def new(compute: Compute) -> Compute:
        if isinstance(compute, Reduce):
            elements = tuple(rewrite(e, rule) for e in compute.elements)
            return replace(compute, elements=elements) if elements != compute.elements else compute
        return replace(compute, body=tuple(map(new, compute.body))) if isinstance(compute, Scan) else compute

    return program.with_computes(tuple(map(new, program.computes)))
