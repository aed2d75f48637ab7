"""Trees written by hand that say what no planner says yet, each with the Program it is for."""

from __future__ import annotations

from dataclasses import replace

from tests.trees import by_hand, kernels, planned, program_of
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import Map, Program, Reduce, plain_monoid
from tilewright.ir.forms.expr import Axis, op, symbol, var
from tilewright.ir.forms.expr import load as read
from tilewright.ir.forms.tensor import Tensor
from tilewright.target import Cluster, MemoryLevel, Target, machine
from tilewright.tile_graph.plan.form import Bind, Case, Hold, Leaf, Plan, Tile, TileAxis, UnitBarrier
from tilewright.tile_graph.plan.leaf_form import VectorForm
from tilewright.tile_graph.plan.text import plan_text

N1, X86, H200 = machine("neoverse_n1"), machine("emerald_rapids"), machine("h200")

HOST = MemoryLevel("host", 1 << 30, 64, 5e10)

PRODUCT = """
    x[20, 40]
    w[40, 8]
    y[i0:20, i1:8] = sum[r0:40] x[i0, r0] * w[r0, i1]
"""


def copy_of(name: str) -> Leaf:
    return Leaf(name, name, part="copy", vector="o1", lanes=4, register=(("o1", 4),), order=("o0", "o1"))


def staged_twice(program: Program, target: Target, stages: int) -> Plan:
    """Rows of x come to L2 part by part, and columns of those and of w's rows to L1, each ahead of its use."""
    y = replace(planned(program, target)["y"], part="step").with_options(VectorForm, cut=(), ahead=0)
    near, tile = target.nearest.name, target.local.name
    rows, depth = TileAxis("rows", 20, (Bind("y", "o0"),)), TileAxis("s", 40, (Bind("y", "r0"),))
    inner = Tile(near, (("s", 16),), "order", (copy_of("x"), copy_of("w"), y),
                 (Hold("x", fill="copy", stages=stages), Hold("w", fill="copy", stages=stages),
                  Hold("y", "carry", "s")), (depth,))  # fmt: skip
    middle = Tile(tile, (("rows", 8),), "order",
                  (copy_of("x"), replace(y, part="start"), inner, replace(y, part="finish")),
                  (Hold("x", fill="copy", stages=stages),))  # fmt: skip
    kernel = Tile(tile, (("rows", 16),), "cores", (middle,), (), (rows,), "k0")
    return by_hand(Tile(target.main.name, body=(kernel,)), target)


def warps(program: Program, threads: tuple[int, int] = (32, 96), runs: str = "together") -> Plan:
    """One warp computes the exponentials of the next columns while the others multiply with these."""
    shared = H200.nearest.name
    produced, y = planned(program, H200)["p"], Leaf("y", "y", part="step", vector="o1", order=("o0", "o1", "r0"))
    sides = [Tile(shared, over="lanes", count=n, body=(leaf,)) for n, leaf in zip(threads, (produced, y), strict=True)]
    depth = TileAxis("s", 96, (Bind("p", "o1"), Bind("y", "r0")))
    walked = Tile(shared, (("s", 16),), "order", tuple(sides), (Hold("p", stages=2), Hold("y", "carry", "s")),
                  (depth,), runs=runs)  # fmt: skip
    lanes = Tile(shared, over="lanes", count=128, body=(replace(y, part="start"), walked, replace(y, part="finish")))
    rows = TileAxis("rows", 40, (Bind("y", "o0"),))
    kernel = Tile(shared, (("rows", 16),), "blocks", (lanes,), (), (rows,), "k0")
    return by_hand(Tile(H200.main.name, body=(kernel,)), H200)


EXPONENTS = """
    x[40, 96]
    w[96, 20]
    p[i0:40, i1:96] = exp(x[i0, i1])
    y[i0:40, i1:20] = sum[r0:96] p[i0, r0] * w[r0, i1]
"""


def persistent(tile: Tile) -> Tile:
    """The steps inside their kernel, which ends each in a barrier."""
    if tile.over != "steps":
        return tile
    (kernel,) = (k for k in tile.body if isinstance(k, Tile))
    holds = tuple(h for h in kernel.holds if h.fill is None)
    (inner,) = kernel.body if kernel.over == "blocks" else (kernel,)
    assert isinstance(inner, Tile)
    leaves = [replace(n, idle=None, alternate=False) if isinstance(n, Leaf) else n for n in inner.body]
    steps = Tile(kernel.level, over="steps", scan=tile.scan, body=(*leaves, UnitBarrier(kernel.over)))
    body = (replace(inner, body=(steps,)),) if kernel.over == "blocks" else (steps,)
    return replace(kernel, body=body, holds=holds)


def recomputed(program: Program, target: Target) -> Plan:
    leaf = planned(program, target)
    rows = TileAxis("rows", 40, (Bind("a", "o0"), Bind("b", "o0")))
    near, tile = target.nearest.name, target.local.name
    inner = Tile(near, (("rows", 4),), "order", (leaf["p"], leaf["b"]), (Hold("p"),))
    kernel = Tile(tile, (("rows", 16),), "cores", (leaf["p"], leaf["a"], inner), (Hold("p"),), (rows,), "k0")
    return by_hand(Tile(target.main.name, body=(kernel,)), target)


TWO_READERS = """
    x[40, 24]
    p[i0:40, i1:24] = exp(x[i0, i1])
    a[i0:40] = sum[r0:24] p[i0, r0]
    b[i0:40, i1:24] = p[i0, i1] * p[i0, 23 - i1]
"""


def streamed_model(layers: int, early: bool) -> tuple[Program, Plan, Cluster]:
    """Weights of each layer on the device while it runs, those of the next on their way where they start early."""
    lines = ["x0[10, 16]", *(f"w{i}[16, 16]" for i in range(layers))]
    lines += [f"x{i + 1}[i0:10, i1:16] = sum[r0:16] x{i}[i0, r0] * w{i}[r0, i1]" for i in range(layers)]
    program = program_of("\n".join(lines))
    made, main = kernels(program, H200), H200.main.name
    tiles = tuple(
        Tile(main, body=(made[f"x{i + 1}"],),
             holds=(Hold(f"w{i}", fill="copy", issue=f"k_x{i}" if i and early else None),))
        for i in range(layers)
    )  # fmt: skip
    holds = (Hold("x0", fill="copy"), *(Hold(f"x{i}") for i in range(1, layers)), Hold(f"x{layers}", fill="copy"))
    capacity = 4 * (10 * 16 * (layers + 1) + 2 * 16 * 16)
    device = replace(H200, levels=(*H200.levels[:-1], replace(H200.main, capacity=capacity)))
    cluster = Cluster(device, replace(HOST, bandwidth=1e9))
    return program, by_hand(Tile("host", body=(Tile(main, body=tiles, holds=holds),)), cluster), cluster


CLUSTER = Cluster(H200, HOST)


def columns_by_parts() -> tuple[Program, Plan]:
    """Columns of w come from the host part by part."""
    program, main = program_of(PRODUCT), H200.main.name
    made = kernels(program, H200)
    parts = Tile(main, (("columns", 2),), "order", (made["y"],), (Hold("w", fill="copy"),),
                 (TileAxis("columns", 8, (Bind("y", "o1"),)),))  # fmt: skip
    held = (Hold("x", fill="copy"), Hold("y", fill="copy"))
    return program, by_hand(Tile("host", body=(Tile(main, body=(parts,), holds=held),)), CLUSTER)


def rows_of(low: int, high: int) -> Program:
    """The exponentials of rows, and their sums, of as many rows as there are."""
    kind, rows = dtypes.float32, symbol("n", low, high)
    x, p, y = Tensor("x", (rows, 8), kind), Tensor("p", (rows, 8), kind), Tensor("y", (rows,), kind)
    i, j, k, r = Axis("i0", rows), Axis("i1", 8), Axis("i0", rows), Axis("r0", 8)
    exponent = Map(p, (i, j), op("exp", read(x, (var(i), var(j)))))
    total = Reduce((y,), (k,), (r,), (read(p, (var(k), var(r))),), plain_monoid("add", kind))
    return Program((x,), (y,), (exponent, total))


def case(low: int, high: int, part: int) -> Case:
    """Parts of so many rows, and the exponentials of one held near."""
    leaves = (Leaf("p", "p", order=("o0", "o1")), Leaf("y", "y", order=("o0", "r0")))
    axis = TileAxis("rows", high, (Bind("y", "o0"),))
    kernel = Tile("L2", (("rows", part),), "cores", leaves, (Hold("p"),), (axis,), "k0")
    return Case("n", low, high, Tile("DRAM", body=(kernel,)))


def with_cases(*cases: Case) -> Plan:
    plan = Plan(N1.name, "by hand", Tile("DRAM"), cases=cases)
    again = Plan.from_json(plan.to_json())
    assert again == plan and plan_text(again) == plan_text(plan)
    return plan
