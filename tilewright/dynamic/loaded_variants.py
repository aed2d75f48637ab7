"""What directories with several compiled variants of a model have in common when they are read back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tilewright.dynamic.encoding import RecordDecoder
from tilewright.errors import ModelError
from tilewright.packages.directory import check_files, read_manifest
from tilewright.packages.manifest import file_sums, unsealed
from tilewright.version import VERSION

T = TypeVar("T")


def loaded(
    folder: Path, kind: tuple[str, int], files: tuple[str, str], make: Callable[[Any, RecordDecoder], T], *, trust: bool
) -> T:
    """What is made of a directory's table and of the arrays beside it, which are its `files`, after a look at every
    file; nothing is compiled and nothing unpickled. `kind` is what its manifest has to say it is, and in which form."""
    row = unsealed(read_manifest(folder, trust=trust), f"'{folder}'", VERSION, *kind)
    table, data = files
    try:
        check_files(folder, file_sums(row["files"]), trust=trust)
        arrays = np.fromfile(folder / data, np.uint8)
        return make(json.loads((folder / table).read_text(encoding="utf-8")), RecordDecoder(arrays))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ModelError(f"'{folder}': its {table} does not fit this version; save the model again") from error
