"""What kinds of machines answer: each for itself what is its own, and the Protocol for all others."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

import pytest

from tilewright.backend.cpu.backend import CpuBackend
from tilewright.backend.gpu.backend import GpuBackend
from tilewright.backend.protocol import Backend

KINDS = (CpuBackend, GpuBackend)


def body(method: Any) -> list[ast.stmt]:
    """The statements of a method behind its docstring."""
    (found,) = ast.parse(textwrap.dedent(inspect.getsource(method))).body
    assert isinstance(found, ast.FunctionDef)
    return [s for s in found.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]


def methods(kind: type) -> dict[str, Any]:
    return {name: m for name, m in vars(kind).items() if inspect.isfunction(m) and not name.startswith("_")}


def says_nothing(method: Any) -> bool:
    """Nothing, or what it was given."""
    match body(method):
        case []:
            return True
        case [ast.Return(value=None | ast.Constant() | ast.Name() | ast.Tuple(elts=[]))]:
            return True
        case [ast.Return(value=ast.Call(func=ast.Name(), args=[], keywords=[]))]:
            return True
    return False


@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_answers_for_others(kind: type) -> None:
    """A kind that has nothing to say of something does not say it: the Protocol does, once."""
    assert [name for name, method in methods(kind).items() if says_nothing(method)] == []


def test_what_the_protocol_answers_some_kind_answers_otherwise() -> None:
    answered = {name for name, method in methods(Backend).items() if body(method)}
    assert answered, "what only some kinds have"
    assert answered <= {name for kind in KINDS for name in methods(kind)}


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_protocol_leaves_open_every_kind_answers(kind: type) -> None:
    assert {name for name, method in methods(Backend).items() if not body(method)} <= set(methods(kind))
