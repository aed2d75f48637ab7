"""Numbers that data tell in the source of a module, and slices between them: what is a number in Python cannot be
changed in place, and what is a view in PyTorch is changed with its tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.frontend.torch_imperative import Function, ramp
from tests.frontend.torch_programs import interpreted
from tilewright.errors import UnsupportedError
from tilewright.pytorch.module import compile_module

Tensor = torch.Tensor
pytestmark = pytest.mark.usefixtures("quiet")


def kept_before_it_grows(x: Tensor) -> Any:
    count = int((x > 0).sum()) + 1
    first = count
    count += 1
    for row in x:
        if row.sum() > 0:
            count += 2
    last = count
    count += 5
    return x * first, x * last, x * count


def kept_in_a_loop(x: Tensor) -> Any:
    n, before, total = 0, 0, 0
    while x.sum() > n and n < 4:
        before = n
        n += 1
        total += x[0].sum()
    return x * before + n, x + total


def changed_where_it_is_a_tensor(x: Tensor) -> Any:
    y = x * 1
    corner = y[0, 0]
    corner += 1
    if x.sum() > 0:
        corner += 1
    return y


def through_a_slice(x: Tensor) -> Any:
    y, n = x * 1, int((x > 0).sum()) % 4
    front, behind = y[:n], y[n:]
    front += 1
    front[:, 1] = 7
    front.view(-1).mul_(2)
    if x.sum() > 0:
        behind.sub_(3)
    y[3] += 1
    return y, front * 2, behind.reshape(-1)


def through_what_a_mask_chose(x: Tensor) -> Any:
    if x[0, 0] > 9:
        x = x * 2
    chosen = x[x[:, 0] > -9]
    again = chosen
    chosen += 1
    chosen[0] = 9
    again[1].add_(2)
    again.view(-1, 1).mul_(2)
    return chosen, again.sum(), x * 1


def places_up_to_a_number(x: Tensor) -> Any:
    n = int((x > 0).sum())
    return torch.arange(n) * 2, x.flatten()[torch.arange(1, n + 1) % 12], x.view(-1)[:n] + torch.arange(n)


def one_of_what_a_mask_chose(x: Tensor) -> Any:
    torch._check(int((x > -9).sum()) > 0)
    chosen = x[x > -0.5]
    best = torch.where(chosen < 0.5, chosen, -1.0).argmax()
    if chosen[best] > 0.4:
        return chosen[best] * 2
    return chosen[0] - chosen[-1]


def least_of_neighbours(x: Tensor) -> Any:
    found = torch.full((4, 4), 1e9)
    found[0, 0] = 0
    for i in range(1, 4):
        for j in range(1, 4):
            found[i, j] = x[i, j - 1].abs() + min(found[i - 1, j], found[i, j - 1], found[i - 1, j - 1])
    return found[3, 3] * 1, max(x[0, 0], x[1, 1] - 1) * 2


def tensors_made_of_numbers(x: Tensor) -> Any:
    n, is_more, most = int((x > 0).sum()), bool(x.sum() > 0), x.max().item()
    made = torch.tensor([[n, 1], [2, n]]), torch.tensor([n, is_more]), torch.as_tensor([n, 1.5])
    kept = torch.tensor([most, 1]), x.new_tensor([n, 2]), torch.tensor((n, 2), dtype=torch.int32)
    corners = torch.tensor([x[0, 0], x[1, 1]])
    return *made, *kept, corners, torch.full((2, 3), n), torch.full_like(x, n) * most, torch.tensor([1, 2]) * n


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "function",
    [
        kept_before_it_grows, kept_in_a_loop, changed_where_it_is_a_tensor, through_a_slice, through_what_a_mask_chose,
        places_up_to_a_number, one_of_what_a_mask_chose, least_of_neighbours, tensors_made_of_numbers,
    ],
)  # fmt: skip
def test_as_in_python(function: Callable[..., Any]) -> None:
    fast = compile_module(Function(function).eval(), (ramp(4, 3),), interpreted)
    for shift in (0.0, 0.3, -0.3):
        torch.testing.assert_close(fast(ramp(4, 3) + shift), function(ramp(4, 3) + shift))


def product_of_slices(x: Tensor) -> Tensor:
    n = int((x > 0).sum()) % 4
    return x[:n].t() @ x[:n] if x.sum() > 0 else x.t() @ x


def identity_of_a_size(x: Tensor) -> Tensor:
    return torch.eye(int((x > 0).sum()))


@pytest.mark.parametrize(("function", "why"), [(product_of_slices, "whose size data tell"),
                                               (identity_of_a_size, "a size that data tell")])  # fmt: skip
def test_what_cannot_be_of_such_a_size_is_refused_by_its_line(function: Callable[..., Any], why: str) -> None:
    with pytest.raises(UnsupportedError) as refusal:
        compile_module(Function(function).eval(), (ramp(4, 3),), interpreted)
    assert why in str(refusal.value) and "test_torch_numbers.py:" in str(refusal.value)
