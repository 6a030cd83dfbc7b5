# SPDX-License-Identifier: Apache-2.0
"""Adapter of transformers 5.24.

The model calls PagedAttentionCache.update(), which would copy every key that a layer attends to, before it calls the
attention function. For Fovea's implementations update() only notes the cache in the keyword arguments.
"""

from transformers.generation.continuous_batching import cache as cache_module

from . import cb_5_19
from .contract import Text
from .paged import PagedCache, PassArguments

FIRST, LAST = (5, 24), (5, 24)
PREFIXES = ("",)

CONTRACT = cb_5_19.CACHE_CONTRACT + (
    Text(
        "models/llama/modeling_llama.py",
        "key_states, value_states = cache.update(key_states, value_states, self.layer_idx, kwargs=kwargs)",
    ),
)

_CACHE = "fovea_paged_cache"


def install(names: tuple[str, ...]) -> None:
    """Makes PagedAttentionCache.update() leave storing and reading to Fovea if the model uses one of `names`."""
    original = cache_module.PagedAttentionCache.update

    def update(self, key_states, value_states, layer_idx, kwargs):
        if self.config._attn_implementation not in names:
            return original(self, key_states, value_states, layer_idx, kwargs)
        kwargs[_CACHE] = self
        return key_states, value_states

    cache_module.PagedAttentionCache.update = update


def paged_pass(module, kwargs: dict) -> tuple[PagedCache, PassArguments] | None:
    """Returns the cache and the arguments of a pass of continuous batching, None for another forward pass."""
    cache = kwargs.pop(_CACHE, None)
    if cache is None:
        return None
    return cb_5_19.paged_arguments(cache, module.layer_idx, kwargs)
