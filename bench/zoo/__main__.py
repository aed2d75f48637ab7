"""Command line of the zoo: `python -m bench.zoo export DIR` writes models, example inputs and references."""

import argparse
from pathlib import Path

import numpy as np

from bench import zoo


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.zoo", description="The model zoo of the benchmarks.")
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser(
        "export",
        help="write each model as NAME.onnx with its inputs and references in NAME.npz",
        description="NAME.npz holds the inputs by name, float64 references as ref:OUTPUT and PyTorch's "
        "float32 outputs as f32:OUTPUT. The dynamo exporter writes NAME.dynamo.onnx beside NAME.onnx.",
    )
    export.add_argument("directory", type=Path, metavar="DIR")
    export.add_argument("--size", choices=zoo.SIZES, default="small")
    export.add_argument("--batch", type=int, default=1, help="inputs at a time, along the first axis")
    export.add_argument("--exporter", choices=(*zoo.EXPORTERS, "both"), default="torchscript")
    export.add_argument("--model", choices=tuple(zoo.MODELS), action="append", help="only this one; repeatable")
    arguments = parser.parse_args()

    exporters = zoo.EXPORTERS if arguments.exporter == "both" else (arguments.exporter,)
    arguments.directory.mkdir(parents=True, exist_ok=True)
    for name in arguments.model or zoo.MODELS:
        export_files(name, arguments.size, arguments.directory, exporters, arguments.batch)


def export_files(name: str, size: str, directory: Path, exporters: tuple[str, ...], batch: int = 1) -> None:
    module, inputs = zoo.build(name, size, batch)
    references = zoo.reference(module, inputs)
    float32 = zoo.float32_outputs(module, inputs)
    arrays = dict(inputs)
    arrays.update({f"ref:{output}": array for output, array in references.items()})
    arrays.update({f"f32:{output}": array for output, array in float32.items()})
    np.savez(directory / f"{name}.npz", **arrays)  # type: ignore[arg-type]
    for exporter in exporters:
        path = directory / (f"{name}.onnx" if exporter == "torchscript" else f"{name}.{exporter}.onnx")
        zoo.export_module(module, inputs, path, exporter=exporter)
        print(f"{path}  {path.stat().st_size / 1e6:.1f} MB", flush=True)
    error = zoo.relative_error(float32, references)
    print(f"{name} {size}: float32 error of PyTorch {error:.1e}", flush=True)


if __name__ == "__main__":
    main()
