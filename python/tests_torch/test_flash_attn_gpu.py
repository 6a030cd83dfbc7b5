# SPDX-License-Identifier: Apache-2.0
"""fovea.compat.flash_attn on a GPU: the numbers of torch, no synchronisation, CUDA graphs."""

from __future__ import annotations

import contextlib

import pytest
import torch
from flash_attn_reference import assert_close, attention
from fovea.compat import flash_attn
from fovea.compat.flash_attn import flash_attn_interface as flash_attn_3

pytestmark = pytest.mark.gpu

MASKS = {
    "all": {},
    "causal": {"causal": True},
    "causal_left": {"causal": True, "window": (100, -1)},
    "band": {"window": (70, 30)},
    "chunk": {"chunk": 64},
    "causal_chunk": {"causal": True, "chunk": 64},
}
NAMES = {"window": "window_size", "chunk": "attention_chunk"}


def arguments(mask):
    return {NAMES.get(name, name): value for name, value in MASKS[mask].items()}


def tensors(batch, seqlen_q, seqlen_k, heads=(8, 2), dims=(128, 128), dtype=torch.bfloat16):
    torch.manual_seed(0)
    q = torch.randn(batch, seqlen_q, heads[0], dims[0], device="cuda", dtype=torch.bfloat16).to(dtype)
    k = torch.randn(batch, seqlen_k, heads[1], dims[0], device="cuda", dtype=torch.bfloat16).to(dtype)
    v = torch.randn(batch, seqlen_k, heads[1], dims[1], device="cuda", dtype=torch.bfloat16).to(dtype)
    return q, k, v


@contextlib.contextmanager
def no_synchronisation():
    """Makes torch raise an error if the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "mask,dtype", [(mask, torch.bfloat16) for mask in MASKS] + [("all", torch.float16), ("causal", torch.float16)]
)
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(1, 333), (200, 200), (97, 513), (300, 129)])
def test_masks(seqlen_q, seqlen_k, mask, dtype):
    q, k, v = tensors(2, seqlen_q, seqlen_k, dtype=dtype)
    out, lse = flash_attn.flash_attn_func(q, k, v, return_softmax_lse=True, **arguments(mask))
    for row in range(2):
        assert_close(out[row], q[row], k[row], v[row], **MASKS[mask])
        _, exact = attention(q[row], k[row], v[row], **MASKS[mask])
        torch.testing.assert_close(lse[row].double(), exact, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("dims", [(32, 32), (59, 59), (64, 64), (64, 512), (96, 96), (192, 128), (256, 256)])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1)])
def test_heads_and_dims(heads, dims):
    q, k, v = tensors(2, 70, 160, heads, dims)
    out = flash_attn.flash_attn_func(q, k, v, causal=True)
    for row in range(2):
        assert_close(out[row], q[row], k[row], v[row], causal=True)


def test_softcap_sinks_and_slopes():
    q, k, v = tensors(2, 130, 190)
    sinks, slopes = torch.randn(8, device="cuda"), torch.rand(2, 8, device="cuda") * 0.3
    out = flash_attn.flash_attn_func(q, k, v, causal=True, softcap=5.0, s_aux=sinks)
    for row in range(2):
        assert_close(out[row], q[row], k[row], v[row], causal=True, softcap=5.0, sinks=sinks)
    out = flash_attn.flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes)
    for row in range(2):
        assert_close(out[row], q[row], k[row], v[row], causal=True, slopes=slopes[row])


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_fp8(causal, dim):
    q, k, v = tensors(2, 120, 250, dims=(dim, dim), dtype=torch.float8_e4m3fn)
    factors = [torch.rand(2, 2, device="cuda") + 0.5 for _ in range(3)]
    out = flash_attn_3.flash_attn_func(
        q, k, v, causal=causal, q_descale=factors[0], k_descale=factors[1], v_descale=factors[2]
    )
    for row in range(2):
        scaled = [
            x[row].float() * f[row].repeat_interleave(x.shape[2] // 2)[:, None]
            for x, f in zip((q, k, v), factors, strict=True)
        ]
        exact, _ = attention(*scaled, causal=causal)
        error = (out[row].double() - exact).abs()
        # Weights are rounded to the 3 bits of e4m3, too.
        assert error.max() <= 0.12 * exact.abs().max() and error.mean() <= 0.05 * exact.abs().mean()


class Decode:
    """A paged decode step that stores a key for each of 16 requests, with arrays that stay in place."""

    def __init__(self, page_size):
        torch.manual_seed(1)
        entries = 1024 // page_size
        self.k_cache = torch.randn(16 * entries, page_size, 2, 128, device="cuda", dtype=torch.bfloat16)
        self.v_cache = torch.randn_like(self.k_cache)
        self.table = torch.randperm(16 * entries, device="cuda").view(16, entries).to(torch.int32)
        self.lens = torch.zeros(16, device="cuda", dtype=torch.int32)
        self.q = torch.randn(16, 1, 8, 128, device="cuda", dtype=torch.bfloat16)
        self.k, self.v = (torch.randn(16, 1, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def step(self):
        return flash_attn.flash_attn_with_kvcache(
            self.q,
            self.k_cache,
            self.v_cache,
            self.k,
            self.v,
            cache_seqlens=self.lens,
            block_table=self.table,
            causal=True,
            return_softmax_lse=True,
        )

    def tokens(self, request):
        """Returns k and v of a request with the new token."""
        length = int(self.lens[request]) + 1
        return [cache[self.table[request].long()].flatten(0, 1)[:length] for cache in (self.k_cache, self.v_cache)]


@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_decode(page_size):
    decode = Decode(page_size)
    decode.lens.copy_(torch.randint(0, 1000, (16,)))
    out, _ = decode.step()
    for request in range(16):
        k, v = decode.tokens(request)
        assert torch.equal(k[-1], decode.k[request, 0]) and torch.equal(v[-1], decode.v[request, 0])
        assert_close(out[request], decode.q[request], k, v, causal=True)


def test_lengths_beyond_the_cache_are_cut():
    decode = Decode(64)
    decode.lens.fill_(1023)
    expected = decode.step()[0].clone()
    decode.lens.fill_(5000)
    assert torch.equal(decode.step()[0], expected)  # the new key has no place


def test_replays_equal_eager_calls():
    decode = Decode(64)
    decode.step()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        decode.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = decode.step()
    for _ in range(50):
        decode.lens.copy_(torch.randint(0, 1000, (16,)))
        decode.q.normal_()
        decode.k.normal_()
        eager = [result.clone() for result in decode.step()]
        graph.replay()
        assert torch.equal(captured[0], eager[0]) and torch.equal(captured[1], eager[1])


def test_nothing_waits_for_the_device():
    q, k, v = tensors(4, 100, 180)
    decode = Decode(16)
    ends = [torch.tensor([0, 40, 40, 100], device="cuda", dtype=torch.int32), None]
    ends[1] = torch.tensor([0, 10, 90, 180], device="cuda", dtype=torch.int32)
    leftpad = torch.zeros(16, device="cuda", dtype=torch.int32)
    angle = torch.rand(1024, 64, device="cuda", dtype=torch.bfloat16)

    def calls():
        for mask in MASKS:
            flash_attn.flash_attn_func(q, k, v, **arguments(mask))
            flash_attn.flash_attn_varlen_func(q[0], k[0], v[0], *ends, 60, 90, **arguments(mask))
        decode.step()
        caches = (decode.q, decode.k_cache, decode.v_cache, decode.k, decode.v)
        paged = {"cache_seqlens": decode.lens, "block_table": decode.table}
        flash_attn.flash_attn_with_kvcache(*caches, angle.cos(), angle.sin(), causal=True, **paged)
        flash_attn.flash_attn_with_kvcache(*caches, cache_leftpad=leftpad, **paged)

    calls()
    torch.cuda.synchronize()
    with no_synchronisation():
        calls()
    torch.cuda.synchronize()
