"""Graphs whose intermediates need not reach memory: what the search finds for them on described machines, odd sizes
too, and that what it finds computes what the interpreter says."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, TensorProto

from tests.cpu_stages import Lowered, Step, error, evaluated, model_of, random_inputs
from tests.gpu_stages import no_plan_fails, on_loops
from tilewright.compiler.pipeline import Artifact, build
from tilewright.frontend.onnx.model import load
from tilewright.options import Options
from tilewright.target import machine

CPUS = ["emerald_rapids", "neoverse_n1"]
HALF = pytest.mark.parametrize("half", [False, True], ids=["float32", "float16"])


class Writer:
    """A model written node by node, in float32 or float16 throughout."""

    def __init__(self, half: bool, **inputs: tuple[int, ...]) -> None:
        self.inputs = inputs
        self.half = half
        self.steps: list[Step] = []
        self.constants: dict[str, np.ndarray] = {}
        self.random = np.random.default_rng(7)

    def weight(self, *shape: int) -> str:
        name = f"w{len(self.constants)}"
        summed = shape[1:] if len(shape) > 2 else shape[:-1]
        values = self.random.standard_normal(shape) / np.sqrt(np.prod(summed))
        self.constants[name] = values.astype(np.float16 if self.half else np.float32)
        return name

    def node(self, operator: str, *given: str, name: str = "", **more: object) -> str:
        out = name or f"t{len(self.steps)}"
        self.steps.append((operator, given, out, more))
        return out

    def model(self, **outputs: tuple[int, ...]) -> ModelProto:
        types = dict.fromkeys((*self.inputs, *outputs), TensorProto.FLOAT16) if self.half else None
        return model_of(self.steps, self.inputs, outputs, self.constants, types)


def convolutions(half: bool, channels: int = 4, side: int = 1024, layers: int = 4) -> ModelProto:
    shape = (1, channels, side, side)
    w, x = Writer(half, x=shape), "x"
    for layer in range(layers):
        c = w.node("Conv", x, w.weight(channels, channels, 3, 3), pads=[1, 1, 1, 1])
        x = w.node("Relu", c, name="y" if layer == layers - 1 else "")
    return w.model(y=shape)


def scores(half: bool, then: list[Step], n: int = 4096, d: int = 64) -> ModelProto:
    """Rows of q k, what is made of them (`p`), and its product with v."""
    w = Writer(half, q=(n, d), k=(d, n), v=(n, d))
    w.node("MatMul", "q", "k", name="s")
    w.steps += then
    w.node("MatMul", "p", "v", name="y")
    return w.model(y=(n, d))


BELOW_LARGEST: list[Step] = [
    ("ReduceMax", ("s",), "m", {"axes": [-1], "keepdims": 1}),
    ("Sub", ("s", "m"), "z", {}),
    ("Tanh", ("z",), "p", {}),
]
NORMED: list[Step] = [
    ("ReduceL2", ("s",), "l", {"axes": [-1], "keepdims": 1}),
    ("Div", ("s", "l"), "p", {}),
]


def normalised(half: bool, rows: int = 1024, d: int = 512, layers: int = 9) -> ModelProto:
    w, x = Writer(half, x=(rows, d)), "x"
    for layer in range(layers):
        n = w.node("LayerNormalization", x, w.weight(d), w.weight(d), axis=-1)
        x = w.node("Relu", n, name="y" if layer == layers - 1 else "")
    return w.model(y=(rows, d))


def narrow_layers(half: bool, rows: int = 4096, d: int = 64, layers: int = 6) -> ModelProto:
    w, x = Writer(half, x=(rows, d)), "x"
    for layer in range(layers):
        m = w.node("MatMul", x, w.weight(d, d))
        x = w.node("Relu", m, name="y" if layer == layers - 1 else "")
    return w.model(y=(rows, d))


def running_sums(half: bool, rows: int = 512, d: int = 64, hidden: int = 256, axis: int = 0) -> ModelProto:
    w = Writer(half, x=(rows, d))
    h = w.node("MatMul", "x", w.weight(d, hidden))
    w.constants["axis"] = np.array(axis)
    w.node("MatMul", w.node("CumSum", h, "axis"), w.weight(hidden, d), name="y")
    return w.model(y=(rows, d))


def between_products(
    half: bool, rows: int = 4096, d: int = 64, hidden: int = 8192, out: int = 64, root: bool = False
) -> ModelProto:
    """x w1, each row normalised by its mean and variance or by its mean square, and the product of that with w2."""
    w = Writer(half, x=(rows, d))
    h = w.node("MatMul", "x", w.weight(d, hidden))
    if root:
        mean = w.node("ReduceMean", w.node("Mul", h, h), axes=[-1], keepdims=1)
        n = w.node("Mul", w.node("Div", h, w.node("Sqrt", mean)), w.weight(hidden))
    else:
        n = w.node("LayerNormalization", h, w.weight(hidden), w.weight(hidden), axis=-1)
    w.node("MatMul", n, w.weight(hidden, out), name="y")
    return w.model(y=(rows, out))


def planned(model: ModelProto, target: str, stop: str = "plan") -> Artifact:
    with no_plan_fails():
        return build(load(model, {}), machine(target), Options(stop_after=stop))


def kernels_of(found: Artifact) -> list[set[str]]:
    """What the leaves of each kernel compute."""
    assert found.plan is not None
    return [{leaf.tensor for leaf in kernel.leaves} for kernel in found.plan.kernels]


def left_in_memory(found: Artifact) -> set[str]:
    """What one kernel leaves to another, at any level."""
    assert found.plan is not None
    around = [found.plan.body, *(t for t in found.plan.body.body if not getattr(t, "is_kernel", True))]
    return {h.tensor for tile in around for h in getattr(tile, "holds", ())}


def in_main_memory(found: Artifact) -> set[str]:
    """What one kernel leaves to another that no cache keeps until then."""
    assert found.plan is not None
    return {h.tensor for h in found.plan.body.holds}


ROOTS = [False, pytest.param(True, marks=pytest.mark.slow)]
OTHERS = [(1024, 64, 1024, 64), (1000, 96, 333, 40)]
BETWEEN = [(4096, 64, 8192, 64), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in OTHERS)]


@pytest.mark.sample(3)
@HALF
@pytest.mark.parametrize("target", [*CPUS, "h200"])
@pytest.mark.parametrize("root", ROOTS, ids=["layer", "root"])
@pytest.mark.parametrize(("rows", "d", "hidden", "out"), BETWEEN)
def test_normalised_rows_between_products_stay_near(
    rows: int, d: int, hidden: int, out: int, root: bool, target: str, half: bool
) -> None:
    """Hidden rows of 134 MB are in no memory at all; those that a cache keeps from kernel to kernel may be in that."""
    found = planned(between_products(half, rows, d, hidden, out, root), target)
    assert not in_main_memory(found)
    assert rows < 4096 or len(kernels_of(found)) == 1


def test_normalised_rows_are_stored_between_products_that_take_far_longer() -> None:
    """Of sums of 256 on both sides, a core computes 512 multiply-adds for each hidden number that it writes and reads:
    joined, products would lose more by smaller tiles than all that moving takes."""
    n1 = machine("neoverse_n1")
    assert in_main_memory(planned(between_products(False, 8192, 256, 4096, 256), "neoverse_n1"))
    assert 2 * 4 / n1.main.bandwidth < 0.02 * 512 / n1.fma_rate


@pytest.mark.slow
@HALF
@pytest.mark.parametrize("target", CPUS)
def test_rows_of_padded_convolutions_pass_through_one_kernel(target: str, half: bool) -> None:
    """Four alike layers are a recurrence; as one they would store every step's image."""
    found = planned(convolutions(half), target)
    assert len(kernels_of(found)) == 1 and not left_in_memory(found)


@HALF
@pytest.mark.parametrize("target", CPUS)
@pytest.mark.parametrize("then", [BELOW_LARGEST, NORMED], ids=["largest", "norm"])
def test_scores_stay_near(then: list[Step], target: str, half: bool) -> None:
    found = planned(scores(half, then), target)
    assert any({"s", "p", "y"} <= kernel for kernel in kernels_of(found))
    assert left_in_memory(found) <= {"k_staged"}


@pytest.mark.slow
@HALF
def test_a_norm_is_streamed_on_a_gpu(half: bool) -> None:
    assert len(kernels_of(planned(scores(half, NORMED), "h200"))) == 1


@pytest.mark.slow
@HALF
@pytest.mark.parametrize(("rows", "d"), [(1024, 512), (1000, 333)])
def test_nine_normalisations_are_two_kernels(rows: int, d: int, half: bool) -> None:
    assert len(kernels_of(planned(normalised(half, rows, d), "h200"))) <= 2


@HALF
@pytest.mark.parametrize(("rows", "d"), [pytest.param(4096, 64, marks=pytest.mark.slow), (1000, 40)])
@pytest.mark.parametrize("target", ["h200", "emerald_rapids"])
def test_six_narrow_layers_are_one_kernel(target: str, rows: int, d: int, half: bool) -> None:
    assert len(kernels_of(planned(narrow_layers(half, rows, d), target))) == 1


@HALF
@pytest.mark.parametrize("target", [*CPUS, "h200"])
@pytest.mark.parametrize(
    ("rows", "hidden", "axis"),
    [pytest.param(512, 256, 0, marks=pytest.mark.slow), pytest.param(77, 33, 0, marks=pytest.mark.slow), (50, 41, 1)],
)
def test_running_sums_are_one_call(rows: int, hidden: int, axis: int, target: str, half: bool) -> None:
    found = planned(running_sums(half, rows, 64, hidden, axis), target, "loops")
    assert found.loops is not None and len(found.loops.calls) <= 4


SMALL = {
    "convolutions": lambda half: convolutions(half, 3, 19),
    "largest": lambda half: scores(half, BELOW_LARGEST, 37, 12),
    "norm": lambda half: scores(half, NORMED, 37, 12),
    "normalisations": lambda half: normalised(half, 7, 33),
    "sums": lambda half: running_sums(half, 13, 10, 21),
    "sums of rows": lambda half: running_sums(half, 13, 10, 21, 1),
    "layers": lambda half: narrow_layers(half, 11, 20),
    "between": lambda half: between_products(half, 19, 12, 333, 7),
    "between roots": lambda half: between_products(half, 35, 16, 200, 24, root=True),
}


QUICK = ("largest", "sums", "between")


@pytest.mark.sample(4)
@HALF
@pytest.mark.parametrize("target", [*CPUS, "h200"])
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in SMALL])
def test_answers(name: str, target: str, half: bool) -> None:
    model = SMALL[name](half)
    found = planned(model, target, "loops")
    assert found.program is not None and found.plan is not None and found.loops is not None
    given = random_inputs(found.program)
    if target == "h200":
        made = on_loops(found, given)
    else:
        made = Lowered(found.program, found.plan, found.loops, found.target).on_loops(given)
    said = planned(model, target, "program").program
    assert said is not None
    wanted = evaluated(said, given, wide=True)
    assert error(made["y"], wanted["y"]) < (4e-3 if half else 3e-6)
