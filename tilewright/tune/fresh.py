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
from tilewright.tune.models import CallTimes, TrialBuilder, sat

# What it is given and gives goes through files that nobody else may read or write.
_CHILD = """
import pickle, sys
with open(sys.argv[1], "rb") as file:
    sys.path[:] = pickle.load(file)
    call, arguments = pickle.load(file)
with open(sys.argv[2], "wb") as file:
    pickle.dump(call(*arguments), file)
"""


Planned = tuple[Program, Plan]


def measured(
    models: tuple[Planned, Planned], target: Target, options: Options, seconds: float, most: float | None = None
) -> CallTimes | None:
    """Two plans, of one Program or of two with the same inputs and outputs. None where no process can be started, or it
    could not do it; a TimeoutError where all of it takes longer than `most` seconds."""
    if not sys.executable or os.name != "posix":
        return None
    plain = replace(options, progress=None, tune_watch=None)
    with tempfile.TemporaryDirectory(prefix="tilewright-tune-") as folder:
        given, found = Path(folder) / "given", Path(folder) / "found"
        with given.open("wb") as file:
            pickle.dump(sys.path, file)
            # as texts: what a Program is made of holds functions, which do not cross
            texts = [(program_text(program), {t.name: np.asarray(array) for t, array in program.constants.items()},
                      plan.to_json()) for program, plan in models]  # fmt: skip
            pickle.dump((_sat, (texts, target.to_json(), plain, seconds)), file, pickle.HIGHEST_PROTOCOL)
        command = [sys.executable, "-P", "-c", _CHILD, str(given), str(found)]
        try:
            done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False,
                                  timeout=most)  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"not measured within {most} seconds") from error
        if done.returncode:
            return None
        times: CallTimes = pickle.loads(found.read_bytes())
        return times


def _sat(
    texts: list[tuple[str, dict[str, np.ndarray], str]], target: str, options: Options, seconds: float
) -> CallTimes:
    programs = [parse_program(text, constants) for text, constants, _ in texts]
    plans = [Plan.from_json(plan) for _, _, plan in texts]
    builders = [TrialBuilder(program, from_json(target), options) for program in programs]
    with builders[0].built(plans[0]) as own, builders[1].built(plans[1]) as other:
        return sat(programs[0], own, other, seconds)
