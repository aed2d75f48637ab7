"""What the ways to run a product on tensor cores cost, all of them at once, by the rates of the Target; nothing is
measured when a model is planned.

A part of the sum takes as long as tensor cores, shared memory and the L2 cache take together; so many stages are under
way that the latency of memory is covered by the parts before. A block begins, waits for its first part, walks the sum
and stores. Blocks that share a multiprocessor add up where they use the same unit and overlap where they wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

import numpy as np

from tilewright.backend.gpu import constants as prices
from tilewright.backend.gpu.maps.unpack import FETCHED
from tilewright.backend.gpu.matrix.epilogue import SUMS_PAD
from tilewright.intrinsics.gpu_matrix import FORMS, ROW_BYTES, MatrixForm
from tilewright.ir.meaning.instruct import WARP
from tilewright.target import Target
from tilewright.target.instruction_sets import BANK_ROW_BYTES
from tilewright.tile_graph.algebra.propagate import Size
from tilewright.tile_graph.plan.form import PADDED, SWIZZLED

Both = tuple[bool, bool]  # of the rows' operand, and of the columns'
Ways = tuple[int, int]
Numbers = np.ndarray  # with an entry for every way

MOST_BLOCK = 256  # rows or columns of a block
_WARPS = (1, 2, 3, 4, 6, 8)
_GROUPS = {8: (1, 2, 4)}  # of so many warps that share the steps of a part: two warps a scheduler, small tiles or not
_STEP_BYTES = (256, 128, 64)  # of a line of shared memory along the sum
_LEAST_STEPS = 2  # of a part, of each group: the next fragments come while these are multiplied
_LEAST_STAGES, _WISHED_STAGES, _MOST_STAGES = 3, 4, 6  # parts arrive unevenly, whatever the mean says
# how operands come to shared memory, and codes of 4 and 8 bits, which are unpacked on their way to the registers
COPIED_AS_IT_LIES, COMPUTED, BY_ELEMENT = range(3)
UNPACKED = {4: 3, 8: 4}
_MOST_COLUMNS = 128  # of sums that are added to others, beside which those of 256 still fit the registers


@dataclass(frozen=True)
class Fragments:
    """How a block's warps share a product, and how its operands come."""

    rows: int  # of a block
    columns: int
    warp_rows: int
    warp_columns: int
    step: int
    stages: int
    stored: int = 1  # columns of a result that are stored at a time, by way of shared memory
    groups: int = 1  # of warps, that each take some of the steps of every part of the sum
    instruction: str = ""

    @property
    def warps(self) -> int:
        return self.rows // self.warp_rows * (self.columns // self.warp_columns) * self.groups


@dataclass(frozen=True)
class MatrixCost:
    """Cycles of a multiprocessor that a block keeps busy, cycles it takes alone, bytes of shared memory, and how many
    blocks share a multiprocessor."""

    busy: float
    alone: float
    ring: int
    resident: int


@dataclass(frozen=True)
class BlockedProduct:
    """A box of a product, `blocks` of which are to be computed. `ways` and `runs`: how the rows' operand and the
    columns' come, and whether their lines run along the sum; `far`: they come from device memory rather than from the
    L2; `stored`: see Fragments; `work`: instructions of the epilogue; `anew`: see Leaf."""

    rows: int
    columns: int
    others: int
    length: int
    blocks: int
    ways: Ways
    far: bool
    runs: Both
    stored: int = 1
    work: int = 0
    anew: int = 0
    steps: tuple[int, ...] = ()  # of the sum that a part may have, where not any


Way = tuple[Fragments, MatrixCost]


def fragments_for(
    target: Target, instruction: str, product: BlockedProduct, warps: int = 0, room: int = 0
) -> Way | None:
    """The best way, with so many warps where that is given, in so much shared memory."""
    found = ways_by_warps(target, instruction, product, room)
    if warps and warps not in found:
        found = ways_by_warps(target, instruction, product, room, warps)
    kept = [way for number, way in found.items() if warps in (0, number)]
    return min(kept, key=lambda way: way[0])[1:] if kept else None


@lru_cache(maxsize=1 << 16)
def ways_by_warps(
    target: Target, instruction: str, product: BlockedProduct, room: int = 0, warps: int = 0
) -> dict[int, tuple[float, Fragments, MatrixCost]]:
    """The best way by so many warps of a block, for all numbers that are tried or for one, with its seconds."""
    found: dict[int, tuple[float, Fragments, MatrixCost]] = {}
    for name in instructions(target, instruction):
        ways = _ways(target, name, product, warps, room)
        if ways is None:
            continue
        tried, taken, (busy, alone, ring, resident) = ways
        # of equals warps that are wider than tall: results lie along their lines
        rated = taken * np.where(tried.height > tried.width, prices.TALL, 1.0)
        for number in np.unique(tried.warps):
            best = int(np.argmin(np.where(tried.warps == number, rated, np.inf)))
            if rated[best] < (found[number][0] if number in found else np.inf):
                cost = MatrixCost(float(busy[best]), float(alone[best]), int(ring[best]), int(resident[best]))
                found[int(number)] = float(rated[best]), tried.made(best), cost
    return found


def instructions(target: Target, instruction: str) -> tuple[str, ...]:
    """Those that do the same: of a warp by itself, and of four warps as one."""
    operand = FORMS[instruction].operand
    return tuple(name for name, form in FORMS.items() if form.operand is operand and target.rate(name))


def cost_of(target: Target, made: Fragments, product: BlockedProduct) -> MatrixCost:
    """What a product costs that runs in one way."""
    form = FORMS[made.instruction]
    shape = np.array([(made.rows, made.columns, made.warp_rows, made.warp_columns, made.step, made.groups)], np.int64)
    tried = (_TriedInGroups if form.warps > 1 else _Tried)(target, form, product, shape, made.stages)
    ring, busy, alone, resident = (float(x[0]) for x in tried.costs(target.local.capacity))
    return MatrixCost(busy, alone, int(ring), int(resident))


def ranked(target: Target, instruction: str, product: BlockedProduct) -> list[tuple[Fragments, float]]:
    """Every way with its seconds, the best first."""
    found: list[tuple[Fragments, float]] = []
    for name in instructions(target, instruction):
        ways = _ways(target, name, product, 0, 0)
        if ways is not None:
            tried, taken, _ = ways
            found.extend((tried.made(i), float(t)) for i, t in enumerate(taken) if np.isfinite(t))
    return sorted(found, key=lambda item: item[1])


def _ways(
    target: Target, instruction: str, product: BlockedProduct, warps: int, room: int
) -> tuple[_Tried, Numbers, tuple[Numbers, Numbers, Numbers, Numbers]] | None:
    """All ways, their seconds, and what else is known of them; None where there is none."""
    form = FORMS[instruction]
    if (form.along_sum and not all(product.runs)) or (form.warps > 1 and product.steps):
        return None
    near, far = (min(n, MOST_BLOCK) for n in (product.rows, product.columns))
    twice = product.anew > 0
    shapes = _group_shapes(form, near, far, warps, twice, target) if form.warps > 1 else (
        _shapes(form, near, far, warps, product.stored > 1, twice, target, product.steps))  # fmt: skip
    if twice:  # sums begin anew behind a whole part
        shapes = shapes[product.anew % shapes[:, 4] == 0]
    if not len(shapes):
        return None
    tried = (_TriedInGroups if form.warps > 1 else _Tried)(target, form, product, shapes)
    ring, busy, alone, resident = tried.costs(room or target.local.capacity)
    taken = seconds(busy, alone, resident, product.blocks, target)
    if not len(taken) or not np.isfinite(taken.min()):
        return None
    return tried, np.asarray(taken), (busy, alone, ring, resident)


@lru_cache(maxsize=1 << 12)
def _shapes(
    form: MatrixForm,
    rows: int,
    columns: int,
    warps: int,
    in_groups: bool,
    twice: bool,
    target: Target,
    steps: tuple[int, ...] = (),
) -> Numbers:
    """Rows and columns of a block, of a warp, the step and the groups of every way; sums are kept `twice` where some
    are added to others."""
    found = []
    for count in (warps,) if warps else _WARPS:
        of_thread = target.register_file // (WARP * count)  # that a thread of so many can have
        # sums of several groups meet in shared memory
        for groups in _GROUPS.get(count, (1,)) if in_groups else (1,):
            together = count // groups
            for down in (n for n in range(1, together + 1) if together % n == 0):
                across = together // down
                height, width = ceil(rows / (16 * down)) * 16, ceil(columns / (16 * across)) * 16
                kept = _kept(height, width, twice)
                if kept + prices.REGISTERS_TAKEN > target.vector_registers or kept > of_thread:
                    continue
                for step in steps or [size // form.operand.bytes for size in _STEP_BYTES]:
                    if step // ((FETCHED if steps else form.depth) * groups) >= _LEAST_STEPS:
                        found.append((height * down, width * across, height, width, step, groups))
    return np.array(found, dtype=np.int64).reshape(-1, 6)


@lru_cache(maxsize=1 << 12)
def _group_shapes(form: MatrixForm, rows: int, columns: int, warps: int, twice: bool, target: Target) -> Numbers:
    """The same where four warps have 64 rows and all columns, in lines of whole pieces."""
    height, width = ceil(rows / 64) * 64, ceil(columns / 64) * 64
    count = height // form.c.rows
    registers = _kept_by_group(width, form, twice) + prices.REGISTERS_IN_GROUPS
    if (
        (warps and count != warps)
        or WARP * count * registers > target.register_file
        or (registers > target.vector_registers)
    ):
        return np.zeros((0, 6), np.int64)
    piece = 128 // form.operand.bytes
    return np.array([(height, width, form.c.rows, width, step, 1) for step in (2 * piece, piece)], np.int64)


def _kept_by_group(width: Size, form: MatrixForm, twice: bool) -> Size:
    """Registers of the sums of four warps, and of those that are added to them: of all columns, or, where bytes begin
    anew with every part, of some at a time."""
    own = columns_at_a_time(width) if form.operand.bytes == 1 else width
    return width // 2 + (own // 2 if twice else 0)


def columns_at_a_time(columns: Size) -> Size:
    """Columns of a part's own sums, where each part has some: a half of many."""
    return columns // (1 + (columns > _MOST_COLUMNS))


def _kept(height: Size, width: Size, twice: bool) -> Size:
    """Registers of a warp's sums, and of fragments of both operands, twice."""
    return height * width // WARP * (2 if twice else 1) + (height + width) // 2


class _Tried:
    """The ways to run a product, and what they cost; every number has an entry for each."""

    def __init__(
        self, target: Target, form: MatrixForm, product: BlockedProduct, shapes: Numbers, stages: int = 0
    ) -> None:
        """Of so many stages, or as many as are best."""
        self.target, self.form, self.product, self.shapes, self.given = target, form, product, shapes, stages
        self.rows, self.columns, self.height, self.width, self.step, self.groups = shapes.T
        self.down, self.across = self.rows // self.height, self.columns // self.width
        self.warps = self.down * self.across * self.groups
        self.parts = -(-product.length // self.step)
        self.padded = [~_is_swizzled(n, self.step, form) for n in (self.rows, self.columns)]
        self._set_out()
        self.tensor, self.shared, self.beyond = self._units()

    def _set_out(self) -> None:
        """What the instruction decides: how often operands are read, cycles of a part at the least, parts that are not
        copied ahead, instructions on fragments in a step and registers."""
        self.read_rows, self.read_columns = self.across, self.down
        self.least, self.behind, self.most = prices.MATRIX_SYNC, 1, _MOST_STAGES
        self.overlap, self.part, self.long_turn = prices.MATRIX_OVERLAP, prices.MATRIX_PART, prices.MATRIX_LONG_TURN
        kept = _kept(self.height, self.width, self.product.anew > 0) + prices.REGISTERS_TAKEN
        self.registers = np.minimum(self.target.vector_registers, kept)

    def made(self, number: int) -> Fragments:
        rows, columns, warp_rows, warp_columns, step, groups = (int(n) for n in self.shapes[number])
        stages, stored = int(self.stages[number]), self.product.stored
        return Fragments(rows, columns, warp_rows, warp_columns, step, stages, stored, groups, self.form.name)

    def _units(self) -> tuple[Numbers, Numbers, Numbers]:
        """Cycles of a multiprocessor's tensor cores, shared memory and L2 cache for a part of the sum of one block."""
        target, width = self.target, self.form.operand.bytes
        rate = target.rate(self.form.name)
        assert rate is not None
        tensor = self.rows * self.columns * self.step / (rate / target.clock)
        slower = [np.where(padded, prices.PADDED_SLOWER, 1.0) for padded in self.padded]
        less = [self._share(way) for way in self.product.ways]
        through = self.rows * (self.read_rows + 1) * slower[0] * less[0] + (
            self.columns * (self.read_columns + 1) * slower[1] * less[1])  # fmt: skip
        near = target.local.bandwidth / target.clock
        # lines that a run begins or ends inside are fetched by both neighbours
        moved: Size = 0.0
        for size, along_sum, share in zip((self.rows, self.columns), self.product.runs, less, strict=True):
            run = size * width
            whole = (run % BANK_ROW_BYTES == 0) | (BANK_ROW_BYTES % run == 0)
            moved = moved + size * share * (1.0 if along_sum else np.where(whole, 1.0, prices.CUT_LINES))
        active = max(1, min(self.product.blocks, target.units))
        beyond = prices.MET_LINES * target.beyond_local.bandwidth / target.clock * target.units / active
        return tensor, width * self.step * through / near, width * self.step * moved / beyond

    def _share(self, way: int) -> Size:
        """Of the bytes of 16-bit elements, what codes of them take with their numbers, and what pads their lines."""
        bits = next((b for b, packed in UNPACKED.items() if packed == way), 0)
        if not bits:
            return 1.0
        fetched, lines = FETCHED * bits // 8, self.step // FETCHED
        moved = (lines + (lines % 2 == 0)) * fetched + self.step * prices.SCALE_BYTES
        return moved / (self.step * self.form.operand.bytes)

    def _together(self, idle: Size) -> Numbers:
        """Of all units at work, the tensor cores so many times slower."""
        units = (self.tensor * idle, self.shared, self.beyond)
        total: Numbers = sum((unit**self.overlap for unit in units), np.zeros(len(self.shapes)))
        return total ** (1 / self.overlap)

    def _staged(self, room: int, reach: float, part: Numbers) -> tuple[Numbers, Numbers]:
        """As many stages as cover the latency, where there is room for them: blocks alone have the room. And shared
        memory of the operands and, one after the other, of the sums on their way out."""
        each = sum(stage_bytes(size, self.step, self.form, padded) * self._share(way)
                   for size, padded, way in zip((self.rows, self.columns), self.padded, self.product.ways,
                                                strict=True)).astype(np.int64)  # fmt: skip
        covering = self.behind + np.ceil(reach / np.maximum(self.least, part)).astype(np.int64)
        crowded = self.product.blocks > self.target.units
        later = self.behind - 1
        wished = np.maximum(_WISHED_STAGES + later, covering) if crowded else np.full_like(covering, self.most)
        # no place of the ring is used twice where there is one for every part
        wanted = np.minimum(np.minimum(wished, self.most), self.parts)
        stages = np.full_like(wanted, self.given) if self.given else np.minimum(wanted, room // each)
        sums = self.groups * self.rows * (self.columns + SUMS_PAD) * 4 if self.product.stored > 1 else 0
        ring = np.maximum(stages * each, sums)
        fits = (stages >= np.minimum(wanted, _LEAST_STAGES + later)) & (ring <= room)
        return np.where(fits, np.maximum(stages, 1), 0), ring

    def costs(self, room: int) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        """Shared memory, cycles busy and alone, and blocks that share a multiprocessor; infinite where none fits."""
        target, product = self.target, self.product
        part = self._together(1.0)
        reach = prices.MATRIX_LOADED * (target.main if product.far else target.beyond_local).latency * target.clock
        self.stages, ring = self._staged(room, reach, part)
        lanes = target.fma_rate / target.clock
        # elements that are not just copied: threads compute where they lie and what they are, and wait for them
        pairs = list(zip((self.rows, self.columns), product.ways, strict=True))
        slots = self.step * sum(n * prices.WAY_SLOTS[way] for n, way in pairs)
        each = self.step * sum(n * prices.WAY_CYCLES[way] for n, way in pairs)
        # a multiprocessor's schedulers each feed their part of its tensor cores, and the busiest is the last
        each_feeds = target.schedulers
        own = np.maximum(self._together(-(-self.warps // each_feeds) * each_feeds / self.warps), self.least)
        ahead = np.where(self.stages >= self.parts, self.parts, np.maximum(1, self.stages - self.behind))
        # one element after the other: no part of the sum is so short that this could be hidden behind others
        single = self.step * sum(n * prices.WAY_CYCLES[way] for n, way in pairs if way == BY_ELEMENT)
        own = np.maximum(own, single / (WARP * self.warps))
        if product.steps:  # unpacking is one more unit; one warp a scheduler waits for itself
            unpacked = slots / lanes * np.maximum(1.0, 2 * each_feeds / self.warps)
            own = (own**self.overlap + unpacked**self.overlap) ** (1 / self.overlap)
        walked = np.where(self.parts > ahead, np.maximum(own, reach / ahead + each / (WARP * self.warps)), own)
        walked = walked * np.where(ahead < np.minimum(_WISHED_STAGES - 1, self.parts), prices.FEW_STAGES, 1.0)
        fragments = self.height // 16 * (self.width // 8) + (self.height + self.width) // 16
        steps = self.step // (self.form.depth * self.groups) * np.minimum(self.stages, self.parts)
        walked = walked * np.sqrt(np.maximum(1.0, steps * fragments / self.long_turn))
        walked = self.part + walked * np.where(self.warps % each_feeds == 0, 1.0, prices.ODD_WARPS)
        out = self.rows * self.columns
        # nothing is multiplied while a block's sums are added to others
        added = out / lanes * self.step / product.anew if product.anew else 0.0
        walked, part = walked + added, part + added
        slots_of_warp = out / (WARP * self.warps) * (prices.STORED_SLOTS + product.work)
        through = 0.0
        if product.stored > 1:
            through = prices.THROUGH_SHARED * out * self.groups * 4 / (target.local.bandwidth / target.clock)
        # other blocks of the multiprocessor issue while this one waits
        stored, stored_alone = (slots_of_warp * np.maximum(between, self.warps / each_feeds) + through
                                for between in (1.0, prices.MATRIX_ALONE))  # fmt: skip
        threads = WARP * self.warps
        resident = np.minimum(
            target.local.capacity // np.maximum(ring, 1), target.register_file // (self.registers * threads)
        )
        resident = np.maximum(1, np.minimum(resident, target.resident_threads // threads))
        turns = product.others * -(-product.rows // self.rows) * -(-product.columns // self.columns)
        busy = turns * (self.parts * (part + slots / lanes) + stored)
        alone = prices.MATRIX_FIRST * target.main.latency * target.clock + turns * (self.parts * walked + stored_alone)
        return ring, busy, np.where(self.stages > 0, alone, np.inf), resident


class _TriedInGroups(_Tried):
    """The same where four warps multiply as one, from shared memory: each reads its rows once, and all columns."""

    def _set_out(self) -> None:
        self.read_rows, self.read_columns = np.ones_like(self.rows), self.rows // 64
        self.least, self.behind, self.most, self.long_turn = prices.MATRIX_SYNC, 2, _MOST_STAGES + 2, np.inf
        self.overlap, self.part = prices.OVERLAP_IN_GROUPS, prices.PART_IN_GROUPS
        sums = _kept_by_group(self.width, self.form, self.product.anew > 0)
        self.registers = np.minimum(self.target.vector_registers, sums + prices.REGISTERS_IN_GROUPS)


def layout_for(size: int, step: int, form: MatrixForm) -> str:
    """Packets of a line are exchanged where that leaves none out, whichever way lines run; 32-bit elements that lie
    along a line of their own are read one by one."""
    return SWIZZLED if _is_swizzled(size, step, form) else PADDED


def ring_bytes(size: int, step: int, stages: int, form: MatrixForm) -> int:
    """Shared memory of an operand in so many stages."""
    return int(stages * stage_bytes(size, step, form, not _is_swizzled(size, step, form)))


def stage_bytes(size: Size, step: Size, form: MatrixForm, padded: Size) -> Size:
    """Of one stage, whichever way its lines run."""
    return step * size * form.operand.bytes + np.where(padded, np.maximum(size, 2 * step) * ROW_BYTES, 0)


def _is_swizzled(size: Size, step: Size, form: MatrixForm) -> Size:
    # read from shared memory as the hardware exchanges them, or one by one
    if form.warps > 1 or form.operand.bits == 32:
        return np.full(np.shape(size), form.warps > 1)
    lines = (size // form.packet, step // form.packet)
    exchanged = [(n == 1) | (n == 2) | (n == 4) | (n % 8 == 0) for n in lines]
    return exchanged[0] & exchanged[1]


def seconds(busy: Size, alone: Size, resident: Size, blocks: Size, target: Target) -> Size:
    """Of a kernel of so many blocks, the launch included; numbers, or arrays with an entry a candidate."""
    alive = -(-blocks // target.units)
    turns = -(-alive // resident)
    cycles = np.maximum((alive - 1) * busy + alone, turns * alone)
    return cycles / target.clock + target.kernel_cost
