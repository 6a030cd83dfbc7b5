# SPDX-License-Identifier: Apache-2.0
"""The attention that layers of the plug-ins must compute."""

from typing import Any

import torch


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, **scores: Any) -> torch.Tensor:
    """Returns softmax attention in fp64 of one request, q [new, heads, dim], k and v [keys, kv_heads, dim]. The new
    tokens are the last; `scores` may have causal, window, logit_cap, sinks and slopes."""
    new, heads, keys = q.shape[0], q.shape[1], k.shape[0]
    k, v = (x.double().repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    logits = torch.einsum("thd,shd->hts", q.double(), k) * scale
    if scores.get("logit_cap"):
        logits = scores["logit_cap"] * torch.tanh(logits / scores["logit_cap"])
    distance = torch.arange(keys)[None, :] - torch.arange(keys - new, keys)[:, None]
    if scores.get("slopes") is not None:
        logits = logits + scores["slopes"].double()[:, None, None] * distance
    if scores.get("causal", True):
        logits = logits.masked_fill(distance > 0, -torch.inf)
    if scores.get("window"):
        logits = logits.masked_fill(distance <= -scores["window"], -torch.inf)
    if scores.get("sinks") is not None:
        sinks = scores["sinks"].double()[:, None, None].expand(-1, new, 1)
        weights = torch.cat([logits, sinks], dim=2).softmax(dim=2)[..., :keys]
    else:
        weights = logits.softmax(dim=2)
    return torch.einsum("hts,shd->thd", weights, v)
