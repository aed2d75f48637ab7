"""Directories that are there whole or not at all: written under another name first, then moved into place."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from tilewright.errors import ModelError, OptionError, ToolError
from tilewright.packages.manifest import KIND
from tilewright.runtime.cache import checksum
from tilewright.runtime.ownership import ForeignError, check, check_way, opened

MANIFEST = "manifest.json"
_NOT_OTHERS = 0o755  # whoever else may write to a saved model has its user run anything


def write_directory(folder: Path, fill: Callable[[Path], None]) -> None:
    """`fill` writes the files into the directory it is given; where it fails, nothing has changed."""
    place = folder.resolve()
    check_free(place)
    temporary = place.with_name(f".{place.name}-{uuid.uuid4().hex}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        fill(temporary)
        for made in (temporary, *temporary.rglob("*")):
            made.chmod(made.stat().st_mode & _NOT_OTHERS)
        _move(temporary, place)
    except OSError as error:
        raise ToolError(f"cannot write {folder}: {error.strerror}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_free(place: Path) -> None:
    """Only an empty directory, or one that was written here, may give way."""
    try:
        if place.exists() and not place.is_dir():
            raise OptionError(f"{place} is a file; a model is saved to a directory")
        is_taken = place.is_dir() and any(place.iterdir())
        if is_taken and f'"{KIND}' not in (place / MANIFEST).read_text(errors="replace"):  # of any kind
            raise FileNotFoundError
    except FileNotFoundError as error:
        raise OptionError(
            f"{place} holds other files, which saving a model there would remove; choose an empty or a new directory"
        ) from error
    except OSError as error:
        raise ToolError(f"cannot write {place}: {error.strerror}") from error


def _move(temporary: Path, place: Path) -> None:
    try:
        os.rename(temporary, place)  # where there is nothing, or an empty directory
        return
    except OSError:
        if not place.is_dir():
            raise
    old = place.with_name(f".{place.name}-{uuid.uuid4().hex}")
    os.rename(place, old)
    try:
        os.rename(temporary, place)
    except OSError:
        os.rename(old, place)
        raise
    # whoever has the old files open or mapped keeps them
    with contextlib.suppress(OSError):
        shutil.rmtree(old)


def read_manifest(folder: Path, *, trust: bool = False) -> str:
    """The text of a saved model's manifest, or an error in one line: also where the directory is another user's and
    not to be trusted unseen."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ModelError(f"'{folder}' {what}; give a directory that model.save or 'tilewright compile' wrote")
    try:
        if not trust:
            check(folder.stat(), folder, f"'{folder}'")
            check_way(folder)
        with opened(folder / MANIFEST, trust=trust) as file:
            return file.read().decode("utf-8")
    except FileNotFoundError as error:
        raise ModelError(f"'{folder}' is not a saved model: it has no {MANIFEST}") from error
    except ForeignError as error:
        raise foreign(error) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"'{folder}': its {MANIFEST} cannot be read; save the model again") from error


def sums(folder: Path, names: Iterable[str] | None = None) -> dict[str, str]:
    """Every file below the directory, or these, with its checksum."""
    every = (path for path in folder.rglob("*") if path.is_file())
    found = {}
    for path in sorted(every if names is None else (folder / name for name in names)):
        with path.open("rb") as file:
            found[path.relative_to(folder).as_posix()] = checksum(file)
    return found


def check_files(folder: Path, files: Mapping[str, str], *, trust: bool = False) -> None:
    """Every file is there and as it was written, and this user's own unless it is trusted unseen."""
    for name, recorded in files.items():
        path = folder / name
        try:
            if not trust and path.parent != folder:
                check(path.parent.stat(), path.parent, f"'{path.parent}'")
            with opened(path, trust=trust) as file:
                found = checksum(file)
        except ForeignError as error:
            raise foreign(error) from error
        except FileNotFoundError as error:
            raise ModelError(f"{folder}: the file {name} is missing; save the model again") from error
        except OSError as error:
            raise ModelError(f"{folder}: the file {name} cannot be read: {error.strerror}") from error
        if found != recorded:
            raise ModelError(f"{folder}: the file {name} is damaged; save the model again")


def foreign(error: ForeignError) -> ModelError:
    return ModelError(
        f"{error}, and a saved model is code, which runs when it is loaded: give trust=True (--trust) where you trust "
        f"whoever may have written it"
    )
