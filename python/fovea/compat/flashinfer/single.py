# SPDX-License-Identifier: Apache-2.0
"""Attention of one request over contiguous keys and values."""

from __future__ import annotations

import torch

from fovea.compat.flashinfer import planning, ragged
from fovea.compat.flashinfer.attention import Call, Heads, softmax_scale
from fovea.compat.flashinfer.options import position_encoding, refuse

Output = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def single_decode_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> Output:
    """Attention of one token. q [q_heads, dim]; k and v [tokens, heads, dim], or [heads, tokens, dim] for HND.

    Returns out [q_heads, dim], or (out, lse [q_heads]), base 2.
    """
    planning.check_layout(kv_layout)
    if q.ndim != 2:
        raise ValueError(f"q has shape {tuple(q.shape)}, must be [q_heads, dim]")
    k, v = ragged.as_nhd(k, kv_layout), ragged.as_nhd(v, kv_layout)
    heads = Heads(
        q.shape[0], k.shape[1], q.shape[1], v.shape[2], q.dtype, k.dtype, None,
        causal=True,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap or 0.0,
        sm_scale=sm_scale,
        has_alibi=position_encoding(pos_encoding_mode),
    )  # fmt: skip
    batch, page_size = ragged.single_pass(heads, 1, k.shape[0], q.device)
    call = Call(q[None], softmax_scale(heads, q_scale, k_scale), return_lse=return_lse, v_scale=v_scale)
    result = ragged.run_ragged(heads, batch, call, k, v, page_size)
    return (result[0][0], result[1][0]) if return_lse else result[0]


def single_prefill_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale_q: torch.Tensor | None = None,
    scale_k: torch.Tensor | None = None,
    scale_v: torch.Tensor | None = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: torch.Tensor | None = None,
    packed_custom_mask: torch.Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: tuple[torch.Tensor, torch.Tensor] | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> Output:
    """Attention of several tokens. q [tokens, q_heads, dim]; k and v as for single_decode_with_kv_cache.

    Causal attention is aligned to the last key. custom_mask: bool [tokens, keys]. Returns out [tokens, q_heads,
    dim of v], or (out, lse [tokens, q_heads]), base 2.
    """
    planning.check_layout(kv_layout)
    refuse(kv_cache_sf is not None, "kv_cache_sf: NVFP4 caches are not supported")
    scales = {"scale_q": scale_q, "scale_k": scale_k, "scale_v": scale_v}
    for name, scale in scales.items():
        refuse(scale is not None, f"{name} per head; accepted: k_scale and v_scale, floats")
    if q.ndim != 3:
        raise ValueError(f"q has shape {tuple(q.shape)}, must be [tokens, q_heads, dim]")
    k, v = ragged.as_nhd(k, kv_layout), ragged.as_nhd(v, kv_layout)
    heads = Heads(
        q.shape[1], k.shape[1], q.shape[2], v.shape[2], q.dtype, k.dtype, o_dtype,
        causal=causal,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap or 0.0,
        sm_scale=sm_scale,
        has_alibi=position_encoding(pos_encoding_mode),
    )  # fmt: skip
    batch, page_size = ragged.single_pass(heads, q.shape[0], k.shape[0], q.device)
    planning.add_custom_mask(batch, custom_mask, packed_custom_mask)
    call = Call(q, softmax_scale(heads, k_scale), return_lse=return_lse, v_scale=v_scale)
    return ragged.run_ragged(heads, batch, call, k, v, page_size)
