# SPDX-License-Identifier: Apache-2.0
"""flash_attn_varlen_func against attention in plain torch, request by request."""

from __future__ import annotations

import pytest
import torch
from flash_attn_reference import assert_close, attention
from fovea.compat import flash_attn
from fovea.compat.flash_attn import flash_attn_interface as flash_attn_3
from test_flash_attn_dense import MASKS, as_arguments

Q_LENS = [5, 0, 1, 9, 14]
K_LENS = [5, 3, 11, 0, 6]
LENS = list(zip(Q_LENS, K_LENS, strict=True))


def indptr(lens):
    return torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def tokens(lens, heads, dim, seed, dtype=torch.float32):
    return torch.randn(sum(lens), heads, dim, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(q_lens=Q_LENS, k_lens=K_LENS, dims=(32, 32), dtype=torch.float32):
    q = tokens(q_lens, 4, dims[0], 1, dtype)
    k = tokens(k_lens, 2, dims[0], 2, dtype)
    v = tokens(k_lens, 2, dims[1], 3, dtype)
    return q, k, v, indptr(q_lens), indptr(k_lens)


def paged(rows, lens, page_size, seed=5):
    """Returns the pages of keys [tokens, heads, dim], and int32 [requests, entries], in random order."""
    entries = max(-(-max(lens) // page_size), 1) + 1
    order = torch.randperm(len(lens) * entries, generator=torch.Generator().manual_seed(seed))
    table = order.view(len(lens), entries).to(torch.int32)
    pages = torch.full((order.numel(), page_size, *rows.shape[1:]), 9.0, dtype=rows.dtype)
    for request, part in enumerate(rows.split(lens)):
        for token in range(part.shape[0]):
            pages[table[request, token // page_size], token % page_size] = part[token]
    return pages, table


def check_requests(out, q, k, v, q_lens=Q_LENS, k_lens=K_LENS, **options):
    for out_i, q_i, k_i, v_i in zip(out.split(q_lens), q.split(q_lens), k.split(k_lens), v.split(k_lens), strict=True):
        if q_i.shape[0] == 0:
            continue
        if k_i.shape[0] == 0:
            assert (out_i == 0).all()
        else:
            assert_close(out_i, q_i, k_i, v_i, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask, dtype):
    q, k, v, cu_q, cu_k = inputs(dtype=dtype)
    out = flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 14, 11, **as_arguments(MASKS[mask]))
    check_requests(out, q, k, v, **MASKS[mask])


@pytest.mark.parametrize("mask", MASKS)
def test_packed_keys(mask):
    q, k, v, cu, _ = inputs(k_lens=Q_LENS)
    out = flash_attn.flash_attn_varlen_func(q, k, v, cu, cu, 14, 14, **as_arguments(MASKS[mask]))
    check_requests(out, q, k, v, k_lens=Q_LENS, **MASKS[mask])


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("mask", MASKS)
def test_pages(mask, page_size):
    q, k, v, cu_q, cu_k = inputs()
    (k_pages, table), (v_pages, _) = paged(k, K_LENS, page_size), paged(v, K_LENS, page_size)
    lens = torch.tensor(K_LENS, dtype=torch.int32)
    for given in ({"cu_seqlens_k": cu_k}, {"seqused_k": lens}):
        out = flash_attn.flash_attn_varlen_func(
            q,
            k_pages,
            v_pages,
            cu_seqlens_q=cu_q,
            max_seqlen_q=14,
            max_seqlen_k=11,
            block_table=table,
            **given,
            **as_arguments(MASKS[mask]),
        )
        check_requests(out, q, k, v, **MASKS[mask])


@pytest.mark.parametrize("mask", MASKS)
def test_used(mask):
    q, k, v, cu_q, cu_k = inputs()
    q_used, k_used = [3, 0, 1, 4, 10], [2, 3, 7, 0, 6]
    out = flash_attn_3.flash_attn_varlen_func(
        q,
        k,
        v,
        cu_q,
        cu_k,
        14,
        11,
        seqused_q=torch.tensor(q_used, dtype=torch.int32),
        seqused_k=torch.tensor(k_used, dtype=torch.int32),
        **as_arguments(MASKS[mask]),
    )
    parts = zip(out.split(Q_LENS), q.split(Q_LENS), k.split(K_LENS), v.split(K_LENS), q_used, k_used, strict=True)
    for out_i, q_i, k_i, v_i, q_len, k_len in parts:
        assert (out_i[q_len:] == 0).all()
        if q_len and k_len:
            assert_close(out_i[:q_len], q_i[:q_len], k_i[:k_len], v_i[:k_len], **MASKS[mask])


def test_lse():
    q, k, v, cu_q, cu_k = inputs()
    out, lse, probabilities = flash_attn.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 14, 11, causal=True, return_attn_probs=True
    )
    assert probabilities is None and lse.shape == (4, sum(Q_LENS)) and lse.is_contiguous()
    for lse_i, q_i, k_i, v_i in zip(
        lse.split(Q_LENS, 1), q.split(Q_LENS), k.split(K_LENS), v.split(K_LENS), strict=True
    ):
        if q_i.shape[0] and k_i.shape[0]:
            expected = attention(q_i, k_i, v_i, causal=True)[1]
            torch.testing.assert_close(lse_i.double(), expected, atol=1e-5, rtol=1e-5)
        else:
            assert torch.isneginf(lse_i).all()


def test_packed_forms():
    q, k, v, cu, _ = inputs(k_lens=Q_LENS)
    q = q[:, :2].contiguous()
    expected = flash_attn.flash_attn_varlen_func(q, k, v, cu, cu, 14, 14, causal=True)
    qkv = torch.stack([q, k, v], 1)
    torch.testing.assert_close(flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu, 14, causal=True), expected)
    out = flash_attn.flash_attn_varlen_kvpacked_func(q, qkv[:, 1:], cu, cu.clone(), 14, 14, causal=True)
    torch.testing.assert_close(out, expected)


def test_sinks_and_softcap():
    q, k, v, cu_q, cu_k = inputs(dims=(48, 24))
    sinks = torch.tensor([0.0, 1.0, -2.0, 3.0])
    out = flash_attn.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 14, 11, causal=True, softcap=2.0, sinks=sinks, window_size=(4, 0)
    )
    check_requests(out, q, k, v, causal=True, softcap=2.0, sinks=sinks, window=(4, 0))


def test_fp8():
    fp8 = torch.float8_e4m3fn
    q, k, v, cu_q, cu_k = inputs()
    q, k, v = (x.to(fp8) for x in (q, k, v))
    factors = [torch.rand(5, 2) + 0.5 for _ in range(3)]
    out = flash_attn_3.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 14, 11, causal=True, q_descale=factors[0], k_descale=factors[1], v_descale=factors[2]
    )
    parts = [out.split(Q_LENS), q.split(Q_LENS), k.split(K_LENS), v.split(K_LENS)]
    for request, (out_i, *qkv) in enumerate(zip(*parts, strict=True)):
        if 0 in (qkv[0].shape[0], qkv[1].shape[0]):
            continue
        scaled = [
            x.float() * f[request].repeat_interleave(x.shape[1] // 2)[:, None]
            for x, f in zip(qkv, factors, strict=True)
        ]
        torch.testing.assert_close(out_i.double(), attention(*scaled, causal=True)[0], atol=0.02, rtol=0.02)
