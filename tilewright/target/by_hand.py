"""Machine descriptions given as JSON, to plan for a machine that is not at hand: read, and checked field by field."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

from tilewright.errors import OptionError
from tilewright.target.cluster import Cluster, Link
from tilewright.target.machine import MemoryLevel, Target, usual_costs

SUFFIX = ".json"
_WAY_OUT = "'tilewright devices cpu --json' prints a whole description to start from"
_CLUSTER_WAY_OUT = "docs/devices.md has a whole description to start from"
_CPU_LEVELS = ("registers", "the nearest cache", "that of a core's tiles")
_GPU_LEVELS = ("registers", "a block's shared memory", "the cache of all blocks")


def read_target(path: Path) -> Target:
    """The machine that a file describes."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise OptionError(f"cannot read the machine description {path}: {reason}; {_WAY_OUT}") from error
    return from_json(text, str(path))


def from_json(text: str, where: str = "the machine description") -> Target:
    """The machine that a text describes; an error names the text by `where`, and the field."""
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise OptionError(f"{where} is not JSON: line {error.lineno}: {error.msg}; {_WAY_OUT}") from error
    reader = _Reader(where)
    values = reader.record(given, "", Target, _TARGET)
    if values["kind"] == "gpu" and not any("scratchpad" in level for level in given["levels"]):
        values["levels"] = tuple(replace(x, scratchpad=place == 1) for place, x in enumerate(values["levels"]))
    near = values["levels"][1].capacity if len(values["levels"]) > 1 else 0
    target = Target(**{**usual_costs(values["architecture"], near), **values})
    reader.check(target)
    return target


def read_cluster(path: Path, device: Callable[[str], Target]) -> Cluster:
    """The cluster that a file describes; `device` finds the machine it names."""
    try:
        text = path.read_text()
        given = json.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise OptionError(f"cannot read the cluster description {path}: {reason}; {_CLUSTER_WAY_OUT}") from error
    except json.JSONDecodeError as error:
        raise OptionError(f"{path} is not JSON: line {error.lineno}: {error.msg}; {_CLUSTER_WAY_OUT}") from error
    reader = _Reader(str(path), _CLUSTER_WAY_OUT)
    values = reader.record(given, "", Cluster, _CLUSTER)
    names = [link.name for link in values.get("links", ())]
    if len(set(names)) < len(names):
        raise reader.wrong(f"two of the links have the same name: {', '.join(names)}")
    return Cluster(**{**values, "device": device(values["device"])})


class _Reader:
    """Takes a description apart; every complaint says where it is and what to do."""

    def __init__(self, where: str, way_out: str = _WAY_OUT) -> None:
        self.where, self.way_out = where, way_out

    def wrong(self, what: str) -> OptionError:
        return OptionError(f"{self.where}: {what}; {self.way_out}")

    def record(self, given: Any, place: str, kind: type, readers: Mapping[str, _Read]) -> dict[str, Any]:
        """The fields of a record by name, each through its reader."""
        if not isinstance(given, dict):
            raise self.wrong(f"{place or 'it'} must be an object, not {_shown(given)}")
        for name in given:
            if name not in readers:
                near = difflib.get_close_matches(name, readers, n=1)
                hint = f", did you mean '{near[0]}'?" if near else f" among {', '.join(readers)}"
                raise self.wrong(f"there is no field '{place}{name}'{hint}")
        for each in fields(kind):
            if each.default is MISSING and each.name not in given:
                raise self.wrong(f"the field '{place}{each.name}' is missing")
        values = {name: readers[name](self, value, place + name) for name, value in given.items()}
        return {"source": "by hand"} | values if kind is Target else values

    def check(self, target: Target) -> None:
        """What no field shows alone."""
        names = tuple(level.name for level in target.levels)
        first = _CPU_LEVELS if target.kind == "cpu" else _GPU_LEVELS
        if len(set(names)) < len(names):
            raise self.wrong(f"two of the levels have the same name: {', '.join(names)}")
        if len(names) <= len(first):
            order = f"{', '.join(first)}, then any others, main memory last"
            raise self.wrong(f"the levels of a {target.kind} are {order}, not {', '.join(names) or 'none'}")
        if target.kind == "gpu" and (not target.clock or not all(level.latency for level in target.levels[1:])):
            raise self.wrong("a gpu needs its 'clock' and the 'latency' of every level but the registers")
        if target.kind == "gpu" and not target.nearest.scratchpad:
            raise self.wrong(f"the field 'levels[1].scratchpad' must be true: it is {_GPU_LEVELS[1]}")
        if target.vector_bytes & (target.vector_bytes - 1) or target.vector_bytes < 4:
            raise self.wrong(f"the field 'vector_bytes' must be a power of two, 4 or more, not {target.vector_bytes}")


_Read = Callable[[_Reader, Any, str], Any]


def _shown(value: Any) -> str:
    return json.dumps(value) if not isinstance(value, dict | list) else "an object" if value else "nothing"


def _text(reader: _Reader, value: Any, place: str) -> str:
    if not isinstance(value, str) or not value:
        raise reader.wrong(f"the field '{place}' must be text, not {_shown(value)}")
    return value


def _kind(reader: _Reader, value: Any, place: str) -> str:
    if value not in ("cpu", "gpu"):
        raise reader.wrong(f"the field '{place}' must be cpu or gpu, not {_shown(value)}")
    return str(value)


def _flag(reader: _Reader, value: Any, place: str) -> bool:
    if not isinstance(value, bool):
        raise reader.wrong(f"the field '{place}' must be true or false, not {_shown(value)}")
    return value


def _count(reader: _Reader, value: Any, place: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise reader.wrong(f"the field '{place}' must be a whole number, 1 or more, not {_shown(value)}")
    return value


def _number(reader: _Reader, value: Any, place: str, least: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not value < float("inf"):
        raise reader.wrong(f"the field '{place}' must be a number {least}, not {_shown(value)}")
    return float(value)


def _rate(reader: _Reader, value: Any, place: str) -> float:
    number = _number(reader, value, place, "above 0")
    if number <= 0:
        raise reader.wrong(f"the field '{place}' must be a number above 0, not {_shown(value)}")
    return number


def _measured(reader: _Reader, value: Any, place: str) -> float:
    number = _number(reader, value, place, "0 or more")
    if number < 0:
        raise reader.wrong(f"the field '{place}' must be a number 0 or more, not {_shown(value)}")
    return number


def _part(reader: _Reader, value: Any, place: str) -> float:
    number = _number(reader, value, place, "from 0 to 1")
    if not 0 <= number <= 1:
        raise reader.wrong(f"the field '{place}' must be a number from 0 to 1, not {_shown(value)}")
    return number


def _list(reader: _Reader, value: Any, place: str) -> list[Any]:
    if not isinstance(value, list):
        raise reader.wrong(f"the field '{place}' must be a list, not {_shown(value)}")
    return value


def _levels(reader: _Reader, value: Any, place: str) -> tuple[MemoryLevel, ...]:
    records = enumerate(_list(reader, value, place))
    return tuple(MemoryLevel(**reader.record(each, f"{place}[{i}].", MemoryLevel, _LEVEL)) for i, each in records)


def _host(reader: _Reader, value: Any, place: str) -> MemoryLevel:
    return MemoryLevel(**reader.record(value, f"{place}.", MemoryLevel, _LEVEL))


def _links(reader: _Reader, value: Any, place: str) -> tuple[Link, ...]:
    records = enumerate(_list(reader, value, place))
    return tuple(Link(**reader.record(each, f"{place}[{i}].", Link, _LINK)) for i, each in records)


def _names(reader: _Reader, value: Any, place: str) -> tuple[str, ...]:
    return tuple(_text(reader, each, f"{place}[{i}]") for i, each in enumerate(_list(reader, value, place)))


def _rates(reader: _Reader, value: Any, place: str) -> tuple[tuple[str, float], ...]:
    if not isinstance(value, dict):
        raise reader.wrong(f"the field '{place}' must be an object of names and numbers, not {_shown(value)}")
    return tuple((name, _rate(reader, rate, f"{place}.{name}")) for name, rate in value.items())


_LEVEL: dict[str, _Read] = {
    "name": _text, "capacity": _count, "transaction": _count, "bandwidth": _rate, "shared_by": _count,
    "alone": _measured, "write": _measured, "latency": _measured, "scratchpad": _flag,
}  # fmt: skip
_TARGET: dict[str, _Read] = {
    "name": _text, "kind": _kind, "architecture": _text, "units": _count, "vector_bytes": _count,
    "vector_registers": _count, "fma_rate": _rate, "levels": _levels, "kernel_cost": _rate, "warp": _count,
    "max_threads": _count, "schedulers": _count, "resident_threads": _count, "register_file": _count,
    "written_copies": _count, "under_way": _count,
    "lane_multiply": _flag, "features": _names, "rates": _rates, "fma_alone": _measured,
    "fma_chains": _count, "pipes": _count, "clock": _measured, "tile_cost": _rate, "gathered_reads": _rate,
    "near_ways": _count, "instruction_cache": _count, "stream_cost": _measured, "lane_check": _measured,
    "foreign": _part, "cold_start": _measured, "link": _measured, "barriers": _rates, "source": _text,
}  # fmt: skip
_LINK: dict[str, _Read] = {"name": _text, "size": _count, "bandwidth": _rate, "latency": _measured}
_CLUSTER: dict[str, _Read] = {"device": _text, "host": _host, "links": _links}
