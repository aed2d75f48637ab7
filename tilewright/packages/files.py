"""Saves a compiled model as a directory, and starts one from it."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tilewright.errors import ModelError, OptionError, ToolError
from tilewright.ir.forms.loops import Call
from tilewright.options import Options, check_whole_number
from tilewright.packages.directory import MANIFEST, check_files, foreign, read_manifest, sums, write_directory
from tilewright.packages.gpu import GpuManifest, gpu_manifest, save_gpu, start_gpu
from tilewright.packages.header import example_text, header_text
from tilewright.packages.inspection import EXPLANATION, PLAN, saved_explanation
from tilewright.packages.manifest import FORMAT, KIND, Manifest, Port, damaged, manifest_from, unsealed
from tilewright.packages.shared import WEIGHTS
from tilewright.packages.sweeps import SweptManifest, is_in_sweeps, load_swept, save_swept
from tilewright.runtime.cores import usable_cores
from tilewright.runtime.cpu_model import (
    MAX_THREADS,
    BuiltModel,
    CpuModel,
    ModelRunError,
    driver_header,
    fits,
)
from tilewright.runtime.features import relied_on
from tilewright.runtime.ownership import ForeignError
from tilewright.runtime.permissions import PermissionRefused
from tilewright.runtime.swept import SweptModel
from tilewright.runtime.toolchain import ToolchainError, find_compiler, this_machine
from tilewright.runtime.weights import WeightsError, write_weights
from tilewright.version import VERSION

if TYPE_CHECKING:
    from tilewright.compiler.pipeline import Artifact

T = TypeVar("T")
LIBRARY = "libmodel.so"
HEADER = "model.h"
EXAMPLE = "example.c"
SOURCES = "source"
_CHECKED_LATER_FROM_BYTES = 64 << 20  # which take some 20 ms to sum up


@dataclass(frozen=True)
class ShippedArtifact:
    """A model from a directory. It has code and weights, but not the model file that they were made of."""

    folder: Path
    manifest: Manifest | GpuManifest | SweptManifest
    runner: Any

    @property
    def inputs(self) -> tuple[Port, ...]:
        return self.manifest.inputs

    @property
    def outputs(self) -> tuple[Port, ...]:
        return self.manifest.outputs

    @property
    def calls(self) -> tuple[Call, ...]:
        return self.manifest.calls

    @cached_property
    def explanation(self) -> str:
        """What `explain` said when it was saved."""
        return saved_explanation(self.folder, self.manifest.files)

    @property
    def whole(self) -> Artifact:
        raise OptionError(
            f"a model from a directory has no more to show than explain() and {self.folder / PLAN}; compile the model "
            f"file to look inside"
        )


def save(
    artifact: Artifact | ShippedArtifact, folder: Path, options: Options, texts: Mapping[str, str] | None = None
) -> None:
    """Write the model to a directory, whole or not at all. An earlier saved model there gives way. With `texts` that
    are known it needs none of the forms that they were made of."""
    if isinstance(artifact, ShippedArtifact):
        shared = artifact.manifest.shared if isinstance(artifact.manifest, Manifest) else {}
        check_files(artifact.folder, {**artifact.manifest.files, **shared}, trust=True)
        write_directory(folder, lambda place: _copy(artifact, place))
        return
    runner = artifact.runner
    if runner is None:
        raise OptionError("compilation was stopped before there was code to save; leave out stop_after to save it")
    if isinstance(runner, SweptModel):
        save_swept(artifact, folder, lambda part, place: save(part, place, options))
        return
    if not isinstance(runner, CpuModel):
        save_gpu(artifact, folder, options)
        return
    known = texts if texts is not None else texts_of(artifact, runner)
    write_directory(folder, lambda place: _fill(place, artifact, runner, known, options))


def load(folder: Path, threads: int | None = None, *, trust: bool = False) -> ShippedArtifact:
    """The model of a directory, after a look at every file; nothing is compiled and nothing unpickled. Files of others
    are refused unless there is `trust` in them."""
    if threads is not None:
        check_whole_number("threads", threads, least=1, most=MAX_THREADS)
    text = read_manifest(folder, trust=trust)
    if is_in_sweeps(text):
        swept, model = load_swept(folder, text, partial(load, threads=threads, trust=trust), trust=trust)
        return ShippedArtifact(folder.resolve(), swept, model)
    row = unsealed(text, f"'{folder}'", VERSION, KIND, FORMAT)
    if "gpu" in row:
        about = _read(folder, row, gpu_manifest)
        return ShippedArtifact(folder.resolve(), about, start_gpu(folder, about, trust=trust))
    manifest = _read(folder, row, manifest_from)
    _check_machine(folder, manifest)
    files = {**manifest.files, **manifest.shared}
    later = {name for name in (WEIGHTS, *manifest.shared) if _is_large(folder / name)}
    check_files(folder, {name: s for name, s in files.items() if name not in later}, trust=trust)
    rest = {name: s for name, s in files.items() if name in later}
    unchecked = cache(partial(check_files, folder, rest, trust=trust)) if rest else None  # once, however often opened
    built = BuiltModel(folder / LIBRARY, folder / WEIGHTS, manifest.permissions, trust=trust, unchecked=unchecked)
    try:
        runner = CpuModel(built, threads or manifest.threads or usable_cores())
    except ForeignError as error:
        raise foreign(error) from error
    except (ModelRunError, WeightsError, PermissionRefused) as error:
        raise ToolError(f"'{folder}': {error}") from error
    if not fits(runner, manifest.inputs, manifest.outputs):
        runner.close()
        raise ModelError(f"'{folder}': its {MANIFEST} and its {LIBRARY} are not of one model; save the model again")
    return ShippedArtifact(folder.resolve(), manifest, runner)


def _is_large(weights: Path) -> bool:
    """Whether weights are summed up before the first call instead of while the model is loaded."""
    try:
        return weights.stat().st_size >= _CHECKED_LATER_FROM_BYTES
    except OSError:
        return False  # which `check_files` tells


def _read(folder: Path, row: Mapping[str, Any], read: Callable[[Mapping[str, Any]], T]) -> T:
    try:
        return read(row)
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(f"'{folder}'") from error


def _check_machine(folder: Path, manifest: Manifest) -> None:
    here = this_machine()
    if (manifest.system, manifest.architecture) != (platform.system(), here.architecture):
        made_for = f"{manifest.system} on {manifest.architecture}"
        raise ToolError(f"'{folder}' is for {made_for}, and this is {platform.system()} on {here.architecture}")
    missing = sorted(set(manifest.features) - here.features)
    if here.features and missing:
        raise ToolError(
            f"'{folder}' was compiled for a processor that has {', '.join(missing)}, which this one lacks; compile the "
            f"model here"
        )
    if not here.features and manifest.machine != here.identity:
        raise ToolError(f"'{folder}' was compiled on another machine than this; compile the model here")
    if manifest.interface != _interface():
        raise ModelError(
            f"'{folder}' was saved by Tilewright {manifest.version}, whose code this version "
            f"({VERSION}) cannot call; save the model again with this version"
        )


def _interface() -> str:
    """Changes with anything that Python and the shared object must agree on."""
    return sha256(driver_header().encode()).hexdigest()[:16]


def texts_of(artifact: Artifact, runner: CpuModel) -> dict[str, str]:
    """Every file of text but those about the others."""
    from tilewright.report.explain import explain_text

    return {**unexplained_texts(artifact, runner), EXPLANATION: explain_text(artifact)}


def unexplained_texts(artifact: Artifact, runner: CpuModel) -> dict[str, str]:
    """The same but for the explanation, which takes as long as all of them together."""
    if artifact.plan is None:
        raise OptionError("compilation was stopped before there was code to save; leave out stop_after to save it")
    texts = {f"{SOURCES}/{name}.c": text for name, text in runner.built.sources.items()}
    features = relied_on(this_machine(), runner.built.permissions)
    about = (artifact.inputs, artifact.outputs, features, runner.built.permissions)
    texts[HEADER] = header_text(*about, runner.denormals)
    texts[EXAMPLE] = example_text(HEADER, WEIGHTS)
    texts[PLAN] = artifact.plan.to_json() + "\n"
    return texts


def _fill(place: Path, artifact: Artifact, runner: CpuModel, texts: Mapping[str, str], options: Options) -> None:
    (place / SOURCES).mkdir()
    for name, text in texts.items():
        (place / name).write_text(text, encoding="utf-8")
    write_weights(runner.weights, place / WEIGHTS)
    try:
        shutil.copyfile(runner.built.library, place / LIBRARY)
    except FileNotFoundError as error:
        raise ToolError("the model's code has been removed from the cache; compile the model again") from error
    (place / MANIFEST).write_text(_manifest(place, artifact, runner, options).to_json(), encoding="utf-8")


def _manifest(place: Path, artifact: Artifact, runner: CpuModel, options: Options) -> Manifest:
    from tilewright.backend.cpu.machine_code import kernel_flags

    here = this_machine()
    try:
        compiler = find_compiler(options.compiler)
    except ToolchainError as error:
        raise ToolError(str(error)) from error
    return Manifest(
        version=VERSION,
        interface=_interface(),
        system=platform.system(),
        architecture=here.architecture,
        features=relied_on(here, runner.built.permissions),
        machine=here.identity,
        permissions=runner.built.permissions,
        compiler=compiler.version,
        flags=kernel_flags(options, compiler, here),
        target=artifact.target.describe(),
        threads=options.threads,
        denormals=runner.denormals,
        inputs=tuple((name, dtype, tuple(shape)) for name, dtype, shape in artifact.inputs),
        outputs=tuple((name, dtype, tuple(shape)) for name, dtype, shape in artifact.outputs),
        calls=artifact.calls,
        files=sums(place),
        begins=tuple(runner.weight_begins),
        shared={},
    )


def _copy(artifact: ShippedArtifact, place: Path) -> None:
    """By itself: weights that it shared with others come along."""
    manifest = artifact.manifest
    for name in (MANIFEST, *manifest.files):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(artifact.folder / name, place / name)
    if isinstance(manifest, Manifest) and manifest.shared:
        write_weights(artifact.runner.weights, place / WEIGHTS)
        own = {**manifest.files, **sums(place, [WEIGHTS])}
        (place / MANIFEST).write_text(replace(manifest, files=own, shared={}).to_json(), encoding="utf-8")
