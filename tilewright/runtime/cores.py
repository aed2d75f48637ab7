"""How many processors this process has the time of: what taskset leaves it, and the quotas of the control groups that
it is in, from its own up to the outermost that can be seen (Linux; version 1 and 2)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")


def usable_cores() -> int:
    """The cores that threads of this process can keep busy, at least one."""
    return len(usable_processors())


def usable_processors(root: Path = ROOT) -> frozenset[int]:
    """Their numbers; of those allowed the first ones, where there is the time of fewer."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    return frozenset(sorted(allowed)[: quota(root)])


def quota(root: Path = ROOT) -> int | None:
    """Processors whose time the control groups grant, rounded up; None without a limit."""
    limits = [limit for folder in _groups(root) if (limit := _limit(folder)) is not None]
    return min(limits, default=None)


def _limit(group: Path) -> int | None:
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            time, period = " ".join((group / name).read_text().strip() for name in names).split()
            return max(1, -(-int(time) // int(period))) if int(time) > 0 else None
        except (OSError, ValueError, ZeroDivisionError):
            continue  # no such file, or "max": no limit
    return None


def _groups(root: Path) -> Iterator[Path]:
    """Folders of the groups with a say about processors that this process is in, innermost first."""
    try:
        own = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return
    by_controllers = {}  # "" is version 2
    for line in own:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        by_controllers[controllers] = path
    for line in mounts:
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        mine = [p for c, p in by_controllers.items() if (not c if kind[0] == "cgroup2" else "cpu" in c.split(","))]
        if not mine or (kind[0] == "cgroup" and "cpu" not in kind[2].split(",")):
            continue
        # a container may see its own group as the outermost, by a name from outside
        inside, mounted = PurePosixPath(mine[0]), PurePosixPath(fields[3])
        below = inside.relative_to(mounted) if inside.is_relative_to(mounted) else PurePosixPath()
        top = root / fields[4].lstrip("/")
        for place in (below, *below.parents) if ".." not in below.parts else (PurePosixPath(),):
            yield top / place
