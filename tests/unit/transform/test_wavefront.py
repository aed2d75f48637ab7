"""Stacked recurrences along diagonals: the rewritten Program means the same, its code agrees, it is chosen where it
pays, and stacks that are none are left alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

import tilewright
from tests.cpu_stages import CPU, error, evaluated, lowered, programs, random_inputs, read_back
from tests.plans import step_kernels
from tilewright.ir.analysis.verify import verify_program
from tilewright.ir.forms.compute import Program, Scan
from tilewright.options import Options
from tilewright.schedule.planner import make_plan, predicted_seconds
from tilewright.target import MemoryLevel, Target
from tilewright.transform.layout.choose import choose_layouts
from tilewright.transform.recurrence.stacks import find_stacks
from tilewright.transform.recurrence.wavefront import as_wavefront, choose_orders, fastest_order

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
STATES = {"LSTM": 2, "GRU": 1, "RNN": 1}


def stacked(
    kind: str,
    layers: int = 3,
    *,
    hidden: int | Sequence[int] = 16,
    batch: int = 1,
    steps: int = 7,
    inputs: int = 9,
    given: bool = False,
    wanted: str = "all",
    between: Sequence[NodeProto] = (),
    directions: Sequence[str] = (),
    constants: dict[str, np.ndarray] | None = None,
    **attributes: object,
) -> ModelProto:
    """Layers of one kind, each reading the one below through a Squeeze; `between` nodes read "under" and give "over".

    `given`: initial states are inputs of the model. `wanted`: "all" outputs of all layers, or those of the "last".
    """
    rng = np.random.default_rng(11)
    sizes = [hidden] * layers if isinstance(hidden, int) else list(hidden)
    arrays = {"one": np.array([1], np.int64), **(constants or {})}
    ports = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [steps, batch, inputs])]
    outputs, nodes = [], []
    current, width = "x", inputs
    for layer, size in enumerate(sizes):
        direction = directions[layer] if directions else "forward"
        ways = 2 if direction == "bidirectional" else 1
        rows = GATES[kind] * size
        for name, shape in (("w", (ways, rows, width)), ("r", (ways, rows, size)), ("b", (ways, 2 * rows))):
            arrays[f"{name}{layer}"] = (rng.standard_normal(shape) / np.sqrt(size)).astype(np.float32)
        read = [current, *(f"{name}{layer}" for name in "wrb")]
        states = [f"start_{state}{layer}" for state in "hc"[: STATES[kind]]]
        if given:
            read += ["", *states]
            ports += [helper.make_tensor_value_info(s, TensorProto.FLOAT, [ways, batch, size]) for s in states]
        made = [f"y{layer}", *(f"y{state}{layer}" for state in "hc"[: STATES[kind]])]
        nodes.append(
            helper.make_node(
                kind, read, made, name=f"{kind}_{layer}", hidden_size=size, direction=direction, **attributes
            )
        )
        if wanted == "all" or layer == layers - 1:
            outputs += [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in made]
        current, width = f"q{layer}", ways * size
        if ways == 1:
            nodes.append(helper.make_node("Squeeze", [f"y{layer}", "one"], [current]))
        else:
            arrays["flat"] = np.array([steps, batch, width], np.int64)
            nodes.append(helper.make_node("Transpose", [f"y{layer}"], [f"t{layer}"], perm=[0, 2, 1, 3]))
            nodes.append(helper.make_node("Reshape", [f"t{layer}", "flat"], [current]))
        if between and layer < layers - 1:
            names = {"under": current, "over": f"p{layer}", "x": "x"}
            for node in between:
                own = [names.get(n, n if n in arrays else f"{n}_{layer}") for n in node.input]
                out = [names.get(n, f"{n}_{layer}") for n in node.output]
                copied = helper.make_node(node.op_type, own, out)
                copied.attribute.extend(node.attribute)
                nodes.append(copied)
            current = f"p{layer}"
    initializers = [numpy_helper.from_array(a, n) for n, a in arrays.items()]
    graph = helper.make_graph(nodes, "stack", ports, outputs, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def folded(model: ModelProto) -> Program:
    return programs(model)["fold"]


def rewritten(program: Program, width: int = 0) -> Program:
    """The Program with its one stack as wavefronts of `width` layers; 0: of all."""
    (stack,) = find_stacks(program)
    result = program
    for part in stack.parts(width or len(stack.layers)):
        result = as_wavefront(result, part)
    verify_program(result)
    return result


def scans(program: Program) -> list[Scan]:
    return [c for c in program.computes if isinstance(c, Scan)]


def check_same(program: Program, other: Program, seed: int = 0) -> None:
    inputs = random_inputs(program, seed)
    wanted = evaluated(program, inputs, wide=True)
    found = evaluated(other, inputs, wide=True)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert error(found[name], value) < 1e-12, name


# (layers, batch, steps, hidden, initial states given)
CASES = [(2, 1, 2, 5, False), (2, 3, 7, 16, True), (3, 1, 7, 16, True), (3, 3, 2, 5, True), (5, 1, 7, 5, False),
         (5, 3, 3, 16, True)]  # fmt: skip


@pytest.mark.parametrize("layers, batch, steps, hidden, given", CASES)
@pytest.mark.parametrize("kind", GATES)
def test_rewritten_programs_mean_the_same(
    kind: str, layers: int, batch: int, steps: int, hidden: int, given: bool
) -> None:
    program = folded(stacked(kind, layers, hidden=hidden, batch=batch, steps=steps, given=given))
    (stack,) = find_stacks(program)
    assert len(stack.layers) == layers
    wave = rewritten(program)
    (scan,) = scans(wave)
    assert scan.axis.extent == steps + layers - 1
    assert all(t.shape[0] == layers for t in scan.carry)
    check_same(program, wave)


@pytest.mark.parametrize("attributes", [{"linear_before_reset": 1}, {"activations": ["HardSigmoid", "Softsign"]}])
def test_other_cells_mean_the_same(attributes: dict[str, object]) -> None:
    program = folded(stacked("GRU", 3, hidden=6, batch=2, given=True, **attributes))
    check_same(program, rewritten(program))


def test_only_what_is_wanted_is_kept() -> None:
    program = folded(stacked("LSTM", 3, wanted="last"))
    wave = rewritten(program)
    check_same(program, wave)
    assert not any(t.name.startswith("y1_") and t.name.endswith("_steps") for c in wave.computes for t in c.outputs)
    # the weights of a layer alone are gone, but for the first projection
    assert [t.name for t in wave.constants if "weight" in t.name and t.rank == 2] == ["y0_forward_weight"]


@pytest.mark.parametrize("width, expected", [(2, [8, 8, 7]), (3, [9, 8]), (4, [10, 7])])
def test_wavefronts_of_some_layers(width: int, expected: list[int]) -> None:
    program = folded(stacked("LSTM", 5, hidden=5))
    wave = rewritten(program, width)
    assert [s.axis.extent for s in scans(wave)] == expected
    check_same(program, wave)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind, batch, schedule", [("LSTM", 1, "connected"), ("LSTM", 3, "register"),
                                                   ("GRU", 2, "connected"), ("RNN", 1, "none")])  # fmt: skip
def test_code_computes_what_the_program_says(kind: str, batch: int, schedule: str, kernel_cache: Path) -> None:
    program = folded(stacked(kind, 3, hidden=19, batch=batch, given=True))
    made = lowered(choose_layouts(rewritten(program), CPU), schedule)
    inputs = random_inputs(program, seed=5)
    wanted = evaluated(program, inputs, wide=True)
    for found in (made.on_loops(inputs), made.natively(inputs, kernel_cache)):
        for name, value in wanted.items():
            assert error(found[name], value) < 1e-6, name


@pytest.mark.parametrize("seed", [pytest.param(s, marks=() if s < 6 else pytest.mark.slow) for s in range(40)])
def test_stacks_nobody_thought_of(seed: int, kernel_cache: Path) -> None:
    """By the interpreter; those that take longer also as machine code."""
    rng = np.random.default_rng(seed)
    kind = list(GATES)[seed % 3]
    layers = int(rng.integers(2, 7))
    program = folded(
        stacked(
            kind, layers, hidden=int(rng.integers(1, 41)), batch=int(rng.integers(1, 6)),
            steps=int(rng.integers(2, 10)), inputs=int(rng.integers(1, 20)),
            given=bool(rng.integers(2)), wanted=("all", "last")[rng.integers(2)],
            **({"linear_before_reset": int(rng.integers(2))} if kind == "GRU" else {}),
        )
    )  # fmt: skip
    wave = rewritten(program, int(rng.integers(2, layers + 1)))
    check_same(program, wave, seed)
    if seed >= 6:
        inputs = random_inputs(program, seed)
        wanted = evaluated(program, inputs, wide=True)
        found = lowered(choose_layouts(wave, CPU)).natively(inputs, kernel_cache)
        assert all(error(found[name], value) < 2e-6 for name, value in wanted.items())


def test_a_step_of_all_layers_is_one_kernel() -> None:
    program = folded(stacked("LSTM", 4, hidden=32, steps=20, inputs=32, wanted="last"))
    plan = make_plan(choose_layouts(rewritten(program), MACHINE), MACHINE)
    (step,) = step_kernels(plan)
    assert len(step.leaves) == 4  # what is between the layers, the gates, and the two states


def test_the_text_of_a_wavefront_reads_back() -> None:
    wave = rewritten(folded(stacked("GRU", 2, given=True)))
    assert len(read_back(wave).computes) == len(wave.computes)


# --- what lies between layers


def node(op: str, inputs: Sequence[str], output: str, **attributes: object) -> NodeProto:
    return helper.make_node(op, list(inputs), [output], **attributes)


def test_layers_may_be_joined_by_what_looks_at_no_other_time() -> None:
    scale = {"scale": np.linspace(0.5, 1.5, 16, dtype=np.float32)}
    between = [node("Mul", ["under", "scale"], "scaled"), node("Relu", ["scaled"], "over")]
    program = folded(stacked("LSTM", 3, between=between, constants=scale))
    check_same(program, rewritten(program))


def test_batches_may_come_first() -> None:
    """With layout 1 time is the second axis of what lies between the layers."""
    layers = 3
    rng = np.random.default_rng(0)
    arrays = {"two": np.array([2], np.int64)}
    nodes, current, width = [], "x", 6
    for layer in range(layers):
        for name, shape in (("w", (1, 32, width)), ("r", (1, 32, 8))):
            arrays[f"{name}{layer}"] = (0.3 * rng.standard_normal(shape)).astype(np.float32)
        read = [current, f"w{layer}", f"r{layer}"]
        nodes.append(helper.make_node("LSTM", read, [f"y{layer}"], hidden_size=8, layout=1))
        nodes.append(helper.make_node("Squeeze", [f"y{layer}", "two"], [f"q{layer}"]))
        current, width = f"q{layer}", 8
    graph = helper.make_graph(
        nodes, "batches",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, 5, 6])],
        [helper.make_tensor_value_info(current, TensorProto.FLOAT, None)],
        [numpy_helper.from_array(a, n) for n, a in arrays.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    program = folded(model)
    (stack,) = find_stacks(program)
    assert len(stack.layers) == layers
    check_same(program, rewritten(program))


def test_layers_above_another_size_are_a_stack_of_their_own() -> None:
    program = folded(stacked("LSTM", 4, hidden=(6, 16, 16, 16)))
    (stack,) = find_stacks(program)
    assert len(stack.layers) == 3
    check_same(program, rewritten(program))


ALONE: dict[str, ModelProto] = {
    "one step": stacked("LSTM", 3, steps=1),
    "one layer": stacked("LSTM", 1),
    "sizes": stacked("LSTM", 2, hidden=(16, 8)),
    "reverse": stacked("LSTM", 3, directions=("reverse",) * 3),
    "turning": stacked("GRU", 2, directions=("forward", "reverse")),
    "bidirectional": stacked("LSTM", 2, directions=("bidirectional",) * 2),
    "other times": stacked(
        "LSTM", 3,
        between=[node("Slice", ["under", "last", "before", "axis", "back"], "over")],
        constants={"last": np.array([-1]), "before": np.array([-100]), "axis": np.array([0]), "back": np.array([-1])},
    ),
    "all times": stacked("RNN", 2, between=[node("ReduceMean", ["under"], "mean", axes=[0]),
                                           node("Sub", ["under", "mean"], "over")]),
    "the position": stacked(
        "RNN", 2, between=[node("Add", ["under", "position"], "over")],
        constants={"position": np.linspace(0, 1, 7, dtype=np.float32).reshape(7, 1, 1)},
    ),
    "the model's input": stacked("GRU", 2, inputs=16, between=[node("Add", ["under", "x"], "over")]),
}  # fmt: skip


@pytest.mark.parametrize("name", ALONE)
def test_what_is_no_stack_is_left_alone(name: str) -> None:
    program = folded(ALONE[name])
    assert find_stacks(program) == []
    assert choose_orders(program, lambda _: 0.0) is program


def test_the_choice_is_explained() -> None:
    program = folded(stacked("LSTM", 5))
    by_scans = choose_orders(program, lambda p: 0.001 * len(scans(p)))
    assert len(scans(by_scans)) == 1
    assert by_scans.remarks == (
        "LSTM node 'LSTM_0' to LSTM node 'LSTM_4': 5 layers at once, predicted 1 ms; "
        "5 ms layer by layer, 3 ms 2 layers at once, 2 ms 4 layers at once",
    )
    by_weights = choose_orders(program, lambda p: 0.001 * sum((30.0 if s.carry[0].rank > 2 else 4.0) for s in scans(p)))
    assert by_weights.computes == program.computes
    # two layers at once are too bad for more to be looked at
    assert by_weights.remarks[0].endswith(": layer by layer, predicted 20 ms; 64 ms 2 layers at once")


def test_a_layer_that_starts_where_the_one_below_ends_must_wait() -> None:
    model = stacked("GRU", 2, hidden=16)
    upper = next(n for n in model.graph.node if n.name == "GRU_1")
    upper.input.extend(["", "yh0"])
    program = folded(model)
    assert len(scans(program)) == 2
    assert find_stacks(program) == []


def test_stacks_that_wait_for_each_other_are_not_both_rewritten() -> None:
    """Each of two stacks begins its upper layer where the lower layer of the other ended."""
    one, two = stacked("GRU", 2), stacked("GRU", 2)
    for graph, own, other in ((one.graph, "a", "b"), (two.graph, "b", "a")):
        for each in graph.node:
            each.input[:] = [n if n in ("x", "") else f"{own}_{n}" for n in each.input]
            each.output[:] = [f"{own}_{n}" for n in each.output]
            if each.name == "GRU_1":
                each.input.extend(["", f"{other}_yh0"])
        for array in graph.initializer:
            array.name = f"{own}_{array.name}"
        for port in graph.output:
            port.name = f"{own}_{port.name}"
    parts = [n for g in (one.graph, two.graph) for n in g.node]
    lower = [n for n in parts if n.name != "GRU_1"]
    nodes = [n for n in lower if n.output[0].endswith("0")] + [n for n in parts if n.name == "GRU_1"]
    graph = helper.make_graph(
        nodes, "both", one.graph.input, [p for g in (one.graph, two.graph) for p in g.output],
        [a for g in (one.graph, two.graph) for a in g.initializer],
    )  # fmt: skip
    program = folded(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    assert len(find_stacks(program)) == 2
    wave = choose_orders(program, lambda p: float(len(scans(p))))
    verify_program(wave)
    assert len(scans(wave)) == 3
    check_same(program, wave)


# --- the choice


def machine(units: int, meeting: float) -> Target:
    """A machine with caches of 64 KB and 1 MB a core; what it takes its workers to meet is given."""
    levels = (
        MemoryLevel("registers", 512, 16, 4e11), MemoryLevel("L1", 65536, 64, 8e10),
        MemoryLevel("L2", 1 << 20, 64, 4.3e10), MemoryLevel("L3", 1 << 24, 64, 2e10, shared_by=units),
        MemoryLevel("DRAM", 1 << 40, 64, 2e10),
    )  # fmt: skip
    return Target(
        "by hand", "cpu", "aarch64", units, 16, 32, 2e10, levels, meeting, lane_multiply=True, fma_chains=4,
        tile_cost=3e-9,
    )  # fmt: skip


MACHINE = machine(2, 4e-7)


def width(target: Target, layers: int, hidden: int, steps: int = 100) -> int:
    program = folded(stacked("LSTM", layers, hidden=hidden, steps=steps, inputs=hidden, wanted="last"))
    (stack,) = find_stacks(program)
    order = fastest_order(stack, program, lambda p: predicted_seconds(choose_layouts(p, target), target, "connected"))
    return order.width


def test_small_layers_run_together_and_large_ones_one_by_one() -> None:
    """As measured on two cores: small steps gain by sharing them out, large ones lose what a cache holds."""
    assert width(MACHINE, 10, 16) == 10
    assert width(MACHINE, 2, 64) == 1
    assert width(MACHINE, 4, 256) == 1


def test_many_cores_take_more_layers_at_once() -> None:
    """Sixteen cores hold all weights, and meet once a step instead of once a layer and step."""
    assert width(machine(16, 2e-6), 4, 128) == 4
    assert width(MACHINE, 4, 128) == 1


def test_steps_are_counted() -> None:
    short, long = (
        predicted_seconds(choose_layouts(folded(stacked("LSTM", 1, steps=n)), MACHINE), MACHINE, "connected")
        for n in (10, 1000)
    )
    assert long > 50 * short


def test_weights_of_a_step_come_from_where_they_fit() -> None:
    """Twice the rows and columns are four times the weights; more where they leave a cache."""

    def a_step(hidden: int) -> float:
        program = choose_layouts(folded(stacked("LSTM", 1, hidden=hidden, inputs=hidden)), MACHINE)
        return sum(k.estimate.seconds for k in step_kernels(make_plan(program, MACHINE)))

    meeting = MACHINE.kernel_cost
    times = {hidden: a_step(hidden) - meeting for hidden in (64, 128, 256, 512)}
    rate = {hidden: 4 * hidden * hidden * 4 / MACHINE.units / seconds for hidden, seconds in times.items()}
    assert rate[64] > 4.3e10 / 1.5  # from the nearest cache: arithmetic decides
    assert 2.5e10 < rate[256] < 4.3e10  # from L2
    assert rate[512] < 2.7e10  # most of it from L3


def test_compiled_stacks_are_chosen_and_agree(kernel_cache: Path) -> None:
    model = stacked("GRU", 4, hidden=16, steps=30, given=True)
    program = folded(model)
    inputs = random_inputs(program, seed=2)
    wanted = evaluated(program, inputs, wide=True)
    compiled = tilewright.compile(model, options=Options(cache_dir=kernel_cache))
    for name, value in compiled.run(inputs).items():
        assert error(value, wanted[name]) < 1e-6
    assert "decided    GRU node 'GRU_0' to GRU node 'GRU_3': " in compiled.explain()


def test_prediction_sees_no_constants() -> None:
    """Stacking weights costs time: it is done once the order is decided."""
    program = folded(stacked("LSTM", 2))
    (stack,) = find_stacks(program)
    empty = as_wavefront(program, stack, fill=False)
    made = [t for t in empty.constants if t not in program.constants]
    assert made and all(not empty.constants[t].any() and empty.constants[t].strides[0] == 0 for t in made)
