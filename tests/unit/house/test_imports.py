"""Holds the direction of imports between the rooms of the house, and a few rules that are easily broken unseen."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[3] / "tilewright"

# Room -> rooms it may import. `errors` may be imported by all; a room may always import itself.
BELOW_COMPILER = {
    "ir", "target", "ops", "frontend", "transform", "tile_graph", "schedule", "lower", "backend", "intrinsics",
    "render", "runtime",
}  # fmt: skip
COMPILER_AND_BELOW = {"compiler", "options", *BELOW_COMPILER}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "ir": set(),
    "target": {"runtime"},  # its probes are compiled programs
    "ops": {"ir"},
    "frontend": {"ops", "ir"},
    "transform": {"ir", "target"},
    "tile_graph": {"ir", "target", "intrinsics"},
    "lower": {"ir", "target", "tile_graph"},
    "backend": {"ir", "target", "tile_graph", "lower", "intrinsics", "render", "runtime", "options"},
    "schedule": {"ir", "target", "tile_graph", "lower", "backend"},
    "intrinsics": {"ir"},
    "render": {"ir", "target", "intrinsics"},
    "runtime": set(),
    "options": {"ir", "runtime", "target"},  # layouts, names of machines, and where caches are
    "compiler": {"options", *BELOW_COMPILER},
    "calls": {"options"},
    "tune": COMPILER_AND_BELOW,
    "learn": {"tune", "packages", *COMPILER_AND_BELOW},
    "report": {"calls", *COMPILER_AND_BELOW},
    "pytorch": {"frontend", "ir", "calls"},  # what compiles a Graph is handed to it
    "version": set(),
    "packages": {"report", "version", *COMPILER_AND_BELOW},
    "dynamic": {"calls", "compiler", "frontend", "ir", "ops", "options", "packages", "version"},
    "distributed": {"calls", "packages", "report", "version", *COMPILER_AND_BELOW},  # one model on several ranks
    "model": {"calls", "compiler", "ir", "options", "packages", "report", "runtime"},  # what is called
    "api": {
        "calls", "distributed", "dynamic", "learn", "model", "packages", "pytorch", "report", "tune",
        *COMPILER_AND_BELOW,
    },
    "training": {"distributed", "ops", "options", "pytorch", "transform"},  # what a user trains with
    "integrations": {"api", "calls", "dynamic", "frontend", "ir", "model", "options", "pytorch", "runtime"},
    "cli": {
        "api", "calls", "distributed", "dynamic", "integrations", "model", "packages", "report", "tune", "",
        *COMPILER_AND_BELOW,
    },
    "examples": {"api", "cli", "dynamic", "integrations", "model", "report", *COMPILER_AND_BELOW},
    "": {"api", "dynamic", "model", "options", "ops", "version"},  # tilewright/__init__.py
    "__main__": {"cli"},
}  # fmt: skip
FILES = sorted(PACKAGE.rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def room_of(module: str) -> str:
    """The first part below the package: `tilewright.ir.forms.expr` is in `ir`, the package itself in ``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def room_of_file(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else "" if relative.stem == "__init__" else relative.stem


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Imports inside functions count too: a lazy import is as much of a dependency."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the direction"
            assert node.module is not None
            if node.module == "tilewright":
                # `from tilewright import x` may name a room or a name of the package
                yield from (f"tilewright.{a.name}" if is_module(a.name) else "tilewright" for a in node.names)
            else:
                yield node.module


def is_module(name: str) -> bool:
    return (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()


def relative_name(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def of_every_file(check: Callable[[Path], None]) -> Callable[[], None]:
    """One test of all files, which names those that fail."""

    def test() -> None:
        wrong = []
        for path in FILES:
            try:
                check(path)
            except AssertionError as error:
                wrong.append(f"{relative_name(path)}: {error}")
        assert not wrong, "\n".join(wrong)

    test.__doc__ = check.__doc__
    return test


@of_every_file
def test_imports_go_one_way(path: Path) -> None:
    room = room_of_file(path)
    assert room in MAY_IMPORT, f"say in this test what {room} may import"
    ours = [m for m in imported_modules(parsed(path)) if m.split(".")[0] == "tilewright"]
    for module in ours:
        other = room_of(module)
        assert other in MAY_IMPORT[room] | {room, "errors"}, f"{room} may not import {module}"


@of_every_file
def test_only_options_reads_the_environment(path: Path) -> None:
    if path.name == "options.py" and path.parent == PACKAGE:
        return
    for node in ast.walk(parsed(path)):
        reads = isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv")
        assert not reads, f"line {getattr(node, 'lineno', 0)} reads the environment"


@of_every_file
def test_no_reference_implementation_is_used(path: Path) -> None:
    if path == PACKAGE / "dynamic" / "host.py":
        return  # strings and images, on request
    modules = list(imported_modules(parsed(path)))
    assert not [m for m in modules if m.startswith("onnx.reference")]


@of_every_file
def test_every_file_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(parsed(path)), "a module begins with a docstring"


def test_the_rule_is_one_way() -> None:
    """No two rooms may import each other, not even through others."""
    done: set[str] = set()

    def visit(room: str, path: tuple[str, ...]) -> None:
        assert room not in path, f"imports in a circle: {' -> '.join((*path, room))}"
        if room not in done:
            for other in sorted(MAY_IMPORT[room]):
                visit(other, (*path, room))
            done.add(room)

    for room in MAY_IMPORT:
        visit(room, ())


# what its description and its backend do not say yet: how a precision is chosen
_ASKS_THE_KIND = {"transform/precision/choose.py"}


@of_every_file
def test_only_backends_ask_for_the_kind_of_a_machine(path: Path) -> None:
    """Elsewhere a fact of the machine is a property of the Target, or an answer of its backend."""
    if room_of_file(path) in ("target", "backend") or relative_name(path) in _ASKS_THE_KIND:
        return
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Attribute) and node.attr == "kind":
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            is_target = owner in ("target", "goal") and room_of_file(path) not in ("ir", "render")
            assert not is_target, f"line {node.lineno} asks for the kind of a machine"


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def direct_imports(path: Path, known: set[str]) -> set[str]:
    """Modules of ours that a file imports, inside functions too; a package stands for its `__init__` alone."""
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found.update(inside & known or {node.module})
    return found & known - {module_of(path)}


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """Nodes that are left when those that lead nowhere are taken away again and again: in a circle, or before one."""
    left = dict(graph)
    while ended := [node for node, others in left.items() if not others & left.keys()]:
        for node in ended:
            del left[node]
    return sorted(left)


def test_no_two_files_import_each_other() -> None:
    """Not even through others: every file can be read after those it builds on."""
    known = {module_of(path) for path in FILES}
    assert not circle_in({module_of(path): direct_imports(path, known) for path in FILES})


@pytest.mark.parametrize("room", ["ir", "tile_graph", "transform", "ops", "backend/cpu", "backend/gpu"])
def test_no_two_folders_of_a_room_import_each_other(room: str) -> None:
    files = sorted((PACKAGE / room).rglob("*/*.py"))
    known = {module_of(path) for path in files if path.name != "__init__.py"}
    folders: dict[str, set[str]] = {path.parent.name: set() for path in files}
    for path in files:
        mine = path.parent.name
        folders[mine] |= {m.split(".")[-2] for m in direct_imports(path, known)} - {mine}
    assert not circle_in(folders)
