# SPDX-License-Identifier: Apache-2.0
"""Translates the settings of vLLM into the arguments of fovea.select()."""

import os
from typing import Any

import fovea

WISH_VARIABLE = "FOVEA_VLLM_BACKEND"


def wish() -> str:
    """Returns the backend wish for fovea.select(): FOVEA_VLLM_BACKEND, "auto" if it is not set."""
    return os.environ.get(WISH_VARIABLE, "auto")


def head_counts(vllm_config: Any) -> tuple[int, int]:
    """Returns the q heads and kv heads of this rank."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    return model.get_num_attention_heads(parallel), model.get_num_kv_heads(parallel)


def batch_limits(vllm_config: Any) -> fovea.BatchLimits:
    """Returns limits that every batch of vLLM's scheduler keeps, padding of CUDA graphs included."""
    scheduler, model = vllm_config.scheduler_config, vllm_config.model_config
    captured = vllm_config.compilation_config.max_cudagraph_capture_size or 0
    tokens = max(scheduler.max_num_batched_tokens, captured)
    speculation = vllm_config.speculative_config
    # A request may run over the model's length by the drafts of its last step, and a table ends with a whole block.
    drafts = 2 * (speculation.num_speculative_tokens or 0) if speculation is not None else 0
    block = vllm_config.cache_config.block_size or 1
    kv_len = -(-(model.max_model_len + drafts) // block) * block
    return fovea.BatchLimits(
        max_requests=min(max(scheduler.max_num_seqs, captured), tokens),
        max_tokens=tokens,
        max_q_len=min(tokens, kv_len),
        max_kv_len=kv_len,
        max_encoder_len=max(scheduler.max_num_encoder_input_tokens or 0, kv_len),
    )


def device_of_platform(capability: Any) -> fovea.DeviceInfo | str:
    """Returns the device that vLLM serves, without a call of the GPU driver, which a later fork would not survive."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return "cpu"
    if capability is None or not current_platform.is_cuda():
        raise NotImplementedError(f"platform {current_platform.device_name}: Fovea has CUDA and CPU")
    return fovea.DeviceInfo(kind="cuda", sm=capability.major * 10 + capability.minor, cores=132)
