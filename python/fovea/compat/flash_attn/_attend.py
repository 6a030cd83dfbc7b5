# SPDX-License-Identifier: Apache-2.0
"""Runs a call: chooses the spec, describes the batch, plans and forwards."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

import fovea
from fovea.compat.flash_attn._inputs import Keys, Queries, Scores, aligned, check, refuse
from fovea.compat.flash_attn._layout import band_mask, cover_queries, divide, per_token, steps
from fovea.torch import default_cache, dtype_name, write_kv

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
_MAX_FP8_PRODUCT_DIM = 128  # wider heads have no fp8 products on a GPU: q is widened to bf16
_MAX_DIM_V = 256  # columns of v that one pass takes on a GPU; wider v takes several


@dataclass(frozen=True)
class Descales:
    """Factors of fp8 tensors, f32 [requests, kv_heads]; None: 1."""

    q: torch.Tensor | None = None
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None


@functools.lru_cache(maxsize=1024)
def _spec(
    scope: str,
    mask: str,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    window: int,
    chunk: int,
    needs_lse: bool,
    scores: tuple[float, float, bool, bool],
) -> fovea.AttentionSpec:
    scale, softcap, has_sinks, has_alibi = scores
    return fovea.AttentionSpec(
        scope=scope,
        mask=mask,
        q_heads=heads[0],
        kv_heads=heads[1],
        head_dim=dims[0],
        head_dim_v=dims[1],
        q_dtype=dtype_name(dtype),
        window=window,
        chunk=chunk,
        needs_lse=needs_lse,
        scores=fovea.ScoreSpec(softmax_scale=scale, logit_cap=softcap, has_sinks=has_sinks, has_alibi=has_alibi),
    )


@functools.lru_cache(maxsize=1024)
def _cache_spec(dtype: torch.dtype, kv_heads: int, dims: tuple[int, int], page_size: int) -> fovea.KvCacheSpec:
    return fovea.KvCacheSpec(
        dtype=dtype_name(dtype), kv_heads=kv_heads, head_dim=dims[0], head_dim_v=dims[1], page_size=page_size
    )


def _reach(scores: Scores, queries: Queries, keys: Keys) -> tuple[str, tuple[int, int]]:
    """Returns "causal", "all" or "band", and (left, right) without sides that hide nothing."""
    left, right = scores.window
    if left < 0 or left >= keys.max_len - 1:
        left = -1
    if scores.causal or queries.max_len == 1:
        right = 0
    elif right >= queries.max_len - 1:
        right = -1
    if right == 0:
        return "causal", (left, 0)
    return ("all", (-1, -1)) if left < 0 and right < 0 and scores.chunk == 0 else ("band", (left, right))


def _scale_queries(queries: Queries, descales: Descales, dim: int) -> tuple[Queries, torch.Tensor | None]:
    """Returns the queries and the q_scale [tokens, q_heads] of fp8 ones. The factors of k go there, too.

    dim: the wider of the head dims of k and v.
    """
    factors = [factor for factor in (descales.q, descales.k) if factor is not None]
    scale = per_token(functools.reduce(torch.mul, factors), queries) if factors else None
    q = queries.rows
    if q.device.type == "cpu" or dim <= _MAX_FP8_PRODUCT_DIM:
        return queries, scale
    wide = q.to(torch.float32) if scale is None else q.to(torch.float32) * scale[..., None]
    return replace(queries, rows=wide.to(torch.bfloat16)), None


def _tokens(rows: torch.Tensor, indptr: torch.Tensor) -> int:
    """Returns the tokens of a batch: the CPU wants the number, a GPU an upper bound that the host knows."""
    return int(indptr[-1]) if rows.device.type == "cpu" else rows.shape[0]


def _batch(queries: Queries, keys: Keys, scope: str, rows: torch.Tensor, mask: tuple | None) -> fovea.Batch:
    fields: dict[str, object] = {}
    if scope == "cross":
        fields = {"cross_lens": keys.lens, "cross_table": keys.table, "cross_entry_tokens": keys.page_size}
    elif not keys.packed:
        fields = {"kv_lens": keys.lens, "table": keys.table, "entry_tokens": keys.page_size}
        fields["max_kv_len"] = keys.max_len
    if not keys.packed:
        fields["request_rows"] = rows
    if mask is not None:
        fields["custom_visible"], fields["custom_indptr"] = mask
    if keys.new is not None:
        fields["out_slots"] = keys.new.slots
    tokens = _tokens(queries.rows, queries.indptr)
    requests = queries.requests
    return fovea.Batch(
        mode="decode" if queries.max_len == 1 and tokens <= requests else "extend",
        requests=requests,
        tokens=tokens,
        q_indptr=queries.indptr,
        max_q_len=queries.max_len,
        **fields,
    )


@functools.lru_cache(maxsize=1024)
def _limits(requests: int, tokens: int, q_len: int, kv_len: int, encoder_len: int) -> fovea.BatchLimits:
    return fovea.BatchLimits(
        max_requests=requests,
        max_tokens=max(tokens, 1),
        max_q_len=max(q_len, 1),
        max_kv_len=max(kv_len, 1),
        max_encoder_len=encoder_len,
    )


def _pass(spec: fovea.AttentionSpec, queries: Queries, keys: Keys, batch: fovea.Batch, **tensors: object) -> None:
    """Plans a batch and runs it over the pages of the keys, if they have any."""
    cache, layers = None, ()
    if not keys.packed:
        dims = (keys.k.shape[-1], keys.v.shape[-1])
        cache = _cache_spec(keys.k.dtype, keys.k.shape[-2], dims, keys.page_size)
        layers = ((keys.k, keys.v),)
    encoder_len = keys.max_len if spec.scope == fovea.AttentionScope.cross else 0
    longest = max(keys.max_len, queries.max_len)
    limits = _limits(batch.requests, batch.tokens, queries.max_len, longest, encoder_len)
    default_cache.run(spec, cache, layers, limits, batch, device=queries.rows.device, **tensors)


def _stored(k: torch.Tensor) -> torch.Tensor:
    """Returns new keys in the type that forward() takes: bf16 for an fp8 cache, which holds every value of fp8."""
    return k.to(torch.bfloat16) if k.dtype == torch.float8_e4m3fn else k


def _stores_along(queries: Queries, keys: Keys, scores: Scores) -> bool:
    """Returns true if each query comes with its new key and sees it, so that one pass stores and attends."""
    new, many_slopes = keys.new, scores.slopes is not None and scores.slopes.dim() == 2
    return (
        _reach(scores, queries, keys)[0] == "causal"
        and keys.covers_queries
        and new.max_len == queries.max_len
        and new.k.shape[0] == queries.rows.shape[0]
        and keys.v.shape[-1] <= _MAX_DIM_V
        and not many_slopes
    )


def _refuse_far_slopes() -> None:
    refuse("alibi_slopes", "given", "only causal calls take it: Fovea measures distances backwards")


def _run(queries: Queries, keys: Keys, scores: Scores, q_scale: torch.Tensor | None, out: torch.Tensor, lse) -> None:
    """Fills out [tokens, q_heads, head_dim_v] and lse [tokens, q_heads]."""
    reach, band = _reach(scores, queries, keys)
    if scores.slopes is not None and reach != "causal":
        _refuse_far_slopes()
    mask, rows = None, steps(queries.requests, 1, queries.rows.device)
    if reach == "band":
        scope = "encoder" if keys.packed else "encoder_cache"
        lens = queries.indptr[1:] - queries.indptr[:-1] if keys.packed else keys.lens
        keys = keys if keys.packed else cover_queries(queries, keys)
        mask_lens = lens if keys.packed else keys.lens
        mask = band_mask(queries, lens, mask_lens, max(keys.max_len, queries.max_len), band, scores.chunk)
    elif keys.packed:
        scope = "ragged" if reach == "causal" else "encoder"
    else:
        scope = "decoder" if reach == "causal" else "cross"
        queries, keys, rows = divide(queries, keys, reach == "causal")
    spec = _spec(
        scope,
        "none" if mask is None else "custom",
        (queries.rows.shape[1], keys.k.shape[-2]),
        (keys.k.shape[-1], keys.v.shape[-1]),
        queries.rows.dtype,
        band[0] + 1 if reach == "causal" and band[0] >= 0 else 0,
        scores.chunk if reach == "causal" else 0,
        lse is not None,
        (scores.scale, scores.softcap, scores.sinks is not None, scores.slopes is not None),
    )
    new = keys.new if keys.new is not None else keys if keys.packed else None
    _pass(
        spec,
        queries,
        keys,
        _batch(queries, keys, scope, rows, mask),
        q=queries.rows,
        k=None if new is None else _stored(new.k),
        v=None if new is None else _stored(new.v),
        out=out,
        lse=lse,
        q_scale=q_scale,
        save_kv=new is not None,
        sinks=scores.sinks,
        alibi_slopes=scores.slopes,
    )


def _run_rows(queries: Queries, keys: Keys, scores: Scores, q_scale, out: torch.Tensor, lse) -> None:
    """Runs each request by itself, because a pass has one ALiBi slope per head."""
    seqlen = queries.max_len
    for row in range(queries.requests):
        part = slice(row * seqlen, (row + 1) * seqlen)
        one = Queries(queries.rows[part], steps(2, seqlen, out.device), seqlen, uniform=True)
        if keys.packed:
            own = replace(keys, k=keys.k[part], v=keys.v[part])
        else:
            own = replace(keys, table=keys.table[row : row + 1], lens=keys.lens[row : row + 1])
        own_scores = replace(scores, slopes=scores.slopes[row].contiguous())
        _run(
            one,
            own,
            own_scores,
            None if q_scale is None else q_scale[part],
            out[part],
            None if lse is None else lse[part],
        )


def attend(
    queries: Queries,
    keys: Keys,
    scores: Scores,
    *,
    descales: Descales = Descales(),
    needs_lse: bool = False,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns out [tokens, q_heads, head_dim_v] and, if asked, lse f32 [tokens, q_heads], natural logarithm.

    out: dtype of q, for an fp8 q bf16; None allocates it. Rows beyond the last query keep their content.
    """
    q = queries.rows
    check(q.dtype in _DTYPES, f"q is {q.dtype}, accepted: {', '.join(str(dtype) for dtype in _DTYPES)}")
    fp8 = q.dtype == torch.float8_e4m3fn
    tokens, heads, dim_v = q.shape[0], q.shape[1], keys.v.shape[-1]
    dtype = torch.bfloat16 if fp8 else q.dtype
    if out is None:
        out = torch.empty(tokens, heads, dim_v, dtype=dtype, device=q.device)
    check(
        out.dtype == dtype and tuple(out.shape) == (tokens, heads, dim_v),
        f"out is {out.dtype} {tuple(out.shape)}, must be {dtype} {(tokens, heads, dim_v)}",
    )
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device) if needs_lse else None
    if tokens == 0 or queries.requests == 0:
        return out, lse
    if keys.k.numel() == 0:
        out.zero_()
        return out, None if lse is None else lse.fill_(-torch.inf)
    v_scale = per_token(descales.v, queries) if descales.v is not None else None
    q_scale = None
    if fp8:
        queries, q_scale = _scale_queries(queries, descales, max(q.shape[-1], dim_v))
    queries = replace(queries, rows=aligned(queries.rows))
    if keys.new is not None and not _stores_along(queries, keys, scores):
        write_kv(_stored(keys.new.k), _stored(keys.new.v), keys.k, keys.v, keys.new.slots)
        keys = replace(keys, new=None)
    if scores.slopes is not None and scores.slopes.dim() == 2:
        check(
            scores.slopes.shape[0] == queries.requests,
            f"alibi_slopes has {scores.slopes.shape[0]} rows, the batch has {queries.requests}",
        )
        if queries.requests > 1 and not queries.uniform:
            refuse("alibi_slopes", tuple(scores.slopes.shape), "requests of unequal lengths share one slope per head")
        run = _run_rows
    else:
        run = _run
    for first in range(0, dim_v, _MAX_DIM_V):
        columns = slice(first, first + _MAX_DIM_V)
        part = keys if dim_v <= _MAX_DIM_V else replace(keys, v=keys.v[..., columns])
        run(queries, part, scores, q_scale, out[..., columns], lse if first == 0 else None)
    if v_scale is not None:
        out.mul_(v_scale[..., None])
    return out, lse
