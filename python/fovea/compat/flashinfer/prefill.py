# SPDX-License-Identifier: Apache-2.0
"""Prefill attention over paged caches and ragged tensors: flashinfer.prefill."""

from __future__ import annotations

from functools import partial, partialmethod
from typing import Any

import torch

from fovea.compat.flashinfer import planning
from fovea.compat.flashinfer.attention import Heads
from fovea.compat.flashinfer.options import position_encoding, refuse
from fovea.compat.flashinfer.paged import Output, PagedCache, PagedWrapper
from fovea.compat.flashinfer.prefill_ragged import BatchPrefillWithRaggedKVCacheWrapper
from fovea.compat.flashinfer.single import single_prefill_with_kv_cache

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]

single_prefill_with_kv_cache_return_lse = partial(single_prefill_with_kv_cache, return_lse=True)


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
    """Attention of any number of new tokens of each request over a paged cache.

    Arguments and shapes are those of FlashInfer 0.7.4. plan() never waits for the device, so it may be captured in a
    CUDA graph together with run(). docs/compat_flashinfer.md says which arguments are ignored or refused.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
        max_total_num_rows: int | None = None,
    ) -> None:
        refuse(variant_owns_mask, "variant_owns_mask: masks of custom kernels")
        buffers = (paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        super().__init__(float_workspace_buffer, kv_layout, buffers if use_cuda_graph else None, jit_args)
        self._mask_capacity = planning.mask_capacity(custom_mask_buf, use_cuda_graph)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
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
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        """Prepares run() for a batch.

        qo_indptr, paged_kv_indptr int32 [requests + 1], paged_kv_indices int32 [pages], paged_kv_last_page_len int32
        [requests], on the device or in host memory. max_token_per_sequence and max_sequence_kv bound the new tokens
        and all tokens of a request. Without them, index tensors on the device make tables as wide as all pages of
        the batch. custom_mask: bool [sum of q_len * kv_len], replaces causality.
        """
        self._heads = Heads(
            num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo or head_dim_qk,
            q_data_type, kv_data_type or q_data_type, o_data_type,
            causal=causal,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap or 0.0,
            sm_scale=sm_scale,
            has_alibi=position_encoding(pos_encoding_mode),
            batch_invariant=disable_split_kv or fixed_split_size is not None,
        )  # fmt: skip
        self._has_token_scales = use_token_head_sf
        lists = planning.PageLists(
            page_size,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            block_tables,
            seq_lens,
            max_sequence_kv,
        )
        bound = max_token_per_sequence or uniform_q_len or 0
        fresh = self._plan_batch(planning.Queries(qo_indptr, bound), lists)
        if token_pos_in_items_ptr is not None and prefix_len_ptr is not None:
            refuse(not causal, "token_pos_in_items_ptr needs causal=True")
            planning.add_items(fresh, prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len)
        planning.add_custom_mask(fresh, custom_mask, packed_custom_mask, self._mask_capacity)
        self._keep(fresh)

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: PagedCache,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: PagedCache | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Output:
        """Returns out [tokens, q_heads, head_dim_vo], or (out, lse); lse f32 [tokens, q_heads], base 2 or e."""
        refuse(skip_softmax_threshold_scale_factor is not None, "skip_softmax_threshold_scale_factor: softmax is exact")
        refuse(bool(use_fp16_softmax), "use_fp16_softmax: softmax is computed in fp32")
        refuse(bool(uses_spcompress), "uses_spcompress: compressed caches are not supported")
        fields = {"out": out, "lse": lse, "return_lse": return_lse, "sinks": sinks}
        fields |= {"lse_base": lse_base, "lse_layout": lse_layout}
        return self._attend(q, paged_kv_cache, args, (q_scale, k_scale, v_scale), kv_cache_sf, window_left, fields)

    run_return_lse = partialmethod(run, return_lse=True)

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: PagedCache,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        return_lse: bool = False,
    ) -> Output:
        """Deprecated form of run(), whose options replace those of plan()."""
        has_alibi = position_encoding(pos_encoding_mode)
        self._override(window_left, logits_soft_cap, sm_scale, causal=causal, has_alibi=has_alibi)
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    forward_return_lse = partialmethod(forward, return_lse=True)
