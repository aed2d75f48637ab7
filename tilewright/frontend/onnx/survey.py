"""A look at a whole model before it is read: tensors that lie in files of their own, names that are no text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import google.protobuf.message
import onnx

from tilewright.frontend.onnx.mapped import is_mapped, model_bytes


def external_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor of the model whose values lie in another file."""
    for graph, nodes in _parts(model):
        tensors = [] if graph is None else list(graph.initializer)
        for sparse in () if graph is None else graph.sparse_initializer:
            tensors += (sparse.values, sparse.indices)
        for node in nodes:
            for attribute in node.attribute:
                tensors += (attribute.t, *attribute.tensors)
        yield from (t for t in tensors if t.data_location == onnx.TensorProto.EXTERNAL)


def unreadable_names(model: onnx.ModelProto) -> Iterator[bytes]:
    """Names that are no text: protobuf gives them as bytes."""
    names: list[str | bytes] = [i.domain for i in model.opset_import]
    for graph, nodes in _parts(model):
        if graph is not None:
            names += (v.name for v in (*graph.initializer, *graph.input, *graph.output, *graph.value_info))
            names.append(graph.name)
            dimensions = (d for v in (*graph.input, *graph.output) for d in v.type.tensor_type.shape.dim)
            names += (d.dim_param for d in dimensions)
        for node in nodes:
            names += (node.op_type, node.domain, node.name, *node.input, *node.output)
            names += (a.name for a in node.attribute)
    yield from (name for name in names if isinstance(name, bytes))


def _parts(model: onnx.ModelProto) -> Iterator[tuple[onnx.GraphProto | None, Sequence[onnx.NodeProto]]]:
    """Every graph with its nodes, those of attributes too, and the nodes of every function."""
    waiting: list[tuple[onnx.GraphProto | None, Sequence[onnx.NodeProto]]] = [(model.graph, model.graph.node)]
    waiting += [(None, f.node) for f in model.functions]
    while waiting:
        part = waiting.pop()
        yield part
        for node in part[1]:
            for attribute in node.attribute:
                if attribute.HasField("g") or attribute.graphs:
                    waiting += [(g, g.node) for g in (attribute.g, *attribute.graphs)]


def location(tensor: onnx.TensorProto) -> str:
    return next((entry.value for entry in tensor.external_data if entry.key == "location"), "")


def locations(path: Path) -> list[str]:
    """The files that a model's tensors lie in, relative to its folder; none where it cannot be read."""
    try:
        model = onnx.load_model_from_string(model_bytes(path))
    except (OSError, google.protobuf.message.DecodeError):
        return []
    return sorted({location(t) for t in external_tensors(model) if not is_mapped(t)} - {""})
