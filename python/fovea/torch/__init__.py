# SPDX-License-Identifier: Apache-2.0
"""Fovea for torch: backends over torch tensors, and attention as torch ops.

    import torch
    from fovea.torch import paged_attention, write_kv

    write_kv(k, v, k_cache, v_cache, slots)
    out, lse = paged_attention(q, k_cache, v_cache, page_table, kv_lens)

The ops trace in torch.compile(fullgraph=True) and may be captured in CUDA graphs. They have no backward pass.
`import fovea` alone does not import torch.
"""

from fovea.torch.attention_ops import paged_attention, varlen_attention
from fovea.torch.backend_cache import BackendCache, backend_for, default_cache
from fovea.torch.backend_ops import BackendOps
from fovea.torch.cache_ops import merge_states, write_kv
from fovea.torch.dtypes import device_name, dtype_name
from fovea.torch.lasting import consecutive

__all__ = [
    "BackendCache",
    "BackendOps",
    "backend_for",
    "consecutive",
    "default_cache",
    "device_name",
    "dtype_name",
    "merge_states",
    "paged_attention",
    "varlen_attention",
    "write_kv",
]
