"""What a saved model says of itself, as JSON: what it takes and gives, the machine it needs, the sums of its files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, cast

from tilewright.errors import ModelError
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.loops import Call

KIND = "tilewright model"
ON_RANKS = "tilewright model on several ranks"  # each in a directory of its own
FORMAT = 2
_SUM = "manifest_sha256"
_SHARED = re.compile(r"(\.\./)+[A-Za-z0-9_][A-Za-z0-9_.]*")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.]*(/[A-Za-z0-9_][A-Za-z0-9_.]*)*")

Port = tuple[str, dtypes.DType, tuple[int, ...]]


@dataclass(frozen=True)
class Manifest:
    version: str  # of Tilewright
    interface: str  # a digest of the driver's header: how Python and the shared object talk to each other
    system: str
    architecture: str
    features: tuple[str, ...]  # of the processor
    machine: str  # tells the machine it was made on from others, where the system names no features
    permissions: tuple[str, ...]  # what the system must grant a process that runs it
    compiler: str
    flags: tuple[str, ...]
    target: Mapping[str, Any]  # the description it was planned for
    threads: int | None  # None: as many as there are where it runs
    denormals: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    calls: tuple[Call, ...]
    files: Mapping[str, str]  # by path below the manifest, the line of runtime.cache.checksum
    begins: tuple[int, ...]  # of each constant among the weights
    shared: Mapping[str, str]  # the file above that the weights lie in, where others have some of them, and its line

    def to_json(self) -> str:
        body = {
            "kind": KIND,
            "format": FORMAT,
            "tilewright": self.version,
            "interface": self.interface,
            "cpu": {
                "system": self.system,
                "architecture": self.architecture,
                "features": self.features,
                "machine": self.machine,
                "permissions": self.permissions,
            },
            "inputs": [port_row(port) for port in self.inputs],
            "outputs": [port_row(port) for port in self.outputs],
            "threads": self.threads,
            "denormals": self.denormals,
            "compiler": self.compiler,
            "flags": self.flags,
            "target": self.target,
            "calls": [(call.kernel, call.arguments, call.step) for call in self.calls],
            "files": self.files,
            "begins": self.begins,
            "shared": self.shared,
        }
        return sealed(body)


def head(kind: str, form: int, version: str, inputs: Sequence[object], outputs: Sequence[object]) -> dict[str, Any]:
    """How the manifest of a directory of directories begins: its kind, who wrote it, what goes in and out."""
    return {"kind": kind, "format": form, "tilewright": version, "inputs": list(map(str, inputs)),
            "outputs": list(map(str, outputs))}  # fmt: skip


def sealed(body: Mapping[str, Any]) -> str:
    """A manifest as text, with a sum of itself."""
    return json.dumps({**body, _SUM: _sum(body)}, indent=1) + "\n"


def is_on_ranks(manifest: str) -> bool:
    """Whether a manifest is of a model on several ranks; what is wrong with it is told by whoever reads it."""
    return f'"{ON_RANKS}"' in manifest


def said_by(text: str, where: str, kind: str | None = None) -> dict[str, Any]:
    """What is in a manifest, of this kind or of any of a saved model."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged(where) from error
    told = row.get("kind") if isinstance(row, dict) else None
    if not isinstance(told, str) or (told != kind if kind is not None else not told.startswith(KIND)):
        raise ModelError(f"{where} is not a saved model: its manifest.json is about something else")
    return cast(dict[str, Any], row)


def unsealed(text: str, where: str, version: str, kind: str, form: int) -> dict[str, Any]:
    """What was sealed, of this kind and format; an error in one line otherwise."""
    row = said_by(text, where, kind)
    if row.get("format") != form:
        raise ModelError(
            f"{where} was saved in format {row.get('format')} by Tilewright {row.get('tilewright')}; this is "
            f"{version}, which reads format {form}: save the model again with this version"
        )
    if row.pop(_SUM, None) != _sum(row):
        raise damaged(where)
    return row


def damaged(where: str) -> ModelError:
    return ModelError(f"{where}: its manifest is damaged; save the model again")


def manifest_from(row: Mapping[str, Any]) -> Manifest:
    """Of a row that was unsealed; what is not of this form raises KeyError, TypeError or ValueError."""
    cpu = row["cpu"]
    words = (row["tilewright"], row["interface"], row["denormals"], row["compiler"], *row["flags"], cpu["system"],
             cpu["architecture"], cpu["machine"], *cpu["features"], *cpu["permissions"])  # fmt: skip
    threads = row["threads"]
    if not all(isinstance(word, str) for word in words) or not isinstance(row["target"], dict):
        raise ValueError("no words where there should be")
    if threads is not None and (not isinstance(threads, int) or isinstance(threads, bool) or threads < 1):
        raise ValueError("no number of threads")
    return Manifest(
        version=row["tilewright"],
        interface=row["interface"],
        system=cpu["system"],
        architecture=cpu["architecture"],
        features=tuple(cpu["features"]),
        machine=cpu["machine"],
        permissions=tuple(cpu["permissions"]),
        compiler=row["compiler"],
        flags=tuple(row["flags"]),
        target=row["target"],
        threads=row["threads"],
        denormals=row["denormals"],
        inputs=tuple(port_from(port) for port in row["inputs"]),
        outputs=tuple(port_from(port) for port in row["outputs"]),
        calls=calls_from(row["calls"]),
        files=file_sums(row["files"]),
        begins=_begins(row["begins"]),
        shared=_paths(row["shared"], _SHARED),
    )


def file_sums(row: Mapping[str, Any]) -> dict[str, str]:
    """Files by path below the manifest, each with its checksum."""
    return _paths(row, _FILE)


def _paths(row: Mapping[str, Any], allowed: re.Pattern[str]) -> dict[str, str]:
    if not isinstance(row, dict) or not all(allowed.fullmatch(n) and isinstance(s, str) for n, s in row.items()):
        raise ValueError("a file outside the directory")
    return row


def _begins(row: Sequence[Any]) -> tuple[int, ...]:
    if not all(isinstance(begin, int) and begin >= 0 for begin in row) or list(row) != sorted(set(row)):
        raise ValueError("no places of weights")
    return tuple(row)


def port_row(port: Port) -> dict[str, Any]:
    name, dtype, shape = port
    return {"name": name, "dtype": dtype.name, "shape": list(shape)}


def port_from(row: Mapping[str, Any]) -> Port:
    name, kind, shape = row["name"], row["dtype"], tuple(row["shape"])
    if not isinstance(name, str) or not isinstance(kind, str):
        raise ValueError("no name of a port")
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in shape):
        raise ValueError("no shape of a port")
    return name, dtypes.by_name(kind), shape


def calls_from(rows: Sequence[Any]) -> tuple[Call, ...]:
    calls = tuple(Call(kernel, tuple(arguments), step) for kernel, arguments, step in rows)
    if not all(isinstance(c.kernel, str) and isinstance(c.step, int) for c in calls):
        raise ValueError("no call of a kernel")
    return calls


def _sum(body: Mapping[str, Any]) -> str:
    return sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
