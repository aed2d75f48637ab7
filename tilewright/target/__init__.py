"""Machine descriptions as frozen data, and the probes that read them off this machine."""

from tilewright.target.describe import machine
from tilewright.target.machine import MemoryLevel, Target

__all__ = ["MemoryLevel", "Target", "machine"]
