"""Tensors that are one or two as the data have it: a change of one is seen in the other where it is in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.frontend.torch_imperative import Function, mixed
from tests.frontend.torch_programs import interpreted
from tilewright.pytorch.module import compile_module

Tensor = torch.Tensor
pytestmark = pytest.mark.usefixtures("quiet")


def the_old_one_is_changed(x: Tensor) -> Any:
    e = x * 1
    v = e.diagonal()
    if x.sum() > 0:
        e = e * 2
    v.add_(3)
    return e, v * 1


def the_new_one_is_changed(x: Tensor) -> Any:
    y = x * 1
    z = y
    if x.sum() > 0:
        z = y * 2
    z[1:].add_(1)
    return y


def a_step_changes_what_the_next_one_reads(x: Tensor) -> Any:
    e, d, n = x * 1, x * 2, torch.zeros((), dtype=torch.int64)
    while d.sum() < 100 and n < 3:
        v = e.diagonal()
        if x.sum() > 0:
            e = e.clamp(-1, 1) * 0.5
        else:
            d[1:][:, 1].fill_(e[d[0].argmax(), 1])
        v.add_(3)
        n = n + 1
    return d * 1


def one_of_two_copies(x: Tensor) -> Any:
    y = x * 1
    one, other = y, y
    if x.sum() > 0:
        one = y * 2
    if x.sum() < 1:
        other = y * 3
    one.add_(1)
    return other


def behind_loops_that_may_make_no_step(x: Tensor) -> Any:
    y = x * 1
    row = y[0]
    for _ in range(2):
        while y.sum() < -1:
            y = y + 1
    row.add_(1)
    return y


def branches_inside_branches(x: Tensor) -> Any:
    e = x * 1
    v = e[0]
    if x.sum() > 0:
        if x[0].sum() > 0:
            e = e * 2
    elif x[0, 0] > 0:
        e = e - 1
    v.mul_(5)
    e[1].add_(1)
    return e, v * 1


def changed_inside_a_branch(x: Tensor) -> Any:
    e = x * 1
    v = e[0]
    if x.sum() > 0:
        e = e * 2
    if x[0, 0] > 0:
        v.add_(7)
    return e


def the_callers_tensor(x: Tensor) -> Any:
    y = x
    if x.sum() > 0:
        y = x * 2
    y[0].add_(1)
    return x * 1


PROGRAMS: list[Callable[[Tensor], Any]] = [
    the_old_one_is_changed, the_new_one_is_changed, a_step_changes_what_the_next_one_reads, one_of_two_copies,
    behind_loops_that_may_make_no_step, branches_inside_branches, changed_inside_a_branch, the_callers_tensor,
]  # fmt: skip
_ALWAYS = (a_step_changes_what_the_next_one_reads, branches_inside_branches)


@pytest.mark.parametrize(
    "program", [pytest.param(p, marks=() if p in _ALWAYS else pytest.mark.slow, id=p.__name__) for p in PROGRAMS]
)
def test_a_change_is_seen_where_it_is_in_pytorch(program: Callable[[Tensor], Any]) -> None:
    fast = compile_module(Function(program).eval(), (mixed(4, 3),), interpreted)
    outcomes = set()
    for seed in range(12):
        own, given = mixed(4, 3, seed=seed), mixed(4, 3, seed=seed)
        outcomes.add((bool(own.sum() > 0), bool(own[0].sum() > 0), bool(own[0, 0] > 0)))
        wanted, found = program(own), fast(given)
        for one, other in zip(_tensors(found), _tensors(wanted), strict=True):
            torch.testing.assert_close(one, other)
        torch.testing.assert_close(given, own)
    assert len(outcomes) >= 4  # the data have decided both ways


def _tensors(found: Any) -> list[Tensor]:
    return list(found) if isinstance(found, tuple) else [found]
