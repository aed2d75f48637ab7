"""`./test --machine NAME`: which machine is planned for, how its kernels are compiled, and what zig refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tilewright
from tests.cpu_stages import model_of
from tests.cross import cross_compile, elsewhere, processor
from tilewright.backend.cpu import machine_code
from tilewright.options import Options
from tilewright.runtime import CompileError
from tilewright.target import describe, machine, stored_machines, why_not_here

pytestmark = pytest.mark.host


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("avx2_desktop", "x86_64_v3+avxvnni"),
        ("emerald_rapids_avx512", "x86_64_v4+avxvnni+avx512vnni+avx512bf16"),
        ("emerald_rapids", "x86_64_v4+avxvnni+avx512vnni+avx512bf16+amx_tile+amx_bf16+amx_int8"),
        ("neoverse_n1", "baseline+dotprod"),
    ],
)
def test_processors_as_zig_names_them(name: str, expected: str) -> None:
    assert processor(machine(name)) == expected


def test_instructions_that_a_machine_lacks_are_refused(tmp_path: Path) -> None:
    source = 'void k(void) { __asm__ volatile("tdpbf16ps %tmm2, %tmm1, %tmm0"); }\n'
    (found,) = cross_compile({"k": source}, machine("emerald_rapids"), tmp_path).values()
    assert found.read_bytes()[:4] == b"\x7fELF" and found.read_bytes()[18] == 62  # x86-64
    with pytest.raises(CompileError, match="k: .*failed"):
        cross_compile({"k": source}, machine("neoverse_n1"), tmp_path)
    wide = "typedef float v16 __attribute__((vector_size(64))); typedef float v8 __attribute__((vector_size(32)));\n"
    with pytest.raises(CompileError, match="incompatible type|not convert|v8"):
        cross_compile({"k": f"{wide}void k(v16 *a, v8 *b) {{ *a = *b; }}\n"}, machine("emerald_rapids"), tmp_path)


@pytest.mark.parametrize("name", stored_machines("cpu"))
def test_the_machine_of_all_that_is_planned(name: str, tmp_path: Path) -> None:
    """A model compiled for "cpu" is planned for the description, and runs here all the same."""
    weights = np.random.default_rng(0).standard_normal((40, 24)).astype(np.float32)
    model = model_of([("MatMul", ["x", "w"], "y", {})], {"x": (16, 40)}, {"y": (16, 24)}, {"w": weights})
    before = (describe.this_cpu, machine_code.load)
    there = elsewhere(name)
    runs_here = why_not_here(there.target) is None
    there.enter()
    try:
        made = tilewright.compile(model, options=Options(cache_dir=tmp_path))
        assert made.artifact.target.vector_bytes == there.target.vector_bytes
        assert made.artifact.target.architecture == there.target.architecture
        given = made.random_inputs()
        np.testing.assert_allclose(made(given)[0], given["x"] @ weights, rtol=1e-4, atol=1e-4)
    finally:
        there.leave()
    assert (describe.this_cpu, machine_code.load) == before and there.runs_here == runs_here
    foreign = [p for p in tmp_path.rglob("*.o") if p.read_bytes()[18:20] != made_here(tmp_path)]
    assert bool(foreign) is not runs_here or machine(name).architecture == describe.this_cpu().architecture


def made_here(folder: Path) -> bytes:
    """The architecture of the linked model."""
    return next(folder.rglob("*.so")).read_bytes()[18:20]


@pytest.mark.parametrize(("name", "why"), [("abacus", "unknown target 'abacus'"), ("cuda", "description of a CPU")])
def test_wrong_names_end_the_run(name: str, why: str) -> None:
    with pytest.raises(pytest.UsageError, match=why):
        elsewhere(name)
