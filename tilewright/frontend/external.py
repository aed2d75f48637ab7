"""Tensors of a model that lie in files of their own: which they are, and which files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import google.protobuf.message
import onnx


def external_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor of the model whose values lie in another file."""
    graphs: list[onnx.GraphProto] = [model.graph]
    nodes: list[onnx.NodeProto] = [n for f in model.functions for n in f.node]
    while graphs or nodes:
        tensors: list[onnx.TensorProto] = []
        if graphs:
            graph = graphs.pop()
            tensors += graph.initializer
            for sparse in graph.sparse_initializer:
                tensors += (sparse.values, sparse.indices)
            nodes += graph.node
        while nodes:
            for attribute in nodes.pop().attribute:
                tensors += (attribute.t, *attribute.tensors)
                graphs += [g for g in (attribute.g, *attribute.graphs) if g.node or g.initializer]
        yield from (t for t in tensors if t.data_location == onnx.TensorProto.EXTERNAL)


def location(tensor: onnx.TensorProto) -> str:
    return next((entry.value for entry in tensor.external_data if entry.key == "location"), "")


def locations(path: Path) -> list[str]:
    """The files that a model's tensors lie in, relative to its folder; none where it cannot be read."""
    try:
        model = onnx.load_model_from_string(path.read_bytes())
    except (OSError, google.protobuf.message.DecodeError):
        return []
    return sorted({location(t) for t in external_tensors(model)} - {""})
