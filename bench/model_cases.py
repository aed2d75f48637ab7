"""Kernels for the benchmark of the cost model: every distinct one of the zoo, each cut out as a Program of its own,
and random single operators beside them."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from bench.kernel_cases import OPSET, SIZES, random_cases, write_model
from tilewright.backend.cpu.kernel.variants import CpuVariants, variants_of
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.compute import Compute, Program, all_computes, reads
from tilewright.ops import lower
from tilewright.schedule.planner import make_plan
from tilewright.target import Target
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.signature import signature
from tilewright.tile_graph.plan.form import Plan, Tile
from tilewright.tile_graph.traffic.held import plan_nests
from tilewright.transform.clean.fold import fold_constants
from tilewright.transform.layout.choose import choose_layouts
from tilewright.tune.kinds import kind_of, work

# Shorter ones spend their time in the barrier between kernels, whatever their plan.
LEAST_WORK = 20_000
# Longer ones teach nothing that others do not, and twenty bad plans of them take minutes.
MOST_WORK = 310_000_000


@dataclass(frozen=True)
class Case:
    """One kernel: its own small Program, the planner's Plan for it, and where it was found."""

    name: str
    kind: str
    program: Program
    plan: Plan

    @property
    def kernel(self) -> Tile:
        return self.plan.kernels[0]

    def nests(self) -> list[Nest]:
        return plan_nests(self.kernel, all_computes(self.program))

    def variants(self, target: Target) -> CpuVariants:
        return variants_of(self.kernel, self.nests(), self.program, self.plan, target)


def zoo_kernels(paths: dict[str, Path], target: Target) -> list[Case]:
    """Every distinct kernel of the models, as maps fused into registers cut them."""
    found: dict[Hashable, Case] = {}
    for name, path in paths.items():
        found.update((key, case) for key, case in kernels_of(path, name, target) if key not in found)
    return list(found.values())


def kernels_of(path: Path, name: str, target: Target) -> Iterator[tuple[Hashable, Case]]:
    program = choose_layouts(fold_constants(lower(load(path, {}))), target)
    plan = make_plan(program, target, "register")
    computes = all_computes(program)
    for kernel, steps in plan.launches():
        nests = plan_nests(kernel, computes)
        if steps is not None or not LEAST_WORK <= work(nests) <= MOST_WORK:
            continue
        key = signature(nests, lambda t: (program.layout(t), t in program.constants))
        called = f"{name}:{kernel.leaves[-1].tensor}"
        yield key, Case(called, kind_of(nests[-1]), *cut_out(program, plan, kernel, nests))


def cut_out(program: Program, plan: Plan, kernel: Tile, nests: Sequence[Nest]) -> tuple[Program, Plan]:
    """The kernel alone: what it reads becomes inputs, what it stores outputs."""
    computes = all_computes(program)
    names = [name for nest in kernel.leaves for name in (nest.core, *nest.epilogue, *nest.composed)]
    wanted: dict[Compute, None] = dict.fromkeys(computes[name] for name in names)
    ordered = [c for c in program.computes if c in wanted]
    inside = {t for c in ordered for t in c.outputs}
    outside = dict.fromkeys(t for c in ordered for t in reads(c) if t not in inside)
    constants = {t: program.constants[t] for t in outside if t in program.constants}
    alone = Program(
        tuple(t for t in outside if t not in constants), tuple(t for n in nests for t in n.stores), tuple(ordered),
        constants, {t: layout for t, layout in program.layouts.items() if t in inside or t in outside},
    )  # fmt: skip
    present = {t.name for t in (*inside, *outside)}
    layouts = tuple((name, layout) for name, layout in plan.layouts if name in present)
    return alone, Plan(plan.target, plan.schedule, Tile(plan.body.level, body=(replace(kernel, name="k0"),)), layouts)


def random_kernels(count: int, seed: int, folder: Path, target: Target) -> list[Case]:
    """Contractions and convolutions of the kernel benchmark, and reductions, softmaxes and maps, three to one."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    problems = iter(random_cases(4 * count, seed))
    found: list[Case] = []
    while len(found) < count:
        number = len(found)
        path = folder / f"random{number}.onnx"
        if number % 4 == 3:
            name = _write_operator(rng, path)
        else:
            problem = next(problems).problem
            write_model(problem, path)
            name = problem.describe()
        cases = [case for _, case in kernels_of(path, f"random {name}", target)]
        path.unlink()
        if cases:
            found.append(max(cases, key=lambda c: work(c.nests())))
    return found


def _write_operator(rng: np.random.Generator, path: Path) -> str:
    """A reduction, a normalisation or a map of odd sizes."""
    sizes = [int(s) for s in SIZES if 5 <= s <= 257]
    shape = [int(rng.choice(sizes)) for _ in range(3)]
    form = str(rng.choice(["ReduceSum", "ReduceMax", "Softmax", "Transpose", "Gelu", "AveragePool"]))
    attributes: dict[str, object] = {}
    if form.startswith("Reduce"):
        attributes = {"axes": [int(rng.integers(0, 3))], "keepdims": 1} if form == "ReduceMax" else {}
    if form == "Softmax":
        attributes = {"axis": int(rng.integers(1, 3))}
    if form == "Transpose":
        attributes = {"perm": [int(a) for a in rng.permutation(3)]}
    if form == "AveragePool":
        shape = [1, *(max(5, s) for s in shape)]
        attributes = {"kernel_shape": [3, 3], "strides": [2, 2]}
    operator, inputs = form, ["x"]
    constants = []
    if form == "ReduceSum":
        axes = onnx.numpy_helper.from_array(np.array([int(rng.integers(0, 3))]), "axes")
        constants, inputs = [axes], ["x", "axes"]
    if form == "Gelu":
        operator = "Erf"
    node = helper.make_node(operator, inputs, ["y"], **attributes)
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "one", [given], [result], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
    onnx.save(model, str(path))
    return f"{operator} {'x'.join(map(str, shape))} {attributes or ''}".strip()


def spread(cases: Sequence[Case], count: int) -> list[Case]:
    """`count` of the cases, some of every kind, evenly over each."""
    kinds: dict[str, list[Case]] = {}
    for case in cases:
        kinds.setdefault(case.kind, []).append(case)
    total = len(cases)
    chosen: list[Case] = []
    for members in kinds.values():
        share = max(1, round(count * len(members) / total))
        chosen += [members[i * len(members) // share] for i in range(min(share, len(members)))]
    return chosen[:count]
