# SPDX-License-Identifier: Apache-2.0
"""plan() of the wrappers: index tensors of the caller become the arrays of a Pass, without waiting for the device.

Bounds on lengths come from shapes, from arguments that state them, and from index tensors in host memory. Inside a
CUDA graph, and for wrappers with use_cuda_graph, contents of host tensors bound nothing, because a replay may have
others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fovea.compat.flashinfer import indices
from fovea.compat.flashinfer.attention import Heads, Pass

_MAX_INT32 = 2**31 - 1


@dataclass
class PageLists:
    """The pages of each request: lists in CSR form, or a table.

    indptr int32 [requests + 1], indices int32 [pages]; or block_tables int32 [requests, stride]. Lengths:
    last_page_len int32 [requests], or seq_lens int32 [requests].
    """

    page_size: int
    indptr: torch.Tensor | None = None
    indices: torch.Tensor | None = None
    last_page_len: torch.Tensor | None = None
    block_tables: torch.Tensor | None = None
    seq_lens: torch.Tensor | None = None
    max_kv_len: int | None = None  # a bound that the caller states
    capacity: int | None = None  # pages that the lists of later plans may have

    def on_device(self, device: torch.device) -> PageLists:
        """Returns the same lists in memory of `device`."""

        def move(tensor: torch.Tensor | None, name: str) -> torch.Tensor | None:
            return None if tensor is None else indices.to_device(tensor, device, name)

        tables = self.block_tables
        if tables is not None and tables.device.type != device.type:
            tables = move(tables, "block_tables")
        return PageLists(
            self.page_size,
            move(self.indptr, "indptr"),
            move(self.indices, "indices"),
            move(self.last_page_len, "last_page_len"),
            None if tables is None else tables.to(torch.int32),
            move(self.seq_lens, "seq_lens"),
        )

    def lengths(self) -> torch.Tensor:
        """Returns the tokens of each request, int32 [requests]."""
        if self.seq_lens is not None:
            return self.seq_lens.to(torch.int32)
        return indices.kv_lengths(self.indptr, self.last_page_len, self.page_size)

    def host_lengths(self) -> torch.Tensor | None:
        """Returns lengths() if the host can read them."""
        needed = (self.seq_lens,) if self.seq_lens is not None else (self.indptr, self.last_page_len)
        return self.lengths() if all(map(indices.is_on_host, needed)) else None

    def stride(self, is_replayed: bool) -> int:
        """Returns a bound on the pages of a request."""
        if self.block_tables is not None:
            return max(self.block_tables.shape[1], 1)
        if self.max_kv_len is not None:
            return max(-(-self.max_kv_len // self.page_size), 1)
        if not is_replayed and indices.is_on_host(self.indptr):
            pages = indices.lengths_of(self.indptr)
            return max(int(pages.max()), 1) if pages.numel() else 1
        return max(self.capacity or self.indices.numel(), 1)

    def table(self, stride: int) -> torch.Tensor:
        """Returns the pages of each request, int32 [requests, stride]."""
        if self.block_tables is not None:
            return self.block_tables
        return indices.page_table(self.indptr, self.indices, stride)


@dataclass
class Queries:
    """The new tokens of each request: q_indptr int32 [requests + 1] and a bound on their number, 0: unknown."""

    indptr: torch.Tensor
    max_q_len: int = 0

    @staticmethod
    def uniform(requests: int, q_len: int) -> Queries:
        """Returns queries of q_len tokens for each request, in host memory."""
        return Queries(torch.arange(requests + 1, dtype=torch.int32) * q_len, q_len)

    def host_lengths(self) -> torch.Tensor | None:
        """Returns the new tokens of each request if the host can read them, int32 [requests]."""
        return indices.lengths_of(self.indptr) if indices.is_on_host(self.indptr) else None

    def on_device(self, device: torch.device) -> torch.Tensor:
        """Returns q_indptr in memory of `device`; that of uniform queries is computed there."""
        if self.max_q_len and indices.is_on_host(self.indptr) and device.type != "cpu":
            requests = self.indptr.numel() - 1
            if requests and int(self.indptr[-1]) == requests * self.max_q_len:
                return torch.arange(requests + 1, dtype=torch.int32, device=device) * self.max_q_len
        return indices.to_device(self.indptr, device, "qo_indptr")


def bound_of(lengths: torch.Tensor | None) -> int:
    """Returns the maximum of lengths in host memory, 0 if there are none."""
    return int(lengths.max()) if lengths is not None and lengths.numel() else 0


def plan_paged(device: torch.device, queries: Queries, lists: PageLists, is_graph: bool) -> Pass:
    """Returns the pass of a batch over a paged cache."""
    is_replayed = is_graph or indices.is_capturing(device)
    host_q = None if is_replayed else queries.host_lengths()
    host_kv = None if is_replayed else lists.host_lengths()
    stride = lists.stride(is_replayed)
    here = lists.on_device(device)
    kv_lens = here.lengths()
    requests = kv_lens.numel()
    bound = bound_of(host_kv) if host_kv is not None else lists.max_kv_len or stride * lists.page_size
    q_indptr = queries.on_device(device)
    if q_indptr.numel() != requests + 1:
        raise ValueError(f"qo_indptr has {q_indptr.numel()} elements, the page lists have {requests} requests")
    return Pass(
        q_indptr=q_indptr,
        kv_lens=kv_lens,
        request_rows=torch.arange(requests, dtype=torch.int32, device=device),
        table=here.table(stride),
        max_kv_len=min(bound, stride * lists.page_size, _MAX_INT32),
        max_q_len=queries.max_q_len or bound_of(host_q),
        host_q_lens=host_q,
        host_kv_lens=host_kv,
        is_replayed=is_replayed,
    )


def keep_addresses(fixed: Pass | None, fresh: Pass) -> Pass:
    """Copies a pass into the memory of the first one, so that a captured run() reads it. Returns that pass.

    The first pass is copied too, because its arrays may be the caller's.
    """
    if fixed is None:
        mask = {name: tensor.clone() for name, tensor in fresh.mask.items()}
        table = None if fresh.table is None else fresh.table.clone()
        return replace(fresh, q_indptr=fresh.q_indptr.clone(), kv_lens=fresh.kv_lens.clone(), table=table, mask=mask)
    for name in ("mask_kind", "is_packed"):
        if getattr(fixed, name) != getattr(fresh, name):
            raise ValueError(f"{name} is {getattr(fresh, name)}, use_cuda_graph froze it as {getattr(fixed, name)}")
    for name in ("max_kv_len", "max_q_len"):
        bound = getattr(fixed, name)
        if bound and getattr(fresh, name) > bound:
            raise ValueError(f"{name} is {getattr(fresh, name)}, use_cuda_graph froze its bound as {bound}")
    arrays = [(name, getattr(fixed, name), getattr(fresh, name)) for name in ("q_indptr", "kv_lens", "table")]
    arrays += [(name, fixed.mask[name], fresh.mask[name]) for name in fixed.mask]
    for name, old, new in arrays:
        if old is None:
            continue
        if old.shape != new.shape:
            raise ValueError(f"{name} has shape {tuple(new.shape)}, use_cuda_graph froze it as {tuple(old.shape)}")
        old.copy_(new)
    return fixed


def mask_capacity(buffer: torch.Tensor | None, is_graph: bool) -> int | None:
    """Returns how many elements of masks a buffer of packed bits has room for, None without one."""
    return 8 * buffer.numel() if is_graph and buffer is not None else None


def add_custom_mask(
    batch: Pass,
    custom_mask: torch.Tensor | None,
    packed_custom_mask: torch.Tensor | None,
    capacity: int | None = None,
) -> None:
    """Adds a mask [sum of q_len * kv_len] of bool, or its bits, to a pass.

    capacity: bytes that masks of later plans may have; the array then has this size.
    """
    if custom_mask is None and packed_custom_mask is None:
        return
    device = batch.kv_lens.device
    starts = indices.mask_indptr(batch.q_indptr, batch.kv_lens)
    if packed_custom_mask is not None:
        packed = packed_custom_mask.to(device, non_blocking=True)
        visible = indices.unpack_mask(packed, starts)
    else:
        mask = custom_mask.to(device, non_blocking=True).reshape(-1)
        visible = mask.contiguous().view(torch.uint8) if mask.dtype == torch.bool else mask.ne(0).view(torch.uint8)
    if capacity is not None:
        if visible.numel() > capacity:
            raise ValueError(f"custom_mask has {visible.numel()} elements, custom_mask_buf has room for {capacity}")
        visible = torch.nn.functional.pad(visible, (0, capacity - visible.numel()))
    batch.mask_kind = "custom"
    batch.mask = {"custom_visible": visible, "custom_indptr": starts}


def add_items(batch: Pass, prefix_lens: torch.Tensor, token_pos: torch.Tensor, stride: int) -> None:
    """Adds multi-item scoring to a pass: prefix_lens uint32 [requests], token_pos uint16 [requests * stride].

    The last row of token_pos may be shorter than stride. prefix_lens of one request may be a scalar.
    """
    device = batch.kv_lens.device
    rows = token_pos.to(device, non_blocking=True).reshape(-1).view(torch.int16)
    missing = batch.requests * stride - rows.numel()
    if missing >= stride > 0:
        raise ValueError(f"token_pos_in_items_ptr has {rows.numel()} elements, a request has none: {stride} each")
    rows = torch.nn.functional.pad(rows, (0, missing))
    batch.mask_kind = "multi_item"
    batch.mask = {
        "item_prefix_lens": prefix_lens.to(device, non_blocking=True).reshape(-1),
        "item_token_pos": rows.view(batch.requests, stride),
    }


@dataclass
class Cache:
    """A paged cache in FlashInfer's shapes, unpacked: k and v [pages, page_size, heads, dim] or, hnd, heads first."""

    k: torch.Tensor
    v: torch.Tensor

    @staticmethod
    def unpack(cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor], kv_layout: str) -> Cache:
        """Splits a tensor [pages, 2, ..] into k and v; tensors without a page axis have pages of one token."""
        at = -3 if kv_layout == "NHD" else -2
        if isinstance(cache, (tuple, list)):
            if len(cache) != 2:
                raise ValueError(f"paged_kv_cache has {len(cache)} tensors, must be (k, v)")
            parts = [each if each.ndim == 4 else each.unsqueeze(at) for each in cache]
        else:
            if cache.ndim not in (4, 5) or cache.shape[1] != 2:
                shape = tuple(cache.shape)
                raise ValueError(f"paged_kv_cache has shape {shape}, must be [pages, 2, ..] with 4 or 5 axes")
            parts = list((cache if cache.ndim == 5 else cache.unsqueeze(at)).unbind(1))
        for name, part in zip("kv", parts, strict=True):
            if part.ndim != 4:
                raise ValueError(f"the {name} cache has shape {tuple(part.shape)}, must have 3 or 4 axes")
        return Cache(*parts)

    def check(self, heads: Heads, page_size: int, kv_layout: str) -> None:
        """Raises ValueError if the cache is not the planned one."""
        for name, part, dim in (("k", self.k, heads.head_dim), ("v", self.v, heads.head_dim_v)):
            middle = (page_size, heads.kv_heads) if kv_layout == "NHD" else (heads.kv_heads, page_size)
            if tuple(part.shape[1:]) != (*middle, dim):
                expected = f"[pages, {middle[0]}, {middle[1]}, {dim}]"
                raise ValueError(f"the {name} cache has shape {tuple(part.shape)}, planned were {expected}")
            if part.dtype != heads.kv_dtype:
                raise ValueError(f"the {name} cache has dtype {part.dtype}, planned was kv_data_type {heads.kv_dtype}")


def check_layout(kv_layout: str) -> str:
    """Returns the order of pages by Fovea's name."""
    if kv_layout not in ("NHD", "HND"):
        raise KeyError(f"kv_layout is {kv_layout!r}, must be NHD or HND")
    return kv_layout.lower()
