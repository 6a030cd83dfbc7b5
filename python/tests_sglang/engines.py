# SPDX-License-Identifier: Apache-2.0
"""SGLang's scheduler, model runner, models and pools in this process."""

import gc
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.srt.distributed import parallel_state
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs


@dataclass
class Run:
    """The result of one engine: tokens of every prompt, the two best logprobs of each token, and counts."""

    tokens: list[list[int]]
    top: list[list[list[float]]]
    cached_tokens: int
    retractions: int


def make_scheduler(folder: Path | str, **options: Any) -> Scheduler:
    """Makes a scheduler with its model. Options are those of ServerArgs."""
    load_plugins()
    arguments = ServerArgs(model_path=str(folder), **options)
    publish(arguments, role="scheduler")
    return Scheduler(arguments, PortArgs.init_new(arguments), 0, 0, 0, 0, 0, 0, None)


@contextmanager
def scheduler(folder: Path, *, fovea: bool, **options: Any) -> Iterator[Scheduler]:
    """Makes a scheduler with its model. Fovea is in the place of torch_native; options are those of ServerArgs."""
    load_plugins()
    plugin = ATTENTION_BACKENDS["torch_native"]
    if not fovea:
        ATTENTION_BACKENDS["torch_native"] = TorchNativeAttnBackend
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
    try:
        yield make_scheduler(
            folder,
            device="cpu",
            attention_backend="torch_native",
            skip_tokenizer_init=True,
            disable_cuda_graph=True,
            disable_overlap_schedule=True,
            mem_fraction_static=0.5,
            **options,
        )
    finally:
        ATTENTION_BACKENDS["torch_native"] = plugin
        gc.collect()


def generate(folder: Path, prompts: list[list[int]], new_tokens: int, *, fovea: bool, **options: Any) -> Run:
    """Generates greedily from token prompts, twice: the second time finds the prompts of the first in the cache."""
    with scheduler(folder, fovea=fovea, **options) as engine:
        requests = []
        for turn in range(2):
            for index, prompt in enumerate(prompts):
                add(engine, f"{turn}-{index}", prompt, new_tokens, logprobs=True)
            added = list(engine.waiting_queue)
            _run(engine, added)
            requests += added
    return Run(
        tokens=[list(request.output_ids) for request in requests],
        top=[
            [sorted(step, reverse=True)[:2] for step in request.logprob.output_top_logprobs_val] for request in requests
        ],
        cached_tokens=sum(request.cached_tokens for request in requests),
        retractions=sum(request.retraction_count for request in requests),
    )


def add(engine: Scheduler, name: str, prompt: list[int], new_tokens: int, *, logprobs: bool) -> None:
    """Enqueues a prompt for greedy tokens, with the two best logprobs of each if they are wanted."""
    sampling = SamplingParams(temperature=0, max_new_tokens=new_tokens, ignore_eos=True)
    sampling.normalize(None)
    request = TokenizedGenerateReqInput(
        rid=name,
        input_text=None,
        input_ids=array("q", prompt),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=sampling,
        return_logprob=logprobs,
        logprob_start_len=-1,
        top_logprobs_num=2 if logprobs else 0,
        token_ids_logprob=None,
        stream=False,
    )
    engine.process_input_requests([request])


def _run(engine: Scheduler, requests: list[Any]) -> None:
    idle = 0
    while not all(request.finished() for request in requests):
        idle = 0 if run_pass(engine) else idle + 1
        assert idle < 5, "the scheduler has requests, and nothing to run"


def run_pass(engine: Scheduler) -> bool:
    """Runs a pass as Scheduler.event_loop_normal() does. Returns False if there is nothing to run."""
    plan = engine.get_next_batch_to_run(running_batch=engine.running_batch, last_batch=engine.last_batch)
    engine.running_batch = plan.running_batch
    batch = plan.batch_to_run
    if batch is not None:
        engine.process_batch_result(batch, engine.run_batch(batch))
    engine.last_batch = batch
    return batch is not None
