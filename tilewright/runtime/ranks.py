"""Ranks that run one model together: how they find each other, compare what they are about to run, and pass arrays on.

The only place that imports torch.distributed. Every wait has an end: what a rank waits for longer than `timeout`, or a
rank that is no more, is a RankError that says which step of which rank it was.

Arrays of the host pass by gloo. Where every rank has a GPU of its own, what the ranks of a stage exchange stays there
and passes by NCCL.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tilewright.runtime.outputs import ArrayMemory, passing_memory

Array = NDArray[Any]
Slices = tuple[slice, ...]

_IDENTITY = 64  # bytes by which a GPU or a computer is told from others
_STARTING = 60.0  # seconds that a rank may start later than others
_COMPILING = 3600.0  # seconds that a rank may compile while others are done
_REDUCED = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


class RankError(Exception):
    """Ranks that cannot run together, or one that is gone; the text is one line that names the rank."""


class Move(Protocol):
    """What passes between ranks in one step; `transform/spmd.py` says what the fields mean."""

    @property
    def kind(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def target(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def operator(self) -> str | None: ...
    @property
    def sends(self) -> Sequence[tuple[int, Slices]]: ...
    @property
    def takes(self) -> Sequence[tuple[int, Slices]]: ...
    @property
    def own(self) -> Slices | None: ...
    @property
    def peers(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class Passing:
    """An exchange that was begun: where what comes is put together, and what is under way until then."""

    move: Move
    found: Any
    came: Mapping[int, Any]  # by rank
    works: Sequence[Any]
    kept: Sequence[Any]  # arrays that are read while they are sent


class _OnHost:
    """Arrays of NumPy, and how they are handed to torch.distributed."""

    group: Any = None

    def __init__(self, torch: Any, distributed: Any, memory: ArrayMemory) -> None:
        self._torch, self._distributed, self._memory = torch, distributed, memory

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Any:
        return self._memory.empty(shape, dtype)

    def whole(self, array: Any) -> Any:
        if array.flags.c_contiguous:
            return array
        made = self._memory.empty(array.shape, array.dtype)
        made[...] = array
        return made

    def is_whole(self, array: Any) -> bool:
        """Whether its bytes follow each other in memory."""
        return bool(array.flags.c_contiguous)

    def bytes(self, array: Any) -> Any:
        return self._torch.from_numpy(array.reshape(-1).view(np.uint8))

    def reduce(self, operator: str, into: Any, other: Any) -> None:
        _REDUCED[operator](into, other, out=into)

    def started(self, sends: Mapping[int, Any], takes: Mapping[int, Any], tag: int) -> list[Any]:
        works = [self._distributed.isend(self.bytes(part), peer, tag=tag) for peer, part in sends.items()]
        return works + [self._distributed.irecv(self.bytes(array), peer, tag=tag) for peer, array in takes.items()]


class OnDevice(_OnHost):
    """The same of tensors on this rank's GPU, in the order of the stream that is current there."""

    def __init__(self, torch: Any, distributed: Any, group: Any, device: str = "cuda") -> None:
        super().__init__(torch, distributed, passing_memory())
        self.group, self._device = group, device

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Any:
        form = self._torch.from_numpy(np.empty(0, dtype)).dtype
        return self._torch.empty(tuple(shape), dtype=form, device=self._device)

    def whole(self, array: Any) -> Any:
        return array.contiguous()

    def is_whole(self, array: Any) -> bool:
        return bool(array.is_contiguous())

    def bytes(self, array: Any) -> Any:
        return array.reshape(-1).view(self._torch.uint8)

    def reduce(self, operator: str, into: Any, other: Any) -> None:
        named = {"add": "add", "mul": "mul", "max": "maximum", "min": "minimum"}
        getattr(self._torch, named[operator])(into, other, out=into)

    def started(self, sends: Mapping[int, Any], takes: Mapping[int, Any], tag: int) -> list[Any]:
        """All at a time: NCCL does them in turn otherwise, and two that send first wait for each other for ever."""
        about = [(self._distributed.isend, self.bytes(part), peer) for peer, part in sends.items()]
        about += [(self._distributed.irecv, self.bytes(array), peer) for peer, array in takes.items()]
        ways = [self._distributed.P2POp(*each, group=self.group) for each in about]
        return list(self._distributed.batch_isend_irecv(ways)) if ways else []

    def brought(self, array: Array) -> Any:
        """An array of the host."""
        return self._torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def fetched(self, tensor: Any) -> Array:
        found: Array = tensor.cpu().numpy()
        return found


class Ranks:
    """This process among those that torchrun, or another launcher with the same variables, has started."""

    def __init__(self, distributed: Any, torch: Any, timeout: float) -> None:
        self._distributed, self._torch, self.timeout = distributed, torch, timeout
        self.rank: int = distributed.get_rank()
        self.size: int = distributed.get_world_size()
        self.memory = passing_memory()
        self._host = _OnHost(torch, distributed, self.memory)

    def on_devices(self, gpu: bytes) -> OnDevice | None:
        """How arrays pass between GPUs, where every rank has one of its own, told by its identity; empty for none."""
        mine = np.frombuffer(gpu.ljust(_IDENTITY, b"\0")[:_IDENTITY], np.uint8).copy()
        found = [each.tobytes() for each in self._gathered(mine, "comparing devices")]
        is_own = all(any(each) for each in found) and len(set(found)) == self.size
        if not is_own or not self._distributed.is_nccl_available():
            return None
        try:
            group = self._distributed.new_group(backend="nccl", timeout=timedelta(seconds=self.timeout))
        except RuntimeError as error:
            raise self._lost("joining devices", error) from error
        return OnDevice(self._torch, self._distributed, group)

    @staticmethod
    def join(timeout: float = 60.0) -> Ranks:
        """Meet the others; a process group that there is already is used as it is."""
        try:
            import torch
            import torch.distributed as distributed
        except ImportError as error:
            raise RankError("several ranks need PyTorch: pip install 'tilewright[torch]'") from error
        if not distributed.is_available() or not distributed.is_gloo_available():
            raise RankError("this PyTorch was built without torch.distributed and gloo, which several ranks need")
        if not distributed.is_initialized():
            _meet(distributed, timeout)
        return Ranks(distributed, torch, timeout)

    def leave(self) -> None:
        """Part from the others. Here and not at the process's end, where connections that close would abort it."""
        if not self._distributed.is_initialized():
            return
        with suppress(RuntimeError):  # whoever is gone already
            self._distributed.destroy_process_group()

    def same(self, digest: bytes, what: str) -> None:
        """Whether all ranks are about to run the same: a mistake is told on each of them, before anything else is
        exchanged, which would end the process where sizes differ."""
        found = self._gathered(np.frombuffer(digest, np.uint8).copy(), "comparing models")
        others = [rank for rank, each in enumerate(found) if each.tobytes() != found[0].tobytes()]
        if others:
            names = ", ".join(map(str, others))
            raise RankError(f"rank {names} has another {what} than rank 0: give every rank the same model and options")

    def _gathered(self, mine: Array, step: str) -> list[Array]:
        """What every rank has, in their order."""
        found = [self._torch.empty(len(mine), dtype=self._torch.uint8) for _ in range(self.size)]
        try:
            self._distributed.all_gather(found, self._torch.from_numpy(mine))
        except RuntimeError as error:
            raise self._lost(step, error) from error
        return [each.numpy() for each in found]

    def on_this_computer(self) -> int:
        """How many of the ranks are on the computer that this one is on."""
        name = np.frombuffer(platform.node().encode().ljust(_IDENTITY, b"\0")[:_IDENTITY], np.uint8).copy()
        return sum(each.tobytes() == name.tobytes() for each in self._gathered(name, "comparing computers"))

    def wait(self, step: str) -> None:
        """Until all ranks are here, who may have been compiling for long; one that is gone is told at once."""
        try:
            self._distributed.monitored_barrier(timeout=timedelta(seconds=max(self.timeout, _COMPILING)))
        except RuntimeError as error:
            raise self._lost(step, error) from error

    def text(self, told: str | None) -> str:
        """What rank 0 tells all."""
        size = np.array([len((told or "").encode())], np.int64)
        data = np.frombuffer((told or "").encode(), np.uint8).copy()
        try:
            length = self._torch.from_numpy(size)
            self._distributed.broadcast(length, 0)
            if self.rank:
                data = np.empty(int(size[0]), np.uint8)
            self._distributed.broadcast(self._torch.from_numpy(data), 0)
        except RuntimeError as error:
            raise self._lost("the plan", error) from error
        return data.tobytes().decode()

    def share(
        self, values: dict[str, Any], wanted: Sequence[tuple[str, tuple[int, ...], np.dtype[Any]]],
        there: OnDevice | None = None,
    ) -> None:  # fmt: skip
        """Arrays that rank 0 has, to all: on the host, or on their devices."""
        for name, shape, dtype in wanted:
            own = there or self._host
            if self.rank:
                array = own.empty(shape, dtype)
            else:
                array = self._host.whole(values[name]) if there is None else there.brought(values[name])
            try:
                self._distributed.broadcast(own.bytes(array), 0, group=own.group)
            except RuntimeError as error:
                raise self._lost(f"input '{name}'", error) from error
            values[name] = array

    def move(self, move: Move, values: dict[str, Any], step: str, there: OnDevice | None = None) -> None:
        """Do one exchange of arrays on the host, or on devices; `step` names it in errors."""
        own = there or self._host
        try:
            if move.kind == "all-reduce":
                values[move.target] = self._all_reduce(values[move.source], move, own)
            else:
                self._finished(self._begun(move, values, own), values, own)
        except RuntimeError as error:
            raise self._lost(step, error) from error

    def begin(self, move: Move, values: Mapping[str, Array], step: str) -> Passing:
        """Start to send and to take what an exchange says; the arrays that are sent may not change until it ends."""
        try:
            return self._begun(move, values, self._host)
        except RuntimeError as error:
            raise self._lost(step, error) from error

    def finish(self, passing: Passing, values: dict[str, Array], step: str) -> None:
        """Wait for an exchange that was begun, and put what came where it belongs."""
        try:
            self._finished(passing, values, self._host)
        except RuntimeError as error:
            raise self._lost(step, error) from error

    def _begun(self, move: Move, values: Mapping[str, Any], own: _OnHost) -> Passing:
        wholes: dict[str, Any] = {}  # most exchanges send the same part to all
        for _, place in move.sends:
            if str(place) not in wholes:
                wholes[str(place)] = own.whole(_at(values[move.source], place))
        parts = {peer: wholes[str(place)] for peer, place in move.sends}
        found = own.empty(move.shape, move.dtype) if move.takes else None
        came: dict[int, Any] = {}
        for peer, place in move.takes:
            assert found is not None
            if peer != self.rank:  # what is added up, or lies in pieces, is put in its place once it has come
                part = _at(found, place)
                is_there = move.operator is None and own.is_whole(part)
                came[peer] = part if is_there else own.empty(part.shape, move.dtype)
        # from stage to stage while two ranks are at something else: not to be taken for that
        return Passing(move, found, came, *self._started(parts, came, own, int(move.kind == "send")))

    def _finished(self, passing: Passing, values: dict[str, Any], own: _OnHost) -> None:
        self._wait(passing.works)
        move, found = passing.move, passing.found
        if found is None:
            return
        for number, (peer, place) in enumerate(move.takes):
            part = _at(values[move.source], move.own or ()) if peer == self.rank else passing.came[peer]
            into = _at(found, place)
            if move.operator is None and peer != self.rank and own.is_whole(into):
                continue  # it came to its place
            if move.operator is None or number == 0:
                into[...] = part
            else:
                own.reduce(move.operator, into, part)
        values[move.target] = found

    def _all_reduce(self, array: Any, move: Move, own: _OnHost) -> Any:
        """Every rank adds up a part of all terms, in the order of the ranks, and tells the others."""
        flat = own.whole(array).reshape(-1)
        peers = list(move.peers)
        bounds = [len(flat) * i // len(peers) for i in range(len(peers) + 1)]
        part = {peer: slice(bounds[i], bounds[i + 1]) for i, peer in enumerate(peers)}
        mine = part[self.rank]
        others = [peer for peer in peers if peer != self.rank]
        terms = {peer: own.empty((mine.stop - mine.start,), move.dtype) for peer in others}
        self._pass({peer: flat[part[peer]] for peer in others}, terms, own)
        terms[self.rank] = flat[mine]
        result = own.empty((len(flat),), move.dtype)
        result[mine] = terms[peers[0]]
        for peer in peers[1:]:
            own.reduce(move.operator or "add", result[mine], terms[peer])
        self._pass(dict.fromkeys(others, result[mine]), {peer: result[part[peer]] for peer in others}, own)
        return result.reshape(array.shape)

    def _pass(self, sends: Mapping[int, Any], takes: Mapping[int, Any], own: _OnHost) -> None:
        """Send to some and fill arrays from others, all at once; nothing is left under way."""
        works, _ = self._started(sends, takes, own)
        self._wait(works)

    def _started(
        self, sends: Mapping[int, Any], takes: Mapping[int, Any], own: _OnHost, tag: int = 0
    ) -> tuple[list[Any], list[Any]]:
        """What is under way, and the arrays that have to stay for it."""
        kept = {peer: own.whole(part) for peer, part in sends.items() if 0 not in part.shape}
        return own.started(kept, {peer: a for peer, a in takes.items() if 0 not in a.shape}, tag), list(kept.values())

    def _wait(self, works: Sequence[Any]) -> None:
        for work in works:
            work.wait(timedelta(seconds=self.timeout))

    def _lost(self, step: str, error: RuntimeError) -> RankError:
        return RankError(f"rank {self.rank}, {step}: another rank is gone or did not answer within {self.timeout:g} s "
                         f"({_first_line(error)})")  # fmt: skip


def _at(array: Any, place: Slices) -> Any:
    """A view of a part; what has no dimensions is its own part, where an index without an ellipsis gives a copy."""
    return array[(*place, ...)]


def _meet(distributed: Any, timeout: float) -> None:
    """A process group of all ranks. They start when the system lets them, so that they wait longer here than later."""
    patience = timedelta(seconds=max(timeout, _STARTING))
    try:
        store, rank, size = next(distributed.rendezvous("env://", timeout=patience))
        limit = timedelta(seconds=timeout)
        _pass_gate(store, "started", rank, size, patience)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
        _pass_gate(store, "connected", rank, size, patience)  # whoever left before would break others' connecting
    except ValueError as error:
        way = "start it with torchrun --nproc-per-node N, which tells each process its rank"
        raise RankError(f"this process knows no other ranks; {way}") from error
    except RuntimeError as error:
        told = f"the ranks did not meet within {patience.total_seconds():g} s"
        raise RankError(f"{told}: {_first_line(error)}") from error


def _pass_gate(store: Any, name: str, rank: int, size: int, patience: timedelta) -> None:
    """Go on when all ranks are here."""
    store.set(f"tilewright/{name}/{rank}", "here")
    store.wait([f"tilewright/{name}/{each}" for each in range(size)], patience)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:160]
