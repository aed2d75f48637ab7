"""The zoo's full models have their published sizes, and the benchmarks count and build what they say."""

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

pytestmark = pytest.mark.filterwarnings("ignore")  # exporters warn about themselves

torch = pytest.importorskip("torch", reason="the zoo needs torch, a development extra")
onnxruntime = pytest.importorskip("onnxruntime", reason="cases are checked in ONNX Runtime")

import tilewright  # noqa: E402
from bench import cpu, kernel_cases, kernels, zoo  # noqa: E402
from bench.arithmetic import Contraction, Convolution, Recurrence, collect, total_operations  # noqa: E402
from bench.peak import measure_peak  # noqa: E402
from bench.plot import grouped_bars  # noqa: E402
from bench.zoo import (  # noqa: E402
    bsrn,
    conformer,
    efficientnet_b0,
    mobilevit_s,
    nafnet,
    nerf,
    resnet50,
    resnext101,
    restormer,
    swin,
    unet,
    vit_s32,
)

MORE = (
    "resnet50",
    "efficientnet_b0",
    "vit_s32",
    "unet",
    "nerf",
    "resnext101",
    "swin_t",
    "swin_b",
    "mobilevit_s",
    "nafnet",
    "bsrn",
    "restormer",
)
ONE_A_KERNEL = ("resnet50", "nerf")  # the other models run one operator a kernel with --all
# like others, and long to compile
LONG = ("bsrn", "mobilevit_s", "nafnet", "resnext101", "restormer", "swin_t", "unet")
EVERY_TIME = {*((name, "connected") for name in MORE if name not in LONG), *((name, "none") for name in ONE_A_KERNEL)}
COMPILED = [
    pytest.param(name, schedule, marks=() if (name, schedule) in EVERY_TIME else pytest.mark.slow)
    for name in MORE
    if name != "swin_b"  # more of swin_t's
    for schedule in ("none", "connected")
] + [pytest.param(n, s, marks=pytest.mark.slow) for n in ("bert_384", "conformer") for s in ("none", "connected")]


@pytest.mark.parametrize(
    ("make", "parameters"),
    [
        (lambda: resnet50.ResNet(resnet50.FULL), 25_557_032),
        (lambda: efficientnet_b0.EfficientNet(efficientnet_b0.FULL), 5_288_548),
        (lambda: vit_s32.VisionTransformer(vit_s32.FULL), 22_878_952),
        (lambda: unet.UNet(unet.FULL), 7_763_041),
        (lambda: nerf.RadianceField(nerf.FULL), 25_348),
        (lambda: resnet50.ResNet(resnext101.FULL), 83_455_272),
        (lambda: swin.Swin(swin.TINY), 28_288_354),
        (lambda: swin.Swin(swin.BASE), 87_768_224),
        (lambda: mobilevit_s.MobileViT(mobilevit_s.FULL), 5_578_632),
        (lambda: nafnet.NAFNet(nafnet.FULL), 17_111_907),
        (lambda: bsrn.Bsrn(bsrn.FULL), 352_400),
        (lambda: restormer.Restormer(restormer.FULL), 26_126_644),
    ],
    ids=MORE,
)
def test_full_models_have_their_published_size(make, parameters: int) -> None:
    with torch.device("meta"):
        module = make()
    assert sum(parameter.numel() for parameter in module.parameters()) == parameters


@pytest.mark.sample(4)
@pytest.mark.parametrize(("name", "schedule"), COMPILED)
def test_compiled_model_is_right(name: str, schedule: str, zoo_file, kernel_cache: Path) -> None:
    module, inputs = zoo.build(name, "small")
    path = zoo_file(name)
    options = tilewright.Options(cache_dir=kernel_cache)
    model = tilewright.compile(str(path), schedule=schedule, threads=2, options=options)
    reference = zoo.reference(module, inputs)
    assert zoo.relative_error(model.run(inputs), reference) < 1e-5


def test_shifted_windows_are_masked() -> None:
    """Rows that a shift has joined to those of the other side see nothing of each other, all others everything."""
    mask = swin.shift_mask(6, 3, 1)
    assert mask.shape == (4, 9, 9) and mask[0].abs().max() == 0.0
    last_row = torch.arange(9) >= 6
    assert torch.equal(mask[2] != 0.0, last_row[:, None] != last_row[None, :])
    pairs = swin.pairs_of_positions(3)
    assert pairs.unique().numel() == 25 and pairs.diagonal().unique().tolist() == [12]


def test_scores_by_distance_become_scores_by_key() -> None:
    """Of n queries, query i and key j meet at distance i - j: far ahead comes first, so in column n - 1 - i + j."""
    scores = torch.arange(2 * 4 * 7.0).view(1, 2, 4, 7)
    found = conformer.aligned(scores)
    assert found.shape == (1, 2, 4, 4)
    assert all(found[0, h, i, j] == scores[0, h, i, 3 - i + j] for h in range(2) for i in range(4) for j in range(4))
    waves = conformer.distances(4, 6)
    assert waves.shape == (7, 6) and waves[3].tolist() == [0.0, 1.0] * 3  # no distance: sine 0, cosine 1
    assert torch.allclose(waves[2, ::2], -waves[4, ::2]) and torch.allclose(waves[2, 1::2], waves[4, 1::2])


def test_recurrences_are_counted(zoo_file) -> None:
    # Four gates of 16, each from 16 inputs and 16 states, over 6 steps.
    assert set(collect(zoo_file("lstm"))) == {Recurrence(6, 1, 4 * 16 * 32)}


def test_attention_is_counted(zoo_file) -> None:
    found = collect(zoo_file("vit_s32"))
    assert found[0] == Convolution((1, 3, 24, 24), (32, 3, 8, 8), strides=(8, 8))
    assert found.count(Contraction(2, 10, 10, 16, False)) == 2  # scores of two heads over ten tokens, each layer
    assert found.count(Contraction(1, 10, 96, 32, True)) == 2


PROBLEMS = [
    Contraction(1, 5, 7, 3, True),
    Contraction(4, 5, 7, 3, False),
    Convolution((1, 6, 9, 11), (4, 3, 3, 3), (2, 2), (1, 1, 1, 1), groups=2),
    Convolution((1, 5, 9, 8), (5, 1, 3, 3), (1, 1), (2, 2, 2, 2), (2, 2), 5),
    Convolution((1, 6, 4, 5), (6, 3, 2, 2), (2, 2), is_transposed=True),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.describe())
def test_single_operator_models(problem: kernel_cases.Problem, tmp_path: Path) -> None:
    """The file says what the problem says, and torch and ONNX Runtime agree on what it means."""
    path = tmp_path / "kernel.onnx"
    kernel_cases.write_model(problem, path)
    onnx.checker.check_model(str(path), full_check=True)
    assert collect(path) == [problem]
    module, inputs = kernel_cases.load_torch(str(path))
    expected = module(*(torch.from_numpy(array) for array in inputs.values())).numpy()
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, inputs)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    if isinstance(problem, Convolution):
        assert found.shape == problem.output


def test_random_cases_are_seeded_and_bounded() -> None:
    cases = kernel_cases.random_cases(60, seed=1)
    assert cases[:20] == kernel_cases.random_cases(20, seed=1)
    assert cases != kernel_cases.random_cases(60, seed=2)
    assert len({case.problem for case in cases}) > 55
    for case in cases:
        assert kernel_cases.SMALLEST_OPERATIONS <= case.problem.operations <= kernel_cases.LARGEST_OPERATIONS
    assert any(isinstance(case.problem, Convolution) and case.problem.is_depthwise for case in cases)
    assert any(isinstance(case.problem, Contraction) and case.problem.rows == 1 for case in cases)


def test_zoo_cases_name_their_models(zoo_file) -> None:
    paths = {name: zoo_file(name) for name in ("mmoe", "nerf")}
    cases = kernel_cases.zoo_cases(paths)
    experts = next(case for case in cases if case.problem == Contraction(1, 3, 8, 12, True))
    assert experts.origin == "mmoe x4" and experts.group == "zoo contraction"
    assert sum(case.problem.operations for case in cases) < sum(map(total_operations, paths.values()))
    chosen = kernels.choose([*cases, *kernel_cases.fixed_cases()], ["square", "contraction"], 2)
    assert [case.group for case in chosen] == ["zoo contraction"] * 2 + ["square"] * 2


def test_peak_is_plausible() -> None:
    peak = measure_peak(1)
    # Slower than this computes without vectors; faster does not exist for one core.
    assert 2e9 < peak.operations_per_second < 1e12
    assert 5e8 < peak.bytes_per_second < 1e12


def test_plot_has_a_bar_for_each_value() -> None:
    text = grouped_bars("a < b", ["one", "two"], {"x": [1.0, 2.0], "y": [None, 0.5]}, marked=1.0)
    assert text.count("<rect") == 1 + 2 + 3 and "no number" in text and "a &lt; b" in text
    with pytest.raises(ValueError, match="one value a group"):
        grouped_bars("", ["one"], {"x": [1.0, 2.0]})


def test_cpu_benchmark_writes_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = "--models mmoe --size small --runtimes tilewright,onnxruntime --rounds 1 --seconds 0.01 --threads 1"
    monkeypatch.setattr(sys, "argv", ["cpu", *arguments.split(), "--results", str(tmp_path)])
    cpu.main()
    document = json.loads((tmp_path / "cpu.json").read_text())
    (model,) = document["models"]
    assert [runtime["error"] for runtime in model["runtimes"]] == [None, None]
    assert document["speedup_over_best_peer"] == pytest.approx(1.0 / model["ratio_to_best_peer"])
    assert document["speedup_without_the_largest"] is None  # there is but one
    assert set(document["times_ours"]) == {r["name"] for r in model["runtimes"]} - {"tilewright"}
    assert model["runtimes"][0]["relative_error"] < model["allowed_error"]
    assert "| mmoe |" in (tmp_path / "cpu.md").read_text()
    assert (tmp_path / "cpu.svg").read_text().startswith("<svg")


@pytest.mark.slow
def test_kernel_benchmark_writes_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = "--models= --random 1 --group random --rounds 1 --seconds 0.01 --threads 1"
    monkeypatch.setattr(sys, "argv", ["kernels", *arguments.split(), "--results", str(tmp_path)])
    kernels.main()
    document = json.loads((tmp_path / "kernels.json").read_text())
    (case,) = document["cases"]
    for name, runtime in case["runtimes"].items():
        assert runtime["error"] is None, name
        assert runtime["difference"] < 1e-5 and runtime["us"] > 0
    assert document["peak"]["threads"] == 1 and "onnxruntime" in document["versions"]
    assert case["problem"] in (tmp_path / "kernels.md").read_text()
