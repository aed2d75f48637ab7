"""The table of policies by dependences: small kernels x orders of objectives, measured, and of all orders those kept
that lead to the fastest plans of kernels with such dependences."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp, log
from pathlib import Path

import numpy as np

from bench.judge import outside
from bench.judge.programs import fits
from bench.policies.nests import Study, others, policies
from tilewright.compiler.pipeline import build
from tilewright.frontend.onnx.model import load
from tilewright.options import Options
from tilewright.schedule import policies as schedule
from tilewright.schedule.constants import POLICY_PLANS
from tilewright.schedule.policies import Policy
from tilewright.target import Target

STORED = Path(schedule.__file__).with_suffix(".json")
_OTHERS = 6  # plans beside those that policies lead to
_MOST_KERNELS = 3  # of a small Program


@dataclass(frozen=True)
class Seen:
    """What a kernel of one of the small Programs says: how long the plan of every policy takes over the best found."""

    source: str
    key: str
    plans: int
    losses: tuple[float, ...]  # by number of the policy
    own: float  # of the planner's


def measure(numbers: Sequence[int], target: Target, options: Options, out: Path) -> None:
    """Appends what kernels say; what the file has is not measured again."""
    known = {seen.source.split(" kernel ")[0] for seen in read(out)} if out.exists() else set()
    tried = policies()
    for number in numbers:
        name, model = outside.model(number)
        if name in known:
            continue
        made = build(load(model), target, options.override(stop_after="plan"))
        assert made.program is not None and made.plan is not None
        if not fits(made.program, target) or len(made.plan.kernels) > _MOST_KERNELS:
            continue
        study = Study(made.program, made.plan, target, options)
        preferred = [[nests.kernels.preferred(policy) for policy in tried] for nests in study.nests]
        rng = np.random.default_rng(number)
        study.measure([list(dict.fromkeys((*plans, *others(nests, _OTHERS, rng))))
                       for nests, plans in zip(study.nests, preferred, strict=True)])  # fmt: skip
        with out.open("a") as file:
            for nests, plans in zip(study.nests, preferred, strict=True):
                least = min(nests.ratios.values())
                losses = tuple(round(nests.ratios.get(plan, 99.0) / least, 4) for plan in plans)
                seen = Seen(f"{name} kernel {nests.group.own.name}", nests.key, len(nests.ratios), losses,
                            round(1 / least, 4))  # fmt: skip
                file.write(json.dumps(asdict(seen)) + "\n")
                print(f"{seen.source}: {seen.key}; {seen.plans} plans, own {seen.own:.3f} of the best, the best policy "
                      f"{min(losses):.3f}", flush=True)  # fmt: skip


def read(path: Path) -> list[Seen]:
    return [Seen(**{**one, "losses": tuple(one["losses"])}) for one in map(json.loads, path.read_text().splitlines())]


def chosen(seen: Sequence[Seen]) -> list[Policy]:
    """Policies of which the best is nearest to the best found, taken one by one: beside the planner's own plan each is
    the one that betters most what those before it leave."""
    tried = policies()
    losses = np.log(np.array([s.losses for s in seen]))
    left = np.array([log(s.own) for s in seen])
    found: list[Policy] = []
    while len(found) < POLICY_PLANS - 1:
        after = np.minimum(left[:, None], losses).mean(0)
        best = int(np.argmin(after))
        if after[best] >= left.mean():
            break
        found.append(tried[best])
        left = np.minimum(left, losses[:, best])
    return found


def rows(seen: Sequence[Seen]) -> Mapping[str, Sequence[Policy]]:
    """By dependences; a row is filled up by what is best for all that carry the same, and then for all kernels."""
    found = {}
    for key in sorted({s.key for s in seen}):
        kin = [s for s in seen if s.key.split()[0] == key.split()[0]]
        some = [policy for group in ([s for s in kin if s.key == key], kin, seen) for policy in chosen(group)]
        found[key] = list(dict.fromkeys(some))[: POLICY_PLANS - 1]
    return found


def write(seen: Sequence[Seen], path: Path) -> None:
    table = {key: [[*p.order, p.slack] for p in row] for key, row in rows(seen).items()}
    lines = [f"  {json.dumps(key)}: {json.dumps(row)}" for key, row in table.items()]
    about = f"of {len(seen)} kernels, {sum(s.plans for s in seen)} plans measured: python -m bench.policies table"
    path.write_text(f'{{"made": {json.dumps(about)}, "policies": {{\n' + ",\n".join(lines) + "\n}}\n")


def report(seen: Sequence[Seen]) -> list[list[str]]:
    """What rows lose, each kernel by a table made without the kernels of its Program."""
    losses: dict[str, list[float]] = {}
    for one in seen:
        name = one.source.split(" kernel ")[0]
        table = rows([s for s in seen if not s.source.startswith(name + " ")])
        if not table:
            continue
        key = max(table, key=lambda row: (schedule.alike(one.key, row), row))
        numbers = [policies().index(p) for p in table[key]]
        losses.setdefault(one.key, []).append(min(one.own, *(one.losses[i] for i in numbers)))
    return [[key, str(len(some)), f"{exp(float(np.mean(np.log(some)))):.3f}", f"{max(some):.3f}"]
            for key, some in sorted(losses.items())]  # fmt: skip
