"""Programs planned for other machines than this one, and what a C compiler for those says to their kernels."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tests.plans import with_kernels
from tilewright.backend import backend_for, renderable
from tilewright.backend.cpu import machine_code
from tilewright.ir.analysis.verify import verify_loops
from tilewright.ir.forms.compute import Program
from tilewright.ir.forms.loops import LoopProgram
from tilewright.lower.program import lower_program
from tilewright.runtime import find_compiler
from tilewright.target import Target
from tilewright.tile_graph.plan.form import Leaf, Plan, Tile
from tilewright.tile_graph.plan.leaf_form import VectorForm

# processors by their names in the compiler; the others are x86 with AVX-512 and AMX
_PROCESSORS = {"apple_arm": "-mcpu=apple-m1", "neoverse_n1": "-mcpu=neoverse-n1", "avx2_desktop": "-march=haswell"}
_LARGEST = "-march=sapphirerapids"


def loops_of(program: Program, plan: Plan, target: Target) -> LoopProgram:
    """The verified Loops of a plan."""
    loops = lower_program(program, plan, backend_for(target).lower_kernel)
    verify_loops(loops)
    return loops


def in_passes(program: Program, plan: Plan, rng: np.random.Generator) -> Plan:
    """The plan with sums in several passes wherever partial sums may wait in the result's place."""
    return with_kernels(plan, [_cut(k, program, rng) for k in plan.kernels])


def _cut(kernel: Tile, program: Program, rng: np.random.Generator) -> Tile:
    if kernel.stream is not None or any(n.instruction for n in kernel.leaves):
        return kernel
    return kernel.map_leaves(lambda leaf: _cut_nest(leaf, program, rng))


def _cut_nest(nest: Leaf, program: Program, rng: np.random.Generator) -> Leaf:
    """Plain sums alone, of the type their results are stored in, with the vector along an output axis."""
    core = next((c for c in program.computes if c.outputs[0].name == nest.core), None)
    stored = next((t for t in program.tensors() if t.name == nest.tensor), None)
    monoid = getattr(core, "monoid", None)
    if core is None or monoid is None or stored is None or monoid.operator != "add" or getattr(core, "initial", ()):
        return nest
    if nest.vector is None or not nest.vector.startswith("o") or stored.dtype is not monoid.identity[0].dtype:
        return nest
    axes = [a for a in nest.order if a.startswith("r") and a not in nest.options(VectorForm).unroll]
    if not axes:
        return nest
    size = int(core.reduce_axes[int(axes[0][1:])].extent)
    return nest if size < 2 else nest.with_options(VectorForm, cut=((axes[0], int(rng.integers(1, size))),))


def refused(sources: Mapping[str, str], target: Target, folder: Path) -> str:
    """What a compiler for the target says to the kernels: nothing where it takes them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in sources.items():
        (folder / f"{name}.c").write_text(text)
    system = f"{target.architecture}-linux-musl"
    # clang itself: zig's own driver writes an object for every file it only looks at
    command = [*find_compiler("zig").argv[:-1], "clang", "--no-default-config", "-fsyntax-only", "-std=gnu11", "-w"]
    command += ["-target", system, _PROCESSORS.get(target.name, _LARGEST), *(f"{name}.c" for name in sources)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.stderr if done.returncode else ""


def sources_of(loops: LoopProgram, target: Target) -> dict[str, str]:
    return machine_code.render(renderable(loops, target), target)
