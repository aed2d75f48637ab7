"""Modules of PyTorch by name: `module:function`, called in the process that times them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np


def call_spec(spec: str) -> tuple[Any, Mapping[str, np.ndarray]]:
    """Call `module:function`, with any further parts as string arguments: `bench.zoo:build:mmoe:full`.

    It gives a module and its example inputs: by name, or, as the module takes them, one or several in order."""
    module_name, _, rest = spec.partition(":")
    function_name, *arguments = rest.split(":")
    if not function_name:
        raise ValueError(f"torch spec {spec!r} is not of the form module:function")
    module, inputs = getattr(importlib.import_module(module_name), function_name)(*arguments)
    return module, inputs if isinstance(inputs, Mapping) else _by_name(module, inputs)


def _by_name(module: Any, inputs: Any) -> dict[str, np.ndarray]:
    ordered = inputs if isinstance(inputs, tuple | list) else (inputs,)
    names = list(inspect.signature(module.forward).parameters)
    if len(names) < len(ordered):  # *args has one name for all
        names = [f"input{k}" for k in range(len(ordered))]
    return {name: np.asarray(value.detach() if hasattr(value, "detach") else value)
            for name, value in zip(names, ordered, strict=False)}  # fmt: skip
