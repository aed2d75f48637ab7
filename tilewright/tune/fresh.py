"""Two plans of a model timed beside each other in a process of its own, where nothing lies as it did before."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from tilewright.ir.forms.compute import Program
from tilewright.ir.text.parse import parse_program
from tilewright.ir.text.text import program_text
from tilewright.options import Options
from tilewright.target import Target, from_json
from tilewright.tile_graph.plan.form import Plan
from tilewright.tune.models import Builder, Times, sat

# What it is given and gives goes through files that nobody else may read or write.
_CHILD = """
import pickle, sys
with open(sys.argv[1], "rb") as file:
    sys.path[:] = pickle.load(file)
    call, arguments = pickle.load(file)
with open(sys.argv[2], "wb") as file:
    pickle.dump(call(*arguments), file)
"""


def measured(
    program: Program, plans: tuple[Plan, Plan], target: Target, options: Options, seconds: float,
    most: float | None = None,
) -> Times | None:  # fmt: skip
    """None where no process can be started, or it could not do it; a TimeoutError where all of it takes longer than
    `most` seconds."""
    if not sys.executable or os.name != "posix":
        return None
    plain = replace(options, progress=None, tune_watch=None)
    with tempfile.TemporaryDirectory(prefix="tilewright-tune-") as folder:
        given, found = Path(folder) / "given", Path(folder) / "found"
        with given.open("wb") as file:
            pickle.dump(sys.path, file)
            # as texts: what a Program is made of holds functions, which do not cross
            constants = {t.name: np.asarray(array) for t, array in program.constants.items()}
            texts = (program_text(program), constants, [plan.to_json() for plan in plans], target.to_json())
            pickle.dump((_sat, (*texts, plain, seconds)), file, pickle.HIGHEST_PROTOCOL)
        command = [sys.executable, "-P", "-c", _CHILD, str(given), str(found)]
        try:
            done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False,
                                  timeout=most)  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"not measured within {most} seconds") from error
        if done.returncode:
            return None
        times: Times = pickle.loads(found.read_bytes())
        return times


def _sat(
    text: str, constants: dict[str, np.ndarray], plans: list[str], target: str, options: Options, seconds: float
) -> Times:
    program = parse_program(text, constants)
    builder = Builder(program, from_json(target), options)
    first, second = map(Plan.from_json, plans)
    with builder.built(first) as own, builder.built(second) as other:
        return sat(program, own, other, seconds)


