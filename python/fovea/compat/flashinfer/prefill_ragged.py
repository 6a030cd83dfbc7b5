# SPDX-License-Identifier: Apache-2.0
"""Prefill attention over ragged tensors."""

from __future__ import annotations

from dataclasses import replace
from functools import partialmethod
from typing import Any

import torch

from fovea.compat.flashinfer import indices, planning, ragged
from fovea.compat.flashinfer.attention import Call, Heads, Pass, softmax_scale
from fovea.compat.flashinfer.options import position_encoding, refuse, takes_sink_arguments
from fovea.compat.flashinfer.paged import Output, PagedCache


class BatchPrefillWithRaggedKVCacheWrapper:
    """Attention over keys and values that come as ragged tensors.

    Arguments and shapes are those of FlashInfer 0.7.4. Requests with as many keys as queries need no table: pass the
    same tensor as qo_indptr and kv_indptr, or host tensors.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        kv_indptr_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
    ) -> None:
        refuse(variant_owns_mask, "variant_owns_mask: masks of custom kernels")
        planning.check_layout(kv_layout)
        if use_cuda_graph and (qo_indptr_buf is None or kv_indptr_buf is None):
            raise ValueError("use_cuda_graph needs qo_indptr_buf and kv_indptr_buf")
        self._kv_layout = kv_layout
        self.device = float_workspace_buffer.device
        self._is_graph = use_cuda_graph
        self._mask_capacity = planning.mask_capacity(custom_mask_buf, use_cuda_graph)
        self._takes_sink_arguments = takes_sink_arguments(jit_args)
        self._heads: Heads | None = None
        self._pass: Pass | None = None
        self._kv_indptr: torch.Tensor | None = None

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._is_graph

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor | None = None
    ) -> None:
        """Does nothing: workspaces belong to fovea.torch."""

    def end_forward(self) -> None:
        """Does nothing."""

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
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
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: torch.Tensor | None = None,
        o_indptr: torch.Tensor | None = None,
        qo_indptr_cpu: torch.Tensor | None = None,
        kv_indptr_cpu: torch.Tensor | None = None,
        uniform_q_len: int | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        """Prepares run() for a batch. qo_indptr, kv_indptr: int32 [requests + 1], on the device or in host memory."""
        refuse(v_indptr is not None, "v_indptr: v has the rows of k")
        refuse(o_indptr is not None, "o_indptr: out has the rows of q")
        refuse(use_token_head_sf, "use_token_head_sf: scales per token need a paged cache")
        if token_pos_in_items_ptr is not None or prefix_len_ptr is not None:
            refuse(True, "token_pos_in_items_ptr: multi-item scoring needs a paged cache")
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
        is_same = qo_indptr.data_ptr() == kv_indptr.data_ptr() and qo_indptr.shape == kv_indptr.shape
        q_source = qo_indptr if qo_indptr_cpu is None else qo_indptr_cpu
        kv_source = kv_indptr if kv_indptr_cpu is None else kv_indptr_cpu
        queries = planning.Queries(q_source, max_token_per_sequence or uniform_q_len or 0)
        fresh = self._plan_lengths(queries, kv_source, max_sequence_kv, is_same)
        planning.add_custom_mask(fresh, custom_mask, packed_custom_mask, self._mask_capacity)
        self._pass = planning.keep_addresses(self._pass, fresh) if self._is_graph else fresh

    begin_forward = plan

    def _plan_lengths(
        self, queries: planning.Queries, kv_indptr: torch.Tensor, max_kv_len: int | None, is_same: bool
    ) -> Pass:
        """Returns the pass without its table, which run() makes when it knows the rows of k."""
        is_replayed = self._is_graph or indices.is_capturing(self.device)
        host_q = None if is_replayed else queries.host_lengths()
        host_kv = indices.lengths_of(kv_indptr) if not is_replayed and indices.is_on_host(kv_indptr) else None
        if host_q is not None and host_kv is not None and host_q.shape == host_kv.shape:
            is_same = torch.equal(host_q, host_kv)
        here = indices.to_device(kv_indptr, self.device, "kv_indptr")
        if self._is_graph and self._kv_indptr is not None:
            self._kv_indptr.copy_(here)
        else:
            self._kv_indptr = here.clone() if self._is_graph else here
        q_indptr = queries.on_device(self.device)
        if q_indptr.shape != here.shape:
            raise ValueError(f"qo_indptr has {q_indptr.numel()} elements, kv_indptr has {here.numel()}")
        requests = here.numel() - 1
        return Pass(
            q_indptr=q_indptr,
            kv_lens=indices.lengths_of(here),
            request_rows=torch.arange(requests, dtype=torch.int32, device=self.device),
            table=None,
            max_kv_len=max_kv_len or planning.bound_of(host_kv),
            max_q_len=queries.max_q_len or planning.bound_of(host_q),
            host_q_lens=host_q,
            host_kv_lens=host_kv,
            is_replayed=is_replayed,
            is_packed=is_same and ragged.can_pack(self._heads),
        )

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        o_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        kv_cache_sf: PagedCache | None = None,
    ) -> Output:
        """Returns out [tokens, q_heads, head_dim_vo], or (out, lse). q, k, v: [tokens, heads, dim]; HND: k and v
        [heads, tokens, dim]."""
        if self._heads is None or self._pass is None:
            raise RuntimeError("run() needs a prior plan()")
        refuse(kv_cache_sf is not None, "kv_cache_sf: NVFP4 caches are not supported")
        refuse(o_scale not in (None, 1.0), f"o_scale is {o_scale}: the output is not quantised")
        heads, sinks = self._heads, None
        if args:
            refuse(not self._takes_sink_arguments, f"run() got {len(args)} arguments of a custom kernel")
            if len(args) != 2:
                raise TypeError(f"run() of an AttentionSink wrapper got {len(args)} arguments, takes (sink, sm_scale)")
            sinks, heads = args[0], replace(heads, sm_scale=float(args[1]))
        k, v = ragged.as_nhd(k, self._kv_layout), ragged.as_nhd(v, self._kv_layout)
        rows = max(k.shape[0], 1)
        stride = min(self._pass.max_kv_len or rows, rows)
        keeps = not self._pass.is_replayed and not indices.is_capturing(self.device)
        batch = ragged.needs_table(self._pass, rows, self._kv_indptr, stride, keeps)
        if batch.max_kv_len == 0:  # nothing bounds a request but the rows of k
            batch = replace(batch, max_kv_len=rows)
        call = Call(
            q, softmax_scale(heads, q_scale, k_scale), out, lse, return_lse, lse_base, lse_layout, v_scale, sinks
        )
        return ragged.run_ragged(heads, batch, call, k, v)

    run_return_lse = partialmethod(run, return_lse=True)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        return_lse: bool = False,
    ) -> Output:
        """Deprecated form of run(), whose options replace those of plan()."""
        if self._heads is None:
            raise RuntimeError("forward() needs a prior plan()")
        self._heads = replace(
            self._heads,
            causal=causal,
            has_alibi=position_encoding(pos_encoding_mode),
            window_left=window_left,
            logits_soft_cap=logits_soft_cap or 0.0,
            sm_scale=sm_scale,
        )
        return self.run(q, k, v, return_lse=return_lse)

    forward_return_lse = partialmethod(forward, return_lse=True)
