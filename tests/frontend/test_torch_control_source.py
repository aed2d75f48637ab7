"""Control in the source of a module that tensors decide: what is refused says where and why, and no change is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewright
from tests.frontend.torch_imperative import Function, ramp
from tests.frontend.torch_programs import interpreted
from tilewright import Options
from tilewright.errors import UnsupportedError
from tilewright.frontend.pytorch.exported import export
from tilewright.pytorch.module import CompiledModule, compile_module

Tensor = torch.Tensor
pytestmark = pytest.mark.usefixtures("quiet")


def compiled(function: Callable[..., Any], *args: Any) -> CompiledModule:
    return compile_module(Function(function).eval(), args, interpreted)


def raising(x: Tensor) -> Tensor:
    if x.sum() > 0:
        raise ValueError
    return x


def returning_otherwise(x: Tensor) -> Any:
    if x.sum() > 0:
        return x, x
    return x


def growing(x: Tensor) -> Tensor:
    while x.sum() < 10:
        x = torch.cat([x, x])
    return x


def turning(x: Tensor) -> Tensor:
    while x.sum() < 10:
        x = x.long() + 4
    return x


def listing(x: Tensor) -> Tensor:
    found = []
    while x.sum() > 0:
        x = x - 1
        found.append(x)
    return torch.stack(found)


def bound_once(x: Tensor) -> Tensor:
    if x.sum() > 0:
        y = x * 2
    return y + 1


def naming_otherwise(x: Tensor) -> Tensor:
    mode = "tanh"
    if x.sum() > 0:
        mode = "relu"
    return torch.relu(x) if mode == "relu" else torch.tanh(x)


def changing_what_data_chose(x: Tensor) -> Tensor:
    y = x * 1
    row = y[x[:, 0].argmax()]
    row.add_(1)
    return y


def changed_in_one_step_read_in_the_next(x: Tensor) -> Tensor:
    y = x * 1
    z, total, n = y, x * 0, 0
    while n < 3 and total.sum() < 100:
        total = total + y
        z.add_(1)
        if total.sum() > 50:
            z = z * 2
        n = n + 1
    return total


def changed_in_one_branch_read_in_the_other(x: Tensor) -> Tensor:
    y = x * 1
    z, total, n = y, x * 0, 0
    if x.sum() > 0:
        z = y * 2
    while n < 3 and total.sum() < 100:
        if total.sum() > 0:
            z.add_(1)
        else:
            total = total + y
        n = n + 1
    return total


def held_through_a_step(x: Tensor) -> Tensor:
    z, total, n = x * 1, x * 0, 0
    while n < 3 and total.sum() < 100:
        before = z
        if x.sum() > 0:
            z = z * 2
        z.add_(1)
        total = total + before
        n = n + 1
    return total


def of_open_size(x: Tensor) -> Tensor:
    y = x * 1
    while y.sum() < 4:
        y = y + x[x > 0].sort().values[0]
    return y


class Setting(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            self.last = x
        return x


REFUSED: dict[str, tuple[Any, str]] = {
    "raise": (raising, r"control_source.py:\d+: a tensor decides .* there is raise in it"),
    "built": (returning_otherwise, r"control_source.py:\d+: what is returned is built otherwise in the two branches"),
    "shape": (growing, r"control_source.py:\d+: 'x' changes from float32\[4, 3\] to float32\[8, 3\] with a step"),
    "type": (turning, r"control_source.py:\d+: 'x' changes from float32\[4, 3\] to int64\[4, 3\] with a step"),
    "list": (listing, r"control_source.py:\d+: a list is changed where a tensor decides how often"),
    "name": (bound_once, r"'y' is bound in one only in the two branches at .*control_source.py:\d+"),
    "word": (naming_otherwise, r"'mode' is another plain value in the two branches at .*control_source.py:\d+"),
    "size": (of_open_size, r"control_source.py:\d+: .* tensor whose size data tell"),
    "next step": (changed_in_one_step_read_in_the_next, r":\d+: a tensor is changed in place that is a view"),
    "other branch": (changed_in_one_branch_read_in_the_other, r":\d+: a tensor is changed in place that is a view"),
    "held": (held_through_a_step, r":\d+: a tensor is changed in place that is a view of another"),
    "chosen": (changing_what_data_chose, r"write x\[i\] = ... instead of changing x\[i\]"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ("list", "held") else pytest.mark.slow) for n in REFUSED]
)
def test_what_cannot_be_followed_is_named_with_its_line(name: str) -> None:
    function, text = REFUSED[name]
    with pytest.raises(UnsupportedError, match=text) as caught:
        compiled(function, ramp(4, 3))
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_an_attribute_set_in_a_branch_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"there is an assignment to \.last in it"):
        compile_module(Setting().eval(), (ramp(4, 3),), interpreted)


def returning_early(x: Tensor) -> Any:
    y = x * 1
    if x.sum() > 0:
        if x[0].sum() > 1:
            return y * 2, y
        y += 1
        return y, x
    y[1:] -= 1
    if y[0].max() > -1:
        return x, y
    return y * 3, y


def leaving_a_loop(x: Tensor) -> Any:
    """A counter and steps that are passed over, decided by data."""
    y, z, n = x * 1, x * 0, 0
    for i in range(4):
        if y.sum() > 4:
            break
        if x[i].sum() < 0:
            n += 1
            continue
        y += 1
        z[i] = y[i] + n
    return y, z


def asking_plainly(x: Tensor) -> Any:
    y = x * 1
    if bool(x.mean() < -0.1):
        y += 1
    if x.sum().item() > 0.5:
        y[x > 0] -= 0.5
    return y


def returning_from_loops(x: Tensor) -> Any:
    y, scale = x * 1, 0.5
    if x.sum() > 0:
        scale = 2.5
    for row in x[2:]:
        for k in range(2):
            if row[k] > 0.7:
                return y * scale, y + 1
            y[k] += row[0]
    else:
        y[0] -= 1
    return y * scale, y


def leaving_over_a_list(x: Tensor) -> Any:
    """Elements of a list, exchanged and replaced where data say so."""
    kept = [x[0] * 2, x[1], x[2] - x[0]]
    for k, row in enumerate(kept):
        if row.sum() > 1:
            kept[0], kept[1] = kept[1], kept[0]
            break
        kept[2] = kept[2] + row * k
    while kept[2].sum() < 3:
        kept[2] = kept[2] + 1
    return torch.stack(kept)


def masked_in_a_loop(x: Tensor) -> Any:
    y, n = x * 1, 0
    while y.max() < 3 and n < 6:
        n += 1
        y[y > x] = y[y > x] * 2
        y[x > 0] += x[x > 0] + 0.5
        if len(y[y > 1]) > 3:
            y[: int((x > 0).sum()) // 4] -= 0.25
        y = y + y[y > 0].sum() * 0.125 + (y > 1).nonzero().shape[0]
    return y, n + 0 * y.sum()


def counted_by_data(x: Tensor) -> Any:
    y = x * 1
    most = max(x[0].argmax().item(), 1) + 2
    for i in range(most):
        if 0 < y[i].sum() < 1:
            continue
        y[i] = y[i - 1] / (abs(x.min().item()) + 1)
    return y


def bound_in_a_test(x: Tensor) -> Any:
    y, n = x * 1, 0
    while (s := y.abs().sum()) > 1 and n < 6:
        if (top := y.max()) > 0.5:
            y = y * 0.5
            n = n + 1
            continue
        y = y - top * 0.25
        n = n + 1
    return y, s * 1, x * n


EXITS = [leaving_over_a_list, leaving_a_loop, asking_plainly, masked_in_a_loop]
SLOW_EXITS = [returning_early, returning_from_loops, counted_by_data, bound_in_a_test]


@pytest.mark.sample(2)
@pytest.mark.parametrize("function", [*EXITS, *(pytest.param(f, marks=pytest.mark.slow) for f in SLOW_EXITS)])
def test_early_exits_and_plain_questions_are_followed(function: Callable[..., Any]) -> None:
    fast = compiled(function, ramp(4, 3))
    for shift in (0.0, -0.5, 0.4):
        torch.testing.assert_close(fast(ramp(4, 3) + shift), function(ramp(4, 3) + shift))


def nested(x: Tensor) -> Any:
    """Changes in a loop of a branch of a loop, none of which gives anything but these."""
    y = x * 1
    row = y[1]
    n = torch.zeros((), dtype=torch.int64)
    while n < 3 and y.sum() < 50:
        if row.sum() > 0:
            while row.max() < 4:
                row += 1
            y[2:][0].mul_(2)
        else:
            y[0][1:] -= 1
        n = n + 1
    return y, row * 1, n


def test_changes_inside_nested_bodies_are_kept() -> None:
    fast = compiled(nested, ramp(4, 3))
    for shift in (0.0, 1.0, -2.0):
        torch.testing.assert_close(fast(ramp(4, 3) + shift), nested(ramp(4, 3) + shift))


def in_the_other_branch(x: Tensor) -> Any:
    """One branch carries a tensor through a loop, the other changes it: one of the two is run."""
    y = x * 1
    if x.sum() > 0:
        while y.max() > 1:
            y = y / 2
    else:
        y[:, 0] += -2
    return y


def made_in_a_step(x: Tensor) -> Any:
    """What is made in a step and changed there is another tensor in the next one."""
    y = x * 1
    n = 0
    while n < 3 and y.sum() < 50:
        z = y + 1
        if z.sum() > 0:
            z = z * 2
        z.add_(1)
        if z.max() > 4:
            z.mul_(0.5)
        y = y + z
        n = n + 1
    return y


def made_and_handed_on(x: Tensor) -> Any:
    """What a step makes, changes and hands on to the next one, which makes its own."""
    d, n = x * 1, 0
    while n < 3 and d.sum() < 50:
        z = d + x
        if z.max() > 1:
            z[1:][0] -= 0.5
        d = z if x.sum() > 0 else x - 1
        n = n + 1
    return d


def carried_and_changed(x: Tensor) -> Any:
    """What a loop carries, bound anew in a branch or not, and changed behind it."""
    z, total, n = x * 1, x * 0, 0
    while n < 3 and total.sum() < 100:
        total = total + z
        if z.sum() > 0:
            z = z * 2
        z[1:].add_(1)
        n = n + 1
    return total, z


def changed_and_not_read(x: Tensor) -> Any:
    """A change of what nobody reads any more."""
    y = x * 1
    z = y
    if x.sum() > 0:
        z = y * 2
    z.add_(1)
    total = z.sum()
    y.mul_(2)
    return total


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "function",
    [
        in_the_other_branch,
        pytest.param(made_in_a_step, marks=pytest.mark.slow),
        made_and_handed_on,
        pytest.param(carried_and_changed, marks=pytest.mark.slow),
        changed_and_not_read,
    ],
)
def test_copies_that_no_change_is_seen_through_are_no_reason_to_refuse(function: Callable[..., Any]) -> None:
    fast = compiled(function, ramp(4, 3))
    for shift in (0.0, 1.0, -2.0):
        torch.testing.assert_close(fast(ramp(4, 3) + shift), function(ramp(4, 3) + shift))


@pytest.mark.slow
def test_a_counter_that_is_a_number_is_carried() -> None:
    def halved(x: Tensor) -> Any:
        n = 0
        while x.abs().max() > 1 and n < 10:
            x = x / 2
            n += 1
        return x * n

    fast = compiled(halved, ramp(3) * 8)
    for scale in (8, 1, 1e9):
        torch.testing.assert_close(fast(ramp(3) * scale), halved(ramp(3) * scale))


class Changing(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        if x.sum() > 0:
            y[1:][0].add_(1)
        x.mul_(2)
        return y


def test_explain_tells_of_every_change() -> None:
    text = compile_module(Changing().eval(), (ramp(4, 3),), interpreted).explain()
    assert "add_ at test_torch_control_source.py" in text and "changes a view of 'lent_default'" in text
    assert "mul_ at test_torch_control_source.py" in text and "changes 'x': its new value is written back" in text


@pytest.mark.slow
def test_sizes_that_data_tell_as_machine_code(kernel_cache: Path) -> None:
    """In parts, whose number does not grow with the number of sizes."""

    def kept(boxes: Tensor, scores: Tensor) -> Any:
        chosen = boxes[scores > 0]
        return chosen * 2, chosen.sum(0)

    boxes, scores = ramp(40, 4), ramp(40)
    options = Options(cache_dir=kernel_cache, threads=1)
    fast = tilewright.compile(Function(kept).eval(), (boxes, scores), options=options)
    for shift in (0.0, 0.1, 0.2, 0.3, 2.0, -2.0):
        for found, wanted in zip(fast(boxes, scores + shift), kept(boxes, scores + shift), strict=True):
            torch.testing.assert_close(found, wanted)
    assert fast.compilations == 1 and "runs in parts" in fast.explain()


def masked_elements(x: Tensor, y: Tensor) -> Any:
    x = x * 1
    x[x > 0] += 100
    x[y > 0] = y[y > 0] * 2 + 1
    x[x.sum(1) > 3] *= 0.5
    chosen = x[(x > -1) & (y < 1)]
    return x, chosen.sum(), (chosen * 2).mean()


def masked_rows(x: Tensor, y: Tensor) -> Any:
    x, rows, columns = x * 1, x[:, 0] > 0, y[0] > 0
    x[rows, 0] += x[rows, 1] * 2
    x[rows] /= x[rows].abs().sum(1, keepdim=True) + 1
    x[:, columns] = 0
    most = x[rows].softmax(-1).max(1)
    y = (y * 1).masked_scatter_(x > 0, x.abs())
    return x, y, torch.masked_select(x, x[:1] > 0).sum() + x.masked_select(x > 0).sum(), most.values.sum()


def places_where(x: Tensor, y: Tensor) -> Any:
    x = x * 1
    rows = torch.where(x[:, 1] > 0)[0]
    x[rows] = 7
    x[torch.where(y > 0)] += 1
    return x, y[rows].sum()


@pytest.mark.parametrize(
    ("function", "is_whole"), [(masked_elements, True), (masked_rows, True), (places_where, False)]
)
def test_elements_that_a_mask_chooses_are_no_parts(function: Callable[..., Any], is_whole: bool) -> None:
    """What is done to them, while no size of theirs comes out, is done to all and kept where the mask is set: code for
    one count would be compiled anew for the next."""
    args = [ramp(5, 3), ramp(5, 3).flip(0)]
    found = export(Function(function).eval(), args, {})
    assert is_whole == (not {node.op for node in found.graph.nodes} & {"NonZero", "Compress"})
    fast = compile_module(Function(function).eval(), tuple(args), interpreted)
    for shift in (0.0, 0.7, -5.0):
        for got, wanted in zip(fast(args[0] + shift, args[1]), function(args[0] + shift, args[1]), strict=True):
            torch.testing.assert_close(got, wanted, equal_nan=True)


class Steps(torch.nn.Module):
    """A recurrence of so many steps, what they give written into a tensor or kept in a list."""

    def __init__(self, steps: int, in_list: bool) -> None:
        super().__init__()
        self.steps, self.in_list = steps, in_list

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(3)
        rows, found = torch.zeros(self.steps, 3), []
        for t in range(self.steps):
            h = torch.tanh(h + x[t])
            if self.in_list:
                found.append(h)
            else:
                rows[t] = h
        return torch.stack(found) if self.in_list else rows


@pytest.mark.sample(4)
@pytest.mark.parametrize(("steps", "in_list", "loops"), [(20, False, 1), (16, False, 0), (20, True, 0)])
def test_long_ranges_are_loops_of_the_graph(steps: int, in_list: bool, loops: int) -> None:
    """Where Python's own loop can do more than one of the graph, it is followed step by step."""
    module, x = Steps(steps, in_list).eval(), torch.linspace(-1, 1, 3 * steps).reshape(steps, 3)
    graph = export(module, (x,), {}).graph
    assert [n.op for n in graph.nodes].count("Loop") == loops
    torch.testing.assert_close(compile_module(module, (x,), interpreted)(x), module(x))


class Halted(torch.nn.Module):
    """So many steps, of which data may take fewer."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def forward(self, x: Tensor) -> Any:
        y, n = x * 1, 0
        for t in range(self.steps):
            y[t % 4] += 0.5
            if y.sum() > 4:
                break
            n += 1
        return y, x * n + t


@pytest.mark.slow
def test_a_loop_that_data_may_end_is_followed_once_whatever_its_steps() -> None:
    x = ramp(4, 3)
    few, many = (export(Halted(steps).eval(), (x,), {}).graph for steps in (8, 12))
    assert len(few.nodes) == len(many.nodes) and [n.op for n in many.nodes].count("Loop") == 1
    module = Halted(8).eval()
    fast = compile_module(module, (x,), interpreted)
    for shift in (0.0, 0.3, 1.0, -3.0):
        torch.testing.assert_close(fast(x + shift), module(x + shift))
