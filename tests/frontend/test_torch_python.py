"""What Python does between tensors, in the source of a module whose control data decide: values of `and` and `or`, the
order of assignments, lists and objects that branches change, types of numbers, errors that are caught."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.frontend.torch_imperative import Function, mixed
from tests.frontend.torch_programs import interpreted
from tilewright.errors import TilewrightError
from tilewright.pytorch.module import compile_module

Tensor = torch.Tensor
pytestmark = pytest.mark.usefixtures("quiet")


def the_value_of_and_and_or(x: Tensor, y: Tensor) -> Any:
    n = int((x > 0).sum()) or 7
    m = (y > 0).sum().item() and 5
    z = x[0].clamp(min=0).sum() or y[0, 0]
    return x / n, y * m, x + z


def changes_behind_and(x: Tensor, y: Tensor) -> Any:
    y, seen = y * 1, [0]

    def tell() -> bool:
        seen[0] += 1
        return True

    if x.sum() > 0 and y.add_(1).sum() > -100:
        x = x * 2
    if x.sum() > 0 or tell():
        x = x + seen[0]
    return x, y


class Total:
    """Of an own kind, with a method of a tensor's name."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, x: Tensor) -> Tensor:
        self.count += 1
        return x + self.count


def an_object_that_changes_behind_and(x: Tensor, y: Tensor) -> Any:
    total, totals = Total(), [Total()]
    if x.sum() > 0 and total.add(x).sum() > 3:
        x = x * 2
    z = totals[0].add(y) if y.sum() > 0 else y
    w = y[0, 0] > 0 or totals[0].add(y).sum() > 0
    return x + total.count, z + totals[0].count, y * w


def names_bound_behind_and(x: Tensor, y: Tensor) -> Any:
    n = m = x[0].sum()
    if x.sum() > 0 and (n := y.sum()) > -100:
        x = x * 2
    if -100 < (m := y.max()) < 2:
        x = x - m
    k = (j := n + 1) * 2 if x[0, 0] > 0 else (j := m)
    return x + n, k + j + x[0]


def keys_behind_what_is_bound(x: Tensor, y: Tensor) -> Any:
    k, x = 0, x * 1
    x[k], k = y[1], k + 1
    x[k] = k = k + 1
    if x.sum() > 0:
        x[k], k, *_ = y[3], k - 1, 5, 6
    return x, x[k]


def an_element_of_a_list_is_changed(x: Tensor, y: Tensor) -> Any:
    kept = [x[0] * 1, x[1] * 1, x[2] * 1]
    j = y[0].argmax()
    kept[j].add_(5)
    kept[j] += y[1]
    kept[0].mul_(2)
    return torch.stack(kept)


def what_functions_inside_change(x: Tensor, y: Tensor) -> Any:
    n, out = 1, []

    def emit(v: Tensor) -> None:
        nonlocal n
        n += 1
        out.append(v * n)

    if x.sum() > 0:
        emit(x)
        emit(y)
    else:
        emit(y)
        out.append(x)
    return out[0] * n, out[1]


def what_methods_change(x: Tensor, y: Tensor) -> Any:
    state = SimpleNamespace(h=x * 1, n=0)

    def update() -> None:
        state.h = state.h * 2
        state.n += 1

    while state.h.sum() < 5 and state.n < 3:
        state.h = state.h + 1 if state.n else state.h.abs()
        update()
    before = state.n
    if y.sum() > 0:
        update()
        state.n += 1
    return state.h * state.n, x * before


def containers_of_other_kinds(x: Tensor, y: Tensor) -> Any:
    counts: defaultdict[str, int] = defaultdict(int)
    recent: deque[Tensor] = deque([x[0]], maxlen=2)
    if x.sum() > 0:
        counts["a"] += 5
        recent.append(y[0])
    else:
        counts["a"] = 2
        recent.append(y[1])
    return x * counts["a"], recent[-1] + recent[0]


def types_of_numbers(x: Tensor, y: Tensor) -> Any:
    n, is_any = x.sum().item(), (y > 0).any().item()
    a = x * 3 if isinstance(n, float) else x
    b = x * 2 if type(n) is float else x
    c = y * 2 if is_any is True else y
    return a, b + torch.is_tensor(n), c


def numbers_among_others(x: Tensor, y: Tensor) -> Any:
    n = (x > 0).sum().item()
    a = x * 2 if n in (3, 5, 6, 7) else x
    b = x + {6: 2.0, 0: 5.0}.get(n, 3.0) + {k: k * 2.0 for k in range(13)}[n]
    whole, rest = divmod(n, 3)
    return a, b, y * whole + rest + round(y[0, 0].item(), 1), y * (n not in {0, 6})


def loops_with_else(x: Tensor, y: Tensor) -> Any:
    n = 0
    while x.sum() < 10 and n < 3:
        x = x + 1
        n += 1
    else:
        y = y * 2
    assert (y.abs() < 100).all()
    return x, y


def texts_and_keys_of_plain_values(x: Tensor, y: Tensor) -> Any:
    n = int((x > 0).sum())
    kept = {f"{'x'}{x.shape[0]}": x, "y".format(): y, **{k: x + k for k in range(2)}}
    print(f"{n} of {x.shape}", str(n))
    largest = max(x[0].sum(), y.sum())
    text = "%d" % 12  # noqa: UP031
    return kept["x4"] * n, kept[1] * len({*range(3), 3}) * len(text), x * largest + min(y[0, 0], y[0, 1])


RIGHT: list[Callable[..., Any]] = [
    the_value_of_and_and_or, changes_behind_and, an_object_that_changes_behind_and, names_bound_behind_and,
    keys_behind_what_is_bound, an_element_of_a_list_is_changed, what_functions_inside_change, what_methods_change,
    containers_of_other_kinds, types_of_numbers, numbers_among_others, loops_with_else, texts_and_keys_of_plain_values,
]  # fmt: skip


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    found: Callable[..., Any] = compile_module(Function(function).eval(), (mixed(4, 3), mixed(4, 3)), interpreted)
    return found


@pytest.mark.sample(6)
@pytest.mark.parametrize("function", RIGHT)
def test_python_between_tensors(function: Callable[..., Any]) -> None:
    fast = compiled(function)
    for sign in (1, -1, 0):
        args = [mixed(4, 3, seed=k) * (1 if not sign else sign * mixed(4, 3, seed=k).sign()) for k in (1, 2)]
        for found, wanted in zip(fast(*[x.clone() for x in args]), function(*[x.clone() for x in args]), strict=True):
            torch.testing.assert_close(found, wanted)


def an_element_of_a_list_is_another_tensor(x: Tensor, y: Tensor) -> Any:
    kept, v = [x[0] * 1, x[1] * 1, x[2] * 1], y[0] * 1
    kept[y[0].argmax()] = v
    v.add_(10)
    return torch.stack(kept)


def an_error_of_its_own(x: Tensor, y: Tensor) -> Any:
    try:
        if x.min() < -1:
            raise ValueError
        return x + 1
    except Exception:
        return y


def an_assertion_in_a_branch(x: Tensor, y: Tensor) -> Any:
    try:
        if x[: int((x > 0).sum()) % 3].sum() > 0:
            assert not x.shape
    except (RuntimeError, AssertionError):
        x = y
    return x


def an_iterator(x: Tensor, y: Tensor) -> Any:
    steps = iter([1.0, 2.0, 3.0])
    if x.sum() > 0:
        y = y + next(steps)
    return y * next(steps)


def a_name_that_a_function_inside_reads(x: Tensor, y: Tensor) -> Any:
    n = x * 1

    def twice() -> Tensor:
        return n * 2

    z = y
    if x.sum() > 0:
        n = y + 1
        z = twice()
    return z


def a_pattern(x: Tensor, y: Tensor) -> Any:
    match (x > 0).sum().item() > 5:
        case True:
            return x * 2
        case _:
            return x + 1


def a_power(x: Tensor, y: Tensor) -> Any:
    n = (x > 0).sum().item()
    if x.sum() > 0:
        y = y * 2
    return y * 10**-n


def the_larger_of_two_is_changed(x: Tensor, y: Tensor) -> Any:
    a, b = x.sum(), y.sum()
    max(a, b).add_(5)
    return a, b


def the_length_of_a_text(x: Tensor, y: Tensor) -> Any:
    return x * len(f"{int((x > 0).sum())}")


def the_length_of_another_text(x: Tensor, y: Tensor) -> Any:
    return x * len("%d" % int((x > 0).sum())) + len("{}".format(x.sum().item()))  # noqa: UP031, UP032


def a_set_of_numbers(x: Tensor, y: Tensor) -> Any:
    return x * len({int((x > 0).sum()), 3, 5})


def a_set_made_of_numbers(x: Tensor, y: Tensor) -> Any:
    n = int((x > 0).sum())
    return x * len({i * n for i in range(3)})


def a_dict_by_numbers(x: Tensor, y: Tensor) -> Any:
    return x * sum({int((x > 0).sum()): 1.0, 3: 2.0}.values())


def a_dict_made_by_numbers(x: Tensor, y: Tensor) -> Any:
    return x * len(dict([(int((x > 0).sum()), 1), (3, 2)])) + len(frozenset([int((y > 0).sum()), 2]))  # noqa: C406


REFUSED: list[tuple[Callable[..., Any], str]] = [
    (an_element_of_a_list_is_another_tensor, "changed in place that is a view of another, or not"),
    (an_error_of_its_own, "there is raise in it"),
    (an_assertion_in_a_branch, "AssertionError"),
    (an_iterator, "an iterator from around"),
    (a_name_that_a_function_inside_reads, "'n'.* that a function inside uses"),
    (a_pattern, "what is matched"),
    (a_power, "to the power of one that data tell"),
    (the_larger_of_two_is_changed, "changed in place that is a view of another, or not"),
    (the_length_of_a_text, "text is made of a number"),
    (the_length_of_another_text, "text is made of a number"),
    (a_set_of_numbers, "into a set or a dict"),
    (a_set_made_of_numbers, "into a set or a dict"),
    (a_dict_by_numbers, "into a set or a dict"),
    (a_dict_made_by_numbers, "into a set or a dict"),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("function", "told"), REFUSED, ids=lambda x: getattr(x, "__name__", ""))
def test_what_data_would_decide_is_refused(function: Callable[..., Any], told: str) -> None:
    with pytest.raises(TilewrightError, match=rf"test_torch_python\.py:\d+: .*{told}"):
        compiled(function)


def test_a_key_that_a_branch_chooses_is_refused() -> None:
    def chosen(x: Tensor, y: Tensor) -> Any:
        mode = "more" if x.sum() > 0 else "less"
        return {"more": x * 2, "less": x}[mode]

    told = r"is another plain value in the two branches at .*test_torch_python\.py:\d+"
    with pytest.raises(TilewrightError, match=told):
        compiled(chosen)


def test_a_set_that_changes_behind_and_is_followed_or_refused() -> None:
    """Its `add` has a tensor's name."""

    def counted(x: Tensor, y: Tensor) -> Any:
        seen = {1}
        if x.sum() > 0 and seen.add(2) is None:
            x = x * 2
        return x + len(seen), y

    try:
        fast = compiled(counted)
    except TilewrightError as refusal:
        assert "test_torch_python.py:" in str(refusal)
        return
    for x in (mixed(4, 3).abs(), -mixed(4, 3).abs()):
        torch.testing.assert_close(fast(x, x), counted(x, x))
