"""Ranks as ordinary Programs: of a Sharded Program, what one rank computes and what passes between it and others.

    y: cut i1 over tp; all-reduce y   becomes   on rank 1   segment {y[i1:half] = ...}, transfer y, segment {...}

Every compute has the extents of its rank's part and reads what lies there; constants are cut to what is read. What
ranks exchange cuts a rank's Program into segments, each compiled as any Program is. A rank with several stages has the
steps of one behind those of the other.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import NamedTuple

import numpy as np

from tilewright.errors import InternalError
from tilewright.ir.analysis.pieces import part_of
from tilewright.ir.forms.compute import Compute, Map, Program, Reduce, reads
from tilewright.ir.forms.mesh import Coordinates, Place, Spread, inside, overlap, relative, slices
from tilewright.ir.forms.sharded import Exchange, Keep, PipelineStage, Sharded, ShardedCompute
from tilewright.ir.forms.tensor import Tensor, extents
from tilewright.transform.clean.fold import replace_tensors

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Segment:
    """Computes between two transfers, as a Program of its own."""

    program: Program


@dataclass(frozen=True)
class Transfer:
    """One array from what ranks have: which parts of the one named `source` go to which ranks, and where in the new one
    named `target` what comes from others lies. Parts that lie upon each other are put together by `operator`, in the
    order of the ranks. An all-reduce, of whole arrays, says who takes part instead."""

    kind: str
    source: str
    target: str
    shape: tuple[int, ...]
    dtype: np.dtype
    operator: str | None = None
    sends: tuple[tuple[int, Slices], ...] = ()
    takes: tuple[tuple[int, Slices], ...] = ()  # this rank's own part among them, from itself
    own: Slices | None = None  # of the source
    peers: tuple[int, ...] = ()
    axis: str = ""  # of the mesh, for people


RankStep = Segment | Transfer


class When(NamedTuple):
    """How many parts of a batch a step is behind the first stage: where it is done, and, of what is taken from another
    stage, where it is sent."""

    begun: int
    done: int


@dataclass(frozen=True)
class KeptArray:
    """An array that a rank keeps from one training step to the next: which part of which tensor it is at first, and
    which part of which array it is then."""

    name: str
    tensor: Tensor
    place: Place
    following: str
    part: Slices


@dataclass(frozen=True)
class RankProgram:
    """All that one rank does with one part of a batch, in order, and when. Inputs come from rank 0, and results end
    there. Of a training step, `turns` are the steps from which on it goes back and from which on it is the update."""

    rank: int
    steps: tuple[RankStep, ...]
    outputs: Mapping[str, str]  # on rank 0: the array that each of the Program's outputs is, by name
    when: tuple[When, ...] = ()  # by step
    turns: tuple[int, ...] = ()
    kept: tuple[KeptArray, ...] = ()

    @property
    def segments(self) -> tuple[Program, ...]:
        return tuple(step.program for step in self.steps if isinstance(step, Segment))

    @property
    def weights(self) -> int:
        """Bytes of the constants that the rank has, those of several segments once."""
        arrays = {id(a): a for p in self.segments for a in p.constants.values()}
        return sum(array.nbytes for array in arrays.values())


def rank_program(sharded: Sharded, rank: int) -> RankProgram:
    """What one of the ranks does; nothing, where no stage has it."""
    return _Rank(sharded, rank).run() if sharded.stages_of(rank) else RankProgram(rank, (), {})


@dataclass
class _Rank:
    sharded: Sharded
    rank: int
    here: dict[tuple[Tensor, Spread], Tensor] = field(default_factory=dict)  # in the stage that is looked at
    had: dict[Tensor, Tensor] = field(default_factory=dict)  # whole, since a stage before
    constants: dict[Tensor, np.ndarray] = field(default_factory=dict)
    cut: dict[tuple[Tensor, Place], Tensor] = field(default_factory=dict)  # parts of constants
    pending: list[Compute] = field(default_factory=list)
    steps: list[list[Compute] | Transfer] = field(default_factory=list)
    when: list[When] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    turned: list[int] = field(default_factory=list)  # by turn of a training step, how many steps are before it
    kept: tuple[KeptArray, ...] = ()
    number: int = 0  # of the stage that is looked at
    stage: PipelineStage = field(init=False)
    at: Coordinates = ()

    def __post_init__(self) -> None:
        self.states = {keep.tensor for stage in self.sharded.stages for keep in stage.keeps}
        self.makers = {t: n for n, stage in enumerate(self.sharded.stages) for s in stage.steps
                       if isinstance(s, ShardedCompute) for t in s.compute.outputs}  # fmt: skip
        self.names.update(tensor.name for tensor in self.sharded.program.tensors())

    def run(self) -> RankProgram:
        for number, stage in enumerate(self.sharded.stages):
            if self.rank in stage.ranks:
                self._stage(number, stage)
        return self._assembled(self._outputs())

    def _stage(self, number: int, stage: PipelineStage) -> None:
        self.number, self.stage, self.at = number, stage, stage.mesh.coordinates[self.rank - stage.first]
        ends = (0, *stage.turns, len(stage.steps))
        for begin, end in pairwise(ends):
            for step in stage.steps[begin:end]:
                if isinstance(step, Exchange):
                    self._exchange(step)
                else:
                    self._piece(step)
            self._flush()
            self._send_on(
                {t for s in stage.steps[begin:end] if isinstance(s, ShardedCompute) for t in s.compute.outputs}
            )
            self.turned.append(len(self.steps))
        if self.rank == stage.first != 0:  # of a training step when all parts of its batch are done
            for tensor in self.sharded.program.outputs:
                if self.makers.get(tensor) == number:
                    self._add(_whole("send", tensor, self._name(tensor), sends=0))
        self.kept = (*self.kept, *(self._carried(keep) for keep in stage.keeps))
        self.had.update({t: local for (t, spread), local in self.here.items() if spread.is_whole})
        self.here.clear()

    def _add(self, step: list[Compute] | Transfer, begun: int | None = None) -> None:
        self.steps.append(step)
        self.when.append(When(self.number if begun is None else begun, self.number))

    # --- what lies here

    def _place(self, tensor: Tensor, spread: Spread, rank: int | None = None) -> Place:
        at = self.at if rank is None else self.stage.mesh.coordinates[rank - self.stage.first]
        return spread.place(extents(tensor), self.stage.mesh, at)

    def _local(self, tensor: Tensor, spread: Spread) -> Tensor:
        """The rank's tensor in the place of one in a spread."""
        found = self.here.get((tensor, spread))
        if found is not None:
            return found
        program = self.sharded.program
        if tensor in self.states:
            found = self._kept(tensor, spread)
        elif tensor in program.inputs:
            found = tensor  # inputs are whole everywhere, whoever reads a part of them
        elif tensor in program.constants:
            found = self._constant(tensor, spread)
        else:
            raise InternalError(f"rank {self.rank}: '{tensor.name}' is not there as {spread}")
        self.here[tensor, spread] = found
        return found

    def _kept(self, tensor: Tensor, spread: Spread) -> Tensor:
        return tensor if spread.is_whole else self._new(tensor, self._place(tensor, spread))

    def _constant(self, tensor: Tensor, spread: Spread) -> Tensor:
        array = self.sharded.program.constants[tensor]
        if spread.is_whole:
            self.constants[tensor] = array
            return tensor
        place = self._place(tensor, spread)
        if (tensor, place) not in self.cut:
            made = self.cut[tensor, place] = self._new(tensor, place)
            self.constants[made] = np.ascontiguousarray(array[slices(place)])
        return self.cut[tensor, place]

    def _new(self, tensor: Tensor, place: Place) -> Tensor:
        name, number = tensor.name, 1
        while name in self.names:
            number += 1
            name = f"{tensor.name}__{number}"
        self.names.add(name)
        return Tensor(name, tuple(count for _, count in place), tensor.dtype)

    def _held(self, piece: ShardedCompute) -> dict[Tensor, tuple[Tensor, Place]]:
        found: dict[Tensor, tuple[Tensor, Place]] = {}
        for tensor, spread in piece.reads.items():
            local = self._local(tensor, spread)
            whole = local is tensor
            place = tuple((0, n) for n in extents(tensor)) if whole else self._place(tensor, spread)
            found[tensor] = (local, place)
        return found

    # --- steps

    def _piece(self, piece: ShardedCompute) -> None:
        compute = piece.compute
        if not isinstance(compute, Map | Reduce):
            moved = {t: self._local(t, spread) for t, spread in piece.reads.items()}
            self.pending.append(replace_tensors(compute, moved))
            self.here.update({(t, piece.gives): t for t in compute.outputs})
            return
        outputs = tuple(
            t if piece.gives.is_whole else self._new(t, self._place(t, piece.gives)) for t in compute.outputs
        )
        self.here.update({(t, piece.gives): new for t, new in zip(compute.outputs, outputs, strict=True)})
        self.pending.append(part_of(piece, self.stage.mesh, self.at, outputs, self._held(piece)))

    def _flush(self) -> None:
        if self.pending:
            self._add(self.pending)
            self.pending = []

    def _exchange(self, step: Exchange) -> None:
        if step.kind == "send":
            self._take(step)
            return
        source = self._local(step.tensor, step.before)
        if any(source in compute.outputs for compute in self.pending):
            self._flush()
        target = self._new(step.tensor, self._place(step.tensor, step.after))
        move = self._between(step, source, target)
        if step.kind != "gather" or self.rank == move.peers[0]:
            self.here[step.tensor, step.after] = target
        self._add(move)

    def _between(self, step: Exchange, source: Tensor, target: Tensor) -> Transfer:
        """What passes along one mesh axis."""
        assert step.axis is not None
        mine = self.rank - self.stage.first
        group = next(peers for peers in self.stage.mesh.peers(step.axis) if mine in peers)
        peers = tuple(self.stage.first + peer for peer in group)
        operator = step.before.parts[step.axis].operator
        about = (step.kind, source.name, target.name, extents(target), target.dtype.numpy, operator)
        name = self.stage.mesh.axes[step.axis][0]
        if step.kind == "all-reduce":
            return Transfer(*about, peers=peers, axis=name)
        had, wanted = self._place(step.tensor, step.before), self._place(step.tensor, step.after)
        sends, takes = [], []
        own: Slices | None = None
        for peer in peers:
            has, wants = self._place(step.tensor, step.before, peer), self._place(step.tensor, step.after, peer)
            for_peer = self._taken(step, had, wants, operator, self.rank, peer)
            from_peer = self._taken(step, has, wanted, operator, peer, self.rank)
            if step.kind == "gather":
                for_peer = for_peer if peer == peers[0] else None
                from_peer = from_peer if self.rank == peers[0] else None
            if from_peer is not None:
                takes.append((peer, slices(relative(from_peer, wanted))))
                own = slices(relative(from_peer, had)) if peer == self.rank else own
            if for_peer is not None and peer != self.rank:
                sends.append((peer, slices(relative(for_peer, had))))
        return Transfer(*about, tuple(sends), tuple(takes), own, peers, name)

    def _taken(
        self, step: Exchange, had: Place, wanted: Place, operator: str | None, source: int, target: int
    ) -> Place | None:
        """What one rank takes of what another has; of blocks that reach into each other, from whose block it is."""
        common = overlap(wanted, had)
        if common is None or operator is not None:
            return common
        mine = self._place(step.tensor, step.before, target)
        return None if source != target and inside(common, mine) else common

    # --- between stages, and the ends

    def _take(self, step: Exchange) -> None:
        """Whole from a rank of the stage that made it, where this one does not have it yet."""
        self._flush()
        maker = self.makers[step.tensor]
        peer = self._peer(step.tensor, maker, self.stage, self.rank)
        self.here[step.tensor, step.after] = self.had[step.tensor] if peer is None else step.tensor
        if peer is not None:
            self._add(_whole("send", step.tensor, step.tensor.name, takes=peer), maker)

    def _peer(self, tensor: Tensor, maker: int, stage: PipelineStage, rank: int) -> int | None:
        """From whom a rank takes a tensor for a stage; None where it has made it, or has it for a stage before."""
        made = self.sharded.stages[maker]
        earlier = [s for s in takewhile(lambda each: each is not stage, self.sharded.stages) if rank in s.ranks]
        if rank in made.ranks or any(_is_taken(tensor, each) for each in earlier):
            return None
        return made.first + (rank - stage.first) % made.mesh.ranks

    def _send_on(self, made: Container[Tensor]) -> None:
        """What other stages take whole from this rank, of what it has made in a turn."""
        for stage in self.sharded.stages:
            for step in stage.steps if stage is not self.stage else ():
                if isinstance(step, Exchange) and step.kind == "send" and step.tensor in made:
                    for rank in stage.ranks:
                        if self._peer(step.tensor, self.number, stage, rank) == self.rank:
                            self._add(_whole("send", step.tensor, self._name(step.tensor), sends=rank))

    def _name(self, tensor: Tensor) -> str:
        return self._local(tensor, Spread.whole(self.stage.mesh)).name

    def _outputs(self) -> dict[str, str]:
        """Results that end on another rank were sent to rank 0."""
        found: dict[str, str] = {}
        for tensor in self.sharded.program.outputs if self.rank == 0 else ():
            maker = self.makers.get(tensor)
            if maker is not None and self.sharded.stages[maker].first != 0:
                self._add(_whole("send", tensor, tensor.name, takes=self.sharded.stages[maker].first), maker)
            found[tensor.name] = tensor.name if maker is None else self.had.get(tensor, tensor).name
        return found

    # --- segments

    def _assembled(self, outputs: Mapping[str, str]) -> RankProgram:
        needed = {*outputs.values(), *(each.following for each in self.kept)}
        found: list[RankStep] = []
        when: list[When] = []
        behind: list[int] = []  # by turn, how many steps are left from there on
        for number, step in reversed(list(enumerate(self.steps))):
            behind += [len(found)] * self.turned.count(number + 1)
            if isinstance(step, Transfer):
                needed.add(step.source)
                found.append(step)
            elif (program := self._program(step, needed)) is not None:
                needed.update(t.name for t in program.inputs)
                found.append(Segment(program))
            else:
                continue
            when.append(self.when[number])
        turns = tuple(len(found) - left for left in reversed(behind))[:-1] if self.stage.turns else ()
        return RankProgram(self.rank, tuple(reversed(found)), outputs, tuple(reversed(when)), turns, self.kept)

    def _carried(self, keep: Keep) -> KeptArray:
        here, following = self._local(keep.tensor, keep.spread), self._local(keep.following, keep.held)
        place, held = self._place(keep.tensor, keep.spread), self._place(keep.following, keep.held)
        return KeptArray(here.name, keep.tensor, place, following.name, slices(relative(place, held)))

    def _program(self, computes: list[Compute], needed: set[str]) -> Program | None:
        """Of some computes what others need of them; None where that is nothing."""
        kept: list[Compute] = []
        wanted = set(needed)
        for compute in reversed(computes):
            if any(t.name in wanted for t in compute.outputs):
                kept.insert(0, compute)
                wanted.update(t.name for t in reads(compute))
        if not kept:
            return None
        made = {t for c in kept for t in c.outputs}
        read = dict.fromkeys(t for c in kept for t in reads(c) if t not in made)
        constants = {t: self.constants[t] for t in read if t in self.constants}
        inputs = tuple(t for t in read if t not in constants)
        return Program(inputs, tuple(_in_order(kept, needed)), tuple(kept), constants)


def _is_taken(tensor: Tensor, stage: PipelineStage) -> bool:
    return any(isinstance(s, Exchange) and s.kind == "send" and s.tensor is tensor for s in stage.steps)


def _in_order(computes: list[Compute], needed: set[str]) -> Iterator[Tensor]:
    yield from (t for c in computes for t in c.outputs if t.name in needed)


def _whole(kind: str, tensor: Tensor, name: str, takes: int | None = None, sends: int | None = None) -> Transfer:
    """All of a tensor from one rank to another."""
    place = slices(tuple((0, n) for n in extents(tensor)))
    peers = tuple(rank for rank in (takes, sends) if rank is not None)
    return Transfer(
        kind, name, name, extents(tensor), tensor.dtype.numpy,
        sends=() if sends is None else ((sends, place),), takes=() if takes is None else ((takes, place),), peers=peers,
    )  # fmt: skip
