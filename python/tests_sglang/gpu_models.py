# SPDX-License-Identifier: Apache-2.0
"""Generates on a GPU from testdata's trained checkpoints, by SGLang's Triton backend and by Fovea, in CUDA graphs.

    PYTHONPATH=python/tests_serving python3 python/tests_sglang/gpu_models.py OUT_FOLDER [--jobs N] [--kernels torch]
        [--prompts 64] [MODEL ...]

Fovea runs over pages of 1 and of 64 tokens, the latter with prefix cache and prompts in chunks among decodes. Every run
is a process of gpu_sglang.py, N at a time. OUT_FOLDER gets their logs, results and table.md. The exit code is 1 if a
run fails or if tokens differ before a near tie.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoints import model_folder
from gpu_comparison import compare_tokens

_SECONDS = 150  # for a run
_OPTIONS = {"dtype": "float16", "context_length": 4096, "max_total_tokens": 131072, "mem_fraction_static": 0.05}
_EXPERTS = {"moe_runner_backend": "triton"}
_NEAR_TIE = {"float16": 0.01, "bfloat16": 0.05}  # difference of two logprobs
_PAGES = {"page_size": 64, "disable_radix_cache": False, "chunked_prefill_size": 512, "enable_mixed_chunk": True}


@dataclass
class Model:
    """A checkpoint of testdata: what its config lacks for SGLang, options, and whether SGLang takes Fovea by its own
    name."""

    config: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    by_name: bool = True


MODELS = {
    "llama": Model(),
    "qwen3": Model(),
    "gemma2": Model({"hidden_act": "gelu_pytorch_tanh"}),
    "gpt_oss": Model({"swiglu_limit": 7.0}, _EXPERTS | {"dtype": "bfloat16"}, by_name=False),
    "deepseek_v3": Model({"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}, _EXPERTS),
}
ENGINES: dict[str, dict[str, Any]] = {"Triton": {}, "Fovea, pages of 1": {}, "Fovea, pages of 64": _PAGES}


def run(name: str, engine: str, out: Path, arguments: argparse.Namespace) -> Path | None:
    """Runs one engine. Returns the file with its tokens, or None if it failed."""
    model = MODELS[name]
    file = out / f"{name}_{''.join(char for char in engine if char.isalnum())}.json"
    options = _OPTIONS | {"points": [], "greedy": arguments.prompts, "kernels": arguments.kernels}
    options |= model.options | ENGINES[engine]
    if model.config:
        options["json_model_override_args"] = json.dumps(model.config)
    overrides = engine != "Triton" and not model.by_name
    backend = "fovea" if engine != "Triton" and model.by_name else "triton"
    script = Path(__file__).with_name("gpu_sglang.py")
    command = [sys.executable, str(script), "run", backend, str(model_folder(name, out)), str(file)]
    command += [f"{key}={json.dumps(value)}" for key, value in options.items()]
    environment = os.environ | {"FOVEA_SGLANG_OVERRIDE": "triton" if overrides else ""}
    with file.with_suffix(".log").open("w", encoding="utf-8") as log:
        try:
            code = subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=_SECONDS).returncode
        except subprocess.TimeoutExpired:
            code = f"more than {_SECONDS} s"
    if code == 0:
        return file
    text = file.with_suffix(".log").read_text(encoding="utf-8", errors="replace")
    print(f"{name}, {engine} ended with {code}\n{text[-1500:]}", flush=True)
    return None


def rows(name: str, files: dict[str, Path | None]) -> tuple[list[str], bool]:
    """Returns the rows of a model in a Markdown table, and whether Fovea's tokens are Triton's up to near ties."""
    tokens = {engine: json.loads(file.read_text())["greedy"] for engine, file in files.items() if file is not None}
    lines, right = [], len(tokens) == len(files)
    for engine in tokens.keys() - {"Triton"} if "Triton" in tokens else []:
        dtype = (_OPTIONS | MODELS[name].options)["dtype"]
        line, agree = compare_tokens(tokens["Triton"], tokens[engine], _NEAR_TIE[dtype])
        lines.append(f"| {name} | {engine} | {line} |")
        right = right and agree
    return sorted(lines), right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("models", nargs="*", metavar="MODEL", choices=[[], *MODELS])
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--kernels", default="sglang", choices=["sglang", "torch"])
    parser.add_argument("--prompts", type=int, default=64)
    arguments = parser.parse_args()
    names = arguments.models or list(MODELS)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in names:
        model_folder(name, arguments.out)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        runs = {
            name: {engine: pool.submit(run, name, engine, arguments.out, arguments) for engine in ENGINES}
            for name in names
        }
        found = [rows(name, {engine: each.result() for engine, each in runs[name].items()}) for name in names]
    lines = [line for each, _ in found for line in each]
    (arguments.out / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines), flush=True)
    return 0 if all(right for _, right in found) else 1


if __name__ == "__main__":
    sys.exit(main())
