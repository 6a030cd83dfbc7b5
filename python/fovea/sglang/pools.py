# SPDX-License-Identifier: Apache-2.0
"""SGLang's pools of keys and values, as Fovea's pools of lent memory."""

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

import fovea
from fovea.serving.specs import cache_scale
from fovea.torch import dtype_name


@dataclass(frozen=True)
class Place:
    """A layer's pool, the index of its cache there, and whether it is in a pool of windows, which has other slots."""

    pool: Any
    index: int
    in_window_pool: bool = False


def find(pool: Any, layer_id: int) -> Place:
    """Returns the place of a layer in a model's pool. Raises NotImplementedError for pools that Fovea cannot read."""
    if type(pool) is SWAKVPool:
        index, in_window_pool = pool.layers_mapping[layer_id]
        inner = pool.swa_kv_pool if in_window_pool else pool.full_kv_pool
        return Place(_readable(inner), index, in_window_pool)
    if type(pool) is HybridLinearKVPool:
        return Place(_readable(pool.full_kv_pool), pool.full_attention_layer_id_mapping[layer_id])
    return Place(_readable(pool), layer_id - pool.start_layer)


def _readable(pool: Any) -> Any:
    if type(pool) not in (MHATokenToKVPool, MLATokenToKVPool):
        raise NotImplementedError(
            f"the pool is a {type(pool).__name__}: Fovea reads MHATokenToKVPool and MLATokenToKVPool, also inside "
            "SWAKVPool and HybridLinearKVPool"
        )
    if getattr(pool, "is_quantized_kv_cache", False):
        raise NotImplementedError(
            "the pool has quantised keys with scales per block: Fovea has fp8 with a scale a layer"
        )
    layout = getattr(pool, "kv_cache_layout", "nhd")
    if layout not in ("nhd", "hnd"):
        raise NotImplementedError(f"kv_cache_layout is {layout}: Fovea reads nhd and hnd")
    if pool.post_capture_active:
        raise NotImplementedError("the pool gets its memory after graphs were captured: their addresses would be wrong")
    return pool


def wait(pool: Any, layer_id: int) -> None:
    """Waits until a layer's cache was loaded from the host, where SGLang loads caches layer by layer."""
    if pool.layer_transfer_counter is not None:
        pool.layer_transfer_counter.wait_until(layer_id - pool.start_layer)


def cache_spec(pool: Any) -> fovea.KvCacheSpec:
    """Returns the spec of a pool, with all of its layers."""
    dtype = dtype_name(pool.dtype)
    if isinstance(pool, MLATokenToKVPool):
        return fovea.KvCacheSpec(
            layout="mla",
            dtype=dtype,
            scale=cache_scale(dtype),
            layers=pool.layer_num,
            kv_heads=1,
            head_dim=pool.kv_cache_dim,
            head_dim_v=pool.kv_lora_rank,
            page_size=pool.page_size,
        )
    return fovea.KvCacheSpec(
        order="hnd" if pool.use_hnd else "nhd",
        dtype=dtype,
        scale=cache_scale(dtype),
        layers=pool.layer_num,
        kv_heads=pool.head_num,
        head_dim=pool.head_dim,
        head_dim_v=pool.v_head_dim,
        page_size=pool.page_size,
    )


def caches(pool: Any, scales: dict[int, tuple[torch.Tensor, ...]]) -> list[tuple[torch.Tensor, ...]]:
    """Returns the caches of a pool's layers in the form that fovea.KvPool.lend() takes. `scales`: of keys and values of
    a layer of an fp8 pool, by its index; 1 where it has none."""
    is_mla = isinstance(pool, MLATokenToKVPool)
    layers = []
    for index in range(pool.layer_num):
        tensors = (pool.kv_buffer[index],) if is_mla else (pool.k_buffer[index], pool.v_buffer[index])
        views = tuple(_pages(pool, tensor) for tensor in tensors)
        if pool.dtype.itemsize == 1:
            one = torch.ones(1, dtype=torch.float32, device=tensors[0].device)
            views += scales.get(index, (one,) * len(views))
        layers.append(views)
    return layers


def _pages(pool: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Returns the view [pages, page_size, heads, dim] of rows of tokens; pools in the order hnd have pages already."""
    if tensor.dtype != pool.dtype:
        tensor = tensor.view(pool.dtype)
    if tensor.dim() == 4:
        return tensor
    pages = tensor.shape[0] // pool.page_size
    return tensor[: pages * pool.page_size].unflatten(0, (pages, pool.page_size))
