# SPDX-License-Identifier: Apache-2.0
"""The parts that only vLLM 0.33 has (since 0.29): every layer's cache is a view [blocks, heads, tokens, content], in
any order in memory. A row of content holds K, then V."""

from typing import Any

import torch


def rank_merger(all_to_all: bool) -> Any:
    """Raises NotImplementedError: layers exchange in other ways, which the plug-in does not know yet."""
    raise NotImplementedError("decode context parallelism: the plug-in has it for vLLM before 0.29 alone")


class MhaCache:
    """The cache of MhaBackend. Fovea reads any order of axes, so it asks for none."""

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @staticmethod
    def views(cache: torch.Tensor, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the views (k, v), each [blocks, block_size, kv_heads, head_size]."""
        rows = cache.transpose(1, 2)
        return rows[..., :head_size], rows[..., head_size : 2 * head_size]


class MlaCache:
    """The cache of MlaBackend. It has one head."""

    @staticmethod
    def rows(cache: torch.Tensor) -> torch.Tensor:
        """Returns the view [blocks, block_size, kv_lora_rank + rope_dim]."""
        return cache.squeeze(1) if cache.dim() == 4 else cache
