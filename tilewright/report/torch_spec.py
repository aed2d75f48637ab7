"""Modules of PyTorch by name: `module:function`, called in the process that times them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np


def call_spec(spec: str) -> tuple[Any, Mapping[str, np.ndarray]]:
    """Call `module:function`, with any further parts as string arguments: `bench.zoo:build:mmoe:full`."""
    module_name, _, rest = spec.partition(":")
    function_name, *arguments = rest.split(":")
    if not function_name:
        raise ValueError(f"torch spec {spec!r} is not of the form module:function")
    module, inputs = getattr(importlib.import_module(module_name), function_name)(*arguments)
    return module, inputs
