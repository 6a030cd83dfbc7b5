# SPDX-License-Identifier: Apache-2.0
"""Adapter of transformers 5.19 to 5.23, and the cache of 5.24.

The attention function receives the cache: one flat tensor in which an allocator per attention type places, for each
block of a request, the keys and then the values of a page of every layer. Two sectors at the front are never
allocated, so page 0 is free for padding.
"""

from transformers.generation.continuous_batching import cache as cache_module

from .contract import Attributes, Fields, Signature, Text
from .paged import CacheView, LayerGroup, PagedCache, PassArguments

FIRST, LAST = (5, 19), (5, 23)
PREFIXES = ("",)
_PLANS = "_fovea_plans"

_BATCHING = "generation/continuous_batching"
CACHE_CONTRACT = (
    Signature(
        f"{_BATCHING}/cache.py", "PagedAttentionCache.update", "self, key_states, value_states, layer_idx, kwargs"
    ),
    Attributes(f"{_BATCHING}/cache.py", "PagedAttentionCache", "config, cache_allocators, layer_to_allocator"),
    Attributes(
        f"{_BATCHING}/cache_allocators/cache_allocator.py",
        "CacheAllocator",
        "index, layer_indices, tokens_per_page, block_physical_stride, cache_tensor",
    ),
    Attributes(
        f"{_BATCHING}/cache_allocators/full_attention.py",
        "FullAttentionCacheAllocator",
        "_kv_token_views, num_key_value_heads, head_dim",
    ),
    Attributes(
        f"{_BATCHING}/cache_allocators/sliding_attention.py", "SlidingAttentionCacheAllocator", "sliding_window"
    ),
    Text(
        f"{_BATCHING}/cache_allocators/full_attention.py",
        "k_view = flattened_view[(2 * i + 0) * self.tokens_per_page :]",
    ),
    Text(
        f"{_BATCHING}/cache_allocators/full_attention.py",
        "pages_stride = self.block_physical_stride // self.tokens_per_page",
    ),
    Fields(
        f"{_BATCHING}/input_outputs.py",
        "PagedAttentionArgs",
        "cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, write_index, read_index, cache, block_table",
    ),
)
CONTRACT = CACHE_CONTRACT + (Text("integrations/flash_attention.py", "if isinstance(cache, PagedAttentionCache):"),)


def install(names: tuple[str, ...]) -> None:
    """Nothing of transformers has to change beyond what every version needs."""


def paged_pass(module, kwargs: dict) -> tuple[PagedCache, PassArguments] | None:
    """Returns the cache and the arguments of a pass of continuous batching, None for another forward pass."""
    cache = kwargs.get("cache")
    if not isinstance(cache, cache_module.PagedAttentionCache):
        return None
    return paged_arguments(cache, module.layer_idx, kwargs)


def paged_arguments(
    cache: cache_module.PagedAttentionCache, layer: int, kwargs: dict
) -> tuple[PagedCache, PassArguments]:
    """Returns Fovea's view of the cache, which lives as long as the cache, and the arguments of one layer."""
    paged = getattr(cache, _PLANS, None)
    if paged is None:
        paged = PagedCache(_view(cache))
        setattr(cache, _PLANS, paged)
    group = paged.group(layer)
    layer_type = cache.layer_to_allocator[layer].layer_type
    block_table = kwargs.get("block_table")
    return paged, PassArguments(
        cu_q=kwargs["cu_seq_lens_q"],
        cu_k=kwargs["cu_seq_lens_k"][layer_type],
        max_q=kwargs["max_length_q"],
        max_k=kwargs["max_length_k"][layer_type],
        read=kwargs["read_index"][group.index],
        write=kwargs["write_index"][group.index],
        block_table=None if block_table is None else block_table[group.index],
    )


def _view(cache: cache_module.PagedAttentionCache) -> CacheView:
    def pages(layer: int):
        allocator = cache.layer_to_allocator[layer]
        place = allocator.layer_indices.index(layer)
        rows = allocator.cache_tensor.flatten(0, 1)  # [rows, kv_heads, dim]
        blocks = rows.shape[0] // allocator.block_physical_stride
        per_layer = rows[: blocks * allocator.block_physical_stride].unflatten(
            0, (blocks, len(allocator.layer_indices), 2, allocator.tokens_per_page)
        )
        return per_layer[:, place, 0], per_layer[:, place, 1]

    return CacheView(
        groups=tuple(
            LayerGroup(
                each.index,
                tuple(each.layer_indices),
                getattr(each, "sliding_window", 0),
                each.tokens_per_page,
                each.block_physical_stride,
            )
            for each in cache.cache_allocators.values()
        ),
        pages=pages,
        rows=lambda layer: cache.layer_to_allocator[layer]._kv_token_views[layer],
    )
