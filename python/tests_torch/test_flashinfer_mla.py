# SPDX-License-Identifier: Apache-2.0
"""The MLA wrapper, page writes, merges and cascades of fovea.compat.flashinfer."""

from __future__ import annotations

import math

import fovea.compat.flashinfer as flashinfer
import pytest
import torch
from flashinfer_oracle import Paged, Scores, attend, check, offsets

WORKSPACE = torch.empty(1, dtype=torch.uint8)
LATENT, ROPE, PAGE = 512, 64, 4
SCALE = 192**-0.5


class Latents:
    """A random cache of latents and rotary keys for requests of the given lengths."""

    def __init__(self, kv_lens: list[int], dtype: torch.dtype, rope: int = ROPE) -> None:
        torch.manual_seed(3)
        counts = [-(-length // PAGE) for length in kv_lens]
        self.kv_lens, self.rope = kv_lens, rope
        self.rows = (torch.randn(sum(counts) + 2, PAGE, LATENT + rope) * 0.3).to(dtype)
        self.indptr = offsets(counts)
        self.indices = torch.randperm(sum(counts) + 2)[: sum(counts)].to(torch.int32)
        self.lens = torch.tensor(kv_lens, dtype=torch.int32)

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rows.split((LATENT, self.rope), -1)

    def expect(self, q: torch.Tensor, q_lens: list[int], scores: Scores) -> tuple[torch.Tensor, torch.Tensor]:
        results = []
        for i, rows in enumerate(q.split(q_lens)):
            pages = self.indices[self.indptr[i] : self.indptr[i + 1]].long()
            keys = self.rows.float()[pages].flatten(0, 1)[: self.kv_lens[i], None]
            results.append(attend(rows, keys, keys[..., :LATENT], scores))
        return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results])

    def plan(self, q_lens: list[int], causal: bool, dtype: torch.dtype, **options):
        wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(WORKSPACE)
        wrapper.plan(
            offsets(q_lens), self.indptr, self.indices, self.lens, 4, LATENT, self.rope, PAGE, causal, SCALE,
            dtype, self.rows.dtype, **options,
        )  # fmt: skip
        return wrapper


def queries(q_lens: list[int], dtype: torch.dtype, rope: int = ROPE) -> torch.Tensor:
    return (torch.randn(sum(q_lens), 4, LATENT + rope) * 0.5).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("q_lens", [[1, 1, 1], [3, 1, 5], [0, 2, 4]], ids=str)
def test_mla(q_lens: list[int], causal: bool, dtype: torch.dtype) -> None:
    cache = Latents([3, 1, 21], dtype)
    if q_lens[1] > 1:
        cache = Latents([3, 9, 21], dtype)
    q = queries(q_lens, dtype)
    wrapper = cache.plan(q_lens, causal, dtype)
    parts = (q[..., :LATENT], q[..., LATENT:])
    out, lse = wrapper.run(*parts, *cache.parts, return_lse=True)
    expected = cache.expect(q, q_lens, Scores(scale=SCALE, causal=causal))
    check(out, expected[0], dtype)
    check(lse, expected[1], dtype if dtype == torch.float32 else torch.float16)
    packed = wrapper.run(query=q, kv_cache=cache.rows)
    assert torch.equal(packed, out)
    natural = wrapper.run(*parts, *cache.parts, return_lse=True, return_lse_base_on_e=True)[1]
    torch.testing.assert_close(natural, lse * math.log(2))


def test_mla_without_rotary_keys() -> None:
    cache = Latents([3, 21], torch.float32, rope=0)
    q = queries([2, 3], torch.float32, rope=0)
    out = cache.plan([2, 3], True, torch.float32).run(q, q[..., :0], *cache.parts)
    check(out, cache.expect(q, [2, 3], Scores(scale=SCALE))[0], torch.float32)


def test_mla_metadata_and_tables() -> None:
    cache = Latents([5, 21], torch.float32)
    q = queries([1, 1], torch.float32)
    expected, _ = cache.expect(q, [1, 1], Scores(scale=SCALE))
    tables = torch.zeros(2, 6, dtype=torch.int32)
    for i in range(2):
        pages = cache.indices[cache.indptr[i] : cache.indptr[i + 1]]
        tables[i, : len(pages)] = pages
    metadata = flashinfer.mla.MLAPlanMetadata
    common = {"num_heads": 4, "head_dim_ckv": LATENT, "head_dim_kpe": ROPE, "page_size": PAGE, "causal": False}
    common |= {"sm_scale": SCALE, "q_data_type": torch.float32, "kv_data_type": torch.float32}
    for each in (
        metadata.csr(offsets([1, 1]), cache.indptr, cache.indices, cache.lens),
        metadata.dense(offsets([1, 1]), tables, cache.lens),
    ):
        wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(WORKSPACE)
        wrapper.plan(metadata=each, **common)
        check(wrapper.run(query=q, kv_cache=cache.rows), expected, torch.float32)


def test_mla_refuses_to_copy_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Latents([5, 21], torch.float32)
    q = queries([1, 2], torch.float32)
    wrapper = cache.plan([1, 2], True, torch.float32)
    apart = [part.clone() for part in cache.parts]
    parts = (q[..., :LATENT], q[..., LATENT:])
    with pytest.raises(NotImplementedError, match="copy_split_caches"):
        wrapper.run(*parts, *apart)
    monkeypatch.setattr(flashinfer.mla, "copy_split_caches", True)
    assert torch.equal(wrapper.run(*parts, *apart), wrapper.run(*parts, *cache.parts))
    apart[0].add_(1)
    assert not torch.equal(wrapper.run(*parts, *apart), wrapper.run(*parts, *cache.parts))


def test_mla_fp8_cache() -> None:
    cache = Latents([5, 21], torch.float8_e4m3fn)
    q = queries([1, 2], torch.float32)
    wrapper = cache.plan([1, 2], True, torch.float32)
    parts = (q[..., :LATENT], q[..., LATENT:])
    out = wrapper.run(*parts, *cache.parts, ckv_scale=0.5, kpe_scale=2.0)
    scaled = torch.cat((parts[0], parts[1] * 4.0), -1)
    expected, _ = cache.expect(scaled, [1, 2], Scores(scale=SCALE * 0.5))
    check(out, expected * 0.5, torch.float32)


def test_mla_fp8_cache_needs_scales() -> None:
    cache = Latents([5, 21], torch.float8_e4m3fn)
    q = queries([1, 2], torch.float32)
    wrapper = cache.plan([1, 2], True, torch.float32)
    for scales, text in (
        ({"kpe_scale": 1.0}, "ckv_scale or ckv_scale_arr"),
        ({"ckv_scale": 1.0}, "kpe_scale is absent"),
    ):
        with pytest.raises(ValueError, match=text):
            wrapper.run(query=q, kv_cache=cache.rows, **scales)


@pytest.mark.parametrize("name", ["q_nope", "q_pe", "ckv_cache", "kpe_cache"])
def test_mla_names_a_tensor_of_another_dtype(name: str) -> None:
    cache = Latents([5, 21], torch.float32)
    q = queries([1, 2], torch.float32)
    wrapper = cache.plan([1, 2], True, torch.float32)
    names = ("q_nope", "q_pe", "ckv_cache", "kpe_cache")
    tensors = dict(zip(names, (q[..., :LATENT], q[..., LATENT:], *cache.parts), strict=True))
    tensors[name] = tensors[name].half()
    with pytest.raises(ValueError, match=rf"{name}\.dtype is torch.float16"):
        wrapper.run(**tensors)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_append(layout: str, dtype: torch.dtype) -> None:
    """Appended tokens land at their positions; rows without a request change nothing."""
    new = [2, 0, 5]
    paged = Paged([9, 3, 5], dtype=dtype, layout=layout)
    before = paged.cache.float().clone()
    lens = flashinfer.get_seq_lens(paged.indptr, paged.last_page_len, paged.page_size)
    assert lens.tolist() == paged.kv_lens
    requests, positions = flashinfer.get_batch_indices_positions(offsets(new), lens, 10)
    assert requests.tolist() == [0, 0, 2, 2, 2, 2, 2, -1, -1, -1]
    assert positions.tolist() == [7, 8, 0, 1, 2, 3, 4, 0, 0, 0]
    k, v = torch.randn(10, 2, 64).to(dtype), torch.randn(10, 2, 64).to(dtype)
    flashinfer.append_paged_kv_cache(
        k, v, requests, positions, paged.cache, paged.indices, paged.indptr, paged.last_page_len, layout
    )
    for request, rows in ((0, slice(0, 2)), (2, slice(2, 7))):
        keys, values = paged.keys(request)
        count = new[request]
        assert torch.equal(keys[-count:], k.float()[rows])
        assert torch.equal(values[-count:], v.float()[rows])
    changed = (paged.cache.float() != before).flatten(3 if layout == "NHD" else 4).any(-1)
    assert int((changed.any(-1) if layout == "NHD" else changed.any(2)).sum()) <= 2 * sum(new)
    untouched = paged.keys(1)[0]
    paged.cache = before.to(dtype)
    assert torch.equal(untouched, paged.keys(1)[0])


def test_append_without_any_token_changes_nothing() -> None:
    paged = Paged([9, 3])
    before = paged.cache.clone()
    nobody = torch.full((4,), -1, dtype=torch.int32)
    rows = torch.randn(4, 2, 64)
    flashinfer.append_paged_kv_cache(
        rows, rows, nobody, torch.zeros(4, dtype=torch.int32), paged.cache, *(paged.indices, paged.indptr), nobody
    )
    assert torch.equal(paged.cache, before)
    with pytest.raises(ValueError, match="dtype"):
        flashinfer.append_paged_kv_cache(
            rows.half(), rows.half(), nobody, nobody, paged.cache, paged.indices, paged.indptr, nobody
        )


def test_append_mla() -> None:
    cache = Latents([5, 21], torch.float32)
    requests, positions = flashinfer.get_batch_indices_positions(offsets([1, 3]), cache.lens, 4)
    ckv, kpe = torch.randn(4, LATENT), torch.randn(4, ROPE)
    flashinfer.append_paged_mla_kv_cache(
        ckv, kpe, requests, positions, *cache.parts, cache.indices, cache.indptr, cache.lens
    )
    pages = cache.indices[cache.indptr[1] : cache.indptr[2]].long()
    rows = cache.rows[pages].flatten(0, 1)[18:21]
    assert torch.equal(rows, torch.cat((ckv, kpe), -1)[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_merges(dtype: torch.dtype) -> None:
    """States over parts of the keys merge to the state over all of them."""
    torch.manual_seed(0)
    q, k, v = torch.randn(6, 4, 64), torch.randn(30, 4, 64), torch.randn(30, 4, 64)
    whole = attend(q, k, v, Scores(causal=False))
    cuts = [slice(0, 7), slice(7, 8), slice(8, 30)]
    states = [attend(q, k[cut], v[cut], Scores(causal=False)) for cut in cuts]
    outs, lses = [out.to(dtype) for out, _ in states], [lse.float() for _, lse in states]
    out, lse = flashinfer.merge_states(torch.stack(outs, 1), torch.stack(lses, 1))
    check(out, whole[0], dtype)
    check(lse, whole[1], torch.float32)
    a, b = outs[0].clone(), lses[0].clone()
    merged = flashinfer.merge_state(outs[0], lses[0], outs[1], lses[1])
    assert torch.equal(a, outs[0])
    assert torch.equal(b, lses[0])
    flashinfer.merge_state_in_place(*merged, outs[2], lses[2])
    check(merged[0], whole[0], dtype)
    check(merged[1], whole[1], torch.float32)
    mask = torch.tensor([True, False, True, True, False, False])
    flashinfer.merge_state_in_place(a, b, outs[1], lses[1], mask)
    both = flashinfer.merge_state(outs[0], lses[0], outs[1], lses[1])
    for rows, changed, kept in ((a, both[0], outs[0]), (b, both[1], lses[0])):
        assert torch.equal(rows[mask], changed[mask])
        assert torch.equal(rows[~mask], kept[~mask])


def test_merge_of_empty_states() -> None:
    v, s = torch.zeros(2, 3, 4, 64), torch.full((2, 3, 4), -math.inf)
    v[0, 1], s[0, 1] = 2.0, 1.0
    out, lse = flashinfer.merge_states(v, s)
    assert torch.equal(out[0], torch.full((4, 64), 2.0))
    assert torch.equal(lse[0], torch.ones(4))
    assert torch.equal(out[1], torch.zeros(4, 64))
    assert torch.isneginf(lse[1]).all()


@pytest.mark.parametrize("causal", [True, False])
def test_cascade(causal: bool) -> None:
    """Two levels give what one pass over prefix and own keys gives."""
    q_lens = [1, 3, 2]
    paged = Paged([8, 5, 9, 6])  # request 0 is the prefix
    q = torch.randn(6, 4, 64)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, WORKSPACE)
    first, rest = paged.indptr[:2], paged.indptr[1:] - paged.indptr[1]
    pages = paged.indices.split([int(paged.indptr[1]), len(paged.indices) - int(paged.indptr[1])])
    wrapper.plan(
        [offsets([6]), offsets(q_lens)],
        [first, rest],
        list(pages),
        [paged.last_page_len[:1], paged.last_page_len[1:]],
        4, 2, 64, 4,
        causal=causal,
        q_data_type="float32",
    )  # fmt: skip
    out = wrapper.run(q, paged.cache)
    shared = paged.keys(0)
    expected = []
    for i, rows in enumerate(q.split(q_lens)):
        own = paged.keys(i + 1)
        k, v = (torch.cat(parts) for parts in zip(shared, own, strict=True))
        expected.append(attend(rows, k, v, Scores(causal=causal))[0])
    check(out, torch.cat(expected), torch.float32)

    shared_wrapper = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(WORKSPACE)
    lists = (rest, pages[1], paged.last_page_len[1:])
    shared_wrapper.begin_forward(offsets(q_lens), *lists, 4, 2, 64, 4, q_data_type="float32")
    check(shared_wrapper.forward(q, *shared, paged.cache, causal=causal), torch.cat(expected), torch.float32)
    if not causal:
        decode = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(WORKSPACE)
        decode.begin_forward(*lists, 4, 2, 64, 4, data_type="float32")
        tokens = q[:3]
        parts = [torch.cat(each) for i in range(3) for each in zip(shared, paged.keys(i + 1), strict=True)]
        expected = [attend(tokens[i : i + 1], parts[2 * i], parts[2 * i + 1], Scores())[0] for i in range(3)]
        check(decode.forward(tokens, *shared, paged.cache), torch.cat(expected), torch.float32)
