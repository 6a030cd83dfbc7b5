# SPDX-License-Identifier: Apache-2.0
"""Paged attention with sinks whose run() takes (q, cache, sink, sm_scale): flashinfer.attention."""

from __future__ import annotations

from typing import Any

import torch

from fovea.compat.flashinfer.options import position_encoding
from fovea.compat.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

__all__ = ["BatchAttentionWithAttentionSinkWrapper"]


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """The paged prefill wrapper with one extra logit per head in the denominator.

    run(q, cache, sink, sm_scale): sink f32 [q_heads].
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
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        q_data_type: torch.dtype = torch.bfloat16,
        kv_data_type: torch.dtype = torch.bfloat16,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
        window_left: int = -1,
    ) -> None:
        position_encoding(pos_encoding_mode)
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            qo_indptr_buf,
            paged_kv_indptr_buf,
            paged_kv_indices_buf,
            paged_kv_last_page_len_buf,
            custom_mask_buf,
            mask_indptr_buf,
        )
        self._takes_sink_arguments = True
        self._options: dict[str, Any] = {"q_data_type": q_data_type, "kv_data_type": kv_data_type}
        self._options["window_left"] = window_left

    def plan(self, *args: Any, **options: Any) -> None:
        """plan() of the paged prefill wrapper; dtypes and window_left default to those of the constructor."""
        super().plan(*args, **{**self._options, **options})
