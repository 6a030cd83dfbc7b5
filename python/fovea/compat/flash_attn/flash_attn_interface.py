# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-3's functions on Fovea, forward only: the argument order of its module flash_attn_interface.

The same calls as fovea.compat.flash_attn, which has the argument order of flash-attn 2 and says what they do.
"""

from __future__ import annotations

import torch

from fovea.compat import flash_attn as _v2
from fovea.compat.flash_attn._inputs import check

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

Window = tuple[int, int]
Result = torch.Tensor | tuple[torch.Tensor, ...]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    s_aux: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> Result:
    """Returns out or, with return_attn_probs, (out, lse): fovea.compat.flash_attn.flash_attn_func()."""
    return _v2.flash_attn_func(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        s_aux=s_aux,
        out=out,
        return_softmax_lse=return_attn_probs,
    )


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """flash_attn_func() with qkv [batch, seqlen, 3, heads, dim].

    With num_heads_q also [batch, seqlen, num_heads_q + 2 * kv_heads, dim].
    """
    if qkv.dim() == 5:
        q, k, v = qkv.unbind(-3)
    else:
        check(num_heads_q is not None, "num_heads_q is None, needed for a qkv of 4 axes")
        heads = qkv.shape[-2] - num_heads_q
        check(heads > 0 and heads % 2 == 0, f"num_heads_q is {num_heads_q}, qkv has {qkv.shape[-2]} heads")
        q, k, v = qkv.split([num_heads_q, heads // 2, heads // 2], dim=-2)
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale,
        causal,
        None,
        q_descale,
        k_descale,
        v_descale,
        window_size,
        attention_chunk,
        softcap,
        return_attn_probs=return_attn_probs,
    )


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    s_aux: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
) -> Result:
    """Returns out or, with return_attn_probs, (out, lse): fovea.compat.flash_attn.flash_attn_varlen_func()."""
    return _v2.flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        softmax_scale=softmax_scale,
        causal=causal,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        s_aux=s_aux,
        out=out,
        page_table=page_table,
        return_softmax_lse=return_attn_probs,
    )


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> Result:
    """Returns out or, with return_softmax_lse, (out, lse): fovea.compat.flash_attn.flash_attn_with_kvcache()."""
    return _v2.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos,
        rotary_sin,
        cache_seqlens,
        cache_batch_idx,
        cache_leftpad,
        page_table,
        softmax_scale,
        causal,
        window_size,
        softcap,
        rotary_interleaved,
        return_softmax_lse=return_softmax_lse,
        qv=qv,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k_new=cu_seqlens_k_new,
        max_seqlen_q=max_seqlen_q,
        rotary_seqlens=rotary_seqlens,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        attention_chunk=attention_chunk,
        s_aux=s_aux,
        out=out,
    )


def flash_attn_combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out, lse) over the keys of all parts, computed by torch in f32.

    out_partial f32 [parts, .., heads, dim]; lse_partial f32 [parts, .., heads], natural logarithm; a part that saw no
    key has -inf there, and its output is not read. out has out_dtype (default: that of `out`, else f32).
    """
    for name, tensor in (("out_partial", out_partial), ("lse_partial", lse_partial)):
        check(tensor.dtype == torch.float32, f"{name} is {tensor.dtype}, must be torch.float32")
    check(
        out_partial.shape[:-1] == lse_partial.shape,
        f"lse_partial is {tuple(lse_partial.shape)}, must be {tuple(out_partial.shape[:-1])}",
    )
    lse = torch.logsumexp(lse_partial, 0)
    total = torch.zeros(out_partial.shape[1:], dtype=torch.float32, device=out_partial.device)
    for part, part_lse in zip(out_partial, lse_partial, strict=True):
        weight = torch.exp(part_lse - lse).masked_fill(part_lse == -torch.inf, 0)[..., None]
        total.addcmul_(weight, part.masked_fill(weight == 0, 0))
    if out is None:
        return total.to(out_dtype or torch.float32), lse
    check(out_dtype in (None, out.dtype), f"out is {out.dtype}, out_dtype is {out_dtype}")
    return out.copy_(total), lse


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: torch.Tensor,
    *arguments: object,
    **more: object,
) -> torch.Tensor:
    """Returns an empty int32 tensor: work is divided on the device in every call, so there is nothing to prepare."""
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)
