"""One copy of the weights that several saved models have in common: a file above their directories, into which each
says where its own are."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path

import numpy as np

from tilewright.packages.directory import MANIFEST, sums
from tilewright.packages.manifest import FORMAT, KIND, Manifest, manifest_from, said_by, unsealed
from tilewright.runtime.weights import WEIGHT_ALIGNMENT, divides, shared_table
from tilewright.version import VERSION

WEIGHTS = "model.weights"
SHARED = "shared.weights"


def share_weights(place: Path, folders: Iterable[Path]) -> None:
    """Models for a CPU that were just written to folders below a place keep what weights they have in common there."""
    models = [found for folder in folders if (found := _saved(folder)) is not None]
    pieces = {digest: data for model in models for _, digest, data in model.pieces()}
    places, written = _placed(pieces)
    if sum(pieces[digest].size for digest in written) == sum(model.size for model in models):
        return
    with (place / SHARED).open("wb") as file:
        for digest in written:
            file.write(pieces[digest].data)
            file.write(bytes(-pieces[digest].size % WEIGHT_ALIGNMENT))
        size = file.tell()
    line = sums(place, [SHARED])[SHARED]
    for model in models:
        model.refer(place / SHARED, size, line, places)


def _placed(pieces: Mapping[bytes, np.ndarray]) -> tuple[dict[bytes, int], list[bytes]]:
    """Where each of some distinct pieces lies, and which of them follow each other there: others are parts of these, as
    weights are that one model has joined and another has not."""
    lengths = {data.size for data in pieces.values()}
    places: dict[bytes, int] = {}
    written: list[bytes] = []
    end = 0
    for digest, data in sorted(pieces.items(), key=lambda piece: -piece[1].size):
        if digest in places:
            continue
        places[digest] = end
        written.append(digest)
        for length in (n for n in lengths if n < data.size and divides(n, data.size)):
            for begin in range(0, data.size, length):
                inside = _digest(data[begin : begin + length])
                if inside in pieces:
                    places.setdefault(inside, end + begin)
        end += -(-data.size // WEIGHT_ALIGNMENT) * WEIGHT_ALIGNMENT
    return places, written


def _digest(data: np.ndarray) -> bytes:
    return blake2b(data.data, digest_size=32).digest()


@dataclass(frozen=True)
class _Saved:
    folder: Path
    manifest: Manifest
    size: int

    def pieces(self) -> Iterator[tuple[int, bytes, np.ndarray]]:
        """Every constant: where it begins, what tells it from others, and its bytes."""
        weights = np.memmap(self.folder / WEIGHTS, np.uint8, mode="r")
        for begin, end in pairwise((*self.manifest.begins, self.size)):
            data = weights[begin:end]
            yield begin, _digest(data), data

    def refer(self, shared: Path, size: int, line: str, places: dict[bytes, int]) -> None:
        """Weights of its own give way to where they are in the shared file."""
        rows = [(begin, places[digest]) for begin, digest, _ in self.pieces()]
        name = os.path.relpath(shared, self.folder)
        (self.folder / WEIGHTS).unlink()  # it may still be mapped
        (self.folder / WEIGHTS).write_bytes(shared_table(rows, size, name, self.size))
        files = {**self.manifest.files, **sums(self.folder, [WEIGHTS])}
        text = replace(self.manifest, files=files, shared={name: line}).to_json()
        (self.folder / MANIFEST).write_text(text, encoding="utf-8")


def _saved(folder: Path) -> _Saved | None:
    """A model with weights of its own; None where it is of another kind, or has none."""
    text = (folder / MANIFEST).read_text(encoding="utf-8")
    row = said_by(text, f"'{folder}'")
    if row["kind"] != KIND or "cpu" not in row or not row["begins"]:
        return None
    manifest = manifest_from(unsealed(text, f"'{folder}'", VERSION, KIND, FORMAT))
    return _Saved(folder, manifest, (folder / WEIGHTS).stat().st_size)
