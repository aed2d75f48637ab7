"""What a user trains with: `train` makes a compiled training step of a module of PyTorch, on one process or several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tilewright.errors import OptionError
from tilewright.options import Options, check_whole_number, checked_duration
from tilewright.transform.gradient.optimisers import SGD, Adam

if TYPE_CHECKING:
    import torch

    from tilewright.distributed.training import RankedTraining

__all__ = ["SGD", "Adam", "train"]


def train(
    module: torch.nn.Module, example_inputs: Sequence[Any], optimiser: SGD | Adam, *, mesh: str | None = None,
    micro_batches: int = 1, timeout: float = 60.0, cluster: str = "processes", options: Options | None = None,
    **given: Any,
) -> RankedTraining:  # fmt: skip
    """A training step of a module that returns its loss: forward, backward and the optimiser's update, compiled for
    inputs like the examples. Each call does one step and returns the loss before it; `weights()` has the weights.

    `optimiser` is an SGD or an Adam. With a `mesh`, such as "tp=2", the step is shared out to the processes that
    torchrun has started, as `cluster` describes their links. `micro_batches` cuts the inputs along their first
    dimension into parts whose gradients are added up: the loss is the mean of theirs. What else is given are options
    of `tilewright.compile`."""
    if not isinstance(optimiser, SGD | Adam):
        raise OptionError(f"optimiser must be a tilewright.training.SGD or Adam, not a {type(optimiser).__name__}")
    check_whole_number("micro_batches", micro_batches, least=1)
    try:
        import torch
    except ImportError as error:
        raise OptionError("training needs PyTorch: pip install 'tilewright[torch]'") from error
    if not isinstance(module, torch.nn.Module):
        raise OptionError(f"a training step is that of a torch.nn.Module, not of a {type(module).__name__}")
    from tilewright.distributed.compiling import Asked
    from tilewright.distributed.meshes import parse_mesh
    from tilewright.distributed.training import compile_training
    from tilewright.ops import lower
    from tilewright.pytorch.training import trained_graph
    from tilewright.transform.clean.fold import fold_constants
    from tilewright.transform.gradient.step import training_step

    chosen = Options.from_environment(**given) if options is None else options.override(**given)
    limit = checked_duration("timeout", timeout)
    asked = None if mesh is None else Asked(parse_mesh(mesh), micro_batches, limit, cluster)
    found = trained_graph(module, example_inputs, micro_batches)
    step = training_step(fold_constants(lower(found.graph)), found.weights, optimiser, micro_batches)
    return compile_training(step, found.names, optimiser, asked, chosen, micro_batches)
