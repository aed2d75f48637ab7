"""`python -m tests.golden.update_plans` plans the zoo anew, says which Plans are others, and writes their digests."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from bench import zoo
from tests.golden.plans import FILE, MODELS, changes, committed, digest, text_of
from tilewright.target import stored_machines


def main() -> None:
    found: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory(prefix="tilewright-plans-") as folder:
        for model in MODELS:
            path = Path(folder) / f"{model}.onnx"
            zoo.export(model, "small", path)
            found[model] = {name: digest(text_of(path, name)) for name in stored_machines()}
    lines = changes(committed() if FILE.exists() else {}, found)
    print("\n".join(lines) or "all Plans are as they were")
    FILE.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
