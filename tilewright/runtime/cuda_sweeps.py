"""Parts of sweeps on a real GPU: three streams and two threads of the host, with events where one waits for another."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tilewright.runtime.cuda_device import DeviceMemory, HostMemory, check, current, require_memory
from tilewright.runtime.sweep_order import ON_HOST, SLOTS, Queue, Slices, SweepStep

if TYPE_CHECKING:
    from tilewright.runtime.cuda_graph import LaunchGraph
    from tilewright.runtime.gpu_model import GpuModelImage
    from tilewright.runtime.swept import Bytes, Course, Moved, SweptResult

_START = 256  # bytes at which arrays of a slot begin
_STREAMS = (Queue.UP, Queue.RUN, Queue.DOWN)


class SweepLane(Protocol):
    """The launches of a model in an arena."""

    @property
    def graph(self) -> LaunchGraph: ...
    def close(self) -> None: ...


class DeviceModel(Protocol):
    """A model on the device."""

    @property
    def context(self) -> Any: ...
    @property
    def image(self) -> GpuModelImage: ...
    def lane_in(self, arena: int) -> SweepLane: ...


class CudaSweeps:
    """Models of which each runs some parts: they share one arena, and slots for what goes in and out. It is kept from
    run to run; calls from several threads take turns."""

    def __init__(self, models: Sequence[DeviceModel]) -> None:
        self._models = tuple(models)
        self._lock = threading.Lock()
        self._room: _Room | None = None

    def sweep(self, course: Course, pack: Moved, unpack: Moved) -> None:
        with self._lock, current(self._models[0].context):
            if self._room is None:
                self._room = _Room(self._models)
            _Run(self._room, self._models, course, pack, unpack).run()

    def rest(self) -> None:
        """Gives memory back until the next run."""
        with self._lock:
            room, self._room = self._room, None
            if room is not None:
                with current(self._models[0].context):
                    room.close()


class _Room:
    """What is there as long as parts run: one arena, slots on both sides of the link, a graph a model and slot."""

    def __init__(self, models: Sequence[DeviceModel]) -> None:
        from cuda.bindings import driver

        self._driver = driver
        images = [model.image for model in models]
        context = models[0].context
        arena = max(image.arena_bytes for image in images)
        takes = max(_places(image.input_bytes)[-1] for image in images)
        gives = max(_places(image.output_bytes)[-1] for image in images)
        require_memory(arena + SLOTS * (takes + gives), "a model in sweeps")
        self.arena = DeviceMemory(arena, context)
        self.takes = [DeviceMemory(takes, context, "a part's inputs") for _ in range(SLOTS)]
        self.gives = [DeviceMemory(gives, context, "a part's results") for _ in range(SLOTS)]
        self.pinned = HostMemory({slot: takes if slot < SLOTS else gives for slot in range(2 * SLOTS)}, context)
        self._sizes = takes, gives
        self.streams = {queue: check(driver.cuStreamCreate(_no_wait(driver)))[0] for queue in _STREAMS}
        self._events: list[Any] = []
        self.lanes: dict[tuple[int, int], SweepLane] = {}

    def host(self, slot: int, is_result: bool) -> Bytes:
        """Pinned bytes of a slot."""
        address = self.pinned.addresses[slot + SLOTS * is_result]
        size = max(1, self._sizes[is_result])
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))

    def event(self, number: int) -> Any:
        """One for each step, used again in later runs."""
        flags = int(self._driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        while len(self._events) <= number:
            self._events.append(check(self._driver.cuEventCreate(flags))[0])
        return self._events[number]

    def close(self) -> None:
        check(self._driver.cuCtxSynchronize())
        for lane in self.lanes.values():
            lane.close()
        for event in self._events:
            check(self._driver.cuEventDestroy(event))
        for stream in self.streams.values():
            check(self._driver.cuStreamDestroy(stream))
        held: list[DeviceMemory | HostMemory] = [self.arena, *self.takes, *self.gives, self.pinned]
        for memory in held:
            memory.close()


class _Run:
    """One run. Streams get their steps from this thread, in order; whatever waits for the host waits here for it."""

    def __init__(self, room: _Room, models: Sequence[DeviceModel], course: Course, pack: Moved, unpack: Moved) -> None:
        from cuda.bindings import driver

        self._driver, self._room, self._models, self._course = driver, room, models, course
        self._moved = {Queue.PACK: pack, Queue.UNPACK: unpack}
        self._context = models[0].context
        self._done: dict[int, Future[None]] = {}  # of the host's steps
        steps = course.steps
        self._told = {n for step in steps for n in step.waits if steps[n].queue not in ON_HOST}

    def run(self) -> None:
        with ThreadPoolExecutor(1, "tilewright-pack") as packs, ThreadPoolExecutor(1, "tilewright-unpack") as unpacks:
            pools = {Queue.PACK: packs, Queue.UNPACK: unpacks}
            try:
                for number, step in enumerate(self._course.steps):
                    if step.queue in ON_HOST:
                        self._done[number] = pools[step.queue].submit(self._on_host, step)
                    else:
                        self._on_stream(number, step)
                for future in self._done.values():
                    future.result()
            finally:  # whatever happened: nobody writes into slots any more
                for stream in self._room.streams.values():
                    check(self._driver.cuStreamSynchronize(stream))

    def _on_host(self, step: SweepStep) -> None:
        with current(self._context):
            for each in step.waits:
                if each in self._done:
                    self._done[each].result()
                else:
                    check(self._driver.cuEventSynchronize(self._room.event(each)))
        is_result = step.queue is Queue.UNPACK
        sizes = self._fetched(step.part) if is_result else self._image(step.part).input_bytes
        whole, places = self._room.host(step.slot, is_result), _places(sizes)
        self._moved[step.queue](step.part, [whole[a : a + size] for a, size in zip(places, sizes, strict=False)])

    def _on_stream(self, number: int, step: SweepStep) -> None:
        stream = self._room.streams[step.queue]
        for each in step.waits:
            if each in self._done:
                self._done[each].result()
            else:
                check(self._driver.cuStreamWaitEvent(stream, self._room.event(each), 0))
        do: Callable[[SweepStep, int], None] = {Queue.UP: self._up, Queue.RUN: self._compute, Queue.DOWN: self._down}[
            step.queue
        ]
        do(step, int(stream))
        if number in self._told:
            check(self._driver.cuEventRecord(self._room.event(number), stream))

    def _up(self, step: SweepStep, stream: int) -> None:
        sizes = self._image(step.part).input_bytes
        here, there = self._room.pinned.addresses[step.slot], self._room.takes[step.slot].pointer
        for at, size in zip(_places(sizes), sizes, strict=False):
            if size:
                check(self._driver.cuMemcpyHtoDAsync(there + at, here + at, size, stream))

    def _compute(self, step: SweepStep, stream: int) -> None:
        kind = self._course.passages[step.part].kind
        model, image = self._models[kind], self._image(step.part)
        if (kind, step.slot) not in self._room.lanes:
            self._room.lanes[kind, step.slot] = model.lane_in(self._room.arena.pointer)
        taken = [self._room.takes[step.slot].pointer + at for at in _places(image.input_bytes)[:-1]]
        given = [self._room.gives[step.slot].pointer + at for at in _places(image.output_bytes)[:-1]]
        self._room.lanes[kind, step.slot].graph.launch(stream, (*taken, *given))

    def _down(self, step: SweepStep, stream: int) -> None:
        """Of every result what goes back, in one piece."""
        there, sizes = self._room.gives[step.slot].pointer, self._image(step.part).output_bytes
        here = self._room.pinned.addresses[step.slot + SLOTS]
        fetched = _places(self._fetched(step.part))
        for (result, own), source, target in zip(self._course.gives[step.part], _places(sizes), fetched, strict=False):
            for begin, to, about in _boxes(result, own):
                self._fetch(there + source + begin, here + target + to, about, stream)

    def _fetch(self, source: int, target: int, about: _Box, stream: int) -> None:
        width, height, depth, pitch, rows = about
        if not width * height * depth:
            return
        if height == depth == 1:
            check(self._driver.cuMemcpyDtoHAsync(target, source, width, stream))
            return
        kinds, copy = self._driver.CUmemorytype, self._driver.CUDA_MEMCPY3D()
        copy.srcMemoryType, copy.srcDevice = kinds.CU_MEMORYTYPE_DEVICE, source
        copy.srcPitch, copy.srcHeight = pitch, rows
        copy.dstMemoryType, copy.dstHost = kinds.CU_MEMORYTYPE_HOST, target
        copy.dstPitch, copy.dstHeight = width, height
        copy.WidthInBytes, copy.Height, copy.Depth = width, height, depth
        check(self._driver.cuMemcpy3DAsync(copy, stream))

    def _image(self, part: int) -> GpuModelImage:
        return self._models[self._course.passages[part].kind].image

    def _fetched(self, part: int) -> list[int]:
        """Bytes of each result that go back."""
        return [prod(at.stop - at.start for at in own) * r.dtype.itemsize for r, own in self._course.gives[part]]


_Box = tuple[int, int, int, int, int]  # bytes of a row, rows, layers; bytes from row to row, rows from layer to layer


def _boxes(result: SweptResult, own: Slices) -> Iterator[tuple[int, int, _Box]]:
    """A part of an array as boxes of three dimensions: where each begins, and where it goes where nothing lies in
    between."""
    spans = [(at.start, at.stop - at.start, extent) for at, extent in zip(own, result.shape, strict=True)]
    joined: list[tuple[int, int, int]] = [(0, result.dtype.itemsize, result.dtype.itemsize)]  # the innermost first
    for first, count, extent in reversed(spans):
        begin, wide, whole = joined[-1]
        if wide == whole:  # all of what is inside: it is one dimension with it
            joined[-1] = first * whole, count * whole, extent * whole
        else:
            joined.append((first, count, extent))
    while len(joined) < 3:
        joined.append((0, 1, 1))
    (x, width, pitch), (y, height, rows), (z, depth, layers), *outer = joined
    size = width * height * depth
    about = (width, height, depth, pitch, rows)
    begin = x + pitch * (y + rows * z)
    strides = list(accumulate((n for _, _, n in outer), lambda a, b: a * b, initial=pitch * rows * layers))
    counts = [count for _, count, _ in outer]
    start = begin + sum(first * stride for (first, _, _), stride in zip(outer, strides, strict=False))
    for number, place in enumerate(np.ndindex(*reversed(counts))):
        yield start + sum(n * s for n, s in zip(reversed(place), strides, strict=False)), number * size, about


def _places(sizes: Sequence[int]) -> list[int]:
    """Where arrays begin one behind the other, and where all end."""
    return list(accumulate((-(-size // _START) * _START for size in sizes), initial=0))


def _no_wait(driver: Any) -> int:
    """Streams that are in no order with the default one."""
    return int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
