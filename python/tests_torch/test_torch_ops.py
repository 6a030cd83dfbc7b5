# SPDX-License-Identifier: Apache-2.0
"""The functional ops against torch in fp64, in opcheck and in torch.compile."""

import itertools

import fovea
import fovea.torch
import pytest
import torch
from fovea.torch import default_cache, merge_states, paged_attention, varlen_attention, write_kv
from torch_reference import attend, paged_requests, tolerance

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
OPTIONS = [
    {},
    {"window": 7},
    {"logit_cap": 3.0},
    {"softmax_scale": 0.3},
    {"sinks": SINKS},
    {"alibi_slopes": SLOPES},
    {"window": 9, "logit_cap": 5.0, "sinks": SINKS},
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def name(value):
    return "-".join(value) or "plain" if isinstance(value, dict) else str(value).removeprefix("torch.")


def packed(lens, dtype, q_heads=4, kv_heads=2, dim=64, dim_v=64):
    generator = torch.Generator().manual_seed(sum(lens))
    q, k, v = (
        torch.randn(sum(lens), heads, width, generator=generator).to(dtype)
        for heads, width in ((q_heads, dim), (kv_heads, dim), (kv_heads, dim_v))
    )
    return q, k, v, torch.tensor([0, *lens]).cumsum(0).to(torch.int32)


def assert_near(result, expected, dtype):
    out, lse = result
    torch.testing.assert_close(out.double(), expected[0], atol=tolerance(dtype), rtol=tolerance(dtype))
    torch.testing.assert_close(lse.double(), expected[1], atol=tolerance(dtype), rtol=tolerance(dtype))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("options", OPTIONS, ids=name)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_varlen_attention_agrees_with_sdpa(dtype, options, causal):
    if not causal and "window" in options:
        pytest.skip("a window looks back only")
    lens = [1, 17, 0, 40, 2]
    q, k, v, q_indptr = packed(lens, dtype)
    result = varlen_attention(q, k, v, q_indptr, max_q_len=40, causal=causal, needs_lse=True, **options)
    parts = [
        attend(*rows, causal=causal, **options)
        for rows in zip(q.split(lens), k.split(lens), v.split(lens), strict=True)
        if rows[0].shape[0] > 0
    ]
    assert_near(result, (torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])), dtype)


@pytest.mark.parametrize(("q_heads", "kv_heads", "dim", "dim_v"), [(4, 4, 80, 80), (8, 1, 128, 64), (6, 2, 40, 40)])
def test_varlen_attention_has_every_shape(q_heads, kv_heads, dim, dim_v):
    q, k, v, q_indptr = packed([33], torch.float32, q_heads, kv_heads, dim, dim_v)
    result = varlen_attention(q, k, v, q_indptr, max_q_len=33, needs_lse=True)
    assert_near(result, attend(q, k, v), torch.float32)


@pytest.mark.parametrize("options", OPTIONS, ids=name)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("q_lens", [[1, 1, 1], [5, 1, 9]], ids=["decode", "extend"])
def test_paged_attention_agrees_with_sdpa(q_lens, dtype, options):
    requests = paged_requests(q_lens, [33, 1, 70], dtype=dtype)
    q_indptr = None if max(q_lens) == 1 else requests.q_indptr
    result = paged_attention(
        requests.q,
        requests.k_cache,
        requests.v_cache,
        requests.page_table,
        requests.device_lens,
        q_indptr,
        max_q_len=max(q_lens),
        needs_lse=True,
        **options,
    )
    assert_near(result, requests.expected(**options), dtype)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("order", ["nhd", "hnd"])
@pytest.mark.parametrize("page_size", [1, 4, 256])
def test_paged_attention_reads_every_layout(page_size, order, causal):
    requests = paged_requests([3, 2], [37, 300], page_size=page_size, order=order)
    result = paged_attention(
        requests.q,
        requests.k_cache,
        requests.v_cache,
        requests.page_table,
        requests.device_lens,
        requests.q_indptr,
        max_q_len=3,
        max_kv_len=300,
        order=order,
        causal=causal,
        needs_lse=True,
    )
    assert_near(result, requests.expected(causal=causal), torch.float32)


@pytest.mark.parametrize("scales", [1, 2])
def test_paged_attention_reads_fp8_caches(scales):
    requests = paged_requests([1, 1], [20, 33], cache_dtype=torch.float8_e4m3fn)
    k_scale, v_scale = torch.tensor([0.5, 2.0])[:scales], torch.tensor([3.0, 0.25])[:scales]
    result = paged_attention(
        requests.q,
        requests.k_cache,
        requests.v_cache,
        requests.page_table,
        requests.device_lens,
        k_scale=k_scale,
        v_scale=v_scale,
        needs_lse=True,
    )
    requests.keys = [keys * k_scale.double()[:, None] for keys in requests.keys]
    requests.values = [values * v_scale.double()[:, None] for values in requests.values]
    assert_near(result, requests.expected(), torch.float32)


def test_results_without_lse_are_the_same():
    requests = paged_requests([1, 1], [20, 33])
    arguments = (requests.q, requests.k_cache, requests.v_cache, requests.page_table, requests.device_lens)
    out, lse = paged_attention(*arguments)
    assert lse.shape == (0, 4)
    assert torch.equal(out, paged_attention(*arguments, needs_lse=True)[0])


@pytest.mark.parametrize("order", ["nhd", "hnd"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_write_kv_stores_rows(dtype, order):
    pages, page_size, heads, dim = 6, 4, 2, 64
    k, v = torch.randn(2, 5, heads, dim).to(dtype)
    slots = torch.tensor([0, 3, -1, 23, 9])
    shape = (pages, page_size, heads, dim) if order == "nhd" else (pages, heads, page_size, dim)
    k_cache, v_cache = torch.randn(2, *shape).to(dtype)
    expected = [cache.clone() for cache in (k_cache, v_cache)]
    for cache, rows in zip(expected, (k, v), strict=True):
        by_slot = cache if order == "nhd" else cache.transpose(1, 2)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                by_slot[slot // page_size, slot % page_size] = rows[token]
    write_kv(k, v, k_cache, v_cache, slots, order=order)
    assert torch.equal(k_cache, expected[0])
    assert torch.equal(v_cache, expected[1])


def test_write_kv_quantises():
    k, v = torch.randn(2, 3, 2, 64)
    k_cache, v_cache = torch.zeros(2, 4, 4, 2, 64).to(torch.float8_e4m3fn)
    k_scale, v_scale = torch.tensor([0.5]), torch.tensor([2.0])
    write_kv(k, v, k_cache, v_cache, torch.tensor([4, 5, 6]), k_scale=k_scale, v_scale=v_scale)
    assert torch.equal(k_cache[1, :3].float(), (k / 0.5).to(torch.float8_e4m3fn).float())
    assert torch.equal(v_cache[1, :3].float(), (v / 2.0).to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_merge_states_joins_two_sets_of_keys(dtype):
    q, k, v, _ = packed([30], dtype)
    whole = attend(q, k, v, causal=False)
    parts = [attend(q, k[cut], v[cut], causal=False) for cut in (slice(0, 11), slice(11, 30))]
    (out_a, lse_a), (out_b, lse_b) = [(out.to(dtype), lse.float()) for out, lse in parts]
    assert_near(merge_states(out_a, lse_a, out_b, lse_b), whole, dtype)
    unseen = torch.full_like(lse_b, -torch.inf)
    out, lse = merge_states(out_a, lse_a, torch.full_like(out_b, torch.nan), unseen)
    assert torch.equal(out, out_a)
    assert torch.equal(lse, lse_a)


def calls():
    """Calls of every functional op: the op and its arguments."""
    requests = paged_requests([2, 3], [20, 33])
    q, k, v, q_indptr = packed([9, 4], torch.float32)
    ops = torch.ops.fovea
    paged = (requests.q, requests.k_cache, requests.v_cache, requests.page_table, requests.device_lens)
    state = (torch.randn(5, 4, 64), torch.randn(5, 4))
    for needs_lse in (False, True):
        yield ops.varlen_attention.default, (q, k, v, q_indptr, 9, True, 0.0, 0, 0.0, None, None, needs_lse)
        yield (
            ops.paged_attention.default,
            (*paged, requests.q_indptr, 3, 0, True, "nhd", 0.0, 0, 0.0, SINKS, None, None, None, needs_lse),
        )
    caches = torch.zeros(2, 5, 4, 2, 64).unbind()
    yield ops.write_kv.default, (k[:3], v[:3], *caches, torch.tensor([3, -1, 17]), "nhd", None, None)
    yield ops.merge_states.default, (*state, *(x.flip(0) for x in state))


@pytest.mark.parametrize("index", range(6))
def test_opcheck(index):
    op, arguments = next(itertools.islice(calls(), index, None))
    torch.library.opcheck(op, arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("index", range(6))
def test_opcheck_on_a_gpu(index):
    op, arguments = next(itertools.islice(calls(), index, None))
    half = [
        x.to("cuda", torch.bfloat16 if x.dtype == torch.float32 and x.dim() > 2 else x.dtype)
        if isinstance(x, torch.Tensor)
        else x
        for x in arguments
    ]
    torch.library.opcheck(op, half)


def layer(q, k, v, k_cache, v_cache, slots, page_table, kv_lens, q_indptr):
    """A layer with every functional op: new tokens over a cache, and over an own prompt that is merged with it."""
    write_kv(k, v, k_cache, v_cache, slots)
    out, lse = paged_attention(
        q * 2, k_cache, v_cache, page_table, kv_lens, q_indptr, max_q_len=q.shape[0], needs_lse=True
    )
    other, other_lse = varlen_attention(q, k, v, q_indptr, max_q_len=q.shape[0], needs_lse=True)
    out, lse = merge_states(out, lse, other, other_lse)
    return out * 0.5, lse


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_layers_equal_eager_ones(backend):
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for tokens in (5, 9):
        requests = paged_requests([tokens], [33])
        k, v = torch.randn(2, tokens, 2, 64)
        slots = requests.slots[0][-tokens:].clone()
        results = []
        for function in (layer, compiled):
            caches = [cache.clone() for cache in (requests.k_cache, requests.v_cache)]
            batch = (slots, requests.page_table, requests.device_lens, requests.q_indptr)
            results.append((*function(requests.q, k, v, *caches, *batch), *caches))
        for eager, traced in zip(*results, strict=True):
            assert torch.equal(eager, traced)


@pytest.mark.parametrize("caches", ["own memory", "alternating"])
def test_compiled_stores_are_in_place(caches):
    """A copy of a cache would have a backend of its own."""
    torch.compiler.reset()
    requests = paged_requests([5], [33])
    k, v = torch.randn(2, 5, 2, 64)
    pair = (requests.k_cache.clone(), requests.v_cache.clone())
    if caches == "alternating":
        pair = torch.stack(pair, 1).unbind(1)
    slots = requests.slots[0][-5:].clone()
    batch = (slots, requests.page_table, requests.device_lens, requests.q_indptr)
    expected = layer(requests.q, k, v, *pair, *batch)
    backends = len(default_cache)
    results = torch.compile(layer, fullgraph=True, backend="inductor")(requests.q, k, v, *pair, *batch)
    assert len(default_cache) == backends
    assert all(torch.equal(result, wanted) for result, wanted in zip(results, expected, strict=True))
    assert torch.equal(pair[1].reshape(-1, 2, 64)[slots], v)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_stores_refuse_two_parts_of_one_tensor(backend):
    torch.compiler.reset()
    k_cache, v_cache = torch.zeros(2, 4, 4, 2, 64).unbind()
    k = torch.zeros(1, 2, 64)
    store = torch.compile(write_kv, fullgraph=True, backend=backend)
    with pytest.raises(Exception, match="k_cache and v_cache are parts of one tensor"):
        store(k, k, k_cache, v_cache, torch.tensor([5]))


def test_gradients_are_refused():
    q, k, v, q_indptr = packed([4], torch.float32)
    q.requires_grad_()
    with pytest.raises(NotImplementedError, match="no backward pass"):
        varlen_attention(q, k, v, q_indptr, max_q_len=4)
    with torch.no_grad():
        varlen_attention(q, k, v, q_indptr, max_q_len=4)


def test_errors_name_the_argument():
    q, k, v, q_indptr = packed([4, 4], torch.float32)
    with pytest.raises(fovea.Error, match="q_len is 4.*max_q_len"):
        varlen_attention(q, k, v, q_indptr, max_q_len=3)
    with pytest.raises(TypeError, match=r"dtype is torch\.float64"):
        varlen_attention(q.double(), k.double(), v.double(), q_indptr, max_q_len=4)
    with pytest.raises(ValueError, match='order is "dhn"'):
        write_kv(k, v, torch.zeros(4, 4, 2, 64), torch.zeros(4, 4, 2, 64), torch.zeros(8).long(), order="dhn")
    with pytest.raises(ValueError, match="must have 4 axes, the first 3 equal"):
        write_kv(k, v, torch.zeros(4, 4, 2, 64), torch.zeros(3, 4, 2, 64), torch.zeros(8).long())


@pytest.mark.parametrize("op", [varlen_attention, paged_attention])
def test_empty_batches_give_empty_results(op):
    q, kv = torch.zeros(0, 4, 64), torch.zeros(0, 2, 64)
    if op is varlen_attention:
        out, lse = op(q, kv, kv, torch.zeros(1, dtype=torch.int32), max_q_len=1, needs_lse=True)
    else:
        cache, no_lens = torch.zeros(4, 4, 2, 64), torch.zeros(0, dtype=torch.int32)
        out, lse = op(q, cache, cache, torch.zeros(0, 4, dtype=torch.int32), no_lens, needs_lse=True)
    assert out.shape == (0, 4, 64)
    assert lse.shape == (0, 4)
