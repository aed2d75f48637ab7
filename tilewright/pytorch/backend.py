"""A backend of torch.compile: graphs that dynamo found, made functional by AOTAutograd, compiled when first called."""

from __future__ import annotations

import logging
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import RLock
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.schemas import OutputType
from torch._functorch.aot_autograd import make_boxed_func
from torch._guards import TracingContext
from torch.fx.experimental.proxy_tensor import make_fx

from tilewright.calls.progress import log_compiled
from tilewright.errors import InternalError, UnevenError
from tilewright.frontend.pytorch.aliases import may_overlap, overlapping
from tilewright.frontend.pytorch.fx import decompositions
from tilewright.frontend.pytorch.tensors import constant_of
from tilewright.ir.forms.graph import Graph, Room
from tilewright.pytorch.calls import Build
from tilewright.pytorch.open_sizes import OpenRun, Symbols, open_run
from tilewright.pytorch.partition import Run, compile_parts, copied, plain_graph

MOST_SHAPES = 32  # models of one graph kept at once; the oldest goes first
MOST_TOLD = 3  # kinds or shapes that one line names
Guard = tuple[int, torch.Tensor, int]


def compile_for_dynamo(module: fx.GraphModule, inputs: Sequence[Any], build: Build) -> Callable[..., Any]:
    """What dynamo calls in the place of `module`."""
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        warnings.warn(
            "tilewright compiles for inference: gradients may be asked for here, so PyTorch runs this part itself; "
            "call the module under torch.no_grad()", stacklevel=2,
        )  # fmt: skip
        return module.forward
    # parameters and buffers, whose values are compiled in; dynamo marks what stays where it is
    held = {id(t): t for t in tensors if getattr(t, "_dynamo_static_input_type", None) is not None}

    made: list[Specialised] = []
    changed: set[int] = set()  # places of inputs that the graph changes

    def compiler(graph: fx.GraphModule, examples: Sequence[Any]) -> Callable[[list[Any]], Any]:
        context = TracingContext.try_get()
        metadata = context.fw_metadata if context is not None else None
        changed.update(metadata.mutated_inp_runtime_indices if metadata is not None else ())
        call = Specialised(graph, held, set(changed), build)
        if len(examples) == len(inputs) and _is_plain(metadata):
            made.append(call)
        return make_boxed_func(call)

    follow = aot_autograd(fw_compiler=compiler, inference_compiler=compiler, decompositions=decompositions())
    overlap = may_overlap(tensors)
    try:
        compiled: Callable[..., Any] = follow(module, inputs)
    except (AssertionError, RuntimeError, NotImplementedError):
        if not overlap:
            raise
        compiled = module.forward  # AOTAutograd does not know all ways to overlap
    if overlap and (changed or compiled is module.forward):
        _warn_of_overlaps()  # with them as views of one input it would not be right for others
        return module.forward
    # where inputs are only read and outputs are new, what AOTAutograd does around a call is a third of a small one
    if len(made) == 1:
        return made[0]
    return Apart(module.forward, compiled, changed) if changed else compiled


@dataclass(eq=False)
class Apart:
    """A graph that changes inputs: compiled for those that do not overlap with others, which dynamo does not look at.
    Where they do, PyTorch runs it."""

    by_pytorch: Callable[..., Any]
    compiled: Callable[..., Any]
    changed: set[int]
    is_told: bool = False

    def __call__(self, *args: Any) -> Any:
        memory = [x.untyped_storage().data_ptr() if isinstance(x, torch.Tensor) else 0 for x in args]
        own = [p for k, p in enumerate(memory) if k in self.changed and p]
        is_apart = sum(map(memory.count, own)) == len(own)
        if is_apart or not any(self.changed & set(group) for group in overlapping(args)):
            return self.compiled(*args)
        if not self.is_told:
            self.is_told = True
            _warn_of_overlaps()
        return self.by_pytorch(*args)


def _warn_of_overlaps() -> None:
    warnings.warn("tilewright: left to PyTorch: calls with inputs that overlap and are changed in place", stacklevel=3)


def _is_plain(metadata: Any) -> bool:
    """Whether a call is nothing but the functional graph: no input changes, no output is a view of another tensor."""
    if metadata is None:
        return False
    changes = metadata.mutated_inp_runtime_indices or metadata.num_intermediate_bases
    special = metadata.is_rng_op_functionalized or metadata.tokens or metadata.dynamic_outputs
    kinds = {output.output_type for output in metadata.output_info}
    return not changes and not special and kinds <= {OutputType.non_alias, OutputType.unsafe_view_alias}


@dataclass(frozen=True)
class GraphEntry:
    """The graph compiled for one set of sizes, with the tensors whose values were compiled in."""

    run: Run
    guards: tuple[Guard, ...]

    def holds(self, args: Sequence[Any]) -> bool:
        for place, tensor, version in self.guards:
            if args[place] is not tensor or tensor._version != version:
                return False
        return True


@dataclass(eq=False)
class Specialised:
    """A functional graph, compiled when it is called for the sizes that it is called with."""

    graph: fx.GraphModule
    held: Mapping[int, torch.Tensor]
    changed: set[int]  # places of what the graph itself changes: never compiled in
    build: Build
    entries: dict[Any, GraphEntry] = field(default_factory=dict)
    lock: Any = field(default_factory=RLock)
    told: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.sizes = [k for k, n in enumerate(_placeholders(self.graph)) if _is_open(n)]
        self.symbols = Symbols.of(_placeholders(self.graph)) if self.sizes else None
        self.open_runs: list[tuple[OpenRun, GraphEntry]] = []  # for all numbers in their rooms
        self.refused: set[tuple[Room, ...]] = set()  # rooms that there is no one model for

    def __call__(self, *args: Any) -> Sequence[Any]:
        key = tuple([_size(args[k]) for k in self.sizes]) if self.sizes else ()
        entry = self.entries.get(key)
        if entry is None or not entry.holds(args):
            entry = self._find(key, args)
        return entry.run(args)

    def _find(self, key: Any, args: Sequence[Any]) -> GraphEntry:
        with self.lock:
            entry = self.entries.get(key)
            if entry is not None and entry.holds(args):
                return entry
            entry = entry or self._around(args)
            if entry is not None and entry.holds(args):
                return entry
            if entry is not None:
                self._unfreeze(entry, args)
                self.open_runs.clear()
            made = self._opened(args) or self._compiled(args)
            if self.open_runs and self.open_runs[-1][1] is made:
                return made
            kept = {k: v for k, v in self.entries.items() if k != key}
            if len(kept) >= MOST_SHAPES:
                kept.pop(next(iter(kept)))
                warnings.warn(
                    f"tilewright: more than {MOST_SHAPES} sizes of one graph: the oldest is dropped", stacklevel=3
                )
            self.entries = {**kept, key: made}
            return made

    def _unfreeze(self, entry: GraphEntry, args: Sequence[Any]) -> None:
        """What has changed since it was compiled in: a buffer, which may do so at every call, becomes an input; a
        parameter is compiled in anew."""
        for place, tensor, version in entry.guards:
            is_same = args[place] is tensor and tensor._version == version
            if not is_same and not isinstance(args[place], torch.nn.Parameter):
                self.changed.add(place)
        warnings.warn("tilewright: parameters have changed since they were compiled in: compiled again", stacklevel=4)

    def _around(self, args: Sequence[Any]) -> GraphEntry | None:
        """What is compiled for all numbers around those of a call."""
        if self.symbols is None or not self.open_runs:
            return None
        numbers = self.symbols.numbers(args)
        return next((entry for run, entry in self.open_runs if run.has(numbers)), None)

    def _opened(self, args: Sequence[Any]) -> GraphEntry | None:
        """The graph for all numbers around those of a call; None where it is compiled for these alone."""
        rooms = None if self.symbols is None else self.symbols.rooms(args)
        if self.symbols is None or rooms is None or rooms in self.refused:
            return None
        constants = self._constants(args)

        def graph_at(given: Sequence[Any]) -> tuple[Graph, Sequence[int]]:
            try:
                with _fake_errors_untold():
                    traced = _with_numbers(self.graph, given)
            except (RuntimeError, ValueError, IndexError) as error:  # such as parts that make no whole any more
                raise UnevenError(f"PyTorch refuses other sizes: {error}") from error
            nodes = _placeholders(traced)
            return plain_graph(traced, {nodes[p]: constant_of(x, nodes[p].name) for p, x in constants.items()})

        start = time.perf_counter()
        run = open_run(self.symbols, rooms, args, graph_at, self.build)
        if run is None:
            self.refused.add(rooms)
            return None
        seconds = time.perf_counter() - start
        told = " and ".join(f"{room.low} to {room.high}" for room in rooms)
        log_compiled(f"compiled a graph of torch.compile for sizes {told}, in {seconds:.2f} s", seconds)
        made = GraphEntry(run, tuple((place, x, x._version) for place, x in constants.items()))
        self.open_runs.append((run, made))
        return made

    def _constants(self, args: Sequence[Any]) -> dict[int, torch.Tensor]:
        """Parameters and buffers whose values are compiled in, by place."""
        return {
            place: x for place, x in enumerate(args)
            if isinstance(x, torch.Tensor) and id(x) in self.held and place not in self.changed
            and not x.is_inference()
        }  # fmt: skip

    def _compiled(self, args: Sequence[Any]) -> GraphEntry:
        constants = self._constants(args)
        # with sizes as symbols every node is traced again with numbers
        graph = _with_numbers(self.graph, args) if self.sizes else copied(self.graph)
        nodes = _placeholders(graph)
        arrays = {nodes[place]: constant_of(x, nodes[place].name) for place, x in constants.items()}
        guards = tuple((place, x, x._version) for place, x in constants.items())
        count = sum(n.op == "call_function" for n in graph.graph.nodes)
        start = time.perf_counter()
        try:
            run = compile_parts(graph, arrays, self.build, self._tell)
        except InternalError as error:
            # a mistake of ours is no reason for the user's program to end
            line = (str(error).splitlines() or [type(error).__name__])[0]
            self._warn(f"a graph of {_operations(count)}, by a mistake of tilewright: {line}; please report it")
            return GraphEntry(lambda given: self.graph(*given), ())
        seconds = time.perf_counter() - start
        shapes = [x.shape for place, x in enumerate(args) if isinstance(x, torch.Tensor) and place not in constants]
        told = ", ".join("x".join(map(str, shape)) or "scalar" for shape in shapes[:MOST_TOLD])
        more = f" and {len(shapes) - MOST_TOLD} more" if len(shapes) > MOST_TOLD else ""
        log_compiled(f"compiled a graph of torch.compile, {_operations(count)} on {told or 'nothing'}{more}, in "
                     f"{seconds:.2f} s", seconds)  # fmt: skip
        return GraphEntry(run, guards)

    def _tell(self, missing: Mapping[str, Sequence[fx.Node]]) -> None:
        """One line: how many operations there are of what kind, and what the first row says that declined."""
        nodes = [n for found in missing.values() for n in found]
        counts = Counter(str(n.target) if n.op == "call_function" else n.op for n in nodes)
        kinds = [f"{name} ({count})" for name, count in counts.most_common(MOST_TOLD)]
        if len(counts) > MOST_TOLD:
            kinds.append(f"{len(counts) - MOST_TOLD} other kinds")
        why = next((f"; {reason}" for reason in missing if ": " in reason), "")
        self._warn(f"{_operations(counts.total())} of a graph: {', '.join(kinds)}{why}")

    def _warn(self, what: str) -> None:
        if what not in self.told:
            self.told.add(what)
            warnings.warn(f"tilewright: left to PyTorch: {what}", stacklevel=6)


def _operations(count: int) -> str:
    return f"{count} operation{'s' if count != 1 else ''}"


def _placeholders(graph: fx.GraphModule) -> list[fx.Node]:
    return [n for n in graph.graph.nodes if n.op == "placeholder"]


def _is_open(node: fx.Node) -> bool:
    """Whether a placeholder stands for different sizes."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return not all(isinstance(n, int) for n in value.shape)
    return True


def _size(value: Any) -> Any:
    return (value.shape, value.stride()) if isinstance(value, torch.Tensor) else value


@contextmanager
def _fake_errors_untold() -> Iterator[None]:
    """PyTorch logs sizes that do not fit, as errors, before it raises them."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


def _with_numbers(graph: fx.GraphModule, args: Sequence[Any]) -> fx.GraphModule:
    with torch.no_grad():
        traced: fx.GraphModule = make_fx(graph, tracing_mode="fake")(*args)
    traced.graph.eliminate_dead_code()  # results of calls that nobody reads
    return traced
