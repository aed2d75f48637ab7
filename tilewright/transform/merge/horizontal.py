"""Independent alike computes as one, where that is predicted to take no more time: projections of one input, gates,
experts, parallel branches, the groups of a convolution that were written out.

Computes are looked at in the order of their depth. A group of reductions is tried in its neighbourhood: what it reads
is made there and what reads it follows, as far as the next sums over weights, so that what merging does to their
connecting counts. Maps behind a merged group that are alike are merged along with it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush

from tilewright.ir.forms.compute import Compute, Map, Program, Reduce, Scan, expressions, reads
from tilewright.ir.forms.expr import Expr, Load, loads
from tilewright.ir.forms.tensor import Layout, Tensor
from tilewright.ir.meaning.folding import without_dead
from tilewright.transform.analysis import intensity, peak_bytes
from tilewright.transform.merge.alike import Constants, Member, MergeGroup, alternatives, member_of
from tilewright.transform.merge.concatenate import Joiner, without_seams
from tilewright.transform.merge.forms import Views, compute_form

_MOST_BEHIND = 16  # computes of a neighbourhood that read its group, directly or not, for each member
_MOST_SEEN = 64  # that depend on the group and are looked at, for each member
_MOST_BEFORE = 12  # that make what the group reads
_MOST_CONNECTED = 64  # of a neighbourhood in which ways to connect are looked for: how many there are grows faster
_MOST_TRIALS = 24  # groups that are judged; equal ones count once

_WORTH = 0.98  # of the time apart, where there are as many kernels as before: less is within the prediction's error
_ALIKE_WORTH = 1.05  # times as long, of a way that has its constants as another plan has them
_NEARLY_WORTH = 0.99  # of the time apart, for other ways to merge the same computes to be tried

Predict = Callable[[Program, bool], tuple[float, int]]
"""The time a Program is predicted to take, in seconds, and its kernels; whether these may be connected."""


def merge_alike(
    program: Program, predict: Predict | None, layouts: Callable[[Program], Mapping[Tensor, Layout]],
    packed: Mapping[str, Layout] | None = None,
) -> Program:  # fmt: skip
    """The Program with alike computes merged where `predict` says that this takes no longer; all of them without it.

    `layouts` tells how tensors of a Program will be stored, which counts where a neighbourhood ends. `packed` is how
    constants lie, by name, in a plan that shares them with this one's: of ways that take nearly as long the one with
    the same constants is taken.
    """
    judge = _Judge(program, predict, layouts, packed or {})
    joiner = Joiner(Constants(program.constants), {t.name for t in _all_tensors(program)})
    found = _Part(program.computes, frozenset(program.outputs), joiner, judge).merged()
    if found is None:
        return program
    constants = {**program.constants, **joiner.placeholders(joiner.made.values())}
    remarks = (*program.remarks, *judge.remarks)
    made = without_dead(replace(program, computes=tuple(found), constants=constants, remarks=remarks))
    return replace(made, constants={**made.constants, **joiner.arrays(made.constants)})


# --- the choice


@dataclass
class _Judge:
    """Says whether a merged neighbourhood is faster; neighbourhoods that differ in names alone are judged once."""

    program: Program
    predict: Predict | None
    layouts: Callable[[Program], Mapping[Tensor, Layout]]
    packed: Mapping[str, Layout]
    known: dict[Hashable, tuple[int | None, str]] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    _stored: Mapping[Tensor, Layout] | None = None

    def best(self, key: Hashable, apart: Program, merged: Sequence[Program]) -> int | None:
        """Which of the merged neighbourhoods to take; None for none."""
        if self.predict is None:
            return 0
        if key not in self.known:
            if len(self.known) >= _MOST_TRIALS:
                return None
            connecting = len(apart.computes) <= _MOST_CONNECTED
            before, kernels = self.predict(apart, connecting)
            found = [self.predict(merged[0], connecting)]
            # where the first way gains next to nothing, others of the same members do not gain enough
            if found[0][0] <= before * _NEARLY_WORTH or found[0][1] < kernels:
                found += [self.predict(p, connecting) for p in merged[1:]]
            fastest = min(range(len(found)), key=lambda n: (found[n][0], peak_bytes(merged[n])))
            seconds, fewer = found[fastest]
            is_worth_it = seconds <= before * (1.0 if fewer < kernels else _WORTH)
            chosen = self._alike(apart, merged[: len(found)], [before, *(s for s, _ in found)],
                                 fastest if is_worth_it else None)  # fmt: skip
            seconds = found[fastest if chosen is None else chosen][0]
            self.known[key] = (chosen, f"predicted {1e6 * seconds:.1f} us against {1e6 * before:.1f} us")
        return self.known[key][0]

    def _alike(
        self, apart: Program, merged: Sequence[Program], seconds: Sequence[float], chosen: int | None
    ) -> int | None:
        """The way that has most of its constants as another plan has them, where it takes little longer than the chosen
        one; `seconds` are of what is apart, then of the merged."""

        def own_bytes(program: Program) -> int:
            weights = {t for c in program.computes for t in reads(c) if t in program.constants and t.rank > 1}
            return sum(t.most_bytes for t in weights if t.name not in self.packed or not self.packed[t.name].fits(t))

        if not self.packed:
            return chosen
        ways: dict[int | None, Program] = {None: apart, **dict(enumerate(merged))}
        times = dict(zip(ways, seconds, strict=True))
        near = [way for way in ways if way == chosen or times[way] <= _ALIKE_WORTH * times[chosen]]
        return min(near, key=lambda way: (own_bytes(ways[way]), way != chosen, times[way]))

    def remark(self, key: Hashable, group: MergeGroup, merged: Compute) -> None:
        first = group.members[0].compute
        text = f"; {self.known[key][1]}" if key in self.known else ""
        gain = f"{intensity(merged):.2g} operations a byte instead of {intensity(first):.2g}"
        self.remarks.append(f"{merged.origin}: {len(group.members)} as one, {gain}{text}")

    def stored(self) -> Mapping[Tensor, Layout]:
        if self._stored is None:
            self._stored = self.layouts(self.program)
        return self._stored


# --- lists of computes


@dataclass
class _Trial:
    """What a merge makes of some computes: what stands in the place of each, and how tensors are then seen."""

    views: Views
    now: dict[int, tuple[Compute, ...]] = field(default_factory=dict)
    merged: set[Tensor] = field(default_factory=set)


class _Part:
    """Computes that follow each other: the Program's own, or the body of a Scan."""

    def __init__(
        self, computes: Sequence[Compute], kept: frozenset[Tensor], joiner: Joiner, judge: _Judge,
        scan: Scan | None = None,
    ) -> None:  # fmt: skip
        self.computes = list(computes)
        self.kept = kept  # tensors that must exist as they are
        self.joiner = joiner
        self.constants = joiner.constants
        self.judge = judge
        self.scan = scan
        self.scan_axes = () if scan is None else (scan.axis,)
        self.producer = {t: place for place, c in enumerate(computes) for t in c.outputs}
        self.users: dict[Tensor, list[int]] = {}
        self.views = Views()
        self.depth: list[int] = []
        for place, compute in enumerate(computes):
            before = [self.depth[self.producer[t]] for t in reads(compute) if t in self.producer]
            is_view = isinstance(compute, Map) and compute.output not in kept and self._moves_data(compute.value)
            self.depth.append(max(before, default=0) + (0 if is_view else 1))
            for tensor in reads(compute):
                self.users.setdefault(tensor, []).append(place)
            if is_view:
                assert isinstance(compute, Map)
                self.views.add(compute)
        self.now: dict[int, tuple[Compute, ...]] = {}
        self.merged_tensors: set[Tensor] = set()

    def merged(self) -> list[Compute] | None:
        """The computes with groups merged; None where there is none."""
        inside = {p: s for p, c in enumerate(self.computes) if isinstance(c, Scan) and (s := self._scan(c)) is not None}
        for _, places in sorted(_by_depth(self.depth).items()):
            sums = [p for p in places if isinstance(self.computes[p], Reduce) and p not in self.now]
            for way in self._ways(sums, self.views):
                self._try(way)
        if not self.now and not inside:
            return None
        for place, scan in inside.items():
            self.now[place] = (scan,)
        self._look_through_in_scans()
        return [c for place, own in enumerate(self.computes) for c in self.now.get(place, (own,))]

    def _scan(self, scan: Scan) -> Scan | None:
        if any(not isinstance(c, Map | Reduce) for c in scan.body):
            return None
        kept = frozenset((*scan.following, *(t for t, _ in scan.stacked)))
        found = _Part(scan.body, kept, self.joiner, self.judge, scan).merged()
        return None if found is None else replace(scan, body=tuple(found))

    def _moves_data(self, value: Expr) -> bool:
        if not isinstance(value, Load) or value.source in self.constants:
            return False
        return not any(i.reads for i in value.indices)

    def _look_through_in_scans(self) -> None:
        """The body of a Scan reads slices of what was merged, not copies of them."""
        for place, compute in enumerate(self.computes):
            (*_, last) = self.now.get(place, (compute,))
            if isinstance(last, Scan) and any(t in self.views for t in reads(last)):
                body = tuple(self._seen_in_body(c) for c in last.body)
                self.now[place] = (replace(last, body=body),)

    def _seen_in_body(self, compute: Compute) -> Compute:
        if isinstance(compute, Map):
            return replace(compute, value=self._seen_if_merged(compute.value))
        if isinstance(compute, Reduce):
            return replace(compute, elements=tuple(map(self._seen_if_merged, compute.elements)))
        return compute

    def _seen_if_merged(self, value: Expr) -> Expr:
        seen = _through(value, self.views)
        return seen if any(n.source in self.merged_tensors for n in loads(seen)) else value

    # --- groups

    def _ways(self, places: Iterable[int], views: Views) -> Iterator[list[list[MergeGroup]]]:
        """For computes that may be alike the ways to merge them."""
        alike: dict[Hashable, list[Member]] = {}
        for place in places:
            compute = self.computes[place]
            assert isinstance(compute, Map | Reduce)
            values = [_through(v, views) for v in expressions(compute)]
            found = member_of(place, compute, values, self.constants, self.scan_axes)
            if found is not None:
                alike.setdefault(found[0], []).append(found[1])
        for members in alike.values():
            if len(members) > 1 and (ways := alternatives(members, self.constants)):
                yield ways

    def _try(self, ways: list[list[MergeGroup]]) -> None:
        """Takes the way predicted to be fastest, in the neighbourhood of its groups; groups that have nothing to do
        with each other are judged one by one."""
        if len(ways) == 1:
            for group in ways[0]:
                self._try_groups([[group], *self._by_readers(group), *_apart(group)])
        else:
            self._try_groups(ways)

    def _by_readers(self, group: MergeGroup) -> list[list[MergeGroup]]:
        """The group in parts whose readers are alike: together, what only some need afterwards would not be computed
        while a result is still in registers."""
        parts: dict[Hashable, list[Member]] = {}
        for member in group.members:
            after = [self.computes[p] for p in self.users.get(member.compute.outputs[0], ())]
            kinds = sorted(str(form[0][3]) for c in after if isinstance(c, Map)  # type: ignore[index]
                           and (form := compute_form(c, (c.value,))) is not None)  # fmt: skip
            parts.setdefault(tuple(kinds), []).append(member)
        if len(parts) == 1 or group.steps:
            return []
        return [[replace(group, members=tuple(p)) for p in parts.values() if len(p) > 1]]

    def _try_groups(self, ways: Sequence[list[MergeGroup]]) -> None:
        ways = [w for w in ways if w]
        members = {m.place: m for way in ways for g in way for m in g.members}
        near = self._near(sorted(members))
        trials = [self._trial(way, near) for way in ways]
        number = {place: n for n, place in enumerate(near)}
        described = [[(g.axis, tuple(number[m.place] for m in g.members)) for g in way] for way in ways]
        key = (self._signature(near), tuple(map(tuple, described)))
        programs = [self._program(near, trial) for trial in trials]
        chosen = self.judge.best(key, self._program(near), programs)
        if chosen is None:
            return
        trial = trials[chosen]
        self.now.update(trial.now)
        self.merged_tensors |= trial.merged
        for computes in trial.now.values():
            last = computes[-1]
            if isinstance(last, Map) and last.output not in self.kept and self._moves_data(last.value):
                self.views.add(last)
        for group in ways[chosen]:
            self.judge.remark(key, group, trial.now[min(m.place for m in group.members)][0])

    def _trial(self, groups: Sequence[MergeGroup], near: Sequence[int]) -> _Trial:
        """The groups merged, then maps behind them."""
        trial = _Trial(Views(self.views))
        for group in groups:
            self._apply(group, trial)
        first = min(self.depth[m.place] for g in groups for m in g.members)
        for depth, places in sorted(_by_depth([self.depth[p] for p in near]).items()):
            own = [near[p] for p in places if near[p] not in trial.now and near[p] not in self.now]
            maps = [p for p in own if isinstance(self.computes[p], Map) and depth > first]
            # a result of the model is written by a compute of its own: a slice of something would have to be copied
            behind = [p for p in maps if self.computes[p].outputs[0] not in self.kept and self._is_behind(p, trial)]
            for ways in self._ways(behind, trial.views):
                for group in ways[0]:
                    if trial.merged.intersection(group.members[0].form.sources):
                        self._apply(group, trial)
            for place in behind:
                if place not in trial.now:
                    self._close_seams(place, trial)
        return trial

    def _is_behind(self, place: int, trial: _Trial) -> bool:
        compute = self.computes[place]
        seen = [n.source for e in expressions(compute) for n in loads(_through(e, trial.views))]
        return not trial.merged.isdisjoint(seen)

    def _apply(self, group: MergeGroup, trial: _Trial) -> None:
        compute, slices = self.joiner.join(group)
        trial.merged.update(compute.outputs)
        for member, view in zip(group.members, slices, strict=True):
            trial.now[member.place] = (view,)
            if view.output not in self.kept:
                trial.views.add(view)
        first = min(m.place for m in group.members)
        trial.now[first] = (compute, *trial.now[first])

    def _close_seams(self, place: int, trial: _Trial) -> None:
        """A concatenation of slices that lie beside each other is a read of the whole."""
        compute = self.computes[place]
        assert isinstance(compute, Map)
        seen = _through(compute.value, trial.views)
        value = without_seams(compute, seen)
        if value is not seen and isinstance(value, Load):
            made = replace(compute, value=value)
            trial.now[place] = (made,)
            if made.output not in self.kept:
                trial.views.add(made)

    # --- neighbourhoods

    def _near(self, members: Sequence[int]) -> list[int]:
        """The members with what they read from and what reads them, up to the next sums over weights; all of a Scan's
        body, the step being what is repeated."""
        if self.scan is not None:
            return list(range(len(self.computes)))
        return sorted(self._before(members, self._behind(members)))

    def _before(self, members: Sequence[int], behind: Sequence[int]) -> dict[int, None]:
        """With what makes the operands of computes; what others read too is stored in any case, and ends the way. So
        does a sum over weights, which counts where a map behind the members may ride on it."""
        found = dict.fromkeys((*members, *behind))
        waiting = [-p for p in found]
        heapify(waiting)
        limit = len(found) + _MOST_BEFORE
        riding = {p for p in behind if isinstance(self.computes[p], Map)}
        while waiting and len(found) < limit:
            place = -heappop(waiting)
            for tensor in reads(self.computes[place]):
                maker = self.producer.get(tensor, -1)
                if maker < 0 or maker in found or tensor in self.kept:
                    continue
                if any(user not in found for user in self.users[tensor]):
                    continue
                if self._sums_weights(maker):
                    if place in riding:
                        found[maker] = None
                elif isinstance(self.computes[maker], Map | Reduce):
                    found[maker] = None
                    heappush(waiting, -maker)
        return found

    def _behind(self, members: Sequence[int]) -> list[int]:
        """The members and what reads them. Something that also waits for what lies beyond is beyond itself: which sum
        it would ride on cannot be told without that."""
        inside: dict[int, None] = {}
        waiting = sorted(members)
        first = set(members)
        seen = set(members)
        while waiting and len(seen) < _MOST_SEEN * len(members) and len(inside) < _MOST_BEHIND * len(members):
            place = heappop(waiting)
            compute = self.computes[place]
            before = [p for t in reads(compute) if (p := self.producer.get(t, -1)) in seen]
            beyond = any(p not in inside or (p not in first and self._sums_weights(p)) for p in before)
            if place in first or (not beyond and isinstance(compute, Map | Reduce)):
                inside[place] = None
            for tensor in compute.outputs:
                for user in self.users.get(tensor, ()):
                    if user not in seen:
                        seen.add(user)
                        heappush(waiting, user)
        return list(inside)

    def _sums_weights(self, place: int) -> bool:
        compute = self.computes[place]
        read = loads(*expressions(compute)) if isinstance(compute, Reduce) else []
        return len(read) > 1 and any(n.source in self.constants for n in read)

    def _program(self, near: Sequence[int], trial: _Trial | None = None) -> Program:
        """A neighbourhood as a Program. What others read of a slice they read of the whole."""
        now = {} if trial is None else trial.now
        computes = tuple(c for p in near for c in now.get(p) or self.now.get(p) or (self.computes[p],))
        if self.scan is not None:
            computes = (replace(self.scan, body=computes),)
            wanted = dict.fromkeys(self.scan.outputs)
        else:
            wanted = self._wanted(near, {t: c for c in computes for t in c.outputs}, trial)
        made = {t for c in computes for t in c.outputs}
        read = dict.fromkeys(t for c in computes for t in reads(c) if t not in made)
        joined = [t for t in read if t in self.joiner.made.values()]
        # the constants of all others stay: that they are read in between decides where these come from
        replaced = self.joiner.parts(joined)
        arrays = {t: a for t, a in self.judge.program.constants.items() if t in read or t not in replaced}
        arrays |= self.joiner.placeholders(joined)
        inputs = tuple(t for t in read if t not in arrays)
        stored = self.judge.stored()
        layouts = {t: stored[t] for t in (*inputs, *wanted) if t in stored}
        program = Program(inputs, tuple(wanted), computes, arrays, layouts)
        return replace(without_dead(program), constants=arrays) if self.scan is None else program

    def _wanted(self, near: Sequence[int], made: Mapping[Tensor, Compute], trial: _Trial | None) -> dict[Tensor, None]:
        inside = set(near)
        merged = self.merged_tensors | (set() if trial is None else trial.merged)
        wanted: dict[Tensor, None] = {}
        for place in near:
            for tensor in self.computes[place].outputs:
                if tensor in self.kept:
                    wanted[tensor] = None
                elif any(user not in inside for user in self.users.get(tensor, ())):
                    wanted[_whole(tensor, made, merged)] = None
        return {t: None for t in wanted if t in made}

    def _signature(self, near: Sequence[int]) -> Hashable:
        """Equal for neighbourhoods that differ in names alone, or in which step or slice of something they read."""
        numbers: dict[Tensor, int] = {}
        parts: list[Hashable] = [self.scan_axes]
        for place in near:
            for compute in self.now.get(place, (self.computes[place],)):
                assert isinstance(compute, Map | Reduce)
                found = compute_form(compute, expressions(compute))
                if found is None:
                    return compute
                kind, form = found
                for tensor in (*form.sources, *compute.outputs):
                    if tensor not in numbers:
                        numbers[tensor] = len(numbers)
                        users = tuple(u in near for u in self.users.get(tensor, ()))
                        parts.append((tensor.shape, tensor in self.constants, tensor in self.kept, all(users)))
                parts.append((kind, tuple(numbers[t] for t in (*form.sources, *compute.outputs))))
        return tuple(parts)


def _apart(group: MergeGroup) -> list[list[MergeGroup]]:
    """The members along a new axis, where they are as wide as each other: what reads one element of each, as gates are
    read, then reads a part of every one."""
    if group.axis is None or group.steps or len({m.extents for m in group.members}) > 1:
        return []
    first = group.members[0].form.numbers
    if any(m.form.numbers != first for m in group.members):
        return []
    return [[replace(group, axis=None)]]


def _whole(tensor: Tensor, made: Mapping[Tensor, Compute], merged: set[Tensor]) -> Tensor:
    """The merged tensor that a tensor is a slice of; otherwise itself."""
    source = tensor
    while isinstance(compute := made.get(source), Map) and isinstance(compute.value, Load):
        source = compute.value.source
        if source in merged:
            return source
    return tensor


def _through(value: Expr, views: Views) -> Expr:
    """The value with all that only moves data looked through."""
    while any(n.source in views for n in loads(value)):
        (value,) = views.through((value,))
    return value


def _by_depth(depths: Sequence[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for place, depth in enumerate(depths):
        found.setdefault(depth, []).append(place)
    return found


def _all_tensors(program: Program) -> Iterator[Tensor]:
    yield from program.tensors()
    for compute in program.computes:
        if isinstance(compute, Scan):
            yield from compute.carry
            yield from (t for c in compute.body for t in c.outputs)
