# SPDX-License-Identifier: Apache-2.0
"""Times decode steps of vLLM on a GPU with one attention backend, and writes greedy tokens for a comparison.

    python3 gpu_vllm.py run FLASH_ATTN MODEL_FOLDER flash_attn.json
    python3 gpu_vllm.py run CUSTOM MODEL_FOLDER custom.json
    python3 gpu_vllm.py compare flash_attn.json custom.json

MODEL_FOLDER needs a config.json only: weights are random, and the same in every run. Further arguments of `run` are
NAME=VALUE in JSON: points='[[8, 4096]]' are the requests and prompt tokens to time instead of POINTS and a mixture,
greedy=0 is the number of prompts whose tokens are written (64); all others are options of vllm.LLM, for example
kv_cache_dtype='"fp8"'. With CUSTOM, an operation of torch that makes the host wait is an error in the builder and in
the layers. "compare" prints the steps of both, and how many of the prompts have equal tokens up to the first near tie.
"""

import functools
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
POINTS = [(1, 1024), (1, 16384), (8, 4096), (32, 4096), (64, 4096), (128, 1024)]  # requests, tokens of a prompt
NEW_TOKENS = 64
NEAR_TIE = 1e-2  # difference of two logprobs


def _prompts(chance: random.Random, lengths: list[int], vocabulary: int) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": [chance.randrange(vocabulary // 2) for _ in range(length)]} for length in lengths]


def _seconds(llm: Any, prompts: list[dict[str, list[int]]], new_tokens: int) -> float:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    llm.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - start


def _time_steps(llm: Any, vocabulary: int, points: list[tuple[int, int]] | None) -> dict[str, list[float]]:
    """Returns the milliseconds of a prompt with 2 new tokens, and of a step, for each point."""
    chance = random.Random(1)
    mixed = [int(128 * 2 ** chance.uniform(0, 7)) for _ in range(64)]  # log-uniform, 128 to 16384
    cases = {f"{count} x {length}": [length] * count for count, length in points or POINTS}
    if points is None:
        cases["64 mixed"] = mixed
    times = {}
    for name, lengths in cases.items():
        _seconds(llm, _prompts(chance, lengths[:2], vocabulary), 4)
        short = _seconds(llm, _prompts(chance, lengths, vocabulary), 2)
        long = _seconds(llm, _prompts(chance, lengths, vocabulary), 2 + NEW_TOKENS)
        times[name] = [short * 1e3, (long - short) / NEW_TOKENS * 1e3]
        print(f"{name}: prompt + 2 tokens {times[name][0]:.1f} ms, step {times[name][1]:.3f} ms", flush=True)
    return times


def _greedy(llm: Any, vocabulary: int, count: int) -> list[list[list[float]]]:
    """Returns [token, best logprob, second logprob] of 256 new tokens of `count` prompts."""
    from vllm import SamplingParams

    chance = random.Random(2)
    prompts = _prompts(chance, [chance.randrange(16, 2048) for _ in range(count)], vocabulary)
    sampling = SamplingParams(temperature=0, max_tokens=256, ignore_eos=True, detokenize=False, logprobs=2)
    result = []
    for output in llm.generate(prompts, sampling, use_tqdm=False):
        tokens = []
        for token, step in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True):
            best, second = sorted((item.logprob for item in step.values()), reverse=True)[:2]
            tokens.append([token, best, second])
        result.append(tokens)
    return result


def _refuse_waits(owner: type, name: str) -> None:
    """Makes an operation of torch in a method that waits for the GPU an error."""
    import torch

    method = getattr(owner, name)

    @functools.wraps(method)
    def checked(*arguments: Any, **options: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return method(*arguments, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    setattr(owner, name, checked)


def run(backend: str, folder: str, out: str, further: list[str]) -> None:
    from vllm import LLM

    options = {name: json.loads(value) for name, value in (item.split("=", 1) for item in further)}
    points, greedy = options.pop("points", None), options.pop("greedy", 64)
    start = time.perf_counter()
    settings = {
        "model": folder,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "attention_config": {"backend": backend},
        "max_model_len": 20480,
        "gpu_memory_utilization": 0.88,
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 8, 32, 64, 128],
        },
        "enable_prefix_caching": False,
        "max_num_seqs": 128,
        "max_num_batched_tokens": 16384,
    }
    llm = LLM(**settings | options)
    print(f"{backend}: loaded in {time.perf_counter() - start:.1f} s", flush=True)
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    result: dict[str, Any] = {"backend": backend, "times": _time_steps(llm, vocabulary, points)}
    if backend == "CUSTOM":
        from fovea.vllm import counters, layer_group, metadata

        _refuse_waits(metadata.MetadataBuilder, "build")
        _refuse_waits(layer_group.LayerGroup, "forward")
        print(counters, flush=True)
        assert counters.layers > 0, "no layer ran in Fovea"
    result["greedy"] = _greedy(llm, vocabulary, greedy)
    with open(out, "w", encoding="utf-8") as file:
        json.dump(result, file)


def compare(first: str, second: str) -> None:
    a, b = (json.loads(Path(path).read_text()) for path in (first, second))
    for name, (prompt, step) in a["times"].items():
        other_prompt, other_step = b["times"][name]
        print(
            f"{name}: step {a['backend']} {step:.3f} ms, {b['backend']} {other_step:.3f} ms "
            f"({(other_step / step - 1) * 100:+.1f} %); prompt {prompt:.1f} and {other_prompt:.1f} ms "
            f"({(other_prompt / prompt - 1) * 100:+.1f} %)"
        )
    if not a["greedy"]:
        return
    equal = ties = 0
    for own, ours in zip(a["greedy"], b["greedy"], strict=True):
        differing = [step for step, (x, y) in enumerate(zip(own, ours, strict=True)) if x[0] != y[0]]
        if not differing:
            equal += 1
        elif own[differing[0]][1] - own[differing[0]][2] < NEAR_TIE:
            ties += 1
    print(f"{equal} of {len(a['greedy'])} prompts have equal tokens, {ties} more until a near tie")
    assert (equal + ties) / len(a["greedy"]) >= 0.99


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run(*sys.argv[2:5], sys.argv[5:])
    else:
        compare(*sys.argv[2:4])
