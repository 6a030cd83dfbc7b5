# SPDX-License-Identifier: Apache-2.0
"""Index arrays of a call. Everything here only enqueues work on the tensors' device and reads no value of it."""

from __future__ import annotations

from dataclasses import replace

import torch

from fovea.compat.flash_attn._inputs import Keys, Queries
from fovea.torch import consecutive


def steps(count: int, step: int, device: torch.device) -> torch.Tensor:
    """Returns int32 [count]: 0, step, 2 * step ... The array must not be written."""
    numbers = consecutive(count, device)
    return numbers if step == 1 else numbers * step


def dense_queries(q: torch.Tensor) -> Queries:
    """Returns the queries of q [batch, seqlen, heads, dim]."""
    batch, seqlen, heads, dim = q.shape
    rows = q.reshape(batch * seqlen, heads, dim)
    return Queries(rows=rows, indptr=steps(batch + 1, seqlen, q.device), max_len=seqlen, uniform=True)


def token_keys(k: torch.Tensor, v: torch.Tensor, indptr: torch.Tensor, max_len: int, lens: torch.Tensor | None) -> Keys:
    """Returns the keys of k and v [tokens, heads, dim] that start at indptr (int32 [requests + 1])."""
    starts = indptr[:-1]
    places = steps(max(max_len, 1), 1, k.device)
    table = (starts[:, None] + places).clamp_(max=max(k.shape[0] - 1, 0))
    if lens is None:
        lens = indptr[1:] - starts
    return Keys(k=k.unsqueeze(1), v=v.unsqueeze(1), table=table, lens=lens, max_len=max_len)


def skip_left(keys: Keys, leftpad: torch.Tensor) -> Keys:
    """Returns the keys without the first leftpad[i] (int32 [requests]) of each request, as pages of one token.

    The cache must be dense over pages and tokens, so that both count slots.
    """
    page_size = keys.page_size
    places = leftpad[:, None] + steps(keys.max_len, 1, leftpad.device)
    places = places.clamp_(max=keys.table.shape[1] * page_size - 1)
    pages = keys.table.gather(1, (places // page_size).long())
    return replace(
        keys,
        k=keys.k.view(-1, 1, *keys.k.shape[2:]),
        v=keys.v.view(-1, 1, *keys.v.shape[2:]),
        table=pages * page_size + places % page_size,
        lens=(keys.lens - leftpad).clamp_(min=0),
        covers_queries=False,
    )


def divide(queries: Queries, keys: Keys, causal: bool) -> tuple[Queries, Keys, torch.Tensor]:
    """Divides requests into runs of queries, because a request has no more queries than keys.

    Causal queries before the first key, and queries beyond `used`, become requests without keys: their rows get 0.
    Returns the queries, the keys (lens and table) and int32 [requests], the row of each request in the table.
    """
    requests = queries.requests
    rows = steps(requests, 1, queries.rows.device)
    splits_front = causal and not keys.covers_queries and queries.max_len > 1
    if not splits_front and queries.used is None:
        return queries, keys, rows
    starts, ends = queries.indptr[:-1], queries.indptr[1:]
    used_ends = ends if queries.used is None else torch.minimum(starts + queries.used, ends)
    begins, lens = [starts], [keys.lens]
    if splits_front:
        begins.append(starts + (used_ends - starts - keys.lens).clamp_(min=0))
        lens = [torch.zeros_like(keys.lens), keys.lens]
    if queries.used is not None:
        begins.append(used_ends)
        lens.append(torch.zeros_like(keys.lens))
    runs = len(begins)
    indptr = torch.cat([torch.stack(begins, 1).flatten(), queries.indptr[-1:]])
    divided = Queries(rows=queries.rows, indptr=indptr, max_len=queries.max_len)
    shorter = replace(keys, lens=torch.stack(lens, 1).flatten())
    return divided, shorter, rows.repeat_interleave(runs, output_size=requests * runs)


def token_places(indptr: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns int64 [tokens], the request of each row of a packed array, and its place in that request."""
    rows = steps(tokens, 1, indptr.device)
    request = torch.searchsorted(indptr[1:].contiguous(), rows, right=True).clamp_(max=indptr.shape[0] - 2)
    return request, rows - indptr[request]


def per_token(values: torch.Tensor, queries: Queries) -> torch.Tensor:
    """Returns [tokens, q_heads] of values [requests, kv_heads]."""
    heads = queries.rows.shape[1]
    if queries.uniform:
        rows = values.repeat_interleave(queries.max_len, 0, output_size=queries.rows.shape[0])
    else:
        rows = values[token_places(queries.indptr, queries.rows.shape[0])[0]]
    return rows.repeat_interleave(heads // values.shape[1], 1).contiguous()


def cover_queries(queries: Queries, keys: Keys) -> Keys:
    """Returns keys of which each request has at least as many as queries. A mask must hide the added ones."""
    max_len = max(keys.max_len, queries.max_len)
    entries = -(-max_len // keys.page_size)
    table = keys.table.clamp(0, keys.k.shape[0] - 1)
    if entries > table.shape[1]:
        table = torch.nn.functional.pad(table, (0, entries - table.shape[1]))
    lens = torch.maximum(keys.lens, queries.indptr[1:] - queries.indptr[:-1])
    return replace(keys, max_len=max_len, table=table, lens=lens, covers_queries=True)


def band_mask(
    queries: Queries, lens: torch.Tensor, mask_lens: torch.Tensor, max_len: int, band: tuple[int, int], chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a custom mask: uint8 [bytes], one per query and key, and int64 [requests + 1], where requests start.

    lens: keys of each request. mask_lens: columns of its mask, at least lens. max_len: the longest of mask_lens.
    band: (left, right), -1 means unlimited. A query at place p among the keys sees [p - left, p + right] and, with a
    chunk, the keys of its own aligned chunk.
    """
    device = lens.device
    q_lens = queries.indptr[1:] - queries.indptr[:-1]
    used = q_lens if queries.used is None else torch.minimum(queries.used, q_lens)
    sizes = q_lens.long() * mask_lens
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64, device=device), sizes.cumsum(0)])
    places = torch.arange(queries.rows.shape[0] * max_len, dtype=torch.int64, device=device)
    request = torch.searchsorted(indptr[1:].contiguous(), places, right=True).clamp_(max=queries.requests - 1)
    places -= indptr[request]
    columns = mask_lens.long().clamp(min=1)[request]
    token, key = places // columns, places % columns
    length, tokens = lens[request], used[request]
    seen = (key < length) & (token < tokens)
    token += length - tokens  # its place among the keys
    if band[0] >= 0:
        seen &= key >= token - band[0]
    if band[1] >= 0:
        seen &= key <= token + band[1]
    if chunk > 0:
        own = token.div(chunk, rounding_mode="floor")
        seen &= key.div(chunk, rounding_mode="floor") == own
    return seen.to(torch.uint8), indptr
