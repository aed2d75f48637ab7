"""A model to what this process does of it: the ranks compare what they were given, rank 0 shares it out, each compiles
its own segments."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

from tilewright.compiler.pipeline import Artifact, build
from tilewright.distributed.meshes import PROCESSES, STAGES, MeshText, described
from tilewright.distributed.model import Compiled, RankedModel
from tilewright.errors import OptionError, TilewrightError, ToolError
from tilewright.ir.forms.compute import Program
from tilewright.ir.forms.graph import Graph
from tilewright.ir.forms.sharded import Sharded, from_json
from tilewright.ir.text.text import program_text
from tilewright.ops import lower
from tilewright.options import Options
from tilewright.runtime.ranks import RankError, Ranks
from tilewright.schedule.cluster.planner import share_out
from tilewright.target import Target, machine
from tilewright.tile_graph.algebra.memo import Memo
from tilewright.tile_graph.sharding.check import check_sharded
from tilewright.transform.clean.fold import fold_constants
from tilewright.transform.spmd import Segment, rank_program
from tilewright.version import VERSION


def shared_out(
    graph: Graph, mesh: MeshText, options: Options, cluster: str = PROCESSES, program: Program | None = None
) -> Sharded:
    """The model over a mesh as it is planned, without any other rank."""
    about = described(mesh, cluster, lambda name: _device(name, options))
    return share_out(program_of(graph) if program is None else program, about, mesh.split, STAGES)


def program_of(graph: Graph) -> Program:
    """The Program that is shared out: computes as the model says them, since what is fused no longer adds up."""
    return fold_constants(lower(graph))


def compile_ranked(
    read: Callable[[], Graph], mesh: MeshText, options: Options, timeout: float = 60.0, cluster: str = PROCESSES
) -> RankedModel:
    """The model of which this process has one rank. `read` gives the Graph."""
    if options.stop_after or options.overrides:
        raise OptionError("stages of a model on several ranks are not looked at or changed: leave out mesh for that")
    try:
        ranks = Ranks.join(timeout)
    except RankError as error:
        raise ToolError(str(error)) from error
    try:
        return _compiled(read, mesh, options, ranks, cluster)
    except RankError as error:
        ranks.leave()
        raise ToolError(str(error)) from error
    except TilewrightError:
        ranks.leave()
        raise


def _compiled(
    read: Callable[[], Graph], mesh: MeshText, options: Options, ranks: Ranks, cluster: str
) -> RankedModel:
    count = 1
    for _, size in mesh.axes:
        count *= size
    if count != ranks.size:
        sizes = ",".join(f"{name}={size}" for name, size in mesh.axes)
        raise OptionError(f"the mesh {sizes} has {count} ranks, and {ranks.size} were started: "
                          f"torchrun --nproc-per-node {count}")  # fmt: skip
    graph = read()
    program = program_of(graph)
    ranks.same(_digest(program, mesh, options), "model")
    told = shared_out(graph, mesh, options, cluster, program).to_json() if ranks.rank == 0 else None
    ranks.wait("sharing the model out")
    sharded = from_json(ranks.text(told), program)
    check_sharded(sharded)
    mine = rank_program(sharded, ranks.rank)
    goal = _device(options.target, options)
    memo = Memo()
    steps = [_segment(step, goal, options, memo) if isinstance(step, Segment) else step for step in mine.steps]
    ranks.wait("compiling")
    return RankedModel(sharded, mine, steps, ranks)


def _segment(segment: Segment, goal: Target, options: Options, memo: Memo) -> Compiled:
    program = segment.program
    artifact: Artifact = build(program, goal, options, memo=memo)
    gives = tuple((t.name, tuple(int(e) for e in t.shape), t.dtype.numpy) for t in program.outputs)  # type: ignore[arg-type]
    return Compiled(artifact, tuple(t.name for t in program.inputs), gives)


def _digest(program: Program, mesh: MeshText, options: Options) -> bytes:
    """Of all that ranks must agree about; the text of a Program tells its constants apart."""
    about = f"{VERSION}\n{mesh.axes}\n{options.precision}\n{options.denormals}\n{program_text(program)}"
    return blake2b(about.encode(), digest_size=32).digest()


def _device(name: str, options: Options) -> Target:
    chosen = options.target if name == "cpu" else name
    return machine(
        chosen, options.threads, cache_dir=options.cache_dir, compiler=options.compiler, tell=options.progress
    )


