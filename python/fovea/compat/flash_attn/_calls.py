# SPDX-License-Identifier: Apache-2.0
"""The calls behind both generations of flash-attn's functions."""

from __future__ import annotations

from dataclasses import replace

import torch

from fovea.compat.flash_attn._attend import Descales, attend
from fovea.compat.flash_attn._inputs import (
    Keys,
    Queries,
    Scores,
    aligned,
    check,
    check_lens,
    check_table,
    check_tensors,
    padded,
)
from fovea.compat.flash_attn._layout import dense_queries, skip_left, steps, token_keys


def _descales(batch: int, kv_heads: int, q, k, v) -> Descales:
    """Checks the descale factors, f32 [batch, kv_heads] of any strides."""
    for name, factor in (("q_descale", q), ("k_descale", k), ("v_descale", v)):
        if factor is None:
            continue
        check(factor.dtype == torch.float32, f"{name} is {factor.dtype}, must be torch.float32")
        check(tuple(factor.shape) == (batch, kv_heads), f"{name} is {tuple(factor.shape)}, must be {(batch, kv_heads)}")
    return Descales(q=q, k=k, v=v)


def _check_descales_fit(q: torch.Tensor, *factors: torch.Tensor | None) -> None:
    check(
        q.dtype == torch.float8_e4m3fn or all(factor is None for factor in factors),
        f"q_descale, k_descale and v_descale need tensors of torch.float8_e4m3fn, q is {q.dtype}",
    )


def _finish(
    queries: Queries,
    keys: Keys,
    scores: Scores,
    descales: Descales,
    out: torch.Tensor | None,
    needs_lse: bool,
    shape: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attends; returns out in the shape (.., heads, dim_v) and lse as [batch, heads, seqlen] or [heads, tokens]."""
    direct = None
    if out is not None:
        check(tuple(out.shape) == shape, f"out is {tuple(out.shape)}, must be {shape}")
        flat = out.flatten(0, -3)
        if keys.v.shape[-1] == shape[-1] and flat.data_ptr() == out.data_ptr() and aligned(flat) is flat:
            direct = flat
    rows, lse = attend(queries, keys, scores, descales=descales, needs_lse=needs_lse, out=direct)
    if direct is None:
        rows = rows[..., : shape[-1]].reshape(shape)
        out = rows if out is None else out.copy_(rows)
    if lse is None:
        return out, None
    if len(shape) == 4:
        return out, lse.view(shape[0], shape[1], shape[2]).transpose(1, 2).contiguous()
    return out, lse.transpose(0, 1).contiguous()


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scores: Scores,
    *,
    descales: tuple = (None, None, None),
    out: torch.Tensor | None = None,
    needs_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """q [batch, seqlen_q, q_heads, dim], k and v [batch, seqlen_k, kv_heads, dim or dim_v]."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check(tensor.dim() == 4, f"{name} has {tensor.dim()} axes, must have 4: batch, seqlen, heads, head_dim")
    check_tensors(q, k, v)
    check(k.shape[0] == q.shape[0], f"k has a batch of {k.shape[0]}, q of {q.shape[0]}")
    _check_descales_fit(q, *descales)
    batch, seqlen_k = k.shape[:2]
    shape = (*q.shape[:-1], v.shape[-1])
    q, k, v = padded(q), aligned(padded(k)), aligned(padded(v))
    if seqlen_k == q.shape[1] and q.dtype != torch.float8_e4m3fn:
        keys = Keys(k=aligned(k.flatten(0, 1)), v=aligned(v.flatten(0, 1)), max_len=seqlen_k, covers_queries=True)
    else:
        table = steps(batch, 1, q.device)[:, None]
        lens = torch.full((batch,), seqlen_k, dtype=torch.int32, device=q.device)
        keys = Keys(k=k, v=v, max_len=seqlen_k, table=table, lens=lens, covers_queries=seqlen_k >= q.shape[1])
    factors = _descales(batch, k.shape[2], *descales)
    return _finish(dense_queries(q), keys, scores, factors, out, needs_lse, shape)


def _varlen_keys(
    k: torch.Tensor,
    v: torch.Tensor,
    queries: Queries,
    cu_seqlens_k: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    max_seqlen_k: int,
    block_table: torch.Tensor | None,
) -> Keys:
    requests, device = queries.requests, k.device
    if seqused_k is not None:
        seqused_k = check_lens("seqused_k", seqused_k, requests, device)
    if cu_seqlens_k is not None:
        cu_seqlens_k = check_lens("cu_seqlens_k", cu_seqlens_k, requests + 1, device)
    if block_table is None:
        check(cu_seqlens_k is not None, "cu_seqlens_k is None, needed without block_table")
        check(k.dim() == 3, f"k has {k.dim()} axes, must have 3 without block_table: tokens, heads, head_dim")
        k, v = aligned(padded(k)), aligned(padded(v))
        same = cu_seqlens_k.data_ptr() == queries.indptr.data_ptr() and seqused_k is None and queries.used is None
        if same and k.dtype != torch.float8_e4m3fn:
            return Keys(k=k, v=v, max_len=max_seqlen_k, covers_queries=True)
        return token_keys(k, v, cu_seqlens_k, max_seqlen_k, seqused_k)
    check(k.dim() == 4, f"k has {k.dim()} axes, must have 4 with block_table: pages, page_size, heads, head_dim")
    table = check_table("block_table", block_table, device)
    check(table.shape[0] == requests, f"block_table has {table.shape[0]} rows, the batch has {requests}")
    lens = seqused_k if seqused_k is not None or cu_seqlens_k is None else cu_seqlens_k[1:] - cu_seqlens_k[:-1]
    check(lens is not None, "seqused_k is None, needed with block_table unless cu_seqlens_k gives the lengths")
    room = table.shape[1] * k.shape[1]
    check(max_seqlen_k <= room, f"max_seqlen_k is {max_seqlen_k}, a row of block_table has room for {room}")
    return Keys(k=padded(k), v=padded(v), max_len=max_seqlen_k, table=table, lens=lens)


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scores: Scores,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    descales: tuple = (None, None, None),
    out: torch.Tensor | None = None,
    needs_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """q [tokens, q_heads, dim]; k and v [tokens, kv_heads, dim], with block_table [pages, page_size, kv_heads, dim]."""
    check(q.dim() == 3, f"q has {q.dim()} axes, must have 3: tokens, heads, head_dim")
    check_tensors(q, k, v)
    _check_descales_fit(q, *descales)
    check(max_seqlen_q is not None and max_seqlen_k is not None, "max_seqlen_q and max_seqlen_k are needed")
    requests = cu_seqlens_q.shape[0] - 1
    cu_seqlens_q = check_lens("cu_seqlens_q", cu_seqlens_q, requests + 1, q.device)
    if seqused_q is not None:
        seqused_q = check_lens("seqused_q", seqused_q, requests, q.device)
    shape = (*q.shape[:-1], v.shape[-1])
    queries = Queries(rows=padded(q), indptr=cu_seqlens_q, max_len=int(max_seqlen_q), used=seqused_q)
    keys = _varlen_keys(k, v, queries, cu_seqlens_k, seqused_k, int(max_seqlen_k), block_table)
    factors = _descales(requests, k.shape[-2], *descales)
    return _finish(queries, keys, scores, factors, out, needs_lse, shape)


def cached(
    q: torch.Tensor,
    keys: Keys,
    scores: Scores,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    cache_leftpad: torch.Tensor | None = None,
    descales: tuple = (None, None, None),
    out: torch.Tensor | None = None,
    needs_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """q [batch, seqlen, q_heads, dim] or, with cu_seqlens_q, [tokens, q_heads, dim], over the keys of a cache."""
    _check_descales_fit(q, *descales)
    requests = keys.lens.shape[0]
    shape = (*q.shape[:-1], keys.v.shape[-1])
    if q.device.type != "cpu":  # a CPU has checked the lengths
        keys = replace(keys, lens=keys.lens.clamp(max=keys.max_len))
    if cache_leftpad is not None:
        leftpad = check_lens("cache_leftpad", cache_leftpad, requests, q.device)
        for name, cache in (("k_cache", keys.k), ("v_cache", keys.v)):
            slots_are_even = cache.shape[0] == 1 or cache.stride(0) == cache.shape[1] * cache.stride(1)
            check(
                slots_are_even,
                f"{name} has strides {cache.stride()}, with cache_leftpad its first two axes must form one dense axis",
            )
        keys = replace(skip_left(keys, leftpad), covers_queries=False)
    k_cache, v_cache = keys.k, keys.v
    keys = replace(keys, k=padded(k_cache), v=padded(v_cache))
    if keys.new is not None:
        keys = replace(keys, new=replace(keys.new, k=padded(keys.new.k), v=padded(keys.new.v)))
    q = padded(q)
    if cu_seqlens_q is None:
        queries = dense_queries(q)
        if keys.new is not None and keys.new.uniform and keys.new.max_len >= queries.max_len:
            keys = replace(keys, covers_queries=True)
    else:
        check(max_seqlen_q is not None, "max_seqlen_q is None, needed with cu_seqlens_q")
        indptr = check_lens("cu_seqlens_q", cu_seqlens_q, requests + 1, q.device)
        queries = Queries(rows=q, indptr=indptr, max_len=int(max_seqlen_q))
    factors = _descales(requests, keys.k.shape[-2], *descales)
    result = _finish(queries, keys, scores, factors, out, needs_lse, shape)
    for cache, used in ((k_cache, keys.k), (v_cache, keys.v)):
        if keys.new is not None and used is not cache:
            cache.copy_(used[..., : cache.shape[-1]])
    return result
