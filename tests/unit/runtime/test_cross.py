"""`./test --machine NAME`: which machine is planned for, how its kernels are compiled, and what zig refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tilewright
from tests.cpu_stages import model_of
from tests.cross import check_compiles, cross_compile, elsewhere, lacking, processor
from tilewright.backend.cpu import machine_code
from tilewright.intrinsics.cpu import CPU as TABLE
from tilewright.options import Options
from tilewright.runtime import Cache, CompileError
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


def test_a_text_is_compiled_once(tmp_path: Path) -> None:
    """Whatever the kernel is called; what compiles for AVX-512 compiles with AMX beside it, not the other way round."""
    tile = 'void {}(void) {{ __asm__ volatile("tdpbf16ps %tmm2, %tmm1, %tmm0"); }}\n'
    plain = "void {}(void **p, int n) {{ *(float *)p[0] = n; }}\n"
    amx, avx512 = machine("emerald_rapids"), machine("emerald_rapids_avx512")
    assert check_compiles({"k0": plain.format("k0"), "k1": plain.format("k1")}, avx512, tmp_path) == 1
    assert check_compiles({"k7": plain.format("k7"), "k8": tile.format("k8")}, amx, tmp_path) == 1
    assert check_compiles({"k9": tile.format("k9")}, amx, tmp_path) == 0
    assert check_compiles({"k0": plain.format("k0")}, machine("neoverse_n1"), tmp_path) == 1
    for _ in range(2):  # a refusal is not taken for an answer
        with pytest.raises(CompileError, match="k8: emerald_rapids_avx512 has no amx_bf16"):
            check_compiles({"k8": tile.format("k8")}, avx512, tmp_path)
    wide = "typedef float v16 __attribute__((vector_size(64)));\n"
    masked = wide + "void {}(v16 *a, v16 *b) {{ __builtin_ia32_storeups512_mask((void *)a, *b, 7); }}\n"
    assert check_compiles({"k0": masked.format("k0")}, avx512, tmp_path) == 1
    for _ in range(2):
        with pytest.raises(CompileError, match="k1: .*failed"):
            check_compiles({"k1": masked.format("k1")}, machine("avx2_desktop"), tmp_path)


def test_every_instruction_written_out_for_x86_is_known() -> None:
    """So that none of them is taken for one that each processor has."""
    texts = [text for row in TABLE.values() for text in (row.prelude.get("c", ""), row.text["c"])]
    everywhere = replace(machine("avx2_desktop"), features=())
    needed = set().union(*(lacking(text, everywhere) for text in texts))
    assert needed == {"amx_tile", "amx_bf16", "amx_int8", "avx512_bf16", "avx512_vnni", "avx_vnni", "avx2"}


@pytest.mark.sample(2)
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
        there.folder = tmp_path / "known"
        made = tilewright.compile(model, options=Options(cache_dir=tmp_path / "made"))
        assert made.artifact.target.vector_bytes == there.target.vector_bytes
        assert made.artifact.target.architecture == there.target.architecture
        given = made.random_inputs()
        np.testing.assert_allclose(made(given)[0], given["x"] @ weights, rtol=1e-4, atol=1e-4)
    finally:
        there.leave()
    assert (describe.this_cpu, machine_code.load) == before and there.runs_here == runs_here
    assert (Cache(there.folder).stats().entries > 0) is not runs_here  # its kernels were compiled for it, too


@pytest.mark.parametrize(("name", "why"), [("abacus", "unknown target 'abacus'"), ("cuda", "description of a CPU")])
def test_wrong_names_end_the_run(name: str, why: str) -> None:
    with pytest.raises(pytest.UsageError, match=why):
        elsewhere(name)
