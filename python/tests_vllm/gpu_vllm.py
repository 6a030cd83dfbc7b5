# SPDX-License-Identifier: Apache-2.0
"""Times decode steps of vLLM on a GPU with one attention backend, and writes greedy tokens for a comparison.

    export PYTHONPATH=python/tests_serving
    python3 gpu_vllm.py run FLASH_ATTN MODEL_FOLDER flash_attn.json
    python3 gpu_vllm.py run CUSTOM MODEL_FOLDER custom.json
    python3 gpu_vllm.py compare flash_attn.json custom.json

MODEL_FOLDER needs a config.json only: weights are random, and the same in every run. Further arguments of `run` are
NAME=VALUE in JSON: points='[[8, 4096]]' are the requests and prompt tokens to time instead of the usual ones, greedy=0
is the number of prompts whose tokens are written (64), kernels='[[8, 4096]]' are points whose kernels are written and
the functions of the host that take long in a step,
trace=1 has CUSTOM trace a few passes and fail if the host waits for the GPU in the builder or in a layer, waits=1 has
the script wait for a line before it loads the model, say "loaded", and wait for another; all others are options of
vllm.LLM, for example kv_cache_dtype='"fp8"'. With CUSTOM, an operation of torch that makes the host wait is an error in
the builder and in the layers while tokens are generated. "compare" prints the steps of both, and how many of the
prompts have equal tokens up to the first near tie.
"""

import functools
import json
import sys
import time
from typing import Any

from gpu_comparison import Prompts, compare, greedy_prompts, time_steps, token


def _generate(llm: Any, prompts: Prompts, new_tokens: int, **options: Any) -> Any:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, **options)
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)


def _greedy(llm: Any, vocabulary: int, count: int) -> list[list[list[float]]]:
    result = []
    for output in _generate(llm, greedy_prompts(vocabulary, count), 256, logprobs=2):
        pairs = zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
        result.append([token(chosen, [item.logprob for item in step.values()]) for chosen, step in pairs])
    return result


def run(backend: str, folder: str, out: str, further: list[str]) -> None:
    options = {name: json.loads(value) for name, value in (item.split("=", 1) for item in further)}
    points, kernels = options.pop("points", None), options.pop("kernels", [])
    greedy, waits, traced = options.pop("greedy", 64), options.pop("waits", 0), options.pop("trace", 0)
    from gpu_engine import make_engine, measure, refuse_waits
    from gpu_host import host_of_step, host_times
    from gpu_kernels import kernels_of_step
    from gpu_waits import waits_of_passes

    if waits:
        sys.stdin.readline()
    start = time.perf_counter()
    llm = make_engine(backend, folder, **options)
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    _generate(llm, greedy_prompts(vocabulary, 2), 4)
    print(f"{backend}: loaded in {time.perf_counter() - start:.1f} s", flush=True)
    if waits:
        print("loaded", flush=True)
        sys.stdin.readline()

    times = time_steps(functools.partial(measure, llm), vocabulary, points)
    result: dict[str, Any] = {"backend": backend, "times": times}
    with host_times() as host:
        measure(llm, greedy_prompts(vocabulary, 8), 32)
    result["host_us"] = {name: [calls, total / calls] for name, (calls, total) in host.items()}
    print(f"host, calls and microseconds of one: {result['host_us']}", flush=True)
    if backend == "CUSTOM" and traced:
        result["waits"] = waits_of_passes(llm, vocabulary)
        print(f"trace: {result['waits']}", flush=True)
    if backend == "CUSTOM":
        from fovea.vllm import counters

        refuse_waits()
        print(counters, flush=True)
        assert counters.layers > 0, "no layer ran in Fovea"
    result["greedy"] = _greedy(llm, vocabulary, greedy) if greedy else []
    result["kernels"] = {f"{n} x {length}": kernels_of_step(llm, vocabulary, n, length) for n, length in kernels}
    result["host"] = {f"{n} x {length}": host_of_step(llm, vocabulary, n, length) for n, length in kernels}
    with open(out, "w", encoding="utf-8") as file:
        json.dump(result, file)
    if "waits" in result:
        found = result["waits"]
        assert not found["waits"], "the host waits in the builder or in a layer"
        assert found["waits_elsewhere"] and found["ranges"], "the trace lacks calls"


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run(*sys.argv[2:5], sys.argv[5:])
    else:
        compare(*sys.argv[2:4])
