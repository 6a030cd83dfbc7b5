# SPDX-License-Identifier: Apache-2.0
"""Arguments that fovea.compat.flash_attn refuses, and the text that says so."""

from __future__ import annotations

import inspect

import fovea
import pytest
import torch
from fovea.compat import flash_attn
from fovea.compat.flash_attn import flash_attn_interface as flash_attn_3


def call(**changes):
    arguments = {name: torch.randn(2, 5, 2, 16) for name in ("q", "k", "v")}
    return flash_attn.flash_attn_func(**{**arguments, **changes})


def cached_call(**changes):
    arguments = {"q": torch.randn(2, 1, 2, 16), "cache_seqlens": 4}
    arguments.update({name: torch.randn(2, 8, 2, 16) for name in ("k_cache", "v_cache")})
    return flash_attn.flash_attn_with_kvcache(**{**arguments, **changes})


def varlen_call(**changes):
    arguments = {name: torch.randn(5, 2, 16) for name in ("q", "k", "v")}
    ends = torch.tensor([0, 2, 5], dtype=torch.int32)
    arguments.update(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=3, max_seqlen_k=3)
    return flash_attn.flash_attn_varlen_func(**{**arguments, **changes})


@pytest.mark.parametrize(
    "make,text",
    [
        (lambda: call(dropout_p=0.1), "dropout_p is 0.1: Fovea is for inference"),
        (lambda: call(qv=torch.zeros(1)), "qv is given: use an AttentionSpec of kind mla"),
        (lambda: call(q=torch.randn(2, 5, 2, 16, requires_grad=True)), "q is a tensor that requires grad"),
        (lambda: call(alibi_slopes=torch.rand(2)), "alibi_slopes is given: only causal calls take it"),
        (lambda: varlen_call(causal=True, alibi_slopes=torch.rand(2, 2)), "alibi_slopes is \\(2, 2\\)"),
        (lambda: varlen_call(mask_mod=print), "mask_mod is .*: Fovea has no such feature"),
        (lambda: varlen_call(cp_world_size=2), "cp_world_size is 2: Fovea has no such feature"),
    ],
)
def test_unsupported(make, text):
    with pytest.raises(NotImplementedError, match=text) as info:
        make()
    assert isinstance(info.value, fovea.Error) and info.value.code == "unsupported"


@pytest.mark.parametrize(
    "make,text",
    [
        (lambda: call(k=torch.randn(2, 5, 2, 8)), "k has head_dim 8, q has 16"),
        (lambda: call(k=torch.randn(3, 5, 2, 16), v=torch.randn(3, 5, 2, 16)), "k has a batch of 3, q of 2"),
        (lambda: call(v=torch.randn(2, 5, 2, 16).half()), "v is torch.float16, q is torch.float32"),
        (lambda: call(q=torch.randn(2, 5, 3, 16)), "q has 3 heads, must be a multiple of the 2 of k"),
        (lambda: call(q=torch.randn(5, 2, 16)), "q has 3 axes, must have 4"),
        (lambda: call(q_descale=torch.ones(2, 2)), "q_descale, k_descale and v_descale need tensors of"),
        (lambda: call(s_aux=torch.ones(3)), r"sinks is \(3,\), must be \(2,\)"),
        (lambda: call(s_aux=torch.ones(2), sinks=torch.ones(2)), "s_aux and sinks are the same argument"),
        (lambda: call(out=torch.empty(2, 5, 2, 8)), r"out is \(2, 5, 2, 8\), must be \(2, 5, 2, 16\)"),
        (lambda: call(softmax_scale=-1.0), "softmax_scale is -1"),
        (lambda: varlen_call(cu_seqlens_q=torch.tensor([0, 2, 5])), "cu_seqlens_q is torch.int64"),
        (lambda: varlen_call(max_seqlen_q=2), "q_len is 3, at most 2|max_q_len of 2"),
        (lambda: varlen_call(cu_seqlens_k=None), "cu_seqlens_k is None, needed without block_table"),
        (lambda: cached_call(cache_seqlens=9), r"cache_seqlens is 9, must be in \[0, 8\]"),
        (lambda: cached_call(k=torch.randn(2, 1, 2, 16)), "k and v must both be given"),
        (lambda: cached_call(rotary_cos=torch.ones(8, 4)), "rotary_cos is given without k and v"),
        (
            lambda: cached_call(k=torch.randn(2, 5, 2, 16), v=torch.randn(2, 5, 2, 16)),
            "a request has 9 tokens, the cache .* has room for 8",
        ),
        (
            lambda: cached_call(cache_seqlens=torch.tensor([2, 11], dtype=torch.int32)),
            "a request has 11 tokens, the cache \\(a row of block_table\\) has room for 8",
        ),
        (
            lambda: cached_call(cache_batch_idx=torch.tensor([0, 7], dtype=torch.int32)),
            "7",
        ),
    ],
)
def test_wrong_arguments(make, text):
    with pytest.raises(fovea.Error, match=text) as info:
        make()
    assert info.value.code == "invalid_argument"


def test_grad_is_no_matter_without_autograd():
    q = torch.randn(2, 5, 2, 16, requires_grad=True)
    with torch.no_grad():
        assert not call(q=q).requires_grad
    assert not call(q=q.detach()).requires_grad


def test_arguments_without_effect():
    torch.manual_seed(0)
    tensors = {name: torch.randn(2, 5, 2, 16) for name in ("q", "k", "v")}
    expected = call(**tensors)
    for argument in ({"deterministic": True}, {"num_splits": 3}, {"pack_gqa": True}, {"sm_margin": 4}):
        assert torch.equal(call(**tensors, **argument), expected)
    lens = torch.ones(2, dtype=torch.int32)
    metadata = flash_attn_3.get_scheduler_metadata(2, 1, 8, 2, 2, 16, lens, causal=True)
    assert metadata.dtype == torch.int32 and metadata.numel() == 0
    torch.manual_seed(1)
    plain = cached_call()
    torch.manual_seed(1)
    assert torch.equal(cached_call(scheduler_metadata=metadata), plain)


@pytest.mark.parametrize(
    "function,names",
    [
        (
            flash_attn.flash_attn_func,
            "q k v dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs",
        ),
        (
            flash_attn.flash_attn_varlen_func,
            "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal window_size "
            "softcap alibi_slopes deterministic return_attn_probs block_table",
        ),
        (
            flash_attn.flash_attn_with_kvcache,
            "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad block_table "
            "softmax_scale causal window_size softcap rotary_interleaved alibi_slopes num_splits return_softmax_lse",
        ),
        (
            flash_attn_3.flash_attn_func,
            "q k v softmax_scale causal qv q_descale k_descale v_descale window_size attention_chunk softcap "
            "num_splits pack_gqa deterministic sm_margin return_attn_probs",
        ),
        (
            flash_attn_3.flash_attn_with_kvcache,
            "q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad page_table "
            "cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens q_descale k_descale v_descale softmax_scale "
            "causal window_size attention_chunk softcap rotary_interleaved scheduler_metadata num_splits pack_gqa "
            "sm_margin return_softmax_lse",
        ),
    ],
)
def test_positional_arguments(function, names):
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    parameters = inspect.signature(function).parameters.values()
    assert [each.name for each in parameters if each.kind in kinds] == names.split()
