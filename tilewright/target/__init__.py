"""Machine descriptions as frozen data, and the probes that read them off this machine."""

from tilewright.target.by_hand import from_json, read_target
from tilewright.target.cluster import Cluster, Link
from tilewright.target.describe import GPUS, cluster, machine, stored_clusters, stored_machines, this_cpu, why_not_here
from tilewright.target.machine import MemoryLevel, Target

__all__ = [
    "GPUS",
    "Cluster",
    "Link",
    "MemoryLevel",
    "Target",
    "cluster",
    "from_json",
    "machine",
    "read_target",
    "stored_clusters",
    "stored_machines",
    "this_cpu",
    "why_not_here",
]
