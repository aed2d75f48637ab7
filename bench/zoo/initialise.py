"""Healthy random weights: activations of order one, no rounding amplified, nothing denormal."""

from collections.abc import Iterable

import numpy as np
import torch
from torch import nn

RESIDUAL_SCALE = 0.2


def he_normal(weight: torch.Tensor, generator: torch.Generator, *, scale: float = 1.0) -> None:
    """Fill a weight stored as (out, in, ...) with N(0, 2 / fan_in), times `scale`."""
    fan_in = weight[0].numel()
    with torch.no_grad():
        weight.normal_(0.0, scale * (2.0 / fan_in) ** 0.5, generator=generator)


def small_normal(tensor: torch.Tensor, generator: torch.Generator, *, mean: float = 0.0, std: float = 0.1) -> None:
    with torch.no_grad():
        tensor.normal_(mean, std, generator=generator)


def initialise_layers(module: nn.Module, generator: torch.Generator) -> None:
    """He weights for every linear and convolution layer, scales near one and small biases everywhere else."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d):
            he_normal(layer.weight, generator)
            if layer.bias is not None:
                small_normal(layer.bias, generator)
        elif isinstance(layer, nn.ConvTranspose2d):
            # With the stride equal to the kernel, each output sees one tap of every input channel.
            small_normal(layer.weight, generator, std=(2.0 / layer.in_channels) ** 0.5)
            if layer.bias is not None:
                small_normal(layer.bias, generator)
        elif isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d | nn.LayerNorm):
            small_normal(layer.weight, generator, mean=1.0)
            small_normal(layer.bias, generator)
        elif isinstance(layer, nn.Embedding):
            small_normal(layer.weight, generator, std=1.0)


def calibrate_batch_norms(module: nn.Module, batch: torch.Tensor) -> None:
    """Set the running statistics of every batch norm to those of one batch, and return to eval mode."""
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            layer.reset_running_stats()
            layer.momentum = None  # a cumulative mean: one batch gives exactly that batch's statistics
    module.train()
    with torch.no_grad():
        module(batch)
    module.eval()


def initialise_image_network(
    module: nn.Module,
    batch: int,
    resolution: int,
    *,
    seed: int,
    image_seed: int,
    last_norms: Iterable[nn.Module] = (),
    last_layers: Iterable[nn.Linear] = (),
) -> dict[str, np.ndarray]:
    """Weights for a network with batch norms, calibrated on a random batch; its example input is returned.

    `last_norms` and `last_layers` end the branches of residual blocks: small scales there keep a deep sum of order one.
    """
    generator = torch.Generator().manual_seed(seed)
    initialise_layers(module, generator)
    for norm in last_norms:
        nn.init.constant_(norm.weight, RESIDUAL_SCALE)
    for layer in last_layers:
        he_normal(layer.weight, generator, scale=RESIDUAL_SCALE)
    shape = (batch, 3, resolution, resolution)
    calibrate_batch_norms(module, torch.randn(shape, generator=generator))
    return {"image": np.random.default_rng(image_seed).standard_normal((1, *shape[1:]), dtype=np.float32)}
