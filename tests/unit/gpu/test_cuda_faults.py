"""Faults put into good kernels: the emulator must report those that change an output or race."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np

from tests.faults import inject, sample, sites
from tests.gpu_kernels import all_cases
from tests.gpu_launch import emulate, source_of, strict_contract
from tilewright.runtime.cache import Cache
from tilewright.runtime.emulator import EmulatedModule

PER_KERNEL = {"matmul": 40, "softmax": 35, "transpose": 20, "row_sums": 35, "scale": 6}


def test_faults_are_reported(tmp_path: Path) -> None:
    mutants = []
    for case in all_cases():
        chosen = sample(case.kernel, PER_KERNEL[case.kernel.name], seed=7)
        # every missing barrier is tried
        chosen += [s for s in sites(case.kernel) if s.kind == "barrier" and all(s.stmt is not c.stmt for c in chosen)]
        for number, site in enumerate(chosen):
            mutants.append((case, site, inject(case.kernel, site, f"{case.kernel.name}_{number}")))
    assert len(mutants) >= 100
    sources = {kernel.name: source_of(kernel) for _, _, kernel in mutants}
    module = EmulatedModule(sources, Cache(tmp_path), optimise=0)
    tally: Counter[str] = Counter()
    unseen = []
    for case, site, kernel in mutants:
        output, faults = emulate(module, case, kernel, strict_contract(case.kernel))
        changed = not np.allclose(output, case.expected, rtol=1e-4, atol=1e-5)
        if not changed and all(f.kind != "race" for f in faults):
            tally["harmless"] += 1
        elif any(f.buffer for f in faults):
            tally["reported"] += 1
        else:
            unseen.append(f"{kernel.name}: {site.describe()}")
    harmful = tally["reported"] + len(unseen)
    assert harmful >= 80
    assert tally["reported"] >= 0.95 * harmful, unseen
    assert all(s.kind != "barrier" for _, s, k in mutants if k.name in {u.split(":")[0] for u in unseen})
