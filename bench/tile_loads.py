"""Where the loads of matrix registers find their lines: kernels for a machine with AMX, run here on simulated caches.

Each kernel is compiled in its portable spelling with every tile load, store, hint and copied run passed through two
caches of the target's sizes (least recently used, the first of 12 ways, the second of 16); vectors are not followed.
The table counts, for each step of a tile (its products and their loads), lines that the first cache did not have when
a load wanted them, lines brought from the second, and lines from beyond it.
python -m bench.tile_loads [--shapes 1000x1000x1000 ...] [--kind bf16].
"""

import argparse
import re
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from bench.instructions import matmul
from tilewright.backend import backend_for, renderable
from tilewright.backend.cpu import machine_code
from tilewright.intrinsics.cpu import DOTS
from tilewright.ir.forms import dtypes
from tilewright.lower.memory import scratch
from tilewright.lower.program import lower_program
from tilewright.schedule.planner import make_plan
from tilewright.target import Target, machine

SHAPES = ("1000x1000x1000", "1024x1024x1024", "2048x2048x2048", "4096x4096x4096", "128x768x3072")
KINDS = {"bf16": ("bfloat16", "bfloat16"), "int8": ("int8", "int8")}

CACHES = """
#include <stdio.h>
#include <stdlib.h>
#define LINE 64
typedef struct { int sets, ways; unsigned long *tags, *when; } Cache;
static unsigned long sim_clock; static Cache sim_near, sim_far;
static long sim_waited, sim_moved, sim_beyond, sim_steps, sim_is_on = 1;
static Cache sim_cache(long bytes, int ways) {
    Cache c = { bytes / LINE / ways, ways, 0, 0 };
    c.tags = calloc(c.sets * ways, 8); c.when = calloc(c.sets * ways, 8);
    return c;
}
static int sim_touch(Cache *c, unsigned long line) {
    unsigned long *tags = c->tags + line % c->sets * c->ways, *when = c->when + line % c->sets * c->ways;
    int old = 0;
    for (int i = 0; i < c->ways; ++i) {
        if (tags[i] == line) { when[i] = ++sim_clock; return 1; }
        if (when[i] < when[old]) old = i;
    }
    tags[old] = line; when[old] = ++sim_clock;
    return 0;
}
static void sim_run(const void *at, long bytes, int is_waited) {
    for (unsigned long l = (unsigned long)at / LINE; l <= ((unsigned long)at + bytes - 1) / LINE; ++l)
        if (!sim_touch(&sim_near, l)) {
            sim_waited += is_waited; ++sim_moved;
            if (!sim_touch(&sim_far, l)) ++sim_beyond;
        }
}
static void sim_beside(const void *at) { if (!sim_touch(&sim_far, (unsigned long)at / LINE)) ++sim_beyond; }
static void sim_rows(const void *at, int rows, long bytes, long stride) {
    for (int i = 0; i < rows; ++i) sim_run((const char *)at + i * stride, bytes, 1);
}
"""


def simulated(source: str, target: Target) -> str:
    """The kernel's text with memory followed and no products made."""
    for name, at in (("load", "from"), ("store", "to")):
        body = rf"\1 sim_rows({at}, rows, bytes, stride); }}"
        source = re.sub(rf"(static inline void tw_tile_{name}\([^)]*\) \{{).*?\n\}}", body, source, flags=re.S)
    source = re.sub(r"(static void tw_amx_\w+\([^)]*\) \{).*?\n\}", r"\1 ++sim_steps; }", source, flags=re.S)
    source = re.sub(r"__builtin_prefetch\((.*), 0, [12]\);", r"sim_beside(\1);", source)
    source = re.sub(r"__builtin_prefetch\((.*)\);", r"sim_run(\1, 1, 0);", source)
    source = re.sub(r"__builtin_memcpy\((.*?\)), (\(.*?\)), (sizeof.*)\);",
                    r"sim_run(\2, \3, 0); sim_run(\1, \3, 0);", source)  # fmt: skip
    near, far = target.nearest, target.local
    return (
        CACHES
        + source
        + f"""
int main(int n, char **a) {{
    char *memory[3];
    for (int i = 0; i < 3; ++i) memory[i] = aligned_alloc(4096, atol(a[2 + i]));
    sim_near = sim_cache({near.capacity}, {target.near_ways}); sim_far = sim_cache({far.capacity}, 16);
    char *scratch = aligned_alloc(4096, atol(a[1]) + 4096);
    k0((void *const *)memory, 0, 0, scratch);
    printf("%ld %ld %ld %ld\\n", sim_steps, sim_waited, sim_moved, sim_beyond);
    return 0;
}}
"""
    )


def counted(shape: tuple[int, int, int], kind: str, target: Target, folder: Path) -> tuple[str, list[float]]:
    """The plan, and lines a step: waited for, moved into the first cache, brought from beyond the second."""
    dot = DOTS[f"amx_{kind}"]
    program, _, _ = matmul(shape, KINDS[kind], dot.accumulator)
    plan = make_plan(program, target)
    loops = renderable(lower_program(program, plan, backend_for(target).lower_kernel), target)
    source = machine_code.render(loops, target, "portable")["k0"]
    (folder / "k.c").write_text(simulated(source, target))
    subprocess.run(["cc", "-O2", "-w", "-o", "k", "k.c"], cwd=folder, check=True)
    nest = plan.kernels[0].leaves[0]
    size = dtypes.by_name(KINDS[kind][0]).bytes
    rows, columns, inner = (-(-n // 64) * 64 + 64 for n in shape)
    sizes = [rows * inner * size, columns * inner * size, rows * columns * 4]
    run = ["./k", str(scratch(loops.kernels[0])[1]), *map(str, sizes)]
    done = subprocess.run(run, cwd=folder, check=True, capture_output=True, text=True)
    products, *lines = (int(x) for x in done.stdout.split())
    steps = products / 4
    how = f"tile {dict(plan.kernels[0].cut)}{nest.form.text()}"
    return how, [float(np.round(n / steps, 2)) for n in lines]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=SHAPES)
    parser.add_argument("--kind", choices=tuple(KINDS), default="bf16")
    parser.add_argument("--target", default="emerald_rapids")
    given = parser.parse_args()
    target = machine(given.target)
    print("lines a step of 4 products: waited for, into the first cache, from beyond the second (64 are loaded)")
    for text in given.shapes:
        with tempfile.TemporaryDirectory(prefix="tilewright-") as folder:
            shape = tuple(int(n) for n in text.split("x"))
            how, lines = counted(shape, given.kind, target, Path(folder))  # type: ignore[arg-type]
            print(f"{text:>16} {given.kind}: {lines[0]:6.2f} {lines[1]:6.2f} {lines[2]:6.2f}  {how}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
