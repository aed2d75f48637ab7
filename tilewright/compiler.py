"""The whole compiler as a plain sequence of named stages; each result is checked, timed, and dumped on request."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tilewright.errors import OptionError, ToolError
from tilewright.ir.compute import Program
from tilewright.ir.dtypes import DType
from tilewright.ir.graph import Graph
from tilewright.ir.loops import LoopProgram
from tilewright.options import Options
from tilewright.schedule.plan import Plan
from tilewright.target import Target
from tilewright.verifying import Verifier


@dataclass
class Stages:
    """Runs stages by name: verifies, times, dumps, stops, and takes an edited dump in a stage's place."""

    options: Options
    seconds: dict[str, float] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    verifier: Verifier | None = field(init=False)

    def __post_init__(self) -> None:
        self.verifier = Verifier(self.options.seed) if self.options.verify else None

    def run(self, name: str, stage: Callable[..., Any], *inputs: Any) -> Any:
        if self.options.progress is not None:
            self.options.progress(name)
        start = time.perf_counter()
        result = self._override(name, inputs) if name in dict(self.options.overrides) else stage(*inputs)
        self.seconds[name] = time.perf_counter() - start
        self.results[name] = result
        _verify(name, result)
        if self.options.dump is not None:
            _dump(self.options.dump, len(self.seconds), name, result)
        if self.verifier is not None:
            self.verifier.check(name, result)
        if self.options.stop_after == name:
            raise Stopped(name)
        return result

    def _override(self, name: str, inputs: tuple[Any, ...]) -> Any:
        path = Path(dict(self.options.overrides)[name])
        try:
            text = path.read_text()
        except OSError as error:
            raise OptionError(f"cannot read {path} to put in place of stage '{name}': {error.strerror}") from error
        return _parse(name, text, inputs)


class Stopped(Exception):
    """The pipeline stopped after the stage the user named."""


class Port(NamedTuple):
    """An input or output of a compiled model."""

    name: str
    dtype: DType
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Artifact:
    """Everything a compilation made."""

    graph: Graph
    target: Target
    program: Program | None
    plan: Plan | None
    loops: LoopProgram | None
    sources: dict[str, str]
    runner: Any
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    stage_seconds: dict[str, float]


STAGES = ("program", "fold", "layout", "plan", "loops", "source", "machine")


def build(graph: Graph, target: Target, options: Options) -> Artifact:
    """A Graph to something that runs; stops early where the options say so."""
    from tilewright.lower.program import lower_program
    from tilewright.ops import lower
    from tilewright.schedule.planner import make_plan
    from tilewright.transform.fold import fold_constants
    from tilewright.transform.layout import choose_layouts

    if options.stop_after is not None and options.stop_after not in STAGES:
        raise OptionError(f"no stage '{options.stop_after}': choose one of {', '.join(STAGES)}")
    stages = Stages(options)
    run = stages.run
    backend = _backend(target)
    try:
        program = run("program", lower, graph)
        program = run("fold", fold_constants, program)
        program = run("layout", choose_layouts, program, target)
        plan = run("plan", make_plan, program, target, options.schedule)
        loops = run("loops", lower_program, program, plan, target, backend.lower_kernel)
        sources = run("source", backend.render, loops, target)
        runner = run("machine", backend.load, sources, loops, program, plan, target, options)
    except Stopped:
        runner = None
    done = stages.results
    last: Program | None = done.get("layout") or done.get("fold") or done.get("program")
    return Artifact(
        graph, target, last, done.get("plan"), done.get("loops"), done.get("source", {}), done.get("machine"),
        _ports(last.inputs, last.input_names) if last else (), _ports(last.outputs, last.output_names) if last else (),
        stages.seconds,
    )  # fmt: skip


def _backend(target: Target) -> Any:
    if target.kind == "cpu":
        from tilewright import backend_cpu

        return backend_cpu
    from tilewright import backend_gpu

    return backend_gpu


def _ports(tensors: Any, names: tuple[str, ...]) -> tuple[Port, ...]:
    return tuple(Port(n or t.name, t.dtype, tuple(int(e) for e in t.shape)) for t, n in zip(tensors, names or [""] * len(tensors), strict=True))


def _verify(name: str, result: Any) -> None:
    try:
        from tilewright.ir import verify
    except ImportError:
        return

    if isinstance(result, Program):
        verify.verify_program(result)
    elif isinstance(result, LoopProgram):
        verify.verify_loops(result)


def _dump(folder: Path, number: int, name: str, result: Any) -> None:
    from tilewright.ir import text

    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{number:02d}-{name}"
    if isinstance(result, Program):
        (folder / f"{stem}.txt").write_text(text.program_text(result))
    elif isinstance(result, Plan):
        (folder / f"{stem}.json").write_text(result.to_json())
        (folder / f"{stem}.txt").write_text(result.text())
    elif isinstance(result, LoopProgram):
        (folder / f"{stem}.txt").write_text(text.loops_text(result))
    elif isinstance(result, dict):
        for kernel, source in result.items():
            (folder / f"{stem}-{kernel}.c").write_text(source)


def _parse(name: str, text: str, inputs: tuple[Any, ...]) -> Any:
    from tilewright.ir import parse

    if name == "plan":
        return Plan.from_json(text)
    if name == "loops":
        return parse.parse_loops(text)
    if name in ("fold", "layout"):
        return parse.parse_program(text, {t.name: a for t, a in inputs[0].constants.items()})
    raise OptionError(f"stage '{name}' takes no edited dump; fold, layout, plan and loops do")


__all__ = ["STAGES", "Artifact", "Port", "Stopped", "ToolError", "build", "np"]
