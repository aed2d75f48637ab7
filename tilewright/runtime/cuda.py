"""A model on a real GPU: weights stay there, and a run is one launch of a CUDA graph on the caller's stream."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from tilewright.runtime.cache import Cache
from tilewright.runtime.cuda_device import (
    CudaDevice,
    CudaError,
    DeviceMemory,
    HostMemory,
    capability,
    check,
    current,
    devices,
    open_device,
    require_memory,
    zeroed_memory,
)
from tilewright.runtime.cuda_graph import MEETING_BYTES, LaunchGraph, Pointers
from tilewright.runtime.cuda_sweeps import CudaSweeps
from tilewright.runtime.device_arrays import (
    ExpectedArray,
    Libraries,
    Library,
    check_disjoint,
    checked,
    stream_handle,
)
from tilewright.runtime.gpu_model import ALIGNMENT, GpuModelImage, LaunchLimits, check_arrays, spread_out
from tilewright.runtime.nvrtc import Cubin, Resources, cached_cubin, exact_architecture

__all__ = ["CudaDevice", "CudaError", "CudaModel", "devices"]

_FREE_SHARED_BYTES = 48 << 10  # beyond this a kernel must ask for its dynamic shared memory
_MOST_LANES = 8  # streams that keep an arena and a graph of their own
ToHost = Callable[[Any, int], "np.ndarray[Any, Any]"]


def architecture_of(device: int = 0) -> str:
    """What kernels are compiled for that run on a device."""
    return exact_architecture(capability(open_device(device)))


def device_name(device: int = 0) -> str:
    return str(open_device(device).name)


class StreamLane:
    """What runs on one stream share: they follow each other there, so that one arena and one graph serve them all."""

    def __init__(
        self, image: GpuModelImage, kernels: dict[str, Any], weights: int, host: Mapping[int, int], context: Any,
        arena: int | None = None,
    ) -> None:  # fmt: skip
        """`arena` is where others have theirs too, whose runs never meet these."""
        self.lock = threading.Lock()
        self.is_closed = False
        self._image = image
        self._context = context
        self._arena = DeviceMemory(image.arena_bytes if arena is None else 0, context)
        self._ring = DeviceMemory(image.ring_bytes, context)
        self._meeting = zeroed_memory(MEETING_BYTES, context)
        self._ports: list[DeviceMemory | None] = [None] * (len(image.input_bytes) + len(image.output_bytes))
        bases = {
            "weight": weights,
            "arena": self._arena.pointer if arena is None else arena,
            "ring": self._ring.pointer,
        }
        self.graph = LaunchGraph(image, kernels, bases, self._meeting.pointer, host)

    def port(self, place: int) -> int:
        """Memory for an input or output that the caller has on the host."""
        found = self._ports[place]
        if found is None:
            sizes, inputs = (*self._image.input_bytes, *self._image.output_bytes), len(self._image.input_bytes)
            what = f"input {place}" if place < inputs else f"output {place - inputs}"
            found = self._ports[place] = DeviceMemory(sizes[place], self._context, what)
        return found.pointer

    def __enter__(self) -> StreamLane:
        return self

    def __exit__(self, *_: object) -> None:
        self.lock.release()

    def close(self) -> None:
        self.is_closed = True
        self.graph.close()
        self._arena.close()
        self._ring.close()
        self._meeting.close()
        for memory in self._ports:
            if memory is not None:
                memory.close()


class CudaModel:
    """Calls from several threads are safe. On one stream they take turns; on streams of their own they run at once,
    each with an arena of its own."""

    def __init__(
        self, image: GpuModelImage, cache: Cache, device: int = 0, jobs: int = 2,
        cubins: Mapping[str, Cubin] | None = None,
    ) -> None:  # fmt: skip
        """Kernels that `cubins` has are not compiled."""
        self._device = open_device(device)
        from cuda.bindings import driver

        self._driver = driver
        about = self._device.properties
        self._image = image = spread_out(image, about.multiprocessor_count, about.max_shared_memory_per_multiprocessor)
        self._lock = threading.Lock()
        self._index = device
        (self.context,) = check(driver.cuCtxGetCurrent())
        self.resources: dict[str, Resources] = {}
        reason = image.why_refused(LaunchLimits(about.max_shared_memory_per_block_optin, about.max_threads_per_block))
        if reason is not None:
            raise CudaError(f"{reason} on {self._device.name}; compile the model for this GPU")
        self._kernels = self._load_kernels(cache, jobs, cubins or {})
        # not inputs and outputs: those that lie on the device have their room already, others get it when they come
        require_memory(image.resident_bytes + image.arena_bytes + image.ring_bytes, "the model")
        self._weights = DeviceMemory(image.resident_bytes, self.context)
        passing = {copy.source: copy.bytes for copy in image.copies}
        self._host = HostMemory(passing, self.context) if passing else None
        self._stream = self._device.create_stream()
        self._lanes: dict[int, StreamLane] = {}  # by stream, the oldest first
        self._libraries = Libraries(device, self.context)
        stream = int(self._stream.handle)
        for place, piece in image.resident_pieces:
            self._upload(self._weights.pointer + place, np.frombuffer(piece, np.uint8), stream)
        for source, piece in image.passing_pieces:
            assert self._host is not None
            self._host.fill(source, piece)
        self._stream.sync()

    @property
    def image(self) -> GpuModelImage:
        return self._image

    @property
    def architecture(self) -> str:
        """What the kernels were compiled for."""
        return exact_architecture(capability(self._device))

    # ---- arrays on the host

    def run(self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> None:
        """Copies there and back around a launch; calls from several threads take turns."""
        check_arrays(self._image, inputs, outputs)
        stream = int(self._stream.handle)
        with current(self.context), self._lane(stream) as lane:
            pointers = self._stage(lane, inputs, stream)
            lane.graph.launch(stream, pointers)
            self._fetch(pointers[len(inputs) :], outputs, stream)

    def profile(self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> list[int]:
        """Nanoseconds of each launch on the device, in one replay of a graph with an event between launches: nothing
        waits for the host, caches are as the model leaves them, and no kernel starts early."""
        check_arrays(self._image, inputs, outputs)
        stream = int(self._stream.handle)
        with current(self.context), self._lane(stream) as lane:
            pointers = self._stage(lane, inputs, stream)
            taken = lane.graph.profile(stream, pointers)
            self._fetch(pointers[len(inputs) :], outputs, stream)
        return taken

    def rest(self) -> None:
        """Gives all of the device's memory back but that of the weights, until the next run; only when none is under
        way."""
        with current(self.context):
            check(self._driver.cuCtxSynchronize())
            for lane in self._lanes.values():
                lane.close()
            self._lanes.clear()

    def close(self) -> None:
        """Gives the device's memory back; only when no run is under way."""
        self.rest()
        with current(self.context):
            self._weights.close()
            if self._host is not None:
                self._host.close()

    # ---- beside other models

    @staticmethod
    def beside(models: Sequence[CudaModel]) -> CudaSweeps:
        """Models of which one runs while what others take and give is copied."""
        return CudaSweeps(models)

    def lane_in(self, arena: int) -> StreamLane:
        """A lane of the caller's, in an arena that other models use too: their runs have to follow each other."""
        return self._made_lane(arena)

    def launcher(self, inputs: Sequence[np.ndarray], stream: int) -> Callable[[int], None]:
        """Launches one of the model's calls by itself on a stream, as often as it is asked to: to time it."""
        with current(self.context), self._lane(stream) as lane:
            pointers = self._stage(lane, inputs, stream)

            def launch(number: int) -> None:
                with current(self.context):
                    lane.graph.launch_one(number, stream, pointers)

            return launch

    # ---- arrays on the device

    def device_caller(
        self, inputs: Sequence[ExpectedArray], outputs: Sequence[ExpectedArray], to_host: ToHost
    ) -> Callable[[Sequence[Any]], list[Any] | None]:
        """A call on arrays of which some lie on the GPU, to results there; None where all lie on the host."""

        def call(values: Sequence[Any]) -> list[Any] | None:
            library = self._library(values)
            if library is None:
                return None
            results = [library.empty(port) for port in outputs]
            self._run_there(library, inputs, outputs, values, results, to_host, None)
            return library.handed_over(results)

        return call

    def device_filler(
        self, inputs: Sequence[ExpectedArray], outputs: Sequence[ExpectedArray], to_host: ToHost
    ) -> Callable[[Sequence[Any], Sequence[Any], Any], bool]:
        """As `device_caller`, into arrays of the caller's on the GPU; False where those lie on the host."""

        def fill(values: Sequence[Any], results: Sequence[Any], stream: Any) -> bool:
            library = self._library(results)
            if library is None:
                return False
            self._run_there(library, inputs, outputs, values, results, to_host, stream)
            return True

        return fill

    def _library(self, values: Sequence[Any]) -> Library | None:
        for value in values:
            library = self._libraries.of(value)
            if library is not None:
                return library
        return None

    def _run_there(
        self, library: Library, inputs: Sequence[ExpectedArray], outputs: Sequence[ExpectedArray],
        values: Sequence[Any], results: Sequence[Any], to_host: ToHost, stream: Any,
    ) -> None:  # fmt: skip
        theirs = library.stream() if stream is None else stream_handle(stream)
        used = int(self._stream.handle) if theirs is None else theirs
        driver = self._driver
        check(driver.cuCtxPushCurrent(self.context))  # a context manager would take two microseconds
        try:
            with self._lane(used) as lane:
                read, written = library.pointers(values, inputs), library.pointers(results, outputs)
                kept: list[Any] = []  # alive until the launch is on its way
                if read is None:
                    read = self._pointers(lane, inputs, values, to_host, used, kept)
                if written is None:
                    kept += (views := [library.view(r, port, used) for r, port in zip(results, outputs, strict=True)])
                    written = [checked(v, port, self._index) for v, port in zip(views, outputs, strict=True)]
                pointers = (*read, *written)
                if pointers != lane.graph.pointers:
                    check_disjoint(read, inputs, written, outputs)
                    self._launch_aligned(lane, used, pointers, len(inputs))
                else:
                    lane.graph.launch(used, pointers)
                if theirs is None:
                    check(driver.cuStreamSynchronize(used))
        finally:
            driver.cuCtxPopCurrent()

    def _launch_aligned(self, lane: StreamLane, stream: int, pointers: Pointers, inputs: int) -> None:
        """Arrays that begin inside a packet, as parts of others may, pass through memory of ours: a packet read from
        them would be a fault of the device."""
        sizes = (*self._image.input_bytes, *self._image.output_bytes)
        apart = [place for place, pointer in enumerate(pointers) if pointer % ALIGNMENT and sizes[place]]
        own = tuple(lane.port(place) if place in apart else pointer for place, pointer in enumerate(pointers))
        for place in (p for p in apart if p < inputs):
            check(self._driver.cuMemcpyDtoDAsync(own[place], pointers[place], sizes[place], stream))
        lane.graph.launch(stream, own)
        for place in (p for p in apart if p >= inputs):
            check(self._driver.cuMemcpyDtoDAsync(pointers[place], own[place], sizes[place], stream))

    def _pointers(
        self, lane: StreamLane, ports: Sequence[ExpectedArray], values: Sequence[Any], to_host: ToHost, stream: int,
        kept: list[Any],
    ) -> list[int]:  # fmt: skip
        """Where inputs of any library lie; what lies on the host is brought to memory of ours."""
        found = []
        for place, (value, port) in enumerate(zip(values, ports, strict=True)):
            library = self._libraries.of(value)
            if library is None:
                self._upload(lane.port(place), to_host(value, place), stream)
                found.append(lane.port(place))
                continue
            kept.append(view := library.view(value, port, stream))
            found.append(checked(view, port, self._index))
        return found

    # ---- set-up

    def _lane(self, stream: int) -> StreamLane:
        """The stream's lane, held: leaving it lets it go."""
        while True:
            lane = self._lanes.get(stream) or self._new_lane(stream)
            lane.lock.acquire()
            if not lane.is_closed:
                return lane
            lane.lock.release()  # another thread needed a lane meanwhile, and this was the oldest

    def _new_lane(self, stream: int) -> StreamLane:
        with self._lock:
            if stream in self._lanes:
                return self._lanes[stream]
            while len(self._lanes) >= _MOST_LANES:
                oldest = self._lanes.pop(next(iter(self._lanes)))
                with oldest.lock:
                    check(self._driver.cuCtxSynchronize())
                    oldest.close()
            require_memory(self._image.arena_bytes + self._image.ring_bytes, "a run on another stream")
            self._lanes[stream] = self._made_lane()
            return self._lanes[stream]

    def _made_lane(self, arena: int | None = None) -> StreamLane:
        host = {} if self._host is None else self._host.addresses
        return StreamLane(self._image, self._kernels, self._weights.pointer, host, self.context, arena)

    def _load_kernels(self, cache: Cache, jobs: int, known: Mapping[str, Cubin]) -> dict[str, Any]:
        from cuda.core import ObjectCode

        arch = self.architecture
        with ThreadPoolExecutor(jobs) as pool:
            cubins = list(
                pool.map(lambda k: known.get(k.name) or cached_cubin(k.source, arch, cache), self._image.kernels)
            )
        loaded = {}
        for kernel, cubin in zip(self._image.kernels, cubins, strict=True):
            self.resources.update(cubin.resources)
            code = ObjectCode.from_cubin(cubin.code, name=kernel.name).get_kernel(kernel.name)
            if kernel.shared_bytes > _FREE_SHARED_BYTES:
                self._allow_shared(code, kernel.shared_bytes)
            loaded[kernel.name] = code
        return loaded

    def _allow_shared(self, code: Any, size: int) -> None:
        attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(self._driver.cuKernelSetAttribute(attribute, size, code.handle, self._device.device_id))

    # ---- copies

    def _stage(self, lane: StreamLane, inputs: Sequence[np.ndarray], stream: int) -> Pointers:
        """The inputs brought to memory of ours, and where inputs and outputs lie."""
        for place, array in enumerate(inputs):
            self._upload(lane.port(place), np.ascontiguousarray(array), stream)
        return tuple(lane.port(place) for place in range(len(self._image.input_bytes) + len(self._image.output_bytes)))

    def _fetch(self, pointers: Sequence[int], outputs: Sequence[np.ndarray], stream: int) -> None:
        whole = [a if a.flags.c_contiguous else np.empty(a.shape, a.dtype) for a in outputs]
        for pointer, array in zip(pointers, whole, strict=True):
            if array.nbytes:
                check(self._driver.cuMemcpyDtoHAsync(array.ctypes.data, pointer, array.nbytes, stream))
        check(self._driver.cuStreamSynchronize(stream))
        for output, array in zip(outputs, whole, strict=True):
            if array is not output:
                np.copyto(output, array)

    def _upload(self, pointer: int, array: np.ndarray, stream: int) -> None:
        # From pageable memory the driver has read everything before it returns.
        if array.nbytes:
            check(self._driver.cuMemcpyHtoDAsync(pointer, array.ctypes.data, array.nbytes, stream))
