# SPDX-License-Identifier: Apache-2.0
"""Ragged prefill and the functions for one request, against attention in fp64."""

from __future__ import annotations

from typing import Any

import fovea.compat.flashinfer as flashinfer
import pytest
import torch
from flashinfer_oracle import Scores, attend, check, offsets

WORKSPACE = torch.empty(1, dtype=torch.uint8)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])


def random_rows(q_len: int, kv_len: int, dtype: torch.dtype, heads: int = 2, dim: int = 64, dim_v: int = 64):
    """Returns q, k and v as [tokens, heads, dim]."""
    shapes = ((q_len, 4, dim), (kv_len, heads, dim), (kv_len, heads, dim_v))
    return [(torch.randn(shape) * 0.7).to(dtype) for shape in shapes]


RAGGED_CASES: dict[str, tuple[list[int], list[int], dict[str, Any], Scores]] = {
    # name: q_lens, kv_lens, options of plan(), scores
    "as many keys": ([3, 1, 12], [3, 1, 12], {"causal": True}, Scores()),
    "as many keys, all visible": ([3, 1, 12], [3, 1, 12], {}, Scores(causal=False)),
    "more keys": ([3, 1, 12], [5, 9, 40], {"causal": True}, Scores()),
    "more keys, all visible": ([3, 1, 12], [5, 9, 40], {}, Scores(causal=False)),
    "fewer keys, all visible": ([3, 8], [5, 2], {}, Scores(causal=False)),
    "fewer keys": ([3, 8, 4], [5, 2, 0], {"causal": True}, Scores()),
    "no tokens": ([0, 3, 0], [2, 3, 0], {"causal": True}, Scores()),
    "window, as many keys": ([3, 12], [3, 12], {"causal": True, "window_left": 2}, Scores(window_left=2)),
    "window, more keys": ([3, 12], [9, 40], {"causal": True, "window_left": 4}, Scores(window_left=4)),
    "window, all visible": ([3, 12], [9, 40], {"window_left": 4}, Scores(causal=False, window_left=4)),
    "window, as many keys, all visible": ([3, 12], [3, 12], {"window_left": 2}, Scores(causal=False, window_left=2)),
    "soft cap": ([3, 12], [9, 40], {"causal": True, "logits_soft_cap": 2.0}, Scores(cap=2.0)),
    "scale": ([3, 12], [3, 12], {"causal": True, "sm_scale": 0.4}, Scores(scale=0.4)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", RAGGED_CASES.values(), ids=RAGGED_CASES.keys())
def test_ragged(case: tuple[list[int], list[int], dict[str, Any], Scores], dtype: torch.dtype) -> None:
    q_lens, kv_lens, plan, scores = case
    q, k, v = random_rows(sum(q_lens), sum(kv_lens), dtype)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    wrapper.plan(offsets(q_lens), offsets(kv_lens), 4, 2, 64, q_data_type=dtype, **plan)
    out, lse = wrapper.run(q, k, v, return_lse=True)
    rows = zip(q.split(q_lens), k.split(kv_lens), v.split(kv_lens), strict=True)
    parts = [attend(*each, scores) for each in rows]
    check(out, torch.cat([each for each, _ in parts]), dtype)
    check(lse, torch.cat([each for _, each in parts]), dtype if dtype == torch.float32 else torch.float16)


def test_ragged_widths_and_layout() -> None:
    """Heads of k and v differ in width; HND has the heads first."""
    q, k, v = random_rows(7, 7, torch.float32, dim=96, dim_v=64)
    expected, _ = attend(q, k, v, Scores())
    for layout in ("NHD", "HND"):
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, layout)
        wrapper.plan(offsets([7]), offsets([7]), 4, 2, 96, 64, causal=True, q_data_type="float32")
        rows = (k, v) if layout == "NHD" else (k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous())
        check(wrapper.run(q, *rows), expected, torch.float32)


def test_ragged_with_one_indptr_for_both() -> None:
    """The same tensor says that there are as many keys as queries, without a look at its contents."""
    q, k, v = random_rows(9, 9, torch.float32)
    indptr = offsets([4, 5])
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    wrapper.plan(indptr, indptr, 4, 2, 64, causal=True, q_data_type="float32")
    assert wrapper._pass.is_packed
    rows = zip(q.split([4, 5]), k.split([4, 5]), v.split([4, 5]), strict=True)
    check(wrapper.run(q, k, v), torch.cat([attend(*each, Scores())[0] for each in rows]), torch.float32)


def test_ragged_custom_mask() -> None:
    q_lens, kv_lens = [3, 5], [4, 9]
    q, k, v = random_rows(8, 13, torch.float32)
    masks = [torch.rand(a, b) < 0.6 for a, b in zip(q_lens, kv_lens, strict=True)]
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    mask = torch.cat([each.flatten() for each in masks])
    wrapper.plan(offsets(q_lens), offsets(kv_lens), 4, 2, 64, custom_mask=mask, q_data_type="float32")
    rows = zip(q.split(q_lens), k.split(kv_lens), v.split(kv_lens), masks, strict=True)
    parts = [attend(a, b, c, Scores(mask=each))[0] for a, b, c, each in rows]
    check(wrapper.run(q, k, v), torch.cat(parts), torch.float32)


def test_ragged_fp8_keys() -> None:
    q, k, v = random_rows(5, 5, torch.float32)
    k, v = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    wrapper.plan(
        offsets([5]), offsets([5]), 4, 2, 64, causal=True, q_data_type="float32", kv_data_type=torch.float8_e4m3fn
    )
    out = wrapper.run(q, k, v, k_scale=0.5, v_scale=2.0)
    check(out, attend(q, k.float(), v.float(), Scores(k_scale=0.5, v_scale=2.0))[0], torch.float32)


def test_sink_variant() -> None:
    """run() of FlashInfer's AttentionSink variant takes the sinks and the scale after v or the cache."""
    variant = ("uri", *[None] * 6, ["sink"], ["float"], ["sm_scale"], ["double"], "AttentionSink", "source")
    q, k, v = random_rows(8, 8, torch.float32)
    expected, _ = attend(q, k, v, Scores(sinks=SINKS, scale=0.2))
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, jit_args=variant)
    ragged.plan(offsets([8]), offsets([8]), 4, 2, 64, causal=True, q_data_type="float32")
    check(ragged.run(q, k, v, SINKS, 0.2), expected, torch.float32)
    paged = flashinfer.BatchAttentionWithAttentionSinkWrapper(
        WORKSPACE, q_data_type=torch.float32, kv_data_type=torch.float32
    )
    paged.plan(offsets([8]), offsets([8]), torch.arange(8, dtype=torch.int32), torch.ones(1, dtype=torch.int32),
               4, 2, 64, 1, causal=True)  # fmt: skip
    check(paged.run(q, (k, v), SINKS, 0.2), expected, torch.float32)
    with pytest.raises(NotImplementedError, match="Custom"):
        flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, jit_args=(*variant[:11], "Custom", "source"))


SINGLE_CASES: dict[str, tuple[int, int, dict[str, Any], Scores]] = {
    "as many keys": (17, 17, {"causal": True}, Scores()),
    "as many keys, all visible": (17, 17, {}, Scores(causal=False)),
    "more keys": (5, 37, {"causal": True}, Scores()),
    "more keys, pages of 64": (5, 128, {"causal": True}, Scores()),
    "more keys, all visible": (5, 37, {}, Scores(causal=False)),
    "fewer keys": (9, 4, {"causal": True}, Scores()),
    "window": (5, 37, {"causal": True, "window_left": 3}, Scores(window_left=3)),
    "soft cap": (5, 37, {"causal": True, "logits_soft_cap": 4.0}, Scores(cap=4.0)),
    "scales": (5, 37, {"causal": True, "k_scale": 0.5, "v_scale": 2.0}, Scores(k_scale=0.5, v_scale=2.0)),
    "alibi": (
        5,
        37,
        {"causal": True, "pos_encoding_mode": "ALIBI"},
        Scores(slopes=torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])),
    ),
}


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", SINGLE_CASES.values(), ids=SINGLE_CASES.keys())
def test_single_prefill(case: tuple[int, int, dict[str, Any], Scores], dtype: torch.dtype, layout: str) -> None:
    q_len, kv_len, options, scores = case
    q, k, v = random_rows(q_len, kv_len, dtype)
    expected, expected_lse = attend(q, k, v, scores)
    rows = (k, v) if layout == "NHD" else (k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous())
    out, lse = flashinfer.single_prefill_with_kv_cache(q, *rows, kv_layout=layout, return_lse=True, **options)
    check(out, expected, dtype)
    check(lse, expected_lse, dtype if dtype == torch.float32 else torch.float16)
    assert torch.equal(flashinfer.single_prefill_with_kv_cache(q, *rows, kv_layout=layout, **options), out)


def test_single_prefill_alibi_with_few_keys() -> None:
    q, k, v = random_rows(9, 4, torch.float32)
    out = flashinfer.single_prefill_with_kv_cache(q, k, v, pos_encoding_mode="ALIBI")
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])
    check(out, attend(q, k, v, Scores(causal=False, slopes=slopes))[0], torch.float32)


@pytest.mark.parametrize("kv_len", [3, 5, 21])
def test_single_prefill_custom_mask(kv_len: int) -> None:
    q, k, v = random_rows(5, kv_len, torch.float32)
    mask = torch.rand(5, kv_len) < 0.5
    out = flashinfer.single_prefill_with_kv_cache(q, k, v, custom_mask=mask)
    check(out, attend(q, k, v, Scores(mask=mask))[0], torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_len", [1, 37, 128])
def test_single_decode(kv_len: int, dtype: torch.dtype) -> None:
    q, k, v = random_rows(1, kv_len, dtype)
    expected, expected_lse = attend(q, k, v, Scores(window_left=9, cap=5.0))
    options = {"window_left": 9, "logits_soft_cap": 5.0}
    out, lse = flashinfer.single_decode_with_kv_cache(q[0], k, v, return_lse=True, **options)
    check(out, expected[0], dtype)
    check(lse, expected_lse[0], dtype if dtype == torch.float32 else torch.float16)
    with pytest.raises(ValueError, match="q has shape"):
        flashinfer.single_decode_with_kv_cache(q, k, v)
