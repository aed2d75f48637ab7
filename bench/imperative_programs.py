"""The programs of TensorSSA's evaluation, built anew from their descriptions: heads of detectors that decode in place,
alone and with filter, sort and suppression behind them, and recurrences written step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

Program = tuple[nn.Module, tuple[Tensor, ...]]
CLASSES, KEPT, CHOSEN = 80, 200, 64  # classes; boxes that are sorted; boxes that suppression leaves


def suppressed(boxes: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Greedy suppression: so many times the best box that is left, and those that overlap it dropped."""
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    kept = torch.zeros(CHOSEN, dtype=torch.int64)
    found = torch.zeros(CHOSEN)
    for i in range(CHOSEN):
        best = scores.argmax()
        kept[i] = best
        found[i] = scores[best]
        box = boxes[best]
        low = torch.maximum(boxes[:, :2], box[:2])
        high = torch.minimum(boxes[:, 2:], box[2:])
        size = (high - low).clamp(min=0.0)
        both = size[:, 0] * size[:, 1]
        overlap = both / (areas + areas[best] - both + 1e-6)
        scores = torch.where(overlap > 0.5, torch.zeros_like(scores), scores)
    return kept, found


class Whole(nn.Module):
    """A head and what follows it: the best classes, the best boxes in order, suppression."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, *given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = self.head(*given)
        boxes, scores = found[0][0], found[1][0]
        best, classes = scores.max(1)
        best = torch.where(best > 0.05, best, torch.zeros_like(best))
        top, order = best.topk(KEPT)
        kept, confidence = suppressed(boxes[order], top)
        return boxes[order][kept], classes[order][kept], confidence


class YoloV3(nn.Module):
    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        for k, size in enumerate(sizes):
            rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
            self.register_buffer(f"grid{k}", torch.stack([columns, rows], -1).float())
            self.register_buffer(f"anchors{k}", torch.rand(3, 1, 1, 2) * 100 + 10)
        self.strides = [416 // size for size in sizes]

    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        boxes, scores = [], []
        grids = (self.grid0, self.grid1, self.grid2)
        anchors = (self.anchors0, self.anchors1, self.anchors2)
        for k, x in enumerate((a, b, c)):
            size = x.shape[-1]
            y = x.view(1, 3, CLASSES + 5, size, size).permute(0, 1, 3, 4, 2).contiguous()
            y[..., 0:2] = (y[..., 0:2].sigmoid() + grids[k]) * self.strides[k]
            y[..., 2:4] = y[..., 2:4].exp() * anchors[k]
            y[..., 4:] = y[..., 4:].sigmoid()
            y[..., 0:2] -= y[..., 2:4] / 2
            y[..., 2:4] += y[..., 0:2]
            flat = y.view(1, -1, CLASSES + 5)
            boxes.append(flat[..., :4])
            scores.append(flat[..., 5:] * flat[..., 4:5])
        return torch.cat(boxes, 1), torch.cat(scores, 1)


class Priors(nn.Module):
    """SSD's decoding, and YOLACT's: offsets to boxes that are given."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.register_buffer("priors", torch.rand(count, 4) * 0.5 + 0.1)

    def forward(self, places: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
        boxes = torch.zeros_like(places)
        boxes[..., :2] = self.priors[:, :2] + places[..., :2] * 0.1 * self.priors[:, 2:]
        boxes[..., 2:] = self.priors[:, 2:] * (places[..., 2:] * 0.2).exp()
        boxes[..., :2] -= boxes[..., 2:] / 2
        boxes[..., 2:] += boxes[..., :2]
        return boxes, classes.softmax(-1)[..., 1:]


class Yolact(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.decode = Priors(count)

    def forward(self, places: Tensor, classes: Tensor, masks: Tensor, prototypes: Tensor) -> tuple[Tensor, ...]:
        boxes, scores = self.decode(places, classes)
        low = boxes.clone()
        low[..., 0::2] = low[..., 0::2].clamp(0, 1) * 550
        low[..., 1::2] = low[..., 1::2].clamp(0, 1) * 550
        return low, scores, masks.tanh(), prototypes.relu()


class Fcos(nn.Module):
    def __init__(self, sizes: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.strides = (8, 16, 32, 64, 128)[: len(sizes)]
        for k, ((rows, columns), stride) in enumerate(zip(sizes, self.strides, strict=True)):
            y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
            self.register_buffer(f"points{k}", (torch.stack([x, y], -1).float() * stride + stride // 2).view(-1, 2))

    def forward(self, *levels: Tensor) -> tuple[Tensor, Tensor]:
        boxes, scores = [], []
        points = (self.points0, self.points1, self.points2, self.points3, self.points4)
        for k, level in enumerate(levels):
            flat = level[0].flatten(1).t()
            sides = (flat[:, :4] * self.strides[k]).exp().clamp(max=1000.0)
            box = torch.zeros(flat.shape[0], 4)
            box[:, 0] = points[k][:, 0] - sides[:, 0]
            box[:, 1] = points[k][:, 1] - sides[:, 1]
            box[:, 2] = points[k][:, 0] + sides[:, 2]
            box[:, 3] = points[k][:, 1] + sides[:, 3]
            boxes.append(box)
            scores.append((flat[:, 5:].sigmoid() * flat[:, 4:5].sigmoid()).sqrt())
        return torch.cat(boxes, 0)[None], torch.cat(scores, 0)[None]


class NasRnn(nn.Module):
    """The cell that architecture search found, step by step."""

    def __init__(self, width: int, steps: int) -> None:
        super().__init__()
        self.steps, self.width = steps, width
        self.inputs = nn.Linear(width, 8 * width)
        self.states = nn.Linear(width, 8 * width)

    def forward(self, x: Tensor) -> Tensor:
        h, c = torch.zeros(1, self.width), torch.zeros(1, self.width)
        out = torch.zeros(self.steps, 1, self.width)
        for t in range(self.steps):
            a, b = self.inputs(x[t]).chunk(8, 1), self.states(h).chunk(8, 1)
            one = torch.sigmoid(a[0] + b[0])
            two = torch.relu(a[1] + b[1])
            three = torch.sigmoid(a[2] + b[2])
            four = torch.relu(a[3] * b[3])
            five = torch.tanh(a[4] + b[4])
            six = torch.sigmoid(a[5] + b[5])
            seven = torch.tanh(a[6] + b[6])
            eight = torch.sigmoid(a[7] + b[7])
            left, right = torch.tanh(one * two), torch.tanh(three + four)
            low, high = torch.tanh(five * six), torch.sigmoid(seven + eight)
            c = torch.tanh((left + c) * right)
            h = torch.tanh(c * (low + high))
            out[t] = h
        return out


class Lstm(nn.Module):
    def __init__(self, width: int, steps: int) -> None:
        super().__init__()
        self.steps, self.width = steps, width
        self.cell = nn.LSTMCell(width, width)

    def forward(self, x: Tensor) -> Tensor:
        h, c = torch.zeros(1, self.width), torch.zeros(1, self.width)
        out = torch.zeros(self.steps, 1, self.width)
        for t in range(self.steps):
            h, c = self.cell(x[t], (h, c))
            out[t] = h
        return out


class Seq2Seq(nn.Module):
    """Reads a sequence, then writes one, each word chosen by what was written before."""

    def __init__(self, width: int, words: int, steps: int) -> None:
        super().__init__()
        self.steps, self.width = steps, width
        self.encoder, self.decoder = nn.LSTMCell(width, width), nn.LSTMCell(width, width)
        self.embedding, self.words = nn.Embedding(words, width), nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        h, c = torch.zeros(1, self.width), torch.zeros(1, self.width)
        for t in range(self.steps):
            h, c = self.encoder(x[t], (h, c))
        written = torch.zeros(self.steps, 1, dtype=torch.int64)
        word = torch.zeros(1, dtype=torch.int64)
        for t in range(self.steps):
            h, c = self.decoder(self.embedding(word), (h, c))
            word = self.words(h).argmax(1)
            written[t] = word
        return written


class Attention(nn.Module):
    """Tokens one by one, each over all that came before: keys and values are written into tables."""

    def __init__(self, heads: int, width: int, steps: int) -> None:
        super().__init__()
        self.steps, self.heads, self.width = steps, heads, width
        self.queries = nn.Linear(heads * width, 3 * heads * width)

    def forward(self, x: Tensor) -> Tensor:
        keys = torch.zeros(self.steps, self.heads, self.width)
        values = torch.zeros(self.steps, self.heads, self.width)
        out = torch.zeros(self.steps, self.heads * self.width)
        places = torch.arange(self.steps)
        for t in range(self.steps):
            q, k, v = self.queries(x[t]).view(3, self.heads, self.width).unbind(0)
            keys[t] = k
            values[t] = v
            scores = (keys * q).sum(-1) / self.width**0.5
            scores = scores.masked_fill((places > t)[:, None], float("-inf"))
            out[t] = (scores.softmax(0)[..., None] * values).sum(0).flatten()
        return out


class Suppression(nn.Module):
    """Suppression that ends when no box is left: scores are struck out where they are."""

    def forward(self, boxes: Tensor, given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = given.clone()
        areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
        kept = torch.zeros(boxes.shape[0], dtype=torch.int64)
        found = torch.zeros(boxes.shape[0])
        count = torch.zeros((), dtype=torch.int64)
        while scores.max() > 0.05:
            best = scores.argmax()
            kept[count] = best
            found[count] = scores[best]
            box = boxes[best]
            size = (torch.minimum(boxes[:, 2:], box[2:]) - torch.maximum(boxes[:, :2], box[:2])).clamp(min=0.0)
            both = size[:, 0] * size[:, 1]
            scores[both / (areas + areas[best] - both + 1e-6) > 0.5] = 0.0
            scores[best] = 0.0
            count = count + 1
        return kept, found, count


class Writer(nn.Module):
    """Writes words until one that ends the text, keys and values of all before in tables that it writes."""

    def __init__(self, width: int, words: int, steps: int) -> None:
        super().__init__()
        self.steps, self.width = steps, width
        self.embedding, self.words = nn.Embedding(words, width), nn.Linear(width, words)
        self.inner = nn.Linear(width, 3 * width)

    def forward(self, word: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = torch.zeros(self.steps, self.width), torch.zeros(self.steps, self.width)
        written = torch.zeros(self.steps, dtype=torch.int64)
        places = torch.arange(self.steps)
        count = torch.zeros((), dtype=torch.int64)
        while word != 0 and count < self.steps:
            q, k, v = self.inner(self.embedding(word)).chunk(3)
            keys[count] = k
            values[count] = v
            scores = (keys @ q / self.width**0.5).masked_fill(places > count, float("-inf"))
            word = self.words(scores.softmax(0) @ values).argmax()
            written[count] = word
            count = count + 1
        return written, count


class Levels(nn.Module):
    """Levels of a detector one by one; where one finds anything, its boxes are decoded in place, else struck out."""

    def forward(self, *levels: Tensor) -> Tensor:
        out = torch.zeros(len(levels), 5, 400)
        for k, level in enumerate(levels):
            view = out[k]
            view.copy_(level)
            if view[4].max() > 2.5:
                view[2:4].exp_()
                view[0:2] -= view[2:4] * 0.5
                view[2:4] += view[0:2]
            else:
                view[:4].zero_()
            view[4].sigmoid_()
        return out


def _yolo() -> Program:
    sizes = (13, 26, 52)
    return YoloV3(sizes), tuple(torch.randn(1, 3 * (CLASSES + 5), n, n) for n in sizes)


def _ssd() -> Program:
    return Priors(8732), (torch.randn(1, 8732, 4), torch.randn(1, 8732, CLASSES + 1))


def _yolact() -> Program:
    count = 19248
    return Yolact(count), (torch.randn(1, count, 4), torch.randn(1, count, CLASSES + 1), torch.randn(1, count, 32),
                           torch.randn(1, 138, 138, 32))  # fmt: skip


def _fcos() -> Program:
    sizes = ((100, 152), (50, 76), (25, 38), (13, 19), (7, 10))
    return Fcos(sizes), tuple(torch.randn(1, CLASSES + 5, *size) * 0.1 for size in sizes)


def _whole(head: Callable[[], Program]) -> Program:
    module, inputs = head()
    return Whole(module), inputs


WIDTH, STEPS = 256, 100
PROGRAMS: dict[str, Callable[[], Program]] = {
    "yolov3": _yolo,
    "ssd": _ssd,
    "yolact": _yolact,
    "fcos": _fcos,
    "yolov3-whole": lambda: _whole(_yolo),
    "ssd-whole": lambda: _whole(_ssd),
    "yolact-whole": lambda: _whole(_yolact),
    "fcos-whole": lambda: _whole(_fcos),
    "nasrnn": lambda: (NasRnn(WIDTH, STEPS), (torch.randn(STEPS, 1, WIDTH),)),
    "lstm": lambda: (Lstm(WIDTH, STEPS), (torch.randn(STEPS, 1, WIDTH),)),
    "seq2seq": lambda: (Seq2Seq(WIDTH, 1000, STEPS), (torch.randn(STEPS, 1, WIDTH),)),
    "attention": lambda: (Attention(8, 64, STEPS), (torch.randn(STEPS, 512),)),
}


def _boxes() -> tuple[Tensor, Tensor]:
    corners = torch.rand(KEPT, 2)
    return torch.cat([corners, corners + torch.rand(KEPT, 2) * 0.4], 1), torch.rand(KEPT)


CONTROLLED: dict[str, Callable[[], Program]] = {  # what data decide: none of the paper's own, all of its kind
    "suppression": lambda: (Suppression(), _boxes()),
    "writer": lambda: (Writer(WIDTH, 1000, STEPS), (torch.ones((), dtype=torch.int64),)),
    "levels": lambda: (Levels(), tuple(torch.randn(5, 400) * scale for scale in (0.5, 1.0, 0.2, 1.5, 0.7))),
}
