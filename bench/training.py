"""Training on two processes beside PyTorch on one: python -m bench.training [--models mlp gpt] [--ways tensor data].

Ten steps of a small model for every way to share it out: how far the losses are from those of PyTorch, and how much of
the weights and moments each rank has. `python -m bench.training plan` plans a step of a GPT whose weights nobody has,
on described devices of which each has so much memory: meshes and stages as they are found, how long that takes, and
what the stages are predicted to take, beside the plan that Alpa published for it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import tilewright.training as training

_STEPS, _BATCH, _TOKENS, _WORDS = 10, 8, 16, 64
_PLANNED_TOKENS = 1024
# mesh, parts of the batch
_WAYS = {"one": ("", 1), "tensor": ("tp=2", 1), "data": ("dp=2", 1), "pipeline": ("pp=2", 4)}
_OPTIMISERS: dict[str, training.SGD | training.Adam] = {"sgd": training.SGD(0.1, 0.9), "adam": training.Adam(1e-2)}
_LIMIT = 3600.0  # seconds that both ranks may take to compile and train


class Perceptron(nn.Module):
    """Layers one behind the other, and the cross entropy of what they choose."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(x), y)


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        each = (batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(self.before(x)).view(each).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * each[-1] ** -0.5
        later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        seen = scores.masked_fill(later, float("-inf")).softmax(-1) @ v
        x = x + self.out(seen.transpose(1, 2).reshape(x.shape))
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


class Transformer(nn.Module):
    """A GPT that is trained on the next word."""

    def __init__(self, words: int = _WORDS, tokens: int = _TOKENS, width: int = 32, heads: int = 4, layers: int = 2):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = self.head(self.norm(self.blocks(self.words(x) + self.places(torch.arange(x.shape[1])))))
        return nn.functional.cross_entropy(found.view(-1, found.shape[-1]), y.view(-1))


def made(name: str) -> tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
    """A model and the batches of ten steps, the same on every process."""
    torch.manual_seed(0)
    if name == "mlp":
        return Perceptron(), [(torch.randn(_BATCH, 32), torch.randint(0, 10, (_BATCH,))) for _ in range(_STEPS)]
    words = [torch.randint(0, _WORDS, (_BATCH, _TOKENS + 1)) for _ in range(_STEPS)]
    return Transformer(), [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in words]


def by_pytorch(name: str, optimiser: str) -> list[float]:
    module, batches = made(name)
    about = _OPTIMISERS[optimiser]
    own: Any = torch.optim.SGD(module.parameters(), about.rate, about.momentum) if isinstance(about, training.SGD) \
        else torch.optim.Adam(module.parameters(), about.rate)  # fmt: skip
    found = []
    for batch in batches:
        own.zero_grad()
        loss = module(*batch)
        loss.backward()
        own.step()
        found.append(loss.item())
    return found


def work(name: str, mesh: str, parts: int, optimiser: str, cluster: str) -> None:
    """One of the processes: compile, train, and tell."""
    module, batches = made(name)
    begun = time.perf_counter()
    step = training.train(module, batches[0], _OPTIMISERS[optimiser], mesh=mesh or None, micro_batches=parts, threads=1,
                          effort="fast", timeout=600.0, cluster=cluster)  # fmt: skip
    compile_s = time.perf_counter() - begun
    losses = [step(*batch) for batch in batches]
    told = {"rank": step.rank, "losses": losses, "bytes": step.bytes, "compile_s": compile_s}
    os.write(1, f"row {json.dumps(told)}\n".encode())
    step.close()


def ran(name: str, way: str, optimiser: str, cluster: str) -> list[dict[str, Any]]:
    mesh, parts = _WAYS[way]
    own = ["-m", "bench.training", "work", name, mesh, str(parts), optimiser, cluster]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if mesh else []
    done = subprocess.run([sys.executable, *launch, *own], text=True, capture_output=True, timeout=_LIMIT, check=False,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    rows = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("row ")]
    if done.returncode or not rows:
        raise RuntimeError(f"{name}, {way}: {done.stdout[-1000:]}{done.stderr[-2000:]}")
    return sorted(rows, key=lambda row: int(row["rank"]))


def compare(names: Sequence[str], ways: Sequence[str], optimisers: Sequence[str], cluster: str) -> int:
    """Status 1 where a loss is further than 1e-4 from PyTorch's."""
    print("| model | optimiser | mesh | parts | largest difference | first and last loss | state of a rank, KiB |")
    print("|---|---|---|---:|---:|---|---|", flush=True)
    worst = 0.0
    for name in names:
        for optimiser in optimisers:
            right = by_pytorch(name, optimiser)
            for way in ways:
                rows = ran(name, way, optimiser, cluster)
                found = rows[0]["losses"]
                off = max(abs(a - b) for a, b in zip(found, right, strict=True))
                worst = max(worst, off)
                sizes = ", ".join(f"{row['bytes'] / 1024:.1f}" for row in rows)
                mesh, parts = _WAYS[way]
                print(f"| {name} | {optimiser} | {mesh or 'one process'} | {parts} | {off:.1e} | {found[0]:.4f}, "
                      f"{found[-1]:.4f} | {sizes} |", flush=True)  # fmt: skip
    return int(worst > 1e-4)


def plan(asked: argparse.Namespace, cluster: str) -> None:
    """A step of a GPT on meshes of a described cluster, planned in processor seconds of this process."""
    from tilewright.distributed.compiling import Asked
    from tilewright.distributed.meshes import parse_mesh
    from tilewright.distributed.training import planned
    from tilewright.errors import OptionError
    from tilewright.ops import lower
    from tilewright.options import Options
    from tilewright.pytorch.training import trained_graph
    from tilewright.transform.clean.fold import fold_constants
    from tilewright.transform.gradient.step import training_step

    parts = asked.parts
    begun = time.process_time()
    with torch.device("meta"):
        module = Transformer(asked.words, _PLANNED_TOKENS, asked.width, asked.heads, asked.layers)
    for part in module.modules():  # one zero for all, whatever their shape
        for name, weight in part.named_parameters(recurse=False):
            setattr(part, name, nn.Parameter(torch.zeros(1).expand(weight.shape)))
    x = torch.zeros(asked.batch // parts, _PLANNED_TOKENS, dtype=torch.int64)
    found = trained_graph(module, (x, x), 1)
    step = training_step(fold_constants(lower(found.graph)), found.weights, training.Adam(1e-4), parts)
    count = sum(math.prod(array.shape) for array in found.weights.values())
    print(f"{count / 1e9:.1f} billion weights, {len(step.program.computes)} computes, {parts} parts, at most "
          f"{asked.memory or 'any memory'} a device of {cluster}; read and differentiated in "
          f"{time.process_time() - begun:.1f} s of processor time; predictions in float32", flush=True)  # fmt: skip
    for mesh in asked.mesh:
        begun = time.process_time()
        options = Options(memory=asked.memory)
        try:
            sharded = planned(step, Asked(parse_mesh(mesh), parts, cluster=cluster), options)
        except OptionError as error:
            print(f"{mesh}: {error}", flush=True)
            continue
        spent = time.process_time() - begun
        stages = ", ".join(f"{stage.mesh} {1e3 * stage.seconds:.4g}" for stage in sharded.stages)
        print(f"{mesh}: {sharded.seconds:.4g} s a step on {sharded.ranks} ranks, planned in {spent:.1f} s; stages and "
              f"their ms a part: {stages}", flush=True)  # fmt: skip


def main() -> int:
    if len(sys.argv) > 1 and sys.argv[1] == "work":
        name, mesh, parts, optimiser, cluster = sys.argv[2:]
        work(name, mesh, int(parts), optimiser, cluster)
        return 0
    parser = argparse.ArgumentParser(prog="python -m bench.training", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", nargs="?", choices=("compare", "plan"), default="compare")
    parser.add_argument("--models", nargs="+", choices=("mlp", "gpt"), default=["mlp", "gpt"])
    parser.add_argument("--ways", nargs="+", choices=tuple(_WAYS), default=list(_WAYS))
    parser.add_argument("--optimisers", nargs="+", choices=tuple(_OPTIMISERS), default=["sgd", "adam"])
    parser.add_argument("--cluster", help="as which the links are described: processes, of a plan a100_8x8")
    parser.add_argument("--mesh", nargs="+", default=["auto", "pp=16,tp=4"], help="of a plan, the second as published")
    parser.add_argument("--parts", type=int, default=1024, help="of a plan's batch")
    parser.add_argument("--memory", help="of a plan's devices, each")
    sizes = {"layers": 48, "width": 8192, "heads": 64, "words": 51200, "batch": 1024}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size, help="of a plan's model")
    asked = parser.parse_args()
    if asked.what == "plan":
        plan(asked, asked.cluster or "a100_8x8")
        return 0
    return compare(asked.models, asked.ways, asked.optimisers, asked.cluster or "processes")


if __name__ == "__main__":
    sys.exit(main())
