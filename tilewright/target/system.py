"""Facts of this computer's processor as the system tells them; where it tells nothing, the caller's defaults serve."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
CACHES = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class CacheFacts:
    size: int
    line: int
    shared_by: int  # of the processors this process may use


def architecture() -> str:
    """One name for each: systems call the same processor arm64 or aarch64, AMD64 or x86_64."""
    name = platform.machine()
    return {"arm64": "aarch64", "AMD64": "x86_64"}.get(name, name)


def cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """Features by Linux's names; none where there is no such file."""
    try:
        text = cpuinfo.read_text(errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.lower().startswith(("flags", "features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def cpu_model(cpuinfo: Path = CPUINFO) -> str:
    """The processor's name; Arm processors under Linux have numbers."""
    try:
        first = cpuinfo.read_text(errors="replace").split("\n\n", 1)[0]
    except OSError:
        return platform.processor() or architecture()
    pairs = (line.partition(":") for line in first.splitlines())
    facts = {key.strip(): value.strip() for key, _, value in pairs}
    if "model name" in facts:
        return facts["model name"]
    part, maker = facts.get("CPU part"), facts.get("CPU implementer")
    return f"{architecture()} implementer {maker} part {part}" if part and maker else architecture()


def data_caches(usable: frozenset[int], root: Path = CACHES) -> dict[int, CacheFacts]:
    """Data caches by level, as the first usable processor sees them."""
    found: dict[int, CacheFacts] = {}
    for index in sorted((root / f"cpu{min(usable)}" / "cache").glob("index*")):
        try:
            if (index / "type").read_text().strip() == "Instruction":
                continue
            level = int((index / "level").read_text())
            size = _bytes((index / "size").read_text())
            line = int((index / "coherency_line_size").read_text())
            sharing = _processors((index / "shared_cpu_list").read_text()) & usable
        except (OSError, ValueError):
            continue
        if size > 0 and line > 0:
            found[level] = CacheFacts(size, line, max(1, len(sharing)))
    return found


def instruction_cache(usable: frozenset[int], root: Path = CACHES) -> int | None:
    """Bytes of the first one, as the first usable processor sees it; None where the system does not say."""
    for index in sorted((root / f"cpu{min(usable)}" / "cache").glob("index*")):
        try:
            if (index / "type").read_text().strip() == "Instruction" and int((index / "level").read_text()) == 1:
                return _bytes((index / "size").read_text()) or None
        except (OSError, ValueError):
            continue
    return None


def _bytes(text: str) -> int:
    """Of texts like 64K, 1024K and 32M."""
    text = text.strip()
    factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
    return int(text.rstrip("KMG")) * factor


def _processors(text: str) -> frozenset[int]:
    """Of a text like 0-3,8."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
