# SPDX-License-Identifier: Apache-2.0
"""Masks, cross attention, linear layers and hints against numpy and the oracle."""

import fovea
import numpy as np
import pytest
from reference import Case, Pass


def masked_pass(mask, hidden, **arrays):
    """Runs 4 new tokens after 3 older ones with a mask; `hidden` lists the (query, key) pairs that it hides."""
    run = Pass(Case([4], [7], spec={"mask": mask}))
    for array, rows in zip(run.pool.layer(0), (run.k, run.v)):
        view = np.from_dlpack(array).reshape(-1, 2, 64)  # slots in place
        view[run.slots[0][:3]] = rows[:3]
    batch = fovea.Batch(
        mode="extend",
        q_indptr=np.array([0, 4], np.int32),
        kv_lens=np.array([7], np.int32),
        request_rows=np.array(run.rows, np.int32),
        table=run.table,
        out_slots=np.array(run.slots[0][3:], np.int64),
        **arrays,
    )
    run.backend.plan(batch)
    out = np.zeros((4, 4, 64), np.float32)
    run.backend.forward(q=run.q, k=run.k[3:], v=run.v[3:], out=out)
    k, v = (np.repeat(a.astype(np.float64), 2, axis=1) for a in (run.k, run.v))
    scores = np.einsum("qhd,khd->hqk", run.q, k) / 8
    for query, key in hidden:
        scores[:, query, key] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)
    np.testing.assert_allclose(out, expected, atol=2e-5)


CAUSAL = [(q, k) for q in range(4) for k in range(7) if k > q + 3]


def test_tree_mask():
    # Tokens 1 and 2 are children of token 0; token 3 is a child of token 2.
    ancestors = np.array([0b0001, 0b0011, 0b0101, 0b1101], np.uint64)
    masked_pass("tree", [*CAUSAL, (2, 4), (3, 4)], tree_ancestors=ancestors)
    masked_pass("tree", [*CAUSAL, (2, 4), (3, 4)], tree_ancestors=ancestors.view(np.int64))


@pytest.mark.parametrize("dtype", [np.uint8, np.bool_])
def test_custom_mask(dtype):
    visible = np.ones((4, 7), dtype)
    visible[1, 0] = visible[3, 2] = 0
    masked_pass(
        "custom",
        [*CAUSAL, (1, 0), (3, 2)],
        custom_visible=visible.reshape(-1),
        custom_indptr=np.array([0, 28], np.int64),
    )


def test_prefix_spans():
    # Positions 3 to 5, the new tokens 0 to 2, see each other.
    hidden = [pair for pair in CAUSAL if not (pair[0] <= 2 and pair[1] <= 5)]
    masked_pass(
        "prefix_spans",
        hidden,
        span_bounds=np.array([[3, 6]], np.int32),
        span_indptr=np.array([0, 1], np.int32),
    )


def test_multi_item_mask():
    # Prefix of 3, then the items [3, 4] and [5, 6].
    hidden = [*CAUSAL, (2, 3), (2, 4), (3, 3), (3, 4)]
    masked_pass(
        "multi_item",
        hidden,
        item_prefix_lens=np.array([3], np.uint32),
        item_token_pos=np.array([[0, 1, 0, 1]], np.uint16),
    )


def test_cross_attention():
    rng = np.random.default_rng(4)
    spec = fovea.AttentionSpec(scope="cross", q_heads=4, kv_heads=2, head_dim=64)
    cache = fovea.KvCacheSpec(kv_heads=2, head_dim=64, page_size=4)
    limits = fovea.BatchLimits(max_tokens=6, max_q_len=6, max_kv_len=6, max_encoder_len=6)
    pool = fovea.KvPool(cache, 3)
    made = fovea.select(spec, cache, limits=limits, threads=1).create(pool)
    made.reserve(limits)
    k, v = (rng.standard_normal((6, 2, 64)).astype(np.float32) for _ in range(2))
    q, out = rng.standard_normal((2, 4, 64)).astype(np.float32), np.zeros((2, 4, 64), np.float32)
    lens, table = np.array([6], np.int32), np.array([[1, 2]], np.int32)
    shared = {"request_rows": np.zeros(1, np.int32), "cross_lens": lens, "cross_table": table, "cross_entry_tokens": 4}
    made.plan(fovea.Batch(mode="extend", q_indptr=np.array([0, 6], np.int32), out_slots=np.arange(4, 10), **shared))
    made.forward(k=k, v=v)
    made.plan(fovea.Batch(mode="extend", q_indptr=np.array([0, 2], np.int32), **shared))
    made.forward(q=q, out=out)
    scores = np.einsum("qhd,khd->hqk", q, np.repeat(k, 2, axis=1)).astype(np.float64) / 8
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(out, np.einsum("hqk,khd->qhd", weights, np.repeat(v, 2, axis=1)), atol=2e-5)


def test_slots_keep_drafts():
    rng = np.random.default_rng(6)
    linear = fovea.LinearSpec(key_heads=1, value_heads=2, key_dim=16, value_dim=16, conv_width=4)
    spec = fovea.AttentionSpec(kind="gated_delta_net", linear=linear)
    states = fovea.StateCacheSpec(conv_dim=linear.conv_dim, conv_width=4, heads=2, rows=16, columns=16)
    keeping = states.replace(max_drafts=3, draft_inputs=spec.draft_inputs)
    assert keeping.max_drafts == 3 and keeping != states
    assert keeping.bytes_per_slot > states.bytes_per_slot
    limits = fovea.BatchLimits(max_tokens=9, max_q_len=9, max_kv_len=9)
    mixed = rng.standard_normal((9, linear.conv_dim)).astype(np.float32)
    decay = -rng.random((9, 2)).astype(np.float32)
    beta = rng.random((9, 2)).astype(np.float32)
    weight = rng.standard_normal((linear.conv_dim, 4)).astype(np.float32)

    def layer(state_spec):
        pool = fovea.StatePool(state_spec, 2)
        made = fovea.select(spec, limits=limits, threads=1).create(state=pool)
        made.reserve(limits)
        slot = pool.allocate()

        def run(begin, end, **drafts):
            made.plan(
                fovea.Batch(
                    mode="extend",
                    q_indptr=np.array([0, end - begin], np.int32),
                    kv_lens=np.array([end], np.int32),
                    state_slots=np.array([slot], np.int32),
                    **drafts,
                )
            )
            out = np.zeros((end - begin, 2, 16), np.float32)
            rows = slice(begin, end)
            made.forward(
                out=out,
                mixed=mixed[rows],
                log_decay=decay[rows],
                beta=beta[rows],
                conv_weight=weight,
                l2_normalise_qk=True,
            )
            return out

        return run

    want = layer(states)(0, 9)
    run = layer(keeping)
    first = run(0, 5, draft_counts=np.array([3], np.int32))
    rest = run(4, 9)  # two of three drafts are accepted
    np.testing.assert_array_equal(np.concatenate([first[:4], rest]), want)
    with pytest.raises(fovea.Error, match="draft_counts is given, the state pool keeps no drafts"):
        layer(states)(0, 5, draft_counts=np.array([3], np.int32))
    with pytest.raises(fovea.Error, match=r"draft_counts\[0\] is 6, must be in \[0, 3\]"):
        layer(keeping)(0, 5, draft_counts=np.array([6], np.int32))


@pytest.mark.parametrize("kind", ["gated_delta_net", "kda", "lightning"])
def test_linear_layer_continues_its_state(kind):
    rng = np.random.default_rng(5)
    linear = fovea.LinearSpec(key_heads=1, value_heads=2, key_dim=16, value_dim=16, conv_width=4)
    spec = fovea.AttentionSpec(kind=kind, linear=linear)
    state_spec = fovea.StateCacheSpec(conv_dim=linear.conv_dim, conv_width=4, heads=2, rows=16, columns=16)
    limits = fovea.BatchLimits(max_tokens=8, max_q_len=8, max_kv_len=8)

    def tensors(rows):
        if kind == "lightning":
            return {"mixed": mixed[rows], "log_decay": decay, "conv_weight": weight}
        return {
            "mixed": mixed[rows],
            "log_decay": decay[rows],
            "beta": beta[rows],
            "conv_weight": weight,
            "l2_normalise_qk": True,
        }

    mixed = rng.standard_normal((8, linear.conv_dim)).astype(np.float32)
    decay = -rng.random({"gated_delta_net": (8, 2), "kda": (8, 2, 16), "lightning": (2,)}[kind]).astype(np.float32)
    beta = rng.random((8, 2)).astype(np.float32)
    weight = rng.standard_normal((linear.conv_dim, 4)).astype(np.float32)
    results = []
    for backend, parts in (("auto", [8]), ("auto", [5, 3]), ("reference", [8])):
        pool = fovea.StatePool(state_spec, 3)
        slot = pool.allocate()
        made = fovea.select(spec, limits=limits, threads=1, backend=backend).create(state=pool)
        made.reserve(limits)
        out, begin = np.zeros((8, 2, 16), np.float32), 0
        for part in parts:
            rows = slice(begin, begin + part)
            made.plan(
                fovea.Batch(
                    mode="extend",
                    q_indptr=np.array([0, part], np.int32),
                    kv_lens=np.array([begin + part], np.int32),
                    state_slots=np.array([slot], np.int32),
                )
            )
            made.forward(out=out[rows], **tensors(rows))
            begin += part
        results.append((out, np.from_dlpack(pool.layer(0)[1])[slot].copy()))
    for out, state in results[1:]:
        np.testing.assert_allclose(out, results[0][0], atol=1e-5)
        np.testing.assert_allclose(state, results[0][1], atol=1e-5)
    assert np.abs(results[0][1]).max() > 0


def silu(x):
    return x / (1 + np.exp(-x))


def test_mamba1_convolves_then_scans():
    rng = np.random.default_rng(6)
    channels, states, tokens = 8, 4, 5
    linear = fovea.LinearSpec(key_heads=1, value_heads=channels, key_dim=states, value_dim=1, conv_width=3)
    spec = fovea.AttentionSpec(kind="mamba1", linear=linear)
    pool = fovea.StatePool(fovea.StateCacheSpec(conv_dim=channels, conv_width=3, heads=channels, rows=1, columns=4), 2)
    limits = fovea.BatchLimits(max_tokens=tokens, max_q_len=tokens, max_kv_len=tokens)
    made = fovea.select(spec, limits=limits, threads=1).create(state=pool)
    made.reserve(limits)
    slot = pool.allocate()
    made.plan(
        fovea.Batch(
            mode="extend",
            q_indptr=np.array([0, tokens], np.int32),
            kv_lens=np.array([tokens], np.int32),
            state_slots=np.array([slot], np.int32),
        )
    )
    x, bc = (rng.standard_normal((tokens, width)).astype(np.float32) for width in (channels, 2 * states))
    weight = rng.standard_normal((channels, 3)).astype(np.float32)
    a, dt = -rng.random((channels, states)).astype(np.float32), rng.random((tokens, channels)).astype(np.float32)
    mixed = np.concatenate([np.zeros_like(x), bc], axis=1)
    made.forward(mixed=x, conv_weight=weight, out=mixed[:, :channels, None])
    padded = np.concatenate([np.zeros((2, channels), np.float32), x])
    convolved = silu(sum(padded[i : i + tokens] * weight[:, i] for i in range(3)))
    np.testing.assert_allclose(mixed[:, :channels], convolved, atol=1e-5)
    out = np.zeros((tokens, channels, 1), np.float32)
    made.forward(mixed=mixed, log_decay=a, beta=dt, out=out)
    h = np.zeros((channels, states))
    for t in range(tokens):
        h = np.exp(dt[t, :, None] * a) * h + (dt[t] * convolved[t])[:, None] * bc[t, :states]
        np.testing.assert_allclose(out[t, :, 0], h @ bc[t, states:], atol=1e-5)
    with pytest.raises(fovea.Error, match="linear.beta is given, but the call has linear.conv_weight"):
        made.forward(mixed=x, conv_weight=weight, beta=dt, out=out)


def test_short_conv_has_windows_only():
    spec = fovea.AttentionSpec(kind="short_conv", linear=fovea.LinearSpec(value_heads=4, value_dim=1, conv_width=2))
    pool = fovea.StatePool(fovea.StateCacheSpec(conv_dim=4, conv_width=2), 2)
    assert np.from_dlpack(pool.layer(0)[0]).shape == (2, 4, 1)
    limits = fovea.BatchLimits(max_tokens=1, max_q_len=1, max_kv_len=2)
    made = fovea.select(spec, limits=limits, threads=1).create(state=pool)
    made.reserve(limits)
    slot, out = pool.allocate(), np.zeros((1, 4, 1), np.float32)
    weight = np.array([[2, 3]] * 4, np.float32)
    for length, value in ((1, 5), (2, 7)):
        made.plan(
            fovea.Batch(
                mode="decode",
                q_indptr=np.array([0, 1], np.int32),
                kv_lens=np.array([length], np.int32),
                state_slots=np.array([slot], np.int32),
            )
        )
        mixed = np.full((1, 4), value, np.float32)
        made.forward(mixed=mixed, conv_weight=weight, plain_conv=True, out=out)
    assert (out == 2 * 5 + 3 * 7).all()


def test_prefix_hints_keep_the_result():
    case = Case([1, 1], [16, 16], mode="decode")
    run = Pass(case)
    out, _ = run.run()
    batch = fovea.Batch(
        mode="decode",
        q_indptr=np.arange(3, dtype=np.int32),
        kv_lens=np.array([16, 16], np.int32),
        request_rows=np.array(run.rows, np.int32),
        table=run.table,
        out_slots=np.array([own[-1] for own in run.slots]),
        max_q_len=1,
        max_kv_len=16,
        host_q_lens=np.ones(2, np.int32),
        host_kv_lens=np.full(2, 16, np.int32),
        prefix_written=True,
    )
    assert (batch.requests, batch.tokens, str(batch.device)) == (2, 2, "cpu")
    run.backend.plan(batch)
    again = np.zeros_like(out)
    run.backend.forward(q=run.q, out=again, save_kv=False)
    np.testing.assert_array_equal(again, out)
