# SPDX-License-Identifier: Apache-2.0
"""Index tensors of FlashInfer as arrays of a Fovea batch.

FlashInfer describes a cache by page lists in CSR form (indptr, indices, last_page_len). A Fovea batch has a table
[requests, stride] and the length of every request. All functions here are torch ops on the device of their arguments;
none waits for the device, so all of them can be captured in a CUDA graph.
"""

from __future__ import annotations

import math

import torch


def is_on_host(tensor: torch.Tensor) -> bool:
    """Returns True if the elements can be read without waiting for a device."""
    return tensor.device.type == "cpu"


def is_capturing(device: torch.device) -> bool:
    """Returns True if the current stream of the device records a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def to_device(tensor: torch.Tensor, device: torch.device, name: str) -> torch.Tensor:
    """Returns int32 [n] on `device`. Copies from host memory are asynchronous and refused inside a capture."""
    if tensor.device.type != device.type:
        if is_capturing(device):
            raise ValueError(f"{name} is on {tensor.device}, inside a CUDA graph capture it must be on {device}")
        tensor = tensor.to(device, non_blocking=True)
    return tensor.to(torch.int32).contiguous()


def lengths_of(indptr: torch.Tensor) -> torch.Tensor:
    """Returns the differences of an indptr [n + 1], int32 [n]."""
    return (indptr[1:] - indptr[:-1]).to(torch.int32)


def kv_lengths(indptr: torch.Tensor, last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """Returns the tokens of each request, int32 [requests]. A request without pages has none."""
    pages = lengths_of(indptr)
    return torch.where(pages > 0, (pages - 1) * page_size + last_page_len, 0).to(torch.int32)


def page_table(indptr: torch.Tensor, indices: torch.Tensor, stride: int) -> torch.Tensor:
    """Returns the pages of each request, int32 [requests, stride]. Entries after its last page are arbitrary pages."""
    requests = indptr.numel() - 1
    if indices.numel() == 0 or requests == 0:
        return torch.zeros(requests, max(stride, 1), dtype=torch.int32, device=indptr.device)
    columns = torch.arange(stride, dtype=torch.int32, device=indptr.device)
    at = (indptr[:-1, None] + columns).clamp_(max=indices.numel() - 1)
    return indices.index_select(0, at.view(-1)).view(requests, stride)


def row_table(indptr: torch.Tensor, rows: int, stride: int) -> torch.Tensor:
    """Returns the rows of a ragged tensor that each request owns, int32 [requests, stride]."""
    columns = torch.arange(stride, dtype=torch.int32, device=indptr.device)
    return (indptr[:-1, None] + columns).clamp_(max=max(rows - 1, 0))


def requests_of_tokens(q_indptr: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the request of each token and True for tokens that belong to one, int64 and bool [tokens]."""
    at = torch.arange(tokens, dtype=torch.int32, device=q_indptr.device)
    request = torch.searchsorted(q_indptr[1:].contiguous(), at, right=True)
    return request.clamp_(max=q_indptr.numel() - 2), at < q_indptr[-1]


def split_into_tokens(
    q_indptr: torch.Tensor, kv_lens: torch.Tensor, tokens: int, causal: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Makes every query token a request of its own, which sees the same keys as before.

    Returns q_indptr [tokens + 1], kv_lens [tokens] and request_rows [tokens], int32. Without causality a token sees
    all keys of its request; with it, those up to its own position. Rows that would see no key get the length 0.
    """
    request, is_real = requests_of_tokens(q_indptr, tokens)
    lens = kv_lens.index_select(0, request)
    if causal:
        ends = q_indptr[1:].index_select(0, request)
        at = torch.arange(tokens, dtype=torch.int32, device=q_indptr.device)
        lens = (lens - (ends - 1 - at)).clamp_(min=0)
    lens = torch.where(is_real, lens, 0).to(torch.int32)
    starts = torch.arange(tokens + 1, dtype=torch.int32, device=q_indptr.device)
    return starts, lens, request.to(torch.int32)


def mask_indptr(q_indptr: torch.Tensor, kv_lens: torch.Tensor) -> torch.Tensor:
    """Returns where the [q_len, kv_len] mask of each request begins, int64 [requests + 1]."""
    sizes = lengths_of(q_indptr).to(torch.int64) * kv_lens.to(torch.int64)
    return torch.nn.functional.pad(sizes.cumsum(0), (1, 0))


def window_mask(q_lens: torch.Tensor, kv_lens: torch.Tensor, total: int, window_left: int) -> torch.Tensor:
    """Returns the mask of a window without causality, bool [total]: the [q_len, kv_len] values of each request.

    A query sees keys from `window_left` before its own position on. total: at least the sum of q_len * kv_len.
    """
    starts = torch.nn.functional.pad((q_lens.to(torch.int64) * kv_lens.to(torch.int64)).cumsum(0), (1, 0))
    at = torch.arange(total, dtype=torch.int64, device=kv_lens.device)
    request = torch.searchsorted(starts[1:].contiguous(), at, right=True).clamp_(max=kv_lens.numel() - 1)
    width = kv_lens.index_select(0, request).to(torch.int64).clamp_(min=1)
    offset = at - starts.index_select(0, request)
    position = width - q_lens.index_select(0, request) + offset // width
    return offset % width >= position - window_left


def unpack_mask(packed: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a mask of bits, uint8 [8 * bytes], whose request i begins at starts[i].

    packed: uint8, the first bit is the lowest; the bits of each request begin at a byte of their own. Elements of the
    result after the last request are 0.
    """
    total = packed.numel() * 8
    if total == 0:
        return torch.zeros(1, dtype=torch.uint8, device=packed.device)
    sizes = starts[1:] - starts[:-1]
    first_bit = torch.nn.functional.pad(((sizes + 7) // 8 * 8).cumsum(0), (1, 0))
    at = torch.arange(total, dtype=torch.int64, device=packed.device)
    request = torch.searchsorted(starts[1:].contiguous(), at, right=True).clamp_(max=starts.numel() - 2)
    bit = (first_bit.index_select(0, request) + at - starts.index_select(0, request)).clamp_(max=total - 1)
    values = packed.index_select(0, bit // 8) >> (bit % 8).to(torch.uint8) & 1
    return torch.where(at < starts[-1], values, 0).to(torch.uint8)


def alibi_slopes(heads: int, device: torch.device) -> torch.Tensor:
    """Returns the slopes of the ALiBi paper (arXiv:2108.12409), f32 [heads]."""
    powers = 2 ** math.floor(math.log2(heads))
    at = torch.arange(heads, dtype=torch.float32, device=device)
    return torch.where(at < powers, -8.0 * (at + 1), -4.0 * (2 * (at - powers) + 1)).div_(powers).exp2_()
