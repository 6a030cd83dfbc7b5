# SPDX-License-Identifier: Apache-2.0
"""Attention in fp64 by its definition, and random paged caches, for the tests of fovea.compat.flashinfer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@dataclass
class Scores:
    """Changes of the scores of a request."""

    scale: float | None = None
    causal: bool = True
    window_left: int = -1
    cap: float = 0.0
    mask: torch.Tensor | None = None  # bool [q_len, kv_len], replaces causality
    sinks: torch.Tensor | None = None  # [q_heads]
    slopes: torch.Tensor | None = None  # [q_heads]
    k_scale: float = 1.0
    v_scale: float = 1.0


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out [q_len, q_heads, dim] and lse [q_len, q_heads], base 2, in fp64. k, v: [kv_len, heads, dim]."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double() * scores.k_scale, v.double() * scores.v_scale
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = q.shape[2] ** -0.5 if scores.scale is None else scores.scale
    s = torch.einsum("qhd,khd->hqk", q, k) * scale
    if scores.cap:
        s = scores.cap * torch.tanh(s / scores.cap)
    key = torch.arange(k.shape[0])[None]
    position = torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0]
    if scores.slopes is not None:
        s = s + scores.slopes.double()[:, None, None] * (key - position)
    visible = scores.mask if scores.mask is not None else (key <= position) | (not scores.causal)
    if scores.window_left >= 0:
        visible = visible & (key >= position - scores.window_left)
    s = s.masked_fill(~visible, -math.inf)
    lse = torch.logsumexp(s, -1) if k.shape[0] else torch.full(s.shape[:2], -math.inf, dtype=torch.float64)
    total = lse if scores.sinks is None else torch.logaddexp(lse, scores.sinks.double()[:, None])
    weights = torch.where(s == -math.inf, 0.0, torch.exp(s - torch.nan_to_num(total, neginf=0.0)[..., None]))
    return torch.einsum("hqk,khd->qhd", weights, v), lse.t() / math.log(2)


@dataclass
class Paged:
    """A random paged cache in FlashInfer's form, and the keys and values of each request."""

    kv_lens: list[int]
    page_size: int = 4
    heads: int = 2
    dim: int = 64
    dtype: torch.dtype = torch.float32
    layout: str = "NHD"
    seed: int = 0
    cache: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        counts = [-(-length // self.page_size) for length in self.kv_lens]
        total = sum(counts)
        shape = (self.page_size, self.heads) if self.layout == "NHD" else (self.heads, self.page_size)
        self.cache = (torch.randn(total + 3, 2, *shape, self.dim) * 0.7).to(self.dtype)
        self.indptr = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
        self.indices = torch.randperm(total + 3)[:total].to(torch.int32)
        last = [(length - 1) % self.page_size + 1 if length else 0 for length in self.kv_lens]
        self.last_page_len = torch.tensor(last, dtype=torch.int32)

    @property
    def lists(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.indptr, self.indices, self.last_page_len

    def keys(self, request: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns k and v [kv_len, heads, dim] of a request."""
        pages = self.indices[self.indptr[request] : self.indptr[request + 1]].long()
        parts = []
        for part in self.cache.unbind(1):
            rows = part.float()[pages]
            rows = rows if self.layout == "NHD" else rows.transpose(1, 2)
            parts.append(rows.flatten(0, 1)[: self.kv_lens[request]])
        return parts[0], parts[1]


def check(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Compares out or lse with the oracle's, at the tolerance of a dtype."""
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def offsets(lengths: list[int]) -> torch.Tensor:
    """Returns the indptr of lengths, int32 [n + 1]."""
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
