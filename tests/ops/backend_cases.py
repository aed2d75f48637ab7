"""ONNX's own backend cases for supported operators, with inputs that must be constant turned into initializers."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.backend.test.case.node import collect_testcases

from tilewright import ops
from tilewright.ir.forms import dtypes
from tilewright.ops.steps.control import NAMES as CONTROL

# Other random numbers than ours, and what is rounded to zero here and to 1e-7 in the case.
_SKIPPED = (
    "dropout_default",
    "training_dropout",
    "bernoulli",
    "dft_inverse",
)

_STEP = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass(frozen=True)
class Case:
    name: str
    model: onnx.ModelProto
    inputs: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]
    rtol: float
    atol: float


@cache
def cases() -> dict[str, Case]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [_case(c) for c in collect_testcases(None)]
    return {c.name: c for c in found if c is not None}


def _case(test) -> Case | None:
    model = test.model
    if model is None or test.data_sets is None or any(part in test.name for part in _SKIPPED):
        return None
    versions = {i.domain: i.version for i in model.opset_import}
    if not all(_lowerable(n, versions) for n in model.graph.node):
        return None
    given, expected = test.data_sets[0]
    if any(v.type.WhichOneof("value") != "tensor_type" for v in (*model.graph.input, *model.graph.output)):
        return None
    if not all(_plain(a) for a in (*given, *expected)):
        return None
    inputs = {i.name: _array(a) for i, a in zip(model.graph.input, given, strict=False)}
    outputs = {o.name: _array(a) for o, a in zip(model.graph.output, expected, strict=True)}
    frozen = _frozen(model, inputs)
    rest = {n: a for n, a in inputs.items() if n in {i.name for i in frozen.graph.input}}
    # a written-out operator rounds after every step in 16 bits; sums of ours do not
    narrow = max((_STEP.get(str(a.dtype), 0.0) for a in outputs.values()), default=0.0)
    return Case(test.name, frozen, rest, outputs, max(test.rtol, 2 * narrow), max(test.atol, narrow / 8))


def _lowerable(node: onnx.NodeProto, versions: dict[str, int]) -> bool:
    """Whether the operator is supported, itself or through the function that ONNX defines it by."""
    version = versions.get(node.domain, 1)
    if ops.find(node.op_type, node.domain, version) is not None or node.op_type in CONTROL:
        return True
    if not onnx.defs.has(node.op_type, node.domain):
        return False
    schema = onnx.defs.get_schema(node.op_type, version, node.domain)
    return schema.has_function or schema.has_context_dependent_function


def _array(value) -> np.ndarray:
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)


def _plain(value) -> bool:
    if isinstance(value, onnx.TensorProto):
        return dtypes.by_onnx(value.data_type) is not None
    return isinstance(value, np.ndarray | np.generic) and dtypes.by_numpy(np.asarray(value).dtype) is not None


def _frozen(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> onnx.ModelProto:
    """The model with those inputs as initializers whose values decide shapes."""
    versions = {i.domain: i.version for i in model.opset_import}
    fixed: set[str] = set()
    decomposed = len(model.graph.node) > 1
    for node in model.graph.node:
        entry = ops.find(node.op_type, node.domain, versions.get(node.domain, 1))
        decomposed = decomposed or entry is None
        fixed.update(node.input[p] for p in (entry.constants if entry else ()) if p < len(node.input))
        if node.op_type == "Loop":  # whose trip count may be a function of any number
            fixed.update(n for n, a in inputs.items() if a.size == 1)
    if decomposed:  # an operator written out: what is small and integer decides shapes
        fixed.update(n for n, a in inputs.items() if a.dtype.kind == "i" and a.size <= 5)
    fixed &= set(inputs)
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.graph.input[:]
    copy.graph.input.extend(i for i in model.graph.input if i.name not in fixed)
    copy.graph.initializer.extend(numpy_helper.from_array(inputs[n], n) for n in sorted(fixed))
    return copy
