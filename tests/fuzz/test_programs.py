"""Seeded random Programs: every schedule gives what the interpreter gives, on Loops and as machine code.

A failure prints its seed; `pytest tests/fuzz -k "[SEED-"` runs that one again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.cpu_stages import CPU, Arrays, evaluated, lowered
from tests.fuzz.programs import random_arrays, random_program
from tests.fuzz.seeds import seeds
from tilewright.ir.analysis.verify import verify_program
from tilewright.ir.forms.compute import Program
from tilewright.ir.text import text
from tilewright.ir.text.parse import parse_program
from tilewright.schedule import group_cost
from tilewright.schedule.planner import make_plan
from tilewright.transform.clean.fold import fold_constants
from tilewright.transform.layout.choose import choose_layouts

# some of everything; several of them stream
QUICK = (1, 2, 3, 4, 5, 7, 8, 12, 21, 22, 30, 41)
WAYS = (("none", "auto"), ("connected", "never"), ("connected", "always"))
TOLERANCE = {"float64": 1e-9, "float32": 2e-4, "float16": 2e-2}


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streamed axes here are short, too; blocks that do not divide them, and vectors that do not fit."""
    monkeypatch.setattr(group_cost, "STREAM_BLOCKS", (3, 8))


@contextmanager
def told(seed: int, program: Program) -> Iterator[None]:
    """A failure says its seed and shows the program."""
    try:
        yield
    except BaseException:
        print(f"\nseed {seed}\n{text.program_text(program)}")
        raise


def prepared(seed: int) -> Program:
    program = choose_layouts(fold_constants(random_program(seed)), CPU)
    verify_program(program)
    return program


def compare(program: Program, inputs: Arrays, found: Arrays) -> None:
    wanted = evaluated(program, inputs)
    kinds = {t.dtype.name for t in (*program.inputs, *program.outputs) if t.dtype.is_float}
    tolerance = max((TOLERANCE[k] for k in kinds), default=0.0)
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape
        if array.dtype.kind in "iub":
            np.testing.assert_array_equal(found[name], array, err_msg=name)
        else:
            wide = array.astype(np.float64)
            scale = max(1e-3, float(np.abs(wide[np.isfinite(wide)]).max(initial=0)))
            np.testing.assert_allclose(
                found[name].astype(np.float64), wide, rtol=tolerance, atol=tolerance * scale, err_msg=name
            )


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", WAYS, ids="-".join)
@pytest.mark.parametrize("seed", seeds(200, 60, range(40)))
def test_loops(seed: int, way: tuple[str, str]) -> None:
    program = prepared(seed)
    with told(seed, program):
        inputs = random_arrays(program, seed)
        compare(program, inputs, lowered(program, *way).on_loops(inputs))


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", WAYS, ids="-".join)
@pytest.mark.parametrize("seed", seeds(200, 60, QUICK))
def test_machine_code(seed: int, way: tuple[str, str], kernel_cache: Path, request: pytest.FixtureRequest) -> None:
    if way[0] == "none" and seed % 4 and not request.config.getoption("--all"):
        pytest.skip("a sample; --all runs every program unfused, too")
    program = prepared(seed)
    plan = make_plan(program, CPU, *way)
    if way[1] == "always" and all(k.stream is None for k in plan.kernels):
        pytest.skip("nothing to stream: the same kernels as resident")
    with told(seed, program):
        inputs = random_arrays(program, seed)
        compare(program, inputs, lowered(program, plan=plan).natively(inputs, kernel_cache))


@pytest.mark.parametrize("seed", range(12))
def test_connecting_makes_no_cycles(seed: int) -> None:
    """Every kernel reads only what kernels before it have stored."""
    program = prepared(seed)
    for way in WAYS:
        low = lowered(program, *way)
        known = {t.name for t in (*program.inputs, *program.constants)}
        for call in low.loops.calls:
            kernel = low.loops.kernel(call.kernel)
            stored = _stored(kernel)
            read = {a for a, p in zip(call.arguments, kernel.params, strict=True) if p not in stored}
            assert read <= known, (seed, way)
            known.update(a for a, p in zip(call.arguments, kernel.params, strict=True) if p in stored)
        assert {t.name for t in program.outputs} <= known


def _stored(kernel) -> set:
    from tilewright.ir.forms.loops import Store, statements

    return {s.buffer for s in statements(kernel.body) if isinstance(s, Store)}


@pytest.mark.parametrize("seed", range(40))
def test_text_round_trip(seed: int) -> None:
    program = prepared(seed)
    shown = text.program_text(program)
    again = parse_program(shown, {t.name: a for t, a in program.constants.items()})
    assert text.program_text(again) == shown
    assert make_plan(again, CPU).to_json() == make_plan(program, CPU).to_json()
