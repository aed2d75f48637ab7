"""A convolutional network over an image larger than a device's memory as one writes it by hand in PyTorch: tiles with
halos, pinned buffers, three streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_SLOTS = 2


@dataclass(frozen=True)
class Tile:
    """Of one dimension: what is read, what of it is kept, and where that belongs, the last two in results."""

    read: slice
    kept: slice
    left: slice


def tiles(size: int, count: int, halo: int, stride: int) -> list[Tile]:
    """`stride` pixels make one of the results; the halo is a multiple of what the network divides by."""
    found = []
    for number in range(count):
        begin, end = size * number // count, size * (number + 1) // count
        first, last = max(0, begin - halo), min(size, end + halo)
        kept = slice((begin - first) // stride, (end - first) // stride)
        found.append(Tile(slice(first, last), kept, slice(begin // stride, end // stride)))
    return found


class HandTiled:
    """Copies of the next tile and of the last results run beside the network's kernels, on streams of their own."""

    def __init__(self, module: nn.Module, halo: int, stride: int, count: int = 4, device: str = "cuda") -> None:
        self.module, self.halo, self.stride, self.count, self.device = module.to(device), halo, stride, count, device
        self._streams = [torch.cuda.Stream() for _ in range(3)] if device == "cuda" else []
        self._pinned: dict[tuple[str, int], torch.Tensor] = {}

    @torch.no_grad()
    def __call__(self, image: torch.Tensor, result: torch.Tensor) -> None:
        """Fills `result`; both lie on the host."""
        places = list(self._places(image))
        taken: list[Any] = [None] * len(places)  # events of each tile: brought, computed, back
        fetched: list[tuple[torch.Tensor, Any, Any]] = []
        up, run, down = self._streams or (None, None, None)
        for number, (rows, columns) in enumerate(places):
            if number >= _SLOTS:
                self._wait(taken[number - _SLOTS])
            staged = self._staged("in", number, image[:, :, rows.read, columns.read].shape, image.dtype)
            staged.copy_(image[:, :, rows.read, columns.read])
            with self._on(up):
                tile = staged.to(self.device, non_blocking=True)
                taken[number] = self._event(up)
            with self._on(run):
                self._after(run, taken[number])
                given = self.module(tile.contiguous(memory_format=torch.channels_last))
                given = given[:, :, rows.kept, columns.kept].contiguous()
                done = self._event(run)
                self._record(tile, run)
            if len(fetched) == _SLOTS:
                self._leave(result, *fetched.pop(0))
            with self._on(down):
                self._after(down, done)
                back = self._staged("out", number, given.shape, given.dtype)
                back.copy_(given, non_blocking=True)
                self._record(given, down)
                fetched.append((back, (rows, columns), self._event(down)))
        for each in fetched:
            self._leave(result, *each)

    def _places(self, image: torch.Tensor) -> Iterator[tuple[Tile, Tile]]:
        height, width = image.shape[2:]
        for rows in tiles(height, self.count, self.halo, self.stride):
            for columns in tiles(width, self.count, self.halo, self.stride):
                yield rows, columns

    def _staged(self, way: str, number: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        key, size = (way, number % _SLOTS), torch.Size(shape).numel()
        if key not in self._pinned or self._pinned[key].numel() < size:
            self._pinned[key] = torch.empty(size, dtype=dtype, pin_memory=self.device == "cuda")
        return self._pinned[key][:size].view(*shape)

    def _leave(self, result: torch.Tensor, back: torch.Tensor, place: tuple[Tile, Tile], event: Any) -> None:
        self._wait(event)
        result[:, :, place[0].left, place[1].left].copy_(back)

    # --- nothing of which there is on a CPU

    def _on(self, stream: Any) -> AbstractContextManager[object]:
        return nullcontext() if stream is None else torch.cuda.stream(stream)

    def _event(self, stream: Any) -> Any:
        return None if stream is None else stream.record_event()

    def _after(self, stream: Any, event: Any) -> None:
        if stream is not None:
            stream.wait_event(event)

    def _wait(self, event: Any) -> None:
        if event is not None:
            event.synchronize()

    def _record(self, tensor: torch.Tensor, stream: Any) -> None:
        """Its memory is not given to others before the stream is done with it."""
        if stream is not None:
            tensor.record_stream(stream)
