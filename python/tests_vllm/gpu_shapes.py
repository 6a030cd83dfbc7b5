# SPDX-License-Identifier: Apache-2.0
"""Compares Fovea with vLLM's own backends at the shapes of several models, with random weights, on one GPU.

    PYTHONPATH=python/tests_serving python3 python/tests_vllm/gpu_shapes.py OUT_FOLDER [NAME ...]

NAME is a shape of SHAPES; all without names. Engines that fit the GPU together load at the same time; when all have
loaded, they are timed one after the other. OUT_FOLDER gets the results of each engine as it ends, and table.md.
"""

import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_comparison import compare_tokens

_FILES = Path(__file__).parents[2] / "testdata" / "shapes"
_SECONDS = 110  # for an engine to load, and to measure
_GPU_GB = 130


@dataclass
class Shape:
    """A config of testdata/shapes with changes (None removes a key), the backends to compare, points as (requests,
    tokens of a prompt) or None for the usual ones, options of the engine, points whose kernels are written, the prompts
    whose tokens are compared, and the gigabytes of an engine and of its cache."""

    config: str
    backends: list[str]
    points: list[tuple[int, int]] | None
    engine_gb: int
    cache_gb: int
    changes: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    kernels: list[tuple[int, int]] = field(default_factory=list)
    greedy: int = 32


_V3 = {
    "num_hidden_layers": 8,
    "first_k_dense_replace": 8,
    "intermediate_size": 18432,
    "vocab_size": 129280,
    "num_nextn_predict_layers": None,
    "quantization_config": None,
}
_V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_hidden_layers": 8,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 6,
    "num_nextn_predict_layers": None,
    "q_lora_rank": None,
    "quantization_config": None,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}
_GPT_OSS = {
    "num_hidden_layers": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 4,
    "quantization_config": None,
}
_MHA, _MLA = ["FLASH_ATTN", "CUSTOM"], ["FLASHMLA", "FLASH_ATTN_MLA", "CUSTOM"]
_SHORT, _LONG, _MANY = (8, 4096), (1, 16384), (64, 4096)

SHAPES = {
    "DeepSeek-V2-Lite, 8 layers": Shape(
        "deepseek_v3_8th", ["FLASHMLA", "CUSTOM"], [_SHORT, _LONG, _MANY], 17, 3, _V2_LITE
    ),
    "Qwen3-8B": Shape("qwen3_8b", _MHA, None, 63, 41, kernels=[(1, 1024)], greedy=64),
    "Qwen3-8B, fp8 cache": Shape(
        "qwen3_8b", _MHA, [_MANY], 42, 20, options={"kv_cache_dtype": "fp8"}, kernels=[_MANY], greedy=0
    ),
    "Qwen3-8B, 12 layers, fp16": Shape(
        "qwen3_8b", _MHA, [(1, 1024)], 17, 7, {"num_hidden_layers": 12}, {"dtype": "float16"}, greedy=64
    ),
    "DeepSeek-V3, 8 dense layers, 128 heads": Shape(
        "deepseek_v3_8th",
        _MLA,
        [_SHORT, _LONG],
        21,
        1,
        _V3 | {"num_attention_heads": 128, "num_key_value_heads": 128},
        greedy=16,
    ),
    "DeepSeek-V3, 8 dense layers, 16 heads": Shape("deepseek_v3_8th", _MLA, [_SHORT, _LONG, _MANY], 18, 3, _V3),
    "gpt-oss-20b, 8 layers, bf16": Shape(
        "gpt_oss_20b",
        ["FLASH_ATTN", "TRITON_ATTN", "CUSTOM"],
        [_SHORT, _LONG, _MANY],
        26,
        6,
        _GPT_OSS,
        kernels=[_LONG],
    ),
    "Gemma-2-9B, 14 layers": Shape(
        "gemma2_9b",
        _MHA,
        [_SHORT, (1, 7168), (16, 4096)],
        21,
        9,
        {"num_hidden_layers": 14},
        {"max_model_len": 8192},
    ),
}


def write_config(shape: Shape, folder: Path) -> None:
    """Writes the config.json of a shape."""
    config = json.loads((_FILES / f"{shape.config}.json").read_text()) | shape.changes
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({key: value for key, value in config.items() if value is not None or key == "q_lora_rank"})
    (folder / "config.json").write_text(text, encoding="utf-8")


class Engine:
    """A process that runs one shape with one backend: it imports, loads and measures when it is told to."""

    def __init__(self, shape: Shape, backend: str, folder: Path):
        options = shape.options | {
            "points": shape.points,
            "kernels": shape.kernels,
            "greedy": shape.greedy,
            "trace": 1,
            "waits": 1,
            "kv_cache_memory_bytes": shape.cache_gb << 30,
            "gpu_memory_utilization": 0.02,
        }
        arguments = [f"{name}={json.dumps(value)}" for name, value in options.items()]
        script = Path(__file__).with_name("gpu_vllm.py")
        command = [sys.executable, str(script), "run", backend, str(folder), str(folder / f"{backend}.json")]
        self.name = f"{folder.name} {backend}"
        self._log = folder / f"{backend}.log"
        self._loaded = False
        self._process = subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.open("w", encoding="utf-8"),
            text=True,
        )

    def load(self) -> None:
        """Has the process load its model once it has imported vLLM."""
        self._tell("load")

    def wait(self) -> None:
        """Waits until the model is loaded."""
        with self._watched():
            self._loaded = any(line == "loaded\n" for line in self._process.stdout)

    def measure(self) -> None:
        """Has the process measure, and prints what it says."""
        with self._watched():
            if self._loaded:
                self._tell("measure")
                print(f"{self.name}\n{self._process.stdout.read()}", flush=True)
            code = self._process.wait()
        if code != 0:
            print(f"{self.name} ended with {code}\n{self._log.read_text(errors='replace')[-2000:]}", flush=True)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        watchdog = threading.Timer(_SECONDS, self._process.kill)
        watchdog.start()
        yield
        watchdog.cancel()

    def _tell(self, word: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # measure() prints the log of a process that has ended
            print(word, file=self._process.stdin, flush=True)


def _waves(names: list[str]) -> list[list[str]]:
    """Divides shapes, in their order, into groups whose engines fit the GPU together."""
    waves: list[list[str]] = []
    room = 0
    for name in names:
        needed = SHAPES[name].engine_gb * len(SHAPES[name].backends)
        if needed > room:
            waves.append([])
            room = _GPU_GB
        waves[-1].append(name)
        room -= needed
    return waves


def table_rows(name: str, shape: Shape, folder: Path) -> list[str]:
    """Returns the rows of a shape in a Markdown table, and a line about the tokens of each pair of backends. Two of
    vLLM show how far rounding alone brings tokens apart."""
    results = {}
    for backend in shape.backends:
        file = folder / f"{backend}.json"
        if file.exists():
            results[backend] = json.loads(file.read_text())
    ours = results.get("CUSTOM")
    rows = []
    for backend, theirs in results.items() if ours is not None else []:
        for point, (prompt, step) in theirs["times"].items() if backend != "CUSTOM" else []:
            our_prompt, our_step = ours["times"][point]
            rows.append(
                f"| {name} | {point} | {backend} | {step:.3f} | {our_step:.3f} | {(our_step / step - 1) * 100:+.1f} % "
                f"| {prompt:.1f} | {our_prompt:.1f} | {(our_prompt / prompt - 1) * 100:+.1f} % |"
            )
    rows += [f"{name}, {backend}: host {result['host_us']}" for backend, result in results.items()]
    if ours is not None and "waits" in ours:
        rows.append(f"{name}: {ours['waits']}")
    for (first, a), (second, b) in itertools.combinations(results.items(), 2):
        if a["greedy"]:
            rows.append(f"{name}, {first} and {second}: {compare_tokens(a['greedy'], b['greedy'])[0]}")
    return rows


def main(out: Path, names: list[str]) -> None:
    unknown = [name for name in names if name not in SHAPES]
    if unknown:
        raise SystemExit(f"no shapes {unknown}, there are {list(SHAPES)}")
    names = names or list(SHAPES)
    folders = {name: out / "".join(char if char.isalnum() else "_" for char in name) for name in names}
    for name in names:
        write_config(SHAPES[name], folders[name])
    engines = {name: [Engine(SHAPES[name], each, folders[name]) for each in SHAPES[name].backends] for name in names}
    lines = []
    for wave in _waves(names):
        loading = list(itertools.chain.from_iterable(engines[name] for name in wave))
        for engine in loading:
            engine.load()
        for engine in loading:
            engine.wait()
        for name in wave:
            for engine in engines[name]:
                engine.measure()
            lines += table_rows(name, SHAPES[name], folders[name])
            (out / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main(Path(sys.argv[1]), sys.argv[2:])
