# SPDX-License-Identifier: Apache-2.0
"""The parts that only vLLM 0.24 has: a backend names the shape of its cache and the order of axes in memory."""

from typing import Any

import torch


def rank_merger(all_to_all: bool) -> Any:
    """Returns the collective that merges (out, lse) of the ranks with decode context parallelism."""
    if all_to_all:
        from vllm.v1.attention.ops.dcp_alltoall import dcp_a2a_lse_reduce

        return dcp_a2a_lse_reduce
    from vllm.v1.attention.ops.common import cp_lse_ag_out_rs

    return cp_lse_ag_out_rs


class MhaCache:
    """The cache of MhaBackend: [blocks, 2, block_size, kv_heads, head_size], K before V."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return num_blocks, 2, block_size, num_kv_heads, head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        from vllm.v1.attention.backends.utils import get_kv_cache_layout

        heads_first = get_kv_cache_layout() == "HND"
        if include_num_layers_dimension:
            return (1, 4, 0, 2, 3, 5) if heads_first else (1, 0, 2, 3, 4, 5)
        return (0, 1, 3, 2, 4) if heads_first else (0, 1, 2, 3, 4)

    @staticmethod
    def views(cache: torch.Tensor, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the views (k, v), each [blocks, block_size, kv_heads, head_size]."""
        k, v = cache.unbind(1)
        return k, v


class MlaCache:
    """The cache of MlaBackend: [blocks, block_size, kv_lora_rank + rope_dim]."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return num_blocks, block_size, head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        return (1, 0, 2, 3) if include_num_layers_dimension else (0, 1, 2)

    @staticmethod
    def rows(cache: torch.Tensor) -> torch.Tensor:
        """Returns the view [blocks, block_size, kv_lora_rank + rope_dim]."""
        return cache
