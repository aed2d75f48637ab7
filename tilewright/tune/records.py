"""Measured plans as lines of JSON that are only ever appended: what a Program took under a Plan on a machine.

A file is data, one object a line, of three kinds. A `program` and a `target` come once, before what refers to them by
their digests; a `measurement` is one Plan of one Program. Files of any machine can be read, and their plans priced,
anywhere. What a line may hold is checked as it is read: an error names the file, the line and the field.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.errors import TilewrightError
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import Program
from tilewright.ir.text.parse import parse_program
from tilewright.target import Target, from_json

VERSION = 1
COMPRESSED = ".xz"
SOURCES = ("zoo", "outside", "tuned")  # parts of the benchmark's models, random operators, what somebody tuned
CLOCKS = ("thread", "wall", "device")  # processor time of the one thread; the clock on the wall; events of a GPU
# inputs just written and all else out of the tile level; as the run before left them, or the rest of a model
CACHES = ("swept", "warm", "model")
_CONSTANT = re.compile(r'^constant (?:"([^"]*)"|(\S+)): (\w+)\[([^\]]*)\]', re.MULTILINE)


class RecordError(TilewrightError):
    """A file of records that cannot be read; the text names the file, the line and the field."""


@dataclass(frozen=True)
class Machine:
    """What was measured on: the description that plans were made and priced for, its probed rates among it."""

    processor: str
    microarchitecture: str
    description: Mapping[str, Any]  # Target.describe(): instruction set, units, levels, rates

    @staticmethod
    def of(target: Target, processor: str, microarchitecture: str) -> Machine:
        return Machine(processor, microarchitecture, json.loads(json.dumps(target.describe())))

    @property
    def digest(self) -> str:
        return digest(json.dumps(self.description, sort_keys=True))

    def is_like(self, other: Machine) -> bool:
        """Whether what one measures says something about the other: instructions and microarchitecture are the same,
        while probed rates may differ from day to day."""
        return all(self.description.get(name) == other.description.get(name)
                   for name in ("kind", "architecture", "features")
                   ) and self.microarchitecture == other.microarchitecture  # fmt: skip

    def target(self) -> Target:
        return from_json(json.dumps(self.description), f"the target of {self.processor}")


@dataclass(frozen=True)
class RecordPair:
    """Two measurements of one sitting whose plans differ in one decision."""

    id: str
    decision: str


@dataclass(frozen=True)
class Anchor:
    """The first plan of a sitting, timed around every other, and as one of the others: what equal plans differ by."""

    around: float  # microseconds
    beside: float


@dataclass(frozen=True)
class Measurement:
    """One Plan of one Program on one machine."""

    program: str  # digest
    target: str  # digest
    plan: Mapping[str, Any]
    task: str  # what is computed: plans of a task are compared with each other
    kind: str  # class of the kernels: product, convolution, reduction...
    source: str
    threads: int
    clock: str
    caches: str
    microseconds: float  # by the median of its ratios to the anchors around it
    spread: float  # of these ratios between the quartiles, as a part of the median
    rounds: int
    anchor: Anchor
    pairs: tuple[RecordPair, ...] = ()


@dataclass
class Records:
    """What a file holds."""

    programs: dict[str, str] = field(default_factory=dict)  # texts by digest
    targets: dict[str, Machine] = field(default_factory=dict)
    measurements: list[Measurement] = field(default_factory=list)

    def add(self, other: Records) -> None:
        self.programs |= other.programs
        self.targets |= other.targets
        self.measurements += other.measurements

    def merged(self, other: Records) -> Records:
        """Both, what is the same in them once."""
        seen = dict.fromkeys(json.dumps(asdict(m), sort_keys=True) for m in self.measurements)
        new = [m for m in other.measurements if json.dumps(asdict(m), sort_keys=True) not in seen]
        return Records({**self.programs, **other.programs}, {**self.targets, **other.targets},
                       [*self.measurements, *new])  # fmt: skip


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read(path: Path) -> Records:
    """A file, compressed or not; every line is checked."""
    found = Records()
    try:
        data = path.read_bytes()
        text = (lzma.decompress(data) if path.suffix == COMPRESSED else data).decode()
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise RecordError(f"cannot read records of {path}: {error}") from error
    lines = text.splitlines()
    for number, line in enumerate(lines[:-1] if _is_cut(text) else lines, 1):
        if line.strip():
            _Line(f"{path}, line {number}").read(line, found)
    return found


def _is_cut(text: str) -> bool:
    """Whether the last line was not written to its end: whoever wrote it was killed, and it was never recorded."""
    if not text or text.endswith("\n"):
        return False
    try:
        json.loads(text.splitlines()[-1])
    except json.JSONDecodeError:
        return True
    return False


class Writer:
    """Appends measurements to a file, and the Programs and machines that it does not have yet."""

    def __init__(self, path: Path) -> None:
        if path.suffix == COMPRESSED:
            raise RecordError(f"{path} is compressed, and only plain files grow: give another name, compress it later")
        self.path = path
        self._end_last_line()
        known = read(path) if path.is_file() else Records()
        self.records = known
        self.known = {*known.programs, *known.targets}
        self.tasks = {(m.task, m.target) for m in known.measurements}

    def append(self, measurement: Measurement, program: str, machine: Machine) -> None:
        lines = []
        if measurement.program not in self.known:
            lines.append({"kind": "program", "digest": measurement.program, "text": program})
        if measurement.target not in self.known:
            lines.append({"kind": "target", "digest": measurement.target, **asdict(machine)})
        told = asdict(measurement)
        lines.append({"kind": "measurement", "class": told.pop("kind"), **told})
        text = "".join(json.dumps({"version": VERSION, **line}, separators=(",", ":")) + "\n" for line in lines)
        try:
            with self.path.open("ab", buffering=0) as file:  # whole lines at once: whoever is killed leaves few cut
                file.write(text.encode())
        except OSError as error:
            raise RecordError(f"cannot write records to {self.path}: {error.strerror}") from error
        self.known |= {measurement.program, measurement.target}

    def _end_last_line(self) -> None:
        """What is appended begins a line of its own; one that was cut goes."""
        data = self.path.read_bytes() if self.path.is_file() else b""
        if not data or data.endswith(b"\n"):
            return
        whole = data[: data.rfind(b"\n") + 1] if _is_cut(data.decode(errors="replace")) else data + b"\n"
        self.path.write_bytes(whole)


def read_program(text: str, fill: Callable[[Any, tuple[int, ...]], np.ndarray] | None = None) -> Program:
    """The Program of a record; what its constants hold is `fill`'s, by dtype and shape: zeros unless told, since
    planning asks for their shapes alone."""
    constants = {}
    for quoted, plain, dtype, shape in _CONSTANT.findall(text):
        sizes = tuple(int(size) for size in shape.split(",") if size.strip())
        kind = getattr(dtypes, dtype)
        name = json.loads(f'"{quoted}"') if quoted else plain
        constants[name] = np.broadcast_to(np.zeros((), kind.numpy), sizes) if fill is None else fill(kind, sizes)
    return parse_program(text, constants)


class _Line:
    """Reads one line; whatever is wrong is told with its place."""

    def __init__(self, where: str) -> None:
        self.where = where

    def read(self, line: str, found: Records) -> None:
        try:
            given = json.loads(line)
        except json.JSONDecodeError as error:
            raise RecordError(f"{self.where}: not JSON: {error.msg}") from error
        if not isinstance(given, dict):
            raise RecordError(f"{self.where}: must be an object, not {_shown(given)}")
        version, kind = given.pop("version", None), given.pop("kind", None)
        if version != VERSION:
            raise self.wrong("version", f"must be {VERSION}", version)
        if kind == "program":
            text = self.text(given, "text")
            found.programs[self.checked_digest(given, digest(text))] = text
        elif kind == "target":
            machine = self.machine(given)
            found.targets[self.checked_digest(given, machine.digest)] = machine
        elif kind == "measurement":
            found.measurements.append(self.measurement(given, found))
        else:
            raise self.wrong("kind", "must be program, target or measurement", kind)

    def wrong(self, name: str, what: str, value: object) -> RecordError:
        return RecordError(f"{self.where}: field '{name}' {what}, not {_shown(value)}")

    def checked_digest(self, given: Mapping[str, Any], wanted: str) -> str:
        if given.get("digest") != wanted:
            raise self.wrong("digest", f"must be that of what the line holds, {wanted}", given.get("digest"))
        return wanted

    def machine(self, given: Mapping[str, Any]) -> Machine:
        self.known(given, (*(f.name for f in fields(Machine)), "digest"))
        return Machine(self.text(given, "processor"), self.text(given, "microarchitecture"),
                       self.object(given, "description"))  # fmt: skip

    def measurement(self, given: Mapping[str, Any], found: Records) -> Measurement:
        self.known(given, (*(f.name for f in fields(Measurement) if f.name != "kind"), "class"))
        program, target = self.text(given, "program"), self.text(given, "target")
        if program not in found.programs:
            raise self.wrong("program", "must be the digest of a program on a line before", program)
        if target not in found.targets:
            raise self.wrong("target", "must be the digest of a target on a line before", target)
        anchor = self.object(given, "anchor")
        pairs = given.get("pairs", [])
        if not isinstance(pairs, list) or not all(isinstance(p, dict) for p in pairs):
            raise self.wrong("pairs", "must be a list of objects", pairs)
        return Measurement(
            program, target, self.object(given, "plan"), self.text(given, "task"), self.text(given, "class"),
            self.one_of(given, "source", SOURCES), self.count(given, "threads"), self.one_of(given, "clock", CLOCKS),
            self.one_of(given, "caches", CACHES), self.number(given, "microseconds", above=0.0),
            self.number(given, "spread"), self.count(given, "rounds"),
            Anchor(self.number(anchor, "around", above=0.0), self.number(anchor, "beside", above=0.0)),
            tuple(RecordPair(self.text(p, "id"), self.text(p, "decision")) for p in pairs),
        )  # fmt: skip

    def known(self, given: Mapping[str, Any], names: tuple[str, ...]) -> None:
        for name in given:
            if name not in names:
                raise self.wrong(name, f"is none: there are {', '.join(names)}", given[name])

    def text(self, given: Mapping[str, Any], name: str) -> str:
        value = given.get(name)
        if not isinstance(value, str) or not value:
            raise self.wrong(name, "must be text", value)
        return value

    def object(self, given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        value = given.get(name)
        if not isinstance(value, dict):
            raise self.wrong(name, "must be an object", value)
        return value

    def one_of(self, given: Mapping[str, Any], name: str, allowed: tuple[str, ...]) -> str:
        value = given.get(name)
        if value not in allowed:
            raise self.wrong(name, f"must be one of {', '.join(allowed)}", value)
        return str(value)

    def count(self, given: Mapping[str, Any], name: str) -> int:
        value = given.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(name, "must be a whole number, 1 or more", value)
        return value

    def number(self, given: Mapping[str, Any], name: str, above: float | None = None) -> float:
        value = given.get(name)
        least = 0.0 if above is None else above
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not least <= value < float("inf") or value == above:  # type: ignore[operator]
            raise self.wrong(name, "must be a number " + ("0 or more" if above is None else f"above {above:g}"), value)
        return float(value)  # type: ignore[arg-type]


def _shown(value: object) -> str:
    return "nothing" if value is None else "an object" if isinstance(value, dict) else repr(value)[:80]
