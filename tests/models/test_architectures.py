"""Architectures of others planned and lowered for machines that are described: nothing is measured or run. With --all
each is planned for some of them, in turn; with --every-seed for every one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest

from tests.models.architectures import ARCHITECTURES, DECODERS, build
from tilewright.compiler.pipeline import build as build_model
from tilewright.frontend.pytorch.exported import export
from tilewright.ir.forms.graph import Graph
from tilewright.options import Options
from tilewright.target import machine, stored_machines

pytest.importorskip("transformers")

CPUS, GPUS = stored_machines("cpu"), stored_machines("gpu")
SAMPLE = {("enlarge", "neoverse_n1"), ("enlarge", "l40s")}
IN_TURN = 1  # of all machines, those that an architecture is planned for with --all; each machine has as many


@lru_cache(maxsize=1)  # an architecture is exported once, and planned for machine after machine
def graph_of(name: str) -> Graph:
    module, inputs = build(name)
    found = export(module, tuple(inputs.values()), {}) if name in DECODERS else export(module, (), inputs)
    assert isinstance(found.graph, Graph)
    return found.graph


def cases() -> Iterator[Any]:
    targets = (*CPUS, *GPUS)
    for turn, name in enumerate(ARCHITECTURES):
        taken = {targets[(IN_TURN * turn + n) % len(targets)] for n in range(IN_TURN)}
        for target in targets:
            mark = pytest.mark.slow if target in taken else pytest.mark.every_seed
            yield pytest.param(name, target, marks=() if (name, target) in SAMPLE else mark)


def test_there_are_enough_of_them() -> None:
    assert len(ARCHITECTURES) >= 60 and len(CPUS) >= 5 and len(GPUS) >= 3


@pytest.mark.parametrize(("name", "target"), list(cases()))
def test_it_is_planned_and_lowered(name: str, target: str, caplog: pytest.LogCaptureFixture) -> None:
    """To the Loops, and as it was planned first: a plan that fails there is replaced and told."""
    options = Options(stop_after="loops", target=target, precision="float16" if target in GPUS else None)
    with caplog.at_level(logging.WARNING, "tilewright"):
        made = build_model(graph_of(name), machine(target), options)
    assert made.loops is not None and made.loops.calls
    assert not [r.getMessage() for r in caplog.records if "please report" in r.getMessage()]
