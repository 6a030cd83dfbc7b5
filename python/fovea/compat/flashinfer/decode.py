# SPDX-License-Identifier: Apache-2.0
"""Decode attention over a paged cache: flashinfer.decode."""

from __future__ import annotations

import warnings
from functools import partialmethod
from typing import Any

import torch

from fovea.compat.flashinfer import planning
from fovea.compat.flashinfer.attention import Heads
from fovea.compat.flashinfer.options import position_encoding, refuse
from fovea.compat.flashinfer.paged import Output, PagedCache, PagedWrapper
from fovea.compat.flashinfer.single import single_decode_with_kv_cache

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "fast_decode_plan",
    "single_decode_with_kv_cache",
]

# Options of plan() that older callers pass by position, after page_size.
_POSITIONAL_OPTIONS = (
    "pos_encoding_mode",
    "window_left",
    "logits_soft_cap",
    "q_data_type",
    "kv_data_type",
    "o_data_type",
    "data_type",
    "sm_scale",
    "rope_scale",
    "rope_theta",
    "non_blocking",
    "block_tables",
    "seq_lens",
    "fixed_split_size",
    "disable_split_kv",
    "q_len_per_req",
)


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    """Attention of a few new tokens of each request over a paged cache.

    Arguments and shapes are those of FlashInfer 0.7.4. plan() never waits for the device, so it may be captured in a
    CUDA graph together with run(). docs/compat_flashinfer.md says which arguments are ignored or refused.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        super().__init__(float_workspace_buffer, kv_layout, buffers if use_cuda_graph else None, jit_args)
        self._use_tensor_cores = use_tensor_cores
        self._backend = backend
        self._q_len = 1

    @property
    def use_tensor_cores(self) -> bool:
        return self._use_tensor_cores

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *positional: Any,
        **options: Any,
    ) -> None:
        """Prepares run() for a batch.

        indptr int32 [requests + 1], indices int32 [pages], last_page_len int32 [requests], on the device or in host
        memory. Further options are those of FlashInfer, and max_kv_len: a bound on the tokens of a request. Without
        it, index tensors on the device make tables as wide as all pages of the batch.
        """
        if len(positional) > len(_POSITIONAL_OPTIONS):
            raise TypeError(f"plan() takes at most {7 + len(_POSITIONAL_OPTIONS)} positional arguments")
        for name, value in zip(_POSITIONAL_OPTIONS, positional, strict=False):
            if name in options:
                raise TypeError(f"plan() got {name} by position and by keyword")
            options[name] = value
        lists = planning.PageLists(
            page_size,
            indptr,
            indices,
            last_page_len,
            block_tables=options.pop("block_tables", None),
            seq_lens=options.pop("seq_lens", None),
            max_kv_len=options.pop("max_kv_len", None),
        )
        self._plan(lists, last_page_len.numel(), (num_qo_heads, num_kv_heads, head_dim), **options)

    begin_forward = plan

    def _plan(
        self,
        lists: planning.PageLists,
        requests: int,
        shape: tuple[int, int, int],
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        window_right: int = 0,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        is_causal: bool | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        refuse(window_right != 0, f"window_right is {window_right}, must be 0: a token sees none after itself")
        is_default = is_causal is None or is_causal == (q_len_per_req > 1)
        refuse(not is_default, f"is_causal is {is_causal} with q_len_per_req {q_len_per_req}")
        if q_len_per_req > 1:
            self._check_several_tokens(q_len_per_req)
        if self.is_cuda_graph_enabled and self._pass is not None and self._q_len != q_len_per_req:
            raise ValueError(f"q_len_per_req is {q_len_per_req}, it is frozen by use_cuda_graph as {self._q_len}")
        q_dtype = q_data_type if q_data_type is not None else data_type or "float16"
        kv_dtype = kv_data_type if kv_data_type is not None else data_type or q_dtype
        q_heads, kv_heads, head_dim = shape
        self._heads = Heads(
            q_heads, kv_heads, head_dim, head_dim, q_dtype, kv_dtype, o_data_type,
            causal=True,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap or 0.0,
            sm_scale=sm_scale,
            has_alibi=position_encoding(pos_encoding_mode),
            batch_invariant=disable_split_kv or fixed_split_size is not None,
        )  # fmt: skip
        self._has_token_scales = use_token_head_sf
        self._q_len = q_len_per_req
        self._keep(self._plan_batch(planning.Queries.uniform(requests, q_len_per_req), lists))

    def _check_several_tokens(self, q_len: int) -> None:
        """Raises the errors that FlashInfer raises for several tokens per request."""
        if not self._use_tensor_cores:
            raise ValueError(f"q_len_per_req is {q_len}, more than 1 needs use_tensor_cores=True")
        refuse(self._backend == "fa3", f"q_len_per_req {q_len} needs backend fa2 or auto, backend is {self._backend}")

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
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: PagedCache | None = None,
    ) -> Output:
        """Returns out [requests * q_len_per_req, q_heads, head_dim], or (out, lse); lse f32 [.., q_heads], base 2."""
        _, batch = self._planned()
        refuse(skip_softmax_threshold_scale_factor is not None, "skip_softmax_threshold_scale_factor: softmax is exact")
        if q_len_per_req is not None:
            warnings.warn("q_len_per_req of run() is deprecated, pass it to plan()", DeprecationWarning, stacklevel=2)
        if q.shape[0] != batch.requests * self._q_len or q_len_per_req not in (None, self._q_len):
            raise ValueError(
                f"q has {q.shape[0]} rows, planned were {batch.requests} requests with q_len_per_req {self._q_len}"
            )
        fields = {"out": out, "lse": lse, "return_lse": return_lse, "sinks": sinks}
        return self._attend(q, paged_kv_cache, args, (q_scale, k_scale, v_scale), kv_cache_sf, window_left, fields)

    run_return_lse = partialmethod(run, return_lse=True)

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: PagedCache,
        pos_encoding_mode: str = "NONE",
        q_scale: float | None = None,
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
        self._override(window_left, logits_soft_cap, sm_scale, has_alibi=position_encoding(pos_encoding_mode))
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    forward_return_lse = partialmethod(forward, return_lse=True)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """The decode wrapper with use_cuda_graph, by its older name."""

    def __init__(
        self,
        workspace_buffer: torch.Tensor,
        indptr_buffer: torch.Tensor,
        indices_buffer: torch.Tensor,
        last_page_len_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer,
            kv_layout,
            use_cuda_graph=True,
            use_tensor_cores=use_tensor_cores,
            paged_kv_indptr_buffer=indptr_buffer,
            paged_kv_indices_buffer=indices_buffer,
            paged_kv_last_page_len_buffer=last_page_len_buffer,
        )


def fast_decode_plan(
    wrapper: BatchDecodeWithPagedKVCacheWrapper,
    *args: Any,
    global_override_indptr_cpu: torch.Tensor | None = None,
    **options: Any,
) -> None:
    """plan() for a wrapper that has been planned before.

    plan() does not wait for the device, so both do the same work. The host copy of indptr makes tables small.
    """
    if wrapper._pass is None:
        raise ValueError("fast_decode_plan needs a prior plan() of the wrapper")
    has_bound = wrapper.is_cuda_graph_enabled or options.get("max_kv_len") is not None
    if global_override_indptr_cpu is not None and not has_bound:
        page_size = args[6] if len(args) > 6 else options["page_size"]
        pages = global_override_indptr_cpu[1:] - global_override_indptr_cpu[:-1]
        options["max_kv_len"] = max(int(pages.max()), 1) * page_size if pages.numel() else 1
    type(wrapper).plan(wrapper, *args, **options)
