# SPDX-License-Identifier: Apache-2.0
"""Translates the settings of vLLM's layers into Fovea's specs, and Fovea's reasons into vLLM's lists."""

import os
from collections.abc import Iterable
from typing import Any

import torch

import fovea
from fovea.torch import dtype_name

WISH_VARIABLE = "FOVEA_VLLM_BACKEND"

_CACHE_DTYPES = {
    "float16": "fp16",
    "bfloat16": "bf16",
    "fp8": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
}
_FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def wish() -> str:
    """Returns the backend wish for fovea.select(): FOVEA_VLLM_BACKEND, "auto" if it is not set."""
    return os.environ.get(WISH_VARIABLE, "auto")


def cache_dtype(kv_cache_dtype: str | None, dtype: torch.dtype) -> str:
    """Returns Fovea's name of a cache type of vLLM. "auto" is the model's `dtype`."""
    if kv_cache_dtype in (None, "auto"):
        return dtype_name(dtype)
    if kv_cache_dtype not in _CACHE_DTYPES:
        raise NotImplementedError(f"kv_cache_dtype {kv_cache_dtype}: Fovea has auto, {', '.join(_CACHE_DTYPES)}")
    return _CACHE_DTYPES[kv_cache_dtype]


def typed_cache(cache: torch.Tensor, kv_cache_dtype: str | None) -> torch.Tensor:
    """Returns an fp8 cache with its type; vLLM hands it over as bytes. Other caches are returned as they are."""
    fp8 = _FP8.get(_CACHE_DTYPES.get(kv_cache_dtype or "", ""))
    return cache if fp8 is None or cache.dtype == fp8 else cache.view(fp8)


def cache_scale(dtype: str, scale: torch.Tensor | None = None) -> str:
    """Returns the kind of scale of a cache, by the layer's tensor of scales if it is known."""
    if not dtype.startswith("fp8"):
        return "none"
    return "per_tensor" if scale is None or scale.numel() == 1 else "per_head"


def mla_spec(
    widths: fovea.MlaSpec, heads: int, scale: float, dtype: torch.dtype, *, batch_invariant: bool
) -> fovea.AttentionSpec:
    """Returns the spec of MLA layers whose queries arrive as the model made them."""
    return fovea.AttentionSpec(
        kind="mla",
        q_heads=heads,
        kv_heads=1,
        q_dtype=dtype_name(dtype),
        batch_invariant=batch_invariant,
        scores=fovea.ScoreSpec(softmax_scale=scale),
        mla=widths,
    )


def mla_cache_spec(widths: fovea.MlaSpec, dtype: str, page_size: int) -> fovea.KvCacheSpec:
    """Returns the spec of a cache of latents and rotary keys of one layer."""
    return fovea.KvCacheSpec(
        layout="mla",
        dtype=dtype,
        scale=cache_scale(dtype),
        kv_heads=1,
        head_dim=widths.row_dim,
        head_dim_v=widths.kv_lora_rank,
        page_size=page_size,
    )


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


def reasons(spec: fovea.AttentionSpec, cache: fovea.KvCacheSpec | None, device: fovea.DeviceInfo | str) -> list[str]:
    """Returns why no backend of Fovea serves the layers. Empty: one does."""
    try:
        fovea.select(spec, cache, limits=fovea.BatchLimits(max_encoder_len=1), device=device, backend=wish())
    except fovea.Error as error:
        return _relevant(str(error).splitlines()) if error.code == "unsupported" else [str(error)]
    return []


def _relevant(lines: Iterable[str]) -> list[str]:
    """Returns the reasons of backends that fit the device and the kind of attention; all, if there is none."""
    rejections: dict[str, list[str]] = {}
    everything = []
    name = ""
    for line in lines:
        everything.append(line.strip())
        if line.endswith(": rejected"):
            name = line.removesuffix(": rejected")
            rejections[name] = []
        elif line.startswith("  ") and name:
            rejections[name].append(line.strip())
    elsewhere = ("device:", "kind:", "kv_layout:", "not_built:")
    fitting = {
        name: texts
        for name, texts in rejections.items()
        if texts and not any(text.startswith(elsewhere) for text in texts)
    }
    return [f"Fovea's {name}: {text}" for name, texts in fitting.items() for text in texts] or everything
