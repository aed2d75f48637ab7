"""Weights beyond a device's memory: some stay there, the others pass through a ring of slots ahead of the kernels.

Small weights, and those that are copied several times a run, stay first: a copy takes a microsecond whatever its size.
Each of the others is copied from the host before the launch that reads it, into the next slot of the ring, as soon as
the last reader of what was there has ended. The ring holds what two launches read, so that one is copied while the
other is computed with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tilewright.errors import InternalError, OptionError
from tilewright.runtime import BufferRef
from tilewright.runtime.gpu_model import GpuCall, GpuModelImage, Resident, WeightCopy

_SLOT = 256  # bytes at which slots begin: whole packets of a copy
_TOGETHER = 2  # launches whose weights the ring holds at least


@dataclass(frozen=True)
class _Weight:
    """One tensor in the file of weights, and the runs of launches that read it one after the other."""

    offset: int
    bytes: int
    readers: tuple[tuple[int, int], ...]  # the first launch and the last


def within_memory(image: GpuModelImage, sizes: Mapping[int, int], limit: int) -> GpuModelImage:
    """The model with at most so many bytes on the device, its inputs and outputs among them. `sizes` has the bytes of
    every weight by where it begins."""
    fixed = image.arena_bytes + sum(image.input_bytes) + sum(image.output_bytes)
    room = limit - fixed
    weights = [_Weight(offset, size, _readers(image.calls, offset)) for offset, size in sorted(sizes.items())]
    if sum(_slot(w.bytes) for w in weights) <= room:
        return image
    least = _least_ring(image.calls, weights)
    if least > room:
        needed = f"{fixed} bytes for what is computed and goes in and out, and {least} for weights that pass through"
        enough = -(-(fixed + least) >> 20)
        raise OptionError(f"device_memory={limit} is not enough: it takes {needed}; give it {enough}MiB")
    wanted = max(least, _TOGETHER * _most_of_one(image.calls, weights))
    # what wraps around the end leaves a gap: where that is in the way, another size is tried; the last is known to do
    tried = [_slot(wanted + wanted * n // 8) for n in range(8)]
    for ring, rest in [*((size, room - size) for size in tried if size <= room), (least, room - least), (least, 0)]:
        staying = _staying(weights, rest)
        copies = _copies([w for w in weights if w not in staying], ring)
        if copies is not None:
            return _placed(image, staying, copies, ring)
    raise InternalError(f"weights pass through no ring of {least} bytes")


def _readers(calls: Sequence[GpuCall], offset: int) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    for number, call in enumerate(calls):
        if BufferRef("weight", offset) not in call.buffers:
            continue
        if found and found[-1][1] >= number - 1:
            found[-1] = found[-1][0], number
        else:
            found.append((number, number))
    return tuple(found)


def _slot(size: int) -> int:
    return -(-size // _SLOT) * _SLOT


def _most_of_one(calls: Sequence[GpuCall], weights: Sequence[_Weight]) -> int:
    """Bytes of the launch that reads most."""
    read = [sum(_slot(w.bytes) for w in weights if any(a <= n <= b for a, b in w.readers)) for n in range(len(calls))]
    return max(read, default=0)


def _least_ring(calls: Sequence[GpuCall], weights: Sequence[_Weight]) -> int:
    """A ring through which all weights can pass."""
    ring = max(_SLOT, _most_of_one(calls, weights))
    while _copies(weights, ring) is None:
        ring = _slot(ring + ring // 8 + 1)
    return ring


def _staying(weights: Sequence[_Weight], room: int) -> list[_Weight]:
    """What stays on the device: weights that are copied most often a run first, and of those the smallest. Equal ones
    are spread out over the run: what passes in between is copied while they are computed with."""
    found: list[_Weight] = []
    order = {weight.offset: _scattered(number) for number, weight in enumerate(weights)}
    for weight in sorted(weights, key=lambda w: (-len(w.readers), w.bytes, order[w.offset])):
        if _slot(weight.bytes) <= room and weight.readers:
            found.append(weight)
            room -= _slot(weight.bytes)
    return found


def _scattered(number: int) -> float:
    """Its bits behind the point, the last first: any first few of such numbers are of places far from each other."""
    return int(f"{number:032b}"[::-1], 2) / (1 << 32)


def _copies(weights: Sequence[_Weight], ring: int) -> tuple[WeightCopy, ...] | None:
    """Slots one behind the other in the order of use; None where one would be filled while it is read, or before what
    it holds was."""
    uses = sorted(((a, b, w) for w in weights for a, b in w.readers), key=lambda use: (use[0], use[2].offset))
    found: list[WeightCopy] = []
    taken: list[tuple[int, int, int]] = []  # begin and end of a slot, and its last reader
    at = 0
    for first, last, weight in uses:
        size = _slot(weight.bytes)
        at = 0 if at + size > ring else at
        over = [each for each in taken if each[0] < at + size and at < each[1]]
        after = max((reader for _, _, reader in over), default=-1)
        if size > ring or after >= first:
            return None
        taken = [each for each in taken if each not in over]
        taken.append((at, at + size, last))
        found.append(WeightCopy(weight.offset, at, weight.bytes, first, after))
        at += size
    return tuple(found)


def _placed(
    image: GpuModelImage, staying: Sequence[_Weight], copies: tuple[WeightCopy, ...], ring: int
) -> GpuModelImage:
    """Every launch reads weights where they are then."""
    residents: list[Resident] = []
    at = 0
    for weight in sorted(staying, key=lambda w: w.offset):
        residents.append(Resident(weight.offset, at, weight.bytes))
        at += _slot(weight.bytes)
    where = {each.source: BufferRef("weight", each.place) for each in residents}
    slots: dict[int, list[WeightCopy]] = {}
    for copy in copies:
        slots.setdefault(copy.source, []).append(copy)

    def moved(number: int, ref: BufferRef) -> BufferRef:
        if ref.space != "weight" or ref.value in where:
            return where.get(ref.value, ref) if ref.space == "weight" else ref
        latest = [copy for copy in slots[ref.value] if copy.first <= number][-1]
        return BufferRef("ring", latest.place)

    calls = tuple(replace(call, buffers=tuple(moved(number, ref) for ref in call.buffers))
                  for number, call in enumerate(image.calls))  # fmt: skip
    return replace(image, calls=calls, residents=tuple(residents), copies=copies, ring_bytes=ring)
