# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention (MLA).

SGLang's model absorbs the up-projection of keys into the queries itself, except for prompts without cached tokens,
whose keys it up-projects. So Fovea gets absorbed queries over the cache, or plain heads without one.
"""

from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention

from fovea.sglang.plugin import NAME, overridden


def prepare_models() -> None:
    """Asks DeepSeek's models for queries and keys in two parts, which saves the kernels that join them, and for the
    division of passes that Fovea takes under each of its names. It is that of an unknown backend, Triton's."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
        handle_attention_triton,
    )
    from sglang.srt.models.deepseek_common.utils import FORWARD_ABSORB_CORE_ATTENTION_BACKENDS

    for name in (NAME, *overridden()):
        if name not in FORWARD_ABSORB_CORE_ATTENTION_BACKENDS:
            FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.append(name)
        AttentionBackendRegistry.register(name, handle_attention_triton)


def check_plain_heads(forward_batch: Any) -> None:
    """Raises NotImplementedError if up-projected keys are those of a prefix: Fovea gets those of whole prompts."""
    if forward_batch.mha_return_lse or forward_batch.attn_attend_prefix_cache or forward_batch.mha_one_shot:
        raise NotImplementedError("up-projected keys of a cached prefix: Fovea attends to cached tokens absorbed")


def tensors(
    layer: RadixAttention,
    q: torch.Tensor,
    k: torch.Tensor | None,
    q_rope: torch.Tensor | None,
    k_rope: torch.Tensor | None,
) -> dict[str, Any]:
    """Returns the arguments of fovea.Backend.forward() for absorbed queries, which come in one part or in two."""
    heads, rank = layer.tp_q_head_num, layer.v_head_dim
    if q_rope is None:
        found = {"q": q.view(-1, heads, layer.qk_head_dim)}
    else:
        found = {"q": q.view(-1, heads, rank), "q_rope": q_rope.view(-1, heads, layer.qk_head_dim - rank)}
    if k is None:
        return found
    if k_rope is None:
        rows = k.view(-1, layer.qk_head_dim)
        return found | {"latent": rows[:, :rank], "k_rope": rows[:, rank:]}
    return found | {"latent": k.view(-1, rank), "k_rope": k_rope.view(-1, layer.qk_head_dim - rank)}
