"""The runtimes that models are timed in: one table entry each, and the worker process that runs one of them.

A worker obeys JSON lines on stdin and answers with JSON lines on stdout; in between it waits in a read.
"""

import gc
import importlib
import importlib.metadata
import importlib.util
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import IO, Any

import numpy as np

from tilewright.report import cuda_peers
from tilewright.report.torch_spec import call_spec

Inputs = Mapping[str, np.ndarray]
Call = Callable[[], Any]
"""One inference with everything prepared; its result becomes arrays only outside of the timed region."""


@dataclass(frozen=True)
class Job:
    """What a worker loads. `variant` follows the colon in a runtime's spelling, such as tilewright:none;
    `algorithms` are options of Tilewright's, None where its own default is meant."""

    runtime: str
    variant: str
    model_path: str
    inputs_path: str
    output_names: tuple[str, ...]
    threads: int
    torch_spec: str | None
    algorithms: Mapping[str, str | None] = field(default_factory=dict)
    target: str = "cpu"  # or "cuda"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> "Job":
        return Job(**{**fields, "output_names": tuple(fields["output_names"])})


@dataclass(frozen=True)
class Peer:
    """A runtime: the module that must be importable, its distribution, and how a call is prepared."""

    name: str
    module: str
    distribution: str
    variants: tuple[str, ...]
    prepare: Callable[[Job, Inputs], Call]
    needs_torch_spec: bool = False

    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.module) is not None

    def version(self) -> str | None:
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return None


# Runtimes are imported by name inside their own worker: two thread pools in one process fight for the cores.


def prepare_onnxruntime(job: Job, inputs: Inputs) -> Call:
    onnxruntime = importlib.import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = job.threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "1")
    session = onnxruntime.InferenceSession(job.model_path, options, providers=["CPUExecutionProvider"])
    feeds = dict(inputs)
    names = list(job.output_names)
    return lambda: session.run(names, feeds)


def prepare_openvino(job: Job, inputs: Inputs) -> Call:
    openvino = importlib.import_module("openvino")
    settings = {
        "INFERENCE_NUM_THREADS": job.threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        # On Arm, and on x86 with AMX, the default is a 16-bit type.
        "INFERENCE_PRECISION_HINT": "f32",
    }
    compiled = openvino.Core().compile_model(job.model_path, "CPU", settings)
    request = compiled.create_infer_request()
    feeds = dict(inputs)

    def call() -> list[Any]:
        results = request.infer(feeds, share_inputs=True, share_outputs=True)
        return [results[port] for port in compiled.outputs]

    return call


def prepare_torch(job: Job, inputs: Inputs) -> Call:
    if job.torch_spec is None:
        raise ValueError("torch needs a module: give one as a spec module:function")
    torch = importlib.import_module("torch")
    torch.set_num_threads(job.threads)
    module, own_inputs = call_spec(job.torch_spec)
    arrays = inputs if own_inputs.keys() == inputs.keys() else own_inputs
    tensors = [torch.from_numpy(np.asarray(arrays[name])) for name in own_inputs]
    if job.variant == "frozen":
        # Weights as constants, which inductor may then pack; it helps convolutions and can hurt tiny layers.
        setattr(importlib.import_module("torch._inductor.config"), "freezing", True)  # noqa: B010
    if job.variant == "tilewright":
        backend = importlib.import_module("tilewright.integrations.torch_backend").tilewright
        setattr(importlib.import_module("torch._dynamo.config"), "allow_rnn", True)  # noqa: B010  (docs/pytorch.md)
        module = torch.compile(module, backend=backend, options={"threads": job.threads})
    elif job.variant != "eager":
        module = torch.compile(module)

    def call() -> Any:
        with torch.no_grad():
            return module(*tensors)

    return call


def prepare_tilewright(job: Job, inputs: Inputs) -> Call:
    tilewright = importlib.import_module("tilewright")
    shapes = {name: array.shape for name, array in inputs.items()}
    options = {**job.algorithms, **VARIANTS[job.variant]}
    model = tilewright.compile(job.model_path, shapes=shapes, threads=job.threads, **options)
    feeds = dict(inputs)
    return lambda: model(**feeds)


def prepare_xla(job: Job, inputs: Inputs) -> Call:
    raise ValueError("xla is timed on GPUs; give --target cuda")


VARIANTS: dict[str, dict[str, str]] = {
    "": {}, "unmerged": {"merging": "off"}, "register": {"schedule": "register", "merging": "off"},
    "none": {"schedule": "none", "merging": "off"},
}  # fmt: skip

PEERS: tuple[Peer, ...] = (
    Peer("tilewright", "tilewright", "tilewright", tuple(v for v in VARIANTS if v), prepare_tilewright),
    Peer("onnxruntime", "onnxruntime", "onnxruntime", (), prepare_onnxruntime),
    Peer("openvino", "openvino", "openvino", (), prepare_openvino),
    Peer("torch", "torch", "torch", ("eager", "frozen", "tilewright"), prepare_torch, needs_torch_spec=True),
    Peer("xla", "jax", "jax", (), prepare_xla),
)


def find_peer(spelling: str) -> tuple[Peer, str]:
    """The table entry and the variant of a spelling such as `onnxruntime` or `tilewright:none`."""
    name, _, variant = spelling.partition(":")
    for peer in PEERS:
        if peer.name != name:
            continue
        if variant and variant not in peer.variants:
            known = ", ".join(f"{name}:{each}" for each in peer.variants) or "no variants"
            raise ValueError(f"unknown runtime {spelling!r}: {name} has {known}")
        return peer, variant
    raise ValueError(f"unknown runtime {spelling!r}; there are {', '.join(peer.name for peer in PEERS)}")


def as_arrays(result: Any, output_names: Sequence[str]) -> dict[str, np.ndarray]:
    """A runtime's result, be it an array, a sequence or a mapping, as arrays by output name."""
    if isinstance(result, Mapping):
        return {name: np.asarray(result[name]) for name in output_names}
    results = list(result) if isinstance(result, list | tuple) else [result]
    return {name: _on_host(array) for name, array in zip(output_names, results, strict=True)}


def _on_host(array: Any) -> np.ndarray:
    return np.asarray(array.cpu() if hasattr(array, "cpu") else array)


def measure(call: Call, seconds: float, iterations: int | None, inferences: int = 1) -> list[float]:
    """Seconds of each inference, after a short warm-up that brings caches, clocks and thread pools back; a call may
    be several of them."""
    clock = time.perf_counter
    warm_until = clock() + 0.1 * seconds
    call()
    while clock() < warm_until:
        call()
    times: list[float] = []
    limit = iterations if iterations is not None else sys.maxsize
    gc.collect()
    gc.disable()
    until = clock() + seconds
    while len(times) < limit:
        start = clock()
        call()
        end = clock()
        times.append((end - start) / inferences)
        if end >= until:
            break
    gc.enable()
    return times


def serve() -> None:
    """The worker's main loop: load, measure, outputs; ends at the end of stdin."""
    # Libraries print to stdout as they like; replies keep a descriptor of their own.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def report_failure(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        traceback.print_exception(kind, error, trace)
        first_line = (str(error).strip() or kind.__name__).splitlines()[0]
        send(replies, {"error": f"{kind.__name__}: {first_line}"})

    sys.excepthook = report_failure

    job: Job | None = None
    call: Call | None = None
    inferences = 1
    for line in sys.stdin:
        message = json.loads(line)
        command = message["command"]
        if command == "load":
            start = time.perf_counter()
            job = Job.from_json(message["job"])
            peer, _ = find_peer(job.runtime)
            with np.load(job.inputs_path) as archive:
                inputs = {name: archive[name] for name in archive.files}
            on_gpu = job.target == "cuda"
            call = cuda_peers.prepare(job, inputs) if on_gpu else peer.prepare(job, inputs)
            inferences = cuda_peers.IN_FLIGHT if on_gpu else 1
            call()
            cold_start_s = time.perf_counter() - start
            version = getattr(sys.modules[peer.module], "__version__", None)
            send(replies, {"cold_start_s": cold_start_s, "version": version})
            continue
        if job is None or call is None:
            raise ValueError(f"{command} before load")
        if command == "measure":
            busy_before = time.process_time()
            times = measure(call, message["seconds"], message["iterations"], inferences)
            send(replies, {"times": times, "cpu_s": time.process_time() - busy_before})
        elif command == "outputs":
            np.savez(message["path"], **as_arrays(call(), job.output_names))  # type: ignore[arg-type]
            send(replies, {"path": message["path"]})
        else:
            raise ValueError(f"unknown command {command!r}")


def send(channel: IO[str], message: Mapping[str, Any]) -> None:
    channel.write(json.dumps(message) + "\n")
    channel.flush()
