# SPDX-License-Identifier: Apache-2.0
"""Caches that a call reads and extends: tables, the slots of new tokens, rotary positions."""

from __future__ import annotations

from dataclasses import replace

import torch

from fovea.compat.flash_attn._inputs import Keys, NewKeys, aligned, check, check_lens, check_table, check_tensors
from fovea.compat.flash_attn._layout import steps, token_places


def _check_room(lens: torch.Tensor, capacity: int) -> None:
    """Checks lengths on a CPU. On a GPU the host does not read them."""
    if lens.device.type == "cpu" and lens.numel() > 0:
        check(
            int(lens.max()) <= capacity,
            f"a request has {int(lens.max())} tokens, the cache (a row of block_table) has room for {capacity}",
        )


def request_lens(cache_seqlens: int | torch.Tensor | None, requests: int, capacity: int, device: torch.device):
    """Returns int32 [requests], the tokens that the cache holds; None means that it is full."""
    if isinstance(cache_seqlens, torch.Tensor):
        lens = check_lens("cache_seqlens", cache_seqlens, requests, device)
        _check_room(lens, capacity)
        return lens
    length = capacity if cache_seqlens is None else int(cache_seqlens)
    check(0 <= length <= capacity, f"cache_seqlens is {length}, must be in [0, {capacity}]")
    return torch.full((requests,), length, dtype=torch.int32, device=device)


def cache_keys(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    requests: int,
    cache_seqlens: int | torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None,
    page_table: torch.Tensor | None,
) -> Keys:
    """Returns the keys that a cache holds. A cache without a page table has one page per batch row."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check(cache.dim() == 4, f"{name} has {cache.dim()} axes, must have 4")
        check(cache.stride(-1) == 1, f"{name} has a last stride of {cache.stride(-1)}, must be 1")
    check_tensors(q, k_cache, v_cache)
    rows = cache_batch_idx
    if rows is not None:
        rows = check_lens("cache_batch_idx", rows, requests, q.device)
    if page_table is None:
        check(
            rows is not None or k_cache.shape[0] >= requests,
            f"k_cache has {k_cache.shape[0]} rows, the batch has {requests}",
        )
        table = (steps(requests, 1, q.device) if rows is None else rows)[:, None]
    else:
        table = check_table("page_table", page_table, q.device)
        check(
            rows is not None or table.shape[0] == requests,
            f"page_table has {table.shape[0]} rows, the batch has {requests}",
        )
        table = table if rows is None else table[rows]
    capacity = table.shape[1] * k_cache.shape[1]
    lens = request_lens(cache_seqlens, requests, capacity, q.device)
    return Keys(k=k_cache, v=v_cache, table=table, lens=lens, max_len=capacity)


def append(keys: Keys, k: torch.Tensor, v: torch.Tensor, cu_seqlens_k_new: torch.Tensor | None) -> Keys:
    """Returns the keys with those of k and v behind them; the call that reads them stores them first.

    k and v: [batch, seqlen_new, kv_heads, dim], with cu_seqlens_k_new [tokens, kv_heads, dim].
    """
    requests, device = keys.lens.shape[0], k.device
    check_tensors(keys.k, k, v)
    check(k.shape[-2] == keys.k.shape[-2], f"k has {k.shape[-2]} heads, k_cache has {keys.k.shape[-2]}")
    check(v.shape[-1] == keys.v.shape[-1], f"v has head_dim {v.shape[-1]}, v_cache has {keys.v.shape[-1]}")
    uniform = cu_seqlens_k_new is None
    if uniform:
        check(k.dim() == 4 and k.shape[0] == requests, f"k is {tuple(k.shape)}, must have a batch of {requests}")
        longest = k.shape[1]
        places = keys.lens[:, None] + steps(longest, 1, device)
        column = (places // keys.page_size).clamp_(max=keys.table.shape[1] - 1)
        page = keys.table.gather(1, column.long()).flatten()
        places = places.flatten()
        k, v = k.flatten(0, 1), v.flatten(0, 1)
        lens = keys.lens + longest
    else:
        check(k.dim() == 3, f"k has {k.dim()} axes, must have 3 with cu_seqlens_k_new")
        indptr = check_lens("cu_seqlens_k_new", cu_seqlens_k_new, requests + 1, device)
        longest = k.shape[0]
        request, place = token_places(indptr, k.shape[0])
        places = keys.lens[request] + place
        page = keys.table[request, (places // keys.page_size).clamp_(max=keys.table.shape[1] - 1).long()]
        places = places.masked_fill(steps(k.shape[0], 1, device) >= indptr[-1], keys.max_len)
        lens = keys.lens + (indptr[1:] - indptr[:-1])
    _check_room(lens, keys.max_len)
    slots = page.long() * keys.page_size + places % keys.page_size
    slots = slots.masked_fill(places >= keys.max_len, -1)
    new = NewKeys(k=aligned(k), v=aligned(v), slots=slots, max_len=longest, uniform=uniform)
    return replace(keys, lens=lens, new=new)


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """Returns x [.., heads, dim] rotated by the rows `positions` [..] of cos and sin [positions, rotary_dim / 2].

    Products and sums are f32; the result is rounded to the dtype of x once.
    """
    half = cos.shape[1]
    check(tuple(sin.shape) == tuple(cos.shape), f"rotary_sin is {tuple(sin.shape)}, rotary_cos {tuple(cos.shape)}")
    check(2 * half <= x.shape[-1], f"rotary_cos has {half} columns, at most {x.shape[-1] // 2}: half a head")
    positions = positions.long()
    c, s = cos[positions].float().unsqueeze(-2), sin[positions].float().unsqueeze(-2)
    turned = x[..., : 2 * half].float()
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack([a * c - b * s, a * s + b * c], -1).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        turned = torch.cat([a * c - b * s, a * s + b * c], -1)
    return torch.cat([turned.to(x.dtype), x[..., 2 * half :]], -1) if 2 * half < x.shape[-1] else turned.to(x.dtype)


def rotary_positions(x: torch.Tensor, starts: torch.Tensor, indptr: torch.Tensor | None, advance: bool) -> torch.Tensor:
    """Returns the positions of the tokens of x, [batch, seqlen] or, with indptr, [tokens].

    starts: int32 [requests], the position of the first token of each request. advance False: all tokens of a request
    stand there, as queries do that see every key.
    """
    if indptr is None:
        places = steps(x.shape[1], 1, x.device)
        return starts[:, None] + (places if advance else torch.zeros_like(places))
    request, place = token_places(indptr, x.shape[0])
    return starts[request] + place if advance else starts[request]
