"""A model that runs in parts: native code up to a value that decides shapes, or to a node outside of native code, then
what follows for what was found. Parts are compiled when a call first comes to them, and kept."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tilewright.arguments import Array, as_array, bind
from tilewright.errors import CutError, InputError, OptionError, OutsideError, RegionError, UndecidedError
from tilewright.ir import dtypes
from tilewright.ir.graph import ASKED, Graph, Node, Part, Value, item_name
from tilewright.profiles import KernelTime, Profile

if TYPE_CHECKING:
    from tilewright.compiler import Artifact
    from tilewright.ir.loops import Call

_LOG = logging.getLogger("tilewright")
_MOST_STEPS = 1 << 24  # of a loop that the data may end
_QUIET = 16  # so many parts are to be expected; every later one is worth a warning
_LOOP = "Loop"

Scope = dict[str, Any]  # an array, a list of arrays, None or strings by its name in the graph


class Compiled(Protocol):
    """What is used here of a `tilewright.Model`."""

    @property
    def outputs(self) -> Sequence[Any]: ...
    @property
    def calls(self) -> tuple[Call, ...]: ...
    @property
    def artifact(self) -> Artifact: ...
    def __call__(self, /, *args: Any, **named: Any) -> list[Array]: ...
    def profile(self, /, *args: Any, repeat: int = 20, **named: Any) -> Profile: ...
    def explain(self) -> str: ...


@dataclass(frozen=True)
class Border:
    """An input or output as the model declares it: strings have no element type here, an open dimension is its name or
    None, and a shape may be unknown."""

    name: str
    dtype: np.dtype[Any] | None = None
    shape: tuple[int | str | None, ...] | None = None
    is_sequence: bool = False
    is_optional: bool = False
    is_checked: bool = True  # the tensors inside are of this type and shape

    def __str__(self) -> str:
        inside = "..." if self.shape is None else ", ".join("?" if n is None else str(n) for n in self.shape)
        text = f"{'strings' if self.dtype is None else self.dtype.name}[{inside}]" if self.is_checked else "?"
        text = f"sequence({text})" if self.is_sequence else text
        return f"{self.name}: {f'optional({text})' if self.is_optional else text}"


@dataclass(frozen=True)
class Tools:
    """How the model's parts are compiled, and nodes run outside; how many of each part are kept."""

    compile: Callable[[Graph], Compiled]
    evaluate: Callable[[Node, Sequence[Any]], list[Any]] | None  # None: nodes outside are refused
    keep: int


@dataclass(frozen=True, eq=False)
class _Stage:
    """A compiled part for the nodes from `start` on, and what comes after it, by what was found."""

    start: int
    model: Compiled | None  # None where there is nothing to run
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    fixed: Mapping[str, Array]  # constants that the part before, or a call, gave
    told: Mapping[str, Any] = field(default_factory=dict)  # values known while compiling
    cut: CutError | None = None
    place: int = 0  # of the node behind the part
    decided: Mapping[int, Array] = field(default_factory=dict)
    body: StagedModel | None = None
    following: OrderedDict[Any, _Stage] = field(default_factory=OrderedDict)


class StagedModel:
    """A model that runs in several parts, because values decide shapes on the way, a loop ends by its data, or a node
    runs outside of native code. It is called like a `Model`; sequences are lists, optional values may be None.

    Calls from several threads at once are safe.
    """

    def __init__(
        self, name: str, graph: Graph, inputs: Sequence[Border], outputs: Sequence[Border], tools: Tools
    ) -> None:
        self._name = name
        self._graph = graph
        self._inputs = tuple(inputs)
        self._outputs = tuple(outputs)
        self._names = tuple(port.name for port in inputs)
        self._tools = tools
        self._first: OrderedDict[Any, _Stage] = OrderedDict()
        self._last: tuple[_Stage, ...] = ()
        self._warned: set[str] = set()
        self._compiled = 0
        self._process = os.getpid()
        self._lock = Lock()

    @property
    def inputs(self) -> tuple[Border, ...]:
        return self._inputs

    @property
    def outputs(self) -> tuple[Border, ...]:
        return self._outputs

    @property
    def can_run(self) -> bool:
        return True

    @property
    def compilations(self) -> int:
        """How many parts were compiled, or looked up in the cache on disk."""
        return self._compiled

    @property
    def calls(self) -> tuple[Call, ...]:
        """Kernel calls of the parts of the last run; a loop's body counts once."""
        return tuple(call for model in self._models() for call in model.calls)

    @property
    def artifact(self) -> Artifact:
        """What the compiler made of the last part that ran."""
        models = list(self._models())
        if not models:
            raise OptionError("the model compiles part by part when it is called: call it first")
        return models[-1].artifact

    def __call__(self, /, *args: Any, **named: Any) -> list[Any]:
        """Run the model on values given in order, by name, or as one dict; the outputs come in order."""
        return self._run(bind(self._names, args, named), None)

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Run the model on values by name; the outputs come by name too."""
        results = self._run(bind(self._names, (inputs,), {}), None)
        return dict(zip((port.name for port in self._outputs), results, strict=True))

    def run_into(self, inputs: Sequence[Any], outputs: Sequence[Any], *, stream: Any = None) -> None:
        """Run the model on values in order and fill arrays of the caller."""
        results = self._run(bind(self._names, inputs, {}), None)
        if len(outputs) != len(results):
            raise InputError(f"the model gives {len(results)} outputs, but {len(outputs)} arrays were given")
        for port, result, into in zip(self._outputs, results, outputs, strict=True):
            if not isinstance(result, np.ndarray) or into.shape != result.shape or into.dtype != result.dtype:
                raise InputError(f"output {port.name!r} does not fit the array that was given for it")
            into[...] = result

    def profile(self, /, *args: Any, repeat: int = 20, **named: Any) -> Profile:
        """Time each kernel call of each part: the median over `repeat` runs. Nodes outside are not in it."""
        ran: list[tuple[Compiled, list[Any]]] = []
        self._run(bind(self._names, args, named), ran)
        times: list[KernelTime] = []
        for model, values in ran:
            found = model.profile(*values, repeat=repeat).calls
            times += [KernelTime(len(times) + k, call.kernel, call.nanoseconds) for k, call in enumerate(found)]
        return Profile(tuple(times), repeat)

    def random_inputs(self, seed: int = 0) -> dict[str, Array]:
        """There are none: shapes depend on the values."""
        raise InputError("the values of its inputs decide what this model computes: give the inputs")

    def explain(self) -> str:
        """The parts of the last run, what lies between them, and what became of each."""
        lines = [f"{self._name}: runs in parts; {self._compiled} compiled so far, {len(self._last)} in the last run"]
        parts = []
        for number, stage in enumerate(self._last, 1):
            lines.append(f"  part {number}: {_summary(stage)}")
            if stage.model is not None:
                parts += ["", f"part {number}", stage.model.explain()]
            if stage.body is not None:
                parts += ["", f"body of the loop after part {number}", stage.body.explain()]
        return "\n".join([*lines, *parts])

    def save(self, folder: str | os.PathLike[str]) -> None:
        raise OptionError("a directory holds the code for one set of shapes, and this model runs in parts")

    def __repr__(self) -> str:
        takes, gives = (", ".join(map(str, ports)) for ports in (self._inputs, self._outputs))
        return f"<tilewright.StagedModel ({takes}) -> ({gives})>"

    def _models(self) -> Iterator[Compiled]:
        for stage in self._last:
            if stage.model is not None:
                yield stage.model
            if stage.body is not None:
                yield from stage.body._models()

    # running

    def _run(self, values: Sequence[Any], ran: list[tuple[Compiled, list[Any]]] | None) -> list[Any]:
        scope: Scope = _checked(self._inputs, values)
        stages: list[_Stage] = []
        stage = self._found(self._first, tuple(map(_form, scope.values())), lambda: self._built(0, scope, {}, {}))
        while True:
            stages.append(stage)
            if stage.model is not None:
                given = [_item(scope, name) for name in stage.takes]
                if ran is not None:
                    ran.append((stage.model, given))
                _collect(scope, stage, stage.model(*given))
            scope.update(stage.told)
            if stage.cut is None:
                break
            stage = self._next(stage, scope, ran)
        self._last = tuple(stages)
        absent = {port.name for port in self._outputs if port.is_optional}
        return [scope.get(n, None if n in absent else []) for n in self._graph.outputs]

    def _next(self, stage: _Stage, scope: Scope, ran: list[tuple[Compiled, list[Any]]] | None) -> _Stage:
        """The part behind this one, for what was found in it."""
        cut, node = stage.cut, self._graph.nodes[stage.place]
        if stage.body is not None:
            results = self._looped(node, stage.body, scope, ran)
        elif isinstance(cut, OutsideError):
            results = self._outside(node, scope)
        elif isinstance(cut, UndecidedError) and cut.itself:
            known = {**stage.fixed, cut.itself: scope[cut.itself]}
            return self._found(stage.following, scope[cut.itself].tobytes(),
                               lambda: self._built(stage.place, scope, known, stage.decided))  # fmt: skip
        else:
            assert isinstance(cut, UndecidedError)
            answer = scope.pop(ASKED)
            decided = {**stage.decided, cut.number: answer}
            return self._found(stage.following, answer.tobytes(),
                               lambda: self._built(stage.place, scope, stage.fixed, decided))  # fmt: skip
        made = {name: value for name, value in zip(node.outputs, results, strict=False) if name}
        scope.update(made)
        return self._found(stage.following, tuple(map(_form, made.values())),
                           lambda: self._built(stage.place + 1, scope, stage.fixed, {}))  # fmt: skip

    def _outside(self, node: Node, scope: Scope) -> list[Any]:
        assert self._tools.evaluate is not None
        if node.op not in self._warned:
            self._warned.add(node.op)
            _LOG.warning("%s", _printable(f"{self._name}: {node.describe()} runs outside of native code, by ONNX's "
                                          "reference evaluator"))  # fmt: skip
        return self._tools.evaluate(node, [self._value(scope, name) if name else None for name in node.inputs])

    def _looped(self, node: Node, body: StagedModel, scope: Scope, ran: Any) -> list[Any]:
        """A Loop, its body run step by step while its condition holds."""
        limit, condition, *carried = [self._value(scope, name) if name else None for name in (*node.inputs, "", "")]
        carried = carried[: len(node.inputs) - 2]
        steps = _MOST_STEPS if limit is None else int(np.asarray(limit).reshape(-1)[0])
        goes_on = np.asarray(True if condition is None else bool(np.asarray(condition).all()))
        captured = [self._value(scope, port.name) for port in body.inputs[2 + len(carried) :]]
        kept: list[list[Any]] = [[] for _ in body.outputs[1 + len(carried) :]]
        step = 0
        while step < steps and goes_on.all():
            results = body._run([np.asarray(step, np.int64), goes_on, *carried, *captured], ran)
            goes_on, carried = np.asarray(results[0]), results[1 : 1 + len(carried)]
            for rows, row in zip(kept, results[1 + len(carried) :], strict=True):
                rows.append(row)
            step += 1
        if limit is None and step == _MOST_STEPS:
            raise InputError(f"{node.describe()} took {_MOST_STEPS} steps and would go on; give it a trip count")
        if kept and (not step or any(len({np.shape(row) for row in rows}) > 1 for rows in kept)):
            raise InputError(f"{node.describe()}: {step} steps with outputs of unlike shapes cannot be stacked")
        return [*carried, *(np.stack(rows) for rows in kept)]

    def _value(self, scope: Scope, name: str) -> Any:
        return scope[name] if name in scope else self._graph.constants[name]

    # compiling

    def _found(self, kept: OrderedDict[Any, _Stage], key: Any, build: Callable[[], _Stage]) -> _Stage:
        if os.getpid() != self._process:  # a child process must not wait for a thread that it has no copy of
            self._process, self._lock = os.getpid(), Lock()
        with self._lock:
            stage = kept.get(key)
            if stage is None:
                stage = kept[key] = build()
                if len(kept) > self._tools.keep:
                    kept.popitem(last=False)
            else:
                kept.move_to_end(key)
            return stage

    def _built(self, start: int, scope: Scope, fixed: Mapping[str, Array], decided: Mapping[int, Array]) -> _Stage:
        """The part from a node on: to the end where it compiles whole, otherwise to where it has to be cut."""
        nodes = self._graph.nodes
        wanted = tuple(name for name in self._graph.outputs if name not in scope)
        try:
            return self._compiled_stage(start, len(nodes), scope, fixed, decided, dict.fromkeys(wanted), None)
        except CutError as cut:
            loops = isinstance(cut.node, Node) and cut.node.op == _LOOP and not cut.node.domain
            if isinstance(cut, OutsideError) and self._tools.evaluate is None:
                raise
            if not loops and (isinstance(cut, RegionError) or getattr(cut, "tensor", self) is None):
                raise
            place = next(k for k, node in enumerate(nodes) if node is cut.node)
            alive = [name for name in self._alive(place) if name not in scope and name not in fixed]
            known = {n: cut.scope[n] for n in alive if n in cut.scope}
            told: dict[str, Any] = {n: v for n, v in known.items() if v is None or isinstance(v, np.ndarray)}
            told |= {n: [] for n, v in known.items() if n not in told and v == 0}  # sequences of nothing
            found = dict.fromkeys(name for name in alive if name not in told)
            return self._compiled_stage(start, place, scope, fixed, decided, found, cut, told)

    def _compiled_stage(
        self, start: int, place: int, scope: Scope, fixed: Mapping[str, Array], decided: Mapping[int, Array],
        wanted: Mapping[str, None], cut: CutError | None, told: Mapping[str, Any] | None = None,
    ) -> _Stage:  # fmt: skip
        nodes = self._graph.nodes
        known = {**fixed, **_arrays(told or {})}
        body: StagedModel | None = None
        asks = False
        if isinstance(cut, UndecidedError | RegionError) and nodes[place].op == _LOOP and not nodes[place].domain:
            body = self._body(nodes[place], {**scope, **wanted}, known)
        elif isinstance(cut, UndecidedError):
            asks = not cut.itself
        model: Compiled | None = None
        takes: tuple[str, ...] = ()
        gives: tuple[str, ...] = ()
        if wanted or asks:
            inner = self._part(start, place + asks, scope, fixed, decided, tuple(wanted), asks)
            model = self._tools.compile(inner)
            self._tell(inner)
            takes, gives = tuple(v.name for v in inner.inputs), tuple(port.name for port in model.outputs)
        kept = decided if place == start and cut is not None else {}
        return _Stage(start, model, takes, gives, known, told or {}, cut, place, kept, body)

    def _tell(self, part: Graph) -> None:
        self._compiled += 1
        sizes = ", ".join(f"{v.name} {'x'.join(map(str, v.shape)) or 'scalar'}" for v in part.inputs)
        level = logging.WARNING if self._compiled > _QUIET else logging.INFO
        text = f"compiled a part of {self._name} for {sizes or 'no inputs'}, number {self._compiled}"
        _LOG.log(level, "%s", _printable(text))

    def _part(
        self, start: int, end: int, scope: Scope, fixed: Mapping[str, Array], decided: Mapping[int, Array],
        outputs: tuple[str, ...], asks: bool,
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
                inputs += [_as_value(item_name(name, k), item) for k, item in enumerate(value)]
            elif value.dtype.kind in "OUS":
                outside.add(name)
            else:
                inputs.append(_as_value(name, value))
        part = Part(sequences, frozenset(absent), frozenset(outside), decided, asks)
        values = {n: v for n, v in self._graph.values.items() if n in outputs}
        return Graph(self._graph.name, tuple(inputs), outputs, nodes, constants, values, part)

    def _body(self, node: Node, scope: Scope, fixed: Mapping[str, Array]) -> StagedModel:
        """The body of a loop as a model of its own; what it reads of the graph around it are inputs behind its own."""
        body: Graph = node.attributes["body"]
        own = {value.name for value in body.inputs} | body.constants.keys()
        outer = (_read(body.nodes) | set(body.outputs)) - own
        constants = {n: a for n, a in (*self._graph.constants.items(), *fixed.items()) if n in outer}
        captured = [n for n in scope if n in outer and n not in constants]
        inputs = [Border(n, is_checked=False) for n in (*(v.name for v in body.inputs), *captured)]
        graph = Graph(body.name, (), body.outputs, body.nodes, {**constants, **body.constants})
        outputs = [Border(name, is_checked=False) for name in body.outputs]
        return StagedModel(f"{self._name}, {node.describe()}", graph, inputs, outputs, self._tools)

    def _alive(self, place: int) -> list[str]:
        """Values made before a node that it, a later one or the caller needs."""
        wanted = _read(self._graph.nodes[place:]) | set(self._graph.outputs)
        return [name for node in self._graph.nodes[:place] for name in node.outputs if name and name in wanted]


def _read(nodes: Sequence[Node]) -> set[str]:
    """Names that nodes, and the bodies inside them, read."""
    found: set[str] = set()
    for node in nodes:
        found.update(name for name in node.inputs if name)
        for value in node.attributes.values():
            if isinstance(value, Graph):
                found |= _read(value.nodes) | set(value.outputs)
    return found


def _arrays(told: Mapping[str, Any]) -> dict[str, Array]:
    return {name: value for name, value in told.items() if isinstance(value, np.ndarray)}


def _as_value(name: str, array: Array) -> Value:
    dtype = dtypes.by_numpy(array.dtype)
    if dtype is None:
        raise InputError(f"{name!r} has element type {array.dtype.name}, which is not supported")
    return Value(name, dtype, tuple(map(int, array.shape)))


def _form(value: Any) -> Any:
    """What a part is compiled for."""
    if value is None:
        return None
    if isinstance(value, list):
        return tuple(map(_form, value))
    return value.dtype.name, value.shape


def _item(scope: Scope, name: str) -> Array:
    sequence, mark, place = name.partition("\0")
    found: Array = scope[sequence][int(place)] if mark else scope[name]
    return found


def _collect(scope: Scope, stage: _Stage, results: Sequence[Array]) -> None:
    """A part's outputs under the names of the graph, the tensors of a sequence as a list."""
    for name, result in zip(stage.gives, results, strict=True):
        sequence, mark, _ = name.partition("\0")
        if not mark or name == ASKED:
            scope[name] = result
        else:
            scope.setdefault(sequence, []).append(result)


def _checked(ports: Sequence[Border], values: Sequence[Any]) -> Scope:
    """The values by name, as arrays and lists of them, which fit what the model declares."""
    sizes: dict[str, tuple[int, str]] = {}
    scope: Scope = {}
    for port, value in zip(ports, values, strict=True):
        if value is None and (port.is_optional or not port.is_checked):
            scope[port.name] = None
        elif isinstance(value, list | tuple) and (port.is_sequence or not port.is_checked):
            scope[port.name] = [_checked_array(port, item, {}) for item in value]
        elif port.is_sequence:
            raise InputError(f"input {port.name!r} must be a list of arrays, not a {type(value).__name__}")
        else:
            scope[port.name] = _checked_array(port, value, sizes)
    return scope


def _checked_array(port: Border, value: Any, sizes: dict[str, tuple[int, str]]) -> Array:
    array = np.asarray(value) if port.dtype is None and isinstance(value, str | list) else as_array(value, port.name)
    if not port.is_checked:
        return array
    if port.dtype is None:
        if array.dtype.kind not in "OUS":
            raise InputError(f"input {port.name!r} must hold strings, not {array.dtype.name}")
    elif array.dtype.newbyteorder("=") != port.dtype:
        raise InputError(f"input {port.name!r} must be {port.dtype.name}, not {array.dtype.name}")
    if port.shape is None:
        return array
    fits = len(array.shape) == len(port.shape)
    if not fits or any(isinstance(n, int) and n != m for n, m in zip(port.shape, array.shape, strict=True)):
        raise InputError(f"input {port.name!r} must fit {port}, and has the shape {array.shape}")
    for name, extent in zip(port.shape, array.shape, strict=True):
        if isinstance(name, str):
            size, where = sizes.setdefault(name, (extent, port.name))
            if size != extent:
                raise InputError(f"dimension {name!r} is {size} in input {where!r} and {extent} in input {port.name!r}")
    return array


def _summary(stage: _Stage) -> str:
    kernels = 0 if stage.model is None else len(stage.model.calls)
    text = f"{kernels} kernel calls"
    if stage.cut is None:
        return text
    return f"{text}; then {_printable(str(stage.cut))}"


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)
