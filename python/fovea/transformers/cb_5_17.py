# SPDX-License-Identifier: Apache-2.0
"""Adapter of transformers 5.17.

The attention function receives the cache. Its tensors are [rows, kv_heads, dim], one for each layer of a group; groups
share them, block by block. Names of continuous batching begin with "paged|".
"""

from transformers.generation.continuous_batching import cache as cache_module

from .contract import Attributes, Fields, Signature, Text
from .paged import CacheView, LayerGroup, PagedCache, PassArguments

FIRST, LAST = (5, 17), (5, 17)
PREFIXES = ("", "paged|")
_PLANS = "_fovea_plans"

_BATCHING = "generation/continuous_batching"
CONTRACT = (
    Signature(
        f"{_BATCHING}/cache.py",
        "PagedAttentionCache.update",
        "self, key_states, value_states, layer_idx, read_index, write_index",
    ),
    Attributes(
        f"{_BATCHING}/cache.py",
        "PagedAttentionCache",
        "block_size, key_cache, value_cache, layer_index_to_group_indices, sliding_windows, num_groups",
    ),
    Fields(
        f"{_BATCHING}/input_outputs.py",
        "PagedAttentionArgs",
        "cu_seq_lens_q, cu_seq_lens_k, max_seqlen_q, max_seqlen_k, write_index, read_index, cache, block_table",
    ),
    Text(f"{_BATCHING}/continuous_api.py", 'model.set_attn_implementation(f"paged|{target_implem}")'),
)


def install(names: tuple[str, ...]) -> None:
    """Nothing of transformers has to change beyond what every version needs."""


def paged_pass(module, kwargs: dict) -> tuple[PagedCache, PassArguments] | None:
    """Returns the cache and the arguments of a pass of continuous batching, None for another forward pass."""
    cache = kwargs.get("cache")
    if cache is None:
        if module.config._attn_implementation.startswith("paged|"):
            raise ValueError(
                f"{module.config._attn_implementation} was called without a paged cache; it is for generate_batch, "
                "use the name without 'paged|' for an ordinary forward pass"
            )
        return None
    paged = getattr(cache, _PLANS, None)
    if paged is None:
        paged = PagedCache(_view(cache))
        setattr(cache, _PLANS, paged)
    group = paged.group(module.layer_idx)
    cu_k, max_k = kwargs["cu_seq_lens_k"], kwargs["max_seqlen_k"]
    if isinstance(cu_k, dict):
        layer_type = "sliding_attention" if group.window else "full_attention"
        cu_k, max_k = cu_k[layer_type], max_k[layer_type]
    block_table = kwargs["block_table"]
    return paged, PassArguments(
        cu_q=kwargs["cu_seq_lens_q"],
        cu_k=cu_k,
        max_q=kwargs["max_seqlen_q"],
        max_k=max_k,
        read=kwargs["read_index"][group.index],
        write=kwargs["write_index"][group.index],
        block_table=None if block_table is None else block_table[group.index],
    )


def _view(cache: cache_module.PagedAttentionCache) -> CacheView:
    layers: list[list[int]] = [[] for _ in range(cache.num_groups)]
    for layer, (group, _) in sorted(cache.layer_index_to_group_indices.items()):
        layers[group].append(layer)

    def rows(layer: int):
        place = cache.layer_index_to_group_indices[layer][1]
        return cache.key_cache[place], cache.value_cache[place]

    def pages(layer: int):
        return tuple(each.unflatten(0, (-1, cache.block_size)) for each in rows(layer))

    return CacheView(
        groups=tuple(
            LayerGroup(index, tuple(members), _window(cache, members[0]), cache.block_size, cache.block_size)
            for index, members in enumerate(layers)
        ),
        pages=pages,
        rows=rows,
    )


def _window(cache: cache_module.PagedAttentionCache, layer: int) -> int:
    window = cache.sliding_windows[layer]
    return 0 if window == 1 else window  # transformers says 1 for none
