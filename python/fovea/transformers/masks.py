# SPDX-License-Identifier: Apache-2.0
"""The mask function of Fovea's implementations."""

import torch


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int | torch.Tensor = 0,
    mask_function=None,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    config=None,
    device: torch.device | str = "cpu",
    **kwargs,
) -> torch.Tensor | None:
    """Returns which keys of a layer are not padding, [batch, keys], or None if all are.

    bool; for models with attention chunks int64, the place of each token in its sequence plus 1, because their caches
    drop tokens and chunks are counted from the first token. Order, windows and chunks are Fovea's. Keys behind the end
    of the mask are unused places of a static cache.
    """
    if use_vmap:
        raise NotImplementedError(
            "the model combines its mask with a function of its own (or_mask_function or and_mask_function), which "
            "Fovea's attention implementation does not take; use attn_implementation 'sdpa'"
        )
    if attention_mask is not None and attention_mask.ndim != 2:
        raise NotImplementedError(f"attention_mask has {attention_mask.ndim} dimensions, must have 2: [batch, tokens]")
    first, end = int(kv_offset), int(q_offset) + q_length
    is_static = end - first < kv_length
    if attention_mask is None:
        if not is_static and first == 0:
            return None
        attention_mask = torch.ones((batch_size, end), dtype=torch.bool, device=device)
    mask = attention_mask[:, first : min(end, first + kv_length)].to(torch.bool)
    if getattr(config, "attention_chunk_size", None) is not None and first > 0:
        return attention_mask.cumsum(1)[:, first : first + mask.shape[1]] * mask
    return None if not is_static and bool(mask.all()) else mask
