# SPDX-License-Identifier: Apache-2.0
"""Times decode steps of SGLang on a GPU with one attention backend, and writes greedy tokens for a comparison.

    export PYTHONPATH=python/tests_serving
    python3 gpu_sglang.py run fa3 MODEL_FOLDER fa3.json
    python3 gpu_sglang.py run fovea MODEL_FOLDER fovea.json
    python3 gpu_sglang.py compare fa3.json fovea.json

The scheduler, its model and its CUDA graphs run in this process. Further arguments of `run` are NAME=VALUE in JSON:
random=1 draws the weights, the same in every run, so that MODEL_FOLDER needs a config.json only; points='[[8, 4096]]'
are the requests and prompt tokens to time instead of the usual ones, greedy=0 is the number of prompts whose tokens are
written (64), kernels='"torch"' replaces SGLang's kernels by torch where its wheel of kernels is missing
(torch_kernels.py); all others are options of sglang.srt.server_args.ServerArgs: kv_cache_dtype='"fp8_e4m3"'. "compare"
prints the steps of both, and how many of the prompts have equal tokens up to the first near tie.
"""

import json
import sys
import time
from typing import Any

from gpu_comparison import Prompts, compare, greedy_prompts, time_steps, token

_SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "sampling_backend": "pytorch",
    "disable_overlap_schedule": True,
    "disable_radix_cache": True,
    "disable_prefill_cuda_graph": True,
    "cuda_graph_bs_decode": [1, 8, 32, 64],
    "max_running_requests": 64,
    "chunked_prefill_size": 16384,
    "mem_fraction_static": 0.7,
}


def _draw_weights() -> None:
    """Makes dummy weights as large as trained ones, and those of norms 1."""
    import torch
    from sglang.srt.model_loader import loader

    def initialize(model: torch.nn.Module) -> None:
        for drawn, (name, weight) in enumerate(model.named_parameters()):
            if "norm" in name:
                weight.data.fill_(1)
            elif weight.is_floating_point():
                chance = torch.Generator(device=weight.device).manual_seed(drawn)
                weight.data.normal_(0, 0.02, generator=chance)

    loader.initialize_dummy_weights = initialize


def _count_replays() -> list[int]:
    """Returns a list whose only element counts replays of CUDA graphs from now on."""
    import torch

    count = [0]
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph: Any) -> None:
        count[0] += 1
        replay(graph)

    torch.cuda.CUDAGraph.replay = counted
    return count


class Engine:
    """A scheduler in this process."""

    def __init__(self, backend: str, folder: str, **options: Any):
        import engines

        self._engines = engines
        self._added = 0
        self.scheduler = engines.make_scheduler(folder, attention_backend=backend, **(_SETTINGS | options))

    def add(self, prompts: Prompts, new_tokens: int, *, logprobs: bool = False) -> list[Any]:
        """Enqueues prompts and returns their requests."""
        before = len(self.scheduler.waiting_queue)
        for prompt in prompts:
            self._engines.add(self.scheduler, f"request {self._added}", prompt, new_tokens, logprobs=logprobs)
            self._added += 1
        return self.scheduler.waiting_queue[before:]

    def run_until(self, done: Any) -> None:
        while not done():
            self._engines.run_pass(self.scheduler)

    def measure(self, prompts: Prompts, steps: int) -> list[float]:
        """Returns the milliseconds of prompts, and those of a decode step after them."""
        import torch

        requests = self.add(prompts, steps + 64)
        begin = time.perf_counter()
        self.run_until(lambda: all(request.output_ids for request in requests))
        torch.cuda.synchronize()
        prompt_ms = (time.perf_counter() - begin) * 1e3
        for _ in range(4):
            self._engines.run_pass(self.scheduler)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            self._engines.run_pass(self.scheduler)
        torch.cuda.synchronize()
        step_ms = (time.perf_counter() - begin) / steps * 1e3
        self.run_until(lambda: all(request.finished() for request in requests))
        return [prompt_ms, step_ms]

    def greedy(self, prompts: Prompts) -> list[list[list[float]]]:
        requests = self.add(prompts, 256, logprobs=True)
        self.run_until(lambda: all(request.finished() for request in requests))
        result = []
        for request in requests:
            steps = zip(request.output_ids, request.logprob.output_top_logprobs_val, strict=True)
            result.append([token(chosen, list(step)) for chosen, step in steps])
        return result


def run(backend: str, folder: str, out: str, further: list[str]) -> None:
    options = {name: json.loads(value) for name, value in (item.split("=", 1) for item in further)}
    points, greedy = options.pop("points", None), options.pop("greedy", 64)
    if options.pop("kernels", "sglang") == "torch":
        import torch_kernels

        torch_kernels.replace()
    if options.pop("random", 0):
        options["load_format"] = "dummy"
        _draw_weights()
    start = time.perf_counter()
    engine = Engine(backend, folder, **options)
    vocabulary = engine.scheduler.model_config.vocab_size
    engine.measure(greedy_prompts(vocabulary, 2), 4)
    print(f"{backend}: loaded in {time.perf_counter() - start:.1f} s", flush=True)
    replays = _count_replays()
    times = time_steps(engine.measure, vocabulary, points) if points != [] else {}
    result = {"backend": backend, "times": times, "greedy": engine.greedy(greedy_prompts(vocabulary, greedy))}
    print(f"{backend}: {replays[0]} graphs replayed", flush=True)
    assert replays[0] > 0, "no pass ran in a CUDA graph"
    from fovea.sglang import counters, plugin

    if backend in (plugin.NAME, *plugin.overridden()):
        print(counters, flush=True)
        assert counters.layers > 0, "no layer ran in Fovea"
    with open(out, "w", encoding="utf-8") as file:
        json.dump(result, file)


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run(*sys.argv[2:5], sys.argv[5:])
    else:
        compare(*sys.argv[2:4])
