"""Tilewright: a deep-learning compiler that moves as little data as it can."""

from tilewright.api import compile, load
from tilewright.dynamic.open_model import OpenModel
from tilewright.dynamic.ranged_model import RangedModel
from tilewright.dynamic.staged_model import StagedModel
from tilewright.errors import (
    BudgetError,
    CancelledError,
    InputError,
    InternalError,
    ModelError,
    OptionError,
    TilewrightError,
    ToolError,
    UnsupportedError,
)
from tilewright.model import Model, Port, Profile
from tilewright.options import Options
from tilewright.version import VERSION as __version__


def __getattr__(name: str) -> object:
    """`tilewright.ops`, which messages name, without its cost at every start."""
    if name == "ops":
        import tilewright.ops as ops

        return ops
    raise AttributeError(f"module 'tilewright' has no attribute {name!r}")


__all__ = [
    "BudgetError",
    "CancelledError",
    "InputError",
    "InternalError",
    "Model",
    "ModelError",
    "OpenModel",
    "OptionError",
    "Options",
    "Port",
    "Profile",
    "RangedModel",
    "StagedModel",
    "TilewrightError",
    "ToolError",
    "UnsupportedError",
    "__version__",
    "compile",
    "load",
]
