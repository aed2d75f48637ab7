"""What a saved model says of itself, read as text: no code of it runs, whosever it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tilewright.errors import ModelError
from tilewright.packages.directory import MANIFEST, check_files, read_manifest
from tilewright.packages.manifest import damaged, file_sums, said_by

EXPLANATION = "explain.txt"
PLAN = "plan.json"


def explain(folder: Path) -> str:
    """What `explain` said when the model was saved; of one that consists of several, what it said of each."""
    text = read_manifest(folder, trust=True)
    row = said_by(text, f"'{folder}'")
    try:
        files = file_sums(row["files"])
        if EXPLANATION in files:
            return saved_explanation(folder, files)
        inner = sorted((folder / name).parent for name in files if name.endswith(f"/{MANIFEST}"))
        check_files(folder, {n: s for n, s in files.items() if n.endswith(f"/{MANIFEST}")}, trust=True)
        told = [f"{row['kind']}, saved by Tilewright {row['tilewright']}",
                f"  takes {', '.join(row['inputs'])}; gives {', '.join(row['outputs'])}"]  # fmt: skip
        told += [f"  {variant}" for variant in row.get("variants", ())]
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(f"'{folder}'") from error
    for place in sorted(inner, key=lambda path: (len(path.name), path.name)):
        told += ["", place.relative_to(folder).as_posix(), explain(place)]
    return "\n".join(told)


def saved_explanation(folder: Path, files: Mapping[str, str]) -> str:
    """The text beside the code, unchanged."""
    check_files(folder, {EXPLANATION: files[EXPLANATION]}, trust=True)
    try:
        return (folder / EXPLANATION).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"'{folder}': its {EXPLANATION} cannot be read; save the model again") from error
