# SPDX-License-Identifier: Apache-2.0
"""Answers vLLM's question whether Fovea serves a configuration, with Fovea's reasons."""

from collections.abc import Mapping
from typing import Any

from vllm.config import get_current_vllm_config

import fovea
from fovea.serving.specs import cache_dtype, cache_scale, mla_cache_spec, mla_spec, reasons
from fovea.torch import dtype_name
from fovea.vllm import specs

# Options of newer versions of vLLM that ask for something Fovea's plug-in does not do.
_REFUSED = {
    "use_sparse": "the layers choose tokens by an indexer: Fovea has no such backend yet",
    "use_mm_prefix": "tokens of images see each other: the plug-in does not pass such spans on",
    "use_dcp": "decode context parallelism: the plug-in has it for vLLM before 0.29 alone",
    "use_pcp": "prefill context parallelism is not supported",
    "use_rswa": "retrieval windows are not supported",
    "use_adaptive_verification": "adaptive verification is not supported",
}
_KNOWN = {
    "head_size",
    "dtype",
    "kv_cache_dtype",
    "block_size",
    "use_mla",
    "has_sink",
    "use_per_head_quant_scales",
    "device_capability",
    "attn_type",
    "use_non_causal",
    "use_batch_invariant",
    "use_kv_connector",
    "has_sliding_window",
}


def mha_reasons(scopes: Mapping[str, str], options: Mapping[str, Any]) -> list[str]:
    """Returns the reasons against a configuration. `options`: the arguments of vLLM's validate_configuration();
    `scopes`: Fovea's scope for each kind of attention of vLLM."""
    found = refused(options)
    if options["use_mla"]:
        found.append("the model uses MLA: choose CUSTOM, or override FLASHMLA instead of FLASH_ATTN")
    scope = scopes.get(options["attn_type"])
    if scope is None:
        return [*found, f"attention type {options['attn_type']} is not supported"]
    q_heads, kv_heads = specs.head_counts(get_current_vllm_config())
    try:
        dtype = cache_dtype(options["kv_cache_dtype"], options["dtype"])
        spec = fovea.AttentionSpec(
            scope="cross" if options.get("use_non_causal") and scope == "decoder" else scope,
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_dim=options["head_size"],
            q_dtype=dtype_name(options["dtype"]),
            window=128 if options.get("has_sliding_window") else 0,  # any width has the same answer
            batch_invariant=bool(options.get("use_batch_invariant")),
            scores=fovea.ScoreSpec(has_sinks=options["has_sink"]),
        )
        cache = fovea.KvCacheSpec(
            dtype=dtype,
            scale="per_head" if options["use_per_head_quant_scales"] else cache_scale(dtype),
            kv_heads=kv_heads,
            head_dim=options["head_size"],
            page_size=options["block_size"] or 16,
        )
        return found + reasons(spec, cache, specs.device_of_platform(options["device_capability"]), specs.wish())
    except (NotImplementedError, TypeError, fovea.Error) as error:
        return [*found, str(error)]


def mla_reasons(options: Mapping[str, Any]) -> list[str]:
    """Returns the reasons against a configuration of MLA layers, as mha_reasons()."""
    found = refused(options)
    if not options["use_mla"]:
        return [*found, "the model has no MLA: choose CUSTOM, or override FLASH_ATTN instead of FLASHMLA"]
    config = get_current_vllm_config()
    model = config.model_config.hf_text_config
    widths = fovea.MlaSpec(
        kv_lora_rank=model.kv_lora_rank,
        rope_dim=model.qk_rope_head_dim,
        nope_dim=model.qk_nope_head_dim,
        v_dim=model.v_head_dim,
    )
    try:
        dtype = cache_dtype(options["kv_cache_dtype"], options["dtype"])
        spec = mla_spec(
            widths,
            specs.head_counts(config)[0],
            0,
            options["dtype"],
            batch_invariant=bool(options.get("use_batch_invariant")),
        )
        cache = mla_cache_spec(widths, dtype, options["block_size"] or 64)
        return found + reasons(spec, cache, specs.device_of_platform(options["device_capability"]), specs.wish())
    except (NotImplementedError, TypeError, fovea.Error) as error:
        return [*found, str(error)]


def refused(options: Mapping[str, Any]) -> list[str]:
    """Returns the reasons against options that the plug-in never serves or does not know."""
    found = [reason for name, reason in _REFUSED.items() if options.get(name)]
    unknown = [name for name, value in options.items() if value and name not in _KNOWN and name not in _REFUSED]
    return found + [f"vLLM asks for {name}, which the plug-in does not know" for name in unknown]
