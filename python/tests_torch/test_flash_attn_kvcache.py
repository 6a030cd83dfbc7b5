# SPDX-License-Identifier: Apache-2.0
"""flash_attn_with_kvcache against attention in plain torch: caches with and without pages, new keys, rotation."""

from __future__ import annotations

import pytest
import torch
from flash_attn_reference import assert_close, attention, rotate
from fovea.compat import flash_attn
from fovea.compat.flash_attn import flash_attn_interface as flash_attn_3
from test_flash_attn_dense import MASKS, as_arguments

CAPACITY = 24
LENS = [3, 0, 17]


class Cache:
    """A cache of three requests, in pages or in rows, and the same tokens in order."""

    def __init__(self, page_size=None, batch_idx=False, dims=(32, 32), dtype=torch.float32):
        generator = torch.Generator().manual_seed(0)
        self.page_size, requests = page_size, len(LENS)
        self.arguments = {"cache_seqlens": torch.tensor(LENS, dtype=torch.int32)}
        rows = 2 * requests if batch_idx else requests
        self.rows = torch.randperm(rows, generator=generator)[:requests] if batch_idx else torch.arange(requests)
        if batch_idx:
            self.arguments["cache_batch_idx"] = self.rows.to(torch.int32)
        pages, size = (rows, CAPACITY) if page_size is None else (rows * CAPACITY // page_size + 4, page_size)
        self.k = torch.randn(pages, size, 2, dims[0], generator=generator).to(dtype)
        self.v = torch.randn(pages, size, 2, dims[1], generator=generator).to(dtype)
        self.table = torch.arange(rows)[:, None]
        if page_size is not None:
            entries = CAPACITY // page_size
            self.table = torch.randperm(pages, generator=generator)[: rows * entries].view(rows, entries)
            self.arguments["block_table"] = self.table.to(torch.int32)

    def tokens(self, cache, request):
        """Returns [CAPACITY, kv_heads, dim], the tokens of a request."""
        return cache[self.table[self.rows[request]]].flatten(0, 1)


def queries(seqlen, dim=32, dtype=torch.float32, seed=7):
    return torch.randn(len(LENS), seqlen, 4, dim, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check_requests(out, q, cache, lens, first=(0, 0, 0), **options):
    for request, length in enumerate(lens):
        part = slice(first[request], length)
        k, v = (cache.tokens(x, request)[part] for x in (cache.k, cache.v))
        if k.shape[0] == 0:
            assert (out[request] == 0).all()
        else:
            assert_close(out[request], q[request], k, v, **options)


@pytest.mark.parametrize("page_size", [None, 1, 4, 8])
@pytest.mark.parametrize("batch_idx", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("seqlen_q", [1, 5])
def test_reads(seqlen_q, mask, batch_idx, page_size):
    cache, q = Cache(page_size, batch_idx), queries(seqlen_q)
    out = flash_attn.flash_attn_with_kvcache(q, cache.k, cache.v, **cache.arguments, **as_arguments(MASKS[mask]))
    check_requests(out, q, cache, LENS, **MASKS[mask])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [None, 1, 4])
@pytest.mark.parametrize("mask", ["all", "causal", "band", "causal_left"])
@pytest.mark.parametrize("seqlen_q,seqlen_new", [(1, 1), (5, 5), (5, 2), (2, 6)])
def test_appends(seqlen_q, seqlen_new, mask, page_size, dtype):
    cache, q = Cache(page_size, page_size is None, dtype=dtype), queries(seqlen_q, dtype=dtype)
    k = torch.randn(3, seqlen_new, 2, 32).to(dtype)
    v = torch.randn(3, seqlen_new, 2, 32).to(dtype)
    before = cache.k.clone(), cache.v.clone()
    options = as_arguments(MASKS[mask])
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, cache.k, cache.v, k, v, **cache.arguments, **options, return_softmax_lse=True
    )
    total = [length + seqlen_new for length in LENS]
    check_requests(out, q, cache, total, **MASKS[mask])
    assert lse.shape == (3, 4, seqlen_q)
    changed = 0
    for request, length in enumerate(LENS):
        for new, now, old in ((k, cache.k, before[0]), (v, cache.v, before[1])):
            mine = cache.tokens(now, request)
            assert torch.equal(mine[length : length + seqlen_new], new[request])
            assert torch.equal(mine[:length], cache.tokens(old, request)[:length])
        exact = attention(
            q[request], *(cache.tokens(x, request)[: total[request]] for x in (cache.k, cache.v)), **MASKS[mask]
        )
        torch.testing.assert_close(lse[request].double(), exact[1], atol=2e-2, rtol=1e-2)
        changed += seqlen_new * 2
    assert int((cache.k != before[0]).any(-1).sum()) <= changed


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("half", [4, 16])
@pytest.mark.parametrize("causal", [False, True])
def test_rotates(causal, half, interleaved):
    cache, q = Cache(4), queries(3)
    k, v = torch.randn(3, 3, 2, 32), torch.randn(3, 3, 2, 32)
    angle = torch.rand(CAPACITY, half) * 6
    cos, sin = angle.cos(), angle.sin()
    out = flash_attn.flash_attn_with_kvcache(
        q, cache.k, cache.v, k, v, cos, sin, **cache.arguments, causal=causal, rotary_interleaved=interleaved
    )
    for request, length in enumerate(LENS):
        mine = cache.tokens(cache.k, request)
        expected = rotate(k[request], cos, sin, length, interleaved)
        torch.testing.assert_close(mine[length : length + 3], expected, atol=1e-6, rtol=1e-6)
        if causal:
            turned = rotate(q[request], cos, sin, length, interleaved)
        else:
            turned = torch.cat([rotate(token[None], cos, sin, length, interleaved) for token in q[request]])
        values = cache.tokens(cache.v, request)[: length + 3]
        exact, _ = attention(turned, mine[: length + 3], values, causal=causal)
        torch.testing.assert_close(out[request].double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("new", [False, True])
def test_leftpad(new, mask, page_size):
    cache, q = Cache(page_size), queries(2)
    leftpad = [1, 0, 9]
    k, v = (torch.randn(3, 2, 2, 32), torch.randn(3, 2, 2, 32)) if new else (None, None)
    out = flash_attn.flash_attn_with_kvcache(
        q,
        cache.k,
        cache.v,
        k,
        v,
        cache_leftpad=torch.tensor(leftpad, dtype=torch.int32),
        **cache.arguments,
        **as_arguments(MASKS[mask]),
    )
    check_requests(out, q, cache, [length + 2 * new for length in LENS], leftpad, **MASKS[mask])


def test_queries_and_keys_of_several_lengths():
    cache = Cache(4)
    q_lens, new_lens = [2, 1, 4], [2, 3, 1]
    q = torch.randn(sum(q_lens), 4, 32)
    k, v = torch.randn(sum(new_lens), 2, 32), torch.randn(sum(new_lens), 2, 32)
    ends = [torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32) for lens in (q_lens, new_lens)]
    out, lse = flash_attn_3.flash_attn_with_kvcache(
        q,
        cache.k,
        cache.v,
        k,
        v,
        cache_seqlens=cache.arguments["cache_seqlens"],
        page_table=cache.arguments["block_table"],
        cu_seqlens_q=ends[0],
        cu_seqlens_k_new=ends[1],
        max_seqlen_q=4,
        causal=True,
        return_softmax_lse=True,
    )
    assert lse.shape == (4, sum(q_lens))
    check_requests(
        out.split(q_lens), q.split(q_lens), cache, [a + b for a, b in zip(LENS, new_lens, strict=True)], causal=True
    )


def test_odd_heads_are_padded():
    cache, q = Cache(dims=(59, 59)), queries(2, 59)
    k, v = torch.randn(3, 2, 2, 59), torch.randn(3, 2, 2, 59)
    out = flash_attn.flash_attn_with_kvcache(q, cache.k, cache.v, k, v, **cache.arguments, causal=True)
    check_requests(out, q, cache, [length + 2 for length in LENS], causal=True)
    assert torch.equal(cache.tokens(cache.k, 0)[3:5], k[0])


def test_fp8_cache():
    fp8 = torch.float8_e4m3fn
    cache, q = Cache(4), queries(2).to(fp8)
    cache.k, cache.v = cache.k.to(fp8), cache.v.to(fp8)
    k, v = torch.randn(3, 2, 2, 32).to(fp8), torch.randn(3, 2, 2, 32).to(fp8)
    out = flash_attn.flash_attn_with_kvcache(q, cache.k, cache.v, k, v, **cache.arguments, causal=True)
    for request, length in enumerate(LENS):
        tokens = [cache.tokens(x.float(), request)[: length + 2] for x in (cache.k, cache.v)]
        assert torch.equal(tokens[0][length:], k[request].float())
        exact, _ = attention(q[request].float(), *tokens, causal=True)
        torch.testing.assert_close(out[request].double(), exact, atol=0.02, rtol=0.02)


def test_one_length_for_all():
    cache, q = Cache(), queries(1)
    out = flash_attn.flash_attn_with_kvcache(q, cache.k, cache.v, cache_seqlens=6)
    check_requests(out, q, cache, [6, 6, 6])
    out = flash_attn.flash_attn_with_kvcache(q, cache.k, cache.v)
    check_requests(out, q, cache, [CAPACITY] * 3)
