"""Devices of one kind behind one host: what a Plan is made for that reaches beyond a device's own memory."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.target.machine import MemoryLevel, Target


@dataclass(frozen=True)
class Cluster:
    """Each device computes as `device` says, in main memory of its own; inputs, weights and results are the host's."""

    device: Target
    host: MemoryLevel  # its bandwidth and latency are those of the way to one device, all of them busy
    devices: int = 1
    link: float = 0.0  # bytes a second that a device sends to others and receives from them, both at a time
    link_latency: float = 0.0  # seconds of one exchange between two of them

    @property
    def levels(self) -> tuple[MemoryLevel, ...]:
        return (*self.device.levels, self.host)
