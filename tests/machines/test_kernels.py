"""Every machine that there is a description of, whatever these tests run on: what is planned for it compiles for it.

Kernels are compiled by zig for the machine's own instructions, and run here as portable C. Of each kind a seeded sample
runs always; everything, the zoo at full size too, with --all. `./test --machine NAME` does the same to all other tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.cpu_stages import error, evaluated, lowered, programs, run_native
from tests.cross import check_compiles, cross_compile
from tests.emulated.cases import EXACT, models
from tests.fuzz.programs import random_program
from tests.ops.backend_cases import cases
from tests.ops.test_backend import compare
from tests.ops.test_native import BATCHES, graph_of, program_of, representatives, side_by_side, unsupported
from tilewright.backend import renderable
from tilewright.backend.cpu import machine_code
from tilewright.compiler.pipeline import Artifact, build
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.graph import Graph
from tilewright.options import Options
from tilewright.target import Target, machine, stored_machines
from tilewright.transform.clean.fold import fold_constants
from tilewright.transform.layout.choose import choose_layouts

MACHINES = stored_machines("cpu")
SEED = 11
CASES_AT_ONCE = 40
MODELS = {name: (model, precision, tolerance) for name, model, precision, tolerance in models()}


def sampled(names: Sequence[object], count: int, there: Sequence[str] = MACHINES) -> list[object]:
    """Every name for every machine: a seeded few for each machine of `there` run always, the others with --all."""
    found = []
    for number, each in enumerate(MACHINES):
        always = set(np.random.default_rng([SEED, number]).permutation(len(names))[: count if each in there else 0])
        marks = [() if i in always else pytest.mark.slow for i in range(len(names))]
        found += [pytest.param(each, name, marks=mark) for name, mark in zip(names, marks, strict=True)]
    return found


def check_numbers(made: Artifact, wanted: dict[str, np.ndarray], given: dict[str, np.ndarray], tolerance: float,
                  folder: Path) -> None:  # fmt: skip
    """The same Loops in portable C, run here."""
    assert made.program is not None and made.plan is not None and made.loops is not None
    loops = renderable(made.loops, made.target)
    sources = machine_code.render(loops, made.target, "portable")
    here = replace(made.target, architecture="any", features=())
    options = Options(cache_dir=folder, threads=2, denormals="keep")
    with machine_code.load(sources, loops, made.program, made.plan, here, options) as model:
        found = run_native(model, made.program, given)
    for name, array in wanted.items():
        largest = np.abs(array[np.isfinite(array)], dtype=np.float64).max()
        limit = tolerance * largest if array.dtype.kind == "f" else tolerance
        if tolerance == EXACT:
            np.testing.assert_array_equal(found[name], array)
        else:
            np.testing.assert_allclose(found[name].astype(np.float64), array, rtol=0, atol=limit)


def operators(names: Sequence[str], target: Target) -> dict[str, Graph]:
    graphs = {name: graph_of(cases()[name]) for name in names}
    return {name: graph for name, graph in graphs.items() if unsupported(graph, target) is None}


OFTEN = ("avx2_desktop", "emerald_rapids", "neoverse_n1")


@pytest.mark.sample(3)
@pytest.mark.parametrize(("there", "batch"), sampled(range(BATCHES), 1, OFTEN))
def test_one_case_an_operator(there: str, batch: int, kernel_cache: Path) -> None:
    target = machine(there)
    graphs = operators(representatives()[batch::BATCHES], target)
    assert len(graphs) > 15
    low = lowered(program_of(side_by_side(graphs), target), target=target)
    check_compiles(machine_code.render(renderable(low.loops, target), target), target, kernel_cache)
    given = {f"{name}.{n}": a for name in graphs for n, a in cases()[name].inputs.items()}
    found = low.on_loops(given)
    for name in graphs:
        case = cases()[name]
        compare({n: found[f"{name}.{n}"] for n in case.outputs}, case.outputs, case.rtol, case.atol)


@pytest.mark.slow
@pytest.mark.part(10)
@pytest.mark.parametrize("start", range(0, len(cases()), CASES_AT_ONCE))
@pytest.mark.parametrize("there", MACHINES)
def test_every_case(there: str, start: int, kernel_cache: Path) -> None:
    target = machine(there)
    graphs = operators(sorted(cases())[start : start + CASES_AT_ONCE], target)
    if graphs:
        low = lowered(program_of(side_by_side(graphs), target), target=target)
        check_compiles(machine_code.render(renderable(low.loops, target), target), target, kernel_cache)


@pytest.mark.parametrize(("there", "name"), sampled(tuple(MODELS), 1))
def test_instructions(there: str, name: str, kernel_cache: Path) -> None:
    """Small models in float32, bfloat16 and int8, as they are compiled for use."""
    model, precision, tolerance = MODELS[name]
    target = machine(there)
    made = build(load(model, {}), target, Options(precision=precision, stop_after="source"))
    assert made.program is not None
    cross_compile(made.sources, target, kernel_cache)  # as optimised as it will be there
    rng = np.random.default_rng(5)
    given = {p.name: rng.standard_normal(p.shape).astype(np.float32) for p in made.inputs}
    check_numbers(made, evaluated(made.program, given), given, tolerance, kernel_cache)


@pytest.mark.parametrize(("there", "seed"), sampled(range(40), 2))
def test_random_programs(there: str, seed: int, kernel_cache: Path) -> None:
    target = machine(there)
    program = choose_layouts(fold_constants(random_program(seed)), target)
    low = lowered(program, target=target)
    check_compiles(machine_code.render(renderable(low.loops, target), target), target, kernel_cache)


def zoo_names() -> tuple[str, ...]:
    try:
        from bench import zoo
    except ImportError:
        return ()
    return tuple(zoo.MODELS)


@pytest.mark.filterwarnings("ignore")  # exporters warn about themselves
@pytest.mark.parametrize(("there", "name"), sampled(zoo_names(), 1, ("avx2_desktop", "neoverse_n1")))
def test_small_zoo(there: str, name: str, zoo_file: Callable[..., Path], kernel_cache: Path) -> None:
    target = machine(there)
    low = lowered(programs(zoo_file(name), target)["layout"], target=target)
    check_compiles(machine_code.render(renderable(low.loops, target), target), target, kernel_cache)
    rng = np.random.default_rng(3)
    given = {
        n: (rng.standard_normal(t.shape) if t.dtype.is_float else rng.integers(0, 2, t.shape)).astype(t.dtype.numpy)
        for t, n in zip(low.program.inputs, low.program.input_names, strict=True)
    }  # fmt: skip
    wanted = evaluated(low.program, given, wide=True)
    for output, array in low.on_loops(given).items():
        assert error(array, wanted[output]) < 1e-5


def zoo_cases() -> list[tuple[str, str, str | None]]:
    """Every model for every machine; in bfloat16 for those that have instructions for it, and for one of the others,
    which all widen it."""
    widening = [there for there in MACHINES if not any("bf16" in f for f in machine(there).features)]
    found: list[tuple[str, str, str | None]] = []
    for number, name in enumerate(zoo_names()):
        left_out = {there for i, there in enumerate(widening) if i != number % len(widening)}
        found += [(name, there, None) for there in MACHINES]
        found += [(name, there, "bfloat16") for there in MACHINES if there not in left_out]
    return found


@pytest.mark.slow
@pytest.mark.part(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "there", "precision"), zoo_cases())
def test_zoo(name: str, there: str, precision: str | None, zoo_file: Callable[..., Path], kernel_cache: Path) -> None:
    """At full size, by the whole compiler."""
    target = machine(there)
    made = build(load(zoo_file(name, size="full"), {}), target, Options(precision=precision, stop_after="source"))
    assert made.sources
    check_compiles(made.sources, target, kernel_cache)
