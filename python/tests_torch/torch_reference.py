# SPDX-License-Identifier: Apache-2.0
"""Attention in fp64 by torch, and batches of random requests in a paged cache."""

from dataclasses import dataclass, field

import torch


def attend(q, k, v, *, causal=True, window=0, softmax_scale=0.0, logit_cap=0.0, sinks=None, alibi_slopes=None):
    """Returns (out, lse) in fp64 of one request: q [q_len, q_heads, dim] are the last of its k [kv_len, kv_heads, dim].

    Without a cap, sinks and slopes out is that of scaled_dot_product_attention.
    """
    q_len, q_heads, dim = q.shape
    kv_len, kv_heads = k.shape[:2]
    group = q_heads // kv_heads
    q, k, v = (x.detach().to("cpu", torch.float64).transpose(0, 1) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scale = softmax_scale or dim**-0.5
    distance = torch.arange(kv_len)[None, :] - torch.arange(kv_len - q_len, kv_len)[:, None]
    visible = torch.ones(q_len, kv_len, dtype=torch.bool)
    if causal:
        visible &= distance <= 0
    if window:
        visible &= distance > -window
    scores = q @ k.transpose(1, 2) * scale
    if logit_cap:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    if alibi_slopes is not None:
        scores = scores + alibi_slopes.to("cpu", torch.float64)[:, None, None] * distance
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    if logit_cap or sinks is not None or alibi_slopes is not None:
        total = lse if sinks is None else torch.logaddexp(lse, sinks.to("cpu", torch.float64)[:, None])
        out = torch.exp(scores - total[..., None]) @ v
    else:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
    return out.transpose(0, 1), lse.transpose(0, 1)


@dataclass
class PagedRequests:
    """Requests whose keys and values are in the pages of a cache, in random order; page 0 is one of them."""

    q_lens: list[int]
    kv_lens: list[int]
    q: torch.Tensor
    keys: list[torch.Tensor]  # a request each, [kv_len, kv_heads, dim]
    values: list[torch.Tensor]
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    page_table: torch.Tensor
    page_size: int
    slots: list[torch.Tensor] = field(default_factory=list)

    @property
    def device_lens(self):
        return torch.tensor(self.kv_lens, dtype=torch.int32, device=self.q.device)

    @property
    def q_indptr(self):
        ends = torch.tensor([0, *self.q_lens]).cumsum(0)
        return ends.to(self.q.device, torch.int32)

    def expected(self, **options):
        """Returns (out, lse) of every new token, fp64."""
        parts = []
        for i, q in enumerate(self.q.split(self.q_lens)):
            parts.append(attend(q, self.keys[i], self.values[i], **options))
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def paged_requests(
    q_lens,
    kv_lens,
    *,
    q_heads=4,
    kv_heads=2,
    dim=64,
    dim_v=None,
    page_size=16,
    order="nhd",
    dtype=torch.float32,
    cache_dtype=None,
    device="cpu",
    seed=0,
):
    """Makes requests with a full cache. K and V of a page are neighbours in memory, as engines store them."""
    generator = torch.Generator().manual_seed(seed)
    dim_v = dim_v or dim
    columns = max(-(-length // page_size) for length in kv_lens)
    counts = [-(-length // page_size) for length in kv_lens]
    pages = sum(counts) + 1
    order_of_pages = torch.randperm(pages, generator=generator)
    if 0 not in order_of_pages[: sum(counts)]:
        order_of_pages = order_of_pages.roll(1)
    table = torch.full((len(kv_lens), columns), -1, dtype=torch.int32)
    both = torch.randn(pages, page_size, kv_heads, dim + dim_v, generator=generator).to(dtype)
    both = both.to(cache_dtype or dtype)
    requests = PagedRequests([*q_lens], [*kv_lens], torch.empty(0), [], [], both, both, table, page_size)
    first = 0
    for i, (count, length) in enumerate(zip(counts, kv_lens, strict=True)):
        own = order_of_pages[first : first + count]
        first += count
        table[i, :count] = own
        slots = (own[:, None] * page_size + torch.arange(page_size)).flatten()[:length]
        rows = both.view(pages * page_size, kv_heads, dim + dim_v)[slots].to(torch.float64)
        requests.slots.append(slots)
        requests.keys.append(rows[..., :dim])
        requests.values.append(rows[..., dim:])
    if order == "hnd":
        both = both.transpose(1, 2).contiguous()
    both = both.to(device)
    requests.k_cache, requests.v_cache = both[..., :dim], both[..., dim:]
    requests.page_table = table.to(device)
    requests.q = torch.randn(sum(q_lens), q_heads, dim, generator=generator).to(device, dtype)
    return requests


def tolerance(dtype):
    """The distance from the fp64 result that rounding of inputs and outputs of this dtype explains."""
    return {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
