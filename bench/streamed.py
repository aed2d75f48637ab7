"""Memory while a model with large weights is compiled, saved and loaded: python -m bench.streamed --gib 8.

A chain of products is written with its weights in a file beside it, and compiled in a process of its own. Printed is
the most anonymous memory of that process (what the system cannot drop; pages of mapped files are not among it) beside
twice the largest tensor and half a GiB, and how long a saved directory takes to load and to answer first.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

_GIB = 1 << 30
_LIMIT = 0.5  # GiB, beside twice the largest tensor


def write_model(folder: Path, gib: float, width: int) -> Path:
    """A chain of square products, weights in one file beside the model."""
    count = max(1, round(gib * _GIB / (width * width * 4)))
    generator = np.random.default_rng(7)
    tensors, nodes, offset = [], [], 0
    with (folder / "weights.bin").open("wb") as file:
        for number in range(count):
            array = generator.standard_normal((width, width), np.float32)
            array *= width**-0.5
            array.tofile(file)
            tensor = TensorProto(name=f"w{number}", data_type=TensorProto.FLOAT, dims=[width, width])
            tensor.data_location = TensorProto.EXTERNAL
            where = {"location": "weights.bin", "offset": str(offset), "length": str(array.nbytes)}
            for key, value in where.items():
                tensor.external_data.add(key=key, value=value)
            offset += array.nbytes
            tensors.append(tensor)
            nodes.append(helper.make_node("MatMul", [f"x{number}", f"w{number}"], [f"x{number + 1}"]))
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, width]) for name in ("x0", f"x{count}")]
    graph = helper.make_graph(nodes, "chain", ports[:1], ports[1:], tensors)
    path = folder / "model.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())
    return path


def anonymous_bytes() -> int:
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("RssAnon"))


def _work(model: str, saved: str) -> None:
    """In a process of its own: compile, save, load, call."""
    import tilewright

    begun, most, over = anonymous_bytes(), [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.005):
            most[0] = max(most[0], anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    compiled = tilewright.compile(model)
    seconds = time.perf_counter() - start
    over.set()
    watcher.join()
    compiled.save(saved)
    x = np.ones(compiled.inputs[0].shape, np.float32)
    wanted = compiled(x)[0]
    start = time.perf_counter()
    loaded = tilewright.load(saved)
    load_seconds = time.perf_counter() - start
    same = np.array_equal(loaded(x)[0], wanted)
    first_seconds = time.perf_counter() - start
    row = {"anonymous": most[0] - begun, "compile": seconds, "load": load_seconds, "first": first_seconds, "same": same}
    print(json.dumps(row), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="of weights")
    parser.add_argument("--width", type=int, default=4096, help="of each square product")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="streamed-") as name:
        folder = Path(name)
        path = write_model(folder, arguments.gib, arguments.width)
        call = f"from bench.streamed import _work; _work({str(path)!r}, {str(folder / 'saved')!r})"
        child = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, check=False)
        if child.returncode:
            print(child.stderr, file=sys.stderr)
            return 1
        row = json.loads(child.stdout.splitlines()[-1])
    tensor = arguments.width**2 * 4
    allowed = 2 * tensor + _LIMIT * _GIB
    print(f"weights {arguments.gib:.2f} GiB, largest tensor {tensor / _GIB:.3f} GiB, onnx {onnx.__version__}")
    print(f"anonymous memory while compiling: {row['anonymous'] / _GIB:.3f} GiB of {allowed / _GIB:.3f} allowed")
    print(f"compile {row['compile']:.1f} s; load {row['load']:.3f} s; load and first answer {row['first']:.3f} s")
    print("the loaded model gives the same answer" if row["same"] else "the loaded model gives ANOTHER answer")
    return 0 if row["same"] and row["anonymous"] <= allowed else 1


if __name__ == "__main__":
    sys.exit(main())
