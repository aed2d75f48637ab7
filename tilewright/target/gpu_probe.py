"""Measures a GPU: rates by instruction, bandwidth and latency of each memory, launches in a graph, barriers.

Times are device times between events, the best of several: the clock starts low, and other work only makes it slow."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.runtime import Cache
from tilewright.runtime.cuda_device import DeviceMemory, capability, check, open_device
from tilewright.runtime.nvrtc import cached_cubin, exact_architecture

VERSION = 5  # of what is measured, and how
_SOURCE = Path(__file__).with_name("native") / "probe.cu"
_REPEAT = 256
_LONG = 16 * _REPEAT  # steps of loops that no launch may hide
_ROUNDS = 5
_LAUNCHES = 200
_WARM_SECONDS = 0.2
_CLUSTERS = 90  # compute capability from which blocks form clusters and launches may depend
# (name, multiply-adds of one instruction of a warp)
_INSTRUCTIONS = (("mma_float16", 16 * 8 * 16), ("mma_bfloat16", 16 * 8 * 16), ("mma_tf32", 16 * 8 * 8),
                 ("mma_int8", 16 * 8 * 32))  # fmt: skip
_FROM_ADA = (("mma_e4m3", 16 * 8 * 32),)
# (name, multiply-adds of a warp in an instruction of four)
_GROUPS = tuple((name, 64 * 256 * depth // 4) for name, depth in
                (("wgmma_float16", 16), ("wgmma_bfloat16", 16), ("wgmma_tf32", 8), ("wgmma_int8", 32),
                 ("wgmma_e4m3", 32)))  # fmt: skip
_ADA = 89  # compute capability from which floats of 8 bits are multiplied
_HOPPER = 90  # the compute capability of GPUs that have these, and they alone
_THREADS = 256


class GpuProbe:
    """The kernels of probe.cu on one device."""

    def __init__(self, device: int, cache: Cache) -> None:
        self._device = open_device(device)
        from cuda.bindings import driver
        from cuda.core import ObjectCode

        self._driver = driver
        self.units = int(self._device.properties.multiprocessor_count)
        self.l2_bytes = int(self._device.properties.l2_cache_size)
        self.capability = capability(self._device)
        arch = exact_architecture(self.capability)
        text = f"#define REPEAT {_REPEAT}\n" + _SOURCE.read_text()
        self._code = ObjectCode.from_cubin(cached_cubin(text, arch, cache).code, name="probe")
        (self._context,) = check(driver.cuCtxGetCurrent())
        self._stream = self._device.create_stream()
        self._out = DeviceMemory(4 * self.units * 8 * 1024, self._context)

    def figures(self) -> dict[str, float]:
        """By name: multiply-adds and bytes a second of the whole device, seconds, and cycles a second."""
        self._warm()
        found = {"clock": self._clock(), "fma_float32": self._arithmetic("fma_float32", 16 * 32, 4)}
        instructions = (*_INSTRUCTIONS, *(_FROM_ADA if self.capability >= _ADA else ()))
        found |= {name: self._arithmetic(name, 8 * count, 2) for name, count in instructions}
        if self.capability == _HOPPER:
            found |= {name: self._arithmetic(name, count, 2) for name, count in _GROUPS}
        found["read_shared"] = self._shared()
        found["read_L2"] = self._reading(self.l2_bytes // 2, 8)
        far = 16 * self.l2_bytes
        found["read_DRAM"], found["write_DRAM"] = self._reading(far, 1), self._writing(far)
        clock = found["clock"]
        found["latency_shared"] = self._latency_shared() / clock
        found["latency_L2"] = self._latency(self.l2_bytes // 8, again=True) / clock
        found["latency_DRAM"] = self._latency(8 * self.l2_bytes, again=False) / clock
        found["launch"] = self._launches("line_kernel", dependent=False)
        found["grid_barrier"] = self._grid_barrier()
        if self.capability >= _CLUSTERS:
            found["dependent_launch"] = self._launches("dependent_kernel", dependent=True)
            found["cluster_barrier"] = self._best("cluster_barriers", 128, 32, [self._out.pointer]) / _REPEAT
        return found

    # ---- figures

    def _warm(self) -> None:
        """The clock rises under load."""
        begin = time.perf_counter()
        while time.perf_counter() - begin < _WARM_SECONDS:
            self._best("fma_float32", 4 * self.units, _THREADS, self._fma_arguments())

    def _clock(self) -> float:
        """Cycles a second with every multiprocessor at work."""
        ticks = DeviceMemory(16, self._context)
        self._launch("clock_ticks", 4 * self.units, _THREADS, [ticks.pointer, *self._fma_arguments()])
        cycles, nanoseconds = self._read(ticks, 2)
        return 1e9 * cycles / nanoseconds

    def _fma_arguments(self) -> list[Any]:
        return [self._out.pointer, np.float32(0.999)]

    def _arithmetic(self, name: str, per_step: int, blocks: int) -> float:
        """`per_step`: multiply-adds of a warp in one step of the loop."""
        arguments = self._fma_arguments() if name == "fma_float32" else [self._out.pointer, np.uint32(0x3C003C00)]
        seconds = self._best(name, blocks * self.units, _THREADS, arguments)
        return per_step * _LONG * blocks * self.units * (_THREADS // 32) / seconds

    def _shared(self) -> float:
        seconds = self._best("read_shared", 2 * self.units, 512, [self._out.pointer])
        return 16 * 8 * _LONG * 512 * 2 * self.units / seconds

    def _reading(self, size: int, turns: int) -> float:
        memory = DeviceMemory(size, self._context)
        check(self._driver.cuMemsetD32(memory.pointer, 1, size // 4))
        arguments = [memory.pointer, self._out.pointer, np.uint64(size // 16), np.int32(turns)]
        seconds = self._best("read_global", 4 * self.units, 512, arguments)
        memory.close()
        return size * turns / seconds

    def _writing(self, size: int) -> float:
        memory = DeviceMemory(size, self._context)
        seconds = self._best("write_global", 8 * self.units, 512, [memory.pointer, np.uint64(size // 16)])
        memory.close()
        return size / seconds

    def _latency(self, size: int, again: bool) -> float:
        """Cycles from a read to the next that depends on it; `again`: of lines that were just read."""
        stride = 32  # words: a line, so that each read is another one
        count = size // (4 * stride)
        memory, cycles = DeviceMemory(size, self._context), DeviceMemory(8, self._context)
        self._launch("chain", self.units, 256, [memory.pointer, np.uint32(count), np.uint32(stride)])
        counted = []
        for turn in range(_ROUNDS):
            start = np.uint32(turn * 1000 % count * stride)
            self._launch("follow", 1, 1, [memory.pointer, cycles.pointer, self._out.pointer, start, np.int32(again)])
            counted.append(self._read(cycles, 1)[0])
        memory.close()
        return min(counted) / _REPEAT

    def _latency_shared(self) -> float:
        cycles = DeviceMemory(8, self._context)
        self._launch("follow_shared", 1, 32, [cycles.pointer, self._out.pointer])
        return self._read(cycles, 1)[0] / _REPEAT

    def _grid_barrier(self) -> float:
        meeting = DeviceMemory(4, self._context)
        check(self._driver.cuMemsetD32Async(meeting.pointer, 0, 1, self._stream.handle))
        seconds = self._best("grid_barriers", self.units, 128, [meeting.pointer, self._out.pointer])
        meeting.close()
        return seconds / _REPEAT

    def _launches(self, name: str, dependent: bool) -> float:
        """Seconds from one kernel of a graph to the next, each reading what the last one wrote."""
        arguments = [self._out.pointer]
        check(self._driver.cuStreamBeginCapture(self._stream.handle, self._driver.CUstreamCaptureMode(1)))
        for _ in range(_LAUNCHES):
            self._launch(name, self.units, _THREADS, arguments, dependent)
        (graph,) = check(self._driver.cuStreamEndCapture(self._stream.handle))
        (executable,) = check(self._driver.cuGraphInstantiate(graph, 0))
        seconds = self._seconds(lambda: check(self._driver.cuGraphLaunch(executable, self._stream.handle)), 1)
        check(self._driver.cuGraphExecDestroy(executable))
        check(self._driver.cuGraphDestroy(graph))
        return seconds / _LAUNCHES

    # ---- launching and timing

    def _best(self, name: str, grid: int, block: int, arguments: Sequence[Any], times: int = 4) -> float:
        return self._seconds(lambda: self._launch(name, grid, block, arguments), times)

    def _seconds(self, work: Callable[[], object], times: int) -> float:
        """Device time of one, the best of some rounds of `times`."""
        driver, stream = self._driver, self._stream.handle
        (begin,), (end,) = check(driver.cuEventCreate(0)), check(driver.cuEventCreate(0))
        best = np.inf
        for _ in range(_ROUNDS):
            check(driver.cuEventRecord(begin, stream))
            for _ in range(times):
                work()
            check(driver.cuEventRecord(end, stream))
            check(driver.cuEventSynchronize(end))
            (milliseconds,) = check(driver.cuEventElapsedTime(begin, end))
            best = min(best, milliseconds * 1e-3 / times)
        check(driver.cuEventDestroy(begin))
        check(driver.cuEventDestroy(end))
        return best

    def _launch(self, name: str, grid: int, block: int, arguments: Sequence[Any], dependent: bool = False) -> None:
        driver = self._driver
        values = [np.uint64(a) if isinstance(a, int) else a for a in arguments]
        cells = [np.array([v]) for v in values]
        places = (ctypes.c_void_p * max(1, len(cells)))(*(c.ctypes.data for c in cells))
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes = 0
        config.hStream = self._stream.handle
        if dependent:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs = [attribute]
            config.numAttrs = 1
        function = driver.CUfunction(int(self._code.get_kernel(name).handle))
        check(driver.cuLaunchKernelEx(config, function, ctypes.addressof(places), 0))

    def _read(self, memory: DeviceMemory, count: int) -> list[int]:
        host = np.zeros(count, np.uint64)
        check(self._driver.cuStreamSynchronize(self._stream.handle))
        check(self._driver.cuMemcpyDtoH(host.ctypes.data, memory.pointer, host.nbytes))
        return [int(n) for n in host]
