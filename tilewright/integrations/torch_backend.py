"""The entry point of `torch.compile(module, backend="tilewright")`: PyTorch finds it by name, nothing is imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tilewright.api import compile_whole
from tilewright.errors import OptionError
from tilewright.options import Options

if TYPE_CHECKING:
    from torch import fx


def tilewright(
    module: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """Compile a graph that dynamo found. `options` are the fields of tilewright.Options."""
    if mode not in (None, "default"):
        raise OptionError(
            f"mode {mode!r} is of PyTorch's own backend; pass options={{'threads': 2}} and the like instead"
        )
    from tilewright.pytorch.backend import compile_for_dynamo

    chosen = Options.from_environment(**(options or {}))
    return compile_for_dynamo(module, inputs, lambda graph: compile_whole(graph, chosen))
