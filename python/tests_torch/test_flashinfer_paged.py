# SPDX-License-Identifier: Apache-2.0
"""The paged wrappers of fovea.compat.flashinfer against attention in fp64."""

from __future__ import annotations

import math
from typing import Any

import fovea.compat.flashinfer as flashinfer
import pytest
import torch
from flashinfer_oracle import Paged, Scores, attend, check, offsets

WORKSPACE = torch.empty(1, dtype=torch.uint8)
FP8 = torch.float8_e4m3fn


def expect(q: torch.Tensor, paged: Paged, q_lens: list[int], scores: list[Scores]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out and lse of a batch by the oracle."""
    parts = [attend(rows, *paged.keys(i), scores[i]) for i, rows in enumerate(q.split(q_lens))]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def run_decode(
    paged: Paged, q_heads: int, plan: dict[str, Any], run: dict[str, Any], dtype: torch.dtype, q_len: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Runs the decode wrapper. Returns q, out and lse."""
    q = torch.randn(len(paged.kv_lens) * q_len, q_heads, paged.dim).to(dtype)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, paged.layout, use_tensor_cores=True)
    options = {"q_data_type": dtype, "kv_data_type": paged.dtype, "q_len_per_req": q_len} | plan
    wrapper.plan(*paged.lists, q_heads, paged.heads, paged.dim, paged.page_size, **options)
    return q, *wrapper.run(q, paged.cache, return_lse=True, **run)


SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
DECODE_CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], Scores]] = {
    # name: fields of Paged, options of plan(), options of run(), scores
    "plain": ({}, {}, {}, Scores()),
    "hnd": ({"layout": "HND"}, {}, {}, Scores()),
    "page of 1": ({"page_size": 1}, {}, {}, Scores()),
    "page of 5": ({"page_size": 5}, {}, {}, Scores()),
    "one head each": ({"heads": 4}, {}, {}, Scores()),
    "wide head": ({"dim": 128}, {}, {}, Scores()),
    "window": ({}, {"window_left": 5}, {}, Scores(window_left=5)),
    "window of 0": ({}, {"window_left": 0}, {}, Scores(window_left=0)),
    "soft cap": ({}, {"logits_soft_cap": 3.0}, {}, Scores(cap=3.0)),
    "scale": ({}, {"sm_scale": 0.3}, {}, Scores(scale=0.3)),
    "sinks": ({}, {}, {"sinks": SINKS}, Scores(sinks=SINKS)),
    "scales": ({}, {}, {"q_scale": 0.5, "k_scale": 1.5, "v_scale": 2.0}, Scores(scale=0.125 * 0.75, v_scale=2.0)),
    "fp8 cache": ({"dtype": FP8}, {}, {"k_scale": 0.5, "v_scale": 1.5}, Scores(k_scale=0.5, v_scale=1.5)),
    "alibi": (
        {},
        {"pos_encoding_mode": "ALIBI"},
        {},
        Scores(slopes=torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", DECODE_CASES.values(), ids=DECODE_CASES.keys())
def test_decode(case: tuple[dict[str, Any], dict[str, Any], dict[str, Any], Scores], dtype: torch.dtype) -> None:
    fields, plan, run, scores = case
    paged = Paged([1, 17, 0, 8, 33], **({"dtype": dtype} | fields))
    q, out, lse = run_decode(paged, 4, plan, run, dtype)
    expected = expect(q, paged, [1] * 5, [scores] * 5)
    check(out, expected[0], dtype)
    check(lse, expected[1], dtype if dtype == torch.float32 else torch.float16)


@pytest.mark.parametrize("q_len", [2, 5])
def test_decode_of_several_tokens_is_causal(q_len: int) -> None:
    paged = Paged([9, 5, 40])
    q, out, lse = run_decode(paged, 4, {}, {}, torch.float32, q_len)
    expected = expect(q, paged, [q_len] * 3, [Scores()] * 3)
    check(out, expected[0], torch.float32)
    check(lse, expected[1], torch.float32)


def test_scales_in_tensors() -> None:
    paged = Paged([7, 30], dtype=FP8)
    for count in (1, 2):
        k_scale, v_scale = torch.tensor([0.5, 2.0][:count]), torch.tensor([3.0, 0.25][:count])
        q, out, _ = run_decode(paged, 4, {}, {"k_scale": k_scale, "v_scale": v_scale}, torch.float32)
        for i in range(2):
            k, v = paged.keys(i)
            expected, _ = attend(q[i : i + 1], k * k_scale[:, None], v * v_scale[:, None], Scores())
            check(out[i : i + 1], expected, torch.float32)


def test_scales_per_token_and_head() -> None:
    paged = Paged([7, 30], dtype=FP8)
    shape = (paged.cache.shape[0], paged.page_size, paged.heads)
    sf = (torch.rand(shape) + 0.5, torch.rand(shape) + 0.5)
    q, out, _ = run_decode(paged, 4, {"use_token_head_sf": True}, {"kv_cache_sf": sf}, torch.float32)
    for i in range(2):
        pages = paged.indices[paged.indptr[i] : paged.indptr[i + 1]].long()
        scaled = [
            part * scale[pages].flatten(0, 1)[: paged.kv_lens[i], :, None]
            for part, scale in zip(paged.keys(i), sf, strict=True)
        ]
        check(out[i : i + 1], attend(q[i : i + 1], *scaled, Scores())[0], torch.float32)


PREFILL_CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Scores]] = {
    "causal": ({}, {"causal": True}, Scores()),
    "causal hnd": ({"layout": "HND"}, {"causal": True}, Scores()),
    "all keys": ({}, {}, Scores(causal=False)),
    "all keys, page of 1": ({"page_size": 1}, {}, Scores(causal=False)),
    "window": ({}, {"causal": True, "window_left": 3}, Scores(window_left=3)),
    "window without causality": ({}, {"window_left": 5}, Scores(causal=False, window_left=5)),
    "window that hides nothing": ({}, {"window_left": 100}, Scores(causal=False)),
    "soft cap": ({}, {"causal": True, "logits_soft_cap": 2.0}, Scores(cap=2.0)),
    "fp8 cache": ({"dtype": FP8}, {"causal": True}, Scores()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", PREFILL_CASES.values(), ids=PREFILL_CASES.keys())
def test_prefill(case: tuple[dict[str, Any], dict[str, Any], Scores], dtype: torch.dtype) -> None:
    fields, plan, scores = case
    q_lens = [3, 1, 0, 12, 7]
    paged = Paged([3, 17, 5, 20, 33], **({"dtype": dtype} | fields))
    q = torch.randn(sum(q_lens), 4, paged.dim).to(dtype)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, paged.layout)
    options = {"q_data_type": dtype, "kv_data_type": paged.dtype} | plan
    wrapper.plan(offsets(q_lens), *paged.lists, 4, paged.heads, paged.dim, paged.page_size, **options)
    out, lse = wrapper.run(q, paged.cache, return_lse=True)
    expected = expect(q, paged, q_lens, [scores] * 5)
    check(out, expected[0], dtype)
    check(lse, expected[1], dtype if dtype == torch.float32 else torch.float16)


def test_prefill_with_fewer_keys_than_queries() -> None:
    """Causal rows before the first key are 0 with an lse of -inf."""
    q_lens = [34, 2, 5]
    paged = Paged([1, 9, 0])
    q = torch.randn(sum(q_lens), 4, paged.dim)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    for causal in (True, False):
        wrapper.plan(
            offsets(q_lens), *paged.lists, 4, 2, 64, 4, causal=causal, q_data_type="float32", kv_data_type="float32"
        )
        out, lse = wrapper.run(q, paged.cache, return_lse=True)
        expected = expect(q, paged, q_lens, [Scores(causal=causal)] * 3)
        check(out, expected[0], torch.float32)
        check(lse, expected[1], torch.float32)
        if causal:
            assert torch.isneginf(lse[:33]).all()


def pack_bits(mask: torch.Tensor) -> torch.Tensor:
    """Returns the bits of a flat bool mask, lowest bit first, uint8."""
    padded = torch.nn.functional.pad(mask.to(torch.uint8), (0, -mask.numel() % 8)).view(-1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8)).sum(1).to(torch.uint8)


@pytest.mark.parametrize("is_short", [False, True])
@pytest.mark.parametrize("form", ["bytes", "bits"])
def test_custom_mask(form: str, is_short: bool) -> None:
    """A custom mask replaces causality: it shows keys after the query, too. Requests may have few keys."""
    q_lens = [3, 1, 7]
    paged = Paged([2 if is_short else 3, 17, 33])
    q = torch.randn(sum(q_lens), 4, paged.dim)
    masks = [torch.rand(q_len, kv_len) < 0.6 for q_len, kv_len in zip(q_lens, paged.kv_lens, strict=True)]
    masks[0][0] = False
    if form == "bytes":
        options = {"custom_mask": torch.cat([mask.flatten() for mask in masks])}
    else:
        options = {"packed_custom_mask": torch.cat([pack_bits(mask.flatten()) for mask in masks])}
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    options |= {"causal": True, "q_data_type": "float32", "kv_data_type": "float32"}
    wrapper.plan(offsets(q_lens), *paged.lists, 4, 2, 64, 4, **options)
    out, lse = wrapper.run(q, paged.cache, return_lse=True)
    expected = expect(q, paged, q_lens, [Scores(mask=mask) for mask in masks])
    check(out, expected[0], torch.float32)
    check(lse, expected[1], torch.float32)
    assert torch.isneginf(lse[0]).all()


def test_window_and_custom_mask() -> None:
    q_lens = [3, 1, 7]
    paged = Paged([3, 17, 33])
    q = torch.randn(sum(q_lens), 4, paged.dim)
    masks = [torch.rand(q_len, kv_len) < 0.6 for q_len, kv_len in zip(q_lens, paged.kv_lens, strict=True)]
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    options = {"custom_mask": torch.cat([mask.flatten() for mask in masks]), "window_left": 6, "q_data_type": "float32"}
    wrapper.plan(offsets(q_lens), *paged.lists, 4, 2, 64, 4, **options)
    out = wrapper.run(q, paged.cache)
    scores = [Scores(mask=mask, window_left=6) for mask in masks]
    check(out, expect(q, paged, q_lens, scores)[0], torch.float32)
    assert wrapper.run(q, paged.cache).equal(out)


@pytest.mark.parametrize("as_scalar", [False, True])
def test_multi_item_scoring(as_scalar: bool) -> None:
    """Items see the prefix and themselves; position 0 of an item is its delimiter."""
    items = [0, 1, 2, 0, 1, 2, 3, 0]
    prefix, q_len = 9, 8
    paged = Paged([prefix + q_len])
    q = torch.randn(q_len, 4, paged.dim)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(
        offsets([q_len]), *paged.lists, 4, 2, 64, 4,
        causal=True,
        q_data_type="float32",
        kv_data_type="float32",
        prefix_len_ptr=torch.tensor(prefix if as_scalar else [prefix], dtype=torch.uint32),
        token_pos_in_items_ptr=torch.tensor(items, dtype=torch.uint16),
        token_pos_in_items_len=20,
    )  # fmt: skip
    out = wrapper.run(q, paged.cache)
    mask = torch.zeros(q_len, prefix + q_len, dtype=torch.bool)
    mask[:, :prefix] = True
    for token, place in enumerate(items):
        mask[token, prefix + token - place : prefix + token + 1] = True
    expected, _ = attend(q, *paged.keys(0), Scores(mask=mask))
    check(out, expected, torch.float32)


def test_buffers_of_the_caller() -> None:
    paged = Paged([9, 30])
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    lists = (offsets([2, 3]), *paged.lists)
    wrapper.plan(*lists, 4, 2, 64, 4, causal=True, q_data_type="float32", kv_data_type="float32")
    q = torch.randn(5, 4, 64)
    expected, expected_lse = wrapper.run(q, paged.cache, return_lse=True)
    out, lse = torch.empty_like(expected), torch.empty_like(expected_lse)
    assert wrapper.run(q, paged.cache, out=out, lse=lse) is out
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    natural = wrapper.run(q, paged.cache, return_lse=True, lse_base="ln")[1]
    torch.testing.assert_close(natural, expected_lse * math.log(2))
    turned = wrapper.run(q, paged.cache, return_lse=True, lse_layout="HN")[1]
    assert torch.equal(turned, expected_lse.t())
    with pytest.raises(ValueError, match="out has shape"):
        wrapper.run(q, paged.cache, out=out[:4])


def test_cache_in_two_tensors_and_strided() -> None:
    paged = Paged([9, 30])
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(*paged.lists, 4, 2, 64, 4, data_type="float32", q_data_type=None)
    q = torch.randn(2, 4, 64)
    expected = wrapper.run(q, paged.cache)
    k, v = (part.clone() for part in paged.cache.unbind(1))
    assert torch.equal(wrapper.run(q, (k, v)), expected)
    wide = torch.zeros(paged.cache.shape[0], 2, 2, 4, 3, 64)
    wide[:, :, 1, :, :2] = paged.cache
    assert torch.equal(wrapper.run(q, wide[:, :, 1, :, :2]), expected)


def test_graph_wrapper_keeps_addresses() -> None:
    """Later plans write to the memory that a captured run() reads."""
    small, large = Paged([3, 5], seed=1), Paged([11, 30], seed=1)
    buffers = (torch.empty(3, dtype=torch.int32), torch.zeros(16, dtype=torch.int32), torch.empty(2, dtype=torch.int32))
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, *buffers)
    options = {"q_data_type": "float32", "kv_data_type": "float32"}
    wrapper.plan(*small.lists, 4, 2, 64, 4, **options)
    first = wrapper._pass
    addresses = (first.table.data_ptr(), first.kv_lens.data_ptr(), first.q_indptr.data_ptr())
    wrapper.plan(*large.lists, 4, 2, 64, 4, **options)
    assert wrapper._pass is first
    assert addresses == (first.table.data_ptr(), first.kv_lens.data_ptr(), first.q_indptr.data_ptr())
    q = torch.randn(2, 4, 64)
    expected = expect(q, large, [1, 1], [Scores()] * 2)
    check(wrapper.run(q, large.cache), expected[0], torch.float32)
    with pytest.raises(ValueError, match="room for 16"):
        wrapper.plan(*Paged([60, 30]).lists, 4, 2, 64, 4, **options)
    with pytest.raises(ValueError, match="use_cuda_graph fixed 2"):
        wrapper.plan(*Paged([3, 3, 3]).lists, 4, 2, 64, 4, **options)


def test_fast_decode_plan() -> None:
    paged = Paged([9, 30])
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    arguments = (*paged.lists, 4, 2, 64, 4)
    with pytest.raises(ValueError, match="prior plan"):
        flashinfer.fast_decode_plan(wrapper, *arguments)
    wrapper.plan(*Paged([2]).lists, 4, 2, 64, 4, q_data_type="float32")
    flashinfer.fast_decode_plan(wrapper, *arguments, q_data_type="float32", global_override_indptr_cpu=paged.indptr)
    q = torch.randn(2, 4, 64)
    check(wrapper.run(q, paged.cache), expect(q, paged, [1, 1], [Scores()] * 2)[0], torch.float32)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "rotary positions": ({"pos_encoding_mode": "ROPE_LLAMA"}, {}, NotImplementedError, "ROPE_LLAMA"),
    "output dtype": ({"o_data_type": "float16"}, {}, NotImplementedError, "o_data_type"),
    "heads": ({"num_kv_heads": 3}, {}, ValueError, "num_qo_heads is 4"),
    "cache dtype": ({"kv_data_type": "float16"}, {}, ValueError, "k cache has dtype"),
    "page size": ({"page_size": 8}, {}, ValueError, "k cache has shape"),
    "other window in run()": ({"causal": True}, {"window_left": 3}, ValueError, "window_left is 3"),
    "nvfp4": ({}, {"kv_cache_sf": (1, 2)}, NotImplementedError, "NVFP4"),
    "skip softmax": ({}, {"skip_softmax_threshold_scale_factor": 1.0}, NotImplementedError, "skip_softmax"),
    "base": ({}, {"return_lse": True, "lse_base": "10"}, ValueError, "lse_base is '10'"),
    "scale": ({}, {"k_scale": 0.0}, ValueError, "must be positive"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_refusals(case: tuple[dict[str, Any], dict[str, Any], type[Exception], str]) -> None:
    plan, run, error, text = case
    paged = Paged([9, 30])
    options = {"q_data_type": "float32", "num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 64, "page_size": 4} | plan
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    with pytest.raises(error, match=text):
        wrapper.plan(offsets([2, 3]), *paged.lists, **options)
        wrapper.run(torch.randn(5, 4, 64), paged.cache, **run)


def test_run_needs_a_plan() -> None:
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    with pytest.raises(RuntimeError, match="prior plan"):
        wrapper.run(torch.randn(5, 4, 64), Paged([9, 30]).cache)
