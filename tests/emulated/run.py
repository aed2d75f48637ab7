"""Runs kernels on an emulated processor and compares them with the interpreter: see README.md beside this file.

python -m tests.emulated.run --qemu qemu-x86_64                              (AVX2 alone, in seconds)
python -m tests.emulated.run --qemu qemu-aarch64                             (NEON)
python -m tests.emulated.run --bochs DIR --kernel vmlinuz --isolinux DIR     (AVX-512, VNNI, BF16 and AMX)
"""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tests.emulated.cases import X86, Case, every_case, targets
from tests.emulated.guest import boot_files, configuration, list_line
from tilewright.runtime import NativeMachine, default_flags, find_compiler, permissions
from tilewright.runtime.cpu_model import table_source
from tilewright.target import probe

HERE = Path(__file__).resolve().parent
NATIVE = Path(permissions.__file__).with_name("native")
DONE, PANIC = "guest is done", "Kernel panic"
# Processors touch no memory for lanes that a mask leaves out; qemu (7.2) does, and faults before the end of
# memory. A case that faults is run once more with such reads lane by lane: what reads beyond the end still faults.
MASKED = re.compile(r"#if defined\(__AVX__\)(?=\n    return \(\w+\)__builtin_ia32_maskload)")
KINDS = {"float32": "f", "int32": "i", "int8": "b", "uint8": "u"}


@dataclass(frozen=True)
class Tools:
    kernels: str  # compiles them: zig, or a gcc for x86-64
    folder: Path


def zig(*arguments: str, architecture: str = "x86_64") -> list[str]:
    return [sys.executable, "-m", "ziglang", "cc", "-target", f"{architecture}-linux-musl", "-g0", *arguments]


def call(command: Sequence[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed in {folder}:\n{done.stderr[:3000]}")


def compile_case(case: Case, tools: Tools) -> Path:
    """A folder with a static program, what goes in and what must come out."""
    folder = tools.folder / "cases" / case.name
    folder.mkdir(parents=True, exist_ok=True)
    compiler = find_compiler(tools.kernels)
    architecture = case.target.architecture
    machine = NativeMachine(architecture, "emulated", frozenset(case.target.features))
    processor = case.processor if compiler.kind != "zig" else case.processor.replace("-", "_")
    flags = [f.replace("native", processor) for f in default_flags(compiler, machine)]
    if compiler.kind == "zig":
        flags += ["-target", f"{architecture}-linux-musl"]
    objects = []
    for name, text in {**case.image.kernels, "tw_table": table_source(case.image)}.items():
        (folder / f"{name}.c").write_text(text)
        call([*compiler.argv, *flags, f"-I{NATIVE}", "-c", f"{name}.c", "-o", f"{name}.o"], folder)
        objects.append(f"{name}.o")
    rest = [*(str(NATIVE / f"{name}.c") for name in ("driver", "placing", "team")), str(HERE / "guest.c")]
    numbers = {"CALL": permissions._ARCH_PRCTL, "REQUEST": permissions._REQUEST_PERMISSION,
               "TILES": permissions._TILE_DATA}  # fmt: skip
    defined = [f"-DPERMISSION_{name}={number}" for name, number in numbers.items()]
    linked = ["-O2", "-static", "-w", *defined, f"-I{NATIVE}", *rest, *objects, "-lm", "-o", "program"]
    call(zig(*linked, architecture=architecture), folder)
    (folder / "weights").write_bytes(bytes(case.image.weights))
    for kind, arrays in (("input", case.inputs), ("wanted", case.wanted)):
        for number, array in enumerate(arrays):
            (folder / f"{kind}{number}").write_bytes(np.ascontiguousarray(array).tobytes())
    return folder


def compile_probe(tools: Tools) -> None:
    """The program that measures a machine, with every instruction it may try."""
    target, processor = targets()["amx"]
    flags = probe.probe_flags(target, frozenset(target.features))
    text = probe.probe_source()
    brief = text.replace("BURST_SECONDS 100e-6", "BURST_SECONDS 1e-6")  # an emulated tile takes a hundred microseconds
    if brief == text:
        raise SystemExit("the measuring program says no more how long a burst is")
    (tools.folder / "probe.c").write_text(brief)
    arguments = ["-O3", f"-mcpu={processor}", "-fno-sanitize=all", "-w", "-static", *flags]
    call(zig(*arguments, "probe.c", str(HERE / "measure.c"), "-lm", "-o", "measure"), tools.folder)


def arguments_of(case: Case) -> list[str]:
    kinds = "".join(KINDS[str(a.dtype)] for a in case.wanted)
    return [case.name, "2", str(case.tolerance), "1" if case.needs_tiles else "0", kinds]


def run_qemu(qemu: str, case: Case, tools: Tools) -> tuple[bool, str]:
    """In this process's own system: whether the result is the wanted one, and what was said about it."""
    command = [qemu, "-cpu", "max", "./program", *arguments_of(case)]
    done = subprocess.run(command, cwd=compile_case(case, tools), text=True, capture_output=True, check=False)
    if done.returncode == -signal.SIGSEGV:
        spelled_out = {name: MASKED.sub("#if 0", text) for name, text in case.image.kernels.items()}
        if spelled_out != case.image.kernels:
            return run_qemu(qemu, replace(case, image=replace(case.image, kernels=spelled_out)), tools)
    said = done.stdout.strip() or f"{case.name}: FAILED with status {done.returncode} {done.stderr.strip()}"
    return done.returncode == 0, said


def run_bochs(given: argparse.Namespace, cases: Sequence[Case], tools: Tools) -> int:
    """In a Linux guest that runs all programs and then says so on its serial port."""
    call(zig("-O2", "-static", str(HERE / "init.c"), "-o", "init"), tools.folder)
    call(zig("-O2", "-static", "-mcpu=sapphirerapids", str(HERE / "untouched.c"), "-o", "untouched"), tools.folder)
    compile_probe(tools)
    lines = [*(list_line(case.name, arguments_of(case)) for case in cases), "/ /untouched\n", "/ /measure\n"]
    image = boot_files(tools.folder, given.kernel, given.isolinux, "".join(lines), [c.name for c in cases])
    serial = tools.folder / "serial.txt"
    serial.unlink(missing_ok=True)
    (tools.folder / "bochsrc").write_text(configuration(given.bochs, given.bios, image, serial))
    command = [str(given.bochs / "bochs"), "-q", "-f", "bochsrc"]
    shown, deadline = 0, time.monotonic() + given.seconds
    with subprocess.Popen(command, cwd=tools.folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                          stderr=subprocess.DEVNULL) as machine:  # fmt: skip
        text = ""
        while not re.search(f"{DONE}|{PANIC}", text) and time.monotonic() < deadline:
            if machine.poll() is not None:
                break
            time.sleep(1.0)
            text = serial.read_text(errors="replace") if serial.exists() else ""
            whole = text.rfind("\n") + 1
            print(text[shown:whole], end="", flush=True)
            shown = max(shown, whole)
        machine.kill()
    if DONE not in text:
        print(f"the guest did not finish; {tools.folder / 'bochs.log'} may say why")
        return 1
    return int(f"{DONE}: 0 of " not in text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--qemu", help="qemu-user for x86-64, which runs AVX2, or for aarch64")
    parser.add_argument("--bochs", type=Path, help="the folder where Bochs 2.8 or later was built, with AMX")
    parser.add_argument("--bios", type=Path, help="the folder of BIOS-bochs-latest and vgabios.bin", default=None)
    parser.add_argument("--kernel", type=Path, help="a Linux kernel for x86-64, 5.16 or later, with a serial console")
    parser.add_argument("--isolinux", type=Path, help="the folder of isolinux.bin and ldlinux.c32")
    parser.add_argument("--compiler", default="zig", help="of the kernels: zig, or a gcc for x86-64")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--quick", action="store_true", help="few cases of each instruction")
    parser.add_argument("--seconds", type=float, default=1800.0, help="patience with the guest")
    parser.add_argument("--folder", type=Path, required=True, help="where everything is made")
    given = parser.parse_args()
    if not given.qemu and not (given.bochs and given.kernel and given.isolinux):
        parser.error("give --qemu, or --bochs with --kernel and --isolinux")
    tools = Tools(given.compiler, given.folder.resolve())
    shutil.rmtree(tools.folder / "cases", ignore_errors=True)
    kinds = X86 if not given.qemu else ("neon",) if "aarch64" in Path(given.qemu).name else ("avx2",)
    cases, failures = [], 0
    for name, make in every_case(kinds, given.quick):
        if given.only not in name:
            continue
        case = make()
        cases.append(case)
        print(f"{case.name}: {', '.join(case.instructions) or 'plain vectors'}", flush=True)
        if given.qemu:
            is_right, said = run_qemu(given.qemu, case, tools)
            print(said, flush=True)
            failures += not is_right
        else:
            compile_case(case, tools)
    return 1 if (failures if given.qemu else run_bochs(given, cases, tools)) else 0


if __name__ == "__main__":
    raise SystemExit(main())
