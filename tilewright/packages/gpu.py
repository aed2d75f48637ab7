"""Saves a model for a GPU as a directory of kernels, launches and weights, and starts one from it without planning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.errors import InternalError, ModelError, OptionError, ToolError
from tilewright.ir.forms.loops import Call
from tilewright.options import Options
from tilewright.packages.directory import MANIFEST, check_files, foreign, sums, write_directory
from tilewright.packages.inspection import EXPLANATION, PLAN
from tilewright.packages.manifest import FORMAT, KIND, Port, calls_from, file_sums, port_from, port_row, sealed
from tilewright.runtime.cache import Cache, CacheError
from tilewright.runtime.cores import usable_cores
from tilewright.runtime.cpu_model import BufferRef, fits
from tilewright.runtime.emulator import Contract
from tilewright.runtime.gpu_model import (
    EmulatedModel,
    GpuCall,
    GpuModelImage,
    LaunchLimits,
    LoadedKernel,
    Resident,
    WeightCopy,
)
from tilewright.runtime.nvrtc import Cubin, Resources, cached_cubin
from tilewright.runtime.ownership import ForeignError, opened
from tilewright.runtime.toolchain import CompileError, ToolchainError, find_compiler
from tilewright.runtime.weights import write_weights
from tilewright.version import VERSION

if TYPE_CHECKING:
    from tilewright.compiler.pipeline import Artifact

WEIGHTS = "model.weights"
SOURCES, CODE = "source", "code"
EMULATED = "emulated"  # in the place of an architecture: the sources themselves run, compiled for this computer


@dataclass(frozen=True)
class GpuManifest:
    """What such a directory says of itself."""

    architecture: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    calls: tuple[Call, ...]
    image: Mapping[str, Any]  # the model but for its texts, code and weights
    files: Mapping[str, str]
    limits: LaunchLimits  # of what it was compiled for


def save_gpu(artifact: Artifact, folder: Path, options: Options) -> None:
    """Write the model to a directory, whole or not at all. An earlier saved model there gives way."""
    from tilewright.report.explain import explain_text

    if artifact.plan is None or artifact.runner is None:
        raise OptionError("compilation was stopped before there was code to save; leave out stop_after to save it")
    image: GpuModelImage = artifact.runner.image
    architecture = getattr(artifact.runner, "architecture", EMULATED)
    texts = {f"{SOURCES}/{kernel.name}.cu": kernel.source for kernel in image.kernels}
    texts |= {PLAN: artifact.plan.to_json() + "\n", EXPLANATION: explain_text(artifact)}
    codes: dict[str, Cubin] = {}
    if architecture != EMULATED:
        codes = {k.name: cached_cubin(k.source, architecture, Cache(options.cache_dir)) for k in image.kernels}

    def fill(place: Path) -> None:
        for name in (SOURCES, CODE):
            (place / name).mkdir()
        for name, text in texts.items():
            (place / name).write_text(text, encoding="utf-8")
        for name, cubin in codes.items():
            (place / CODE / f"{name}.cubin").write_bytes(cubin.code)
        write_weights(image.weights, place / WEIGHTS)
        body = {
            "kind": KIND,
            "format": FORMAT,
            "tilewright": VERSION,
            "gpu": {"architecture": architecture},
            "inputs": [port_row((p.name, p.dtype, p.shape)) for p in artifact.inputs],
            "outputs": [port_row((p.name, p.dtype, p.shape)) for p in artifact.outputs],
            "target": artifact.target.describe(),
            "calls": [(call.kernel, call.arguments, call.step) for call in artifact.calls],
            "image": _image_row(image, codes),
            "files": sums(place),
        }
        (place / MANIFEST).write_text(sealed(body), encoding="utf-8")

    write_directory(folder, fill)


def gpu_manifest(row: Mapping[str, Any]) -> GpuManifest:
    """Of a row that was unsealed; what is not of this form raises KeyError, TypeError or ValueError."""
    return GpuManifest(
        row["gpu"]["architecture"],
        tuple(map(port_from, row["inputs"])),
        tuple(map(port_from, row["outputs"])),
        calls_from(row["calls"]),
        row["image"],
        file_sums(row["files"]),
        _limits(row["target"]),
    )


def _limits(target: Mapping[str, Any]) -> LaunchLimits:
    _registers, shared, *_ = target["levels"]
    return LaunchLimits(int(shared["capacity"]), int(target["max_threads"]))


def start_gpu(folder: Path, manifest: GpuManifest, *, trust: bool = False) -> Any:
    """The model on the device or under the emulator, after a look at every file."""
    check_files(folder, manifest.files, trust=trust)
    try:
        image = _image(folder, manifest.image, trust)
    except ForeignError as error:
        raise foreign(error) from error
    except (KeyError, TypeError, ValueError, OSError, InternalError) as error:
        raise ModelError(f"'{folder}': its {MANIFEST} does not fit this version; save the model again") from error
    if not fits(image, manifest.inputs, manifest.outputs):
        raise ModelError(f"'{folder}': its {MANIFEST} contradicts itself; save the model again")
    options = Options.from_environment()
    try:
        if manifest.architecture != EMULATED:
            return _on_device(folder, manifest, image, Cache(options.cache_dir), trust)
        return EmulatedModel(image, Cache(options.cache_dir), find_compiler(options.compiler), usable_cores(),
                             limits=manifest.limits)  # fmt: skip
    except (ToolchainError, CompileError, CacheError, ForeignError) as error:
        raise ToolError(f"'{folder}': {error}") from error


def _on_device(folder: Path, manifest: GpuManifest, image: GpuModelImage, cache: Cache, trust: bool) -> Any:
    from tilewright.backend.gpu.driver import missing_for_cuda

    missing = missing_for_cuda()
    if missing is not None:
        raise ToolError(f"'{folder}' is for a GPU of {manifest.architecture}, and {missing}")
    from tilewright.runtime.cuda import CudaModel, architecture_of

    here = architecture_of()
    if here != manifest.architecture:
        raise ToolError(
            f"'{folder}' is for a GPU of {manifest.architecture}, and this is {here}: compile the model here"
        )
    resources = manifest.image["resources"]
    cubins = {
        kernel.name: Cubin(
            _bytes(folder / CODE / f"{kernel.name}.cubin", trust),
            {name: Resources(**row) for name, row in resources[kernel.name].items()},
        )
        for kernel in image.kernels
    }
    return CudaModel(image, cache, cubins=cubins)


def _image_row(image: GpuModelImage, codes: Mapping[str, Cubin]) -> dict[str, Any]:
    return {
        "kernels": [(k.name, k.block, k.shared_bytes, asdict(k.contract), k.meets) for k in image.kernels],
        "launches": [
            (c.kernel, c.grid, [(ref.space, ref.value) for ref in c.buffers], c.extents, c.step) for c in image.calls
        ],
        "input_bytes": image.input_bytes,
        "output_bytes": image.output_bytes,
        "arena_bytes": image.arena_bytes,
        "ring_bytes": image.ring_bytes,
        "residents": [astuple(each) for each in image.residents],
        "copies": [astuple(each) for each in image.copies],
        "resources": {n: {k: asdict(r) for k, r in code.resources.items()} for n, code in codes.items()},
    }


def _bytes(path: Path, trust: bool) -> bytes:
    with opened(path, trust=trust) as file:
        return file.read()


def _image(folder: Path, row: Mapping[str, Any], trust: bool) -> GpuModelImage:
    kernels = tuple(
        LoadedKernel(name, _bytes(folder / SOURCES / f"{name}.cu", trust).decode(), block, shared,
                     Contract(tuple(contract["writes_all"]), tuple(contract["reads_all"]), contract["uses_all"]),
        is_met) for name, block, shared, contract, is_met in row["kernels"]
    )  # fmt: skip
    calls = tuple(
        GpuCall(name, tuple(grid), tuple(BufferRef(*ref) for ref in refs), tuple(extents), step)
        for name, grid, refs, extents, step in row["launches"]
    )
    weights = _bytes(folder / WEIGHTS, trust)
    return GpuModelImage(
        kernels, calls, tuple(row["input_bytes"]), tuple(row["output_bytes"]), weights, row["arena_bytes"],
        tuple(Resident(*each) for each in row["residents"]), tuple(WeightCopy(*each) for each in row["copies"]),
        row["ring_bytes"],
    )  # fmt: skip
