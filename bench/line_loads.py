"""Where an ordinary product finds its lines: kernels of float32 planned for a described machine, run here on simulated
caches.

Each kernel is compiled in its portable spelling with every read, write and hint passed through two caches of the
target's sizes (least recently used, the first with the target's ways, the second of 16). The table gives, for each
step of a register tile, lines that the first cache did not have: of the rows, of the weights and of the results; and
those the second did not have either. A core's first tile is run, its operands on pages of their own.
python -m bench.line_loads [--shapes 196x1024x1024 196x1040x1024 ...] [--target emerald_rapids]
"""

import argparse
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from bench.tile_loads import CACHES
from tilewright import ops
from tilewright.backend import backend_for, renderable
from tilewright.backend.cpu import machine_code
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.compute import Program
from tilewright.lower.memory import scratch
from tilewright.lower.program import lower_program
from tilewright.schedule.planner import make_plan
from tilewright.target import Target, machine
from tilewright.tile_graph.plan.form import Leaf
from tilewright.transform.clean.fold import fold_constants

SHAPES = ("196x1024x1024", "196x1040x1024", "384x768x3072", "512x512x512")
_FAR_WAYS = 16
_ROOM = 1 << 16  # bytes behind an operand: panels are filled up to whole vectors
_COUNTING = """
static unsigned long sim_from[4], sim_to[4];
static long sim_near_missed[4], sim_far_missed[4];
static __attribute__((noinline)) void *sim_at(const void *at, long bytes) {
    unsigned long a = (unsigned long)at;
    int of = 0;
    while (of < 3 && !(a >= sim_from[of] && a < sim_to[of])) ++of;
    for (unsigned long l = a / LINE; l <= (a + bytes - 1) / LINE; ++l)
        if (!sim_touch(&sim_near, l)) {
            ++sim_near_missed[of];
            if (!sim_touch(&sim_far, l)) ++sim_far_missed[of];
        }
    return (void *)at;
}
#define SIM_AT(type, at) sim_at((at), sizeof(type))
"""


@dataclass(frozen=True)
class Lines:
    """Lines missed by the rows, the weights, the results and scratch, in the first cache and in the second."""

    near: tuple[int, ...]
    far: tuple[int, ...]
    steps: float  # of register tiles
    plan: Leaf
    tile: dict[str, int]


def product(rows: int, inner: int, columns: int) -> Program:
    weights = numpy_helper.from_array(np.zeros((inner, columns), np.float32), "w")
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, (rows, inner))
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, (rows, columns))
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "product", [x], [y], [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return fold_constants(ops.lower(load(model, {})))


def simulated(source: str, target: Target, sizes: list[int], scratch_bytes: int) -> str:
    """The kernel's text with every access followed."""
    source = re.sub(r"\b(p\d+)\[([^\]]*)\]", r"(*(__typeof__(\1))sim_at(\1 + (\2), sizeof(*\1)))", source)
    source = re.sub(r"\*\((const )?(v\d+\w+u) \*\)\(", r"*(\1\2 *)SIM_AT(\2, ", source)
    source = re.sub(r"__builtin_prefetch\((.*), 0, [12]\);", r"sim_beside(\1);", source)
    source = re.sub(r"__builtin_prefetch\((.*)\);", r"sim_at(\1, 1);", source)
    near, far = target.nearest, target.local
    return (
        CACHES
        + _COUNTING
        + source
        + f"""
int main(void) {{
    const long sizes[3] = {{{", ".join(str(size + _ROOM) for size in sizes)}}};
    char *memory[3];
    for (int i = 0; i < 3; ++i) {{
        memory[i] = aligned_alloc(4096, (sizes[i] + 4095) / 4096 * 4096);
        sim_from[i] = (unsigned long)memory[i]; sim_to[i] = sim_from[i] + sizes[i];
    }}
    sim_near = sim_cache({near.capacity}, {target.near_ways}); sim_far = sim_cache({far.capacity}, {_FAR_WAYS});
    k0((void *const *)memory, 0, 0, aligned_alloc(4096, {(scratch_bytes + 8191) // 4096 * 4096}));
    for (int i = 0; i < 4; ++i) printf("%ld %ld ", sim_near_missed[i], sim_far_missed[i]);
    return 0;
}}
"""
    )


def counted(shape: tuple[int, int, int], target: Target, folder: Path) -> Lines:
    """The lines of one tile of a product as it is planned for the target."""
    rows, inner, columns = shape
    program = product(*shape)
    plan = make_plan(program, target)
    kernel = plan.kernels[-1]
    if len(plan.kernels) != 1 or len(kernel.leaves) != 1:
        raise SystemExit(f"bench.line_loads: {shape} is planned as more than one nest; give another shape")
    loops = renderable(lower_program(program, plan, backend_for(target).lower_kernel), target)
    source = machine_code.render(loops, target, "portable")["k0"]
    sizes = [4 * rows * inner, 4 * inner * columns, 4 * rows * columns]
    (folder / "k.c").write_text(simulated(source, target, sizes, scratch(loops.kernels[0])[1]))
    subprocess.run(["cc", "-O1", "-w", "-o", "k", "k.c"], cwd=folder, check=True)
    done = subprocess.run(["./k"], cwd=folder, check=True, capture_output=True, text=True)
    found = [int(x) for x in done.stdout.split()]
    nest = kernel.leaves[0]
    tile = dict(kernel.cut)
    outputs = tile.get("o0", rows) * tile.get("o1", columns)
    steps = outputs * inner / max(1, int(np.prod([n for a, n in nest.register if a[0] == "o"])))
    return Lines(tuple(found[0::2]), tuple(found[1::2]), steps, nest, tile)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=SHAPES, help="rows x summed x columns")
    parser.add_argument("--target", default="emerald_rapids", help="a described machine's name, or a .json file")
    given = parser.parse_args()
    target = machine(given.target)
    print("lines a step missed in the first cache: rows, weights, results; in the second: all")
    for text in given.shapes:
        with tempfile.TemporaryDirectory(prefix="tilewright-") as folder:
            rows, inner, columns = (int(n) for n in text.split("x"))
            lines = counted((rows, inner, columns), target, Path(folder))
            near = " ".join(f"{n / lines.steps:5.2f}" for n in lines.near[:3])
            how = lines.plan
            plan = f"register {dict(how.register)} order {' '.join(how.order)}{how.form.text()}"
            print(f"{text:>16}: {near}  {sum(lines.far) / lines.steps:5.2f}  {plan} tile {lines.tile}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
