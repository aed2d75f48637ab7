"""Networks beside the fold, on tasks that they were not fitted to: up the Plan's tree, along its reads, both."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bench.learned.forest import Array
from bench.learned.rows import Row
from tilewright.learn.fit import Sample, fitted
from tilewright.learn.networks import KINDS

_MEMBERS = 2


def believed(rows: Sequence[Row], parts: Array) -> dict[str, Array]:
    """Microseconds of every row, by kind of network; each comes from rows of other parts alone."""
    samples = [Sample(f"{row.machine} {row.measured.task}", row.trees, row.measured.microseconds) for row in rows]
    found = {kind: np.zeros(len(rows)) for kind in KINDS}
    for part in sorted(set(parts.tolist())):
        seen, unseen = np.flatnonzero(parts != part), np.flatnonzero(parts == part)
        for kind in KINDS:
            learned = fitted(kind, [samples[i] for i in seen], _MEMBERS)
            told = learned.log_seconds([samples[i].kernels for i in unseen])
            found[kind][unseen] = 1e6 * 2.0 ** told.mean(0)
    return found
