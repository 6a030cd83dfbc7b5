# SPDX-License-Identifier: Apache-2.0
"""Specs of layers, from the tensors that transformers passes, and backends and staging memory for them."""

import torch

import fovea
from fovea.torch import BackendCache, dtype_name
from fovea.torch.lasting import allocate, thread_pool


def new_backends(device: torch.device) -> BackendCache:
    """Returns a cache of backends that use as many threads of a CPU as torch does now."""
    return BackendCache(threads=thread_pool() if device.type == "cpu" else None)


def staging(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Returns zeroed memory of the dtype and device of a tensor, which later calls may write in any mode of torch: what
    is made in inference mode can be written there only."""

    def make() -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.zeros(shape, dtype=like.dtype, device=like.device)

    return allocate(make, like.device)


def attention_spec(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scope: str,
    scaling: float | None,
    window: int = 0,
    chunk: int = 0,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> fovea.AttentionSpec:
    """Returns the spec of a layer from its tensors, [batch, heads, tokens, dim] each."""
    return fovea.AttentionSpec(
        scope=scope,
        q_heads=query.shape[1],
        kv_heads=key.shape[1],
        head_dim=query.shape[3],
        head_dim_v=value.shape[3],
        q_dtype=dtype_name(query.dtype),
        window=window,
        chunk=chunk,
        scores=fovea.ScoreSpec(
            softmax_scale=scaling or 0.0,
            logit_cap=softcap or 0.0,
            has_sinks=sinks is not None,
        ),
    )


def cache_spec(key: torch.Tensor, value: torch.Tensor, layers: int = 1) -> fovea.KvCacheSpec:
    """Returns the spec of a cache from the keys and values of a layer, [pages, page_size, kv_heads, dim] each."""
    return fovea.KvCacheSpec(
        dtype=dtype_name(key.dtype),
        layers=layers,
        kv_heads=key.shape[2],
        head_dim=key.shape[3],
        head_dim_v=value.shape[3],
        page_size=key.shape[1],
    )
