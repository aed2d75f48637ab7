"""Weights larger than a device's memory: python -m bench.offloaded [--gib 24] [--memory 8GiB] [--rows 1].

A chain of square products in float16, whose weights pass through the device while it computes, beside the larger of
what the link takes for them and of what the kernels take; beside `accelerate`'s offloading, where that is installed;
and beside a loop of PyTorch with pinned weights, a stream for copies and as many weights on the device. The rest of the
device's memory is held meanwhile. Weights are overlapping windows of one file, each some bytes behind the one before.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from onnx import TensorProto, helper

import tilewright
from bench.sweeps import _timed, ballast, link_rates
from tilewright.options import checked_size

_GIB = 1 << 30
_SHIFT = 4096  # bytes between two weights' beginnings
_BESIDE = 512 << 20  # bytes for the code of kernels and what the driver takes, beside the bound
_TIMES = 5
_SLOTS = 3  # weights of the loop of PyTorch that are on their way or read


def windows(path: Path, count: int, width: int) -> list[np.ndarray]:
    """Weights of so many layers in a file that has little more than one of them."""
    size = width * width + (count - 1) * _SHIFT // 2
    generator = np.random.default_rng(7)
    (generator.standard_normal(size, np.float32) * width**-0.5).astype(np.float16).tofile(path)
    return [np.memmap(path, np.float16, "r", n * _SHIFT, (width, width)) for n in range(count)]


def chain(folder: Path, count: int, width: int, rows: int) -> Path:
    """x times all weights, one after the other."""
    tensors, nodes = [], []
    for number in range(count):
        tensor = TensorProto(name=f"w{number}", data_type=TensorProto.FLOAT16, dims=[width, width])
        tensor.data_location = TensorProto.EXTERNAL
        about = {"location": "weights.bin", "offset": str(number * _SHIFT), "length": str(2 * width * width)}
        for key, value in about.items():
            tensor.external_data.add(key=key, value=value)
        tensors.append(tensor)
        nodes.append(helper.make_node("MatMul", [f"x{number}", f"w{number}"], [f"x{number + 1}"]))
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, [rows, width]) for name in ("x0", f"x{count}")]
    graph = helper.make_graph(nodes, "chain", ports[:1], ports[1:], tensors)
    path = folder / "model.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())
    return path


# --- peers


class Streamed:
    """A loop of PyTorch: some weights stay on the device, the others are copied ahead from pinned memory."""

    def __init__(self, weights: Sequence[np.ndarray], room: int) -> None:
        size = weights[0].nbytes
        staying = min(len(weights), room // size - _SLOTS)
        every = len(weights) / max(1, len(weights) - staying)
        passing = {int(n * every) for n in range(len(weights) - staying)}  # spread out, so that the link is never idle
        self._weights: list[tuple[bool, torch.Tensor]] = []
        for number, weight in enumerate(weights):
            if number in passing:
                pinned = torch.empty(weight.shape, dtype=torch.float16, pin_memory=True)
                pinned.numpy()[...] = weight
                self._weights.append((True, pinned))
            else:
                self._weights.append((False, torch.from_numpy(np.array(weight)).cuda()))
        self._slots = [torch.empty(weights[0].shape, dtype=torch.float16, device="cuda") for _ in range(_SLOTS)]
        self._copies = torch.cuda.Stream()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        own = torch.cuda.current_stream()
        self._copies.wait_stream(own)
        passing = [weight for passes, weight in self._weights if passes]
        read: list[Any] = []  # events: what a slot held was read
        copied: list[Any] = []

        def copy() -> None:
            number = len(copied)
            with torch.cuda.stream(self._copies):
                if number >= _SLOTS:
                    self._copies.wait_event(read[number - _SLOTS])
                self._slots[number % _SLOTS].copy_(passing[number], non_blocking=True)
                copied.append(self._copies.record_event())

        for _ in range(min(_SLOTS, len(passing))):
            copy()
        at = 0
        for passes, weight in self._weights:
            if not passes:
                x = x @ weight
                continue
            own.wait_event(copied[at])
            x = x @ self._slots[at % _SLOTS]
            read.append(own.record_event())
            at += 1
            if len(copied) < len(passing):
                copy()
        return x


def by_accelerate(weights: Sequence[np.ndarray], memory: int) -> Callable[[torch.Tensor], torch.Tensor]:
    from accelerate import dispatch_model, infer_auto_device_map

    layers = []
    for weight in weights:
        layer = torch.nn.Linear(*weight.shape, bias=False, dtype=torch.float16, device="meta")
        layer.weight = torch.nn.Parameter(torch.from_numpy(np.array(weight)).t(), requires_grad=False)
        layers.append(layer)
    model = torch.nn.Sequential(*layers)
    places = infer_auto_device_map(model, max_memory={0: memory - weights[0].nbytes, "cpu": 1 << 40})
    return dispatch_model(model, places)  # type: ignore[no-any-return]


# --- all of it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=24.0, help="of weights")
    parser.add_argument("--memory", default="8GiB")
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--target", default="cuda")
    asked = parser.parse_args()
    limit = checked_size("memory", asked.memory)
    count = round(asked.gib * _GIB / (2 * asked.width**2))
    with tempfile.TemporaryDirectory(prefix="offloaded-") as name:
        folder = Path(name)
        weights = windows(folder / "weights.bin", count, asked.width)
        model = chain(folder, count, asked.width, asked.rows)
        compare(model, weights, asked.rows, limit, asked.target)


def compare(model: Path, weights: Sequence[np.ndarray], rows: int, limit: int, target: str) -> None:
    width = weights[0].shape[0]
    x = np.random.default_rng(0).standard_normal((rows, width), np.float32).astype(np.float16)
    rate, _ = link_rates()
    held = ballast(limit + _BESIDE)
    begin = time.perf_counter()
    made: Any = tilewright.compile(model, target=target, device_memory=limit, effort="fast")
    compile_s = time.perf_counter() - begin
    runner = made.artifact.runner
    result = np.empty((rows, width), np.float16)
    runner.run([x], [result])
    ours = median(_timed(lambda: runner.run([x], [result])) for _ in range(_TIMES))
    taken = limit + _BESIDE - torch.cuda.mem_get_info()[0]
    compute = sum(runner.profile([x], [np.empty_like(result)])) / 1e9
    passing = sum(copy.bytes for copy in runner.image.copies)
    link = passing / rate
    runner.close()
    total = sum(w.nbytes for w in weights)
    print(f"{total / _GIB:.1f} GiB of weights in {limit / _GIB:.1f} GiB, {len(weights)} products of {rows} rows, "
          f"compiled in {compile_s:.0f} s; {passing / _GIB:.1f} GiB pass a run, device memory taken "
          f"{taken / 2**20:.0f} MiB")  # fmt: skip
    print(f"  {1e3 * ours:.1f} ms; link {1e3 * link:.1f} ms at {rate / 1e9:.1f} GB/s, kernels {1e3 * compute:.1f} ms: "
          f"{ours / max(link, compute):.3f} of the larger (must 1.1)", flush=True)  # fmt: skip
    there = torch.from_numpy(x).cuda()
    del held
    torch.cuda.empty_cache()
    for peer, make in (("a loop of PyTorch", Streamed), ("accelerate", by_accelerate)):
        if peer == "accelerate" and importlib.util.find_spec("accelerate") is None:
            print("  accelerate is not installed")
            continue
        call: Any = make(weights, limit)
        with torch.no_grad():
            right = call(there).float().cpu().numpy()
            seconds = median(_timed(lambda call=call: call(there)) for _ in range(_TIMES))  # type: ignore[misc]
        wrong = np.abs(result.astype(np.float32) - right).max() / np.abs(right).max()
        print(
            f"  {peer} {1e3 * seconds:.1f} ms: {ours / seconds:.2f} of it; largest difference {wrong:.1e}", flush=True
        )
        del call
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
