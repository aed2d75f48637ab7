"""The grammar of a Leaf: its loops are of its nest, and what each form may say of them."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from tilewright.intrinsics.cpu import DOTS, TILES, WINDOW_DOTS
from tilewright.intrinsics.gpu_matrix import FORMS, MatrixForm
from tilewright.ir.forms.compute import Compute, Map, Reduce
from tilewright.tile_graph.plan.form import Leaf
from tilewright.tile_graph.plan.leaf_form import (
    DotForm,
    FragmentForm,
    ThreadForm,
    TileForm,
    VectorForm,
    WindowForm,
)


def reductions(compute: Compute) -> int:
    return len(compute.reduce_axes) if isinstance(compute, Reduce) else 0


def check_leaf(leaf: Leaf, computes: Mapping[str, Compute]) -> None:
    for name in (leaf.tensor, leaf.core, *leaf.epilogue, *leaf.composed):
        if name not in computes:
            raise ValueError(f"leaf '{leaf.tensor}' uses unknown tensor '{name}'")
    core = computes[leaf.core]
    if not isinstance(core, Map | Reduce):
        raise ValueError(f"leaf '{leaf.tensor}': a {type(core).__name__} has no nest")
    for name in leaf.composed:
        if not isinstance(computes[name], Map):
            raise ValueError(f"'{name}' cannot be computed again where it is read: it is no map")
    check_loops(leaf, len(core.axes), reductions(core))
    form = leaf.form
    if isinstance(form, VectorForm):
        _check_vectors(leaf, form, core)
    elif isinstance(form, ThreadForm):
        _check_threads(leaf, form, core)
    elif isinstance(form, FragmentForm):
        _check_matrices(leaf, form, core)
    elif isinstance(form, DotForm | TileForm | WindowForm):
        _check_dots(leaf, form, core)


def _check_vectors(leaf: Leaf, form: VectorForm, core: Map | Reduce) -> None:
    is_sum, count = isinstance(core, Reduce), reductions(core)
    for axis, size in form.cut:
        check_axis(axis, "r", count, "cut")
        check_size(axis, size)
    along_outputs = leaf.vector is not None and leaf.vector[0] == "o"
    if form.cut and (len(form.cut) > 1 or not is_sum or not along_outputs):
        raise ValueError(f"leaf '{leaf.tensor}': passes cut one axis of a reduction whose vector is an output axis")
    for axis in form.unroll:
        check_axis(axis, "r", count, "unroll")
    if form.ahead and (not along_outputs or form.ahead < 0):
        raise ValueError(f"leaf '{leaf.tensor}': rows prefetch what comes next where the vector is an output axis")
    if form.soon < 0 or form.together < 1:
        raise ValueError(f"leaf '{leaf.tensor}': {form.soon} steps early, {form.together} together")
    # steps ask for their own panel, and stand together in a turn, in a register tile of rows and vectors
    in_tile = is_sum and len(leaf.register) == 2 and along_outputs
    if (form.soon or form.together != 1) and (not in_tile or form.row_lanes > 1 or leaf.order[-1] in form.unroll):
        raise ValueError(f"leaf '{leaf.tensor}': steps ask early in a sum on a register tile of rows and vectors")
    if form.in_turn and (form.in_turn < 0 or not is_sum or not along_outputs):
        raise ValueError(f"leaf '{leaf.tensor}': results in turn are of a sum whose vector is an output axis")
    if form.near_rows:
        _check_near_rows(leaf, form, is_sum)


def _check_near_rows(leaf: Leaf, form: VectorForm, is_sum: bool) -> None:
    """Rows stay near while panels pass: blocks of rows are the innermost loop, those along the vector around it."""
    outputs = [a for a in leaf.order if a[0] == "o"]
    inside = len(leaf.register) == 2 and outputs[-1:] and outputs[-1] in dict(leaf.register)
    if not is_sum or not inside or outputs[-2:-1] != [leaf.vector] or form.cut or form.ahead:
        raise ValueError(f"leaf '{leaf.tensor}': rows stay near in a sum whose blocks of rows are inside its panels")
    if form.near_rows < 0 or form.near_rows % dict(leaf.register)[outputs[-1]]:
        raise ValueError(f"leaf '{leaf.tensor}': {form.near_rows} rows near are not whole register tiles")


def _check_threads(leaf: Leaf, form: ThreadForm, core: Map | Reduce) -> None:
    several = leaf.vector is not None if isinstance(core, Map) else form.step > 0
    if form.at_once < 1 or (form.at_once > 1 and not several):
        raise ValueError(
            f"leaf '{leaf.tensor}': {form.at_once} at once; a map along a vector has several, and a sum in steps"
        )
    if form.flat and (not isinstance(core, Map) or leaf.vector is None or leaf.order[-1:] != (leaf.vector,)):
        raise ValueError(f"leaf '{leaf.tensor}': only vectors of a map, along its last axis, run on over ends of rows")


def _check_matrices(leaf: Leaf, form: FragmentForm, core: Map | Reduce) -> None:
    if not isinstance(core, Reduce) or core.monoid.operator != "add":
        raise ValueError(f"leaf '{leaf.tensor}': {form.instruction} runs a sum of products")
    if form.anew and (form.anew < 0 or form.step < 1 or form.anew % form.step):
        raise ValueError(f"leaf '{leaf.tensor}': sums of tensor cores begin anew after whole steps")


def matrix_form(leaf: Leaf, form: FragmentForm) -> MatrixForm:
    """The instruction of a leaf in whole steps of it."""
    found = FORMS.get(form.instruction)
    if found is None:
        raise ValueError(f"leaf '{leaf.tensor}': no instruction '{form.instruction}'; there are {', '.join(FORMS)}")
    if form.step < found.depth or form.step % found.depth:
        raise ValueError(f"leaf '{leaf.tensor}': {found.name} takes steps of {found.depth}, not {form.step}")
    return found


def _check_dots(leaf: Leaf, form: DotForm | TileForm | WindowForm, core: Map | Reduce) -> None:
    known = WINDOW_DOTS if isinstance(form, WindowForm) else DOTS
    dot = known.get(form.instruction)
    if dot is None or dot.is_tile != isinstance(form, TileForm):
        raise ValueError(f"leaf '{leaf.tensor}': no instruction '{form.instruction}'; there are {', '.join(known)}")
    if not isinstance(core, Reduce) or leaf.vector is None or leaf.vector[0] != "o" or leaf.order[-1][0] != "r":
        raise ValueError(f"leaf '{leaf.tensor}': {dot.name} runs a sum of products with its vector along an output")
    if leaf.part in ("start", "step", "finish"):
        raise ValueError(f"leaf '{leaf.tensor}': {dot.name} takes whole sums, and those of a stream come in blocks")
    if leaf.lanes != dot.lanes:
        raise ValueError(f"leaf '{leaf.tensor}': {dot.name} has {dot.lanes} lanes, not {leaf.lanes}")
    register = dict(leaf.register)
    sides = [-(-n // (dot.lanes if a == leaf.vector else dot.rows)) for a, n in register.items()]
    tiles = prod(sides) + sum(sides) + (2 - len(sides))
    if leaf.vector not in register or any(a[0] != "o" for a in register) or (dot.is_tile and tiles > TILES):
        raise ValueError(f"leaf '{leaf.tensor}': {dot.name} cannot keep a register tile of {register}")


def check_loops(leaf: Leaf, outputs: int, reductions: int) -> None:
    """The order, the register tile and the vector of a leaf are of its axes."""
    every = {*(f"o{i}" for i in range(outputs)), *(f"r{i}" for i in range(reductions))}
    if sorted(leaf.order) != sorted(every):
        raise ValueError(f"leaf '{leaf.tensor}': order {list(leaf.order)} is not its axes {sorted(every)} once each")
    for axis, size in leaf.register:
        if axis not in every:
            raise ValueError(f"leaf '{leaf.tensor}' has no axis '{axis}'; it has {', '.join(sorted(every))}")
        check_size(axis, size)
    if leaf.vector is not None:
        if leaf.vector not in every:
            raise ValueError(f"leaf '{leaf.tensor}' has no axis '{leaf.vector}' to vectorise")
        if leaf.lanes < 1 or leaf.lanes & (leaf.lanes - 1):
            raise ValueError(f"leaf '{leaf.tensor}': {leaf.lanes} lanes; a vector has a power of two")
        if dict(leaf.register).get(leaf.vector, leaf.lanes) % leaf.lanes:
            raise ValueError(f"leaf '{leaf.tensor}': its register tile along {leaf.vector} is not whole vectors")


def check_axis(axis: str, kind: str, count: int, what: str) -> None:
    if axis not in {f"{kind}{i}" for i in range(count)}:
        raise ValueError(f"{what} names axis '{axis}', which is not one of its {count} {kind}-axes")


def check_size(axis: str, size: int) -> None:
    if size < 1:
        raise ValueError(f"size {size} along {axis}")
