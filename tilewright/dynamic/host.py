"""Nodes outside of native code, one at a time, by ONNX's reference evaluator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tilewright.errors import ModelError, ToolError
from tilewright.ir.forms.graph import Node

_FAULTS = (ArithmeticError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError)


def evaluate(node: Node, values: Sequence[Any]) -> list[Any]:
    """The outputs of a node for these inputs, None for those that are left out."""
    from onnx import helper, numpy_helper

    try:
        from onnx.reference import ReferenceEvaluator
    except ImportError as error:
        raise ToolError(f"{node.describe()} runs by ONNX's reference evaluator, which is not here: {error}") from error
    names = [f"i{k}" if name else "" for k, name in enumerate(node.inputs)]
    results = [f"o{k}" if name else "" for k, name in enumerate(node.outputs)]
    attributes = {
        name: numpy_helper.from_array(value) if isinstance(value, np.ndarray) else value
        for name, value in node.attributes.items()
    }
    proto = helper.make_node(node.op, names, results, domain=node.domain, **attributes)
    opsets = [helper.make_opsetid(node.domain, node.version)]
    takes, gives = [n for n in names if n], [n for n in results if n]
    function = helper.make_function("tilewright", "outside", takes, gives, [proto], opsets)
    try:
        found = ReferenceEvaluator(function).run(None, {n: v for n, v in zip(names, values, strict=True) if n}, {})
    except ImportError as error:
        raise ToolError(f"{node.describe()} needs a package that is not here: {error}") from error
    except _FAULTS as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(f"{node.describe()} failed in ONNX's reference evaluator: {line}") from error
    by_name = dict(zip(gives, found, strict=True))
    return [_array(by_name.get(name)) for name in results]


def _array(value: Any) -> Any:
    return np.asarray(value) if isinstance(value, np.generic | str) else value
