"""ONNX's Backend interface: `prepare`, `run_model`, `run_node` and `supports_device`, as functions of this module and
as a class, so that whatever is written against that interface runs on Tilewright."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx
from onnx import helper
from onnx.backend.base import Backend, BackendRep, Device, DeviceType, namedtupledict

from tilewright.api import compile
from tilewright.calls.arguments import Array
from tilewright.dynamic.open_model import OpenModel
from tilewright.dynamic.staged_model import StagedModel
from tilewright.model import Model

_NOT_OURS = ("rtol", "atol")  # how ONNX's own runner compares results; it hands them on


class PreparedModel(BackendRep):
    """A compiled model, or one that compiles at its first run for the shapes it is given."""

    def __init__(self, model: Model | OpenModel | StagedModel) -> None:
        self.model = model

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Array, ...]:
        """Run on arrays: a list in order, a dict by name, or the one array there is. The outputs come as a tuple whose
        items have the names of the outputs."""
        if isinstance(inputs, Mapping):
            results = self.model(**dict(inputs))
        else:
            results = self.model(*inputs) if isinstance(inputs, list | tuple) else self.model(inputs)
        named: Any = namedtupledict("Outputs", [port.name for port in self.model.outputs])
        return named(*results)


class TilewrightBackend(Backend):
    """The interface as a class."""

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> PreparedModel:
        """Compile a model; keyword arguments are those of `tilewright.compile`."""
        target = "cuda" if Device(device).type == DeviceType.CUDA else None
        options = {name: value for name, value in kwargs.items() if name not in _NOT_OURS}
        return PreparedModel(compile(model, **({"target": target} | options)))

    @classmethod
    def run_model(cls, model: onnx.ModelProto, inputs: Any, device: str = "CPU", **kwargs: Any) -> tuple[Array, ...]:
        """Compile a model and run it once."""
        return cls.prepare(model, device, **kwargs).run(inputs)

    @classmethod
    def run_node(
        cls,
        node: onnx.NodeProto,
        inputs: Any,
        device: str = "CPU",
        outputs_info: Sequence[tuple[Any, tuple[int, ...]]] | None = None,
        **kwargs: Any,
    ) -> tuple[Array, ...]:
        """Run one operator, of the newest operator set or of `opset_version`."""
        version = kwargs.pop("opset_version", onnx.defs.onnx_opset_version())
        arrays = list(inputs.values()) if isinstance(inputs, Mapping) else list(inputs)
        names = [name for name in node.input if name]
        given = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in zip(names, arrays, strict=True)
        ]
        outputs = [onnx.ValueInfoProto(name=name) for name in node.output if name]
        graph = helper.make_graph([node], node.op_type, given, outputs)
        opsets = [helper.make_opsetid(node.domain, version)]
        return cls.run_model(helper.make_model(graph, opset_imports=opsets), arrays, device, **kwargs)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """CPU, and CUDA where there is a GPU."""
        kind, _, number = device.partition(":")
        if kind != "CUDA":
            return kind == "CPU"
        from tilewright.runtime.cuda_device import CudaError, devices

        try:
            return int(number or 0) < len(devices())
        except (CudaError, ValueError):
            return False


prepare = TilewrightBackend.prepare
run_model = TilewrightBackend.run_model
run_node = TilewrightBackend.run_node
supports_device = TilewrightBackend.supports_device
