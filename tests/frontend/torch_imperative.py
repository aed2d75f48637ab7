"""Imperative programs as people write them: views and changes in place, loops and branches, sizes that data decide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

Arguments = Callable[[], tuple[Any, ...]]


@dataclass(frozen=True)
class Case:
    """A module, and arguments of one set of shapes; `forward` may change them, so that each run has its own."""

    make: Callable[[], nn.Module]
    calls: tuple[Arguments, ...]
    sizes: bool = False  # whether data decide shapes
    error: str = ""  # what `compile` says, where it has to refuse
    slow: bool = field(default=False)


CASES: dict[str, Case] = {}


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def case(*calls: Arguments, **named: Any) -> Callable[[Any], Any]:
    """Register a function, or a class of modules, under its name."""

    def register(what: Any) -> Any:
        make = what if isinstance(what, type) else lambda: Function(what)
        CASES[what.__name__] = Case(make, calls, **named)
        return what

    return register


def ramp(*shape: int, start: float = -1.0, end: float = 1.0) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.linspace(start, end, count).reshape(shape)


def mixed(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# changes in place, in straight code


@case(lambda: (ramp(4, 3),))
def slices_in_for(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    for k in range(4):
        y[k] = x[k] * k + y[k - 1]
    return y


@case(lambda: (ramp(5, 3),))
def accumulated(x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(3)
    for row in x:
        total += row * row
    return total


@case(lambda: (ramp(4, 3), torch.tensor([0, 2, 0]), ramp(3, 3)))
def put_by_index(x: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.index_put_((places,), values, accumulate=True)
    return y


@case(lambda: (ramp(4, 3), torch.tensor([[0, 1, 2], [3, 1, 0]]), ramp(2, 3)))
def scattered(x: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.scatter_add_(0, places, values)
    return y


@case(lambda: (ramp(4, 3),))
def input_changed(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    x[1] += 1
    return x.sum(0)


@case(lambda: (ramp(4, 6),))
def input_changed_by_strides(x: torch.Tensor) -> torch.Tensor:
    x[:, ::2].t()[1:].add_(3)
    return x * 1


@case(lambda: (ramp(4, 4),))
def view_of_view(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    rows = y[1:]
    cell = rows[:, 2]
    cell += 5
    rows.t()[0].mul_(2)
    return y + cell.sum()


@case(lambda: (ramp(4, 4),))
def diagonal_changed(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y.diagonal().add_(1)
    y.diagonal(1).mul_(3)
    return y


@case(lambda: (ramp(12),))
def windows(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y.as_strided((3, 4), (2, 1), 1) + 1


@case(lambda: (ramp(12),))
def windows_changed(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.as_strided((2, 3), (6, 2), 1).add_(10)
    return y


@case(lambda: (ramp(4, 3), torch.tensor([True, False, True, False]), ramp(3)))
def rows_masked(x: torch.Tensor, mask: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[mask] = row
    y[mask, 1] = 7
    return y


@case(lambda: (ramp(3, 2),))
def constants_written(x: torch.Tensor) -> torch.Tensor:
    table = torch.tensor([1.0, 2.0])
    table[0] = 5
    return x * table + torch.tensor([[1.0], [2.0], [3.0]])


@case(lambda: (ramp(3),))
class Counting(nn.Module):
    """A buffer that counts calls, and one of which a row changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("rows", torch.zeros(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.rows[1:][0].add_(x)
        return self.rows * self.count


@case(lambda: (ramp(3),))
class Attribute(nn.Module):
    """A tensor that is no buffer, changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.zeros(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(x)
        return self.seen * 2


@case(lambda: (ramp(3),), error="forward changes the attribute 'n'")
class Numbered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n += 1
        return x * self.n


def _same_twice() -> tuple[Any, ...]:
    z = ramp(4)
    return z, z


def _overlapping() -> tuple[Any, ...]:
    z = ramp(6)
    return z[1:], z[:-1]


@case(_same_twice)
def same_argument_twice(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.add_(1)
    return b * 2


@case(_overlapping)
def arguments_that_overlap(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.add_(1)
    return b * 2


@case(lambda: (ramp(4, 3),))
def views_returned(x: torch.Tensor) -> Any:
    y = x * 2
    return x[1:], y, y[0], y.t()


@case(lambda: (ramp(2, 2),))
def printed_between(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    v = y[0]
    print(end="")
    v.add_(10)
    return y.sum()


# loops and branches as PyTorch has them


@case(lambda: (ramp(3), ramp(5, 3)))
def scanned(state: torch.Tensor, xs: torch.Tensor) -> Any:
    def step(state: torch.Tensor, x: torch.Tensor) -> Any:
        new = torch.tanh(state + x)
        return new, new * 2

    return scan(step, state, xs)


@case(lambda: (ramp(3),))
def counted_loop(x: torch.Tensor) -> Any:
    start = (torch.zeros((), dtype=torch.int64), x)
    return while_loop(lambda i, y: i < 5, lambda i, y: (i + 1, torch.tanh(y) + i), start)


@case(*(lambda k=k: (ramp(3), torch.tensor(k)) for k in (0, 4)))
def loop_ended_by_data(x: torch.Tensor, count: torch.Tensor) -> Any:
    start = (torch.zeros((), dtype=torch.int64), x * 2)
    return while_loop(lambda i, y: i < count, lambda i, y: (i + 1, torch.tanh(y) + i), start)[1] * 3


@case(lambda: (ramp(3) + 2,), lambda: (ramp(3) - 2,))
def branches(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - 1, (x,))


@case(lambda: (ramp(3) + 2,), lambda: (ramp(3) - 2,))
def branch_that_changes(x: torch.Tensor) -> torch.Tensor:
    y = x * 1

    def then() -> torch.Tensor:
        y[1:].add_(10)
        return y.sum()

    total = torch.cond(x.sum() > 0, then, lambda: y.sum() * 2)
    return y + total


@case(*(lambda k=k: (ramp(4, 3), torch.tensor(k)) for k in (0, 3)))
def loop_that_changes(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    y = x * 1

    def body(i: torch.Tensor) -> Any:
        y[1:][0].add_(i + 1)
        y[0].mul_(2)
        return (i + 1,)

    (i,) = while_loop(lambda i: i < count, body, (torch.zeros((), dtype=torch.int64),))
    return y + i


# Python's own


@case(lambda: (ramp(3) + 2,), lambda: (ramp(3) - 2,))
def python_if(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        y = x * 2
        z = y + 1
    else:
        z = y = x - 1
    return y + z


@case(lambda: (ramp(2, 2) + 2,), lambda: (ramp(2, 2) - 2,))
def python_if_with_view(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    v = y[0]
    if x.sum() > 0:
        v.add_(10)
    return y * 1


@case(lambda: (ramp(3) + 4,), lambda: (ramp(3) + 40,))
def python_while(x: torch.Tensor) -> torch.Tensor:
    while x.abs().max() > 1:
        x = x * 0.5
    return x


@case(lambda: (ramp(3, 3) + 4,))
def python_while_with_view(x: torch.Tensor) -> Any:
    y = x * 1
    first = y[0][1:]
    steps = torch.zeros((), dtype=torch.int64)
    while y.sum() > 10:
        first -= 1
        y[1:].mul_(0.5)
        steps = steps + 1
    return y, steps


@case(lambda: (ramp(3) + 4,), lambda: (ramp(3) - 4,))
class Called(nn.Module):
    """Control in a method and in a module inside."""

    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.max() > 2:
                x = x / x.max()
            return x

    def __init__(self) -> None:
        super().__init__()
        self.inner = Called.Inner()

    def halved(self, x: torch.Tensor) -> torch.Tensor:
        while x.sum() > 1:
            x = x * 0.5
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.halved(self.inner(x) * 3)


@case(lambda: (ramp(40, 3),))
def long_for(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(3)
    for t in range(40):
        y = torch.tanh(y + x[t])
    return y


@case(*(lambda k=k: (mixed(6, 3), torch.tensor(k)) for k in (2, 0, 5)))
def for_over_data(x: torch.Tensor, count: torch.Tensor) -> Any:
    y = torch.zeros(6)
    z = x[0]
    for t in range(count):
        y[t] = z.sum() + t
        z = torch.tanh(z + x[t])
    return y, z


# whole algorithms


def _overlap(box: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    low = torch.maximum(box[:2], boxes[:, :2])
    high = torch.minimum(box[2:], boxes[:, 2:])
    inner = (high - low).clamp(min=0).prod(1)
    area = (box[2:] - box[:2]).prod() + (boxes[:, 2:] - boxes[:, :2]).prod(1)
    return inner / (area - inner)


def _boxes(seed: int = 0, count: int = 12) -> torch.Tensor:
    corner = mixed(count, 2, seed=seed).abs() * 4
    return torch.cat([corner, corner + 1 + mixed(count, 2, seed=seed + 1).abs() * 3], 1)


@case(*(lambda k=k: (_boxes(k), mixed(12, seed=k + 7)) for k in (0, 1)))
def greedy_suppression(boxes: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Boxes that are left, by a loop that ends when none is."""
    alive = torch.ones(12, dtype=torch.bool)
    kept = torch.zeros(12, dtype=torch.bool)
    while alive.any():
        best = torch.where(alive, scores, -1e9).argmax()
        kept[best] = True
        alive = alive & (_overlap(boxes[best], boxes) <= 0.3)
        alive[best] = False
    return kept


@case(lambda: (_boxes(), mixed(12, seed=7)))
def fixed_suppression(boxes: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    alive = scores.clone()
    kept = torch.full((6,), -1)
    for k in range(6):
        best = alive.argmax()
        kept[k] = best
        alive = torch.where(_overlap(boxes[best], boxes) > 0.3, -1e9, alive)
        alive[best] = -1e9
    return kept


@case(*(lambda k=k: (_boxes(k), mixed(12, seed=k + 7)) for k in (0, 1, 2)), sizes=True)
def cut_suppression(boxes: torch.Tensor, scores: torch.Tensor) -> Any:
    """The boxes that are left, as many as they are, in the order of their scores."""
    kept = greedy_suppression(boxes, scores)
    boxes, scores = boxes[kept], scores[kept]
    order = scores.argsort(descending=True)
    return boxes[order], scores[order] * 2


@case(*(lambda k=k: (_boxes(k), mixed(12, seed=k + 7)) for k in (0, 1, 2)), sizes=True)
def filtered_and_sorted(boxes: torch.Tensor, scores: torch.Tensor) -> Any:
    chosen = scores > 0
    boxes, scores = boxes[chosen], scores[chosen]
    order = scores.argsort(descending=True)
    return boxes[order] * 2, scores[order].sum(), _overlap(boxes[0], boxes)


@case(lambda: (_boxes(0), mixed(12, seed=7)), sizes=True, error="uses a tensor whose size data tell")
def filtered_suppression(boxes: torch.Tensor, scores: torch.Tensor) -> Any:
    """A loop over as many boxes as are above a score."""
    chosen = scores > 0
    boxes, scores = boxes[chosen], scores[chosen]
    alive = scores > 0
    kept = torch.zeros_like(alive)
    while alive.any():
        best = torch.where(alive, scores, -1e9).argmax()
        kept[best] = True
        alive = alive & (_overlap(boxes[best], boxes) <= 0.3)
        alive[best] = False
    return boxes[kept]


@case(*(lambda k=k: (mixed(7, 4, seed=k), mixed(4, 4, seed=k + 1)) for k in (0, 2)))
def viterbi(emitted: torch.Tensor, moves: torch.Tensor) -> torch.Tensor:
    score = emitted[0]
    back = torch.zeros(7, 4, dtype=torch.int64)
    for t in range(1, 7):
        best, back[t] = (score[:, None] + moves).max(0)
        score = best + emitted[t]
    path = torch.zeros(7, dtype=torch.int64)
    path[6] = score.argmax()
    for t in range(6, 0, -1):
        path[t - 1] = back[t, path[t]]
    return path


@case(lambda: (ramp(6, 4), ramp(6)), lambda: (ramp(6, 4), ramp(6) + 0.5), sizes=True)
def boxes_masked(boxes: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return boxes[scores > 0] * 2 + 1


@case(lambda: (ramp(4, 3), mixed(4, 3)), lambda: (ramp(4, 3), mixed(4, 3, seed=1)), sizes=True)
def masked_assignment(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x * 1
    m = y > 0
    z[m] = y[m] * 2
    return z


@case(*(lambda k=k: (ramp(8, 2), torch.tensor(k)) for k in (3, 5)), sizes=True)
def sliced_by_item(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    n = int(count.item())
    torch._check(n >= 1)
    torch._check(n <= 8)
    return x[:n].sum(0) + n


@case(*(lambda k=k: (mixed(9, seed=k),) for k in (0, 1)), sizes=True)
def positions(x: torch.Tensor) -> torch.Tensor:
    return torch.nonzero(x > 0)[:, 0] * 2


@case(lambda: (ramp(1, 2, 4), torch.zeros(1, 6, 4), torch.tensor([2, 3])))
def cache_by_index(x: torch.Tensor, cache: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    cache.index_copy_(1, places, x)
    return torch.softmax(x @ cache.transpose(1, 2), -1) @ cache


@case(lambda: (ramp(1, 2, 4), torch.zeros(1, 6, 4)))
def cache_by_slice(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    cache[:, 3:5] = x
    return torch.softmax(x @ cache.transpose(1, 2), -1) @ cache


@case(lambda: (mixed(2, 5),))
class Beam(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.step = nn.Linear(5, 5)

    def forward(self, state: torch.Tensor) -> Any:
        total = torch.zeros(2)
        words = torch.zeros(2, 3, dtype=torch.int64)
        for t in range(3):
            state = torch.tanh(self.step(state))
            flat = (total[:, None] + state.log_softmax(-1)).reshape(-1)
            total, best = flat.topk(2)
            words = words[best // 5]
            words[:, t] = best % 5
            state = state[best // 5]
        return words, total


def _decoded(head: torch.Tensor, anchors: torch.Tensor, stride: int) -> torch.Tensor:
    """Boxes of a grid of cells, changed in place as detectors' code has it."""
    b, _, h, w = head.shape
    out = head.view(b, 3, 7, h, w).permute(0, 1, 3, 4, 2).contiguous()
    rows, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    grid = torch.stack([columns, rows], -1).float()
    out[..., :2] = (out[..., :2].sigmoid() + grid) * stride
    out[..., 2:4] = out[..., 2:4].exp() * anchors[None, :, None, None]
    out[..., 4:] = out[..., 4:].sigmoid()
    return out.view(b, -1, 7)


@case(lambda: (mixed(1, 21, 2, 3), ramp(3, 2, start=1, end=3)))
def yolo_head(head: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    return _decoded(head, anchors, 8)


@case(lambda: (mixed(1, 6, 4), ramp(6, 4, start=1, end=3)))
def ssd_head(places: torch.Tensor, priors: torch.Tensor) -> torch.Tensor:
    boxes = torch.cat([priors[:, :2] + places[..., :2] * 0.1 * priors[:, 2:],
                       priors[:, 2:] * torch.exp(places[..., 2:] * 0.2)], -1)  # fmt: skip
    boxes[..., :2] -= boxes[..., 2:] / 2
    boxes[..., 2:] += boxes[..., :2]
    return boxes


@case(lambda: (mixed(8, 8, 4), mixed(5, 4), _boxes(count=5)))
def yolact_head(prototypes: torch.Tensor, factors: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    masks = torch.sigmoid(prototypes @ factors.t()).permute(2, 0, 1).contiguous()
    x = torch.arange(8.0)
    inside = (x >= boxes[:, :1]) & (x < boxes[:, 2:3])
    below = (x >= boxes[:, 1:2]) & (x < boxes[:, 3:4])
    masks *= inside[:, None, :] & below[:, :, None]
    masks[masks < 0.5] = 0
    return masks


@case(lambda: (mixed(1, 4, 2, 3), mixed(1, 1, 2, 3)))
def fcos_head(distances: torch.Tensor, centers: torch.Tensor) -> torch.Tensor:
    d = distances.exp().permute(0, 2, 3, 1).reshape(-1, 4) * 8
    y, x = torch.meshgrid(torch.arange(2) * 8 + 4, torch.arange(3) * 8 + 4, indexing="ij")
    boxes = torch.empty(6, 5)
    boxes[:, 0] = x.reshape(-1) - d[:, 0]
    boxes[:, 1] = y.reshape(-1) - d[:, 1]
    boxes[:, 2] = x.reshape(-1) + d[:, 2]
    boxes[:, 3] = y.reshape(-1) + d[:, 3]
    boxes[:, 4] = centers.sigmoid().reshape(-1)
    return boxes


class Gated(nn.Module):
    """The parts that recurrences are written with."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell = nn.Linear(3 + 4, 16)
        self.out = nn.Linear(4, 3)

    def step(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        i, f, g, o = self.cell(torch.cat([x, h], -1)).chunk(4, -1)
        c = c * f.sigmoid() + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c


@case(lambda: (mixed(5, 2, 3),))
class LstmIntoSlices(Gated):
    def forward(self, xs: torch.Tensor) -> torch.Tensor:
        h = c = torch.zeros(2, 4)
        ys = torch.empty(5, 2, 4)
        for t in range(5):
            h, c = self.step(xs[t], h, c)
            ys[t] = h
        return ys


@case(lambda: (mixed(5, 2, 3),))
class LstmByList(Gated):
    def forward(self, xs: torch.Tensor) -> torch.Tensor:
        h = c = torch.zeros(2, 4)
        ys = []
        for t in range(5):
            h, c = self.step(xs[t], h, c)
            ys.append(h)
        return torch.stack(ys)


@case(lambda: (mixed(4, 1, 3),))
class Seq2seq(Gated):
    """What was read is written again, each step from the word before, until a word or a length ends it."""

    def forward(self, xs: torch.Tensor) -> torch.Tensor:
        h = c = torch.zeros(1, 4)
        for t in range(4):
            h, c = self.step(xs[t], h, c)
        words = torch.zeros(5, dtype=torch.int64)
        x = torch.zeros(1, 3)
        n = torch.zeros((), dtype=torch.int64)
        word = n + 1
        while (n < 5) & (word != 0):
            h, c = self.step(x, h, c)
            word = self.out(h)[0].argmax()
            words[n] = word
            x = torch.nn.functional.one_hot(word, 3)[None].float()
            n = n + 1
        return words


@case(lambda: (mixed(3, 2, 3),))
class Nas(Gated):
    def forward(self, xs: torch.Tensor) -> torch.Tensor:
        h = c = torch.zeros(2, 4)
        ys = torch.zeros(3, 2, 4)
        for t in range(3):
            a, b, d, e = self.cell(torch.cat([xs[t], h], -1)).chunk(4, -1)
            c = torch.tanh(a.sigmoid() * b.relu()) + c
            h = torch.tanh(c * d.sigmoid() + e.tanh())
            ys[t] = h
        return ys


@case(lambda: (mixed(2, 3, 4), torch.zeros(2, 5, 4)))
def attention_by_steps(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for t in range(3):
        cache[:, t] = x[:, t]
        scores = (cache * x[:, t, None]).sum(-1)
        scores[:, t + 1 :] = -1e9
        out[:, t] = (scores.softmax(-1)[..., None] * cache).sum(1)
    return out
