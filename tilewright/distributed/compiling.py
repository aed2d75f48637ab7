"""A model to what this process does of it: the ranks compare what they were given, rank 0 shares it out, each compiles
its own segments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import inf

from tilewright.compiler.pipeline import Artifact, build
from tilewright.distributed.about import CompiledRank, about
from tilewright.distributed.joining import joined
from tilewright.distributed.meshes import PROCESSES, SPLIT, MeshText, described, undecided
from tilewright.distributed.model import RankedModel
from tilewright.errors import OptionError
from tilewright.ir.forms.compute import Program
from tilewright.ir.forms.graph import Graph
from tilewright.ir.forms.sharded import Sharded, from_json
from tilewright.ir.text.text import program_text
from tilewright.ops import lower
from tilewright.options import Options
from tilewright.report.ranks import ranks_text
from tilewright.runtime.ranks import Ranks
from tilewright.schedule.batches import in_parts
from tilewright.schedule.cluster.pipeline import share_out_by_itself, share_out_in_stages
from tilewright.target import Target, machine
from tilewright.tile_graph.algebra.memo import Memo
from tilewright.tile_graph.sharding.check import check_sharded
from tilewright.transform.clean.fold import fold_constants
from tilewright.transform.clean.turned import without_turned
from tilewright.transform.spmd import Segment, rank_program
from tilewright.version import VERSION


@dataclass(frozen=True)
class Asked:
    """How a model is to be shared out: the mesh, in how many parts its batch goes through, the cluster that is planned
    for, and how many seconds a rank waits for another."""

    mesh: MeshText
    micro_batches: int = 1
    timeout: float = 60.0
    cluster: str = PROCESSES


def shared_out(program: Program, asked: Asked, options: Options, ranks: int | None = None) -> Sharded:
    """A model, or one part of its batch, as it is planned, without any other rank; `ranks` is how many were started."""
    most = options.memory if isinstance(options.memory, int) else inf
    if asked.mesh.is_auto:
        cluster = undecided(asked.cluster, ranks, lambda name: device_of(name, options))
        return share_out_by_itself(program, cluster, asked.micro_batches, most)
    clusters, along = described(asked.mesh, asked.cluster, lambda name: device_of(name, options))
    return share_out_in_stages(program, clusters, along, (SPLIT,), asked.micro_batches, most_bytes=most)


def program_of(graph: Graph) -> Program:
    """The Program that is shared out: computes as the model says them, since what is fused no longer adds up, and of
    weights that exporters have written in two orders of their dimensions one."""
    return without_turned(fold_constants(lower(graph)))


def compile_ranked(read: Callable[[], Graph], asked: Asked, options: Options) -> RankedModel:
    """The model of which this process has one rank. `read` gives the Graph."""
    if options.stop_after or options.overrides:
        raise OptionError("stages of a model on several ranks are not looked at or changed: leave out mesh for that")
    with joined(asked.timeout) as ranks:
        return _compiled(read, asked, options, ranks)


def _compiled(read: Callable[[], Graph], asked: Asked, options: Options, ranks: Ranks) -> RankedModel:
    mesh = asked.mesh
    if not mesh.is_auto:
        mesh.check_ranks(ranks.size)
    whole = program_of(read())
    digest = _digest(whole, asked, options)
    ranks.same(digest, "model")
    here = ranks.on_this_computer()
    batches = in_parts(whole, asked.micro_batches)
    told = None
    if ranks.rank == 0:
        told = shared_out(batches.program, asked, options, ranks.size).to_json()
    ranks.wait("sharing the model out")
    sharded = from_json(ranks.text(told), batches.program)
    check_sharded(sharded)
    mine = rank_program(sharded, ranks.rank)
    goal = beside(device_of(options.target, options), here)
    memo = Memo()
    steps = [segment(step, goal, options, memo) if isinstance(step, Segment) else step for step in mine.steps]
    ranks.wait("compiling")
    return RankedModel(about(whole, batches, mine, digest.hex(), ranks_text(sharded)), steps, ranks, options)


def segment(step: Segment, goal: Target, options: Options, memo: Memo) -> CompiledRank:
    """Some of what a rank does, as machine code."""
    program = step.program
    artifact: Artifact = build(program, goal, options, memo=memo)
    gives = tuple((t.name, tuple(int(e) for e in t.shape), t.dtype.numpy) for t in program.outputs)  # type: ignore[arg-type]
    return CompiledRank(artifact, tuple(t.name for t in program.inputs), gives)


def _digest(program: Program, asked: Asked, options: Options) -> bytes:
    """Of all that ranks must agree about; the text of a Program tells its constants apart."""
    about = f"{VERSION}\n{asked.mesh} {asked.micro_batches}\n{options.precision}\n{options.denormals}\n"
    return blake2b((about + program_text(program)).encode(), digest_size=32).digest()


def beside(device: Target, ranks: int) -> Target:
    """A processor as one of so many ranks on it has it: of a cache that its cores share with those of the others it
    has a part."""
    outer = device.shared_cache
    if device.kind != "cpu" or outer is None or outer.capacity // ranks <= device.local.capacity:
        return device
    part = replace(outer, capacity=outer.capacity // ranks)
    return replace(device, levels=tuple(part if level is outer else level for level in device.levels))


def device_of(name: str, options: Options) -> Target:
    """The machine of a name, which is this one for the CPU."""
    chosen = options.target if name == "cpu" else name
    return machine(
        chosen, options.threads, cache_dir=options.cache_dir, compiler=options.compiler, tell=options.progress
    )
