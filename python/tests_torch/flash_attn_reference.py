# SPDX-License-Identifier: Apache-2.0
"""Attention as flash-attention defines it, in plain torch: the oracle of the tests of fovea.compat.flash_attn."""

from __future__ import annotations

import torch


def visible(
    seqlen_q: int,
    seqlen_k: int,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    chunk: int = 0,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Returns bool [seqlen_q, seqlen_k]: the keys of each query, aligned to the last query and the last key."""
    place = torch.arange(seqlen_q, device=device)[:, None] + seqlen_k - seqlen_q
    key = torch.arange(seqlen_k, device=device)[None, :]
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    left, right = window
    if causal:
        right = 0
    if left >= 0:
        seen &= key >= place - left
    if right >= 0:
        seen &= key <= place + right
    if chunk > 0:
        seen &= torch.div(key, chunk, rounding_mode="floor") == torch.div(place, chunk, rounding_mode="floor")
    return seen


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float64,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    **mask: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out [seqlen_q, heads, dim_v] and lse [heads, seqlen_q] of one request, computed in `dtype`.

    q [seqlen_q, heads, dim]; k [seqlen_k, kv_heads, dim]; v [seqlen_k, kv_heads, dim_v]; slopes [heads].
    """
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    k, v = (x.to(dtype).repeat_interleave(group, 1) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("qhd,khd->hqk", q.to(dtype) * scale, k)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    seqlen_q, seqlen_k = scores.shape[1:]
    if slopes is not None:
        place = torch.arange(seqlen_q, device=q.device)[:, None] + seqlen_k - seqlen_q
        distance = (place - torch.arange(seqlen_k, device=q.device)[None, :]).abs()
        scores = scores - slopes.to(dtype)[:, None, None] * distance
    scores = scores.masked_fill(~visible(seqlen_q, seqlen_k, device=q.device, **mask), -torch.inf)
    lse = torch.logsumexp(scores.double(), -1)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(dtype)[:, None, None].expand(heads, seqlen_q, 1)], -1)
    weights = torch.softmax(scores, -1)[..., :seqlen_k]
    weights = torch.nan_to_num(weights)  # rows that see no key
    return torch.einsum("hqk,khd->qhd", weights, v), lse


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, first: int, interleaved: bool) -> torch.Tensor:
    """Returns x [seqlen, heads, dim] with token i rotated by row first + i of cos and sin."""
    turned = x.double().clone()
    for token in range(x.shape[0]):
        c, s = cos[first + token].double(), sin[first + token].double()
        half = c.shape[0]
        a = slice(0, 2 * half, 2) if interleaved else slice(0, half)
        b = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
        left, right = x[token, :, a].double(), x[token, :, b].double()
        turned[token, :, a] = left * c - right * s
        turned[token, :, b] = left * s + right * c
    return turned.to(x.dtype)


def assert_close(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> None:
    """Asserts that out is at most twice as far from the exact result as torch is in q's own type."""
    exact, _ = attention(q, k, v, **options)
    low, _ = attention(q, k, v, dtype=q.dtype, **options)
    error = (out.double() - exact).abs().max().item()
    limit = 2 * (low.double() - exact).abs().max().item() + 2e-6 * max(1.0, exact.abs().max().item())
    assert error <= limit, f"error {error}, limit {limit}"
