"""Kernels for a machine that is not at hand: compiled for it by zig, and run here in the dialect any compiler takes.

What is asked of most of them is whether they compile: a text is compiled once in a run of the tests, not optimised.

`./test --machine NAME` puts the description NAME in the place of this computer's processor. What is planned and
written is then for that machine; what runs is the same Loops, with instructions that this processor lacks spelled out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tilewright.backend.cpu import machine_code
from tilewright.errors import OptionError
from tilewright.ir.forms.compute import Program
from tilewright.ir.forms.loops import LoopProgram
from tilewright.options import Options
from tilewright.runtime import (
    Cache,
    CompileError,
    Compiler,
    CpuModel,
    NativeMachine,
    ObjectCompiler,
    ToolchainError,
    compile_objects,
    content_key,
    default_flags,
)
from tilewright.runtime import find_compiler as find
from tilewright.target import Target, describe, kept, machine, stored_machines, why_not_here
from tilewright.tile_graph.plan.form import Plan

JOBS = 2
WAY_OUT = "kernels for another machine are compiled by zig, and it is not here: pip install ziglang"
# What zig calls the features that Linux names; those that it has in its baseline of the architecture have no name here.
FEATURES = {
    "avx_vnni": "avxvnni", "avx512_vnni": "avx512vnni", "avx512_bf16": "avx512bf16", "amx_tile": "amx_tile",
    "amx_bf16": "amx_bf16", "amx_int8": "amx_int8", "asimddp": "dotprod", "i8mm": "i8mm", "bf16": "bf16",
}  # fmt: skip


# Assemblers for x86 take any instruction, whatever the processor: what those in our texts ask for, by how they begin.
ASSEMBLED = {
    "tile": {"amx_tile"}, "ldtilecfg": {"amx_tile"}, "tdpbf16": {"amx_bf16"}, "tdpb": {"amx_int8"},
    "vdpbf16ps": {"avx512_bf16"}, "vcvtneps2bf16": {"avx512_bf16"}, "vptest": {"avx512f"},
    "%{vex%} vpdpbusd": {"avx_vnni"}, "vpdpbusd": {"avx512_vnni"}, "vpmaddwd": {"avx2"}, "vpmovsxbw": {"avx2"},
    "vmax": {"avx2"}, "vmin": {"avx2"}, "vcmp": {"avx2"}, "vblendv": {"avx2"},
    # of Arm, and of AVX-512: the preprocessor takes them away
    "fmax": set(), "fmin": set(), "sdot": set(), "vscalef": set(),
}  # fmt: skip


@cache
def zig() -> Compiler:
    try:
        return find("zig")
    except ToolchainError as error:
        raise ToolchainError(WAY_OUT) from error


def processor(target: Target) -> str:
    """As zig names it: the level of x86-64 that has these vectors, and what the description has beyond it."""
    base = "baseline"
    if target.architecture == "x86_64":
        levels = {"avx512f": "x86_64_v4", "avx2": "x86_64_v3"}
        base = next((level for feature, level in levels.items() if feature in target.features), "x86_64_v2")
    return "+".join([base, *(FEATURES[f] for f in target.features if f in FEATURES)])


def flags_for(target: Target, level: str) -> tuple[str, ...]:
    """The flags that kernels are compiled with there, but for the level; zig takes all but -O0 for the highest."""
    there = NativeMachine(target.architecture, target.name, frozenset(target.features))
    told = {"-O3": level, "-mcpu=native": f"-mcpu={processor(target)}"}
    flags = [told.get(flag, flag) for flag in default_flags(zig(), there)]
    return (*flags, "-target", f"{target.architecture}-linux-musl", "-g0", "-w")


def cross_compile(sources: Mapping[str, str], target: Target, folder: Path, level: str = "-O3") -> dict[str, Path]:
    """An object for each kernel; equal kernels are compiled once in a folder. A refusal is a CompileError."""
    there = NativeMachine(target.architecture, "elsewhere", frozenset(target.features))
    return compile_objects(sources, zig(), flags_for(target, level), there, Cache(folder), jobs=JOBS)


def lacking(text: str, target: Target) -> set[str]:
    """Features that instructions written into the text need and the machine has not."""
    if target.architecture != "x86_64":  # the assembler refuses them
        return set()
    written = re.findall(r'__asm__(?: volatile)?\("((?:%\{vex%\} )?\w+)', text)
    needed = [next((f for start, f in ASSEMBLED.items() if i.startswith(start)), {f"known {i}"}) for i in written]
    return set().union(*needed) - set(target.features)


def check_compiles(sources: Mapping[str, str], target: Target, folder: Path) -> int:
    """A CompileError for what that machine's compiler refuses. Instructions are chosen and assembled without any
    optimisation too, in half the time. A text that is known in the folder, by whatever name, for this machine or for
    one with a part of its instructions, is not compiled again: gives how many were."""
    known = Cache(folder)
    machines = (target, *_parts_of(target))
    fresh: dict[str, str] = {}
    keys = []
    for name, text in sources.items():
        if lacks := lacking(text, target):
            raise CompileError(f"{name}: {target.name} has no {', '.join(sorted(lacks))}")
        nameless = text.replace(f" {name}(", " kernel(")
        found = [content_key("compiles", nameless, zig().version, *flags_for(t, "-O0")) for t in machines]
        if found[0] not in keys and all(known.get(key) is None for key in found):
            keys.append(found[0])
            fresh[name] = text
    if fresh:
        with TemporaryDirectory(prefix="tilewright-") as scratch:
            cross_compile(fresh, target, Path(scratch), "-O0")
    for key in keys:
        known.put(key, b"")
    return len(fresh)


@cache
def _parts_of(target: Target) -> tuple[Target, ...]:
    """Described machines whose every instruction this one has: what compiles for them compiles for it."""
    described = [machine(name) for name in stored_machines("cpu")]
    return tuple(
        m for m in described
        if m.architecture == target.architecture and set(m.features) < set(target.features)
    )  # fmt: skip


@dataclass
class Elsewhere:
    """The description that stands in for this computer's processor while tests run."""

    target: Target
    runs_here: bool = field(init=False)
    folder: Path | None = None  # where all tests of a run, on all of its processes, keep what they know to compile
    patches: pytest.MonkeyPatch = field(default_factory=pytest.MonkeyPatch)

    def __post_init__(self) -> None:
        self.runs_here = why_not_here(self.target) is None
        if not self.runs_here:
            zig()

    def enter(self) -> None:
        self.patches.setattr(describe, "this_cpu", lambda: replace(self.target, name="cpu"))
        self.patches.setattr(kept, "measured", lambda usual, *_given, **_more: usual)
        if not self.runs_here:
            self.patches.setattr(machine_code, "load", _compiled_twice(machine_code.load, self))
            self.patches.setattr(machine_code, "early", lambda *_: nullcontext())  # the text is not for this processor
            # what runs here is not the code that will run there: its numbers count, not its speed
            self.patches.setattr(machine_code, "for_kernels", _hardly_optimised)

    def leave(self) -> None:
        self.patches.undo()

    def __str__(self) -> str:
        how = "" if self.runs_here else "; its kernels are compiled by zig, and run here as portable C"
        return f"planned for {self.target.name}{how}"


def _hardly_optimised(compiler: Compiler, here: NativeMachine, hurried: bool = False) -> tuple[str, ...]:
    return tuple("-O0" if flag == "-O3" else flag for flag in default_flags(compiler, here))


def _compiled_twice(load, there: Elsewhere):  # type: ignore[no-untyped-def]
    """`machine_code.load` for a machine that is not at hand: for it by zig, and for this one in portable C."""

    def loaded(
        sources: dict[str, str], loops: LoopProgram, program: Program, plan: Plan, target: Target, options: Options,
        weights_dir: Path | None = None, early: ObjectCompiler | None = None, blocks: Mapping[str, int] | None = None,
    ) -> CpuModel:  # fmt: skip
        if target.architecture == "any":  # no machine in particular: it runs here as it is
            return load(sources, loops, program, plan, target, options, weights_dir, None, blocks)
        check_compiles(sources, target, there.folder or options.cache_dir)
        native = machine_code.render(loops, target)
        portable = machine_code.render(loops, target, "portable")
        # a text that a test has edited stays as it is
        ran = {name: portable[name] if text == native[name] else text for name, text in sources.items()}
        here = replace(target, architecture="any", features=())
        return load(ran, loops, program, plan, here, options, weights_dir, None, blocks)

    return loaded


def elsewhere(name: str) -> Elsewhere:
    """The machine of that name; a wrong name ends the run with one line."""
    try:
        target = machine(name)
        if target.kind != "cpu":
            raise OptionError(f"--machine takes a description of a CPU, and {name} is a {target.kind}")
        return Elsewhere(target)
    except (OptionError, ToolchainError) as error:
        raise pytest.UsageError(str(error)) from error
