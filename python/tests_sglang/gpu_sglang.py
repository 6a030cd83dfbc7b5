# SPDX-License-Identifier: Apache-2.0
"""Times decode steps of SGLang on a GPU with one attention backend, and writes greedy tokens for a comparison.

    export PYTHONPATH=python/tests_serving
    python3 gpu_sglang.py run fa3 MODEL_FOLDER fa3.json
    python3 gpu_sglang.py run fovea MODEL_FOLDER fovea.json
    python3 gpu_sglang.py compare fa3.json fovea.json

MODEL_FOLDER needs a config.json only: weights are random, and the same in every run. Further arguments of `run` are
options of sglang.Engine as NAME=VALUE in JSON: kv_cache_dtype='"fp8_e4m3"'. "compare" prints the steps of both, and how
many of the prompts have equal tokens up to the first near tie.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from gpu_comparison import compare, greedy_prompts, time_steps, token


def _generate(engine: Any, prompts: list[list[int]], new_tokens: int, **options: Any) -> Any:
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    return engine.generate(input_ids=prompts, sampling_params=sampling, **options)


def _greedy(engine: Any, vocabulary: int) -> list[list[list[float]]]:
    wanted = {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": -1}
    result = []
    for output in _generate(engine, greedy_prompts(vocabulary), 256, **wanted):
        steps = zip(output["output_ids"], output["meta_info"]["output_top_logprobs"], strict=True)
        result.append([token(chosen, [entry[0] for entry in step]) for chosen, step in steps])
    return result


def run(backend: str, folder: str, out: str, further: list[str]) -> None:
    import sglang

    options = {name: json.loads(value) for name, value in (item.split("=", 1) for item in further)}
    start = time.perf_counter()
    engine = sglang.Engine(
        model_path=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        attention_backend=backend,
        context_length=20480,
        mem_fraction_static=0.85,
        cuda_graph_bs_decode=[1, 8, 32, 64, 128],
        disable_radix_cache=True,
        max_running_requests=128,
        chunked_prefill_size=16384,
        random_seed=1,
        **options,
    )
    print(f"{backend}: loaded in {time.perf_counter() - start:.1f} s", flush=True)
    vocabulary = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]

    def seconds(prompts: list[list[int]], new_tokens: int) -> float:
        begin = time.perf_counter()
        _generate(engine, prompts, new_tokens)
        return time.perf_counter() - begin

    def measure(prompts: list[list[int]], steps: int) -> list[float]:
        short, long = seconds(prompts, 2), seconds(prompts, 2 + steps)
        return [short * 1e3, (long - short) / steps * 1e3]

    result = {"backend": backend, "times": time_steps(measure, vocabulary), "greedy": _greedy(engine, vocabulary)}
    engine.shutdown()
    with open(out, "w", encoding="utf-8") as file:
        json.dump(result, file)


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run(*sys.argv[2:5], sys.argv[5:])
    else:
        compare(*sys.argv[2:4])
