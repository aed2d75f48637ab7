"""The zoo: models with healthy seeded weights, their example inputs, references and ONNX exports."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import nn

from bench.zoo import (
    bert_384,
    bert_base,
    bsrn,
    conformer,
    efficientnet_b0,
    lstm,
    mmoe,
    mobilenet_v2,
    mobilevit_s,
    nafnet,
    nerf,
    resnet50,
    resnext101,
    restormer,
    swin,
    unet,
    vit_s32,
)

Build = Callable[[str], tuple[nn.Module, dict[str, np.ndarray]]]

MODELS: Mapping[str, Build] = {
    "mobilenet_v2": mobilenet_v2.build,
    "bert_base": bert_base.build,
    "lstm": lstm.build,
    "mmoe": mmoe.build,
    "resnet50": resnet50.build,
    "efficientnet_b0": efficientnet_b0.build,
    "vit_s32": vit_s32.build,
    "unet": unet.build,
    "nerf": nerf.build,
    "resnext101": resnext101.build,
    "swin_t": swin.build_tiny,
    "swin_b": swin.build_base,
    "mobilevit_s": mobilevit_s.build,
    "nafnet": nafnet.build,
    "bert_384": bert_384.build,
    "conformer": conformer.build,
    "bsrn": bsrn.build,
    "restormer": restormer.build,
}
SIZES = ("small", "full")
EXPORTERS = ("torchscript", "dynamo")


def build(name: str, size: str, batch: int | str = 1) -> tuple[nn.Module, dict[str, np.ndarray]]:
    """The model in eval mode and its example inputs by name, in the order in which forward takes them; several times
    as many for a batch of them, no two alike."""
    if name not in MODELS:
        raise ValueError(f"no model named {name!r} in the zoo; there are {', '.join(MODELS)}")
    if size not in SIZES:
        raise ValueError(f"no size {size!r}; there are {', '.join(SIZES)}")
    module, inputs = MODELS[name](size)
    return module, {key: batched(array, int(batch)) for key, array in inputs.items()}


def batched(array: np.ndarray, batch: int) -> np.ndarray:
    """Copies along the first axis, each moved on along the last."""
    return np.concatenate([np.roll(array, number, axis=-1) for number in range(batch)], axis=0)


def export(
    name: str, size: str, path: Path | str, *, exporter: str = "torchscript", opset: int | None = None, batch: int = 1
) -> None:
    """Write the model as one ONNX file, by either of PyTorch's two exporters."""
    module, inputs = build(name, size, batch)
    export_module(module, inputs, path, exporter=exporter, opset=opset)


def export_module(
    module: nn.Module,
    inputs: Mapping[str, np.ndarray],
    path: Path | str,
    *,
    exporter: str = "torchscript",
    opset: int | None = None,
) -> None:
    if exporter not in EXPORTERS:
        raise ValueError(f"no exporter {exporter!r}; there are {', '.join(EXPORTERS)}")
    is_dynamo = exporter == "dynamo"
    # The dynamo exporter writes opset 18 at least; the older one knows 17, the first with LayerNormalization.
    version = opset if opset is not None else 18 if is_dynamo else 17
    torch.onnx.export(
        module,
        tuple(torch.from_numpy(array) for array in inputs.values()),
        str(path),
        input_names=list(inputs),
        output_names=list(output_names(module)),
        opset_version=version,
        dynamo=is_dynamo,
        external_data=False,
        verbose=False,
    )


def output_names(module: nn.Module) -> tuple[str, ...]:
    names = module.output_names
    if not isinstance(names, tuple):
        raise TypeError(f"{type(module).__name__}.output_names must be a tuple of names")
    return names


def reference(module: nn.Module, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Outputs by name with every float in float64: what all runtimes are measured against."""
    wide = {name: array.astype(np.float64) if array.dtype == np.float32 else array for name, array in inputs.items()}
    return _run(copy.deepcopy(module).double(), wide)


def float32_outputs(module: nn.Module, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Outputs by name as PyTorch computes them in float32: its error is the yardstick for ours."""
    return _run(module, inputs)


def relative_error(outputs: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray]) -> float:
    """The largest over the outputs of norm(output - reference) / norm(reference)."""
    return max(
        float(np.linalg.norm(outputs[name].astype(np.float64) - expected) / np.linalg.norm(expected))
        for name, expected in reference.items()
    )


def _run(module: nn.Module, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    with torch.no_grad():
        results = module(*(torch.from_numpy(array) for array in inputs.values()))
    if isinstance(results, torch.Tensor):
        results = (results,)
    return {name: result.numpy() for name, result in zip(output_names(module), results, strict=True)}
