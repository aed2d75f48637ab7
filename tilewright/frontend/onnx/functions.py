"""Operators that Tilewright lacks but ONNX defines by simpler ones, written out as those."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import onnx
import onnx.shape_inference

from tilewright import ops
from tilewright.errors import BudgetError, ModelError
from tilewright.frontend.onnx.contents import line_of
from tilewright.ir.forms.budget import MOST
from tilewright.ops.steps.control import NAMES as CONTROL

_STANDARD = ("", "ai.onnx")
_DEFINED = ("", "ai.onnx.preview")  # operator sets whose definitions ONNX has
_DEPTH = 8  # definitions that use other such operators; ONNX nests no deeper than three


def check_written_out(model: onnx.ModelProto) -> None:
    """How many nodes the model has when its own functions are written out: each may call others, and those others."""
    functions = {(f.domain, f.name, f.overload): f for f in model.functions}
    sizes: dict[Any, int] = {}
    entered: set[Any] = set()
    waiting = list(functions)
    while waiting:
        key = waiting[-1]
        called = [c for c in _called(functions[key].node) if c in functions]
        missing = [c for c in called if c not in sizes]
        if key in sizes or not missing:
            waiting.pop()
            sizes[key] = sum(sizes.get(c, 1) for c in _called(functions[key].node))
            continue
        if key in entered:
            raise ModelError(f"the model's function '{key[0]}::{key[1]}' calls itself")
        entered.add(key)
        waiting += missing
    whole = 0
    for node in model.graph.node:
        whole += sum(sizes.get(c, 1) for c in _called([node]))
        if whole > MOST:
            label = f"{node.op_type} node '{node.name or ''.join(node.output[:1])}'"
            raise BudgetError(f"{label}: with its functions written out the model has {whole} nodes or more; {MOST} "
                              "are compiled at once: call functions less often")  # fmt: skip


def _called(nodes: Iterable[onnx.NodeProto]) -> list[tuple[str, str, str]]:
    """What nodes, and those of graphs in their attributes, may call."""
    found, waiting = [], list(nodes)
    while waiting:
        node = waiting.pop()
        found.append((node.domain, node.op_type, node.overload))
        for attribute in node.attribute:
            if attribute.HasField("g") or attribute.graphs:
                waiting += (n for g in (attribute.g, *attribute.graphs) for n in g.node)
    return found


def expand(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with such operators replaced by their definitions; the model itself when it has none."""
    versions = {"" if i.domain in _STANDARD else i.domain: i.version for i in model.opset_import}
    for _ in range(_DEPTH):
        if not any(_definition(n, versions) for n in model.graph.node):
            break
        model = _expanded(model, versions)
    return model


def _definition(node: onnx.NodeProto, versions: Mapping[str, int]) -> Any:  # an OpSchema, whose stubs lack most of it
    """The schema that defines an operator we lack, or None."""
    domain = "" if node.domain in _STANDARD else node.domain
    if domain not in _DEFINED or node.op_type in CONTROL:
        return None
    version = versions.get(domain, 1)
    if ops.find(node.op_type, domain, version) is not None or not onnx.defs.has(node.op_type, domain):
        return None
    if not domain and version > onnx.defs.onnx_opset_version():
        return None
    try:
        schema: Any = onnx.defs.get_schema(node.op_type, version, domain)
    except onnx.defs.SchemaError:
        return None
    return schema if schema.has_function or schema.has_context_dependent_function else None


def _expanded(model: onnx.ModelProto, versions: Mapping[str, int]) -> onnx.ModelProto:
    types = _types(model)
    result = onnx.ModelProto()
    result.CopyFrom(model)
    del result.graph.node[:]
    for count, node in enumerate(model.graph.node):
        schema = _definition(node, versions)
        function = None if schema is None else _function(schema, node, versions, types)
        if schema is None or function is None:
            result.graph.node.append(node)
        else:
            result.graph.node.extend(_body(schema, function, node, f"{node.op_type}_{count}"))
    return result


def _types(model: onnx.ModelProto) -> dict[str, onnx.TypeProto]:
    """Element types by name: definitions may depend on them."""
    known = {t.name: onnx.helper.make_tensor_type_proto(t.data_type, list(t.dims)) for t in model.graph.initializer}
    try:
        inferred = onnx.shape_inference.infer_shapes(model).graph
    except onnx.shape_inference.InferenceError as error:
        raise ModelError(f"the types in the model cannot be found: {line_of(error)}") from error
    for value in (*inferred.input, *inferred.value_info, *inferred.output):
        known.setdefault(value.name, value.type)
    return known


def _function(
    schema: Any, node: onnx.NodeProto, versions: Mapping[str, int], types: Mapping[str, onnx.TypeProto]
) -> onnx.FunctionProto | None:
    function = onnx.FunctionProto()
    # of operators of another set too, definitions are written in ONNX's own and go by its version
    version = versions.get("", onnx.defs.onnx_opset_version())
    if schema.has_function:
        fitting = [v for v in schema.function_opset_versions if v <= version]
        function.ParseFromString(schema.get_function_with_opset_version(max(fitting)))
        return function
    fitting = [v for v in schema.context_dependent_function_opset_versions if v <= version]
    if not fitting or any(name and name not in types for name in node.input):
        return None
    given = [types[name].SerializeToString() if name else b"" for name in node.input]
    body = schema.get_context_dependent_function_with_opset_version(max(fitting), node.SerializeToString(), given)
    function.ParseFromString(body)
    return function if function.node else None


def _body(schema: Any, function: onnx.FunctionProto, call: onnx.NodeProto, prefix: str) -> list[onnx.NodeProto]:
    """The definition's nodes with the caller's names and attributes."""
    names = {"": ""}
    for formals, actuals in ((function.input, call.input), (function.output, call.output)):
        for place, formal in enumerate(formals):
            actual = actuals[place] if place < len(actuals) else ""
            names[formal] = actual or (f"{prefix}_{formal}" if formals is function.output else "")
    attributes = {name: a.default_value for name, a in schema.attributes.items() if a.default_value.name}
    attributes |= {a.name: a for a in function.attribute_proto}
    attributes |= {a.name: a for a in call.attribute}
    return [_renamed(n, names, attributes, prefix) for n in function.node]


def _renamed(
    node: onnx.NodeProto, names: dict[str, str], attributes: Mapping[str, onnx.AttributeProto], prefix: str
) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.name = f"{prefix}_{node.name or node.output[0]}"
    for side in (copy.input, copy.output):
        renamed = [names.setdefault(name, f"{prefix}_{name}") for name in side]
        del side[:]
        side.extend(renamed)
    del copy.attribute[:]
    for attribute in node.attribute:
        if attribute.ref_attr_name:
            if attribute.ref_attr_name not in attributes:
                continue
            given = onnx.AttributeProto()
            given.CopyFrom(attributes[attribute.ref_attr_name])
            given.name = attribute.name
            copy.attribute.append(given)
        elif attribute.type == onnx.AttributeProto.GRAPH:
            inner = onnx.AttributeProto()
            inner.CopyFrom(attribute)
            _rename_graph(inner.g, dict(names), attributes, prefix)
            copy.attribute.append(inner)
        else:
            copy.attribute.append(attribute)
    return copy


def _rename_graph(
    graph: onnx.GraphProto, names: dict[str, str], attributes: Mapping[str, onnx.AttributeProto], prefix: str
) -> None:
    for value in graph.input:
        names[value.name] = f"{prefix}_{value.name}"
        value.name = names[value.name]
    for tensor in (*graph.initializer, *(sparse.values for sparse in graph.sparse_initializer)):
        names[tensor.name] = f"{prefix}_{tensor.name}"
        tensor.name = names[tensor.name]
    nodes = [_renamed(n, names, attributes, prefix) for n in graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    for value in graph.output:
        value.name = names.get(value.name, f"{prefix}_{value.name}")
