# SPDX-License-Identifier: Apache-2.0
"""Merges of attention states, and cascade attention: flashinfer.cascade. All log-sum-exps here are to base 2."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch

import fovea
from fovea.compat.flashinfer.attention import dtype_name
from fovea.compat.flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
from fovea.compat.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from fovea.compat.flashinfer.single import single_prefill_with_kv_cache

__all__ = [
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
]

_LN2, _LOG2_E = math.log(2), math.log2(math.e)


@lru_cache(maxsize=64)
def _merger(dtype: torch.dtype, heads: int, dim: int, device: torch.device) -> fovea.StateMerger:
    name = "cpu" if device.type == "cpu" else f"cuda:{device.index}"
    return fovea.StateMerger(dtype=dtype_name(dtype, "v"), heads=heads, dim=dim, device=name)


def _check_state(v: torch.Tensor, s: torch.Tensor, names: str) -> None:
    if v.ndim != 3 or tuple(s.shape) != tuple(v.shape[:2]):
        shapes = f"{tuple(v.shape)} and {tuple(s.shape)}"
        raise ValueError(f"{names} have shapes {shapes}, must be [n, heads, dim] and [n, heads]")


def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the state over the keys of a and b: v [tokens, heads, dim] and s f32 [tokens, heads]."""
    v, s = v_a.clone(memory_format=torch.contiguous_format), s_a.to(torch.float32, copy=True)
    merge_state_in_place(v, s, v_b, s_b)
    return v, s


def merge_state_in_place(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> None:
    """Turns (v, s) into the state over the keys of both. mask: bool [tokens], False leaves a token as it is."""
    _check_state(v, s, "v and s")
    _check_state(v_other, s_other, "v_other and s_other")
    if s.dtype != torch.float32:
        raise ValueError(f"s has dtype {s.dtype}, it is changed in place and must be torch.float32")
    lse, part = (s * _LN2).contiguous(), (s_other.to(torch.float32) * _LN2).contiguous()
    if mask is not None:
        part.masked_fill_(mask.logical_not()[:, None], -math.inf)
    merger = _merger(v.dtype, v.shape[1], v.shape[2], v.device)
    merger.merge(v, lse, v_other, part)
    merged = lse * _LOG2_E
    s.copy_(merged if mask is None else torch.where(mask[:, None], merged, s))


def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges states that lie along axis 1: v [tokens, states, heads, dim], s f32 [tokens, states, heads].

    All states are summed in fp32, so the result does not depend on their order.
    """
    if v.ndim != 4 or tuple(s.shape) != tuple(v.shape[:3]):
        raise ValueError(
            f"v and s have shapes {tuple(v.shape)} and {tuple(s.shape)}, must be [n, states, heads, dim] and "
            "[n, states, heads]"
        )
    s = s.to(torch.float32)
    highest = s.amax(dim=1, keepdim=True)
    weights = torch.exp2(s - highest.masked_fill(highest == -math.inf, 0.0))
    total = weights.sum(dim=1)
    merged = torch.einsum("nsh,nshd->nhd", weights / total.clamp(min=1e-30)[:, None], v.to(torch.float32))
    return merged.to(v.dtype), total.log2() + highest[:, 0]


class MultiLevelCascadeAttentionWrapper:
    """Attention over prefixes that requests share, level by level, over one paged cache.

    Each level is a paged prefill over its own page lists; the levels are merged by their log-sum-exps. Only the last
    level is causal.
    """

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: list[torch.Tensor] | None = None,
        paged_kv_indptr_buf_arr: list[torch.Tensor] | None = None,
        paged_kv_indices_buf_arr: list[torch.Tensor] | None = None,
        paged_kv_last_page_len_buf_arr: list[torch.Tensor] | None = None,
    ) -> None:
        arrays = (qo_indptr_buf_arr, paged_kv_indptr_buf_arr, paged_kv_indices_buf_arr, paged_kv_last_page_len_buf_arr)
        if use_cuda_graph and any(each is None or len(each) != num_levels for each in arrays):
            raise ValueError(f"use_cuda_graph needs lists of buffers for {num_levels} levels")
        none = [None] * num_levels
        buffers = zip(*(each if use_cuda_graph else none for each in arrays), strict=True)
        self._levels = [
            BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout, use_cuda_graph, *each)
            for each in buffers
        ]
        self._use_cuda_graph = use_cuda_graph

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffers: list[torch.Tensor] | None = None
    ) -> None:
        """Does nothing: workspaces belong to fovea.torch."""

    def plan(
        self,
        qo_indptr_arr: list[torch.Tensor],
        paged_kv_indptr_arr: list[torch.Tensor],
        paged_kv_indices_arr: list[torch.Tensor],
        paged_kv_last_page_len: list[torch.Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
    ) -> None:
        """Prepares run(). Each list has an element per level, as plan() of the paged prefill wrapper takes it."""
        lists = (qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len)
        for each in lists:
            if len(each) != len(self._levels):
                raise ValueError(f"a list has {len(each)} elements, the wrapper has {len(self._levels)} levels")
        for i, (level, *tensors) in enumerate(zip(self._levels, *lists, strict=True)):
            level.plan(
                *tensors,
                num_qo_heads,
                num_kv_heads,
                head_dim,
                page_size,
                causal=causal and i == len(self._levels) - 1,
                pos_encoding_mode=pos_encoding_mode,
                sm_scale=sm_scale,
                window_left=window_left,
                logits_soft_cap=logits_soft_cap,
                q_data_type=q_data_type,
                kv_data_type=kv_data_type,
            )

    begin_forward = plan

    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Returns out [tokens, q_heads, head_dim]."""
        out, lse = self._levels[-1].run(q, paged_kv_cache, return_lse=True)
        for level in self._levels[:-1]:
            merge_state_in_place(out, lse, *level.run(q, paged_kv_cache, return_lse=True))
        return out

    forward = run


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper:
    """Decode over one prefix, given as contiguous keys and values, and the requests' own paged cache."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        self._unique = BatchDecodeWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._kv_layout = kv_layout

    def begin_forward(
        self,
        unique_kv_indptr: torch.Tensor,
        unique_kv_indices: torch.Tensor,
        unique_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        data_type: str | torch.dtype = "float16",
    ) -> None:
        """Prepares forward() for a batch."""
        lists = (unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len)
        shape = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self._unique.plan(*lists, *shape, q_data_type=data_type, kv_data_type=data_type)

    def forward(
        self, q: torch.Tensor, k_shared: torch.Tensor, v_shared: torch.Tensor, unique_kv_cache: Any
    ) -> torch.Tensor:
        """Returns out [requests, q_heads, head_dim]. k_shared, v_shared: [tokens, kv_heads, head_dim]."""
        out, lse = single_prefill_with_kv_cache(
            q, k_shared, v_shared, causal=False, kv_layout=self._kv_layout, return_lse=True
        )
        merge_state_in_place(out, lse, *self._unique.run(q, unique_kv_cache, return_lse=True))
        return out

    def end_forward(self) -> None:
        """Does nothing."""


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper:
    """Prefill over one prefix, given as contiguous keys and values, and the requests' own paged cache."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        self._unique = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._kv_layout = kv_layout

    def begin_forward(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        q_data_type: str | torch.dtype = "float16",
    ) -> None:
        """Prepares forward() for a batch."""
        lists = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._unique.plan(*lists, num_qo_heads, num_kv_heads, head_dim, page_size, q_data_type=q_data_type)

    def forward(
        self,
        q: torch.Tensor,
        k_shared: torch.Tensor,
        v_shared: torch.Tensor,
        unique_kv_cache: Any,
        causal: bool = False,
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor:
        """Returns out [tokens, q_heads, head_dim]. k_shared, v_shared: [tokens, kv_heads, head_dim]."""
        out, lse = single_prefill_with_kv_cache(
            q, k_shared, v_shared, causal=False, kv_layout=self._kv_layout, sm_scale=sm_scale, return_lse=True
        )
        unique = self._unique.forward(q, unique_kv_cache, causal=causal, sm_scale=sm_scale, return_lse=True)
        merge_state_in_place(out, lse, *unique)
        return out

    def end_forward(self) -> None:
        """Does nothing."""
