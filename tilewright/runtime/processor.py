"""What this computer's processor is called, and what tells its microarchitecture apart."""

from __future__ import annotations

import platform
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


def processor_name(cpuinfo: Path = _CPUINFO) -> str:
    facts = _facts(cpuinfo)
    if "model name" in facts:
        return facts["model name"]
    if not facts:
        return platform.processor() or platform.machine()
    # Arm kernels give numbers only: 0x41 is Arm, and part 0xd0c for example the Neoverse N1.
    return f"{platform.machine()} implementer {facts.get('CPU implementer')} part {facts.get('CPU part')}"


def microarchitecture(cpuinfo: Path = _CPUINFO) -> str:
    """Vendor, family and model; the same for processors that differ in clock and cores alone."""
    facts = _facts(cpuinfo)
    names = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")
    return " ".join(facts[name] for name in names if name in facts) or platform.machine()


def _facts(cpuinfo: Path) -> dict[str, str]:
    if not cpuinfo.is_file():
        return {}
    lines = (line.partition(":") for line in cpuinfo.read_text(errors="replace").splitlines())
    return {key.strip(): value.strip() for key, _, value in lines}
