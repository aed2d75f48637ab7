"""What the benchmark drivers share: their common options, exported models, and how results are written down."""

import argparse
import json
import math
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench import zoo
from bench.peak import Peak, describe_tools
from tilewright.report.sidebyside import RuntimeResult

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"


def add_zoo_options(
    parser: argparse.ArgumentParser, name: str, *, plot: bool = False, batch: bool = False, results: bool = True
) -> None:
    """Which models, how large, on how many threads, and where the files `name`.json and so on go."""
    parser.add_argument("--models", default=",".join(zoo.MODELS), help="comma-separated; '' for none (default: all)")
    parser.add_argument("--size", choices=zoo.SIZES, default="full")
    if batch:
        parser.add_argument("--batch", type=int, default=1, help="inputs at a time, along the first axis")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--exports", type=Path, help="folder of exported models, by size; filled as needed and kept")
    if not results:
        return
    files = f"{name}.json, {name}.md and {name}.svg" if plot else f"{name}.json and {name}.md"
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"folder for {files}")


def add_runtime_options(
    parser: argparse.ArgumentParser, runtimes: Sequence[str], *, rounds: int, seconds: float
) -> None:
    parser.add_argument("--runtimes", default=",".join(runtimes), help="comma-separated (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--seconds", type=float, default=seconds, help="per round and runtime")


def chosen_models(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> list[str]:
    names = [name for name in arguments.models.split(",") if name]
    for name in names:
        if name not in zoo.MODELS:
            parser.error(f"no model named {name!r} in the zoo; there are {', '.join(zoo.MODELS)}")
    return names


def versions_of(results: Iterable[RuntimeResult]) -> dict[str, str]:
    """Of every runtime that ran, whatever schedules of it there were."""
    return {result.name.partition(":")[0]: result.version for result in results if result.version is not None}


@contextmanager
def export_folder(arguments: argparse.Namespace) -> Iterator[tuple[Path, Path]]:
    """A folder that vanishes afterwards, and the one for exported models of the size asked for."""
    with tempfile.TemporaryDirectory(prefix="tilewright-bench-") as temporary:
        batch = getattr(arguments, "batch", 1)
        size = arguments.size if batch == 1 else f"{arguments.size}-batch{batch}"
        folder = (arguments.exports or Path(temporary)) / size
        folder.mkdir(parents=True, exist_ok=True)
        yield Path(temporary), folder


@contextmanager
def checked_out(revision: str, folder: Path) -> Iterator[Path]:
    """The code of an earlier revision in `folder`, which vanishes afterwards."""
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(folder), revision], check=True)
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def exported(
    names: Iterable[str], size: str, folder: Path, tell: Callable[[str], None], batch: int = 1
) -> dict[str, Path]:
    """The ONNX files of these models in `folder`, written where they are missing."""
    paths = {name: folder / f"{name}.onnx" for name in names}
    for name, path in paths.items():
        if not path.is_file():
            tell(f"exporting {name}")
            zoo.export(name, size, path, batch=batch)
    return paths


def write_files(
    folder: Path, name: str, document: Mapping[str, Any], text: str, plot: str | None = None, *, compact: bool = False
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    shown = json.dumps(document, separators=(",", ":")) if compact else json.dumps(document, indent=2)
    (folder / f"{name}.json").write_text(shown + "\n")
    (folder / f"{name}.md").write_text(text)
    if plot is not None:
        (folder / f"{name}.svg").write_text(plot)


def heading(title: str, machine: Mapping[str, Any], peak: Peak, versions: Mapping[str, str]) -> list[str]:
    """The first lines of a report: what was measured with what, and on what."""
    rates = f"{peak.operations_per_second / 1e9:.0f} GFLOP/s in float32, {peak.bytes_per_second / 1e9:.0f} GB/s read"
    known = dict(versions) | describe_tools()
    return [
        f"# {title}",
        "",
        f"{machine['processor']}, {peak.threads} threads; measured peak {rates}.",
        "Versions: " + ", ".join(f"{name} {version}" for name, version in known.items()) + ".",
        "",
    ]


def failure_lines(failures: Iterable[tuple[str, str, str | None]]) -> list[str]:
    """(what, runtime, error) of everything that has no number."""
    lines = [f"- {what}, {runtime}: {error}" for what, runtime, error in failures if error is not None]
    return ["", "Without a number:", "", *lines] if lines else []


def geometric_mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if not known or len(known) != len(values):
        return None
    return math.exp(sum(math.log(value) for value in known) / len(known))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    ruler = ["---", *("---:" for _ in header[1:])]
    return ["| " + " | ".join(cells) + " |" for cells in (header, ruler, *rows)]


def latency_text(result: RuntimeResult) -> str:
    if result.skipped:
        return "skipped"
    return number_text(result.median_ms, ".4g") if result.error is None else "failed"


def number_text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
