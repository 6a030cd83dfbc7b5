# SPDX-License-Identifier: Apache-2.0
"""Attention over packed sequences and over paged caches, as torch ops without side effects."""

import torch

import fovea
from fovea.torch.backend_cache import default_cache
from fovea.torch.lasting import consecutive
from fovea.torch.library import define, refuse_gradients
from fovea.torch.specs import attention_spec, batch_limits, cache_spec


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_indptr: torch.Tensor,
    *,
    max_q_len: int,
    causal: bool = True,
    softmax_scale: float = 0.0,
    window: int = 0,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    needs_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out, lse) of packed sequences that attend to themselves.

    q [tokens, q_heads, head_dim]; k [tokens, kv_heads, head_dim]; v [tokens, kv_heads, head_dim_v]; q_indptr int32
    [sequences + 1], the first token of each sequence and the end; max_q_len: the longest sequence, or more. causal:
    a token sees itself and the tokens before it, else all tokens of its sequence. softmax_scale 0: 1 / sqrt(head_dim).
    window: a token sees that many last tokens, itself included; 0: all. logit_cap: of the scores; 0: none. sinks and
    alibi_slopes f32 [q_heads].
    out [tokens, q_heads, head_dim_v] of q's dtype, bf16 for an fp8 q; lse f32 [tokens, q_heads], natural logarithm,
    or [0, q_heads] without needs_lse. Rows after the last sequence are undefined.
    """
    return torch.ops.fovea.varlen_attention.default(
        q, k, v, q_indptr, max_q_len, causal, softmax_scale, window, logit_cap, sinks, alibi_slopes, needs_lse
    )


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    q_indptr: torch.Tensor | None = None,
    *,
    max_q_len: int = 1,
    max_kv_len: int = 0,
    causal: bool = True,
    order: str = "nhd",
    softmax_scale: float = 0.0,
    window: int = 0,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    needs_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out, lse) of new tokens over a paged cache that holds their keys and values, too.

    q [tokens, q_heads, head_dim]; k_cache [pages, page_size, kv_heads, head_dim] and v_cache [.., head_dim_v], or
    [pages, kv_heads, page_size, ..] with order "hnd", of q's dtype or another of fovea.KvCacheSpec; page_table int32
    [requests, pages of a request]; kv_lens int32 [requests], new tokens included. q_indptr int32 [requests + 1]: the
    first new token of each request, and the end; None: one new token each. max_q_len and max_kv_len: upper bounds,
    max_kv_len 0: the room of the table. causal: the last new token of a request sees all its keys, each one before it
    a key less; else every token sees all keys. k_scale and v_scale f32 [1] or [kv_heads], of an fp8 cache. The rest
    and the results are as in varlen_attention.
    """
    return torch.ops.fovea.paged_attention.default(
        q,
        k_cache,
        v_cache,
        page_table,
        kv_lens,
        q_indptr,
        max_q_len,
        max_kv_len,
        causal,
        order,
        softmax_scale,
        window,
        logit_cap,
        sinks,
        alibi_slopes,
        k_scale,
        v_scale,
        needs_lse,
    )


def _results(q: torch.Tensor, head_dim_v: int, needs_lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads = q.shape[0], q.shape[1]
    dtype = torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype
    out = q.new_empty((tokens, heads, head_dim_v), dtype=dtype)
    return out, q.new_empty((tokens if needs_lse else 0, heads), dtype=torch.float32)


def _run_varlen(
    q, k, v, q_indptr, max_q_len, causal, softmax_scale, window, logit_cap, sinks, alibi_slopes, needs_lse
):  # fmt: skip
    refuse_gradients(q, k, v)
    out, lse = _results(q, v.shape[2], needs_lse)
    tokens, requests = q.shape[0], q_indptr.shape[0] - 1
    if tokens == 0 or requests <= 0:
        return out, lse
    scores = (softmax_scale, logit_cap, sinks is not None, alibi_slopes is not None)
    scope = "ragged" if causal else "encoder"
    spec = attention_spec(scope, q.shape[1], k.shape[1], q.shape[2], v.shape[2], q.dtype, window, needs_lse, scores)
    batch = fovea.Batch(
        mode="extend", requests=requests, tokens=tokens, q_indptr=q_indptr, max_q_len=max_q_len, max_kv_len=max_q_len
    )
    default_cache.run(
        spec,
        None,
        (),
        batch_limits(requests, tokens, max_q_len, max_q_len),
        batch,
        device=q.device,
        q=q,
        k=k,
        v=v,
        out=out,
        lse=lse if needs_lse else None,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
    )
    return out, lse


def _fake_varlen(
    q, k, v, q_indptr, max_q_len, causal, softmax_scale, window, logit_cap, sinks, alibi_slopes, needs_lse
):  # fmt: skip
    return _results(q, v.shape[2], needs_lse)


def _run_paged(
    q, k_cache, v_cache, page_table, kv_lens, q_indptr, max_q_len, max_kv_len, causal, order, softmax_scale, window,
    logit_cap, sinks, alibi_slopes, k_scale, v_scale, needs_lse,
):  # fmt: skip
    refuse_gradients(q, k_cache, v_cache)
    out, lse = _results(q, v_cache.shape[-1], needs_lse)
    tokens, requests = q.shape[0], kv_lens.shape[0]
    if tokens == 0 or requests == 0:
        return out, lse
    scale_values = None if k_scale is None else k_scale.numel()
    cache = cache_spec(k_cache.shape, v_cache.shape, k_cache.dtype, order, scale_values)
    layer = (k_cache, v_cache) if k_scale is None else (k_cache, v_cache, k_scale, v_scale)
    longest = max_kv_len or page_table.shape[1] * cache.page_size
    mode = "extend"
    rows = consecutive(requests + 1, q.device)
    if q_indptr is None:
        mode, q_indptr, max_q_len = "decode", rows, 1
    common = {
        "mode": mode,
        "requests": requests,
        "tokens": tokens,
        "q_indptr": q_indptr,
        "request_rows": rows,
        "max_q_len": max_q_len,
    }
    if causal:
        scope, encoder_len = "decoder", 0
        batch = fovea.Batch(
            kv_lens=kv_lens, table=page_table, entry_tokens=cache.page_size, max_kv_len=longest, **common
        )
    else:
        scope, encoder_len = "cross", longest
        batch = fovea.Batch(cross_lens=kv_lens, cross_table=page_table, cross_entry_tokens=cache.page_size, **common)
    scores = (softmax_scale, logit_cap, sinks is not None, alibi_slopes is not None)
    spec = attention_spec(
        scope, q.shape[1], cache.kv_heads, q.shape[2], v_cache.shape[3], q.dtype, window, needs_lse, scores
    )
    default_cache.run(
        spec,
        cache,
        (layer,),
        batch_limits(requests, tokens, max_q_len, longest, encoder_len),
        batch,
        q=q,
        out=out,
        lse=lse if needs_lse else None,
        save_kv=False,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
    )
    return out, lse


def _fake_paged(
    q, k_cache, v_cache, page_table, kv_lens, q_indptr, max_q_len, max_kv_len, causal, order, softmax_scale, window,
    logit_cap, sinks, alibi_slopes, k_scale, v_scale, needs_lse,
):  # fmt: skip
    return _results(q, v_cache.shape[-1], needs_lse)


define(
    "varlen_attention(Tensor q, Tensor k, Tensor v, Tensor q_indptr, SymInt max_q_len, bool causal, "
    "float softmax_scale, int window, float logit_cap, Tensor? sinks, Tensor? alibi_slopes, bool needs_lse) "
    "-> (Tensor, Tensor)",
    _run_varlen,
    _fake_varlen,
)
define(
    "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor kv_lens, Tensor? q_indptr, "
    "SymInt max_q_len, SymInt max_kv_len, bool causal, str order, float softmax_scale, int window, float logit_cap, "
    "Tensor? sinks, Tensor? alibi_slopes, Tensor? k_scale, Tensor? v_scale, bool needs_lse) -> (Tensor, Tensor)",
    _run_paged,
    _fake_paged,
)
