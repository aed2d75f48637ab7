"""Runs the official backend suite of the installed `onnx` on this CPU: which cases pass, which natively, and why the
others do not. A case runs in a process of its own kind: it may crash or hang without taking the rest along."""

from __future__ import annotations

import contextlib
import multiprocessing
import re
import signal
import sys
import time
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import onnx

from tilewright.errors import InternalError, TilewrightError
from tilewright.integrations.onnx_backend import PreparedModel, TilewrightBackend
from tilewright.options import FALLBACKS, Options

_DEVICE = "_cpu"
_KINDS = ("node", "simple", "pytorch-converted", "pytorch-operator", "real")
_LEFT_OUT = ("ai.onnx.ml", "ai.onnx.training", "ai.onnx.preview.training")
_REFERENCE = "onnx.reference"
_NATIVE = "error"  # the fallback that refuses whatever has no native code
_POLL_SECONDS = 0.2

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class CaseResult:
    """What became of a case: `how` it passed ("native", or the name of the fallback), or the `reason` it did not."""

    name: str
    how: str = ""
    reason: str = ""

    @property
    def has_passed(self) -> bool:
        return bool(self.how)


@dataclass(frozen=True)
class Report:
    version: str  # of onnx
    results: tuple[CaseResult, ...]
    left_out: int  # cases of training, machine learning and strings

    @property
    def passed(self) -> int:
        return sum(r.has_passed for r in self.results)

    @property
    def native(self) -> int:
        return sum(r.how == "native" for r in self.results)

    @property
    def others(self) -> tuple[CaseResult, ...]:
        return tuple(r for r in self.results if not r.has_passed)

    def reasons(self) -> list[tuple[str, int]]:
        """Reasons that differ in names and numbers alone counted together, the most frequent first."""
        return Counter(general(r.reason) for r in self.others).most_common()

    def to_json(self) -> dict[str, Any]:
        return {
            "onnx": self.version,
            "cases": len(self.results),
            "left_out": self.left_out,
            "passed": self.passed,
            "native": self.native,
            "results": [{"name": r.name, "how": r.how, "reason": r.reason} for r in self.results],
        }


def general(reason: str) -> str:
    """A reason without what is particular to its case."""
    return re.sub(r"-?\d[\d.,e+-]*", "N", re.sub(r"'[^']*'", "'...'", reason))


def case_names(pattern: str = "") -> tuple[list[str], int]:
    """Names of the cases in the suite that are run, and how many others are left out."""
    from onnx.backend.test.loader import load_model_tests

    kept, left_out = [], 0
    for kind in _KINDS:
        for case in load_model_tests(kind=kind):
            if _is_left_out(_model_of(case)):
                left_out += 1
            elif re.search(pattern, case.name):
                kept.append(case.name)
    return sorted(kept), left_out


def run_suite(
    options: Options, *, pattern: str = "", jobs: int = 1, seconds: float = 60.0, tell: Progress | None = None
) -> Report:
    """Every case whose name has the pattern in it, each for at most so many seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the suite's own, while it computes what is expected
        names, left_out = case_names(pattern)
        cases = _cases(options)
    results = _run_all(cases, names, jobs, seconds, tell)
    return Report(onnx.__version__, tuple(results[name] for name in names), left_out)


def _model_of(case: Any) -> onnx.ModelProto | None:
    if case.model is not None:
        return case.model
    where = Path(onnx.__file__).parents[1] / case.url if case.url else Path(case.model_dir, "model.onnx")
    return onnx.load(str(where), load_external_data=False) if where.is_file() else None


def _is_left_out(model: onnx.ModelProto | None) -> bool:
    """Of other domains or about strings, or not in the package."""
    if model is None or any(node.domain in _LEFT_OUT for node in model.graph.node):
        return True
    return any(_element(v.type) == onnx.TensorProto.STRING for v in (*model.graph.input, *model.graph.output))


def _element(kind: onnx.TypeProto) -> int:
    """The element type of a tensor, or of the tensors in a sequence or an optional."""
    while kind.WhichOneof("value") in ("sequence_type", "optional_type"):
        kind = kind.sequence_type.elem_type if kind.HasField("sequence_type") else kind.optional_type.elem_type
    return kind.tensor_type.elem_type


# ---- one case


@dataclass
class _Backend:
    """What ONNX's runner calls: ours, with options of the moment."""

    options: Options
    supports_device: Callable[[str], bool] = field(default=lambda device: device == "CPU")

    def prepare(self, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> PreparedModel:
        return TilewrightBackend.prepare(model, device, options=self.options)


@dataclass(frozen=True)
class _Cases:
    """The suite's own test functions, by name."""

    backend: _Backend
    tests: dict[str, unittest.TestCase]

    def run(self, name: str) -> CaseResult:
        """Natively if it can be, then with what else there is."""
        first = ""
        for fallback in (_NATIVE, *(f for f in FALLBACKS if f != _NATIVE)):
            self.backend.options = self.backend.options.override(fallback=fallback)
            with _unimportable(_REFERENCE) if fallback == _NATIVE else contextlib.nullcontext():
                reason = self._attempt(name)
            if not reason:
                return CaseResult(name, "native" if fallback == _NATIVE else fallback)
            first = first or reason
        return CaseResult(name, reason=first)

    def _attempt(self, name: str) -> str:
        test = self.tests[name]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                getattr(test, name + _DEVICE)()
        except InternalError as error:
            return f"internal error: {_line(error)}"
        except TilewrightError as error:
            return _line(error)
        except AssertionError as error:
            return f"wrong: {_difference(str(error))}"
        except (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
            return f"{type(error).__name__}: {_line(error)}"
        return ""


def _cases(options: Options) -> _Cases:
    from onnx.backend.test.runner import Runner

    backend = _Backend(options)
    tests: dict[str, unittest.TestCase] = {}
    for group in Runner(backend, None).test_cases.values():  # type: ignore[arg-type]
        for name in unittest.defaultTestLoader.getTestCaseNames(group):
            tests[name.removesuffix(_DEVICE)] = group(name)
    return _Cases(backend, tests)


@contextlib.contextmanager
def _unimportable(module: str) -> Iterator[None]:
    """Nothing that runs natively needs ONNX's reference evaluator."""
    hidden = {name: found for name, found in sys.modules.items() if name == module or name.startswith(f"{module}.")}
    sys.modules.update(dict.fromkeys([*hidden, module]))  # type: ignore[arg-type]  # None: an import of it fails
    try:
        yield
    finally:
        del sys.modules[module]
        sys.modules.update(hidden)


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _difference(text: str) -> str:
    """What NumPy's comparison says, in a line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith(("Output", "Mismatched", "Max ", "ACTUAL", "DESIRED"))]
    return "; ".join(telling[:3] or lines[:2]) or "no reason given"


# ---- many cases


def _run_all(
    cases: _Cases, names: Sequence[str], jobs: int, seconds: float, tell: Progress | None
) -> dict[str, CaseResult]:
    waiting = list(reversed(names))
    workers: list[_Worker] = []
    results: dict[str, CaseResult] = {}
    try:
        while len(results) < len(names):
            while waiting and len(workers) < jobs:
                workers.append(_Worker(cases, seconds))
            for worker in workers:
                if worker.case is None and waiting:
                    worker.start(waiting.pop())
            wait([w.connection for w in workers], _POLL_SECONDS)
            for worker in list(workers):
                result = worker.result()
                if result is None:
                    continue
                results[result.name] = result
                if tell is not None:
                    tell(result.name, len(results) / len(names))
                if worker.is_over:
                    workers.remove(worker)
    finally:
        for worker in workers:
            worker.stop()
    return results


class _Worker:
    """A process that runs one case after the other, until one of them takes it down."""

    def __init__(self, cases: _Cases, seconds: float) -> None:
        context = multiprocessing.get_context("fork")  # the cases, which took long to make, come along
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(cases, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.case: str | None = None
        self.seconds = seconds
        self.deadline = 0.0
        self.is_over = False

    def start(self, name: str) -> None:
        self.case = name
        self.deadline = time.monotonic() + self.seconds
        self.connection.send(name)

    def result(self) -> CaseResult | None:
        """What became of the case; None while it runs."""
        if self.case is None:
            return None
        found: CaseResult | None = None
        try:
            if self.connection.poll():
                found = CaseResult(*self.connection.recv())
            elif time.monotonic() > self.deadline:
                found = CaseResult(self.case, reason=f"took more than {self.seconds:g} seconds")
        except EOFError:
            self.process.join()
            found = CaseResult(self.case, reason=f"the process died: {_ending(self.process.exitcode)}")
        if found is None:
            return None
        self.case = None
        if found.reason.startswith(("took more", "the process died")):
            self.stop()
        return found

    def stop(self) -> None:
        self.is_over = True
        self.process.kill()
        self.process.join()
        self.connection.close()


def _serve(cases: _Cases, connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    while True:
        try:
            name = connection.recv()
        except EOFError:
            return
        result = cases.run(name)
        connection.send((result.name, result.how, result.reason))


def _ending(code: int | None) -> str:
    return signal.Signals(-code).name if code is not None and code < 0 else f"exit status {code}"
