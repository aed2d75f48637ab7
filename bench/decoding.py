"""Text token by token beside other runtimes: a Llama of 4 layers of 512, 8 heads over 2, and 4,000 words.

Every runtime has a process of its own, one awake at a time, rounds alternating; a round is one prompt and the tokens
after it. Prompts are timed apart. Peers keep their caches as they are used to: ONNX Runtime and PyTorch itself let them
grow, OpenVINO makes them states of the model, Inductor compiles Hugging Face's static cache.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.peak import measure_peak
from bench.support import RESULTS, table, write_files
from tilewright.examples.generate import small_llama
from tilewright.report.sidebyside import Worker, WorkerError, describe_machine

RUNTIMES = ("tilewright", "tilewright:onnx", "onnxruntime", "openvino", "torch", "torch:eager")
ROOM = 1280
Start = Callable[[np.ndarray], int]  # a prompt from an empty cache: the first token
Next = Callable[[int], int]  # the token after that one
BOOTSTRAP = "import sys; sys.path[:] = sys.argv[1:]; from bench.decoding import serve; serve()"


def weight_bytes() -> int:
    """What a token reads of the weights: all but the embeddings, of which it reads a row."""
    model = small_llama()
    return sum(p.numel() * 4 for name, p in model.named_parameters() if "embed_tokens" not in name)


class WithPast(torch.nn.Module):
    """A model as its ONNX file has it: past keys and values in, present ones out."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any, *past: Any) -> Any:
        from transformers import DynamicCache

        cache = DynamicCache(zip(past[::2], past[1::2], strict=True))
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        found = self.model(**given, past_key_values=cache, use_cache=True)
        return (found.logits, *(x for layer in cache.layers for x in (layer.keys, layer.values)))


def export(model: Any, path: Path) -> None:
    """An ONNX file with open numbers of past and new tokens."""
    config = model.config
    width = config.hidden_size // config.num_attention_heads
    past = [torch.zeros(1, config.num_key_value_heads, 5, width) for _ in range(2 * config.num_hidden_layers)]
    args = (torch.zeros(1, 3, dtype=torch.int64), torch.ones(1, 8, dtype=torch.int64), torch.arange(5, 8)[None], *past)
    names = [f"past_key_values.{k // 2}.{('key', 'value')[k % 2]}" for k in range(len(past))]
    present = [name.replace("past_key_values", "present") for name in names]
    axes = {
        "input_ids": {1: "tokens"}, "attention_mask": {1: "total"}, "position_ids": {1: "tokens"},
        "logits": {1: "tokens"}, **{n: {2: "past"} for n in names}, **{n: {2: "total"} for n in present},
    }  # fmt: skip
    torch.onnx.export(
        WithPast(model), args, str(path), input_names=["input_ids", "attention_mask", "position_ids", *names],
        output_names=["logits", *present], dynamic_axes=axes, dynamo=False, opset_version=17,
    )  # fmt: skip


def prepare_tilewright(threads: int, path: str, variant: str) -> tuple[Start, Next]:
    from tilewright.examples.generate import Generator
    from tilewright.integrations.decoding import SIZES, from_onnx
    from tilewright.options import Options

    options = Options.from_environment(threads=threads)
    decoder = (from_onnx(path, ROOM, SIZES, options) if variant == "onnx" else
               Generator(small_llama(), ROOM, options=options).decoder)  # fmt: skip
    place = 0

    def start(prompt: np.ndarray) -> int:
        nonlocal place
        (first,) = decoder(prompt, 1)
        place = len(prompt)
        return first

    def following(token: int) -> int:
        nonlocal place
        place += 1
        return int(decoder.scores([token], place - 1).argmax())

    return start, following


def prepare_onnxruntime(threads: int, path: str, variant: str) -> tuple[Start, Next]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    of = onnxruntime.OrtValue.ortvalue_from_numpy
    outputs = [o.name for o in session.get_outputs()]
    names = [i.name for i in session.get_inputs()][3:]
    shape = session.get_inputs()[3].shape
    past: dict[str, Any] = {}
    done = 0

    def run(tokens: np.ndarray) -> int:
        nonlocal past, done
        count = len(tokens)
        given = {"input_ids": tokens[None], "attention_mask": np.ones((1, done + count), np.int64),
                 "position_ids": np.arange(done, done + count)[None]}  # fmt: skip
        found = session.run_with_ort_values(outputs, {**{n: of(a) for n, a in given.items()}, **past})
        past = dict(zip(names, found[1:], strict=True))
        done += count
        return int(found[0].numpy()[0, -1].argmax())

    def start(prompt: np.ndarray) -> int:
        nonlocal past, done
        past = {n: of(np.zeros((1, shape[1], 0, shape[3]), np.float32)) for n in names}
        done = 0
        return run(prompt)

    return start, lambda token: run(np.array([token]))


def prepare_openvino(threads: int, path: str, variant: str) -> tuple[Start, Next]:
    import openvino
    from openvino.passes import MakeStateful, Manager

    core = openvino.Core()
    model = core.read_model(path)
    past = [port.any_name for port in model.inputs[3:]]
    passes = Manager()
    passes.register_pass(MakeStateful(dict(zip(past, (port.any_name for port in model.outputs[1:]), strict=True))))
    passes.run_passes(model)
    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32",
                "KV_CACHE_PRECISION": "f32"}  # fmt: skip
    request = core.compile_model(model, "CPU", settings).create_infer_request()
    done = 0

    def run(tokens: np.ndarray) -> int:
        nonlocal done
        count = len(tokens)
        given = {"input_ids": tokens[None], "attention_mask": np.ones((1, done + count), np.int64),
                 "position_ids": np.arange(done, done + count)[None]}  # fmt: skip
        found = request.infer(given)
        done += count
        return int(found[0][0, -1].argmax())

    def start(prompt: np.ndarray) -> int:
        nonlocal done
        request.reset_state()
        done = 0
        return run(prompt)

    return start, lambda token: run(np.array([token]))


def prepare_torch(threads: int, path: str, variant: str) -> tuple[Start, Next]:
    from transformers import DynamicCache, StaticCache

    torch.set_num_threads(threads)
    model: Any = small_llama()
    step = model if variant == "eager" else torch.compile(model)
    cache: Any = None
    done = 0

    @torch.no_grad()
    def run(call: Any, tokens: torch.Tensor) -> int:
        nonlocal done
        places = torch.arange(done, done + len(tokens))[None]
        found = call(
            input_ids=tokens[None], position_ids=places, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        done += len(tokens)
        return int(found.logits[0, -1].argmax())

    def start(prompt: np.ndarray) -> int:
        nonlocal cache, done
        cache = DynamicCache() if variant == "eager" else StaticCache(config=model.config, max_cache_len=ROOM)
        done = 0
        return run(model, torch.from_numpy(prompt))  # a prompt of any length is not worth a compilation

    return start, lambda token: run(step, torch.tensor([token]))


PREPARE = {"tilewright": prepare_tilewright, "onnxruntime": prepare_onnxruntime, "openvino": prepare_openvino,
           "torch": prepare_torch}  # fmt: skip


def serve() -> None:
    """A worker: prepares one runtime, then obeys requests, JSON lines, until its input ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    calls: tuple[Start, Next] | None = None
    for line in sys.stdin:
        message = json.loads(line)
        if message["command"] == "load":
            name, _, variant = message["runtime"].partition(":")
            begin = time.perf_counter()
            calls = PREPARE[name](message["threads"], message["path"], variant)
            reply: dict[str, Any] = {"tokens": _text(*calls, message["prompt"], 8)[2]}
            reply["cold_start_s"] = time.perf_counter() - begin
        else:
            assert calls is not None
            prompt_s, rest_s, tokens = _text(*calls, message["prompt"], message["count"])
            reply = {"prompt_s": prompt_s, "rest_s": rest_s, "tokens": tokens}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _text(start: Start, following: Next, prompt: Sequence[int], count: int) -> tuple[float, float, list[int]]:
    begin = time.perf_counter()
    made = [start(np.asarray(prompt, np.int64))]
    between = time.perf_counter()
    for _ in range(count):
        made.append(following(made[-1]))
    return between - begin, time.perf_counter() - between, made


def compare(runtimes: Sequence[str], prompt: list[int], count: int, threads: int, rounds: int,
            timeout_s: float) -> list[dict[str, Any]]:  # fmt: skip
    results: dict[str, dict[str, Any]] = {name: {"name": name} for name in runtimes}
    workers: dict[str, Worker] = {}
    with tempfile.TemporaryDirectory(prefix="tilewright-decoding-") as folder:
        path = Path(folder, "llama.onnx")
        export(small_llama(), path)
        try:
            for name in runtimes:
                print(f"loading {name}", file=sys.stderr, flush=True)
                log = Path(folder, name.replace(":", "-"))
                workers[name] = Worker(log.open("w+b"), BOOTSTRAP)  # which closes it
                message = {"command": "load", "runtime": name, "threads": threads, "path": str(path), "prompt": prompt}
                try:
                    loaded = workers[name].request(message, timeout_s)
                    results[name] |= {"cold_start_s": loaded["cold_start_s"], "rates": [], "prompts": []}
                except WorkerError as error:
                    results[name]["error"] = str(error)
                    workers.pop(name).close()
            for index in range(rounds):
                for name in list(workers)[:: 1 if index % 2 == 0 else -1]:
                    found = workers[name].request({"command": "text", "prompt": prompt, "count": count}, timeout_s)
                    results[name]["rates"].append(count / found["rest_s"])
                    results[name]["prompts"].append(1e3 * found["prompt_s"])
                    results[name]["tokens"] = found["tokens"]
        finally:
            for worker in workers.values():
                worker.close()
    return list(results.values())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.decoding", description=__doc__)
    parser.add_argument("--runtimes", default=",".join(RUNTIMES), help="comma-separated (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens after it (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for decoding.json and decoding.md")
    given = parser.parse_args()
    prompt = np.random.default_rng(0).integers(0, 4000, given.prompt).tolist()
    found = compare(given.runtimes.split(","), prompt, given.tokens, given.threads, given.rounds, 1800.0)
    peak = measure_peak(given.threads)
    bound = peak.bytes_per_second / weight_bytes()
    text = to_markdown(found, bound, peak.bytes_per_second, given)
    document = {"machine": describe_machine(), "threads": given.threads, "prompt": given.prompt,
                "tokens": given.tokens, "bytes_per_second": peak.bytes_per_second, "bound": bound,
                "runtimes": found}  # fmt: skip
    write_files(given.results, "decoding", document, text)
    print(text)


def to_markdown(found: Sequence[dict[str, Any]], bound: float, bandwidth: float, given: argparse.Namespace) -> str:
    first = next((r["tokens"] for r in found if "tokens" in r), [])
    rows = []
    for result in found:
        if not result.get("rates"):
            rows.append([result["name"], result.get("error", "-"), "-", "-", "-", "-"])
            continue
        rate = statistics.median(result["rates"])
        alike = sum(a == b for a, b in zip(result["tokens"], first, strict=True))
        rows.append([
            result["name"], f"{rate:.0f}", f"{100 * rate / bound:.0f}%", f"{statistics.median(result['prompts']):.1f}",
            f"{result['cold_start_s']:.1f}", f"{alike} of {len(first)}",
        ])  # fmt: skip
    machine = describe_machine()["processor"]
    return "\n".join([
        "# Decoding", "",
        f"A Llama of 4 layers of 512, 8 heads over 2, 4,000 words, float32, on {machine}, {given.threads} threads: "
        f"a prompt of {given.prompt} tokens, then {given.tokens}; medians of {given.rounds} rounds. The bound is what "
        f"reading the weights once a token takes at the measured {bandwidth / 1e9:.1f} GB/s: {bound:.0f} a second.", "",
        *table(["runtime", "tokens/s", "of the bound", "prompt, ms", "cold start, s", "tokens as ours"], rows), "",
    ])  # fmt: skip


if __name__ == "__main__":
    main()
