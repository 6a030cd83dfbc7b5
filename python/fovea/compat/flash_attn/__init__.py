# SPDX-License-Identifier: Apache-2.0
"""flash-attn's functions on Fovea: the signatures of flash-attn 2.8, forward only.

    from fovea.compat.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

`fovea.compat.flash_attn.flash_attn_interface` has those of FlashAttention-3. Arguments after the `*` are extensions
that FlashAttention-3, vLLM and transformers know. docs/compat_flash_attn.md lists every argument.

Tensors are fp16, bf16 or (CPU) fp32, with the descales also fp8 e4m3. Calls on a GPU only enqueue work: they may be
captured in a CUDA graph after a first call of the same sizes. Rows that see no key give 0 and a log-sum-exp of -inf.
"""

from __future__ import annotations

import torch

from fovea.compat.flash_attn._cache import append, cache_keys, rotary_positions, rotate
from fovea.compat.flash_attn._calls import cached, dense, varlen
from fovea.compat.flash_attn._inputs import Unsupported, check, check_no_grad, make_scores, refuse_unsupported

__all__ = [
    "Unsupported",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Window = tuple[int, int]
Result = torch.Tensor | tuple[torch.Tensor, ...]


def _answer(out: torch.Tensor, lse: torch.Tensor | None, return_attn_probs: bool) -> Result:
    """Returns what flash-attn 2 returns: the attention probabilities exist with dropout only."""
    if return_attn_probs:
        return out, lse, None
    return out if lse is None else (out, lse)


def _one_of(first: str, a: object, second: str, b: object) -> object:
    """Returns the argument that is given, of two names for the same thing."""
    check(a is None or b is None, f"{first} and {second} are the same argument, both are given")
    return b if a is None else a


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    attention_chunk: int = 0,
    s_aux: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Result:
    """Attends to all keys of the same batch row.

    q [batch, seqlen_q, heads, dim]; k [batch, seqlen_k, kv_heads, dim]; v [batch, seqlen_k, kv_heads, dim_v]. The
    causal mask and windows are aligned to the last query and the last key. Returns out [batch, seqlen_q, heads,
    dim_v]; with return_softmax_lse (out, lse), lse f32 [batch, heads, seqlen_q]; with return_attn_probs (out, lse,
    None).
    """
    check_no_grad(q=q, k=k, v=v)
    refuse_unsupported(dropout_p=dropout_p, qv=qv)
    scores = make_scores(
        q,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        attention_chunk=attention_chunk,
        sinks=_one_of("s_aux", s_aux, "sinks", sinks),
        alibi_slopes=alibi_slopes,
    )
    descales = (q_descale, k_descale, v_descale)
    needs_lse = return_attn_probs or return_softmax_lse
    return _answer(*dense(q, k, v, scores, descales=descales, out=out, needs_lse=needs_lse), return_attn_probs)


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """flash_attn_func() with kv [batch, seqlen_k, 2, kv_heads, dim]."""
    k, v = kv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """flash_attn_func() with qkv [batch, seqlen, 3, heads, dim]."""
    q, k, v = qkv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    attention_chunk: int = 0,
    s_aux: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    q_v: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    scheduler_metadata: torch.Tensor | None = None,
    fa_version: int | None = None,
    return_softmax_lse: bool = False,
    **unsupported: object,
) -> Result:
    """Attends in a batch of requests of several lengths.

    q [tokens, heads, dim]; k [tokens_k, kv_heads, dim] and v [tokens_k, kv_heads, dim_v], or with block_table int32
    [batch, entries] pages [pages, page_size, kv_heads, ..]. cu_seqlens_q and cu_seqlens_k: int32 [batch + 1]. With
    the same array for both, keys are read in place. max_seqlen_q and max_seqlen_k bound the lengths. seqused_q and
    seqused_k: int32 [batch], leading tokens that count. Returns out [tokens, heads, dim_v]; with return_softmax_lse
    (out, lse), lse f32 [heads, tokens]; with return_attn_probs (out, lse, None).
    """
    check_no_grad(q=q, k=k, v=v)
    refuse_unsupported(dropout_p=dropout_p, qv=_one_of("qv", qv, "q_v", q_v), **unsupported)
    scores = make_scores(
        q,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        attention_chunk=attention_chunk,
        sinks=_one_of("s_aux", s_aux, "sinks", sinks),
        alibi_slopes=alibi_slopes,
    )
    result = varlen(
        q,
        k,
        v,
        scores,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        block_table=_one_of("block_table", block_table, "page_table", page_table),
        descales=(q_descale, k_descale, v_descale),
        out=out,
        needs_lse=return_attn_probs or return_softmax_lse,
    )
    return _answer(*result, return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """flash_attn_varlen_func() with kv [tokens_k, 2, kv_heads, dim]."""
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """flash_attn_varlen_func() with qkv [tokens, 3, heads, dim]."""
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    attention_chunk: int = 0,
    s_aux: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    scheduler_metadata: torch.Tensor | None = None,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    **unsupported: object,
) -> Result:
    """Attends to a cache, after storing k and v behind its first cache_seqlens tokens if they are given.

    q [batch, seqlen_q, heads, dim], with cu_seqlens_q int32 [batch + 1] and max_seqlen_q [tokens, heads, dim].
    k_cache [rows, capacity, kv_heads, dim] and v_cache [rows, capacity, kv_heads, dim_v]; cache_batch_idx int32
    [batch] names the row of each request. With block_table int32 [batch, entries]: [pages, page_size, kv_heads, ..].
    k and v [batch, seqlen_new, kv_heads, ..], with cu_seqlens_k_new [tokens_new, kv_heads, ..]. cache_seqlens: int or
    int32 [batch]. cache_leftpad: int32 [batch], leading tokens that do not count. rotary_cos and rotary_sin
    [positions, rotary_dim / 2] rotate k and q. Returns out [batch, seqlen_q, heads, dim_v] or [tokens, heads, dim_v];
    with return_softmax_lse (out, lse), lse f32 [batch, heads, seqlen_q] or [heads, tokens].
    """
    check_no_grad(q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    refuse_unsupported(qv=qv, **unsupported)
    scores = make_scores(
        q,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        attention_chunk=attention_chunk,
        sinks=_one_of("s_aux", s_aux, "sinks", sinks),
        alibi_slopes=alibi_slopes,
    )
    requests = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    keys = cache_keys(
        q,
        k_cache,
        v_cache,
        requests=requests,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        page_table=_one_of("block_table", block_table, "page_table", page_table),
    )
    check((k is None) == (v is None), "k and v must both be given or both be None")
    check(rotary_cos is None or k is not None, "rotary_cos is given without k and v: stored keys are rotated already")
    if k is not None:
        check(cache_seqlens is not None, "cache_seqlens is None, needed with k and v")
        if rotary_cos is not None:
            check(rotary_sin is not None, "rotary_sin is None, needed with rotary_cos")
            starts = keys.lens if rotary_seqlens is None else rotary_seqlens
            advance = causal or scores.window != (-1, -1)
            places = rotary_positions(q, starts, cu_seqlens_q, advance)
            q = rotate(q, rotary_cos, rotary_sin, places, rotary_interleaved)
            places = rotary_positions(k, starts, cu_seqlens_k_new, True)
            k = rotate(k, rotary_cos, rotary_sin, places, rotary_interleaved)
        keys = append(keys, k, v, cu_seqlens_k_new)
    out, lse = cached(
        q,
        keys,
        scores,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        cache_leftpad=cache_leftpad,
        descales=(q_descale, k_descale, v_descale),
        out=out,
        needs_lse=return_softmax_lse,
    )
    return (out, lse) if return_softmax_lse else out
