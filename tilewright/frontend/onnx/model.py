"""ONNX models to Graphs: the file checked, functions inlined, dynamic dimensions bound, constants read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google.protobuf.message
import numpy as np
import onnx
import onnx.inliner

from tilewright.errors import BorderError, ModelError, OpenShapeError, OptionError, UnsupportedError
from tilewright.frontend.onnx.contents import array_of, dense_of, line_of, type_name
from tilewright.frontend.onnx.functions import check_written_out, expand
from tilewright.frontend.onnx.mapped import is_mapped, model_bytes, point_to_files
from tilewright.frontend.onnx.survey import external_tensors, location, unreadable_names
from tilewright.frontend.order import in_order
from tilewright.frontend.steady_states import without_steady_states
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.dtypes import DType
from tilewright.ir.forms.graph import Graph, Node, Value

Shapes = Mapping[str, int | Sequence[int]]
Source = str | Path | bytes | onnx.ModelProto
_STANDARD = ("", "ai.onnx")
_NO_VERSION = 1 << 31
_BORDER = ("sequence_type", "optional_type")
_LEGACY_NO_IMPORTS = 3  # the first IR version whose models name the operator sets they use


def load(source: Source, shapes: Shapes | None = None, values: Mapping[str, np.ndarray] | None = None) -> Graph:
    """The Graph of a model given as a path, the bytes of a file or a ModelProto.

    `shapes` binds dynamic dimensions: an input's name to its full shape, or a dimension's name to a number. A full
    shape may also say another number than the file: what does not fit it then is refused where it is met. Inputs with
    `values` become constants.
    """
    model = _inlined(_checked(_reshaped(_parsed(source), shapes or {})))
    constants = _initializers(model.graph) | dict(values or {})
    _check_outputs(model.graph)
    inputs = _inputs(model.graph, constants, shapes or {})
    graph = _graph(model, inputs, constants)
    _check_names(graph, frozenset())
    return graph


def load_border(
    source: Source, shapes: Shapes | None = None
) -> tuple[Graph, tuple[OpenValue, ...], tuple[OpenValue, ...]]:
    """The Graph of a model without inputs, and what it takes and gives, which need not be tensors of numbers."""
    model = _inlined(_checked(_reshaped(_parsed(source), shapes or {})))
    constants = _initializers(model.graph)
    protos, full, sizes = _bound([p for p in model.graph.input if p.name not in constants], shapes or {})
    graph = _graph(model, (), constants)
    names = frozenset(p.name for p in protos)
    _check_names(graph, names)
    takes = tuple(_open(p, full, sizes) for p in protos)
    return graph, takes, tuple(_open(p, {}, sizes) for p in model.graph.output)


def _graph(model: onnx.ModelProto, inputs: tuple[Value, ...], constants: dict[str, np.ndarray]) -> Graph:
    versions = {("" if i.domain in _STANDARD else i.domain): i.version for i in model.opset_import}
    if not versions and model.ir_version < _LEGACY_NO_IMPORTS:
        versions = {"": 1}
    graph = Graph(
        name=model.graph.name,
        inputs=inputs,
        outputs=tuple(o.name for o in model.graph.output),
        nodes=in_order([_node(n, versions) for n in model.graph.node]),
        constants=constants,
        values={**_declared(model.graph), **{v.name: v for v in inputs}},
    )
    return without_steady_states(graph)


# reading


def _parsed(source: Source, whole: bool = True) -> onnx.ModelProto:
    """The model, with the tensors that lie in other files where it is wanted `whole`."""
    if isinstance(source, onnx.ModelProto):
        return _whole("the model", source)
    if isinstance(source, bytes):
        return _whole("the given bytes", _decoded("the given bytes", source))
    path = Path(source)
    if path.is_dir():
        raise ModelError(f"'{path}' is a folder; give the path of an ONNX file")
    if not path.exists():
        raise ModelError(f"model file '{path}' does not exist")
    try:
        data = model_bytes(path)
    except OSError as error:
        raise ModelError(f"model file '{path}' cannot be read: {error.strerror}") from error
    model = _decoded(f"'{path}'", data)
    if not whole:
        return model
    point_to_files(model, path.parent)
    try:
        for tensor in external_tensors(model):
            if not is_mapped(tensor):
                onnx.external_data_helper.load_external_data_for_tensor(tensor, str(path.parent))
                tensor.data_location = onnx.TensorProto.DEFAULT
                del tensor.external_data[:]
    except (OSError, ValueError, onnx.checker.ValidationError) as error:
        raise ModelError(f"'{path}': external data could not be read: {line_of(error)}") from error
    return model


def _whole(label: str, model: onnx.ModelProto) -> onnx.ModelProto:
    tensor = next(external_tensors(model), None)
    if tensor is not None:
        raise ModelError(
            f"{label}: tensor '{tensor.name}' lies in the file '{location(tensor)}'; give the model's path instead, "
            f"or load it whole with onnx.load"
        )
    return model


def _decoded(label: str, data: bytes) -> onnx.ModelProto:
    try:
        model = onnx.load_model_from_string(data)
    except google.protobuf.message.DecodeError as error:
        raise ModelError(f"{label} is not an ONNX model, or is damaged: {line_of(error)}") from error
    if not model.HasField("graph") or not model.ir_version:
        raise ModelError(f"{label} is not an ONNX model: it holds no graph")
    return model


def _checked(model: onnx.ModelProto) -> onnx.ModelProto:
    """Each node against ONNX's own schema; the whole-model check would copy all weights."""
    unreadable = next(unreadable_names(model), None)
    if unreadable is not None:
        raise ModelError(f"the name {unreadable!r} in the model is not UTF-8")
    for imported in model.opset_import:
        if not 0 < imported.version < _NO_VERSION:
            name = imported.domain or "ai.onnx"
            raise ModelError(
                f"the model asks for version {imported.version} of operator set {name}, which there is not"
            )
    if not 0 < model.ir_version < _NO_VERSION:
        raise ModelError(f"the model is of version {model.ir_version} of the ONNX format, which there is not")
    context = onnx.checker.C.CheckerContext()
    context.ir_version = model.ir_version
    context.opset_imports = {i.domain: i.version for i in model.opset_import} or {"": 1}
    if not model.graph.output:
        raise ModelError("the model has no outputs")
    newest = onnx.defs.onnx_opset_version()
    for node in model.graph.node:
        version = context.opset_imports.get(node.domain, context.opset_imports.get("", 1))
        known = node.domain in _STANDARD and version <= newest and onnx.defs.has(node.op_type)
        if not known or any(a.g.node or a.graphs for a in node.attribute):
            continue
        if any(a.t.ByteSize() > 1 << 20 for a in node.attribute):
            continue
        try:
            onnx.checker.check_node(node, context)
        except (onnx.checker.ValidationError, UnicodeDecodeError) as error:
            raise ModelError(f"{_label(node)} is invalid: {line_of(error)}") from error
    return model


def _label(node: onnx.NodeProto) -> str:
    return f"{node.op_type} node '{node.name or (node.output[0] if node.output else '')}'"


def _inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    """Functions of the model itself, and ONNX operators defined by others that we lack, as plain nodes."""
    if model.functions:
        check_written_out(model)
        try:
            model = onnx.inliner.inline_local_functions(model)
        except (onnx.checker.ValidationError, ValueError, RuntimeError) as error:
            raise ModelError(f"the model's functions cannot be written out: {line_of(error)}") from error
    return expand(model)


# contents


def _initializers(graph: onnx.GraphProto) -> dict[str, np.ndarray]:
    dense = {t.name: array_of(t, f"initializer '{t.name}'") for t in graph.initializer}
    sparse = {t.values.name: dense_of(t, f"initializer '{t.values.name}'") for t in graph.sparse_initializer}
    return dense | sparse


def _node(proto: onnx.NodeProto, versions: Mapping[str, int]) -> Node:
    domain = "" if proto.domain in _STANDARD else proto.domain
    label = _label(proto)
    if not any(proto.output):
        raise ModelError(f"{label} has no output")
    return Node(
        op=proto.op_type,
        name=proto.name,
        inputs=tuple(proto.input),
        outputs=tuple(proto.output),
        attributes={a.name: _attribute(a, label, versions) for a in proto.attribute},
        domain=domain,
        version=versions.get(domain, 1),
    )


def _attribute(attribute: onnx.AttributeProto, label: str, versions: Mapping[str, int]) -> Any:
    kind = attribute.type
    if kind == onnx.AttributeProto.TENSOR:
        return array_of(attribute.t, f"{label}: attribute '{attribute.name}'")
    if kind == onnx.AttributeProto.SPARSE_TENSOR:
        return dense_of(attribute.sparse_tensor, f"{label}: attribute '{attribute.name}'")
    if kind == onnx.AttributeProto.GRAPH:
        return _branch(attribute.g, versions)
    if kind == onnx.AttributeProto.STRING:
        return attribute.s.decode("utf-8", "replace")
    if kind == onnx.AttributeProto.STRINGS:
        return [s.decode("utf-8", "replace") for s in attribute.strings]
    if kind in (
        onnx.AttributeProto.FLOAT,
        onnx.AttributeProto.INT,
        onnx.AttributeProto.FLOATS,
        onnx.AttributeProto.INTS,
    ):
        value = onnx.helper.get_attribute_value(attribute)
        return list(value) if kind in (onnx.AttributeProto.FLOATS, onnx.AttributeProto.INTS) else value
    if kind == onnx.AttributeProto.TYPE_PROTO:
        return attribute.tp.WhichOneof("value")  # of an optional value; what is in it says the rest
    raise UnsupportedError(f"{label}: attribute '{attribute.name}' is of a kind that is not supported")


def _branch(graph: onnx.GraphProto, versions: Mapping[str, int]) -> Graph:
    inputs = []
    for proto in graph.input:
        dtype = dtypes.by_onnx(proto.type.tensor_type.elem_type)
        inputs.append(Value(proto.name, dtype or dtypes.float32, tuple(_fixed(proto) or ())))
    return Graph(
        graph.name,
        tuple(inputs),
        tuple(o.name for o in graph.output),
        in_order([_node(n, versions) for n in graph.node]),
        _initializers(graph),
    )


def _declared(graph: onnx.GraphProto) -> dict[str, Value]:
    """Tensors whose type and shape the file states in full."""
    found = {}
    for proto in (*graph.value_info, *graph.output):
        dtype, shape = dtypes.by_onnx(proto.type.tensor_type.elem_type), _fixed(proto)
        if dtype is not None and shape is not None:
            found[proto.name] = Value(proto.name, dtype, tuple(shape))
    return found


def _fixed(proto: onnx.ValueInfoProto) -> list[int] | None:
    if not proto.type.tensor_type.HasField("shape"):
        return None
    found = proto.type.tensor_type.shape.dim
    return [d.dim_value for d in found] if all(d.HasField("dim_value") for d in found) else None


# inputs and their dimensions


@dataclass(frozen=True)
class OpenValue:
    """An input or output as the model declares it: an open dimension is its name, or None; a shape may be unknown.
    Strings have no element type of ours."""

    name: str
    dtype: DType | None
    shape: tuple[int | str | None, ...] | None
    is_sequence: bool = False
    is_optional: bool = False


def ports(source: Source, shapes: Shapes | None = None) -> tuple[tuple[OpenValue, ...], tuple[OpenValue, ...]]:
    """The inputs and outputs of a model, which may leave dimensions open that `shapes` does not bind."""
    graph = _reshaped(_parsed(source, whole=False), shapes or {}).graph
    constants = {t.name for t in (*graph.initializer, *(s.values for s in graph.sparse_initializer))}
    protos, full, sizes = _bound([p for p in graph.input if p.name not in constants], shapes or {})
    return tuple(_open(p, full, sizes) for p in protos), tuple(_open(p, {}, sizes) for p in graph.output)


def _open(proto: onnx.ValueInfoProto, full: Mapping[str, list[int]], sizes: Mapping[str, int]) -> OpenValue:
    kind = proto.type
    is_optional, is_sequence = kind.HasField("optional_type"), False
    if is_optional:
        kind = kind.optional_type.elem_type
    if kind.HasField("sequence_type"):
        kind, is_sequence = kind.sequence_type.elem_type, True
    tensor = kind.tensor_type
    dtype = dtypes.by_onnx(tensor.elem_type)
    shape: tuple[int | str | None, ...] | None = None
    if proto.name in full:
        shape = tuple(full[proto.name])
    elif tensor.HasField("shape"):
        shape = tuple(_extent(d, sizes) for d in tensor.shape.dim)
    return OpenValue(proto.name, dtype, shape, is_sequence, is_optional)


def _extent(dimension: onnx.TensorShapeProto.Dimension, sizes: Mapping[str, int]) -> int | str | None:
    name = _dimension(dimension)
    if name:
        return sizes.get(name, name)
    return dimension.dim_value if dimension.HasField("dim_value") and dimension.dim_value >= 0 else None


def _inputs(graph: onnx.GraphProto, constants: Mapping[str, np.ndarray], shapes: Shapes) -> tuple[Value, ...]:
    protos, full, sizes = _bound([p for p in graph.input if p.name not in constants], shapes)
    return tuple(Value(p.name, _element_type(p), _shape(p, full.get(p.name), sizes)) for p in protos)


def _bound(
    protos: list[onnx.ValueInfoProto], shapes: Shapes
) -> tuple[list[onnx.ValueInfoProto], dict[str, list[int]], dict[str, int]]:
    """The inputs, the shapes given for whole inputs, and the sizes of dimensions by name."""
    sizes = {name: int(size) for name, size in shapes.items() if isinstance(size, int | np.integer)}
    full = {name: [int(n) for n in shape] for name, shape in shapes.items() if name not in sizes}  # type: ignore[union-attr]
    # a shape of one number may be meant for a dimension
    dimensions = {_dimension(d) for p in protos for d in p.type.tensor_type.shape.dim}
    for name in [n for n, shape in full.items() if len(shape) == 1 and n in dimensions]:
        if all(p.name != name for p in protos):
            sizes[name] = full.pop(name)[0]
    _check_shapes(protos, full, sizes)
    # a full shape also binds the names of its dimensions, for inputs that share them
    for proto in protos:
        if proto.name in full:
            _bind_names(proto, full[proto.name], sizes)
    return protos, full, sizes


def _reshaped(model: onnx.ModelProto, shapes: Shapes) -> onnx.ModelProto:
    """The model with other shapes of inputs than it fixes; nothing is said any more about those that follow."""
    others = [k for k, p in enumerate(model.graph.input) if _overrules(p, shapes.get(p.name))]
    if not others:
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for place in others:
        proto = copy.graph.input[place]
        for dimension, size in zip(proto.type.tensor_type.shape.dim, shapes[proto.name], strict=True):  # type: ignore[arg-type]
            if dimension.HasField("dim_value"):
                dimension.dim_value = int(size)
    del copy.graph.value_info[:]
    for output in copy.graph.output:
        if output.type.HasField("tensor_type"):
            output.type.tensor_type.ClearField("shape")
    return copy


def _overrules(proto: onnx.ValueInfoProto, shape: int | Sequence[int] | None) -> bool:
    fixed = [d.dim_value if d.HasField("dim_value") else None for d in proto.type.tensor_type.shape.dim]
    if shape is None or isinstance(shape, int | np.integer) or len(shape) != len(fixed):
        return False
    return any(n is not None and n > 0 and n != int(size) for n, size in zip(fixed, shape, strict=True))


def _check_shapes(protos: list[onnx.ValueInfoProto], full: Mapping[str, list[int]], sizes: Mapping[str, int]) -> None:
    names = {p.name for p in protos}
    dimensions = {_dimension(d) for p in protos for d in p.type.tensor_type.shape.dim if _dimension(d)}
    for key in full:
        if key not in names:
            raise OptionError(f"shapes: the model has no input '{key}'; it has {_listed(names)}")
    for key, size in sizes.items():
        if key not in dimensions:
            raise OptionError(f"shapes: the model has no dimension '{key}'; it has {_listed(dimensions)}")
        if size < 0:
            raise OptionError(f"shapes: dimension '{key}' cannot be {size}")


def _listed(names: set[str]) -> str:
    return ", ".join(f"'{n}'" for n in sorted(names)) or "none"


def _bind_names(proto: onnx.ValueInfoProto, shape: list[int], sizes: dict[str, int]) -> None:
    declared = proto.type.tensor_type.shape.dim
    if proto.type.tensor_type.HasField("shape") and len(declared) != len(shape):
        raise OptionError(f"shapes: input '{proto.name}' has {len(declared)} dimensions, not {len(shape)}: {shape}")
    for dimension, size in zip(declared, shape, strict=False):
        if _dimension(dimension) and sizes.setdefault(dimension.dim_param, size) != size:
            raise OptionError(
                f"shapes: dimension '{dimension.dim_param}' is {sizes[dimension.dim_param]} and {size} at once"
            )


def _shape(proto: onnx.ValueInfoProto, given: list[int] | None, sizes: Mapping[str, int]) -> tuple[int, ...]:
    if given is not None:
        return tuple(given)
    if not proto.type.tensor_type.HasField("shape"):
        raise OpenShapeError(f"input '{proto.name}' has no shape; pass shapes={{'{proto.name}': [...]}}")
    result: list[int] = []
    for place, dimension in enumerate(proto.type.tensor_type.shape.dim):
        name = _dimension(dimension)
        if name and name in sizes:
            result.append(sizes[name])
        elif dimension.HasField("dim_value") and dimension.dim_value >= 0:
            result.append(dimension.dim_value)
        else:
            label = f"'{name}'" if name else f"number {place}"
            by_name = f" or shapes={{'{name}': ...}}" if name else ""
            raise OpenShapeError(
                f"input '{proto.name}' has a dynamic dimension {label}; "
                f"pass shapes={{'{proto.name}': {_template(proto)}}}{by_name}"
            )
    return tuple(result)


def _dimension(dimension: onnx.TensorShapeProto.Dimension) -> str:
    """The name that ties a dimension to others; exporters write "?" where there is none."""
    name: str = dimension.dim_param
    return "" if name.strip() == "?" else name


def _template(proto: onnx.ValueInfoProto) -> str:
    """The shape to pass, with dots for what the user has to fill in."""
    parts = [
        str(d.dim_value) if d.HasField("dim_value") and d.dim_value >= 0 else "..."
        for d in proto.type.tensor_type.shape.dim
    ]
    return f"[{', '.join(parts)}]"


def _element_type(proto: onnx.ValueInfoProto) -> DType:
    if not proto.type.HasField("tensor_type"):
        kind = proto.type.WhichOneof("value")
        error = BorderError if kind in _BORDER else UnsupportedError
        raise error(f"input '{proto.name}' is a {kind}; only tensors are supported")
    number = proto.type.tensor_type.elem_type
    dtype = dtypes.by_onnx(number)
    if dtype is None:
        error = BorderError if number == onnx.TensorProto.STRING else UnsupportedError
        raise error(f"input '{proto.name}' has element type {type_name(number)}, which is not supported")
    return dtype


def _check_outputs(graph: onnx.GraphProto) -> None:
    """Outputs that are declared as something else than tensors of numbers."""
    for proto in graph.output:
        kind = proto.type.WhichOneof("value")
        if kind in _BORDER:
            raise BorderError(f"output '{proto.name}' is a {kind}; only tensors are supported")
        if proto.type.tensor_type.elem_type == onnx.TensorProto.STRING:
            raise BorderError(f"output '{proto.name}' has element type string, which is not supported")


def _check_names(graph: Graph, outer: frozenset[str]) -> None:
    """Every name is made once and before it is used."""
    made = set(outer) | set(graph.constants)
    for value in graph.inputs:
        if value.name in made and value.name not in outer:
            raise ModelError(f"input '{value.name}' is defined twice")
        made.add(value.name)
    for node in graph.nodes:
        for name in node.inputs:
            if name and name not in made:
                raise ModelError(f"{node.describe()}: its input '{name}' is not defined before it")
        for branch in node.attributes.values():
            if isinstance(branch, Graph):
                _check_names(branch, frozenset(made))
        for name in node.outputs:
            if name and name in made and name not in outer:
                raise ModelError(f"{node.describe()}: its output '{name}' is defined twice")
            made.add(name)
    for name in graph.outputs:
        if name not in made:
            raise ModelError(f"output '{name}' is not defined by any node, input or initializer")
