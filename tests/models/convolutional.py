"""Networks built of the blocks that well-known ones for images have, written small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Built = tuple[nn.Module, dict[str, Any]]


def unit(given: int, made: int, kernel: int = 3, stride: int = 1, groups: int = 1, act: type[nn.Module] = nn.ReLU,
         dilation: int = 1) -> nn.Sequential:  # fmt: skip
    pad = dilation * (kernel // 2)
    return nn.Sequential(
        nn.Conv2d(given, made, kernel, stride, pad, dilation, groups, bias=False), nn.BatchNorm2d(made), act()
    )


class Both(nn.Module):
    """What branches give, beside each other or added up."""

    def __init__(self, *branches: nn.Module, add: bool = False) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)
        self.add = add

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = [branch(x) for branch in self.branches]
        if not self.add:
            return torch.cat(found, 1)
        return torch.stack(found).sum(0) if len(found) > 2 else found[0] + found[1]


class Excite(nn.Module):
    """Squeeze and excitation."""

    def __init__(self, channels: int, inner: int, gate: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.down, self.up, self.gate = nn.Conv2d(channels, inner, 1), nn.Conv2d(inner, channels, 1), gate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = functional.adaptive_avg_pool2d(x, 1)
        return x * self.gate(self.up(functional.relu(self.down(scale))))


class Shuffle(nn.Module):
    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, c, h, w = x.shape
        return x.view(n, self.groups, c // self.groups, h, w).transpose(1, 2).reshape(n, c, h, w)


class Halves(nn.Module):
    """One half of the channels as it is, the other through a branch, shuffled."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch, self.shuffle = branch, Shuffle(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept, changed = x.chunk(2, 1)
        return self.shuffle(torch.cat((kept, self.branch(changed)), 1))


def inverted(given: int, made: int, expansion: int, kernel: int, stride: int, act: type[nn.Module],
             excite: bool = False) -> nn.Module:  # fmt: skip
    wide = given * expansion
    layers: list[nn.Module] = [unit(given, wide, 1, act=act), unit(wide, wide, kernel, stride, wide, act)]
    if excite:
        layers.append(Excite(wide, max(8, wide // 4), functional.hardsigmoid))
    layers.append(unit(wide, made, 1, act=nn.Identity))
    block = nn.Sequential(*layers)
    return Both(nn.Identity(), block, add=True) if given == made and stride == 1 else block


def head(channels: int, classes: int = 37) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def alexnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Conv2d(32, 96, 5, padding=2), nn.ReLU(),
        nn.MaxPool2d(3, 2), nn.Conv2d(96, 128, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d((3, 2)), nn.Flatten(),
        nn.Linear(768, 200), nn.ReLU(), nn.Linear(200, 37),
    )  # fmt: skip


def vgg() -> nn.Module:
    layers: list[nn.Module] = []
    given = 3
    for made in (16, 32, 64, 72):
        layers += [unit(given, made), unit(made, made), nn.MaxPool2d(2)]
        given = made
    return nn.Sequential(*layers, head(given))


def squeezenet() -> nn.Module:
    def fire(given: int, squeezed: int, made: int) -> nn.Module:
        return nn.Sequential(unit(given, squeezed, 1), Both(unit(squeezed, made, 1), unit(squeezed, made, 3)))

    pool = nn.MaxPool2d(3, 2, ceil_mode=True)
    return nn.Sequential(unit(3, 40, 7, 2), pool, fire(40, 16, 32), fire(64, 16, 32), pool, fire(64, 24, 48), head(96))


def densenet() -> nn.Module:
    layers: list[nn.Module] = [unit(3, 24, 7, 2), nn.MaxPool2d(3, 2, 1)]
    channels = 24
    for _ in range(2):
        for _ in range(4):
            grown = nn.Conv2d(48, 12, 3, padding=1)
            grown_from = nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(), unit(channels, 48, 1))
            layers.append(Both(nn.Identity(), nn.Sequential(grown_from, grown)))
            channels += 12
        layers += [unit(channels, channels // 2, 1), nn.AvgPool2d(2)]
        channels //= 2
    return nn.Sequential(*layers, head(channels))


def googlenet() -> nn.Module:
    def inception(given: int) -> nn.Module:
        return Both(unit(given, 24, 1), nn.Sequential(unit(given, 16, 1), unit(16, 32)),
                    nn.Sequential(unit(given, 8, 1), unit(8, 16, 5)),
                    nn.Sequential(nn.MaxPool2d(3, 1, 1), unit(given, 16, 1)))  # fmt: skip

    return nn.Sequential(unit(3, 32, 7, 2), nn.MaxPool2d(3, 2, 1), inception(32), inception(88),
                         nn.MaxPool2d(3, 2, 1), inception(88), head(88))  # fmt: skip


def inception_v3() -> nn.Module:
    def line(given: int, made: int, size: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(given, made, (1, size), padding=(0, size // 2)), nn.ReLU(),
                             nn.Conv2d(made, made, (size, 1), padding=(size // 2, 0)), nn.ReLU())  # fmt: skip

    block = Both(unit(48, 32, 1), line(48, 40, 7), nn.Sequential(nn.AvgPool2d(3, 1, 1), unit(48, 24, 1)))
    return nn.Sequential(unit(3, 32, 3, 2), unit(32, 48), block, unit(96, 64, 3, 2), line(64, 72, 3), head(72))


def mobilenet_v3() -> nn.Module:
    rows = ((16, 16, 1, 3, 2, nn.ReLU, True), (16, 24, 4, 3, 2, nn.ReLU, False), (24, 24, 4, 3, 1, nn.ReLU, False),
            (24, 40, 4, 5, 2, nn.Hardswish, True), (40, 40, 6, 5, 1, nn.Hardswish, True))  # fmt: skip
    return nn.Sequential(unit(3, 16, 3, 2, act=nn.Hardswish), *(inverted(*row) for row in rows), head(40))


def mnasnet() -> nn.Module:
    rows = ((16, 24, 3, 3, 2), (24, 24, 3, 3, 1), (24, 40, 3, 5, 2), (40, 40, 6, 5, 1), (40, 80, 6, 5, 2))
    return nn.Sequential(unit(3, 32, 3, 2), unit(32, 32, groups=32), unit(32, 16, 1, act=nn.Identity),
                         *(inverted(*row, nn.ReLU) for row in rows), head(80))  # fmt: skip


def efficientnet() -> nn.Module:
    rows = ((24, 24, 1, 3, 1), (24, 32, 4, 3, 2), (32, 32, 4, 5, 1), (32, 56, 6, 5, 2), (56, 56, 6, 3, 1))
    return nn.Sequential(unit(3, 24, 3, 2, act=nn.SiLU), *(inverted(*row, nn.SiLU, True) for row in rows), head(56))


def efficientnet_v2() -> nn.Module:
    fused = nn.Sequential(unit(24, 96, 3, 2, act=nn.SiLU), unit(96, 40, 1, act=nn.Identity))
    again = Both(nn.Identity(), nn.Sequential(unit(40, 160, act=nn.SiLU), unit(160, 40, 1, act=nn.Identity)), add=True)
    last = inverted(40, 64, 4, 3, 2, nn.SiLU, True)
    return nn.Sequential(unit(3, 24, 3, 2, act=nn.SiLU), fused, again, last, head(64))


def shufflenet() -> nn.Module:
    def branch(channels: int) -> nn.Module:
        return nn.Sequential(unit(channels, channels, 1), unit(channels, channels, 3, 1, channels, nn.Identity),
                             unit(channels, channels, 1))  # fmt: skip

    down = Both(nn.Sequential(unit(24, 24, 3, 2, 24), unit(24, 48, 1)),
                nn.Sequential(unit(24, 48, 1), unit(48, 48, 3, 2, 48), unit(48, 48, 1)))  # fmt: skip
    return nn.Sequential(unit(3, 24, 3, 2), nn.MaxPool2d(3, 2, 1), down, Shuffle(2), Halves(branch(48)),
                         Halves(branch(48)), unit(96, 128, 1), head(128))  # fmt: skip


def resnext() -> nn.Module:
    def block(given: int, made: int, stride: int) -> nn.Module:
        inner = nn.Sequential(unit(given, made // 2, 1), unit(made // 2, made // 2, 3, stride, 8),
                              unit(made // 2, made, 1, act=nn.Identity))  # fmt: skip
        return nn.Sequential(Both(inner, unit(given, made, 1, stride, act=nn.Identity), add=True), nn.ReLU())

    return nn.Sequential(unit(3, 32, 7, 2), nn.MaxPool2d(3, 2, 1), block(32, 64, 1), block(64, 128, 2), head(128))


def wide_resnet() -> nn.Module:
    def block(channels: int) -> nn.Module:
        inner = nn.Sequential(unit(channels, 2 * channels, 1), unit(2 * channels, 2 * channels),
                              unit(2 * channels, channels, 1, act=nn.Identity))  # fmt: skip
        return nn.Sequential(Both(nn.Identity(), inner, add=True), nn.ReLU())

    return nn.Sequential(unit(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1), block(64), block(64), head(64))


class Deeplab(nn.Module):
    """Atrous pyramid over what a backbone gives, brought back to the size of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(unit(3, 24, 3, 2), unit(24, 48, 3, 2), unit(48, 64))
        self.pyramid = nn.ModuleList([unit(64, 32, 1), *(unit(64, 32, dilation=d) for d in (2, 4, 6))])
        self.pooled = unit(64, 32, 1)
        self.classify = nn.Conv2d(160, 21, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        deep = self.backbone(x)
        pooled = self.pooled(functional.adaptive_avg_pool2d(deep, 1))
        parts = [*(p(deep) for p in self.pyramid),
                 functional.interpolate(pooled, size=deep.shape[-2:], mode="bilinear", align_corners=False)]
        return functional.interpolate(self.classify(torch.cat(parts, 1)), size=x.shape[-2:], mode="bilinear")


class Pyramid(nn.Module):
    """A feature pyramid with heads for classes and boxes at every level, as detectors have."""

    def __init__(self) -> None:
        super().__init__()
        widths = (24, 48, 72)
        given = (3, *widths[:-1])
        pairs = zip(given, widths, strict=True)
        self.down = nn.ModuleList([nn.Sequential(unit(g, w, 3, 2), unit(w, w)) for g, w in pairs])
        self.sides = nn.ModuleList([nn.Conv2d(w, 40, 1) for w in widths])
        self.smooth = nn.ModuleList([nn.Conv2d(40, 40, 3, padding=1) for _ in widths])
        self.classes = nn.Sequential(unit(40, 40), nn.Conv2d(40, 3 * 7, 3, padding=1))
        self.boxes = nn.Sequential(unit(40, 40), nn.Conv2d(40, 3 * 4, 3, padding=1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        levels = []
        for layer in self.down:
            x = layer(x)
            levels.append(x)
        above = self.sides[-1](levels[-1])
        merged = [above]
        for side, level in zip(reversed(self.sides[:-1]), reversed(levels[:-1]), strict=True):
            above = side(level) + functional.interpolate(above, size=level.shape[-2:], mode="nearest")
            merged.append(above)
        merged = [smooth(m) for smooth, m in zip(self.smooth, merged, strict=True)]
        classes = torch.cat([self.classes(m).flatten(2) for m in merged], 2)
        return classes.sigmoid(), torch.cat([self.boxes(m).flatten(2) for m in merged], 2)


class Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Sequential(unit(a, b), unit(b, b)) for a, b in ((3, 16), (16, 32), (32, 64))])
        self.up = nn.ModuleList([nn.ConvTranspose2d(64, 32, 2, 2), nn.ConvTranspose2d(32, 16, 2, 2)])
        self.join = nn.ModuleList([unit(64, 32), unit(32, 16)])
        self.last = nn.Conv2d(16, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for number, layer in enumerate(self.down):
            x = layer(functional.max_pool2d(x, 2) if number else x)
            kept.append(x)
        for up, join, side in zip(self.up, self.join, reversed(kept[:-1]), strict=True):
            x = join(torch.cat((side, up(x)), 1))
        return self.last(x)


class Yolo(nn.Module):
    """Cross-stage blocks, a pooled pyramid and a head of three scales."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(unit(3, 16, 3, 2, act=nn.SiLU), unit(16, 32, 3, 2, act=nn.SiLU))
        self.split = unit(32, 32, 1, act=nn.SiLU)
        self.inner = nn.Sequential(unit(16, 16, act=nn.SiLU), unit(16, 16, act=nn.SiLU))
        self.down = unit(48, 64, 3, 2, act=nn.SiLU)
        self.narrow, self.widen = unit(64, 32, 1, act=nn.SiLU), unit(128, 64, 1, act=nn.SiLU)
        self.heads = nn.ModuleList([nn.Conv2d(112, 18, 1), nn.Conv2d(64, 18, 1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.split(self.stem(x)).chunk(2, 1)
        near = torch.cat((first, second, second + self.inner(second)), 1)
        far = self.narrow(self.down(near))
        pools = [far]
        for _ in range(3):
            pools.append(functional.max_pool2d(pools[-1], 5, 1, 2))
        far = self.widen(torch.cat(pools, 1))
        raised = functional.interpolate(far, scale_factor=2.0, mode="nearest")
        found = [self.heads[0](torch.cat((near, raised), 1)), self.heads[1](far)]
        return torch.cat([f.flatten(2).sigmoid() for f in found], 2)


class Recurrent(nn.Module):
    """A reader of text lines: convolutions, then a recurrence in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.see = nn.Sequential(unit(1, 24), nn.MaxPool2d(2), unit(24, 48), nn.MaxPool2d((2, 1)), unit(48, 64))
        self.read = nn.LSTM(64 * 8, 56, 2, bidirectional=True, batch_first=True)
        self.spell = nn.Linear(112, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.see(x)
        lines, _ = self.read(seen.flatten(1, 2).transpose(1, 2))
        return self.spell(lines).log_softmax(-1)


class Enlarge(nn.Module):
    """An image enlarged by pixels of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            unit(3, 40, 5, act=nn.Tanh), unit(40, 24, 3, act=nn.Tanh), nn.Conv2d(24, 27, 3, padding=1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.pixel_shuffle(self.layers(x), 3)


class Moving(nn.Module):
    """Windows in three dimensions over a video."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv3d(3, 24, (1, 7, 7), (1, 2, 2), (0, 3, 3)), nn.ReLU(),
            nn.Conv3d(24, 32, (3, 1, 1), padding=(1, 0, 0)), nn.BatchNorm3d(32), nn.ReLU(),
            nn.Conv3d(32, 48, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(),
            nn.Linear(48, 17),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Whole(nn.Module):
    """A network by one name of its argument."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> Any:
        return self.network(x)


def _network(make: Callable[[], nn.Module], *shape: int) -> Callable[[], Built]:
    return lambda: (Whole(make()), {"x": torch.randn(*shape)})


NETWORKS: dict[str, Callable[[], Built]] = {
    "alexnet": _network(alexnet, 1, 3, 131, 99), "vgg": _network(vgg, 1, 3, 97, 65),
    "squeezenet": _network(squeezenet, 1, 3, 97, 65), "densenet": _network(densenet, 1, 3, 97, 65),
    "googlenet": _network(googlenet, 1, 3, 97, 65), "inception-v3": _network(inception_v3, 1, 3, 97, 65),
    "mobilenet-v3": _network(mobilenet_v3, 1, 3, 129, 97), "mnasnet": _network(mnasnet, 1, 3, 129, 97),
    "efficientnet": _network(efficientnet, 1, 3, 129, 97), "efficientnet-v2": _network(efficientnet_v2, 1, 3, 129, 97),
    "shufflenet": _network(shufflenet, 1, 3, 129, 97), "resnext": _network(resnext, 2, 3, 97, 65),
    "wide-resnet": _network(wide_resnet, 1, 3, 97, 65), "deeplab": _network(Deeplab, 1, 3, 97, 65),
    "pyramid": _network(Pyramid, 1, 3, 128, 96), "unet": _network(Unet, 1, 3, 72, 56),
    "yolo": _network(Yolo, 1, 3, 128, 96), "text-lines": _network(Recurrent, 1, 1, 32, 90),
    "enlarge": _network(Enlarge, 1, 3, 61, 43), "video": _network(Moving, 1, 3, 9, 56, 56),
}  # fmt: skip
