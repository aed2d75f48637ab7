"""Inner loops of kernels planned for an x86-64 machine, cross-compiled and read: registers spilled, lanes gathered,
reads a multiply-add, and the cycles llvm-mca gives them against the bound of the multiply-add pipes. Nothing is run.

    python -m bench.assembly --models resnet50 --target emerald_rapids --exports DIR
    python -m bench.assembly --models '' --random 100 --target avx2_desktop

Needs a C compiler for x86-64 and llvm-mca (on Debian: gcc-x86-64-linux-gnu, llvm-19).
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.kernel_cases import fixed_cases, random_cases, write_model
from bench.support import add_zoo_options, chosen_models, export_folder, exported, table
from tilewright.compiler.pipeline import build
from tilewright.frontend.onnx.model import load
from tilewright.options import Options
from tilewright.runtime.toolchain import Compiler, NativeMachine, ToolchainError, find_compiler, for_kernels
from tilewright.target import Target, machine

COMPILER = "x86_64-linux-gnu-gcc"
ANALYSERS = ("llvm-mca", *(f"llvm-mca-{version}" for version in range(21, 13, -1)))
PIPES = 2
LANES = {"zmm": 16, "ymm": 8, "xmm": 4}
# What gcc compiles for, and whose pipes llvm-mca follows: its tables of Ice Lake and Sapphire Rapids give 512-bit
# multiply-adds one pipe, and servers have two, as its table of Skylake says.
PROCESSORS = {64: ("sapphirerapids", "skylake-avx512"), 32: ("alderlake", "haswell"), 16: ("x86-64-v2", "sandybridge")}
_FMA = re.compile(r"vfn?m(add|sub)\d*(ps)\b")
_JUMP = re.compile(r"\s+j\w+\s+(\.L\w+)")
_LABEL = re.compile(r"^(\.L\w+):")


@dataclass(frozen=True)
class Loop:
    """An innermost loop: where it begins in the text, and its instructions."""

    line: int
    body: tuple[str, ...]

    @property
    def fmas(self) -> int:
        return sum(bool(_FMA.match(text)) for text in self.body)

    @property
    def reads(self) -> int:
        """Instructions that take an operand from memory; what is stored comes last."""
        return sum(_touches_memory(text) and not text.endswith(")") for text in self.body)

    @property
    def spills(self) -> int:
        """Vectors kept on the stack."""
        return sum("(%rsp)" in text and bool(re.search(r"%[xyz]mm", text)) for text in self.body)

    @property
    def inserts(self) -> int:
        """Lanes put together one by one."""
        return sum(text.startswith(("vinsert", "vpinsr", "vmovlhps", "vunpck")) for text in self.body)

    @property
    def lanes(self) -> int:
        """Of the widest multiply-add."""
        widths = [LANES[name] for text in self.body if _FMA.match(text) for name in re.findall(r"%([xyz]mm)", text)]
        return max(widths, default=1)


@dataclass(frozen=True)
class Reading:
    """A loop with the cycles llvm-mca gives one turn of it, of a kernel that is called so many times."""

    kernel: str
    calls: int
    loop: Loop
    cycles: float

    def share(self, lanes: int) -> float:
        """Of the multiply-adds that full vectors could do in these cycles."""
        return self.loop.fmas * self.loop.lanes / lanes / PIPES / self.cycles


def innermost(text: str) -> list[Loop]:
    """Loops of an AT&T assembly text that hold no other loop."""
    lines = text.splitlines()
    labels = {m.group(1): i for i, line in enumerate(lines) if (m := _LABEL.match(line))}
    ends: dict[int, int] = {}
    for i, line in enumerate(lines):
        jump = _JUMP.match(line)
        if jump and (start := labels.get(jump.group(1), i)) < i:
            ends[start] = max(i, ends.get(start, 0))
    found = []
    for start, end in sorted(ends.items()):
        if not any(start < other and last <= end for other, last in ends.items()):
            body = (line.split("#")[0].strip() for line in lines[start : end + 1] if line.startswith("\t"))
            found.append(Loop(start + 1, tuple(text for text in body if text and text[0] != ".")))
    return found


def _touches_memory(text: str) -> bool:
    return "(" in text and not text.startswith(("lea", "prefetch", "j"))


def turn_cycles(loop: Loop, analyser: str, processor: str, turns: int = 100) -> float:
    """Cycles of one turn, as llvm-mca sees many of them after each other."""
    body = "\n".join(re.sub(r"\.L\w+", "away", text) for text in loop.body)
    command = [analyser, f"-mcpu={processor}", "-mtriple=x86_64-linux-gnu", f"-iterations={turns}", "-json"]
    done = subprocess.run(command, input=body, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ToolchainError(f"{analyser} does not read the loop in line {loop.line}: {done.stderr.strip()[:200]}")
    return float(json.loads(done.stdout)["CodeRegions"][0]["SummaryView"]["TotalCycles"]) / turns


def assembly(source: str, compiler: Compiler, target: Target) -> str:
    """A kernel's text as the target's own compiler would have it, with the flags that kernels are compiled with."""
    there = NativeMachine(target.architecture, target.name, frozenset(target.features))
    flags = [f for f in for_kernels(compiler, there) if f != "-march=native"]
    command = [*compiler.argv, *flags, f"-march={PROCESSORS[target.vector_bytes][0]}", "-w", "-S", "-x", "c", "-"]
    done = subprocess.run([*command, "-o", "-"], input=source, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ToolchainError(f"{compiler.argv[0]} failed: {done.stderr.strip()[:400]}")
    return done.stdout


def readings(model: Path, target: Target, compiler: Compiler, analyser: str, least: int) -> Iterator[Reading]:
    """The innermost loops of a model's kernels with at least so many multiply-adds."""
    made = build(load(str(model), {}), target, Options(stop_after="source"))
    calls: dict[str, int] = {}
    for call in made.calls:
        calls[call.kernel] = calls.get(call.kernel, 0) + 1
    for name, source in made.sources.items():
        for loop in innermost(assembly(source, compiler, target)):
            if loop.fmas >= least:
                cycles = turn_cycles(loop, analyser, PROCESSORS[target.vector_bytes][1])
                yield Reading(name, calls.get(name, 0), loop, cycles)


def rows(found: Sequence[Reading], lanes: int, below: float) -> list[list[str]]:
    shown = [r for r in found if r.share(lanes) < below]
    return [
        [r.kernel, str(r.calls), str(r.loop.line), str(len(r.loop.body)), f"{r.loop.fmas} x {r.loop.lanes}",
         f"{r.loop.reads / r.loop.fmas:.2f}", str(r.loop.spills), str(r.loop.inserts), f"{r.cycles:.1f}",
         f"{100 * r.share(lanes):.0f}%"]
        for r in shown
    ]  # fmt: skip


HEADER = ["kernel", "calls", "line", "instructions", "multiply-adds", "reads each", "spills", "inserts", "cycles",
          "of the bound"]  # fmt: skip


def find_analyser() -> str:
    found = next((path for name in ANALYSERS if (path := shutil.which(name))), None)
    if found is None:
        raise ToolchainError("llvm-mca is not here; install it (on Debian: apt install llvm-19)")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.assembly", description=__doc__.split("\n\n")[0])
    add_zoo_options(parser, "assembly")
    parser.add_argument("--target", default="emerald_rapids", help="a described machine's name, or a .json file")
    parser.add_argument("--compiler", default=COMPILER)
    parser.add_argument("--random", type=int, default=0, metavar="N", help="squares and N seeded random shapes, too")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--least", type=int, default=4, metavar="N", help="multiply-adds of a loop worth a line")
    parser.add_argument("--below", type=float, default=101.0, metavar="PERCENT", help="only loops under this share")
    arguments = parser.parse_args()
    names = chosen_models(parser, arguments)
    target = machine(arguments.target)
    try:
        compiler, analyser = find_compiler(arguments.compiler), find_analyser()
        with export_folder(arguments) as (temporary, folder):
            files = exported(names, arguments.size, folder, tell)
            files |= _single(arguments.random, arguments.seed, temporary)
            for name, path in files.items():
                found = list(readings(path, target, compiler, analyser, arguments.least))
                lines = rows(found, target.lanes(4), arguments.below / 100)
                print(f"\n{name}: {len(found)} loops, {len(lines)} shown\n")
                if lines:
                    print("\n".join(table(HEADER, lines)))
    except ToolchainError as error:
        sys.exit(f"bench.assembly: {error}")


def _single(count: int, seed: int, folder: Path) -> dict[str, Path]:
    """Squares and random shapes as models of one node."""
    found: dict[str, Path] = {}
    for number, case in enumerate([*fixed_cases(), *random_cases(count, seed)] if count else []):
        path = folder / f"case{number}.onnx"
        write_model(case.problem, path)
        found[f"{case.group}, {case.problem.describe()}"] = path
    return found


def tell(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
