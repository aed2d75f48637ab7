"""Devices of one kind behind one host, in a mesh: what is planned for that reaches beyond a device's own memory."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.target.machine import MemoryLevel, Target


@dataclass(frozen=True)
class Link:
    """One axis of the mesh: how many devices lie along it, and what is between them."""

    name: str
    size: int
    bandwidth: float  # bytes a second that a device sends along the axis, and receives at the same time
    latency: float  # seconds of one exchange between two of them


@dataclass(frozen=True)
class Cluster:
    """Each device computes as `device` says, in main memory of its own; inputs, weights and results are the host's."""

    device: Target
    host: MemoryLevel  # its bandwidth and latency are those of the way to one device, all of them busy
    links: tuple[Link, ...] = ()  # the outermost first

    @property
    def levels(self) -> tuple[MemoryLevel, ...]:
        return (*self.device.levels, self.host)
