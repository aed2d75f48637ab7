"""Machine descriptions as data: what the system tells, what a file tells, and what is wrong with a wrong one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper

import tilewright
from tilewright.errors import OptionError, ToolError
from tilewright.options import Options
from tilewright.runtime import cores
from tilewright.target import from_json, machine, read_target, stored_machines, system, this_cpu

EXAMPLE = Path(tilewright.__file__).with_name("target") / "machines" / "emerald_rapids.json"


@pytest.mark.parametrize("name", ["cpu", "cuda", "cuda-emulated", *stored_machines(), str(EXAMPLE)])
def test_round_trip(name: str) -> None:
    target = machine(name)
    again = from_json(target.to_json())
    assert again == target
    assert again.source == target.source


def test_the_source_of_the_numbers_is_no_part_of_the_machine() -> None:
    target = this_cpu()
    assert replace(target, source="measured some day") == target


def test_the_example() -> None:
    target = machine(str(EXAMPLE))
    assert (target.architecture, target.vector_bytes, target.vector_registers, target.units) == ("x86_64", 64, 32, 2)
    assert target.nearest.name == "L1" and target.local.capacity == 2 << 20 and target.main.name == "DRAM"
    assert target.rate("amx_bf16") == 1.4e12 and target.rate("sdot_int8") is None


def edited(**changes: Any) -> str:
    """The example with fields changed; one that becomes None is left out."""
    description = {**json.loads(EXAMPLE.read_text()), **changes}
    return json.dumps({name: value for name, value in description.items() if value is not None})


def level(**changes: Any) -> list[dict[str, Any]]:
    levels = json.loads(EXAMPLE.read_text())["levels"]
    levels[1] |= changes
    return levels  # type: ignore[no-any-return]


LEVELS = json.loads(EXAMPLE.read_text())["levels"]
WRONG = [
    ("{", "it is not JSON: line 1: "),
    ("[]", "it must be an object, not nothing"),
    (edited(units=None), "the field 'units' is missing"),
    (edited(vector_byte=64), "there is no field 'vector_byte', did you mean 'vector_bytes'?"),
    (edited(units=0), "the field 'units' must be a whole number, 1 or more, not 0"),
    (edited(units=True), "the field 'units' must be a whole number, 1 or more, not true"),
    (edited(fma_rate="fast"), "the field 'fma_rate' must be a number above 0, not \"fast\""),
    (edited(fma_rate=-1.0), "the field 'fma_rate' must be a number above 0, not -1.0"),
    (edited(fma_rate=float("nan")), "the field 'fma_rate' must be a number above 0, not NaN"),
    (edited(kind="tpu"), "the field 'kind' must be cpu or gpu, not \"tpu\""),
    (edited(kind="gpu"), "a gpu needs its 'clock' and the 'latency' of every level but the registers"),
    (edited(lane_multiply=1), "the field 'lane_multiply' must be true or false, not 1"),
    (edited(features="avx2"), "the field 'features' must be a list, not \"avx2\""),
    (edited(rates={"amx_bf16": 0}), "the field 'rates.amx_bf16' must be a number above 0, not 0"),
    (edited(rates=[["amx_bf16", 1]]), "the field 'rates' must be an object of names and numbers, not an object"),
    (edited(vector_bytes=24), "the field 'vector_bytes' must be a power of two, 4 or more, not 24"),
    (edited(levels=level(capacity="48K")), "the field 'levels[1].capacity' must be a whole number, 1 or more, not "),
    (edited(levels=level(bandwith=1.0)), "there is no field 'levels[1].bandwith', did you mean 'bandwidth'?"),
    (edited(levels=LEVELS[:3]), "the levels of a cpu are registers, the nearest cache, that of a core's tiles,"),
    (edited(levels=[*LEVELS, LEVELS[-1]]), "two of the levels have the same name"),
]


@pytest.mark.parametrize(("text", "expected"), WRONG, ids=lambda value: str(value)[:50])
def test_wrong_descriptions(text: str, expected: str) -> None:
    with pytest.raises(OptionError) as caught:
        from_json(text, "my.json")
    message = str(caught.value)
    assert message.replace("my.json is not", "it is not").replace("my.json: ", "").startswith(expected)
    assert message.startswith("my.json")
    assert message.endswith("'tilewright devices cpu --json' prints a whole description to start from")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="No such file or directory; 'tilewright devices cpu --json' prints"):
        read_target(tmp_path / "machine.json")


def product_model() -> ModelProto:
    weights = np.random.default_rng(0).standard_normal((40, 24)).astype(np.float32)
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="product")
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [node], "product", [value("x", TensorProto.FLOAT, [16, 40])], [value("y", TensorProto.FLOAT, [16, 24])],
        [helper.make_tensor("w", TensorProto.FLOAT, weights.shape, weights.tobytes(), raw=True)],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_planning_for_another_machine(kernel_cache: Path) -> None:
    options = Options(target="emerald_rapids", stop_after="source", cache_dir=kernel_cache)
    artifact = tilewright.compile(product_model(), options=options).artifact
    assert artifact.target.name == "emerald_rapids" and artifact.plan is not None
    assert artifact.plan.target == "emerald_rapids"
    assert any("vector_size(64)" in source for source in artifact.sources.values())


@pytest.mark.host
def test_running_for_another_machine_is_refused(tmp_path: Path, kernel_cache: Path) -> None:
    here = this_cpu()
    other = replace(here, name="other", architecture="riscv64")
    path = tmp_path / "other.json"
    path.write_text(other.to_json())
    with pytest.raises(ToolError) as caught:
        tilewright.compile(product_model(), options=Options(target=str(path), cache_dir=kernel_cache))
    assert str(caught.value) == (
        f"the code for target 'other' cannot run here: it is riscv64 and this machine is {here.architecture}; "
        "stop after stage 'source' (--stop-after source) to have its code without running it"
    )


@pytest.mark.host
def test_running_on_this_machine_described_by_hand(tmp_path: Path, kernel_cache: Path) -> None:
    """Vectors of any width are only numbers to the C compiler."""
    path = tmp_path / "mine.json"
    path.write_text(replace(this_cpu(), name="mine", vector_bytes=64).to_json())
    model = tilewright.compile(product_model(), options=Options(target=str(path), cache_dir=kernel_cache))
    inputs = model.random_inputs()
    weights = np.random.default_rng(0).standard_normal((40, 24)).astype(np.float32)
    np.testing.assert_allclose(model(inputs)[0], inputs["x"] @ weights, rtol=1e-4, atol=1e-4)


@pytest.fixture
def caches(tmp_path: Path) -> Callable[..., Path]:
    """A folder as the kernel has it: processors, each with its caches."""

    def make(*rows: tuple[str, str, str, str]) -> Path:
        for number, (level, kind, size, shared) in enumerate(rows):
            folder = tmp_path / "cpu2" / "cache" / f"index{number}"
            folder.mkdir(parents=True)
            facts = {"level": level, "type": kind, "size": size, "shared_cpu_list": shared, "coherency_line_size": "64"}
            for name, text in facts.items():
                (folder / name).write_text(text + "\n")
        return tmp_path

    return make


def test_caches_and_who_shares_them(caches: Callable[..., Path]) -> None:
    root = caches(
        ("1", "Data", "48K", "2,34"), ("1", "Instruction", "32K", "2,34"), ("2", "Unified", "2048K", "2"),
        ("3", "Unified", "105M", "0-31,34"), ("4", "Unified", "unknown", "0"),
    )  # fmt: skip
    found = system.data_caches(frozenset({2, 3, 34}), root)
    assert found == {
        1: system.CacheFacts(48 << 10, 64, 2),
        2: system.CacheFacts(2 << 20, 64, 1),
        3: system.CacheFacts(105 << 20, 64, 3),
    }
    assert system.instruction_cache(frozenset({2, 3, 34}), root) == 32 << 10


def test_a_system_that_tells_nothing(tmp_path: Path) -> None:
    assert system.data_caches(frozenset({0}), tmp_path) == {}
    assert system.instruction_cache(frozenset({0}), tmp_path) is None
    assert system.cpu_flags(tmp_path / "cpuinfo") == frozenset()
    assert system.cpu_model(tmp_path / "cpuinfo")


def test_flags_of_both_architectures(tmp_path: Path) -> None:
    (tmp_path / "x86").write_text("processor : 0\nmodel name : Xeon\nflags\t\t: fma avx2 amx_tile\n\nprocessor : 1\n")
    (tmp_path / "arm").write_text(
        "processor : 0\nFeatures\t: asimd asimddp\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n"
    )
    assert system.cpu_flags(tmp_path / "x86") == {"fma", "avx2", "amx_tile"}
    assert system.cpu_flags(tmp_path / "arm") == {"asimd", "asimddp"}
    assert system.cpu_model(tmp_path / "x86") == "Xeon"
    assert system.cpu_model(tmp_path / "arm").endswith("implementer 0x41 part 0xd0c")


CPU_V1 = "30 24 0:28 {root} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
V2 = "31 24 0:29 {root} /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"


@pytest.mark.parametrize(
    ("mount", "root", "own", "files", "expected"),
    [
        (V2, "/", "0::/\n", {}, None),
        (V2, "/", "0::/\n", {"cpu.max": "max 100000"}, None),
        (V2, "/", "0::/\n", {"cpu.max": "150000 100000"}, 2),
        (V2, "/", "0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "1000 100000"}, 1),  # the group above
        (V2, "/", "0::/a/b\n", {"a/b/cpu.max": "300000 100000", "a/cpu.max": "500000 100000"}, 3),
        (V2, "/", "0::/a\n", {"b/cpu.max": "100000 100000"}, None),  # of others
        (V2, "/docker/1", "0::/docker/1/x\n", {"x/cpu.max": "max 100000", "cpu.max": "200000 100000"}, 2),
        (V2, "/", "0::/../../above\n", {"cpu.max": "200000 100000"}, 2),  # seen from another name space
        (CPU_V1, "/", "4:memory:/m\n3:cpu,cpuacct:/a/b\n0::/\n",
         {"a/cpu.cfs_quota_us": "400000", "a/cpu.cfs_period_us": "100000",
          "a/b/cpu.cfs_quota_us": "-1", "a/b/cpu.cfs_period_us": "100000"}, 4),
        (CPU_V1, "/", "3:cpu,cpuacct:/\n", {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, None),
        ("", "/", "", {}, None),
    ],
)  # fmt: skip
def test_the_time_a_container_has(
    tmp_path: Path, mount: str, root: str, own: str, files: dict[str, str], expected: int | None
) -> None:
    top = tmp_path / "sys/fs/cgroup" / ("cpu,cpuacct" if mount == CPU_V1 else "")
    about = {tmp_path / "proc/self/cgroup": own, tmp_path / "proc/self/mountinfo": mount.format(root=root)}
    for path, text in {**{top / name: text for name, text in files.items()}, **about}.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert cores.quota(tmp_path) == expected
    assert 1 <= len(cores.usable_processors(tmp_path)) <= (expected or 1 << 20)
    assert cores.quota(tmp_path / "nothing") is None


def described(monkeypatch: pytest.MonkeyPatch, flags: set[str], caches: dict[int, system.CacheFacts]) -> Any:
    monkeypatch.setattr(system, "cpu_flags", lambda: frozenset(flags))
    monkeypatch.setattr(system, "data_caches", lambda _usable: caches)
    monkeypatch.setattr(system, "architecture", lambda: "x86_64")
    return this_cpu()


def test_an_outer_cache_counts_where_a_core_gets_more_of_it_than_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = system.CacheFacts
    caches = {1: facts(48 << 10, 64, 1), 2: facts(2 << 20, 64, 1), 3: facts(32 << 20, 64, 8)}
    target = described(monkeypatch, {"avx2"}, caches)
    assert [level.name for level in target.levels] == ["registers", "L1", "L2", "L3", "DRAM"]
    shared = target.shared_cache
    assert shared is not None and (shared.capacity, shared.shared_by) == (4 << 20, 8)
    assert target.local.name == "L2" and target.main.name == "DRAM" and target.nearest.name == "L1"
    crowded = described(monkeypatch, {"avx2"}, caches | {3: facts(32 << 20, 64, 16)})
    assert crowded.shared_cache is None
    assert [level.name for level in crowded.levels] == ["registers", "L1", "L2", "DRAM"]


def test_levels_are_known_by_what_they_are() -> None:
    server = machine("avx2_desktop")
    near = replace(server.nearest, name="L0", capacity=8192)
    # a cache more does not move the others
    deeper = replace(server, levels=(server.registers, near, *server.levels[1:]))
    assert (deeper.nearest, deeper.local, deeper.shared_cache) == (near, server.local, server.shared_cache)
    alone = replace(server, units=1, levels=tuple(replace(x, shared_by=1) for x in server.levels))
    assert alone.local.name == "L2"  # what one core has to itself all the same
    arm = machine("apple_arm")  # whose cores share their second cache
    assert (arm.local.name, arm.shared_cache, arm.beyond_local) == ("L2", None, arm.main)
    gpu = machine("h200")
    assert gpu.local is gpu.nearest and gpu.copies_tiles and [x.name for x in gpu.caches] == ["L2"]
    assert [x.name for x in server.nearer(server.main)] == ["L1", "L2", "L3"] == [x.name for x in server.caches]
    assert server.with_level(server.local, capacity=9).local.capacity == 9


def test_a_gpu_has_a_scratchpad() -> None:
    description = machine("h200").describe()
    for level in description["levels"]:
        del level["scratchpad"]
    assert from_json(json.dumps(description)) == machine("h200")  # as usual, where nothing is said
    description["levels"][1]["scratchpad"] = False
    with pytest.raises(OptionError, match=r"the field 'levels\[1\].scratchpad' must be true"):
        from_json(json.dumps(description))


def test_instructions_follow_the_features(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = described(monkeypatch, {"avx2", "fma"}, {})
    assert (plain.vector_bytes, plain.vector_registers, [name for name, _ in plain.rates]) == (32, 16, ["fma_float32"])
    client = described(monkeypatch, {"avx2", "fma", "avx_vnni"}, {})
    assert client.rate("vnni_int8") is not None
    server = described(monkeypatch, {"avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8"}, {})
    assert (server.vector_bytes, server.vector_registers) == (64, 32)
    names = ["fma_float32", "vnni_int8", "vdp_bf16", "amx_bf16", "amx_int8"]
    assert [name for name, _ in server.rates] == names
