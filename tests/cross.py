"""Kernels for a machine that is not at hand: compiled for it by zig, and run here in the dialect any compiler takes.

`./test --machine NAME` puts the description NAME in the place of this computer's processor. What is planned and
written is then for that machine; what runs is the same Loops, with instructions that this processor lacks spelled out.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import pytest

from tilewright.backend.cpu import machine_code
from tilewright.errors import OptionError
from tilewright.ir.compute import Program
from tilewright.ir.loops import LoopProgram
from tilewright.options import Options
from tilewright.runtime import (
    Cache,
    Compiler,
    CpuModel,
    Machine,
    ObjectCompiler,
    ToolchainError,
    compile_objects,
    default_flags,
)
from tilewright.runtime import find_compiler as find
from tilewright.target import Target, describe, kept, machine, why_not_here
from tilewright.tile_graph.plan import Plan

JOBS = 2
WAY_OUT = "kernels for another machine are compiled by zig, and it is not here: pip install ziglang"
# What zig calls the features that Linux names; those that it has in its baseline of the architecture have no name here.
FEATURES = {
    "avx_vnni": "avxvnni", "avx512_vnni": "avx512vnni", "avx512_bf16": "avx512bf16", "amx_tile": "amx_tile",
    "amx_bf16": "amx_bf16", "amx_int8": "amx_int8", "asimddp": "dotprod", "i8mm": "i8mm", "bf16": "bf16",
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


def flags_for(target: Target, level: str = "-O1") -> tuple[str, ...]:
    """The flags that kernels are compiled with there, less optimised: instructions are chosen all the same."""
    there = Machine(target.architecture, target.name, frozenset(target.features))
    told = {"-O3": level, "-mcpu=native": f"-mcpu={processor(target)}"}
    flags = [told.get(flag, flag) for flag in default_flags(zig(), there)]
    return (*flags, "-target", f"{target.architecture}-linux-musl", "-g0", "-w")


def cross_compile(sources: Mapping[str, str], target: Target, folder: Path, level: str = "-O1") -> dict[str, Path]:
    """An object for each kernel; equal kernels are compiled once in a folder. A refusal is a CompileError."""
    there = Machine(target.architecture, "elsewhere", frozenset(target.features))
    return compile_objects(sources, zig(), flags_for(target, level), there, Cache(folder), jobs=JOBS)


@dataclass
class Elsewhere:
    """The description that stands in for this computer's processor while tests run."""

    target: Target
    runs_here: bool = field(init=False)
    patches: pytest.MonkeyPatch = field(default_factory=pytest.MonkeyPatch)

    def __post_init__(self) -> None:
        self.runs_here = why_not_here(self.target) is None
        if not self.runs_here:
            zig()

    def enter(self) -> None:
        self.patches.setattr(describe, "this_cpu", lambda: replace(self.target, name="cpu"))
        self.patches.setattr(kept, "measured", lambda usual, *_given, **_more: usual)
        if not self.runs_here:
            self.patches.setattr(machine_code, "load", _compiled_twice(machine_code.load))
            self.patches.setattr(machine_code, "early", lambda *_: nullcontext())  # the text is not for this processor
            # what runs here is not the code that will run there: its numbers count, not its speed
            self.patches.setattr(machine_code, "default_flags", _hardly_optimised)

    def leave(self) -> None:
        self.patches.undo()

    def __str__(self) -> str:
        how = "" if self.runs_here else "; its kernels are compiled by zig, and run here as portable C"
        return f"planned for {self.target.name}{how}"


def _hardly_optimised(compiler: Compiler, here: Machine) -> tuple[str, ...]:
    return tuple("-O1" if flag == "-O3" else flag for flag in default_flags(compiler, here))


def _compiled_twice(load):  # type: ignore[no-untyped-def]
    """`machine_code.load` for a machine that is not at hand: for it by zig, and for this one in portable C."""

    def loaded(
        sources: dict[str, str], loops: LoopProgram, program: Program, plan: Plan, target: Target, options: Options,
        weights_dir: Path | None = None, early: ObjectCompiler | None = None,
    ) -> CpuModel:  # fmt: skip
        if target.architecture == "any":  # no machine in particular: it runs here as it is
            return load(sources, loops, program, plan, target, options, weights_dir)
        cross_compile(sources, target, options.cache_dir)
        native = machine_code.render(loops, target)
        portable = machine_code.render(loops, target, "portable")
        # a text that a test has edited stays as it is
        ran = {name: portable[name] if text == native[name] else text for name, text in sources.items()}
        return load(ran, loops, program, plan, replace(target, architecture="any", features=()), options, weights_dir)

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
