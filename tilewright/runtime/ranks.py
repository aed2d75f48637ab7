"""Ranks that run one model together: how they find each other, compare what they are about to run, and pass arrays on.

The only place that imports torch.distributed. Every wait has an end: what a rank waits for longer than `timeout`, or a
rank that is no more, is a RankError that says which step of which rank it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Slices = tuple[slice, ...]

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
    found: Array | None
    came: Mapping[int, Array]  # by rank
    works: Sequence[Any]
    kept: Sequence[Array]  # arrays that are read while they are sent


class Ranks:
    """This process among those that torchrun, or another launcher with the same variables, has started."""

    def __init__(self, distributed: Any, torch: Any, timeout: float) -> None:
        self._distributed, self._torch, self.timeout = distributed, torch, timeout
        self.rank: int = distributed.get_rank()
        self.size: int = distributed.get_world_size()

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
        mine = np.frombuffer(digest, np.uint8).copy()
        found = [self._torch.empty(len(mine), dtype=self._torch.uint8) for _ in range(self.size)]
        try:
            self._distributed.all_gather(found, self._torch.from_numpy(mine))
        except RuntimeError as error:
            raise self._lost("comparing models", error) from error
        others = [rank for rank, each in enumerate(found) if each.numpy().tobytes() != found[0].numpy().tobytes()]
        if others:
            names = ", ".join(map(str, others))
            raise RankError(f"rank {names} has another {what} than rank 0: give every rank the same model and options")

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

    def share(self, values: dict[str, Array], wanted: Sequence[tuple[str, tuple[int, ...], np.dtype[Any]]]) -> None:
        """Arrays that rank 0 has, to all."""
        for name, shape, dtype in wanted:
            array = np.ascontiguousarray(values[name]) if self.rank == 0 else np.empty(shape, dtype)
            try:
                self._distributed.broadcast(self._bytes(array), 0)
            except RuntimeError as error:
                raise self._lost(f"input '{name}'", error) from error
            values[name] = array

    def move(self, move: Move, values: dict[str, Array], step: str) -> None:
        """Do one exchange; `step` names it in errors."""
        try:
            if move.kind == "all-reduce":
                values[move.target] = self._all_reduce(values[move.source], move)
            else:
                self._finished(self._begun(move, values), values)
        except RuntimeError as error:
            raise self._lost(step, error) from error

    def begin(self, move: Move, values: Mapping[str, Array], step: str) -> Passing:
        """Start to send and to take what an exchange says; the arrays that are sent may not change until it ends."""
        try:
            return self._begun(move, values)
        except RuntimeError as error:
            raise self._lost(step, error) from error

    def finish(self, passing: Passing, values: dict[str, Array], step: str) -> None:
        """Wait for an exchange that was begun, and put what came where it belongs."""
        try:
            self._finished(passing, values)
        except RuntimeError as error:
            raise self._lost(step, error) from error

    def _begun(self, move: Move, values: Mapping[str, Array]) -> Passing:
        parts = {peer: values[move.source][place] for peer, place in move.sends}
        found = np.empty(move.shape, move.dtype) if move.takes else None
        came: dict[int, Array] = {}
        for peer, place in move.takes:
            assert found is not None
            if peer != self.rank:
                came[peer] = np.empty(found[place].shape, move.dtype)
        return Passing(move, found, came, *self._started(parts, came))

    def _finished(self, passing: Passing, values: dict[str, Array]) -> None:
        self._wait(passing.works)
        move, found = passing.move, passing.found
        if found is None:
            return
        for number, (peer, place) in enumerate(move.takes):
            part = values[move.source][move.own or ()] if peer == self.rank else passing.came[peer]
            if move.operator is None or number == 0:
                found[place] = part
            else:
                found[place] = _REDUCED[move.operator](found[place], part)
        values[move.target] = found

    def _all_reduce(self, array: Array, move: Move) -> Array:
        """Every rank adds up a part of all terms, in the order of the ranks, and tells the others."""
        flat = np.ascontiguousarray(array).reshape(-1)
        peers = list(move.peers)
        bounds = [len(flat) * i // len(peers) for i in range(len(peers) + 1)]
        part = {peer: slice(bounds[i], bounds[i + 1]) for i, peer in enumerate(peers)}
        mine = part[self.rank]
        others = [peer for peer in peers if peer != self.rank]
        terms = {peer: np.empty(mine.stop - mine.start, flat.dtype) for peer in others}
        self._pass({peer: flat[part[peer]] for peer in others}, terms)
        terms[self.rank] = flat[mine]
        total = terms[peers[0]]
        for peer in peers[1:]:
            total = _REDUCED[move.operator or "add"](total, terms[peer])
        result = np.empty_like(flat)
        result[mine] = total
        sums = {peer: np.empty(part[peer].stop - part[peer].start, flat.dtype) for peer in others}
        self._pass(dict.fromkeys(others, total), sums)
        for peer in others:
            result[part[peer]] = sums[peer]
        return result.reshape(array.shape)

    def _pass(self, sends: Mapping[int, Array], takes: Mapping[int, Array]) -> None:
        """Send to some and fill arrays from others, all at once; nothing is left under way."""
        works, _ = self._started(sends, takes)
        self._wait(works)

    def _started(self, sends: Mapping[int, Array], takes: Mapping[int, Array]) -> tuple[list[Any], list[Array]]:
        """What is under way, and the arrays that have to stay for it."""
        kept = {peer: np.ascontiguousarray(part) for peer, part in sends.items() if part.size}
        works = [self._distributed.isend(self._bytes(part), peer) for peer, part in kept.items()]
        works += [self._distributed.irecv(self._bytes(a), peer) for peer, a in takes.items() if a.size]
        return works, list(kept.values())

    def _wait(self, works: Sequence[Any]) -> None:
        for work in works:
            work.wait(timedelta(seconds=self.timeout))

    def _bytes(self, array: Array) -> Any:
        return self._torch.from_numpy(array.reshape(-1).view(np.uint8))

    def _lost(self, step: str, error: RuntimeError) -> RankError:
        return RankError(f"rank {self.rank}, {step}: another rank is gone or did not answer within {self.timeout:g} s "
                         f"({_first_line(error)})")  # fmt: skip


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
