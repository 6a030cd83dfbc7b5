# SPDX-License-Identifier: Apache-2.0
"""Engines of vLLM with random weights, for the scripts that run on a GPU."""

import functools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
from vllm import LLM, SamplingParams
from vllm.model_executor.model_loader import dummy_loader

_SETTINGS: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
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


def make_engine(backend: str, folder: str, **options: Any) -> LLM:
    """Makes an engine with an attention backend by a folder with a config.json. Options are those of vllm.LLM."""
    _draw_weights()
    return LLM(model=folder, attention_config={"backend": backend}, **(_SETTINGS | options))


def _draw_weights() -> None:
    """Makes dummy weights as large as trained ones, and those of norms 1. vLLM's own are below 1e-3, with which a
    prompt yields the same few tokens whatever attention computes."""
    drawn = 0

    def initialize(layer: torch.nn.Module, model_config: Any) -> None:
        nonlocal drawn
        name = type(layer).__name__
        for weight in layer.parameters(recurse=False):
            drawn += 1
            if "Norm" in name:
                weight.data.fill_(0 if "Gemma" in name else 1)
            elif weight.is_floating_point():
                chance = torch.Generator(device=weight.device).manual_seed(drawn)
                weight.data.normal_(0, 0.02, generator=chance)

    dummy_loader.initialize_dummy_weights = initialize


@contextmanager
def decoding(llm: LLM, prompts: list[list[int]], steps: int) -> Iterator[float]:
    """Computes prompts and yields the milliseconds until all had their first token. Each step() of the engine is then
    a decode step of all of them, at least `steps` times."""
    engine = llm.llm_engine
    begin = time.perf_counter()
    sampling = SamplingParams(temperature=0, max_tokens=steps + 64, ignore_eos=True, detokenize=False)
    names = [
        engine.add_request(f"decoding-{index}", {"prompt_token_ids": prompt}, sampling)
        for index, prompt in enumerate(prompts)
    ]
    started: set[str] = set()
    while len(started) < len(prompts):
        started |= {output.request_id for output in engine.step() if output.outputs[0].token_ids}
    yield (time.perf_counter() - begin) * 1e3
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()


def measure(llm: LLM, prompts: list[list[int]], steps: int) -> list[float]:
    """Returns the milliseconds of prompts, and those of a decode step after them."""
    with decoding(llm, prompts, steps + 4) as prompt_ms:
        for _ in range(4):
            llm.llm_engine.step()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            llm.llm_engine.step()
        torch.cuda.synchronize()
        return [prompt_ms, (time.perf_counter() - begin) / steps * 1e3]


def refuse_waits() -> None:
    """Makes an operation of torch in Fovea's builder or layers that waits for the GPU an error."""
    from fovea.serving import layer_group
    from fovea.vllm import metadata

    _refuse_waits(metadata.MetadataBuilder, "build")
    _refuse_waits(layer_group.LayerGroup, "forward")


def _refuse_waits(owner: type, name: str) -> None:
    method = getattr(owner, name)

    @functools.wraps(method)
    def checked(*arguments: Any, **options: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return method(*arguments, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    setattr(owner, name, checked)
