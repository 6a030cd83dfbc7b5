# SPDX-License-Identifier: Apache-2.0
"""Stores in paged caches and merges of attention states, as torch ops."""

from functools import lru_cache

import torch

import fovea
from fovea.torch.backend_cache import default_cache
from fovea.torch.dtypes import device_name, dtype_name
from fovea.torch.lasting import consecutive, span
from fovea.torch.library import define, refuse_gradients
from fovea.torch.specs import attention_spec, batch_limits, cache_spec

_PLAIN_SCORES = (0.0, 0.0, False, False)


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    order: str = "nhd",
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Stores k and v in a paged cache: token i in slot slots[i], which is page * page_size + its place in the page.

    k [tokens, kv_heads, head_dim]; v [tokens, kv_heads, head_dim_v]; slots int64 [tokens], -1 skips a token, and no
    slot occurs twice. Caches and scales are as in paged_attention. Inside torch.compile they may not be two separate
    parts of one tensor.
    """
    torch.ops.fovea.write_kv.default(k, v, k_cache, v_cache, slots, order, k_scale, v_scale)


def merge_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out, lse) over the keys of two disjoint sets from those over each set.

    out_a and out_b [tokens, heads, dim], fp32 on a CPU, bf16 or fp16; lse_a and lse_b f32 [tokens, heads], natural
    logarithm, -inf where a row saw no key.
    """
    return torch.ops.fovea.merge_states.default(out_a, lse_a, out_b, lse_b)


def _run_write(k, v, k_cache, v_cache, slots, order, k_scale, v_scale):
    refuse_gradients(k, v)
    tokens = k.shape[0]
    if tokens == 0:
        return
    cache = cache_spec(k_cache.shape, v_cache.shape, k_cache.dtype, order, None if k_scale is None else k_scale.numel())
    layer = (k_cache, v_cache) if k_scale is None else (k_cache, v_cache, k_scale, v_scale)
    # Cross attention can store without attending: one request without keys, whose new tokens go to the slots.
    spec = attention_spec(
        "cross", cache.kv_heads, cache.kv_heads, k.shape[2], v.shape[2], k.dtype, 0, False, _PLAIN_SCORES
    )
    zero = consecutive(1, k.device)
    batch = fovea.Batch(
        mode="extend",
        requests=1,
        tokens=tokens,
        q_indptr=span(tokens, k.device),
        request_rows=zero,
        cross_lens=zero,
        cross_table=zero.view(1, 1),
        out_slots=slots,
        max_q_len=tokens,
    )
    default_cache.run(spec, cache, (layer,), batch_limits(1, tokens, tokens, 1, 1), batch, k=k, v=v)


def _fake_write(k, v, k_cache, v_cache, slots, order, k_scale, v_scale):
    first, second = _elements(k_cache), _elements(v_cache)
    shared = k_cache.untyped_storage()._cdata == v_cache.untyped_storage()._cdata
    if shared and (first.stop <= second.start or second.stop <= first.start):
        # torch 2.11 would copy the second one, from a wrong address.
        raise NotImplementedError(
            "k_cache and v_cache are parts of one tensor: torch.compile takes caches with memory of their own, or "
            "parts that alternate within it, as in [pages, 2, ...]"
        )


def _elements(tensor: torch.Tensor) -> range:
    """Returns the range of a tensor's elements in its storage."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return range(tensor.storage_offset(), tensor.storage_offset() + last + 1)


@lru_cache(maxsize=256)
def _merger(dtype: torch.dtype, heads: int, dim: int, device: torch.device) -> fovea.StateMerger:
    return fovea.StateMerger(dtype=dtype_name(dtype), heads=heads, dim=dim, device=device_name(device))


def _run_merge(out_a, lse_a, out_b, lse_b):
    refuse_gradients(out_a, lse_a, out_b, lse_b)
    out = out_a.clone(memory_format=torch.contiguous_format)
    lse = lse_a.clone(memory_format=torch.contiguous_format)
    if out.shape[0] > 0:
        with default_cache.lock:
            _merger(out.dtype, out.shape[1], out.shape[2], out.device).merge(out, lse, out_b, lse_b.contiguous())
    return out, lse


def _fake_merge(out_a, lse_a, out_b, lse_b):
    return (
        torch.empty_like(out_a, memory_format=torch.contiguous_format),
        torch.empty_like(lse_a, memory_format=torch.contiguous_format),
    )


define(
    "write_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, str order, Tensor? k_scale, "
    "Tensor? v_scale) -> ()",
    _run_write,
    _fake_write,
)
define(
    "merge_states(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)",
    _run_merge,
    _fake_merge,
)
