"""Layout changes ride in other kernels: of transformers, no more than two kernels only move data."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # exporters warn about themselves

torch = pytest.importorskip("torch", reason="the zoo needs torch, a development extra")

from bench import zoo  # noqa: E402
from tilewright.compiler.pipeline import Artifact, build  # noqa: E402
from tilewright.frontend.onnx.model import load  # noqa: E402
from tilewright.options import Options  # noqa: E402
from tilewright.report.facts import explain_json  # noqa: E402
from tilewright.target import machine  # noqa: E402

MACHINES = ["neoverse_n1", "emerald_rapids", "avx2_desktop", "h200"]


def gpt2(path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="GPT-2 is built from its configuration")
    about = transformers.GPT2Config(vocab_size=997, n_embd=96, n_layer=2, n_head=6, n_positions=64, use_cache=False)
    inner = transformers.GPT2LMHeadModel(about).eval()

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.inner(ids).logits

    ids = torch.randint(0, 997, (1, 41))
    torch.onnx.export(Logits().eval(), (ids,), path, dynamo=True, external_data=False, verbose=False)


def planned(path: Path, name: str) -> Artifact:
    return build(load(path, {}), machine(name), Options(stop_after="plan"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("transformers")
    for name in ("vit_s32", "bert_base", "swin_t"):
        zoo.export(name, "full", folder / f"{name}.onnx")
    gpt2(folder / "gpt2.onnx")
    return {path.stem: path for path in folder.glob("*.onnx")}


@pytest.mark.parametrize("target", MACHINES)
@pytest.mark.parametrize("model", ["vit_s32", "bert_base", "swin_t", "gpt2"])
def test_few_kernels_only_move_data(model: str, target: str, files: dict[str, Path]) -> None:
    kernels = explain_json(planned(files[model], target))["kernels"]
    moving = [k for k in kernels if not k["operations"]]
    assert len(moving) <= 2, [(k["name"], k["nodes"], k["predicted_us"]) for k in moving]
    for kernel in moving:  # each is told with what it would take in its neighbours
        tried = [t for i in kernel["instances"] for pair in i["neighbours"] for t in pair["tried"] if not t["chosen"]]
        assert any(t["predicted_us"] or t["reason"] for t in tried)
