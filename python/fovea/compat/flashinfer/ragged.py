# SPDX-License-Identifier: Apache-2.0
"""Attention over keys and values that come as ragged tensors, without a cache.

If every request has as many keys as queries, the scopes ragged and encoder read the tensors as they are. Else the
tensors are lent as a cache whose pages have one token.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fovea.compat.flashinfer import indices
from fovea.compat.flashinfer.attention import Call, Heads, Pass, run_attention

Output = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

_PAGE_SIZES = (64, 16)  # for tensors that hold one request


def as_nhd(tensor: torch.Tensor, kv_layout: str) -> torch.Tensor:
    """Returns a view [tokens, heads, dim] of keys or values."""
    if tensor.ndim != 3:
        raise ValueError(f"k and v must have 3 axes, one has shape {tuple(tensor.shape)}")
    return tensor if kv_layout == "NHD" else tensor.transpose(0, 1)


def check_rows(heads: Heads, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raises ValueError if k or v [tokens, heads, dim] are not the planned ones."""
    for name, part, dim in (("k", k, heads.head_dim), ("v", v, heads.head_dim_v)):
        if tuple(part.shape[1:]) != (heads.kv_heads, dim) or part.shape[0] != k.shape[0]:
            raise ValueError(
                f"{name} is [tokens, heads, dim] {tuple(part.shape)}, planned were "
                f"[{k.shape[0]}, {heads.kv_heads}, {dim}]"
            )
        if part.dtype != heads.kv_dtype:
            raise ValueError(f"{name} has dtype {part.dtype}, planned was kv_data_type {heads.kv_dtype}")


def run_ragged(heads: Heads, batch: Pass, call: Call, k: torch.Tensor, v: torch.Tensor, page_size: int = 1) -> Output:
    """Runs a pass over k and v [tokens, heads, dim]."""
    check_rows(heads, k, v)
    if batch.is_packed:
        return run_attention(heads, batch, replace(call, tensors=call.tensors | {"k": k, "v": v}), None, None)
    layer = tuple(part.unflatten(0, (-1, page_size)) for part in (k, v))
    return run_attention(heads, batch, call, heads.cache_spec(page_size), layer)


def can_pack(heads: Heads) -> bool:
    """Returns True if k and v have the dtype of q, which packed scopes need."""
    return heads.kv_dtype == heads.q_dtype and heads.kv_dtype == heads.out_dtype


def single_pass(heads: Heads, q_len: int, kv_len: int, device: torch.device) -> tuple[Pass, int]:
    """Returns the pass of one request, and the page size by which its keys are lent."""
    lens = (torch.full((1,), q_len, dtype=torch.int32), torch.full((1,), kv_len, dtype=torch.int32))
    batch = Pass(
        q_indptr=torch.arange(2, dtype=torch.int32, device=device) * q_len,
        kv_lens=torch.full((1,), kv_len, dtype=torch.int32, device=device),
        request_rows=torch.zeros(1, dtype=torch.int32, device=device),
        table=None,
        max_kv_len=kv_len,
        max_q_len=q_len,
        host_q_lens=lens[0],
        host_kv_lens=lens[1],
        is_packed=q_len == kv_len and can_pack(heads),
    )
    page_size = next((size for size in _PAGE_SIZES if kv_len % size == 0), 1)
    if not batch.is_packed:
        batch.table = torch.arange(max(kv_len // page_size, 1), dtype=torch.int32, device=device)[None]
    return batch, page_size


def needs_table(batch: Pass, rows: int, kv_indptr: torch.Tensor, stride: int, may_keep: bool) -> Pass:
    """Returns a pass with the table of a ragged tensor of `rows` tokens.

    may_keep: False if a replay of a CUDA graph may find other contents in kv_indptr, so that the table must be made
    in every run.
    """
    if batch.is_packed or (batch.table is not None and may_keep):
        return batch
    table = indices.row_table(kv_indptr, rows, stride)
    if may_keep:
        batch.table = table
        return batch
    return replace(batch, table=table, prepared={})
