"""Tilewright: a deep-learning compiler that moves as little data as it can."""

from tilewright.api import Model, Port, Profile, compile
from tilewright.errors import (
    InputError,
    InternalError,
    ModelError,
    OptionError,
    TilewrightError,
    ToolError,
    UnsupportedError,
)
from tilewright.options import Options


def __getattr__(name: str) -> object:
    """`tilewright.ops`, which messages name, without its cost at every start."""
    if name == "ops":
        import tilewright.ops as ops

        return ops
    raise AttributeError(f"module 'tilewright' has no attribute {name!r}")


__version__ = "0.1.0"

__all__ = [
    "InputError",
    "InternalError",
    "Model",
    "ModelError",
    "OptionError",
    "Options",
    "Port",
    "Profile",
    "TilewrightError",
    "ToolError",
    "UnsupportedError",
    "compile",
]
