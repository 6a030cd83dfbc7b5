# SPDX-License-Identifier: Apache-2.0
"""Writes of new tokens to a paged cache: flashinfer.page."""

from __future__ import annotations

import torch

from fovea.compat.flashinfer import indices, planning

__all__ = [
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "get_batch_indices_positions",
    "get_seq_lens",
]


def get_seq_lens(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """Returns the tokens of each request, int32 [requests], for page lists in which every request has a page."""
    pages = kv_indptr[1:] - kv_indptr[:-1]
    return torch.clamp(pages - 1, min=0) * page_size + kv_last_page_len


def get_batch_indices_positions(
    append_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    nnz: int,
    batch_indices: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the request and the position of each of `nnz` new tokens, int32 [nnz].

    append_indptr int32 [requests + 1]; seq_lens [requests] counts the new tokens. Rows that belong to no request get
    -1 and 0. The results are written to batch_indices and positions if they are given.
    """
    device = append_indptr.device
    request, is_real = indices.requests_of_tokens(append_indptr, nnz)
    at = torch.arange(nnz, dtype=torch.int32, device=device)
    before_end = append_indptr[1:].index_select(0, request) - at
    place = seq_lens.to(device, non_blocking=True).index_select(0, request) - before_end
    results = (torch.where(is_real, request, -1).to(torch.int32), torch.where(is_real, place, 0).to(torch.int32))
    for name, buffer, result in zip(("batch_indices", "positions"), (batch_indices, positions), results, strict=True):
        if buffer is None:
            continue
        if tuple(buffer.shape) != (nnz,) or buffer.dtype != torch.int32:
            raise ValueError(f"{name} is {buffer.dtype} {tuple(buffer.shape)}, must be torch.int32 ({nnz},)")
        buffer.copy_(result)
    return (
        results[0] if batch_indices is None else batch_indices,
        results[1] if positions is None else positions,
    )


def _bytes_view(tensor: torch.Tensor) -> torch.Tensor:
    """Returns fp8 values as bytes, which torch can index."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _store(
    cache: torch.Tensor, rows: torch.Tensor, at: tuple[torch.Tensor, torch.Tensor], is_real: torch.Tensor
) -> None:
    """Writes rows [n, ..] to cache[page, place], cache [pages, page_size, ..], for the rows that are real.

    The others repeat the write of the first real row, because the host does not know how many there are.
    """
    if cache.dtype != rows.dtype:
        raise ValueError(f"the cache has dtype {cache.dtype}, the appended rows have {rows.dtype}")
    cache, rows = _bytes_view(cache), _bytes_view(rows)
    count = rows.shape[0]
    if count == 0:
        return
    first = is_real.to(torch.uint8).argmax()
    source = torch.where(is_real, torch.arange(count, device=rows.device), first)
    page, place = (each.index_select(0, source) for each in at)
    values = torch.where(is_real.any(), rows.index_select(0, source), cache[page, place])
    cache[page, place] = values


def _places(
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    page_size: int,
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Returns page and place of each new token, int64 [n], and True for those with a request."""
    is_real = batch_indices >= 0
    request = batch_indices.clamp(min=0)
    at = kv_indptr.index_select(0, request) + positions // page_size
    page = kv_indices.index_select(0, at.clamp(0, max(kv_indices.numel() - 1, 0)))
    return (page.to(torch.int64), (positions % page_size).to(torch.int64)), is_real


def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Writes new keys and values [tokens, kv_heads, dim] to the pages of their requests.

    batch_indices, positions: int32 [tokens], as get_batch_indices_positions() returns them; tokens with a negative
    request are left out. The page lists already count the new tokens.
    """
    planning.check_layout(kv_layout)
    cache = planning.Cache.unpack(paged_kv_cache, kv_layout)
    parts = [part if kv_layout == "NHD" else part.transpose(1, 2) for part in (cache.k, cache.v)]
    at, is_real = _places(batch_indices, positions, kv_indices, kv_indptr, parts[0].shape[1])
    for part, rows in zip(parts, (append_key, append_value), strict=True):
        _store(part, rows, at, is_real)


def append_paged_mla_kv_cache(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    ckv_cache: torch.Tensor | None,
    kpe_cache: torch.Tensor | None,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
) -> None:
    """Writes new latents [tokens, ckv_dim] and rotary keys [tokens, kpe_dim] to pages [pages, page_size, dim]."""
    pairs = [(part, rows) for part, rows in ((ckv_cache, append_ckv), (kpe_cache, append_kpe)) if part is not None]
    for part, rows in pairs:
        at, is_real = _places(batch_indices, positions, kv_indices, kv_indptr, part.shape[1])
        _store(part, rows, at, is_real)
