# SPDX-License-Identifier: Apache-2.0
"""Layers of the plug-in compute attention over caches laid out as vLLM hands them over."""

import gc

import fovea.vllm.mha as mha
import pytest
import torch
from checkpoints import model_folder
from fovea.serving import layer_group
from fovea.vllm import counters, v0_24, v0_33
from fovea.vllm.metadata import MetadataBuilder
from layers import BLOCK, BLOCKS, Pass, Request, add_layer, make_impl
from vllm.config import CUDAGraphMode
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import CrossAttentionSpec, EncoderOnlyAttentionSpec, FullAttentionSpec

from attention import attention

HEADS, KV_HEADS, DIM, SCALE = 4, 2, 64, 0.125
MIXED = [Request(1, 45), Request(20, 20), Request(7, 100), Request(1, 1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def caches_of_0_24(monkeypatch):
    """The tests make caches of vLLM 0.24, whatever version is installed."""
    monkeypatch.setattr(mha, "MhaCache", v0_24.MhaCache)


@pytest.fixture
def config(folder):
    arguments = EngineArgs(
        model=str(folder), dtype="float32", max_model_len=128, block_size=BLOCK, max_num_batched_tokens=128
    )
    return arguments.create_engine_config()


def _spec(kind: type = FullAttentionSpec, dtype: torch.dtype = torch.float32):
    return kind(block_size=BLOCK, num_kv_heads=KV_HEADS, head_size=DIM, dtype=dtype)


def _cache_24(dtype: torch.dtype = torch.float32, heads_first: bool = False) -> torch.Tensor:
    if heads_first:
        return torch.zeros(BLOCKS, 2, KV_HEADS, BLOCK, DIM, dtype=dtype).transpose(2, 3)
    return torch.zeros(BLOCKS, 2, BLOCK, KV_HEADS, DIM, dtype=dtype)


def _cache_33(layers: int = 1) -> torch.Tensor:
    """A cache whose blocks hold all layers one after the other, K and V in one row."""
    return torch.zeros(BLOCKS, layers, KV_HEADS, BLOCK, 2 * DIM)[:, layers - 1]


def _tensors(tokens: int, seed: int = 1):
    chance = torch.Generator().manual_seed(seed)
    return [torch.randn(tokens, heads, DIM, generator=chance) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def _fill(pass_: Pass, views, seed: int = 2):
    """Stores random keys and values of all tokens but the new ones, and returns those of each request."""
    chance = torch.Generator().manual_seed(seed)
    stored = []
    for request, slots in zip(pass_.requests, pass_.slots, strict=True):
        old = request.kv_len - request.new_tokens
        pair = torch.randn(2, old, KV_HEADS, DIM, generator=chance)
        for view, rows in zip(views, pair, strict=True):
            for slot, row in zip(slots, rows, strict=False):
                view[slot // BLOCK, slot % BLOCK] = row
        stored.append(pair)
    return stored


def _expected(pass_: Pass, stored, tensors, **scores):
    q, k, v = tensors
    outputs, first = [], 0
    for request, (old_k, old_v) in zip(pass_.requests, stored, strict=True):
        new = slice(first, first + request.new_tokens)
        outputs.append(attention(q[new], torch.cat([old_k, k[new]]), torch.cat([old_v, v[new]]), SCALE, **scores))
        first += request.new_tokens
    return torch.cat(outputs).float()


def _impl(config, **options):
    return make_impl(config, mha.MhaImpl, HEADS, DIM, SCALE, KV_HEADS, **options)


def _run(config, impl, cache, pass_, tensors, spec=None):
    layer = add_layer(config, "layer", impl, cache)
    impl.process_weights_after_loading(torch.float32)
    builder = MetadataBuilder(spec or _spec(), ["layer"], config, torch.device("cpu"))
    out = torch.full((tensors[0].shape[0], HEADS, DIM), 7.0)
    impl.forward(layer, *tensors, cache, builder.build(0, pass_.common()), out)
    return out


CASES = {
    "plain": ({}, {}),
    "window": ({"sliding_window": 9}, {"window": 9}),
    "soft cap": ({"logits_soft_cap": 2.0}, {"logit_cap": 2.0}),
    "sinks": ({"sinks": torch.linspace(-1, 2, HEADS)}, {"sinks": torch.linspace(-1, 2, HEADS)}),
    "alibi": ({"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]}, {"slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", ["0.24", "0.24 heads first", "0.33 blocks of layers"])
def test_mixed_pass(config, monkeypatch, layout, case):
    options, scores = CASES[case]
    version = v0_33 if layout.startswith("0.33") else v0_24
    monkeypatch.setattr(mha, "MhaCache", version.MhaCache)
    cache = _cache_33(layers=3) if version is v0_33 else _cache_24(heads_first="heads" in layout)
    pass_, tensors = Pass(MIXED), _tensors(29)
    stored = _fill(pass_, version.MhaCache.views(cache, DIM))
    out = _run(config, _impl(config, **options), cache, pass_, tensors)
    torch.testing.assert_close(out, _expected(pass_, stored, tensors, **scores), atol=1e-5, rtol=1e-4)


def test_padding_rows_stay_untouched(config):
    pass_ = Pass([Request(1, 30), Request(1, 3)])
    cache = _cache_24()
    stored = _fill(pass_, cache.unbind(1))
    tensors = _tensors(5)  # three rows more than tokens
    out = _run(config, _impl(config), cache, pass_, tensors)
    torch.testing.assert_close(out[:2], _expected(pass_, stored, tensors), atol=1e-5, rtol=1e-4)
    assert (out[2:] == 7).all()


def test_fp8_cache_has_scales(config):
    impl = _impl(config, kv_cache_dtype="fp8")
    cache = torch.zeros(BLOCKS, 2, BLOCK, KV_HEADS, DIM, dtype=torch.uint8)
    pass_, tensors = Pass([Request(40, 40), Request(3, 3)]), _tensors(43)
    layer = add_layer(config, "layer", impl, cache)
    layer._k_scale, layer._v_scale = torch.tensor(0.05), torch.tensor(0.02)
    builder = MetadataBuilder(_spec(dtype=torch.uint8), ["layer"], config, torch.device("cpu"))
    out = torch.zeros(43, HEADS, DIM)
    impl.forward(layer, *tensors, cache, builder.build(0, pass_.common()), out)
    q, k, v = tensors
    rounded = [(x / scale).to(torch.float8_e4m3fn).float() * scale for x, scale in ((k, 0.05), (v, 0.02))]
    expected = _expected(pass_, [torch.zeros(2, 0, KV_HEADS, DIM)] * 2, [q, *rounded])
    torch.testing.assert_close(out, expected, atol=2e-3, rtol=2e-3)


def test_layer_that_shares_a_cache_stores_nothing(config):
    cache = _cache_24()
    first = _impl(config)
    second = _impl(config, kv_sharing_target_layer_name="first")
    layers = [add_layer(config, "first", first, cache), add_layer(config, "second", second, cache)]
    builder = MetadataBuilder(_spec(), ["first", "second"], config, torch.device("cpu"))
    pass_, tensors, others = Pass(MIXED), _tensors(29), _tensors(29, seed=5)
    stored = _fill(pass_, cache.unbind(1))
    metadata = builder.build(0, pass_.common())
    plans = counters.plans
    out = torch.zeros(2, 29, HEADS, DIM)
    first.forward(layers[0], *tensors, cache, metadata, out[0])
    written = cache.clone()
    second.forward(layers[1], others[0], *others[1:], cache, metadata, out[1])
    assert counters.plans == plans + 1
    assert torch.equal(cache, written)
    expected = _expected(pass_, stored, [others[0], *tensors[1:]])
    torch.testing.assert_close(out[1], expected, atol=1e-5, rtol=1e-4)


def test_metadata_that_runs_again_is_planned_again(config):
    impl, cache, pass_ = _impl(config), _cache_24(), Pass([Request(1, 30)])
    layer = add_layer(config, "layer", impl, cache)
    builder = MetadataBuilder(_spec(), ["layer"], config, torch.device("cpu"))
    stored = _fill(pass_, cache.unbind(1))
    metadata = builder.build(0, pass_.common())
    out = torch.zeros(1, HEADS, DIM)
    impl.forward(layer, *_tensors(1), cache, metadata, out)
    metadata.seq_lens.fill_(20)  # in place, as drafters do
    metadata.slot_mapping.fill_(pass_.slots[0][19])
    tensors = _tensors(1, seed=8)
    impl.forward(layer, *tensors, cache, metadata, out)
    expected = attention(
        tensors[0],
        torch.cat([stored[0][0][:19], tensors[1]]),
        torch.cat([stored[0][1][:19], tensors[2]]),
        SCALE,
    )
    torch.testing.assert_close(out, expected.float(), atol=1e-5, rtol=1e-4)


def test_block_table_of_another_group(config):
    pass_, other = Pass(MIXED), Pass(MIXED, seed=9)
    tensors, cache = _tensors(29), _cache_24()
    stored = _fill(other, cache.unbind(1))
    impl = _impl(config)
    layer = add_layer(config, "layer", impl, cache)
    builder = MetadataBuilder(_spec(), ["layer"], config, torch.device("cpu"))
    metadata = builder.update_block_table(builder.build(0, pass_.common()), other.table, other.new_slots)
    out = torch.zeros(29, HEADS, DIM)
    impl.forward(layer, *tensors, cache, metadata, out)
    torch.testing.assert_close(out, _expected(other, stored, tensors), atol=1e-5, rtol=1e-4)


def test_encoder_has_no_cache(config):
    pass_, tensors = Pass([Request(9, 9), Request(30, 30)], causal=False), _tensors(39)
    impl = _impl(config, attn_type="encoder_only")
    out = _run(config, impl, torch.tensor([]), pass_, tensors, _spec(EncoderOnlyAttentionSpec))
    nothing = [torch.zeros(2, 0, KV_HEADS, DIM)] * 2
    torch.testing.assert_close(out, _expected(pass_, nothing, tensors, causal=False), atol=1e-5, rtol=1e-4)


def test_new_tokens_see_each_other_without_causality(config):
    pass_, tensors, cache = Pass(MIXED, causal=False), _tensors(29), _cache_24()
    stored = _fill(pass_, cache.unbind(1))
    stores = counters.stores
    out = _run(config, _impl(config), cache, pass_, tensors)
    assert counters.stores == stores + 1
    torch.testing.assert_close(out, _expected(pass_, stored, tensors, causal=False), atol=1e-5, rtol=1e-4)


def test_cross_attention_stores_the_encoder_once(config):
    encoder = Pass([Request(50, 50), Request(8, 8)])  # encoder tokens, all of them new
    impl, cache = _impl(config, attn_type="encoder_decoder"), _cache_24()
    layer = add_layer(config, "layer", impl, cache)
    builder = MetadataBuilder(_spec(CrossAttentionSpec), ["layer"], config, torch.device("cpu"))
    common = encoder.common()
    common.query_start_loc = common.query_start_loc_cpu = torch.tensor([0, 3, 4], dtype=torch.int32)
    common.num_actual_tokens, common.max_query_len = 4, 3
    _, k, v = _tensors(58)
    q = _tensors(4, seed=4)[0]
    out = torch.zeros(2, 4, HEADS, DIM)
    impl.forward(layer, q, k, v, cache, builder.build(0, common), out[0])
    impl.forward(layer, q, None, None, cache, builder.build(0, common), out[1])
    expected = torch.cat(
        [
            attention(q[:3], k[:50], v[:50], SCALE, causal=False),
            attention(q[3:], k[50:], v[50:], SCALE, causal=False),
        ]
    )
    torch.testing.assert_close(out[0], expected.float(), atol=1e-5, rtol=1e-4)
    assert torch.equal(out[0], out[1])


def test_update_alone_stores_what_forward_stores(config):
    pass_, tensors = Pass(MIXED), _tensors(29)
    caches = [_cache_24(), _cache_24()]
    _run(config, _impl(config), caches[0], pass_, tensors)
    impl = _impl(config)
    layer = add_layer(config, "layer", impl, caches[1])
    padded = [torch.cat([x, x[:3]]) for x in tensors[1:]]
    impl.do_kv_cache_update(layer, *padded, caches[1], pass_.new_slots)
    assert torch.equal(*caches)


def test_more_requests_than_the_scheduler_has(config):
    config.scheduler_config.max_num_seqs = 2
    pass_, tensors, cache = Pass(MIXED), _tensors(29), _cache_24()
    stored = _fill(pass_, cache.unbind(1))
    out = _run(config, _impl(config), cache, pass_, tensors)
    torch.testing.assert_close(out, _expected(pass_, stored, tensors), atol=1e-5, rtol=1e-4)


def test_other_caches_after_profiling(config):
    impl, pass_, tensors = _impl(config), Pass(MIXED), _tensors(29)
    small, cache = _cache_24(), _cache_24()
    layer = add_layer(config, "layer", impl, small)
    builder = MetadataBuilder(_spec(), ["layer"], config, torch.device("cpu"))
    out = torch.zeros(29, HEADS, DIM)
    impl.forward(layer, *tensors, small, builder.build(0, pass_.common()), out)
    stored = _fill(pass_, cache.unbind(1))
    layer.kv_cache = cache
    impl.forward(layer, *tensors, cache, builder.build(0, pass_.common()), out)
    torch.testing.assert_close(out, _expected(pass_, stored, tensors), atol=1e-5, rtol=1e-4)


def test_profiling_run_gives_zeros(config):
    q, k, v = _tensors(3)
    out = torch.ones(3, HEADS, DIM)
    impl = _impl(config)
    impl.forward(add_layer(config, "layer", impl, torch.tensor([])), q, k, v, torch.tensor([]), None, out)
    assert (out == 0).all()


def test_what_it_does_not_know_is_named(config):
    with pytest.raises(NotImplementedError, match="chunk_lookback"):
        _impl(config, chunk_lookback=3)
    with pytest.raises(NotImplementedError, match="turboquant_k8v4"):
        _impl(config, kv_cache_dtype="turboquant_k8v4")
    images = Pass(MIXED).common().replace(mm_req_doc_ranges={0: [(1, 4)]})
    builder = MetadataBuilder(_spec(), [], config, torch.device("cpu"))
    with pytest.raises(NotImplementedError, match="mm_req_doc_ranges is given"):
        builder.build(0, images)
    builder.build(0, images.replace(mm_req_doc_ranges={0: []}))
    with pytest.raises(NotImplementedError, match="causal is a tensor"):
        _run(config, _impl(config), _cache_24(), Pass(MIXED, causal=torch.ones(4, dtype=torch.bool)), _tensors(29))


def test_groups_that_profiling_dropped_return_their_workspace(config):
    impl, pass_, tensors, cache = _impl(config), Pass(MIXED), _tensors(29), _cache_24()
    _run(config, impl, cache, pass_, tensors)
    gc.collect()  # drops the builder with its group
    free = layer_group._free_workspaces[(impl._spec, torch.device("cpu"))]
    kept = [workspace.data_ptr() for workspace in free]
    assert kept
    layer = add_layer(config, "layer", impl, cache)
    builder = MetadataBuilder(_spec(), ["layer"], config, torch.device("cpu"))
    impl.forward(layer, *tensors, cache, builder.build(0, pass_.common()), torch.zeros(29, HEADS, DIM))
    assert [workspace.data_ptr() for workspace in free] == kept[:-1]


@pytest.mark.parametrize("mode, expected", [("FULL", ("mixed", 4)), ("FULL_DECODE_ONLY", ("decode", 1))])
def test_captured_passes_serve_every_later_pass(config, mode, expected):
    """A graph of FULL is replayed with any division of its tokens, though it is captured with one for each request."""
    config.compilation_config.cudagraph_mode = CUDAGraphMode[mode]
    builder = MetadataBuilder(_spec(), [], config, torch.device("cpu"))
    metadata = builder.build_for_cudagraph_capture(Pass([Request(1, 1)] * 4).common())
    assert (metadata.mode, metadata.max_query_len) == expected
    assert metadata.host_q_lens is None


@pytest.mark.parametrize("count", [1, 2])
def test_threads_are_as_many_as_torch_has(monkeypatch, count):
    # vLLM replaces torch.set_num_threads() by a function that does nothing.
    monkeypatch.setattr(torch, "get_num_threads", lambda: count)
    assert layer_group._threads("cpu").size == count


@pytest.mark.parametrize("caching, promised", [(False, True), (True, False)])
def test_earlier_keys_are_promised_where_no_block_is_shared(config, caching, promised):
    """With a prefix cache a request may read a block that another one fills in the same pass."""
    config.cache_config.enable_prefix_caching = caching
    add_layer(config, "layer", _impl(config), _cache_24())
    builder = MetadataBuilder(_spec(), ["layer"], config, torch.device("cpu"))
    pass_ = Pass([Request(1, 40), Request(1, 7)])
    assert builder.build(0, pass_.common()).prefix_written == promised
    pass_.causal = False
    assert not builder.build(0, pass_.common()).prefix_written
