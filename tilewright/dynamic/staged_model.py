"""A model that runs in parts: native code up to a value that decides shapes, or to a node outside of native code, then
what follows for what was found. Parts are compiled when a call first comes to them, and kept."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.calls.arguments import Array, bind
from tilewright.calls.profiles import Profile, joined
from tilewright.calls.progress import log_compiled
from tilewright.dynamic.borders import Border, Scope, checked
from tilewright.dynamic.model import Compiled, LateModel, fill
from tilewright.dynamic.saved_parts import save
from tilewright.dynamic.stages import (
    BODIES,
    Following,
    Forms,
    ModelStage,
    Opening,
    PartNumbers,
    Slots,
    arrays_of,
    cropped,
    is_followed,
    padded,
    rooms_of,
)
from tilewright.errors import (
    CutError,
    InputError,
    ModelError,
    OptionError,
    OutsideError,
    RegionError,
    TilewrightError,
    UndecidedError,
    printable,
)
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.graph import (
    ASKED,
    NUMBERS,
    Form,
    Graph,
    Node,
    Part,
    Room,
    Value,
    captured,
    filled,
    item_name,
    read_by,
)
from tilewright.options import Options

if TYPE_CHECKING:
    pass

_LOG = logging.getLogger("tilewright")
_MOST_STEPS = 1 << 24  # of a loop that the data may end
_QUIET = 16  # so many parts are to be expected; every later one is worth a warning


@dataclass(frozen=True)
class Tools:
    """How the model's parts are compiled, and nodes run outside."""

    compile: Callable[[Graph], Compiled]
    forms: Callable[[Graph], Mapping[str, tuple[Form, ...]]]  # by name the extents of what a part gives
    evaluate: Callable[[Node, Sequence[Any]], list[Any]] | None  # None: nodes outside are refused
    options: Options


class StagedModel(LateModel[Border]):
    """A model that runs in several parts, because values decide shapes on the way, a loop ends by its data, or a node
    runs outside of native code. It is called like a `Model`; sequences are lists, optional values may be None.

    Calls from several threads at once are safe.
    """

    def __init__(
        self, name: str, graph: Graph, inputs: Sequence[Border], outputs: Sequence[Border], tools: Tools,
        first: Following | None = None,
    ) -> None:  # fmt: skip
        """`first` has parts that are compiled already."""
        super().__init__(name, inputs, outputs)
        self._graph = graph
        self._tools = tools
        self._first = Following() if first is None else first
        self._last: tuple[ModelStage, ...] = ()
        self._warned: set[str] = set()
        self._process = os.getpid()
        self._lock = Lock()

    @property
    def graph(self) -> Graph:
        """All of its nodes, of which parts are made."""
        return self._graph

    def run_into(self, inputs: Sequence[Any], outputs: Sequence[Any], *, stream: Any = None) -> None:
        """Run the model on values in order and fill arrays of the caller."""
        fill(self._outputs, self._results(bind(self._names, inputs, {})), outputs)

    def address_caller(self) -> None:
        """There is none: shapes are known when a part has run."""

    def profile(self, /, *args: Any, repeat: int = 20, **named: Any) -> Profile:
        """Time each kernel call of each part: the median over `repeat` runs. Nodes outside are not in it."""
        ran: list[tuple[Compiled, list[Any]]] = []
        self._run(bind(self._names, args, named), ran)
        return joined([model.profile(*values, repeat=repeat) for model, values in ran], repeat)

    def random_inputs(self, seed: int = 0) -> dict[str, Array]:
        """There are none: shapes depend on the values."""
        raise InputError("the values of its inputs decide what this model computes: give the inputs")

    def explain(self) -> str:
        """The parts of the last run, what lies between them, and what became of each."""
        ran, first = self._last, self._begin() if not self._last else None
        lines = [f"{self._name}: runs in parts; {self._compiled} compiled so far, {len(ran)} in the last run"]
        parts = []
        for number, stage in enumerate(ran if first is None else (first,), 1):
            lines.append(f"  part {number}: {_summary(stage)}")
            if stage.model is not None:
                parts += ["", f"part {number}", stage.model.explain()]
            for body in stage.bodies:
                parts += ["", f"body of the loop or branch after part {number}", body.explain()]
        return "\n".join([*lines, *parts])

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the model to a directory that `tilewright.load` starts from (docs/shipping.md): the parts that calls
        came to so far, the first one in any case where its shapes are known, and the graph, of which further parts
        are compiled when a call comes to them."""
        self._begin()
        save(self, Path(folder), self._tools.options)

    @contextmanager
    def held(self) -> Iterator[Following]:
        """The parts that a model begins with, by what they are for; no other thread compiles meanwhile."""
        self._own_lock()
        with self._lock:
            yield self._first

    def _begin(self) -> ModelStage | None:
        """The first part, where all shapes are known; compiled, if it is not."""
        scope: Scope = {}
        for port in self._inputs:
            shape = [n for n in port.shape or () if isinstance(n, int)]
            is_known = port.shape is not None and len(shape) == len(port.shape)
            if port.dtype is None or port.is_sequence or port.is_optional or not is_known:
                return None
            scope[port.name] = np.broadcast_to(np.zeros((), port.dtype), shape)
        return self._behind_values(self._first, None, (), scope, dict(scope), {})[0]

    def _ran(self) -> Sequence[Compiled]:
        models = list(self._models())
        if not models:
            raise OptionError("the model compiles part by part when it is called: call it first")
        return models

    def _held(self) -> Sequence[Compiled]:
        found: list[Compiled] = []
        waiting = [self._first]
        while waiting:
            for stage in list(waiting.pop().kept.values()):
                found += [] if stage.model is None else [stage.model]
                found += stage.bodies
                waiting.append(stage.following)
        return found

    def _models(self) -> Iterator[Compiled]:
        for stage in self._last:
            if stage.model is not None:
                yield stage.model
            for body in stage.bodies:
                yield from body._models()

    # running

    def _results(self, values: list[Any]) -> list[Any]:
        return self._run(values, None)

    def _run(self, values: Sequence[Any], ran: list[tuple[Compiled, list[Any]]] | None) -> list[Any]:
        scope: Scope = checked(self._inputs, values)
        stages: list[ModelStage] = []
        seen = self._cancels
        stage, numbers = self._behind_values(self._first, None, (), scope, dict(scope), {})
        while True:
            self._checked_cancels(seen)
            stages.append(stage)
            if stage.model is not None:
                given = [_given(scope, name, shape, numbers) for name, shape in stage.takes.items()]
                if ran is not None:
                    ran.append((stage.model, given))
                _collect(scope, stage, numbers, stage.model(*given))
            scope.update({n: _filled(stage.forms, n, v, numbers) for n, v in stage.told.items()})
            if stage.cut is None:
                break
            stage, numbers = self._next(stage, numbers, scope, ran, seen)
        self._last = tuple(stages)
        absent = {port.name for port in self._outputs if port.is_optional}
        return [scope.get(n, None if n in absent else []) for n in self._graph.outputs]

    def _next(
        self, stage: ModelStage, numbers: tuple[int, ...], scope: Scope, ran: list[tuple[Compiled, list[Any]]] | None,
        seen: int,
    ) -> tuple[ModelStage, tuple[int, ...]]:  # fmt: skip
        """The part behind this one, for what was found in it, and the numbers that it leaves to the run."""
        cut, node = stage.cut, self._graph.nodes[stage.place]
        if len(stage.bodies) == 1:
            results = self._looped(node, stage.bodies[0], scope, ran, seen)
        elif stage.bodies:
            taken = stage.bodies[0 if np.asarray(self._value(scope, node.inputs[0])).all() else 1]
            results = taken._run([self._value(scope, port.name) for port in taken.inputs], ran)
        elif isinstance(cut, OutsideError):
            results = self._outside(node, scope)
        else:
            assert isinstance(cut, UndecidedError)
            return self._behind_answer(stage, cut, numbers, scope)
        made = {name: value for name, value in zip(node.outputs, results, strict=False) if name}
        scope.update(made)
        return self._behind_values(stage.following, stage, numbers, scope, made, stage.fixed)

    def _behind_answer(
        self, stage: ModelStage, cut: UndecidedError, left: tuple[int, ...], scope: Scope
    ) -> tuple[ModelStage, tuple[int, ...]]:
        """The part that begins with the node that asked, for the answer."""
        answer = scope[cut.itself] if cut.itself else scope.pop(ASKED)
        numbers = PartNumbers.of_answer(answer, cut.most).behind(left)

        def build(slots: Slots) -> ModelStage:
            forms = dict(_still_open(stage, slots))
            opening = Opening(slots, forms)
            fixed = {n: a if n in forms else _filled(stage.forms, n, a, left) for n, a in stage.fixed.items()}
            decided = {k: a if k in forms else _filled(stage.forms, k, a, left) for k, a in stage.decided.items()}
            own = tuple(opening.own(len(left), numbers))
            found = answer
            forms.pop(cut.itself, None)  # it was a value with these extents, and is a constant with elements
            if any(f.varies for f in own):
                forms[cut.itself or cut.number] = own
                found = filled(answer, own, [room.high for room in opening.rooms])
            if cut.itself:
                fixed[cut.itself] = found
            else:
                decided[cut.number] = found
            return self._built(stage.place, scope, fixed, decided, opening)

        return self._found(stage.following, stage.rooms, numbers, build)

    def _behind_values(
        self, table: Following, stage: ModelStage | None, left: tuple[int, ...], scope: Scope, made: Scope,
        fixed: Mapping[str, Array],
    ) -> tuple[ModelStage, tuple[int, ...]]:  # fmt: skip
        """The part that begins behind values that came from outside of native code, for their shapes."""
        numbers = PartNumbers.of_values(made).behind(left)
        start = 0 if stage is None else stage.place + 1

        def build(slots: Slots) -> ModelStage:
            forms = dict(_still_open(stage, slots))
            opening = Opening(slots, forms)
            known = fixed if stage is None else {
                n: a if n in forms else _filled(stage.forms, n, a, left) for n, a in fixed.items()}  # fmt: skip
            own = iter(opening.own(len(left), numbers))
            for name, array in arrays_of(made):
                extents = tuple(next(own) for _ in array.shape)
                if any(f.varies for f in extents):
                    forms[name] = extents
            return self._built(start, scope, known, {}, opening)

        return self._found(table, () if stage is None else stage.rooms, numbers, build)

    def _outside(self, node: Node, scope: Scope) -> list[Any]:
        assert self._tools.evaluate is not None
        if node.op not in self._warned:
            self._warned.add(node.op)
            _LOG.warning("%s", printable(f"{self._name}: {node.describe()} runs outside of native code, by ONNX's "
                                          "reference evaluator"))  # fmt: skip
        return self._tools.evaluate(node, [self._value(scope, name) if name else None for name in node.inputs])

    def _looped(self, node: Node, body: StagedModel, scope: Scope, ran: Any, seen: int) -> list[Any]:
        """A Loop, its body run step by step while its condition holds."""
        limit, condition, *carried = [self._value(scope, name) if name else None for name in (*node.inputs, "", "")]
        carried = carried[: len(node.inputs) - 2]
        steps = _MOST_STEPS if limit is None else int(np.asarray(limit).reshape(-1)[0])
        goes_on = np.asarray(True if condition is None else bool(np.asarray(condition).all()))
        captured = [self._value(scope, port.name) for port in body.inputs[2 + len(carried) :]]
        kept: list[list[Any]] = [[] for _ in body.outputs[1 + len(carried) :]]
        step = 0
        while step < steps and goes_on.all():
            self._checked_cancels(seen)
            results = body._run([np.asarray(step, np.int64), goes_on, *carried, *captured], ran)
            goes_on, carried = np.asarray(results[0]), results[1 : 1 + len(carried)]
            for rows, row in zip(kept, results[1 + len(carried) :], strict=True):
                rows.append(row)
            step += 1
        if limit is None and step == _MOST_STEPS:
            raise InputError(f"{node.describe()} took {_MOST_STEPS} steps and would go on; give it a trip count")
        if any(len({np.shape(row) for row in rows}) > 1 for rows in kept):
            raise InputError(f"{node.describe()}: {step} steps with outputs of unlike shapes cannot be stacked")
        if kept and not step:  # of no step the stacks are empty; one in vain tells the shape of what would be in them
            shown = body._run([np.asarray(0, np.int64), np.asarray(True), *carried, *captured], None)
            rows_of_one = map(np.asarray, shown[1 + len(carried) :])
            return [*carried, *(np.zeros((0, *row.shape), row.dtype) for row in rows_of_one)]
        return [*carried, *(np.stack(rows) for rows in kept)]

    def _value(self, scope: Scope, name: str) -> Any:
        return scope[name] if name in scope else self._graph.constants[name]

    # compiling

    def _found(
        self, table: Following, inherited: Sequence[Room], numbers: PartNumbers, build: Callable[[Slots], ModelStage]
    ) -> tuple[ModelStage, tuple[int, ...]]:
        self._own_lock()
        with self._lock:
            stage = table.find(inherited, numbers, self._tools.options.variants, build, self._tell_refused)
        return stage, stage.left(numbers.values)

    def _own_lock(self) -> None:
        """A child process must not wait for a thread that it has no copy of."""
        if os.getpid() != self._process:
            self._process, self._lock = os.getpid(), Lock()

    def _built(
        self, start: int, scope: Scope, fixed: Mapping[str, Array], decided: Mapping[int, Array], opening: Opening
    ) -> ModelStage:
        """The part from a node on: to the end where it compiles whole, otherwise to where it has to be cut."""
        nodes = self._graph.nodes
        wanted = tuple(name for name in self._graph.outputs if name not in scope)
        try:
            return self._compiled_stage(start, len(nodes), scope, fixed, decided, opening, dict.fromkeys(wanted), None)
        except CutError as cut:
            if isinstance(cut, OutsideError) and self._tools.evaluate is None:
                raise
            if not is_followed(cut) and (isinstance(cut, RegionError) or getattr(cut, "tensor", self) is None):
                raise
            place = next(k for k, node in enumerate(nodes) if node is cut.node)
            alive = [name for name in self._alive(place) if name not in scope and name not in fixed]
            known = {n: cut.scope[n] for n in alive if n in cut.scope}
            told: dict[str, Any] = {n: v for n, v in known.items() if v is None or isinstance(v, np.ndarray)}
            told |= {n: [] for n, v in known.items() if n not in told and v == 0}  # sequences of nothing
            found = dict.fromkeys(name for name in alive if name not in told)
            return self._compiled_stage(start, place, scope, fixed, decided, opening, found, cut, told)

    def _compiled_stage(
        self, start: int, place: int, scope: Scope, fixed: Mapping[str, Array], decided: Mapping[int, Array],
        opening: Opening, wanted: Mapping[str, None], cut: CutError | None, told: Mapping[str, Any] | None = None,
    ) -> ModelStage:  # fmt: skip
        nodes = self._graph.nodes
        known = {**fixed, **_arrays(told or {})}
        forms: dict[str | int, tuple[Form, ...]] = dict(opening.forms)
        forms |= {n: cut.forms[n] for n in told or () if cut is not None and n in cut.forms}
        bodies: tuple[StagedModel, ...] = ()
        asks = False
        if cut is not None and is_followed(cut):
            settled = {n: array for n, array in known.items() if n not in forms}
            around = {**scope, **wanted, **known}
            bodies = tuple(self._body(nodes[place], name, around, settled) for name in BODIES[nodes[place].op])
        elif isinstance(cut, UndecidedError):
            asks = not cut.itself
        model: Compiled | None = None
        takes: dict[str, tuple[int, ...]] = {}
        gives: tuple[str, ...] = ()
        if wanted or asks:
            inner = self._part(start, place + asks, scope, fixed, decided, opening, tuple(wanted), asks)
            if opening.rooms:
                found = self._tools.forms(inner)
                forms.update({n: f for n, f in found.items() if any(extent.varies for extent in f)})
            start_time = time.perf_counter()
            model = self._tools.compile(inner)
            self._tell(inner, time.perf_counter() - start_time)
            takes = {v.name: v.shape for v in inner.inputs}  # type: ignore[misc]
            if opening.rooms:
                takes[NUMBERS] = (len(opening.rooms),)
            gives = tuple(port.name for port in model.outputs)
        kept = decided if place == start and cut is not None else {}
        forms = {n: f for n, f in forms.items() if isinstance(n, str) or n in kept}
        return ModelStage(start, model, takes, gives, known, told or {}, cut, place, kept, bodies, opening.slots, forms)

    def _tell(self, part: Graph, seconds: float) -> None:
        self._compiled += 1
        sizes = ", ".join(f"{v.name} {'x'.join(map(str, v.shape)) or 'scalar'}" for v in part.inputs)
        room = "up to " if part.part is not None and part.part.rooms else ""
        what = f"compiled a part of {self._name} for {room}{sizes or 'no inputs'}"
        text = f"{what} in {seconds:.2f} s, number {self._compiled}"
        log_compiled(text, seconds, self._compiled <= _QUIET)

    def _tell_refused(self, slots: Slots, error: TilewrightError) -> None:
        rooms = " and ".join(f"from {room.low} to {room.high}" for room in rooms_of(slots))
        text = f"a part of {self._name} is not compiled for all numbers of elements {rooms} at once: {error}"
        _LOG.info("%s", printable(text))

    def _part(
        self, start: int, end: int, scope: Scope, fixed: Mapping[str, Array], decided: Mapping[int, Array],
        opening: Opening, outputs: tuple[str, ...], asks: bool,
    ) -> Graph:  # fmt: skip
        """The Graph of some nodes, its inputs of the types and shapes of what was found for them."""
        nodes = self._graph.nodes[start:end]
        read = _read(nodes) | set(outputs)
        constants = {n: a for n, a in (*self._graph.constants.items(), *fixed.items()) if n in read}
        outside = {n for n, a in constants.items() if a.dtype.kind == "O"}
        constants = {n: a for n, a in constants.items() if n not in outside}
        inputs: list[Value] = []
        sequences: dict[str, int] = {}
        absent = set()
        for name in (n for n in scope if n in read and n not in constants and n not in outside):
            value = scope[name]
            if value is None:
                absent.add(name)
            elif isinstance(value, list):
                sequences[name] = len(value)
                inputs += [_as_value(item_name(name, k), item, opening) for k, item in enumerate(value)]
            elif value.dtype.kind in "OUS":
                outside.add(name)
            else:
                inputs.append(_as_value(name, value, opening))
        here = {v.name for v in inputs} | constants.keys() | decided.keys()
        forms = {n: f for n, f in opening.forms.items() if n in here}
        part = Part(sequences, frozenset(absent), frozenset(outside), decided, asks, opening.rooms, forms)
        values = {n: v for n, v in self._graph.values.items() if n in outputs}
        return Graph(self._graph.name, tuple(inputs), outputs, nodes, constants, values, part)

    def _body(self, node: Node, name: str, scope: Scope, fixed: Mapping[str, Array]) -> StagedModel:
        """The body of a loop or a branch as a model of its own; what it reads of the graph around it are inputs behind
        its own."""
        body: Graph = node.attributes[name]
        outer = captured(body)
        constants = {n: a for n, a in (*self._graph.constants.items(), *fixed.items()) if n in outer}
        taken = [n for n in scope if n in outer and n not in constants]
        inputs = [Border(n, is_checked=False) for n in (*(v.name for v in body.inputs), *taken)]
        graph = Graph(body.name, (), body.outputs, body.nodes, {**constants, **body.constants})
        outputs = [Border(name, is_checked=False) for name in body.outputs]
        return StagedModel(f"{self._name}, {node.describe()}", graph, inputs, outputs, self._tools)

    def _alive(self, place: int) -> list[str]:
        """Values made before a node that it, a later one or the caller needs."""
        wanted = _read(self._graph.nodes[place:]) | set(self._graph.outputs)
        return [name for node in self._graph.nodes[:place] for name in node.outputs if name and name in wanted]


def _read(nodes: Sequence[Node]) -> set[str]:
    """Names that nodes, and the bodies inside them, read."""
    return set[str]().union(*map(read_by, nodes))


def _arrays(told: Mapping[str, Any]) -> dict[str, Array]:
    return {name: value for name, value in told.items() if isinstance(value, np.ndarray)}


def _as_value(name: str, array: Array, opening: Opening) -> Value:
    """Of an array its type, and its shape or, where the run tells that, the room for it."""
    dtype = dtypes.by_numpy(array.dtype)
    if dtype is None:
        raise InputError(f"{name!r} has element type {array.dtype.name}, which is not supported")
    forms = opening.forms.get(name)
    shape = array.shape if forms is None else (f.most(opening.rooms) for f in forms)
    return Value(name, dtype, tuple(map(int, shape)))


def _still_open(stage: ModelStage | None, slots: Slots) -> Forms:
    """What follows from the numbers of the stage before, where they are left to the run again."""
    return stage.forms if stage is not None and stage.rooms and slots[0] is not None else {}


def _filled(forms: Forms, name: str | int, value: Any, numbers: Sequence[int]) -> Any:
    return filled(value, forms[name], numbers) if name in forms else value


def _given(scope: Scope, name: str, shape: tuple[int, ...], numbers: Sequence[int]) -> Array:
    """What a part takes under a name, with as much room as it takes it with."""
    if name == NUMBERS:
        return np.array(numbers, np.int64)
    sequence, mark, place = name.partition("\0")
    found: Array = scope[sequence][int(place)] if mark else scope[name]
    if found.ndim != len(shape) or any(n > room for n, room in zip(found.shape, shape, strict=True)):
        raise ModelError(f"'{name}' is no value for the part that takes it; save the model again")
    return padded(found, shape)


def _collect(scope: Scope, stage: ModelStage, numbers: Sequence[int], results: Sequence[Array]) -> None:
    """A part's outputs under the names of the graph, the tensors of a sequence as a list."""
    for name, result in zip(stage.gives, results, strict=True):
        found = cropped(result, stage.forms.get(name), numbers)
        sequence, mark, _ = name.partition("\0")
        if not mark or name == ASKED:
            scope[name] = found
        else:
            scope.setdefault(sequence, []).append(found)


def _summary(stage: ModelStage) -> str:
    kernels = 0 if stage.model is None else len(stage.model.calls)
    text = f"{kernels} kernel calls"
    if stage.rooms:
        text += ", for " + " and ".join(f"{room.low} to {room.high}" for room in stage.rooms) + " at run time"
    if stage.cut is None:
        return text
    return f"{text}; then {stage.cut}"
