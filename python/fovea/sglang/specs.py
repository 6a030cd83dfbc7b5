# SPDX-License-Identifier: Apache-2.0
"""Translates SGLang's layers and settings into Fovea's specs, and names what the plug-in does not serve."""

import os
from typing import Any

import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.runtime_context import get_exec, get_parallel

import fovea
from fovea.serving.specs import mla_spec
from fovea.torch import dtype_name

WISH_VARIABLE = "FOVEA_SGLANG_BACKEND"

_SPECULATION = (None, "EAGLE", "EAGLE3", "NEXTN", "NGRAM", "STANDALONE")


def wish() -> str:
    """Returns the backend wish for fovea.select(): FOVEA_SGLANG_BACKEND, "auto" if it is not set."""
    return os.environ.get(WISH_VARIABLE, "auto")


def refused_model(runner: Any) -> list[str]:
    """Returns what the plug-in does not serve of a model and its settings."""
    arguments, parallel = runner.server_args, get_parallel()
    algorithm = arguments.speculative_algorithm
    cases = {
        "the model has an encoder: the plug-in has no cross attention": runner.model_config.is_encoder_decoder,
        "decode context parallelism is not supported": parallel.dcp_enabled,
        "context parallelism of prompts is not supported": parallel.attn_cp_size > 1,
        f"speculative_algorithm is {algorithm}: the plug-in has {', '.join(_SPECULATION[1:])}": (
            algorithm is not None and algorithm.upper() not in _SPECULATION
        ),
        "windows that depend on the length of the prompt are not supported": getattr(
            runner, "prefill_aware_swa", False
        ),
    }
    return [reason for reason, applies in cases.items() if applies]


def refused_layer(layer: RadixAttention) -> list[str]:
    """Returns what the plug-in does not serve of a layer."""
    cases = {
        "cross attention is not supported": layer.is_cross_attention,
        "tokens of images see each other: the plug-in does not pass such spans on": (
            layer.attn_type == AttentionType.DECODER_BIDIRECTIONAL
        ),
        "windows in encoder layers: Fovea's windows look back only": (
            layer.attn_type == AttentionType.ENCODER_ONLY and window(layer) > 0
        ),
        f"logit_capping_method is {layer.logit_capping_method}, Fovea has tanh": (
            layer.logit_cap > 0 and layer.logit_capping_method != "tanh"
        ),
        "xai_temperature_len: scores that depend on the length are not supported": layer.xai_temperature_len > 0,
        f"pos_encoding_mode is {layer.pos_encoding_mode}: queries and keys must arrive rotated": (
            layer.pos_encoding_mode != "NONE"
        ),
    }
    return [f"layer {layer.layer_id}: {reason}" for reason, applies in cases.items() if applies]


def window(layer: RadixAttention) -> int:
    """Returns the tokens that a layer's queries see, themselves included; 0: all. SGLang does not count the token."""
    size = layer.sliding_window_size
    return size + 1 if size is not None and size > -1 else 0


def spec(
    layer: RadixAttention, pool: Any, dtype: torch.dtype, *, chunk: int, tree: bool, sinks: bool
) -> fovea.AttentionSpec:
    """Returns the spec of a layer over a pool. chunk: the tokens of a chunk in models of local attention; tree: drafts
    may be trees."""
    invariant = bool(get_exec().deterministic.enable_deterministic_inference)
    is_mla = isinstance(pool, MLATokenToKVPool)
    if is_mla and layer.qk_head_dim == pool.kv_lora_rank + pool.qk_rope_head_dim:
        widths = fovea.MlaSpec(kv_lora_rank=pool.kv_lora_rank, rope_dim=pool.qk_rope_head_dim)
        absorbed = mla_spec(widths, layer.tp_q_head_num, layer.scaling, dtype, batch_invariant=invariant)
        return absorbed.replace(mask="tree" if tree else "none")
    scope = "decoder"
    if layer.attn_type == AttentionType.ENCODER_ONLY:
        scope = "encoder"
    elif is_mla:
        scope = "ragged"  # keys of whole prompts, up-projected by the model
    in_cache = scope == "decoder"
    return fovea.AttentionSpec(
        scope=scope,
        mask="tree" if tree and in_cache else "none",
        q_heads=layer.tp_q_head_num,
        kv_heads=layer.tp_k_head_num,
        head_dim=layer.qk_head_dim,
        head_dim_v=layer.v_head_dim,
        q_dtype=dtype_name(dtype),
        window=window(layer),
        chunk=chunk if in_cache and layer.use_irope else 0,
        batch_invariant=invariant,
        scores=fovea.ScoreSpec(softmax_scale=layer.scaling, logit_cap=layer.logit_cap, has_sinks=sinks),
    )


def batch_limits(runner: Any) -> fovea.BatchLimits:
    """Returns limits that batches of SGLang's scheduler usually keep; a backend raises them where they do not."""
    arguments = runner.server_args
    table = runner.req_to_token_pool.req_to_token
    requests, kv_len = table.shape
    chunk = arguments.chunked_prefill_size or 0
    tokens = requests + (chunk if chunk > 0 else min(arguments.max_prefill_tokens, runner.max_total_num_tokens))
    return fovea.BatchLimits(max_requests=requests, max_tokens=tokens, max_q_len=min(tokens, kv_len), max_kv_len=kv_len)
