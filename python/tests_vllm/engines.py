# SPDX-License-Identifier: Apache-2.0
"""Real engines of vLLM on a CPU, with vLLM's own attention or with Fovea's in its place."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fovea.vllm.plugin import OVERRIDE_VARIABLE, register
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.logprobs import Logprob
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import _cached_get_attn_backend


@dataclass
class Run:
    """The result of one engine: tokens of every prompt, the two best logprobs of each token, and metrics."""

    tokens: list[list[int]]
    top: list[list[list[float]]]
    preemptions: int
    prefix_hits: int
    accepted_drafts: int


@contextmanager
def _attention(fovea: bool) -> Iterator[None]:
    AttentionBackendEnum.CPU_ATTN.clear_override()
    os.environ[OVERRIDE_VARIABLE] = "CPU_ATTN" if fovea else ""
    register()
    _cached_get_attn_backend.cache_clear()
    try:
        yield
    finally:
        AttentionBackendEnum.CPU_ATTN.clear_override()
        _cached_get_attn_backend.cache_clear()


def generate(folder: Path, prompts: list[list[int]], new_tokens: int, *, fovea: bool, **options: object) -> Run:
    """Generates greedily from token prompts. Options are those of vllm.LLM."""
    with _attention(fovea):
        llm = None
        try:
            llm = LLM(model=str(folder), enforce_eager=True, disable_log_stats=False, **options)
            sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, logprobs=2)
            requests = [{"prompt_token_ids": prompt} for prompt in prompts]
            outputs = []
            # A second pass finds the prompts of the first in the prefix cache.
            for _ in range(2):
                outputs += [output.outputs[0] for output in llm.generate(requests, sampling, use_tqdm=False)]
            metrics = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
        finally:
            if llm is not None:
                llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()
            cleanup_dist_env_and_memory()
    return Run(
        tokens=[list(output.token_ids) for output in outputs],
        top=[[_two_best(step) for step in output.logprobs] for output in outputs],
        preemptions=int(metrics["vllm:num_preemptions"]),
        prefix_hits=int(metrics["vllm:prefix_cache_hits"]),
        accepted_drafts=int(metrics.get("vllm:spec_decode_num_accepted_tokens", 0)),
    )


def _two_best(step: dict[int, Logprob]) -> list[float]:
    return sorted((item.logprob for item in step.values()), reverse=True)[:2]
