"""A module of PyTorch that returns its loss, as a Graph with its parameters as inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tilewright.errors import ModelError, OptionError
from tilewright.frontend.pytorch.exported import Exported, export
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.graph import Graph, Node, Value
from tilewright.pytorch.module import acts_in_training


@dataclass(frozen=True)
class Trained:
    """A Graph from inputs and weights to a loss; the first values of the weights and their names in the module."""

    graph: Graph
    weights: Mapping[str, np.ndarray]
    names: Mapping[str, str]


def trained_graph(module: torch.nn.Module, example: Sequence[Any], parts: int) -> Trained:
    """The module as it runs on one of so many parts of a batch like the example, which is cut along its first
    dimension."""
    if module.training and any(acts_in_training(m) for m in module.modules()):
        raise ModelError(f"{type(module).__name__} is in training mode, where dropout and batch normalisation act "
                         f"by chance or change the module; call module.eval() first")  # fmt: skip
    found = export(module, [_part(x, parts) for x in example], {})
    if found.changes:
        raise ModelError(f"{type(module).__name__} changes tensors that it holds, which a training step does not do")
    return _with_weights(module, found)


def _part(example: Any, parts: int) -> Any:
    if not isinstance(example, torch.Tensor) or parts == 1:
        return example
    if not example.dim() or example.shape[0] % parts:
        shape = list(example.shape)
        raise OptionError(f"micro_batches={parts} does not divide the first dimension of an input of {shape}")
    return example[: example.shape[0] // parts]


def _with_weights(module: torch.nn.Module, found: Exported) -> Trained:
    named = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    held = dict(zip(found.graph.constants, found.constants, strict=False))
    first: dict[int, str] = {}  # a parameter that the module has in two places is one
    tied: dict[str, str] = {}
    for name, tensor in held.items():
        if id(tensor) in named:
            tied[name] = first.setdefault(id(tensor), name)
    if not tied:
        raise ModelError(f"{type(module).__name__} has no parameter that requires a gradient")
    graph = found.graph
    weights = {name: graph.constants[name] for name in dict.fromkeys(tied.values())}
    values = [_value(name, array) for name, array in weights.items()]
    nodes = tuple(_renamed(node, tied) for node in graph.nodes)
    left = {name: array for name, array in graph.constants.items() if name not in tied}
    made = replace(graph, inputs=(*graph.inputs, *values), nodes=nodes, constants=left)
    return Trained(made, weights, {name: named[id(held[name])] for name in weights})


def _value(name: str, array: np.ndarray) -> Value:
    dtype = dtypes.by_numpy(array.dtype)
    if dtype is None:
        raise ModelError(f"the parameter '{name}' is of a type that is not known: {array.dtype}")
    return Value(name, dtype, array.shape)


def _renamed(node: Node, names: Mapping[str, str]) -> Node:
    return replace(node, inputs=tuple(names.get(name, name) for name in node.inputs))
