"""A model's launches as one CUDA graph: a chain of kernel nodes that follows the pointers it is given.

From Hopper on a kernel's blocks may start while those of the kernel before still run: every kernel begins by waiting
until what that wrote is seen (tw::begin), so that the time of starting is saved.

Launches stand in a chain because the arena's places are shared by tensors that are not alive at the same time: what
the calls' order keeps apart, parallel branches would not.

Blocks that wait for each other are launched together or not at all (cooperatively): two such kernels of two streams
cannot each have half of the device and wait for ever. Nothing starts early around them: a waiting block would have the
place of one that is waited for."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilewright.runtime.cuda_device import check
from tilewright.runtime.gpu_model import GpuCall, GpuModelImage, WeightCopy

Pointers = tuple[int, ...]
MEETING_BYTES = 4  # where blocks meet: how many have arrived
_STARTS_EARLY = 9  # the major compute capability from which on a kernel can wait for the one before by itself


@dataclass(frozen=True)
class _Node:
    """A kernel node; `values` is what its parameters point to, and `ports` which of them follow the caller."""

    handle: Any
    parameters: Any
    values: Any  # ctypes array: kept alive with the addresses that point into it
    addresses: Any
    ports: tuple[tuple[int, int], ...]  # (place among the parameters, place among the model's inputs and outputs)
    starts_early: bool
    meets: bool  # its blocks wait for each other


class LaunchGraph:
    """The launches of a model with an arena of its own. Not for two threads at once."""

    def __init__(
        self, image: GpuModelImage, kernels: dict[str, Any], bases: Mapping[str, int], meeting: int,
        host: Mapping[int, int],
    ) -> None:  # fmt: skip
        """`bases` has where each space begins on the device, `host` where every weight that passes through lies."""
        from cuda.bindings import driver

        self._driver = driver
        self._none = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
        self._image = image
        self._bases = bases
        self._meeting = meeting
        self._host = host
        self._fed = {copy.first for copy in image.copies}  # launches that wait for a copy
        self._starts_early = _major() >= _STARTS_EARLY
        (self._graph,) = check(driver.cuGraphCreate(0))
        self._nodes: list[_Node] = []
        self._launched: list[int] = []  # the number of each node's call
        for number, call in enumerate(image.calls):
            if 0 not in call.grid:  # nothing to do, and the driver refuses an empty grid
                self._nodes.append(self._add(call, kernels[call.kernel], number in self._fed))
                self._launched.append(number)
        self._add_copies()
        self._following = [node for node in self._nodes if node.ports]
        self._executable: Any = None
        self.pointers: Pointers = ()  # of the last run

    def launch(self, stream: int, pointers: Pointers) -> None:
        """Run on a stream with these inputs and outputs, in the model's order. Runs under way keep their pointers."""
        if check(self._driver.cuStreamIsCapturing(stream))[0] != self._none:
            self._launch_each(stream, pointers)
            return
        if pointers != self.pointers or self._executable is None:
            self._follow(pointers)
        check(self._driver.cuGraphLaunch(self._executable, stream))

    def _launch_each(self, stream: int, pointers: Pointers) -> None:
        """Kernel by kernel into a graph of the caller's: an executable graph cannot become part of another. The
        parameters are copied at the launch, and the graph's own pointers are put back."""
        for number in range(len(self._nodes)):
            self._copy_for(number, stream)
            self.launch_one(number, stream, pointers)

    def _copy_for(self, node: int, stream: int) -> bool:
        """What a launch reads that is copied for it, and for those of empty grids before it, in the stream's order;
        whether there is anything."""
        before = self._launched[node - 1] if node else -1
        copies = [copy for copy in self._image.copies if before < copy.first <= self._launched[node]]
        for copy in copies:
            check(self._driver.cuMemcpyHtoDAsync(self._bases["ring"] + copy.place, self._host[copy.source],
                                                 copy.bytes, stream))  # fmt: skip
        return bool(copies)

    def launch_one(self, number: int, stream: int, pointers: Pointers, may_start_early: bool = True) -> None:
        """One of the launches by itself; those of empty grids are not counted."""
        node = self._nodes[number]
        p = node.parameters
        before = [node.values[place] for place, _ in node.ports]
        for place, port in node.ports:
            node.values[place] = pointers[port]
        function = self._driver.CUfunction(int(p.kern))
        config = self._config(node, stream, may_start_early)
        check(self._driver.cuLaunchKernelEx(config, function, ctypes.addressof(node.addresses), 0))
        for (place, _), value in zip(node.ports, before, strict=True):
            node.values[place] = value

    def _config(self, node: _Node, stream: int, may_start_early: bool) -> Any:
        driver, parameters = self._driver, node.parameters
        config = driver.CUlaunchConfig()
        for name in ("gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ", "sharedMemBytes"):
            setattr(config, name, getattr(parameters, name))
        config.hStream = stream
        if node.meets or (node.starts_early and may_start_early):
            attribute, value = driver.CUlaunchAttribute(), driver.CUlaunchAttributeValue()
            kinds = driver.CUlaunchAttributeID
            if node.meets:
                attribute.id, value.cooperative = kinds.CU_LAUNCH_ATTRIBUTE_COOPERATIVE, 1
            else:
                attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
                value.programmaticStreamSerializationAllowed = 1
            attribute.value = value
            config.attrs, config.numAttrs = [attribute], 1
        return config

    def profile(self, stream: int, pointers: Pointers) -> list[int]:
        """Nanoseconds of each call in one run, by a graph with an event after each launch."""
        driver = self._driver
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        external = int(driver.CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL)  # a node of the graph, and it has a time
        events: list[Any] = []
        bounds: list[tuple[Any, Any]] = []

        def recorded() -> Any:
            events.append(check(driver.cuEventCreate(0))[0])
            check(driver.cuEventRecordWithFlags(events[-1], stream, external))
            return events[-1]

        check(driver.cuStreamBeginCapture(stream, mode))
        try:
            before = recorded()
            for number in range(len(self._nodes)):
                if self._copy_for(number, stream):  # which is no time of the launch
                    before = recorded()
                self.launch_one(number, stream, pointers, may_start_early=False)
                bounds.append((before, recorded()))
                before = bounds[-1][1]
        finally:
            captured = driver.cuStreamEndCapture(stream)
        (graph,) = check(captured)
        (executable,) = check(driver.cuGraphInstantiate(graph, 0))
        check(driver.cuGraphLaunch(executable, stream))
        check(driver.cuStreamSynchronize(stream))
        spent = [check(driver.cuEventElapsedTime(*each))[0] for each in bounds]  # milliseconds
        check(driver.cuGraphExecDestroy(executable))
        check(driver.cuGraphDestroy(graph))
        for event in events:
            check(driver.cuEventDestroy(event))
        taken = iter(round(each * 1e6) for each in spent)
        return [0 if 0 in call.grid else next(taken) for call in self._image.calls]

    def close(self) -> None:
        """Only when no run is under way."""
        if self._executable is not None:
            check(self._driver.cuGraphExecDestroy(self._executable))
            self._executable = None
        check(self._driver.cuGraphDestroy(self._graph))

    def _follow(self, pointers: Pointers) -> None:
        before = self.pointers or (0,) * len(pointers)
        for node in self._following:
            moved = False
            for place, port in node.ports:
                if pointers[port] != before[port]:
                    node.values[place] = pointers[port]
                    moved = True
            if not moved:
                continue
            if self._executable is None:
                check(self._driver.cuGraphKernelNodeSetParams(node.handle, node.parameters))
            else:
                check(self._driver.cuGraphExecKernelNodeSetParams(self._executable, node.handle, node.parameters))
        if self._executable is None:
            (self._executable,) = check(self._driver.cuGraphInstantiate(self._graph, 0))
        self.pointers = pointers

    def _add_copies(self) -> None:
        """Copies in a chain of their own beside the kernels: each waits for the last reader of what its slot held, and
        its first reader waits for it."""
        driver = self._driver
        before: Any = None
        add = getattr(driver, "cuGraphAddDependencies_v2", driver.cuGraphAddDependencies)  # as CUDA 12 calls it
        for copy in self._image.copies:
            readers = [node for node, number in zip(self._nodes, self._launched, strict=True) if number <= copy.after]
            waits = [*([] if before is None else [before]), *([readers[-1].handle] if readers else [])]
            (before,) = check(driver.cuGraphAddMemcpyNode(self._graph, waits, len(waits), self._copied(copy),
                                                          check(driver.cuCtxGetCurrent())[0]))  # fmt: skip
            later = [node for node, number in zip(self._nodes, self._launched, strict=True) if number >= copy.first]
            if later:
                check(add(self._graph, [before], [later[0].handle], [driver.CUgraphEdgeData()], 1))

    def _copied(self, copy: WeightCopy) -> Any:
        about = self._driver.CUDA_MEMCPY3D()
        kinds = self._driver.CUmemorytype
        about.srcMemoryType, about.srcHost = kinds.CU_MEMORYTYPE_HOST, self._host[copy.source]
        about.dstMemoryType, about.dstDevice = kinds.CU_MEMORYTYPE_DEVICE, self._bases["ring"] + copy.place
        about.WidthInBytes, about.Height, about.Depth = copy.bytes, 1, 1
        return about

    def _add(self, call: GpuCall, kernel: Any, is_fed: bool) -> _Node:
        values, ports = self._parameters(call)
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(values) + 8 * i for i in range(len(values))))
        shape = self._image.kernel(call.kernel)
        driver = self._driver
        parameters = driver.CUDA_KERNEL_NODE_PARAMS()
        parameters.kern = kernel.handle
        parameters.gridDimX, parameters.gridDimY, parameters.gridDimZ = call.grid
        parameters.blockDimX, parameters.blockDimY, parameters.blockDimZ = shape.block, 1, 1
        parameters.sharedMemBytes = shape.shared_bytes
        parameters.kernelParams = ctypes.addressof(addresses)
        (handle,) = check(driver.cuGraphAddKernelNode(self._graph, [], 0, parameters))
        if shape.meets:
            together = driver.CUkernelNodeAttrValue()
            together.cooperative = 1
            kind = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            check(driver.cuGraphKernelNodeSetAttribute(handle, kind, together))
        # what waits for a copy as well is started when both have ended
        starts_early = self._starts_early and shape.starts_early and not shape.meets and not is_fed
        made = _Node(handle, parameters, values, addresses, ports, starts_early, shape.meets)
        if self._nodes:
            self._after(self._nodes[-1], made)
        return made

    def _after(self, before: _Node, after: _Node) -> None:
        """One kernel waits for another: by itself where it can, to be started elsewhere."""
        driver = self._driver
        first, second = before.handle, after.handle
        edge = driver.CUgraphEdgeData()
        if after.starts_early and not before.meets:
            edge.from_port = driver.CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC
            edge.type = int(driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC)
        add = getattr(driver, "cuGraphAddDependencies_v2", driver.cuGraphAddDependencies)  # as CUDA 12 calls it
        check(add(self._graph, [first], [second], [edge], 1))

    def _parameters(self, call: GpuCall) -> tuple[Any, tuple[tuple[int, int], ...]]:
        """The kernel's parameters, eight bytes each, and which of them are inputs and outputs of the model."""
        found: list[int] = []
        ports: list[tuple[int, int]] = []
        for place, ref in enumerate(call.buffers):
            if ref.space in self._bases:
                found.append(self._bases[ref.space] + ref.value)
                continue
            ports.append((place, ref.value + (len(self._image.input_bytes) if ref.space == "output" else 0)))
            found.append(0)
        found += [extent & (1 << 64) - 1 for extent in call.extents]
        found += [] if call.step is None else [call.step]
        found += [self._meeting] if self._image.kernel(call.kernel).meets else []
        return (ctypes.c_uint64 * len(found))(*found), tuple(ports)


def _major() -> int:
    from cuda.bindings import driver

    (device,) = check(driver.cuCtxGetDevice())
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    return int(check(driver.cuDeviceGetAttribute(attribute, device))[0])
