"""The pages in docs/ run, and print what they show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.update import DOCS, blocks, outputs, pages, run, updated

PAGES = pages()
LONGER = ("devices.md",)  # it starts processes that each compile


def test_the_tutorial_is_among_the_pages() -> None:
    assert "pipeline.md" in [p.name for p in PAGES]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "path", [pytest.param(p, marks=pytest.mark.slow if p.name in LONGER else (), id=p.name) for p in PAGES]
)
def test_page_prints_what_it_shows(path: Path) -> None:
    ran = run(path)
    for block, printed in zip(blocks(path.read_text()), ran.printed, strict=True):
        assert (block.shown or "") == printed, f"{path.name} line {block.line}: run python -m tests.docs.update"
    for name, drawn in ran.pictures.items():
        assert (path.parent / name).read_text() == drawn, f"docs/{name}: run python -m tests.docs.update"
        assert f"]({name})" in path.read_text()


@pytest.mark.parametrize("path", [*sorted(DOCS.glob("*.md")), DOCS.parent / "CONTRIBUTING.md"], ids=lambda p: p.name)
def test_files_that_pages_name_are_there(path: Path) -> None:
    roots = (DOCS.parent, DOCS.parent / "tilewright", DOCS)
    named = re.findall(r"`([a-z_0-9]+/[a-z_0-9/]*[a-z_0-9]\.(?:py|md|h|json))`", path.read_text())
    assert [name for name in named if not any((root / name).is_file() for root in roots)] == []


def test_update_rewrites_only_outputs(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A\n\n```python\nx = 2\nprint(x, '')\n```\n\n```text\n3\n```\n\nwords\n\n```python\ny = x\n```\n\n"
        "```c\nint a;\n```\n\n```python\nprint(y + 1)\n```\nend\n"
    )
    assert updated(page) == (
        "# A\n\n```python\nx = 2\nprint(x, '')\n```\n\n```text\n2\n```\n\nwords\n\n```python\ny = x\n```\n\n"
        "```c\nint a;\n```\n\n```python\nprint(y + 1)\n```\n\n```text\n3\n```\nend\n"
    )


def test_errors_point_into_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A\n\n```python\nx = 1\n1 / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as caught:
        outputs(page)
    assert caught.traceback[-1].lineno == 4  # counted from 0
