"""What this machine can do at best: float32 multiply-adds in registers and reads from memory, all threads loaded."""

import argparse
import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tilewright.options import Options
from tilewright.runtime.cache import Cache
from tilewright.runtime.toolchain import compile_shared, default_flags, find_compiler, this_machine
from tilewright.target import machine

REPETITIONS = 15
FMA_ITERATIONS = 2_000_000
# Well beyond any outer cache, so that reads come from memory.
READ_BYTES_PER_THREAD = 256 << 20


@dataclass(frozen=True)
class Peak:
    """Of all `threads` together: float32 operations a second, a multiply-add being two, and bytes read a second."""

    threads: int
    operations_per_second: float
    bytes_per_second: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def chain_count(registers: int) -> int:
    return 24 if registers >= 32 else 12


def fma_source(vector_bytes: int, registers: int) -> str:
    """Independent chains of multiply-adds on most of the registers, hiding their latency.

    Each adds to its own register: Arm's multiply-add overwrites the addend, and any other form costs a move.
    """
    chains = range(chain_count(registers))
    declare = "\n".join(f"    vec a{i} = (vec){{0}} + {i + 1}.0f;" for i in chains)
    step = "\n".join(f"        a{i} += a{i} * m;" for i in chains)
    total = " + ".join(f"a{i}" for i in chains)
    lanes = vector_bytes // 4
    return f"""
typedef float vec __attribute__((vector_size({vector_bytes})));
__attribute__((visibility("default"))) double fma_chains(long iterations, float multiplier) {{
    vec m = (vec){{0}} + multiplier;
{declare}
    for (long i = 0; i < iterations; i++) {{
{step}
    }}
    vec total = {total};
    double sum = 0;
    for (int lane = 0; lane < {lanes}; lane++) sum += total[lane];
    return sum;
}}
__attribute__((visibility("default"))) double read_all(const vec *data, long count) {{
    vec a = {{0}}, b = {{0}}, c = {{0}}, d = {{0}};
    for (long i = 0; i + 4 <= count; i += 4) {{
        a += data[i]; b += data[i + 1]; c += data[i + 2]; d += data[i + 3];
    }}
    vec total = a + b + c + d;
    double sum = 0;
    for (int lane = 0; lane < {lanes}; lane++) sum += total[lane];
    return sum;
}}
"""


def measure_peak(threads: int, options: Options | None = None) -> Peak:
    """The best of a few repetitions, so that other work on the machine lowers it as little as possible."""
    chosen = options or Options.from_environment()
    target, host = machine("cpu"), this_machine()
    compiler = find_compiler(chosen.compiler)
    library = compile_shared(
        fma_source(target.vector_bytes, target.vector_registers),
        compiler,
        host,
        Cache(chosen.cache_dir),
        flags=default_flags(compiler, host),
        name="peak",
    )
    loaded = ctypes.CDLL(str(library))  # calls release the GIL, so Python threads load all cores
    loaded.fma_chains.restype = loaded.read_all.restype = ctypes.c_double
    operations = 2 * (target.vector_bytes // 4) * chain_count(target.vector_registers) * FMA_ITERATIONS

    def fma(_thread: int) -> None:
        # Too small to change the sums: no denormals or infinities, whose speed may differ.
        loaded.fma_chains(ctypes.c_long(FMA_ITERATIONS), ctypes.c_float(1e-9))

    arrays = [np.ones(READ_BYTES_PER_THREAD // 4 + 16, np.float32) for _ in range(threads)]
    starts = [array.ctypes.data + -array.ctypes.data % 64 for array in arrays]
    vectors = READ_BYTES_PER_THREAD // target.vector_bytes

    def read(thread: int) -> None:
        loaded.read_all(ctypes.c_void_p(starts[thread]), ctypes.c_long(vectors))

    return Peak(
        threads,
        threads * operations / min(_elapsed(fma, threads) for _ in range(REPETITIONS)),
        threads * READ_BYTES_PER_THREAD / min(_elapsed(read, threads) for _ in range(REPETITIONS)),
    )


def _elapsed(work: Callable[[int], None], threads: int) -> float:
    """Seconds from a common start to the last thread's end."""
    barrier = threading.Barrier(threads)
    spans = [(0.0, 0.0)] * threads

    def run(thread: int) -> None:
        barrier.wait()
        start = time.perf_counter()
        work(thread)
        spans[thread] = (start, time.perf_counter())

    workers = [threading.Thread(target=run, args=(thread,)) for thread in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return max(end for _, end in spans) - min(start for start, _ in spans)


def describe_tools() -> dict[str, str]:
    """Versions that decide what the generated code looks like."""
    return {"compiler": find_compiler(Options.from_environment().compiler).version}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.peak", description="This machine's float32 peak.")
    parser.add_argument("--threads", type=int, default=2)
    peak = measure_peak(parser.parse_args().threads)
    rates = f"{peak.operations_per_second / 1e9:.1f} GFLOP/s, {peak.bytes_per_second / 1e9:.1f} GB/s read"
    print(f"{peak.threads} threads: {rates}")


if __name__ == "__main__":
    main()
