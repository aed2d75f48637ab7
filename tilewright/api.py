"""The ways in: `compile` turns a model into one that is called like a function on arrays, `load` starts a saved one."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from tilewright.calls.arguments import (
    Shapes,
    checked_path,
    checked_shapes,
    is_model_proto,
    no_model,
)
from tilewright.calls.background import Background, can_start
from tilewright.calls.progress import shown
from tilewright.dynamic.open_model import OpenModel
from tilewright.dynamic.parts import border_model, in_parts, is_settled_by_few, name_of
from tilewright.dynamic.ranged_model import RangedModel, Ways
from tilewright.dynamic.room_model import RoomModel
from tilewright.dynamic.staged_model import StagedModel
from tilewright.dynamic.variants import OpenPort
from tilewright.errors import (
    BorderError,
    CutError,
    OpenShapeError,
    OptionError,
    UndecidedError,
)
from tilewright.model import Array, Model
from tilewright.options import Options, check_whole_number, checked_duration, remark_on_threads
from tilewright.packages import stored
from tilewright.target import Target, machine

if TYPE_CHECKING:
    import onnx
    import torch

    from tilewright.compiler.pipeline import Artifact
    from tilewright.distributed.model import RankedModel
    from tilewright.dynamic.model import Packed
    from tilewright.ir.forms.graph import Form, Graph
    from tilewright.pytorch.module import CompiledModule
    from tilewright.pytorch.ranged import RangedModule

_LOG = logging.getLogger("tilewright")


@overload
def compile(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto, example_inputs: None = None, *,
    shapes: Shapes | None = ..., target: str | None = ..., threads: int | None = ..., precision: str | None = ...,
    schedule: str | None = ..., merging: str | None = ..., convolution: str | None = ..., contraction: str | None = ...,
    denormals: str | None = ..., effort: str | None = ...,
    optimize: str | Sequence[str] | None = ..., fallback: str | None = ...,
    memory: int | str | None = ..., device_memory: int | str | None = ...,
    tune: float | str | None = ..., tune_records: str | os.PathLike[str] | None = ...,
    options: Options | None = ..., mesh: None = None, micro_batches: int = ..., timeout: float = ...,
) -> Model | OpenModel | StagedModel: ...  # fmt: skip


@overload
def compile(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto, example_inputs: None = None, *, mesh: str,
    shapes: Shapes | None = ..., target: str | None = ..., threads: int | None = ..., precision: str | None = ...,
    schedule: str | None = ..., merging: str | None = ..., convolution: str | None = ..., contraction: str | None = ...,
    denormals: str | None = ..., effort: str | None = ...,
    optimize: str | Sequence[str] | None = ..., fallback: str | None = ...,
    memory: int | str | None = ..., device_memory: int | str | None = ...,
    tune: float | str | None = ..., tune_records: str | os.PathLike[str] | None = ...,
    options: Options | None = ..., micro_batches: int = ..., timeout: float = ...,
) -> RankedModel: ...  # fmt: skip


@overload
def compile(
    model: torch.nn.Module, example_inputs: Any, *,
    shapes: Shapes | None = ..., target: str | None = ..., threads: int | None = ..., precision: str | None = ...,
    schedule: str | None = ..., merging: str | None = ..., convolution: str | None = ..., contraction: str | None = ...,
    denormals: str | None = ..., effort: str | None = ...,
    optimize: str | Sequence[str] | None = ..., fallback: str | None = ...,
    memory: int | str | None = ..., device_memory: int | str | None = ...,
    tune: float | str | None = ..., tune_records: str | os.PathLike[str] | None = ...,
    options: Options | None = ...,
) -> CompiledModule: ...  # fmt: skip


@overload
def compile(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto, example_inputs: None = None, *, dynamic: Mapping[Any, Any],
    shapes: Shapes | None = ..., target: str | None = ..., threads: int | None = ..., precision: str | None = ...,
    schedule: str | None = ..., merging: str | None = ..., convolution: str | None = ..., contraction: str | None = ...,
    denormals: str | None = ..., effort: str | None = ...,
    optimize: str | Sequence[str] | None = ..., fallback: str | None = ...,
    tune: float | str | None = ..., tune_records: str | os.PathLike[str] | None = ...,
    options: Options | None = ...,
) -> RangedModel: ...  # fmt: skip


@overload
def compile(
    model: torch.nn.Module, example_inputs: Any, *, dynamic: Mapping[Any, Any],
    target: str | None = ..., threads: int | None = ..., precision: str | None = ...,
    schedule: str | None = ..., merging: str | None = ..., convolution: str | None = ..., contraction: str | None = ...,
    denormals: str | None = ..., effort: str | None = ...,
    optimize: str | Sequence[str] | None = ..., fallback: str | None = ...,
    tune: float | str | None = ..., tune_records: str | os.PathLike[str] | None = ...,
    options: Options | None = ...,
) -> RangedModule: ...  # fmt: skip


def compile(
    model: Any,
    example_inputs: Any = None,
    *,
    shapes: Shapes | None = None,
    dynamic: Mapping[Any, Any] | None = None,
    target: str | None = None,
    threads: int | None = None,
    precision: str | None = None,
    schedule: str | None = None,
    merging: str | None = None,
    convolution: str | None = None,
    contraction: str | None = None,
    denormals: str | None = None,
    effort: str | None = None,
    optimize: str | Sequence[str] | None = None,
    fallback: str | None = None,
    memory: int | str | None = None,
    device_memory: int | str | None = None,
    tune: float | str | None = None,
    tune_records: str | os.PathLike[str] | None = None,
    options: Options | None = None,
    mesh: str | None = None,
    micro_batches: int = 1,
    timeout: float = 60.0,
) -> Model | OpenModel | RangedModel | StagedModel | CompiledModule | RangedModule | RankedModel:
    """Compile an ONNX model, given as a path, as bytes or as a ModelProto, or a module of PyTorch, for a machine.

    `shapes` settles what the model leaves open: an input's name to its shape, or a dimension's name to a number; a
    shape may also say another size than the file fixes, which nodes that do not fit it refuse by name. What stays open
    is settled by the first call: the result is then an `OpenModel`, which compiles for what it is given. `dynamic`
    gives ranges to dimensions that vary, and the model is compiled for all sizes in them at once: {"batch": (1, 64)},
    or {"x": {0: (1, 64)}} for axis 0 of input x (docs/shapes.md). `tune`
    is how long ("2m") other plans are measured, the fastest of which are kept; the next compilation with the same
    `tune` takes them from the cache (docs/tuning.md). `effort="fast"` gives code in about a third of the time that may
    take half as long again to run, "adaptive" starts with it and goes over to the full code when that is ready.
    `optimize` says what plans are wanted for: "latency", "throughput", "memory", "compile", or objectives in an order
    (docs/policies.md). The other arguments are the fields of the same name of `Options`; one that is given overrules
    `options`.

    For example:

        import numpy as np
        import tilewright

        model = tilewright.compile("model.onnx", shapes={"batch": 1}, threads=4)
        (logits,) = model(np.zeros((1, 3, 224, 224), np.float32))

    A torch.nn.Module is compiled for inputs like `example_inputs`: a tensor, a tuple of what its forward takes, or a
    dict of it by name. The result is called like the module; other shapes are compiled when they come
    (docs/pytorch.md):

        fast = tilewright.compile(module.eval(), (torch.zeros(1, 3, 224, 224),))
        logits = fast(image)

    With a `mesh`, such as "tp=2" or "auto", the model is shared out to the processes that torchrun has started, of
    which this is one; its batch goes through in so many `micro_batches`, and none waits for another longer than
    `timeout` seconds (docs/devices.md).
    """
    given: dict[str, Any] = {
        "target": target,
        "threads": threads,
        "precision": precision,
        "schedule": schedule,
        "merging": merging,
        "convolution": convolution,
        "contraction": contraction,
        "denormals": denormals,
        "effort": effort,
        "optimize": optimize,
        "fallback": fallback,
        "memory": memory,
        "device_memory": device_memory,
        "tune": tune,
        "tune_records": tune_records,
    }
    if options is not None and not isinstance(options, Options):
        raise OptionError(f"options must be a tilewright.Options, not a {type(options).__name__}")
    chosen = Options.from_environment(**given) if options is None else options.override(**given)
    remark_on_threads(chosen.threads)
    fixed_shapes = checked_shapes(shapes)
    if mesh is not None and _is_torch_module(model):
        raise OptionError("a mesh is for ONNX models: export the module with torch.onnx.export")
    if _is_torch_module(model):
        if shapes:
            raise OptionError("shapes are those of the example inputs where a torch.nn.Module is compiled")
        if dynamic is not None:
            return _ranged_module(model, example_inputs, dynamic, chosen)
        from tilewright.pytorch.module import compile_module

        return compile_module(model, example_inputs, partial(compile_whole, options=chosen))
    if not isinstance(model, str | os.PathLike | bytes) and not is_model_proto(model):
        raise no_model(model)
    if example_inputs is not None:
        raise OptionError("example inputs are for modules of PyTorch; of an ONNX model, shapes= settles what is open")
    # in full: it is read again when a model with open shapes is called, wherever the process is by then
    source = checked_path(model).absolute() if isinstance(model, str | os.PathLike) else model
    if chosen.progress is not None:
        chosen.progress("reading the model")
    if dynamic is not None:
        if mesh is not None:
            raise OptionError("a mesh is for known shapes: settle them with shapes=")
        return _ranged_model(source, fixed_shapes, dynamic, chosen)
    if mesh is not None:
        check_whole_number("micro_batches", micro_batches, least=1)
        return _ranked_model(source, fixed_shapes, chosen, mesh, micro_batches, timeout)
    if micro_batches != 1:
        raise OptionError("micro_batches are for several processes: give a mesh too, or leave them out")
    looks_inside = chosen.dump or chosen.stop_after or chosen.overrides or chosen.verify
    try:
        return _model(source, fixed_shapes, chosen)
    except OpenShapeError as error:
        if looks_inside:
            raise
        return _open_model(source, fixed_shapes, chosen, error)
    except BorderError as error:
        if looks_inside:
            raise
        return border_model(source, fixed_shapes, chosen, error, partial(compile_at_call, options=chosen))
    except CutError as error:
        if looks_inside:
            raise
        if isinstance(error, UndecidedError) and is_settled_by_few(error, source, fixed_shapes):
            return _open_model(source, fixed_shapes, chosen, error)
        return in_parts(source, fixed_shapes, {}, chosen, error, partial(compile_at_call, options=chosen))


def _ranked_model(
    source: Any, shapes: Mapping[str, int | tuple[int, ...]], chosen: Options, mesh: str, parts: int, timeout: float
) -> RankedModel:
    """The model shared out to the ranks there are."""
    from tilewright.distributed.compiling import Asked, compile_ranked
    from tilewright.distributed.meshes import parse_mesh
    from tilewright.frontend.onnx.model import load

    asked = Asked(parse_mesh(mesh), parts, checked_duration("timeout", timeout))
    return compile_ranked(lambda: load(source, shapes), asked, chosen)


def _ranged_model(
    source: Any, shapes: Mapping[str, int | tuple[int, ...]], dynamic: Mapping[Any, Any], chosen: Options
) -> RangedModel:
    """The model for ranges of sizes."""
    from tilewright.dynamic.ranged_source import ranged_model

    return ranged_model(source, shapes, dynamic, _ways(chosen))


def _ranged_module(module: Any, example: Any, dynamic: Mapping[Any, Any], chosen: Options) -> RangedModule:
    """A module of PyTorch for ranges of sizes."""
    from tilewright.dynamic.ranged_model import ranged_graphs
    from tilewright.dynamic.spans import read_spans
    from tilewright.pytorch.ranged import compile_ranged

    return compile_ranged(module, example, partial(read_spans, dynamic), partial(ranged_graphs, ways=_ways(chosen)))


def _ways(chosen: Options) -> Ways:
    """How Graphs for ranges of sizes are compiled."""
    from tilewright.compiler.blocks import blocks_of
    from tilewright.ops.lower import output_forms

    find_blocks = partial(blocks_of, target=_goal(chosen))

    def compile_exact(graph: Graph, packed: Packed) -> Model:
        return compile_at_call(graph, chosen.override(packed=packed))

    def compile_rooms(graph: Graph, forms: Mapping[str, tuple[Form, ...]], packed: Packed) -> RoomModel:
        return RoomModel.of(graph, compile_exact(graph, packed), forms)

    return Ways(output_forms, compile_rooms, compile_exact, find_blocks)


def compile_graph(graph: Graph, options: Options) -> Model:
    """A Graph of any front end, compiled; found in the cache where an equal one was compiled before."""
    return _model(graph, {}, options)


def compile_at_call(graph: Graph, options: Options) -> Model:
    """The same, while a call waits for it."""
    with shown(f"{graph.name}, {len(graph.nodes)} operations", options) as told:
        return compile_graph(graph, told)


def compile_open(graph: Graph, options: Options) -> RoomModel:
    """A Graph with rooms, as a model that is called with arrays as large as they are."""
    from tilewright.ops.lower import output_forms

    return RoomModel.of(graph, compile_at_call(graph, options), output_forms(graph))


def compile_whole(graph: Graph, options: Options) -> Model | RoomModel | StagedModel:
    """The same, in parts where the data decide shapes or end loops."""
    if graph.part is not None and graph.part.rooms:
        return compile_open(graph, options)
    try:
        return compile_at_call(graph, options)
    except CutError as error:
        return in_parts(graph, {}, {}, options, error, partial(compile_at_call, options=options))


def _open_model(
    source: Any, shapes: Mapping[str, int | tuple[int, ...]], chosen: Options, reason: OpenShapeError | UndecidedError
) -> OpenModel:
    """A model that waits for its first call."""
    from tilewright.frontend.onnx.model import OpenValue, ports

    check = stored.unchanged(source, chosen)

    def build(found: Mapping[str, tuple[int, ...]], values: Mapping[str, Array]) -> Model | StagedModel:
        check()
        sizes = ", ".join(f"{name} {'x'.join(map(str, shape)) or 'scalar'}" for name, shape in found.items())
        try:
            with shown(f"{name_of(source)} for {sizes}", chosen) as told:
                return _model(source, found, told, values, slim=True)
        except CutError as error:
            if isinstance(error, UndecidedError) and is_settled_by_few(error, source, found):
                raise
            return in_parts(source, found, values, chosen, error, partial(compile_at_call, options=chosen))

    def port(value: OpenValue) -> OpenPort:
        return OpenPort(value.name, None if value.dtype is None else value.dtype.numpy, value.shape)

    inputs, outputs = (tuple(map(port, side)) for side in ports(source, shapes))
    return OpenModel(name_of(source), inputs, outputs, build, chosen.variants, reason)


def _model(
    source: Any, fixed_shapes: Mapping[str, int | tuple[int, ...]], chosen: Options,
    values: Mapping[str, Array] | None = None, slim: bool = False,
) -> Model:  # fmt: skip
    """The model compiled, or found in the cache; `values` of inputs become constants of it. A `slim` one is one of many
    and makes what `artifact` gives when asked."""
    goal = _goal(chosen)
    if chosen.effort == "adaptive":
        return _adaptive_model(source, fixed_shapes, goal, chosen, values, slim)
    return Model(_made(source, fixed_shapes, goal, chosen, values, slim), chosen)


def _goal(chosen: Options) -> Target:
    """The machine that options ask for."""
    return machine(
        chosen.target, chosen.threads, cache_dir=chosen.cache_dir, compiler=chosen.compiler, tell=chosen.progress
    )


def _made(
    source: Any, shapes: Mapping[str, int | tuple[int, ...]], goal: Target, chosen: Options,
    values: Mapping[str, Array] | None, slim: bool,
) -> Artifact | stored.StoredArtifact:  # fmt: skip
    identity = stored.identify(source, shapes, goal, chosen, values)
    if identity is None:
        return _built(source, shapes, goal, chosen, values)
    again = _maker(source, shapes, goal, chosen, values)
    found = stored.find(identity, goal, chosen, again)
    if found is not None:
        return found
    artifact = _built(source, shapes, goal, chosen, values)
    stored.keep(identity, artifact, chosen, partial(_texts, artifact))
    slim = slim or stored.is_heavy(artifact)
    return stored.slimmed(identity, artifact, chosen, again) if slim else artifact


def _texts(artifact: Artifact) -> Mapping[str, str]:
    """What is kept of a saved model's texts: in place of the explanation what it can be made of."""
    from tilewright.packages.explained import FORMS, forms_of
    from tilewright.packages.files import texts_of, unexplained_texts

    if artifact.parts:
        return texts_of(artifact, artifact.runner)
    return {**unexplained_texts(artifact, artifact.runner), FORMS: forms_of(artifact)}


def _maker(
    source: Any, shapes: Mapping[str, int | tuple[int, ...]], goal: Target, chosen: Options,
    values: Mapping[str, Array] | None,
) -> Callable[[], Artifact]:  # fmt: skip
    """Makes again what a compiled model no longer has of its compilation."""
    return partial(_built, source, shapes, goal, chosen.override(stop_after="source"), values)


def _adaptive_model(
    source: Any, shapes: Mapping[str, int | tuple[int, ...]], goal: Target, chosen: Options,
    values: Mapping[str, Array] | None, slim: bool,
) -> Model:  # fmt: skip
    """The full code where the cache has it; else the fast code, which the full one replaces when another process has
    compiled it into the cache."""
    full, fast = chosen.override(effort="full"), chosen.override(effort="fast")
    # what the other process is given: its place in the cache is then the same there
    source = source.SerializeToString(deterministic=True) if is_model_proto(source) else source
    identity = stored.identify(source, shapes, goal, full, values)
    if identity is None or not can_start():
        return Model(_made(source, shapes, goal, full, values, slim), full)
    again = _maker(source, shapes, goal, full, values)

    def find() -> stored.StoredArtifact | None:
        return stored.find(identity, goal, full, again)

    found = find()
    if found is not None:
        return Model(found, full)
    model = Model(_made(source, shapes, goal, fast, values, slim), fast)
    model.replace_when(partial(Background, compile_apart, (source, dict(shapes), goal, replace(full, progress=None),
                                                            values)), find)  # fmt: skip
    return model


def compile_apart(
    source: Any, shapes: Mapping[str, int | tuple[int, ...]], goal: Target, options: Options,
    values: Mapping[str, Array] | None,
) -> None:  # fmt: skip
    """Compile a model into the cache, for another process."""
    _made(source, shapes, goal, options, values, slim=True)


def load(
    folder: str | os.PathLike[str], *, threads: int | None = None, trust: bool = False, timeout: float = 60.0
) -> Model | OpenModel | RangedModel | StagedModel | RankedModel:
    """The model that its `save`, or `tilewright compile`, wrote to a directory; nothing is compiled. Of a model that
    runs in parts, only those parts are compiled, at a call, that it had not come to when it was saved.

    It runs on as many threads as it was compiled for, or on `threads`. The files are code, as much as a program is:
    load what you would run. A directory that another user has, or may write to, is refused unless there is `trust` in
    whoever that is; root's are everybody's. A model on several ranks is loaded by as many processes, none of which
    waits for another longer than `timeout` seconds.
    """
    from tilewright.packages.directory import read_manifest
    from tilewright.packages.manifest import is_on_ranks

    place = Path(folder)
    remark_on_threads(threads)
    if not is_on_ranks(read_manifest(place, trust=trust)):
        return _loaded(place, threads=threads, trust=trust)
    from tilewright.distributed import loaded

    chosen = Options.from_environment(threads=threads)
    return loaded.load(place, threads, chosen, checked_duration("timeout", timeout), trust=trust)


def _loaded(place: Path, *, threads: int | None, trust: bool) -> Model | OpenModel | RangedModel | StagedModel:
    """The model of a directory for one process, and of those in it."""
    from tilewright.dynamic import loaded_parts, loaded_ranges, loaded_shapes
    from tilewright.packages.directory import read_manifest
    from tilewright.packages.files import load as shipped

    chosen = Options.from_environment(threads=threads)
    text = read_manifest(place, trust=trust)
    part = partial(_loaded, threads=threads, trust=trust)
    if loaded_shapes.is_for_shapes(text):
        return loaded_shapes.load(place, part, trust=trust)
    if loaded_ranges.is_for_ranges(text):
        return loaded_ranges.load(place, part, trust=trust)
    if loaded_parts.is_in_parts(text):
        return loaded_parts.load(place, part, compile_at_call, chosen.threads, trust=trust)
    return Model(shipped(place, chosen.threads, trust=trust), chosen)


def _built(
    source: Any, shapes: Mapping[str, int | tuple[int, ...]], goal: Target, chosen: Options,
    values: Mapping[str, Array] | None = None,
) -> Artifact:  # fmt: skip
    from tilewright.compiler.within import build_within
    from tilewright.ir.forms.graph import Graph

    if isinstance(source, Graph):
        graph = source
    else:
        from tilewright.frontend.onnx.model import load

        graph = load(source, shapes, values)
    if not chosen.is_tuned:
        return build_within(graph, goal, chosen)

    if chosen.is_believed:
        from tilewright.learn.choose import choose_plan

        return build_within(graph, goal, chosen, choose_plan)
    from tilewright.tune.forms import build_tuned

    return build_tuned(graph, goal, chosen)


def _is_torch_module(model: object) -> bool:
    # By name, so that torch is not imported to find out.
    return any(c.__module__ == "torch.nn.modules.module" and c.__name__ == "Module" for c in type(model).__mro__)
