"""The work of choosing plans: what layers and stages have in common is done once, so that compiling stays quick.

Counts, never seconds: a machine may be busy.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import pytest
from onnx import ModelProto

from tests.cpu_stages import model_of
from tilewright.backend.cpu.backend import CpuBackend
from tilewright.backend.cpu.kernel import tile
from tilewright.compiler import settling
from tilewright.compiler.pipeline import build
from tilewright.frontend.onnx.model import load
from tilewright.ir.analysis import decide as deciding
from tilewright.ir.forms.compute import Map, Program
from tilewright.ir.forms.expr import Expr, walk
from tilewright.ir.forms.tensor import Tensor
from tilewright.options import Options
from tilewright.target import Target, machine
from tilewright.tile_graph.algebra import memo, nest
from tilewright.tile_graph.algebra.context import NestContext
from tilewright.tile_graph.algebra.nest import Nest, build_nest
from tilewright.tile_graph.algebra.signature import signature
from tilewright.tile_graph.algebra.unswitch import positions
from tilewright.tile_graph.plan.form import Leaf
from tilewright.transform.bilinear.winograd import Winograd, find_sliding

CHANNELS = 128
N1 = machine("neoverse_n1")


class Work:
    """Counts of a compilation up to its plan: nests planned, tiles chosen, nests priced on them, blocks written out."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.planned: list[Hashable] = []
        self.tiles = 0
        self.priced = 0
        self.blocks = 0
        plan_nest, choose_tile, counts = CpuBackend.plan_leaf, CpuBackend.choose_tile, nest._counts

        def planning(backend: CpuBackend, own: Nest, context: NestContext) -> Leaf:
            def about(tensor: Tensor) -> Hashable:
                return (tensor in context.constants, tensor in context.staged, context.layout(tensor))

            self.planned.append((signature([own], about), context.weights_fit))
            return plan_nest(backend, own, context)

        def choosing(*arguments: object) -> object:
            self.tiles += 1
            return choose_tile(*arguments)  # type: ignore[arg-type]

        nest_seconds = tile._nest_seconds

        def pricing(*arguments: object) -> object:
            self.priced += 1
            return nest_seconds(*arguments)  # type: ignore[arg-type]

        def counting(values: Sequence[Expr]) -> tuple[int, int, int]:
            self.blocks += 1
            return counts(values)

        patch.setattr(CpuBackend, "plan_leaf", planning)
        patch.setattr(CpuBackend, "choose_tile", choosing)
        patch.setattr(nest, "_counts", counting)
        patch.setattr(tile, "_nest_seconds", pricing)


def convolutions(count: int) -> ModelProto:
    """Equal layers of windows of three, wide enough for Winograd's algorithm."""
    nodes, constants = [], {}
    before = "x"
    for number in range(count):
        after = f"y{number}"
        nodes.append(("Conv", [before, f"w{number}"], f"c{number}", {"pads": [1, 1, 1, 1]}))
        nodes.append(("Relu", [f"c{number}"], after, {}))
        constants[f"w{number}"] = np.full((CHANNELS, CHANNELS, 3, 3), number, np.float32)  # equal ones would be steps
        before = after
    shape = (1, CHANNELS, 28, 28)
    return model_of(nodes, {"x": shape}, {before: shape}, constants)


def transformer(count: int) -> ModelProto:
    """Equal blocks of attention and of two products, with weights of their own."""
    rows, width = 64, 96
    nodes: list[tuple[str, list[str], str, dict[str, object]]] = []
    constants: dict[str, np.ndarray] = {"scale": np.ones(width, np.float32), "shift": np.zeros(width, np.float32)}
    before = "x"
    for number in range(count):
        for name, shape in {"q": (width, width), "k": (width, width), "v": (width, width), "up": (width, 2 * width),
                            "down": (2 * width, width)}.items():  # fmt: skip
            constants[f"w{name}{number}"] = np.full(shape, number + 1 + len(constants), np.float32)
        norm = f"n{number}"
        nodes.append(("LayerNormalization", [before, "scale", "shift"], norm, {"axis": -1}))
        nodes += [("MatMul", [norm, f"w{name}{number}"], f"{name}{number}", {}) for name in "qkv"]
        nodes += [
            ("Transpose", [f"k{number}"], f"t{number}", {"perm": [1, 0]}),
            ("MatMul", [f"q{number}", f"t{number}"], f"s{number}", {}),
            ("Softmax", [f"s{number}"], f"p{number}", {"axis": -1}),
            ("MatMul", [f"p{number}", f"v{number}"], f"a{number}", {}),
            ("Add", [f"a{number}", before], f"b{number}", {}),
            ("LayerNormalization", [f"b{number}", "scale", "shift"], f"m{number}", {"axis": -1}),
            ("MatMul", [f"m{number}", f"wup{number}"], f"u{number}", {}),
            ("Relu", [f"u{number}"], f"r{number}", {}),
            ("MatMul", [f"r{number}", f"wdown{number}"], f"d{number}", {}),
            ("Add", [f"d{number}", f"b{number}"], f"y{number}", {}),
        ]
        before = f"y{number}"
    return model_of(nodes, {"x": (rows, width)}, {before: (rows, width)}, constants)


def work(model: ModelProto, patch: pytest.MonkeyPatch, target: Target = N1) -> Work:
    with patch.context() as inner:
        done = Work(inner)
        artifact = build(load(model), target, Options(stop_after="plan"))
    assert artifact.plan is not None
    return done


def test_equal_layers_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (work(convolutions(count), monkeypatch) for count in (4, 8))  # the outer cache holds their weights
    # few blocks are also looked at as they are written, before they are a Scan
    assert 0 < len(many.planned) <= len(few.planned)
    assert 0 < many.tiles <= few.tiles + 2  # partitions that are kept beside the best may differ
    assert many.blocks == few.blocks > 0


@pytest.mark.parametrize("name", ["neoverse_n1", pytest.param("emerald_rapids", marks=pytest.mark.slow)])
def test_planning_grows_with_distinct_nests(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first block, one between two others and a last are all that there is to plan, however many there are; the
    weights of either model are more than a core's own caches hold, and are less than the outer cache does."""
    few, many = (work(transformer(count), monkeypatch, machine(name)) for count in (5, 11))
    # few blocks are also looked at as they are written, before they are a Scan
    assert 0 < len(many.planned) <= len(few.planned)
    assert 0 < many.tiles <= few.tiles + 4
    assert 0 < many.priced <= few.priced + 16


def test_merging_is_judged_with_all_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read between two uses of a weight decides where it comes from: a neighbourhood alone does not tell."""
    model = transformer(2)
    whole = sum(a.nbytes for a in load(model).constants.values())
    seen: list[int] = []
    planning = settling.make_plan

    def counting(program: Program, *arguments: object, **more: object) -> object:
        seen.append(sum(t.most_bytes for t in program.constants))
        return planning(program, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(settling, "make_plan", counting)
    build(load(model), N1, Options(stop_after="plan"))
    assert len(seen) > 2  # with projections apart and as one, and the model
    assert min(seen) >= whole - 4096  # but for what is folded


def test_what_is_known_of_nests_outlives_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory is short, tiles are forgotten between groups, and the plan is the same."""
    model = transformer(1)
    plain = build(load(model), N1, Options(stop_after="plan")).plan
    monkeypatch.setattr(memo, "_MOST_BYTES", 1 << 12)
    forgetful = build(load(model), N1, Options(stop_after="plan")).plan
    assert plain is not None and forgetful == plain


def test_stages_plan_no_nest_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    done = work(convolutions(3), monkeypatch)
    assert len(set(done.planned)) == len(done.planned)


def test_a_block_is_written_out_with_its_common_parts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    program = build(load(convolutions(2)), N1, Options(stop_after="fold")).program
    assert program is not None
    found = [s for s in (find_sliding(c, program.constants) for c in program.computes) if s is not None]
    maps = [c for c in Winograd(found[-1], 4, set()).computes if isinstance(c, Map)]
    rows, values = maps[:2]
    whole = build_nest(values, (), {rows.output: rows})
    simplify, looked_at = deciding.simplify, 0

    def counting(node: Expr) -> Expr:
        nonlocal looked_at
        looked_at += 1
        return simplify(node)

    monkeypatch.setattr(deciding, "simplify", counting)
    block = positions(whole.unswitched, *whole.values)
    assert len(block) == 36
    # each of the values has hundreds of nodes, most of them those of its neighbours
    assert sum(1 for value in block for _ in walk(value)) > 5 * sum(1 for _ in walk(*block))
    assert looked_at < 1.4 * sum(1 for _ in walk(*block))
