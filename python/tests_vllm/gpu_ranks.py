# SPDX-License-Identifier: Apache-2.0
"""Generates on two GPUs with contexts on one rank and on two (decode context parallelism), and compares the tokens.

    PYTHONPATH=python/tests_serving python3 python/tests_vllm/gpu_ranks.py OUT_FOLDER [MODEL ...]

The models are testdata's trained checkpoints, in two ranks of tensors, with vLLM's own collectives and CUDA graphs.
Engines run at the same time, in processes of this script. OUT_FOLDER gets their logs and tokens. The exit code is 1 if
one fails or if tokens differ before a near tie.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from checkpoints import model_folder
from gpu_comparison import compare_tokens, greedy_prompts, token

_SECONDS = 150
_VOCABULARY = 2048
_PROMPTS = 64
_TWO = {"decode_context_parallel_size": 2}
ENGINES: dict[str, dict[str, Any]] = {
    "one rank": {},
    "two ranks": _TWO,
    "two ranks, all to all, 16 tokens in turn": _TWO | {"dcp_comm_backend": "a2a", "cp_kv_cache_interleave_size": 16},
}
MODELS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "qwen3": (list(ENGINES), {}),
    "deepseek_v3": (["one rank", "two ranks"], {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}),
}
"""Engines of each model, and what its config lacks for vLLM. Heads of keys and values must be fewer than the ranks of
tensors: one, or latents."""


def generate(folder: str, out: str, options: dict[str, Any]) -> None:
    """Writes the greedy tokens of an engine."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder,
        dtype="float16",
        skip_tokenizer_init=True,
        tensor_parallel_size=2,
        max_model_len=4096,
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=2 << 30,
        enable_prefix_caching=False,
        disable_custom_all_reduce=True,
        attention_config={"backend": "CUSTOM"},
        compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 8, 64]},
        **options,
    )
    sampling = SamplingParams(temperature=0, max_tokens=256, ignore_eos=True, detokenize=False, logprobs=2)
    prompts = [{"prompt_token_ids": prompt} for prompt in greedy_prompts(_VOCABULARY, _PROMPTS)]
    result = []
    for output in llm.generate(prompts, sampling, use_tqdm=False):
        pairs = zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
        result.append([token(chosen, [item.logprob for item in step.values()]) for chosen, step in pairs])
    Path(out).write_text(json.dumps({"greedy": result}), encoding="utf-8")


def main(out: Path, models: list[str]) -> int:
    out.mkdir(parents=True, exist_ok=True)
    runs = {}
    for model in models or MODELS:
        folder = model_folder(model, out)
        engines, config = MODELS[model]
        for engine in engines:
            file = out / f"{model}_{''.join(char for char in engine if char.isalnum())}.json"
            with file.with_suffix(".log").open("w", encoding="utf-8") as log:
                options = ENGINES[engine] | {"hf_overrides": config}
                command = [sys.executable, __file__, "run", str(folder), str(file), json.dumps(options)]
                runs[model, engine] = (file, subprocess.Popen(command, stdout=log, stderr=log))
    tokens = {}
    for (model, engine), (file, process) in runs.items():
        try:
            code = process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            code = f"more than {_SECONDS} s"
        if code == 0:
            tokens[model, engine] = json.loads(file.read_text())["greedy"]
        else:
            print(f"{model}, {engine} ended with {code}\n{file.with_suffix('.log').read_text()[-2500:]}", flush=True)
    right = len(tokens) == len(runs)
    for model, engine in tokens:
        if engine != "one rank" and (model, "one rank") in tokens:
            line, agree = compare_tokens(tokens[model, "one rank"], tokens[model, engine])
            print(f"{model}, {engine}: {line}", flush=True)
            right = right and agree
    return 0 if right else 1


if __name__ == "__main__":
    if sys.argv[1] == "run":
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        generate(sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))
    else:
        sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
