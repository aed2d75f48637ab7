"""Plans are data: they survive JSON, may be edited and replayed, and know nothing of operators' names."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

import tilewright
from tests.cpu_stages import CPU, evaluated, lowered, model_of, programs, random_inputs
from tests.plans import resized, with_kernels
from tilewright import Options, ops
from tilewright.cli.main import main
from tilewright.compiler.pipeline import STAGES
from tilewright.errors import InternalError, OptionError
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.compute import Program
from tilewright.ir.forms.graph import Graph, Node
from tilewright.ops import registry
from tilewright.ops.steps import control
from tilewright.schedule.planner import make_plan
from tilewright.target import machine
from tilewright.tile_graph.plan.form import Estimate, Leaf, Plan, Tile
from tilewright.tile_graph.plan.text import plan_text

RNG = np.random.default_rng(0)
PACKAGE = Path(tilewright.__file__).parent


def weights(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


MODELS: dict[str, ModelProto] = {
    "attention": model_of(
        [("Transpose", ["k"], "kt", {"perm": [0, 2, 1]}), ("MatMul", ["q", "kt"], "s", {}),
         ("Softmax", ["s"], "p", {"axis": -1}), ("MatMul", ["p", "v"], "o", {})],
        {"q": (2, 13, 6), "k": (2, 13, 6), "v": (2, 13, 6)}, {"o": (2, 13, 6)}),
    "convolution": model_of(
        [("Conv", ["x", "w", "b"], "y", {"pads": [1, 1, 1, 1], "strides": [2, 2]}), ("Relu", ["y"], "r", {}),
         ("GlobalAveragePool", ["r"], "g", {}), ("Flatten", ["g"], "f", {}), ("Gemm", ["f", "m"], "o", {"transB": 1})],
        {"x": (1, 3, 9, 11)}, {"o": (1, 5)},
        {"w": weights(8, 3, 3, 3), "b": weights(8), "m": weights(5, 8)}),
    "recurrence": model_of(
        [("LSTM", ["x", "w", "r", "b"], "h", {"hidden_size": 5})],
        {"x": (4, 2, 3)}, {"h": (4, 1, 2, 5)}, {"w": weights(1, 20, 3), "r": weights(1, 20, 5), "b": weights(1, 40)}),
    "norm": model_of(
        [("ReduceMean", ["x"], "m", {"axes": [-1]}), ("Sub", ["x", "m"], "d", {}), ("Mul", ["d", "d"], "q", {}),
         ("ReduceMean", ["q"], "v", {"axes": [-1]}), ("Add", ["v", "e"], "ve", {}), ("Sqrt", ["ve"], "sd", {}),
         ("Div", ["d", "sd"], "o", {})], {"x": (7, 19)}, {"o": (7, 19)}, {"e": np.array(1e-5, np.float32)}),
}  # fmt: skip


@pytest.mark.parametrize("schedule", ["none", "connected"])
@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize("name", MODELS)
def test_json_round_trip(name: str, target: str, schedule: str) -> None:
    plan = make_plan(programs(MODELS[name])["layout"], machine(target), schedule)
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.to_json() == plan.to_json()
    assert plan_text(again) == plan_text(plan)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"target": "cpu"}', '{"target": 1, "schedule": 2, "body": [3]}'])
def test_what_is_not_a_plan(text: str) -> None:
    with pytest.raises(InternalError, match="not a plan"):
        Plan.from_json(text)


def test_equal_plans_give_equal_loops() -> None:
    from tilewright.ir.text.text import loops_text

    program = programs(MODELS["attention"])["layout"]
    plan = make_plan(program, CPU)
    first, second = (lowered(program, plan=p).loops for p in (plan, Plan.from_json(plan.to_json())))
    assert loops_text(first) == loops_text(second)


# --- edited plans


def random_kernel(kernel: Tile, program: Program, rng: np.random.Generator) -> Tile:
    """Another valid plan for the same nests: other tiles, other register tiles, other orders."""
    sizes = {a: int(rng.integers(1, 2 * n + 1)) for a, n in kernel.cut if rng.random() < 0.8}
    chosen = {leaf.tensor: random_leaf(leaf, rng) for leaf in kernel.leaves}
    return resized(kernel.with_leaves(chosen), program, sizes)


def random_leaf(nest: Leaf, rng: np.random.Generator) -> Leaf:
    register = []
    for axis, size in nest.register:
        unit = nest.lanes if axis == nest.vector else 1
        register.append((axis, unit * int(rng.integers(1, max(2, 2 * size // unit)))))
    outer = [a for a in nest.order if a[0] == "o"]
    inner = [a for a in nest.order if a[0] == "r"]
    order = [outer[i] for i in rng.permutation(len(outer))] + inner
    return replace(nest, register=tuple(register), order=tuple(order))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", MODELS)
def test_random_plans_are_right(name: str, seed: int) -> None:
    program = programs(MODELS[name])["layout"]
    inputs = random_inputs(program)
    rng = np.random.default_rng(seed)
    plan = make_plan(program, CPU, "connected" if seed % 2 else "none")
    edited = with_kernels(plan, [random_kernel(k, program, rng) for k in plan.kernels])
    assert edited != plan
    wanted = evaluated(program, inputs, wide=True)
    for output, array in lowered(program, plan=edited).on_loops(inputs).items():
        np.testing.assert_allclose(array, wanted[output], rtol=1e-4, atol=1e-5, err_msg=plan_text(edited))


# --- operators' names


def renamed(graph: Graph, alias: Callable[[Node], Node]) -> Graph:
    return replace(graph, nodes=tuple(alias(n) for n in graph.nodes))


@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize("name", MODELS)
def test_renamed_nodes_give_the_same_plan(name: str, target: str) -> None:
    graph = load(MODELS[name], {})
    other = renamed(graph, lambda n: replace(n, name=f"other_{len(n.outputs)}"))
    first, second = (make_plan(programs(g)["layout"], machine(target)).to_json() for g in (graph, other))
    assert first == second


@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize("name", MODELS)
def test_renamed_operators_give_the_same_plan(name: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operator under a name nobody has heard of, registered with the same meaning."""
    graph = load(MODELS[name], {})

    def alias(node: Node) -> Node:
        unheard = f"Zz{sorted({n.op for n in graph.nodes}).index(node.op)}"
        entry = registry.find(node.op, node.domain, node.version)
        assert entry is not None

        def lower(b: Any, given: Node, *arguments: Any) -> Any:
            return entry.lower(b, replace(given, op=node.op), *arguments)

        monkeypatch.setitem(registry._ENTRIES, ("", unheard), [replace(entry, name=unheard, lower=lower, since=1)])
        return replace(node, op=unheard)

    other = renamed(graph, alias)
    assert not {n.op for n in other.nodes} & {n.op for n in graph.nodes}
    first, second = (make_plan(programs(g)["layout"], machine(target)).to_json() for g in (graph, other))
    assert first == second


@pytest.mark.parametrize("name", MODELS)
def test_renamed_tensors_give_the_same_kernels(name: str) -> None:
    """Tensors under other names, in another alphabetical order: the same plan but for the names in it."""
    graph = load(MODELS[name], {})
    known = sorted({n for node in graph.nodes for n in (*node.inputs, *node.outputs) if n})
    names = {n: f"t{len(known) - i:03}" for i, n in enumerate(known)} | {"": ""}
    other = replace(
        graph,
        inputs=tuple(replace(v, name=names[v.name]) for v in graph.inputs),
        outputs=tuple(names[n] for n in graph.outputs),
        nodes=tuple(
            replace(n, inputs=tuple(names[i] for i in n.inputs), outputs=tuple(names[o] for o in n.outputs))
            for n in graph.nodes
        ),
        constants={names[n]: a for n, a in graph.constants.items()},
        values={},
    )
    first, second = (make_plan(programs(g)["layout"], CPU) for g in (graph, other))
    assert [nameless(k) for k in first.kernels] == [nameless(k) for k in second.kernels]


def nameless(kernel: Tile) -> str:
    """A kernel's plan with the name of every tensor taken out."""
    value = json.loads(Plan("cpu", "connected", kernel).to_json())["body"]

    def clean(part: Any) -> Any:
        if isinstance(part, dict):
            dropped = ("tensor", "core", "epilogue", "composed", "reason")
            return {k: clean(v) for k, v in part.items() if k not in dropped}
        return [clean(p) for p in part] if isinstance(part, list) else part

    return json.dumps(clean(value))


@pytest.mark.parametrize("name", MODELS)
def test_origins_do_not_matter(name: str) -> None:
    """What a compute says about the node it came from is for messages alone."""
    program = programs(MODELS[name])["layout"]
    other = program.with_computes(tuple(replace(c, origin="Nothing node 'x'") for c in program.computes))
    assert make_plan(other, CPU).to_json() == make_plan(program, CPU).to_json()


# scalar operations share names with operators in lower case; these are words of the compiler, too
WORDS = {"If", "Loop", "Scan"}


@pytest.mark.sample(3)
@pytest.mark.parametrize("room", ["schedule", "tile_graph", "lower", "backend", "render", "transform", "intrinsics"])
def test_no_operator_is_named(room: str) -> None:
    names = {n.rpartition(".")[2] for n in ops.supported()} | set(control.NAMES)
    found = []
    for path in sorted((PACKAGE / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names - WORDS:
                found.append(f"{path.name}:{node.lineno}: {node.value}")
    assert not found


# --- dumps, stops and overrides


@pytest.fixture
def dumped(tmp_path: Path, kernel_cache: Path) -> tuple[Path, Path, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A model's file, its dumps, inputs and right outputs."""
    path = tmp_path / "model.onnx"
    path.write_bytes(MODELS["attention"].SerializeToString())
    folder = tmp_path / "dump"
    model = tilewright.compile(path, options=Options(cache_dir=kernel_cache, dump=folder, threads=1))
    inputs = model.random_inputs(3)
    return path, folder, inputs, model.run(inputs)


def dump_of(folder: Path, name: str) -> Path:
    (found,) = folder.glob(f"[0-9][0-9]-{name}")
    return found


def test_every_form_is_dumped(dumped: tuple[Path, Path, Any, Any]) -> None:
    """Numbered in the order of the stages."""
    names = [re.match(r"(\d\d)-([a-z_]+)", p.name) for p in sorted(dumped[1].iterdir())]
    numbers = {m.group(2): int(m.group(1)) for m in names if m is not None}
    assert numbers == {stage: i + 1 for i, stage in enumerate(STAGES) if stage != "machine"}
    for name in ("program.txt", "fold.txt", "layout.txt", "plan.json", "plan.txt", "loops.txt"):
        assert dump_of(dumped[1], name).read_text().strip()
    assert list(dumped[1].glob("*-source-*.c"))


@pytest.mark.parametrize("stage", STAGES)
def test_stop_after(stage: str, tmp_path: Path, kernel_cache: Path) -> None:
    options = Options(cache_dir=kernel_cache, dump=tmp_path, stop_after=stage)
    model = tilewright.compile(MODELS["norm"], options=options)
    seen = {p.name[3:].split("-")[0].split(".")[0] for p in tmp_path.iterdir()}
    assert stage in seen or stage == "machine"
    later = STAGES[STAGES.index(stage) + 1 :]
    assert not seen & set(later)
    if stage != "machine":
        with pytest.raises(OptionError, match="stopped before there was code"):
            model(weights(7, 19))


def edited_plan(text: str) -> str:
    plan = Plan.from_json(text)
    program = programs(MODELS["attention"])["layout"]
    return with_kernels(plan, [resized(k, program, {"o0": 1, "o1": 5}) for k in plan.kernels]).to_json()


def edited_loops(text: str) -> str:
    """The same loops, their buffers by other names, and one loop unrolled that was not."""
    assert re.search(r"\bserial\b", text)
    return re.sub(r"\bacc\b", "sum_so_far", text)


EDITS: dict[str, tuple[str, Callable[[str], str]]] = {
    "plan": ("plan.json", edited_plan),
    "loops": ("loops.txt", edited_loops),
    "layout": ("layout.txt", lambda t: t),
    "fold": ("fold.txt", lambda t: t),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("stage", EDITS)
def test_edited_dumps_are_replayed(stage: str, dumped: Any, tmp_path: Path, kernel_cache: Path) -> None:
    path, folder, inputs, wanted = dumped
    name, edit = EDITS[stage]
    file = tmp_path / name
    file.write_text(edit(dump_of(folder, name).read_text()))
    options = Options(cache_dir=kernel_cache, overrides=((stage, file),), threads=1)
    model = tilewright.compile(path, options=options)
    if stage == "plan":
        assert model.artifact.plan is not None
        assert all(k.cut == (("o0", 1), ("o1", 5)) for k in model.artifact.plan.kernels)
    for output, array in model.run(inputs).items():
        np.testing.assert_allclose(array, wanted[output], rtol=1e-5, atol=1e-6)


def test_an_edited_program_means_what_it_says(dumped: Any, tmp_path: Path, kernel_cache: Path) -> None:
    """exp turned into a tanh in the dump: the compiled model computes the edited program."""
    path, folder, inputs, _ = dumped
    text = dump_of(folder, "layout.txt").read_text()
    assert text.count("exp(") == 1
    file = tmp_path / "edited.txt"
    file.write_text(text.replace("exp(", "tanh("))
    found = tilewright.compile(path, options=Options(cache_dir=kernel_cache, overrides=(("layout", file),))).run(inputs)
    q, k, v = (inputs[n].astype(np.float64) for n in "qkv")
    scores = q @ k.transpose(0, 2, 1)
    share = np.tanh(scores - scores.max(-1, keepdims=True))
    np.testing.assert_allclose(found["o"], share / share.sum(-1, keepdims=True) @ v, rtol=1e-4, atol=1e-5)


def test_edited_loops_mean_what_they_say(dumped: Any, tmp_path: Path, kernel_cache: Path) -> None:
    path, folder, inputs, wanted = dumped
    text = dump_of(folder, "loops.txt").read_text()
    file = tmp_path / "edited.txt"
    file.write_text(text.replace("exp(", "tanh("))
    assert text.count("exp(") >= 1
    found = tilewright.compile(path, options=Options(cache_dir=kernel_cache, overrides=(("loops", file),))).run(inputs)
    assert np.abs(found["o"] - wanted["o"]).max() > 1e-3


def silent(plan: Plan) -> Plan:
    """Without what is predicted: an edited plan is told that anew."""
    return plan.with_kernels({k.name: replace(k, estimate=Estimate()) for k in plan.kernels})


def test_overrides_from_the_command_line(
    dumped: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kernel_cache: Path
) -> None:
    path, folder, inputs, wanted = dumped
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(kernel_cache))
    np.savez(tmp_path / "in.npz", **inputs)
    plan = tmp_path / "plan.json"
    plan.write_text(edited_plan(dump_of(folder, "plan.json").read_text()))
    command = ["run", str(path), "--inputs", str(tmp_path / "in.npz"), "--outputs", str(tmp_path / "out.npz")]
    assert main([*command, "--override", f"plan={plan}", "--dump", str(tmp_path / "again")]) == 0
    with np.load(tmp_path / "out.npz") as found:
        np.testing.assert_allclose(found["o"], wanted["o"], rtol=1e-5, atol=1e-6)
    again, given = (Plan.from_json(f.read_text()) for f in (dump_of(tmp_path / "again", "plan.json"), plan))
    assert silent(again) == silent(given)
    assert main(["run", str(path), "--stop-after", "plan"]) == 0
    assert "stopped after plan" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stage", "message"), [("program", "takes no edited dump"), ("plan", "not a plan"), ("loops", "cannot read")]
)
def test_wrong_overrides(stage: str, message: str, tmp_path: Path, kernel_cache: Path) -> None:
    file = tmp_path / "edited.txt"
    if stage != "loops":
        file.write_text("{}")
    options = Options(cache_dir=kernel_cache, overrides=((stage, file),))
    with pytest.raises(OptionError, match=message):
        tilewright.compile(MODELS["norm"], options=options)


def test_unknown_stage(kernel_cache: Path) -> None:
    with pytest.raises(OptionError, match="no stage 'plann'"):
        tilewright.compile(MODELS["norm"], options=Options(cache_dir=kernel_cache, stop_after="plann"))
