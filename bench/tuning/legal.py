"""Whether what tuning would measure are plans: every kernel's and every pair's, checked and lowered, nothing run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from onnx import ModelProto

from bench.support import table
from tilewright.compiler.pipeline import build
from tilewright.errors import InternalError
from tilewright.frontend.onnx.model import load
from tilewright.ir.analysis import verify
from tilewright.ir.forms.loops import Stmt
from tilewright.options import Options
from tilewright.target import machine
from tilewright.tune.models import TrialBuilder
from tilewright.tune.parts import edited
from tilewright.tune.subjects import Subject, Trial, TunedModel, find_subjects

MACHINES = ("neoverse_n1", "emerald_rapids", "avx2_desktop", "h200")


@dataclass
class Count:
    """Plans of one model on one machine."""

    subjects: int = 0
    plans: int = 0
    structures: int = 0  # of them, those with other kernels, not only kernels run otherwise
    refused: int = 0  # variants that their own check found to be none
    illegal: int = 0  # that passed it and are none in the model
    first: str = ""  # what is wrong with the first of those


def planned(path: Path | ModelProto, name: str) -> TunedModel:
    target = machine(name)
    made = build(load(path, {}), target, Options(target=name, stop_after="plan"))
    assert made.program is not None and made.plan is not None
    return TunedModel(made.program, made.plan, target, arithmetic=True)


def count(model: TunedModel, each: int) -> Count:
    """Up to so many plans of each subject, each put into the model."""
    found, checked = Count(), Checked(model)
    for subject in find_subjects(model):
        found.subjects += 1
        for trial in trials(subject, each):
            found.plans += 1
            found.structures += any(not edit.is_one_for_one for edit in trial.edits)
            wrong = checked.why_illegal(trial)
            found.illegal += wrong is not None
            found.first = found.first or str(wrong or "")
        found.refused += subject.refused
    return found


def trials(subject: Subject, each: int) -> Iterator[Trial]:
    made = 0
    while made < each and not subject.is_done:
        trial = subject.following(lambda _: False)
        if trial is not None:
            made += 1
            yield trial


@dataclass
class Checked:
    """Plans of a model, lowered whole; kernels that they have in common are lowered and looked at once."""

    model: TunedModel
    seen: dict[int, tuple[Stmt, ...]] = field(default_factory=dict)  # kernels' bodies by identity, kept for it

    def __post_init__(self) -> None:
        self.builder = TrialBuilder(self.model.program, self.model.target, Options(target=self.model.target.name))

    def why_illegal(self, trial: Trial) -> InternalError | None:
        model = self.model
        try:
            loops = self.builder.lowered(edited(model.program, model.plan, model.target, trial.edits))
            known = tuple(replace(k, body=()) if id(k.body) in self.seen else k for k in loops.kernels)
            verify.verify_loops(replace(loops, kernels=known))
        except InternalError as error:
            return error
        self.seen.update({id(kernel.body): kernel.body for kernel in loops.kernels})
        return None


def report(paths: Mapping[str, Path], machines: Iterable[str], each: int) -> int:
    """Tells the counts of every model on every machine; how many are illegal in all."""
    rows, wrong = [], 0
    for name in machines:
        for title, path in paths.items():
            found = count(planned(path, name), each)
            wrong += found.illegal + found.refused
            cells = (found.subjects, found.plans, found.structures, found.refused, found.illegal)
            rows.append([name, title, *map(str, cells), found.first[:80]])
            print("\t".join(rows[-1]), flush=True)
    header = ["machine", "model", "subjects", "plans", "other kernels", "refused", "illegal", "the first"]
    print("\n".join(table(header, rows)))
    print(f"{wrong} of {sum(int(row[3]) + int(row[5]) for row in rows)} plans are illegal")
    return wrong
