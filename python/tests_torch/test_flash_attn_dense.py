# SPDX-License-Identifier: Apache-2.0
"""flash_attn_func and its packed forms against attention in plain torch."""

from __future__ import annotations

import pytest
import torch
from flash_attn_reference import assert_close, attention
from fovea.compat import flash_attn
from fovea.compat.flash_attn import flash_attn_interface as flash_attn_3

LENGTHS = [(1, 1), (7, 7), (33, 33), (1, 20), (5, 21), (20, 5), (12, 1), (64, 96)]
MASKS = {
    "all": {},
    "causal": {"causal": True},
    "causal_left": {"causal": True, "window": (4, -1)},
    "causal_ignores_right": {"causal": True, "window": (6, 9)},
    "left": {"window": (5, 0)},
    "band": {"window": (3, 2)},
    "left_only": {"window": (4, -1)},
    "right_only": {"window": (-1, 3)},
    "chunk": {"chunk": 6},
    "causal_chunk": {"causal": True, "chunk": 6},
    "band_chunk": {"window": (7, 2), "chunk": 5},
}


def tensors(batch, seqlen_q, seqlen_k, heads=(4, 2), dims=(32, 32), dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, seqlen_q, heads[0], dims[0], generator=generator).to(dtype)
    k = torch.randn(batch, seqlen_k, heads[1], dims[0], generator=generator).to(dtype)
    v = torch.randn(batch, seqlen_k, heads[1], dims[1], generator=generator).to(dtype)
    return q, k, v


def as_arguments(mask):
    names = {"window": "window_size", "chunk": "attention_chunk"}
    return {names.get(name, name): value for name, value in mask.items()}


def check_rows(out, q, k, v, **options):
    for row in range(q.shape[0]):
        assert_close(out[row], q[row], k[row], v[row], **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("seqlen_q,seqlen_k", LENGTHS)
def test_masks(seqlen_q, seqlen_k, mask, dtype):
    q, k, v = tensors(2, seqlen_q, seqlen_k, dtype=dtype)
    out = flash_attn.flash_attn_func(q, k, v, **as_arguments(MASKS[mask]))
    assert out.dtype == dtype
    check_rows(out, q, k, v, **MASKS[mask])


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 2)])
@pytest.mark.parametrize("dims", [(32, 32), (64, 16), (40, 128), (59, 59), (128, 512), (256, 256)])
def test_heads_and_dims(dims, heads):
    q, k, v = tensors(2, 9, 13, heads, dims)
    check_rows(flash_attn.flash_attn_func(q, k, v, causal=True), q, k, v, causal=True)


@pytest.mark.parametrize("seqlen_q,seqlen_k", LENGTHS)
@pytest.mark.parametrize("causal", [False, True])
def test_softcap_scale_and_sinks(seqlen_q, seqlen_k, causal):
    q, k, v = tensors(2, seqlen_q, seqlen_k)
    sinks = torch.tensor([-1.0, 0.5, 2.0, 0.0])
    options = {"softcap": 3.0, "scale": 0.7, "sinks": sinks}
    out = flash_attn.flash_attn_func(q, k, v, softmax_scale=0.7, softcap=3.0, causal=causal, s_aux=sinks)
    check_rows(out, q, k, v, causal=causal, **options)


@pytest.mark.parametrize("seqlen_q,seqlen_k", [(7, 7), (5, 21), (20, 5), (1, 9)])
def test_alibi(seqlen_q, seqlen_k):
    q, k, v = tensors(3, seqlen_q, seqlen_k)
    slopes = torch.rand(3, 4) * 0.3
    out = flash_attn.flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes[0])
    check_rows(out, q, k, v, causal=True, slopes=slopes[0])
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes, return_attn_probs=True)
    for row in range(3):
        assert_close(out[row], q[row], k[row], v[row], causal=True, slopes=slopes[row])
        expected = attention(q[row], k[row], v[row], causal=True, slopes=slopes[row])[1]
        torch.testing.assert_close(lse[row].double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(7, 7), (5, 21), (20, 5)])
def test_lse(seqlen_q, seqlen_k, mask):
    q, k, v = tensors(2, seqlen_q, seqlen_k)
    out, lse, probabilities = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, **as_arguments(MASKS[mask]))
    assert probabilities is None
    assert lse.shape == (2, 4, seqlen_q) and lse.dtype == torch.float32 and lse.is_contiguous()
    for row in range(2):
        _, expected = attention(q[row], k[row], v[row], **MASKS[mask])
        torch.testing.assert_close(lse[row].double(), expected, atol=1e-5, rtol=1e-5)
        unseen = torch.isinf(expected).T
        assert (out[row][unseen] == 0).all()


def test_packed_forms():
    q, k, v = tensors(2, 11, 11, heads=(4, 4))
    expected = flash_attn.flash_attn_func(q, k, v, causal=True)
    qkv = torch.stack([q, k, v], 2)
    torch.testing.assert_close(flash_attn.flash_attn_qkvpacked_func(qkv, causal=True), expected)
    torch.testing.assert_close(flash_attn.flash_attn_kvpacked_func(q, qkv[:, :, 1:], causal=True), expected)
    joined = torch.cat([q, k, v], 2)
    torch.testing.assert_close(flash_attn_3.flash_attn_qkvpacked_func(joined, causal=True, num_heads_q=4), expected)


def test_strides_and_out():
    q, k, v = tensors(2, 8, 12)
    q_odd = q.transpose(1, 2).contiguous().transpose(1, 2)
    k_odd = k.transpose(1, 2).contiguous().transpose(1, 2)
    expected = flash_attn.flash_attn_func(q, k, v)
    torch.testing.assert_close(flash_attn.flash_attn_func(q_odd, k_odd, v), expected)
    for out in (torch.full_like(q, 7.0), torch.empty(2, 4, 8, 32).transpose(1, 2)):
        assert flash_attn.flash_attn_func(q, k, v, out=out) is out
        torch.testing.assert_close(out, expected)


def test_no_queries_and_no_keys():
    q, k, v = tensors(2, 3, 4)
    assert flash_attn.flash_attn_func(q[:, :0], k, v).shape == (2, 0, 4, 32)
    out, lse = flash_attn.flash_attn_func(q, k[:, :0], v[:, :0], return_softmax_lse=True)
    assert (out == 0).all() and torch.isneginf(lse).all()


@pytest.mark.parametrize("seqlen_q,seqlen_k", [(9, 9), (4, 17)])
@pytest.mark.parametrize("causal", [False, True])
def test_fp8(seqlen_q, seqlen_k, causal):
    fp8 = torch.float8_e4m3fn
    q, k, v = (x.to(fp8) for x in tensors(2, seqlen_q, seqlen_k))
    factors = [torch.rand(2, 2) + 0.5 for _ in range(3)]
    out = flash_attn_3.flash_attn_func(
        q, k, v, causal=causal, q_descale=factors[0], k_descale=factors[1], v_descale=factors[2]
    )
    assert out.dtype == torch.bfloat16
    for row in range(2):
        scaled = [
            x[row].float() * f[row].repeat_interleave(x.shape[2] // 2)[:, None]
            for x, f in zip((q, k, v), factors, strict=True)
        ]
        exact, _ = attention(*scaled, causal=causal)
        torch.testing.assert_close(out[row].double(), exact, atol=0.02, rtol=0.02)


def test_generations_differ_in_argument_order_only():
    q, k, v = tensors(1, 6, 6)
    expected, expected_lse = flash_attn.flash_attn_func(q, k, v, 0.0, 0.5, True, return_softmax_lse=True)
    out, lse = flash_attn_3.flash_attn_func(q, k, v, 0.5, True, return_attn_probs=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


def test_combine():
    q, k, v = tensors(2, 6, 21)
    exact, exact_lse = flash_attn.flash_attn_func(q, k, v, return_softmax_lse=True)
    parts = [flash_attn.flash_attn_func(q, k[:, i::3], v[:, i::3], return_softmax_lse=True) for i in range(3)]
    outs = torch.stack([part[0] for part in parts] + [torch.full_like(q, torch.nan)])
    unseen = torch.full((2, 6, 4), -torch.inf)
    lses = torch.stack([part[1].transpose(1, 2) for part in parts] + [unseen])
    out, lse = flash_attn_3.flash_attn_combine(outs, lses)
    torch.testing.assert_close(out, exact, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.transpose(1, 2), exact_lse, atol=1e-5, rtol=1e-5)
    low = torch.empty_like(q, dtype=torch.bfloat16)
    assert flash_attn_3.flash_attn_combine(outs, lses, low)[0] is low and torch.equal(low, out.bfloat16())
    out, lse = flash_attn_3.flash_attn_combine(outs[3:], lses[3:])
    assert (out == 0).all() and torch.isneginf(lse).all()
