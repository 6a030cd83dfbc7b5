# SPDX-License-Identifier: Apache-2.0
"""Specs of the functional ops. They are immutable, so equal arguments share one."""

from functools import lru_cache

import torch

import fovea
from fovea.torch.dtypes import dtype_name


@lru_cache(maxsize=1024)
def attention_spec(
    scope: str,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    head_dim_v: int,
    dtype: torch.dtype,
    window: int,
    needs_lse: bool,
    scores: tuple[float, float, bool, bool],
) -> fovea.AttentionSpec:
    """Returns the spec of an MHA layer; scores: softmax_scale, logit_cap, has_sinks, has_alibi."""
    softmax_scale, logit_cap, has_sinks, has_alibi = scores
    return fovea.AttentionSpec(
        scope=scope,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        q_dtype=dtype_name(dtype),
        window=window,
        needs_lse=needs_lse,
        scores=fovea.ScoreSpec(
            softmax_scale=softmax_scale, logit_cap=logit_cap, has_sinks=has_sinks, has_alibi=has_alibi
        ),
    )


@lru_cache(maxsize=1024)
def cache_spec(
    k_shape: torch.Size, v_shape: torch.Size, dtype: torch.dtype, order: str, scale_values: int | None
) -> fovea.KvCacheSpec:
    """Returns the spec of a cache of one layer. nhd: shapes are [pages, page_size, kv_heads, dim]; hnd: [pages,
    kv_heads, page_size, dim]. scale_values: the length of k_scale; None: there is none."""
    if order not in ("nhd", "hnd"):
        raise ValueError(f'order is "{order}", must be "nhd" or "hnd"')
    if len(k_shape) != 4 or k_shape[:3] != v_shape[:3]:
        raise ValueError(f"k_cache is {list(k_shape)}, v_cache {list(v_shape)}: must have 4 axes, the first 3 equal")
    page_size, kv_heads = (k_shape[1], k_shape[2]) if order == "nhd" else (k_shape[2], k_shape[1])
    if scale_values not in (None, 1, kv_heads):
        raise ValueError(f"k_scale has {scale_values} values, must have 1 or {kv_heads}")
    return fovea.KvCacheSpec(
        order=order,
        dtype=dtype_name(dtype),
        scale="none" if scale_values is None else "per_tensor" if scale_values == 1 else "per_head",
        kv_heads=kv_heads,
        head_dim=k_shape[3],
        head_dim_v=v_shape[3],
        page_size=page_size,
    )


@lru_cache(maxsize=1024)
def batch_limits(requests: int, tokens: int, q_len: int, kv_len: int, encoder_len: int = 0) -> fovea.BatchLimits:
    """Returns limits for one batch."""
    return fovea.BatchLimits(
        max_requests=max(requests, 1),
        max_tokens=max(tokens, 1),
        max_q_len=max(q_len, 1),
        max_kv_len=max(kv_len, 1),
        max_encoder_len=encoder_len,
    )
