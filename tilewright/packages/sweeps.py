"""A model in sweeps as a directory: the code of each kind of part, which parts follow each other, cut from where."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tilewright.errors import InternalError
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.loops import Call
from tilewright.packages.directory import MANIFEST, check_files, sums, write_directory
from tilewright.packages.inspection import EXPLANATION
from tilewright.packages.manifest import Port, calls_from, damaged, file_sums, port_from, port_row, sealed, unsealed
from tilewright.packages.shared import share_weights
from tilewright.runtime.swept import Kind, Round, Slices, SweptModel, SweptResult, Visit, device_of, opener
from tilewright.version import VERSION

if TYPE_CHECKING:
    from tilewright.compiler.pipeline import Artifact

KIND = "tilewright model in sweeps"
FORMAT = 1
PARTS, CONSTANTS = "parts", "constants"


class SavedPart(Protocol):
    """A part's code as it was loaded."""

    @property
    def inputs(self) -> tuple[Port, ...]: ...
    @property
    def outputs(self) -> tuple[Port, ...]: ...
    @property
    def runner(self) -> Any: ...


@dataclass(frozen=True)
class SweptManifest:
    """What such a directory says of itself."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    calls: tuple[Call, ...]
    files: Mapping[str, str]  # those of parts, too


def is_in_sweeps(manifest: str) -> bool:
    """Whether a manifest is one of these; what is wrong with it is told by whoever reads it."""
    return f'"{KIND}"' in manifest


def save_swept(artifact: Artifact, folder: Path, save_part: Callable[[Artifact, Path], None]) -> None:
    """Write the model to a directory, whole or not at all. An earlier saved model there gives way."""
    from tilewright.report.explain import explain_text

    runner: SweptModel = artifact.runner
    text = explain_text(artifact)

    def fill(place: Path) -> None:
        for name in (PARTS, CONSTANTS):
            (place / name).mkdir()
        for number, part in enumerate(artifact.parts):
            save_part(part.artifact, place / PARTS / str(number))
        share_weights(place, sorted((place / PARTS).iterdir()))
        for number, array in enumerate(runner.constants.values()):
            np.ascontiguousarray(array).reshape(-1).view(np.uint8).tofile(place / CONSTANTS / str(number))
        (place / EXPLANATION).write_text(text, encoding="utf-8")
        body = {
            "kind": KIND,
            "format": FORMAT,
            "tilewright": VERSION,
            "inputs": [port_row((p.name, p.dtype, p.shape)) for p in artifact.inputs],
            "outputs": [port_row((p.name, p.dtype, p.shape)) for p in artifact.outputs],
            "calls": [(call.kernel, call.arguments, call.step) for call in artifact.calls],
            "names": [runner.inputs, runner.outputs],
            "between": [_result_row(result) for result in runner.between.values()],
            "constants": [_result_row(SweptResult(n, a.shape, a.dtype)) for n, a in runner.constants.items()],
            "rounds": [_round_row(each) for each in runner.rounds],
            "files": sums(place),
        }
        (place / MANIFEST).write_text(sealed(body), encoding="utf-8")

    write_directory(folder, fill)


def load_swept(
    folder: Path, text: str, load_part: Callable[[Path], SavedPart], *, trust: bool
) -> tuple[SweptManifest, SweptModel]:
    """What the directory says of itself and what runs it, after a look at every file."""
    row = unsealed(text, f"'{folder}'", VERSION, KIND, FORMAT)
    try:
        about = SweptManifest(
            tuple(map(port_from, row["inputs"])), tuple(map(port_from, row["outputs"])), calls_from(row["calls"]),
            file_sums(row["files"]),
        )  # fmt: skip
        inner = [n for n in about.files if n.startswith(f"{PARTS}/")]
        manifests = sorted((n for n in inner if n.endswith(f"/{MANIFEST}")), key=lambda n: int(n.split("/")[1]))
        own = {n: s for n, s in about.files.items() if n in manifests or n == EXPLANATION or n.startswith(CONSTANTS)}
        check_files(folder, own, trust=trust)  # a part's own manifest has the sums of its files
        parts = [load_part((folder / name).parent) for name in manifests]
        return about, _model(folder, row, about, parts)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise damaged(f"'{folder}'") from error


def _model(folder: Path, row: Mapping[str, Any], about: SweptManifest, parts: Sequence[SavedPart]) -> SweptModel:
    inputs, outputs = (tuple(map(str, names)) for names in row["names"])
    between = [_result(each) for each in row["between"]]
    constants = {}
    for number, each in enumerate(map(_result, row["constants"])):
        data = np.fromfile(folder / CONSTANTS / str(number), np.uint8)
        constants[each.name] = data.view(each.dtype).reshape(each.shape)
    known = {r.name: r for r in between} | {n: SweptResult(n, a.shape, a.dtype) for n, a in constants.items()}
    for names, ports in ((outputs, about.outputs), (inputs, about.inputs)):
        known |= {n: SweptResult(n, shape, dtype.numpy) for n, (_, dtype, shape) in zip(names, ports, strict=True)}
    ends = list(accumulate((len(each["takes"]) for each in row["rounds"]), initial=0))
    if ends[-1] != len(parts):
        raise ValueError("parts that are in no sweep, or sweeps without parts")
    rounds = [_round(each, parts[a:b], known) for each, (a, b) in zip(row["rounds"], pairwise(ends), strict=True)]
    return SweptModel(rounds, inputs, outputs, between, constants, device_of([part.runner for part in parts]))


def _round_row(given: Round) -> dict[str, Any]:
    return {
        "takes": [kind.takes for kind in given.kinds],
        "gives": [[result.name for result in kind.gives] for kind in given.kinds],
        "visits": [[v.kind, list(map(_cut_row, v.takes)), [list(map(_cut_row, g)) for g in v.gives]]
                   for v in given.visits],
    }  # fmt: skip


def _round(row: Mapping[str, Any], parts: Sequence[SavedPart], known: Mapping[str, SweptResult]) -> Round:
    """A sweep of these parts; ValueError where they do not take what it cuts for them, or what they give does not go
    where it belongs."""
    kinds, sides = [], []
    for takes, gives, part in zip(row["takes"], row["gives"], parts, strict=True):
        results = tuple(
            SweptResult(n, shape, dtype.numpy) for n, (_, dtype, shape) in zip(gives, part.outputs, strict=True)
        )
        kinds.append(Kind(tuple(takes), results, opener(part.runner)))
        sides.append(
            [SweptResult(n, shape, dtype.numpy) for n, (_, dtype, shape) in zip(takes, part.inputs, strict=True)]
        )
    visits = []
    for number, takes, gives in row["visits"]:
        cut = tuple(map(_cut, takes))
        put = tuple((_cut(there), _cut(own)) for there, own in gives)
        for at, taken in zip(cut, sides[number], strict=True):
            _check(at, known[taken.name], taken)
        for (there, own), given in zip(put, kinds[number].gives, strict=True):
            part_of = SweptResult(given.name, tuple(s.stop - s.start for s in own), given.dtype)
            _check(own, given, part_of)
            _check(there, known[given.name], part_of)
        visits.append(Visit(number, cut, put))
    return Round(tuple(kinds), tuple(visits))


def _check(at: Slices, whole: SweptResult, part: SweptResult) -> None:
    if whole.dtype != part.dtype or len(at) != len(whole.shape) or tuple(s.stop - s.start for s in at) != part.shape:
        raise ValueError("a part of another form")
    if any(not 0 <= s.start <= s.stop <= extent for s, extent in zip(at, whole.shape, strict=True)):
        raise ValueError("a part beyond the whole")


def _cut_row(at: Slices) -> list[tuple[int, int]]:
    return [(s.start, s.stop) for s in at]


def _cut(row: Sequence[Any]) -> Slices:
    if not all(type(n) is int for pair in row for n in pair):
        raise ValueError("no place of a part")
    return tuple(slice(start, stop) for start, stop in row)


def _result_row(result: SweptResult) -> dict[str, Any]:
    dtype = dtypes.by_numpy(result.dtype)
    if dtype is None:
        raise InternalError(f"a {result.dtype} has no place in a saved model")
    return port_row((result.name, dtype, result.shape))


def _result(row: Mapping[str, Any]) -> SweptResult:
    name, dtype, shape = port_from(row)
    return SweptResult(name, shape, dtype.numpy)
