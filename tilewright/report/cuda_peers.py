"""The runtimes of the table on a GPU: inputs and outputs stay on the device, and calls are timed in flight."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tilewright.report.torch_spec import call_spec

IN_FLIGHT = 20  # calls between one wait and the next: one alone would time the way from Python to the device
Inputs = Mapping[str, np.ndarray]
Call = Callable[[], Any]


def prepare(job: Any, inputs: Inputs) -> Call:
    """`IN_FLIGHT` inferences of the job's runtime, waited for together; gives the outputs of the last."""
    one, outputs = _PREPARE[job.runtime](job, inputs)
    torch = _torch()

    def call() -> list[Any]:
        for _ in range(IN_FLIGHT):
            one()
        torch.cuda.synchronize()
        return outputs()

    return call


Prepared = tuple[Call, Callable[[], list[Any]]]
"""One inference put on its way, and the outputs of the last one."""


def _torch() -> Any:
    """PyTorch holds the arrays of all runtimes, in full float32 as they are."""
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise ValueError("there is no GPU that this build of torch can use")
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    return torch


def prepare_tilewright(job: Any, inputs: Inputs) -> Prepared:
    torch, tilewright = _torch(), importlib.import_module("tilewright")
    shapes = {name: array.shape for name, array in inputs.items()}
    model = tilewright.compile(
        job.model_path, shapes=shapes, target="cuda", schedule=job.variant or None, **job.algorithms
    )
    given = [torch.from_numpy(np.asarray(inputs[port.name])).cuda() for port in model.inputs]
    results = [torch.empty(p.shape, dtype=getattr(torch, p.dtype.name), device="cuda") for p in model.outputs]
    return lambda: model.run_into(given, results), lambda: results


def prepare_torch(job: Any, inputs: Inputs) -> Prepared:
    """torch.compile with its CUDA graphs, or the module as it is captured in one."""
    torch = _torch()
    module, own_inputs = call_spec(job.torch_spec)
    arrays = inputs if own_inputs.keys() == inputs.keys() else own_inputs
    module = module.to("cuda")
    given = [torch.from_numpy(np.asarray(arrays[name])).cuda() for name in own_inputs]
    if job.variant != "eager":
        module = torch.compile(module, mode="reduce-overhead")
    last: list[Any] = []

    def run() -> None:
        with torch.no_grad():
            last[:] = [module(*given)]

    for _ in range(3):
        run()
    torch.cuda.synchronize()
    if job.variant == "eager":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay, lambda: _listed(last[0])
    return run, lambda: _listed(last[0])


def prepare_onnxruntime(job: Any, inputs: Inputs) -> Prepared:
    onnxruntime = importlib.import_module("onnxruntime")
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        raise ValueError("this build of onnxruntime has no CUDA provider")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(job.model_path, options, providers=["CUDAExecutionProvider"])
    binding = session.io_binding()
    for name, array in inputs.items():
        binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(array, "cuda", 0))
    for name in job.output_names:
        binding.bind_output(name, "cuda")
    return lambda: session.run_with_iobinding(binding), binding.copy_outputs_to_cpu


def prepare_xla(job: Any, inputs: Inputs) -> Prepared:
    """The model node by node in JAX, which puts calls on their way by threads of its own."""
    from tilewright.report.xla import jax_function

    jax = importlib.import_module("jax")
    run, weights, names = jax_function(job.model_path)
    weights, given = jax.device_put(weights), jax.device_put({name: inputs[name] for name in names})
    with jax.default_matmul_precision("highest"):
        compiled = jax.jit(run).lower(weights, given).compile()
    last: list[Any] = []

    def one() -> None:
        last[:] = compiled(weights, given)

    return one, lambda: list(jax.block_until_ready(last))


def _listed(result: Any) -> list[Any]:
    if isinstance(result, Mapping):
        return list(result.values())
    return list(result) if isinstance(result, list | tuple) else [result]


_PREPARE: Mapping[str, Callable[[Any, Inputs], Prepared]] = {
    "tilewright": prepare_tilewright,
    "torch": prepare_torch,
    "onnxruntime": prepare_onnxruntime,
    "xla": prepare_xla,
}
RUNTIMES = tuple(_PREPARE)
