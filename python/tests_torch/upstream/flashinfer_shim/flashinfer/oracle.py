# SPDX-License-Identifier: Apache-2.0
"""Attention of one request in fp32 by its definition: the oracle of FlashInfer's tests of batches."""

from __future__ import annotations

import math
from typing import Any

import torch

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

_BLOCK = 256  # queries at once, so that scores of long requests fit in memory


def _rotate(rows: torch.Tensor, positions: torch.Tensor, scale: float, theta: float) -> torch.Tensor:
    """Rotates the halves of each head, in fp32."""
    half = rows.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=rows.device, dtype=torch.float32) / half) / scale
    angles = positions[:, None, None].float() * frequencies
    a, b = rows.float().split(half, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def _slopes(heads: int, device: torch.device) -> torch.Tensor:
    powers = 2 ** int(math.log2(heads))
    first = [2.0 ** (-8.0 * i / powers) for i in range(1, powers + 1)]
    rest = [2.0 ** (-4.0 * i / powers) for i in range(1, 2 * (heads - powers), 2)]
    return torch.tensor(first + rest, device=device)


def _visible(q_at: torch.Tensor, keys: torch.Tensor, causal: bool, window_left: int) -> torch.Tensor:
    visible = torch.ones(len(q_at), len(keys), dtype=torch.bool, device=keys.device)
    if causal:
        visible &= keys[None] <= q_at[:, None]
    if window_left >= 0:
        visible &= keys[None] >= q_at[:, None] - window_left
    return visible


def single_prefill_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    custom_mask: torch.Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
    k_scale: float | None = None,
    v_scale: float | None = None,
    **unused: Any,
) -> Result:
    """q [q_len, heads, dim]; k and v [kv_len, heads, dim] or, HND, [heads, kv_len, dim]. Returns out, lse to base 2."""
    if kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    group, q_len, kv_len = q.shape[1] // k.shape[1], q.shape[0], k.shape[0]
    scale = (q.shape[2] ** -0.5 if sm_scale is None else sm_scale) * (1.0 if k_scale is None else k_scale)
    keys = torch.arange(kv_len, device=q.device)
    q_at = torch.arange(q_len, device=q.device) + kv_len - q_len
    queries, k, v = q.float(), k.float(), v.float()
    if pos_encoding_mode == "ROPE_LLAMA":
        options = (rope_scale or 1.0, rope_theta or 1e4)
        queries, k = _rotate(queries, q_at, *options), _rotate(k, keys, *options)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    outs, lses = [], []
    for first in range(0, q_len, _BLOCK):
        rows = slice(first, min(first + _BLOCK, q_len))
        s = torch.einsum("qhd,khd->hqk", queries[rows], k) * scale
        if logits_soft_cap:
            s = logits_soft_cap * torch.tanh(s / logits_soft_cap)
        if pos_encoding_mode == "ALIBI":
            s += _slopes(q.shape[1], q.device)[:, None, None] * (keys[None] - q_at[rows, None])
        visible = _visible(q_at[rows], keys, causal and custom_mask is None, window_left)
        if custom_mask is not None:
            visible &= custom_mask.view(q_len, kv_len)[rows]
        s.masked_fill_(~visible, -math.inf)
        lse = torch.logsumexp(s, -1)
        weights = torch.exp(s - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
        outs.append(torch.einsum("hqk,khd->qhd", weights, v) * (1.0 if v_scale is None else v_scale))
        lses.append(lse.t() / math.log(2))
    out = torch.cat(outs).to(q.dtype)
    return (out, torch.cat(lses)) if return_lse else out


def single_decode_with_kv_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, return_lse: bool = False, **options: Any
) -> Result:
    """The same for one token: q [heads, dim]."""
    names = ("kv_layout", "pos_encoding_mode")
    options |= dict(zip(names, args, strict=False))
    out, lse = single_prefill_with_kv_cache(q[None], k, v, causal=True, return_lse=True, **options)
    return (out[0], lse[0]) if return_lse else out[0]
