"""Documentation that runs: the python blocks of a page run in order, and what one prints is the text block after it.
Pictures that a page draws are those in its variable `pictures`, texts by name of a file beside it.

`python -m tests.docs.update` writes the outputs anew into every page; look at the difference before keeping it.
"""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[2] / "docs"
_BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<text>.*?)^```\n)?", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A piece of code, the line it starts at, and the output the page shows for it (None: no text block follows)."""

    code: str
    line: int
    shown: str | None
    start: int  # of the match in the page
    stop: int


def pages() -> list[Path]:
    """The pages that hold code."""
    return [p for p in sorted(DOCS.glob("*.md")) if _BLOCK.search(p.read_text())]


def blocks(text: str) -> list[Block]:
    found = []
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("code")) + 1
        found.append(Block(match["code"], line, match["text"], match.start(), match.end()))
    return found


@dataclass(frozen=True)
class Ran:
    """A page that has run: what each block printed, and the pictures that it drew."""

    printed: list[str]
    pictures: dict[str, str]


def outputs(path: Path) -> list[str]:
    """What each block prints."""
    return run(path).printed


def run(path: Path) -> Ran:
    """All blocks share one namespace."""
    names: dict[str, Any] = {"__name__": "__main__", "pictures": {}}
    printed = []
    for block in blocks(path.read_text()):
        # empty lines in front make a traceback show the page's own line numbers
        code = compile("\n" * (block.line - 1) + block.code, str(path), "exec")
        with contextlib.redirect_stdout(io.StringIO()) as stream:
            exec(code, names)
        printed.append(_tidy(stream.getvalue()))
    return Ran(printed, names["pictures"])


def updated(path: Path) -> str:
    """The page with what its blocks print now."""
    return _with_outputs(path, run(path).printed)


def _with_outputs(path: Path, outputs: list[str]) -> str:
    text = path.read_text()
    pieces = []
    done = 0
    for block, printed in zip(blocks(text), outputs, strict=True):
        pieces.append(text[done : block.start] + f"```python\n{block.code}```\n")
        if printed:
            pieces.append(f"\n```text\n{printed}```\n")
        done = block.stop
    return "".join(pieces) + text[done:]


def _tidy(text: str) -> str:
    """No blanks at line ends, none at the end: editors take them away."""
    stripped = "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")
    return stripped + "\n" if stripped else ""


def main() -> None:
    for path in pages():
        ran = run(path)
        made = {path: _with_outputs(path, ran.printed), **{DOCS / name: drawn for name, drawn in ran.pictures.items()}}
        for file, text in made.items():
            print(f"{file.name}: {'as it was' if file.exists() and file.read_text() == text else 'changed'}")
            file.write_text(text)


if __name__ == "__main__":
    main()
