"""Everything that can be chosen about a compilation, as one frozen object; nothing else reads the environment."""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tilewright.errors import OptionError
from tilewright.ir.forms.tensor import Layout
from tilewright.runtime.cache import default_root
from tilewright.runtime.cores import usable_cores
from tilewright.runtime.cpu_model import MAX_THREADS
from tilewright.target import GPUS, stored_machines

TARGETS = ("cpu", *GPUS)
_MEANT = {"gpu": "cuda", "nvidia": "cuda", "cuda:0": "cuda", "host": "cpu", "native": "cpu"}  # by others' names
DESCRIPTION_SUFFIX = ".json"
SCHEDULES = ("connected", "register", "none")
MERGING = ("auto", "off")
CONVOLUTIONS = ("auto", "direct", "winograd")
CONTRACTIONS = ("auto", "direct", "strassen")
DENORMALS = ("flush", "keep")
EFFORTS = ("full", "fast", "adaptive")
COST_MODELS = ("analytic", "tree", "graph")
LEFT_OUT = ("splits", "staging")
FALLBACKS = ("host", "error")
# what plans may be wanted for, and orders of it by name: throughput is the latency of one core of many
OBJECTIVES = ("latency", "footprint", "reuse", "fusion", "parallelism", "compile")
POLICIES = {"latency": ("latency",), "throughput": ("latency",), "memory": ("latency", "footprint"),
            "compile": ("compile", "latency")}  # fmt: skip
PRECISIONS = ("float32", "tf32", "tf32_convolutions", "float16", "bfloat16")
GPU_PRECISIONS = ("tf32", "tf32_convolutions", "float16")

_LOG = logging.getLogger("tilewright")

# hours, minutes, seconds; of seconds alone the unit may be left out
_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?")

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?((?:[KMGT]i?)?B)?")
_UNITS = {"": 1, "B": 1, **{f"{name}iB": 1 << 10 * (n + 1) for n, name in enumerate("KMGT")},
          **{f"{name}B": 1000 ** (n + 1) for n, name in enumerate("KMGT")}}  # fmt: skip

Progress = Callable[[str], None]
"""Called with the name of each stage as it begins."""


@dataclass(frozen=True)
class Tuning:
    """How tuning gets on."""

    left: float  # seconds
    whole: float  # seconds that it may take
    trials: int  # plans of kernels measured
    gain: float  # the model's time over what the best found so far would leave of it, as measured kernel by kernel
    said: str  # what it does now


Watch = Callable[[Tuning], None]


@dataclass(frozen=True)
class Options:
    """What the user chose; every field has a default that suits most models.

    target      the machine to compile for: this CPU, a GPU, one that `tilewright devices` lists, or a .json file that
                describes one
    threads     worker threads on the CPU; None: as many as this process may use
    precision   None: as the model says, a quantised model in integers; "float32": that model in float32 too;
                "bfloat16": operands of contractions and convolutions in 16 bits, sums and the rest in float32. It
                runs everywhere and is fast where the CPU multiplies bfloat16 (AMX, AVX-512 BF16) and on the tensor
                cores of GPUs; for those there are "float16", the same in that type, "tf32": operands are float32
                numbers rounded to 11 significant bits, and "tf32_convolutions": those of convolutions alone, as
                PyTorch does by default
    schedule    "connected" keeps tiles of neighbouring operators on chip; "register" only composes maps into their
                neighbours; "none" is one kernel an operator
    merging     "auto" makes one compute of independent ones that are alike, with their weights put one behind the other
                (the projections of one input, experts, parallel branches), where that is predicted to take no longer;
                "off" leaves them as the model says. Results are the same
    convolution "auto" may compute windows of three by Winograd's algorithm in tiles of two, where it is predicted to
                save time: every result's error is bounded by the pixels of its own window, as that of the direct sum;
                "winograd" also in tiles of four, which save more: the results of a tile then share their rounding
                errors, and what is NaN or infinite in one spoils the others; "direct" always sums as the model says
    contraction "auto" sums every row by itself, so that its error is bounded by its own values: what a whole row is
                scaled by may be applied behind a product, and its mean be taken from constants; "strassen" may compute
                large products with weights by Strassen's algorithm, where it is predicted to save time: neighbouring
                rows (tokens, pixels, samples) then share their rounding errors, and what is NaN or infinite in one
                spoils the other; "direct" always sums as the model says. On GPUs float32 products may run on
                tensor cores as three products of tf32, with float32's error, unless it is "direct"
    denormals   "flush" takes numbers too small for full precision (below 1.2e-38 in float32) as zeros on CPUs, which
                otherwise slow some of them down a hundredfold; "keep" computes with them
    effort      "full" looks for the best code at once; "fast" gives code that may take half as long again in about a
                third of the time: tiles are not connected, computes not merged, the model's own algorithms kept,
                register tiles small, and the C compiler told to hurry; "adaptive" starts with that, has the full
                code compiled meanwhile in a process of the lowest priority, and goes over to it between two calls:
                results may then differ in the last bits, which the log tells
    optimize    what plans are wanted for: "latency", the least time of a call; "throughput", of calls that run at the
                same time on all cores, each on one thread; "memory", the least that a run keeps beside its inputs and
                outputs of plans predicted to take at most a twentieth longer; "compile", little to compile, as
                effort="fast" has it. Or objectives in an order, as ("latency", "fusion"): each but the last keeps the
                plans within a twentieth of its best (docs/policies.md)
    fallback    what happens to strings and images, the only things without native code: "host" lets ONNX's reference
                evaluator run such nodes, and says so; "error" refuses the model, naming the node
    memory      what a run on a CPU may allocate beside its inputs and outputs, "4GiB" or bytes: where the quickest plan
                takes more, one with fewer copies does, or the batch goes through in parts; weights are a file's pages
                and do not count. An error says how much it takes where nothing helps. None: no bound
    device_memory  what a model on a GPU may have there, "8GiB" or bytes, its inputs and outputs among it: weights that
                do not fit pass through a ring of slots, copied from the host ahead of the kernels that read them.
                None: all weights stay on the device
    tune        how long, in all, to measure other plans of the model and keep what is faster: "90s", "2m", "1h30m" or
                seconds as a number. What was measured before counts, and is not measured again; None: nothing is
                measured (docs/tuning.md)
    tune_trials  plans of kernels to measure at most, however much time is left
    tune_arithmetic  whether tuning may choose kernels that take sums in another order, and other algorithms of
                convolutions and products: results then differ in their last bits from those of a model that is not
                tuned, or tuned elsewhere, and `explain` says where
    tune_records  a file of what was measured, which is read, and with `tune` appended to; without `tune` what it says
                is chosen and nothing measured. None: a file in the cache
    tune_watch  called with a `Tuning` as it gets on
    cost_model  what orders the plans of a kernel: "analytic", the fold over the Plan's tree; "tree" or "graph", a
                network fitted to the file that tune_records names, which chooses among the plans that tuning would
                measure. For the extra `learn` (docs/tuning.md)
    without     changes of what is computed that are not made, which tuning measures: "splits" of long sums, "staging"
                of operands
    packed      (name, Layout) pairs: how constants lie in a compiled model that shares them with this one. They lie so
                here too where that is predicted to cost little, so that both may have one copy
    variants    how many sets of shapes a model with open dimensions keeps compiled at once
    dump        a directory that receives every form of the model as text
    stop_after  the stage to stop after
    overrides   (stage, file) pairs: the file, an edited dump, takes the place of that stage's result
    verify      check every stage against the interpreter on random small inputs
    cache_dir   where compiled kernels and packed weights are kept
    compiler    the C compiler's command; None: the first found
    seed        of everything random, such as the inputs that `verify` draws
    progress    called with each stage's name as it begins
    """

    target: str = "cpu"
    threads: int | None = None
    precision: str | None = None
    schedule: str = "connected"
    merging: str = "auto"
    convolution: str = "auto"
    contraction: str = "auto"
    denormals: str = "flush"
    effort: str = "full"
    optimize: str | tuple[str, ...] = "latency"
    fallback: str = "host"
    memory: int | str | None = None
    device_memory: int | str | None = None
    tune: float | str | None = None
    tune_trials: int | None = None
    tune_arithmetic: bool = False
    tune_records: Path | None = None
    tune_watch: Watch | None = field(default=None, compare=False, repr=False)
    cost_model: str = "analytic"
    without: tuple[str, ...] = ()
    packed: tuple[tuple[str, Layout], ...] = ()
    variants: int = 8
    dump: Path | None = None
    stop_after: str | None = None
    overrides: tuple[tuple[str, Path], ...] = ()
    verify: bool = False
    cache_dir: Path = field(default_factory=lambda: default_root({}))
    compiler: str | None = None
    seed: int = 0
    progress: Progress | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("dump", "cache_dir", "tune_records"):
            object.__setattr__(self, name, checked_path(name, getattr(self, name)))
        stages = tuple((stage, checked_path("overrides", file)) for stage, file in checked_pairs(self.overrides))
        object.__setattr__(self, "overrides", stages)
        check_target(self.target)
        check_choice("schedule", self.schedule, SCHEDULES)
        check_choice("merging", self.merging, MERGING)
        check_choice("convolution", self.convolution, CONVOLUTIONS)
        check_choice("contraction", self.contraction, CONTRACTIONS)
        check_choice("denormals", self.denormals, DENORMALS)
        check_choice("effort", self.effort, EFFORTS)
        object.__setattr__(self, "optimize", checked_optimize(self.optimize))
        if self.optimize == "throughput":
            self._check_throughput()
        if self.optimize == "compile":
            self._check_compile()
        check_fallback(self.fallback)
        check_precision(self.precision, self.target)
        if self.threads is not None:
            check_whole_number("threads", self.threads, least=1, most=MAX_THREADS)
        check_whole_number("seed", self.seed, least=0)
        if self.memory is not None:
            object.__setattr__(self, "memory", checked_size("memory", self.memory))
        if self.device_memory is not None:
            object.__setattr__(self, "device_memory", checked_size("device_memory", self.device_memory))
            if self.target not in GPUS:
                raise OptionError("device_memory is what a model may have on a GPU: on a CPU, memory bounds a run")
        if self.tune is not None:
            object.__setattr__(self, "tune", checked_duration("tune", self.tune))
        if self.tune_trials is not None:
            check_whole_number("tune_trials", self.tune_trials, least=1)
        check_yes_or_no("tune_arithmetic", self.tune_arithmetic)
        for name in ("tune_trials", "tune_arithmetic", "tune_watch"):
            if getattr(self, name) and not self.is_tuned:
                raise OptionError(f"{name} is for tuning: give tune=, for how long (tune='2m')")
        check_choice("cost_model", self.cost_model, COST_MODELS)
        if self.is_believed and (self.tune_records is None or self.tune is not None):
            raise OptionError(f"cost_model='{self.cost_model}' is fitted to what was measured before: give it as "
                              "tune_records=, and leave tune out")  # fmt: skip
        for name in self.without:
            check_choice("what is in without", name, LEFT_OUT)
        check_whole_number("variants", self.variants, least=1)

    def _check_throughput(self) -> None:
        if self.target in GPUS:
            raise OptionError("optimize='throughput' is for CPUs: on a GPU, compile for a larger batch")
        if self.threads not in (None, 1):
            raise OptionError(f"optimize='throughput' plans for calls on one thread each, not threads={self.threads}: "
                              "leave threads out, and call the model from several threads")  # fmt: skip
        object.__setattr__(self, "threads", 1)

    def _check_compile(self) -> None:
        if self.effort == "adaptive":
            raise OptionError("optimize='compile' has little to compile, effort='adaptive' compiles everything twice: "
                              "leave one of them out")  # fmt: skip
        object.__setattr__(self, "effort", "fast")

    @property
    def objectives(self) -> tuple[str, ...]:
        """What plans are wanted for, in order."""
        return POLICIES[self.optimize] if isinstance(self.optimize, str) else self.optimize

    @property
    def is_tuned(self) -> bool:
        """Whether plans are chosen by what was measured of them, here or before."""
        return self.tune is not None or self.tune_records is not None

    @property
    def is_believed(self) -> bool:
        """Whether plans are chosen by what a network makes of what was measured."""
        return self.cost_model != "analytic"

    @staticmethod
    def from_environment(environ: Mapping[str, str] | None = None, **given: Any) -> Options:
        """Options from TILEWRIGHT_CACHE, TILEWRIGHT_CC and TILEWRIGHT_THREADS, overruled by what is `given`.

        A given None means "not given".
        """
        variables = os.environ if environ is None else environ
        chosen: dict[str, Any] = {"cache_dir": default_root(variables)}
        if compiler := variables.get("TILEWRIGHT_CC"):
            chosen["compiler"] = compiler
        if threads := variables.get("TILEWRIGHT_THREADS"):
            chosen["threads"] = _threads_from_environment(threads)
        return Options(**(chosen | _present(given)))

    def override(self, **given: Any) -> Options:
        """These options with every `given` value that is not None in place of its own."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        return Options(**(own | _present(given)))


def remark_on_threads(threads: int | None) -> None:
    """Says so where there are more than cores: a stage waits for all of them."""
    if threads is not None and threads > (cores := usable_cores()):
        _LOG.warning("threads=%d on %d cores: workers will wait for each other; leave it out for one thread a core",
                     threads, cores)  # fmt: skip


def check_target(value: object) -> None:
    """A name, or a file; whether the file is there, and right, is seen when it is read."""
    if isinstance(value, str) and value.endswith(DESCRIPTION_SUFFIX):
        return
    known = (*TARGETS, *stored_machines())
    others = f", or a {DESCRIPTION_SUFFIX} file that describes a machine"
    check_choice("target", value, known, others, _MEANT.get(value) if isinstance(value, str) else None)


def check_choice(
    option: str, value: object, allowed: tuple[str, ...], others: str = "", meant: str | None = None
) -> None:
    if value in allowed:
        return
    nearest = difflib.get_close_matches(value, allowed, n=1) if isinstance(value, str) else []
    nearest = nearest if meant is None else [meant]
    hint = f"; did you mean '{nearest[0]}'?" if nearest else ""
    raise OptionError(f"{option} cannot be {value!r}: it is one of {', '.join(allowed)}{others}{hint}")


def check_precision(value: object, target: str = "cpu") -> None:
    if value in GPU_PRECISIONS and target == "cpu":
        raise OptionError(f"precision {value!r} is for GPUs alone, not {target!r}: there is 'bfloat16'")
    if value is None or value in PRECISIONS:
        return
    allowed = f"it is one of {', '.join(PRECISIONS)}, or left out to follow the model"
    if value == "int8":
        raise OptionError(
            "precision 'int8' needs scales that only a quantised model has: quantise the model, "
            "for example with onnxruntime.quantization, and leave precision out"
        )
    raise OptionError(f"precision cannot be {value!r}: {allowed}")


def checked_optimize(value: object) -> str | tuple[str, ...]:
    """A policy by its name, or objectives in an order, none of them twice."""
    if isinstance(value, list | tuple):
        for name in value:
            check_choice("an objective of optimize", name, OBJECTIVES)
        if not value or len(set(value)) < len(value):
            raise OptionError(f"optimize cannot be {value!r}: it is one objective or more, none of them twice")
        return tuple(value)
    others = f", or some of {', '.join(OBJECTIVES)} in an order"
    check_choice("optimize", value, tuple(POLICIES), others)
    assert isinstance(value, str)
    return value


def check_fallback(value: object) -> None:
    check_choice("fallback", value, FALLBACKS)


def checked_path(option: str, value: object) -> Path | None:
    """A path, given as one or as text."""
    if value is None and option in ("dump", "tune_records"):
        return None
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise OptionError(f"{option} cannot be {value!r}: it is a path")
    return Path(value)


def checked_pairs(value: object) -> list[tuple[str, Any]]:
    pairs = list(value) if isinstance(value, list | tuple) else [None]
    if any(not isinstance(p, list | tuple) or len(p) != 2 or not isinstance(p[0], str) for p in pairs):
        raise OptionError(f"overrides cannot be {value!r}: they are pairs of a stage's name and a file")
    return [(stage, file) for stage, file in pairs]  # type: ignore[misc]


def check_whole_number(option: str, value: object, *, least: int, most: int | None = None) -> None:
    # bool is an int in Python, and threads=True is a slip
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise OptionError(f"{option} cannot be {value!r}: it is a whole number, {least} or more")
    if most is not None and value > most:
        raise OptionError(f"{option} cannot be {value!r}: it is at most {most}")


def check_yes_or_no(option: str, value: object) -> None:
    if not isinstance(value, bool):
        raise OptionError(f"{option} cannot be {value!r}: it is True or False")


def checked_duration(option: str, value: object) -> float:
    """Seconds, given as a number or as text with units."""
    seconds = 0.0
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    elif isinstance(value, str) and (found := _DURATION.fullmatch(value.strip())):
        hours, minutes, rest = (float(part or 0) for part in found.groups())
        seconds = 3600 * hours + 60 * minutes + rest
    if not 0 < seconds < float("inf"):
        raise OptionError(f"{option} cannot be {value!r}: it is a duration, as '90s', '2m', '1h30m' or 120 (seconds)")
    return seconds


def checked_size(option: str, value: object) -> int:
    """Bytes, given as a number or as text with a unit."""
    size = 0.0
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str) and (found := _SIZE.fullmatch(value.strip())):
        size = float(found[1]) * _UNITS[found[2] or ""]
    if not 1 <= size < float("inf"):
        raise OptionError(f"{option} cannot be {value!r}: it is a size, as '4GiB', '512MiB' or 1048576 (bytes)")
    return int(size)


def _present(given: Mapping[str, Any]) -> dict[str, Any]:
    names = [each.name for each in fields(Options)]
    for name in given:
        if name not in names:
            raise OptionError(f"there is no option {name!r}; the options are {', '.join(names)}")
    return {name: value for name, value in given.items() if value is not None}


def _threads_from_environment(text: str) -> int:
    if not text.strip().isdecimal():
        raise OptionError(f"TILEWRIGHT_THREADS cannot be {text!r}: it is a whole number, 1 or more")
    return int(text)
