# SPDX-License-Identifier: Apache-2.0
"""Passes over paged caches against numpy."""

import dataclasses

import fovea
import numpy as np
import pytest
from reference import Case, Pass, decode, encode, softmax_attention

DECODE = Case([1, 1, 1], [9, 17, 1], mode="decode")
MIXED = Case([1, 5, 7], [9, 12, 7])
CASES = {
    "decode": DECODE,
    "extend": Case([4, 6], [4, 13], mode="extend"),
    "mixed": MIXED,
    "one page per token": dataclasses.replace(MIXED, page_size=1),
    "pages of 16": dataclasses.replace(MIXED, page_size=16),
    "heads first": dataclasses.replace(MIXED, order="hnd"),
    "mqa": dataclasses.replace(MIXED, q_heads=8, kv_heads=1),
    "mha": dataclasses.replace(MIXED, q_heads=3, kv_heads=3),
    "odd widths": dataclasses.replace(MIXED, head_dim=72, head_dim_v=40),
    "window": dataclasses.replace(MIXED, window=3),
    "soft cap": dataclasses.replace(MIXED, logit_cap=2.5),
    "sinks": dataclasses.replace(MIXED, sinks=True),
    "alibi": dataclasses.replace(MIXED, alibi=True),
    "window, soft cap and sinks": dataclasses.replace(MIXED, window=4, logit_cap=5.0, sinks=True),
    "batch invariant": dataclasses.replace(MIXED, spec={"batch_invariant": True}),
}


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_equals_numpy(name, backend):
    run = Pass(CASES[name], backend)
    out, lse = run.run()
    expected_out, expected_lse = run.expected()
    np.testing.assert_allclose(out, expected_out, atol=2e-5)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-5)


# The bound is the rounding of the cache's dtype: half a unit of the last place of values up to about 4.
@pytest.mark.parametrize(
    "dtype, cache_dtype, scale, bound",
    [
        ("bf16", "bf16", "none", 0.02),
        ("fp16", "fp16", "none", 0.003),
        ("fp32", "bf16", "none", 0.02),
        ("fp32", "fp8_e4m3", "none", 0.2),
        ("fp32", "fp8_e4m3", "per_token_head", 0.2),
        ("fp32", "fp8_e5m2", "per_head", 0.4),
    ],
)
def test_narrow_caches(dtype, cache_dtype, scale, bound):
    case = dataclasses.replace(MIXED, dtype=dtype, cache_dtype=cache_dtype, scale=scale)
    run = Pass(case)
    out, lse = run.run()
    expected_out, expected_lse = run.expected()
    np.testing.assert_allclose(out, expected_out, atol=bound)
    np.testing.assert_allclose(lse, expected_lse, atol=bound)
    oracle, oracle_lse = Pass(case, "reference").run()
    np.testing.assert_allclose(out, oracle, atol=bound / 4)
    np.testing.assert_allclose(lse, oracle_lse, atol=bound / 4)


def test_bound_layer_gives_the_same_bits_and_reads_the_arrays_anew():
    run = Pass(DECODE)
    first, _ = run.run()
    out = np.zeros_like(first)
    bound = run.backend.bind(q=run.q, out=out, save_kv=False)
    bound.forward()
    np.testing.assert_array_equal(out, first)
    run.q *= 2
    bound.forward()
    assert not np.array_equal(out, first)


def test_rows_beyond_the_batch_stay_untouched():
    run = Pass(DECODE)
    run.run()
    q, out = np.concatenate([run.q, run.q]), np.full((6, 4, 64), 7, np.float32)
    run.backend.forward(q=q, out=out, save_kv=False)
    assert (out[3:] == 7).all() and (out[:3] != 7).any()


def test_strided_rows():
    run = Pass(MIXED)
    expected, _ = run.run()
    tokens, heads, dim = run.q.shape
    wide = np.zeros((tokens, heads, 2 * dim), np.float32)
    fused = wide[:, :, :dim]  # as a slice of a fused qkv projection
    fused[:] = run.q
    out = np.zeros((heads, tokens, dim), np.float32).transpose(1, 0, 2)
    run.backend.forward(q=fused, out=out, save_kv=False)
    np.testing.assert_array_equal(out, expected)


def test_merge_of_two_halves_is_the_whole():
    rng = np.random.default_rng(1)
    tokens, heads, dim, keys = 3, 4, 32, 20
    q = rng.standard_normal((tokens, heads, dim)).astype(np.float32)
    k, v = (rng.standard_normal((keys, heads, dim)).astype(np.float32) for _ in range(2))
    scores = np.einsum("qhd,khd->hqk", q, k).astype(np.float64)

    def state(part):
        chosen = scores[:, :, part]
        lse = np.log(np.exp(chosen).sum(-1))
        out = np.einsum("hqk,khd->qhd", np.exp(chosen - lse[..., None]), v[part])
        return out.astype(np.float32), np.ascontiguousarray(lse.T, np.float32)

    out, lse = state(slice(0, 7))
    whole_out, whole_lse = state(slice(0, keys))
    merger = fovea.StateMerger(dtype="fp32", heads=heads, dim=dim, threads=1)
    merger.merge(out, lse, *state(slice(7, keys)))
    np.testing.assert_allclose(out, whole_out, atol=1e-5)
    np.testing.assert_allclose(lse, whole_lse, atol=1e-5)
    nothing = np.zeros_like(out), np.full_like(lse, -np.inf)
    before = out.copy()
    merger.merge(out, lse, *nothing, tokens=2)
    np.testing.assert_array_equal(out, before)


def rotate(rows, cos, sin, positions):
    half = cos.shape[1]
    a, b, rest = rows[..., :half], rows[..., half : 2 * half], rows[..., 2 * half :]
    c, s = cos[positions][:, None], sin[positions][:, None]
    return np.concatenate([a * c - b * s, b * c + a * s, rest], axis=-1)


def test_rope_is_that_of_numpy():
    case = dataclasses.replace(MIXED, spec={"has_rope": True})
    run = Pass(case)
    total = max(case.kv_lens)
    angles = np.arange(total)[:, None] / 100 ** (np.arange(16) / 16)[None]
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def forward(q_lens, kv_lens, **tensors):
        positions = np.concatenate([np.arange(n - q, n) for q, n in zip(q_lens, kv_lens)]).astype(np.int32)
        rope = fovea.RotaryTensors(cos=cos, sin=sin, positions=positions)
        assert (rope.rotary_dim, rope.max_positions) == (32, total)
        run.backend.plan(run.batch(q_lens, kv_lens, "mixed"))
        rows = run.rows_of(q_lens, kv_lens)
        run.backend.forward(k=run.k[rows], v=run.v[rows], rope=rope, **tensors)

    older = [n - q for q, n in zip(case.q_lens, case.kv_lens)]
    forward(older, older)
    out, q = np.zeros((case.tokens, 4, 64), np.float32), run.q.copy()
    forward(case.q_lens, case.kv_lens, q=q, out=out)
    starts, firsts = np.cumsum([0, *case.kv_lens]), np.cumsum([0, *case.q_lens])
    for i, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens)):
        keys = slice(starts[i], starts[i + 1])
        expected, _ = softmax_attention(
            rotate(run.q[firsts[i] : firsts[i + 1]], cos, sin, np.arange(kv_len - q_len, kv_len)),
            rotate(run.k[keys], cos, sin, np.arange(kv_len)),
            run.v[keys],
            case,
        )
        np.testing.assert_allclose(out[firsts[i] : firsts[i + 1]], expected, atol=2e-5)
    assert not np.array_equal(q, run.q), "forward() rotates q in place"


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("absorbed", [True, False])
def test_mla_equals_numpy(absorbed, backend):
    rng = np.random.default_rng(2)
    heads, rank, rope, nope, v_dim, page, length, tokens = 4, 32, 8, 16, 24, 4, 11, 5
    mla = fovea.MlaSpec(
        kv_lora_rank=rank, rope_dim=rope, nope_dim=0 if absorbed else nope, v_dim=0 if absorbed else v_dim
    )
    scale = 0.2
    spec = fovea.AttentionSpec(
        kind="mla", q_heads=heads, kv_heads=1, mla=mla, scores=fovea.ScoreSpec(softmax_scale=scale)
    )
    cache = fovea.KvCacheSpec(layout="mla", kv_heads=1, head_dim=rank + rope, head_dim_v=rank, page_size=page)
    limits = fovea.BatchLimits(max_tokens=length, max_q_len=length, max_kv_len=length)
    pool = fovea.KvPool(cache, 4)
    made = fovea.select(spec, cache, limits=limits, backend=backend, threads=2).create(pool)
    made.reserve(limits)
    latent, k_rope = (rng.standard_normal((length, n)).astype(np.float32) for n in (rank, rope))
    q_nope = rng.standard_normal((tokens, heads, nope)).astype(np.float32)
    q_rope = rng.standard_normal((tokens, heads, rope)).astype(np.float32)
    w_uk = rng.standard_normal((heads, nope, rank)).astype(np.float32) / 4
    w_uv = rng.standard_normal((heads, v_dim, rank)).astype(np.float32) / 4
    absorbed_q = np.einsum("qhn,hnr->qhr", q_nope, w_uk)
    table = np.array([[1, 2, 3]], np.int32)

    def plan(q_len, kv_len):
        slots = np.arange(kv_len - q_len, kv_len, dtype=np.int64) + page
        made.plan(
            fovea.Batch(
                mode="extend",
                q_indptr=np.array([0, q_len], np.int32),
                kv_lens=np.array([kv_len], np.int32),
                request_rows=np.zeros(1, np.int32),
                table=table,
                entry_tokens=page,
                out_slots=slots,
            )
        )

    weights = {} if absorbed else {"w_uk": w_uk, "w_uv": w_uv}
    older = length - tokens
    plan(older, older)
    made.forward(latent=latent[:older], k_rope=k_rope[:older], **weights)
    plan(tokens, length)
    out = np.zeros((tokens, heads, rank if absorbed else v_dim), np.float32)
    q = absorbed_q.astype(np.float32) if absorbed else q_nope
    made.forward(q=q, q_rope=q_rope, latent=latent[older:], k_rope=k_rope[older:], out=out, **weights)
    scores = np.einsum("qhr,kr->hqk", absorbed_q, latent) + np.einsum("qhr,kr->hqk", q_rope, k_rope)
    visible = np.arange(length)[None] <= np.arange(older, length)[:, None]
    scores = np.where(visible, scale * scores.astype(np.float64), -np.inf)
    weights_of = np.exp(scores - scores.max(-1, keepdims=True))
    weights_of /= weights_of.sum(-1, keepdims=True)
    expected = np.einsum("hqk,kr->qhr", weights_of, latent)
    if not absorbed:
        expected = np.einsum("qhr,hvr->qhv", expected, w_uv)
    np.testing.assert_allclose(out, expected, atol=5e-5)


@pytest.mark.parametrize("scope, causal", [("ragged", True), ("encoder", False)])
def test_without_a_cache(scope, causal):
    rng = np.random.default_rng(3)
    lengths, heads, kv_heads, dim = [3, 6], 4, 2, 32
    total = sum(lengths)
    spec = fovea.AttentionSpec(scope=scope, q_heads=heads, kv_heads=kv_heads, head_dim=dim)
    limits = fovea.BatchLimits(max_requests=2, max_tokens=total, max_q_len=6, max_kv_len=6)
    made = fovea.select(spec, limits=limits, threads=2).create()
    made.reserve(limits)
    q, k, v = (rng.standard_normal((total, n, dim)).astype(np.float32) for n in (heads, kv_heads, kv_heads))
    out = np.zeros_like(q)
    made.plan(fovea.Batch(mode="extend", q_indptr=np.cumsum([0, *lengths]).astype(np.int32)))
    made.forward(q=q, k=k, v=v, out=out)
    for begin, length in ((0, 3), (3, 6)):
        rows = slice(begin, begin + length)
        keys, values = (np.repeat(a[rows].astype(np.float64), 2, axis=1) for a in (k, v))
        scores = np.einsum("qhd,khd->hqk", q[rows], keys) / np.sqrt(dim)
        if causal:
            scores = np.where(np.tril(np.ones((length, length), bool)), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        expected = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), values)
        np.testing.assert_allclose(out[rows], expected, atol=2e-5)


def test_composition_by_phase():
    run = Pass(MIXED)
    limits = run.limits
    parts = [
        fovea.select(run.spec, run.cache, limits=limits, threads=2, backend=name).create(run.pool)
        for name in ("reference", "cpu")
    ]
    both = fovea.compose_by_phase(*parts)
    with pytest.raises(fovea.Error, match="part of a composition"):
        parts[0].plan(run.batch(MIXED.q_lens, MIXED.kv_lens, "mixed"))
    both.reserve(limits)
    run.backend = both
    out, _ = run.run()
    np.testing.assert_allclose(out, run.expected()[0], atol=2e-5)


def test_bf16_bits_round_trip():
    values = np.array([1.0, -2.5, 0.1], np.float32)
    np.testing.assert_allclose(decode(encode(values, "bf16"), "bf16"), values, rtol=1 / 256)
