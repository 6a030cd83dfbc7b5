# SPDX-License-Identifier: Apache-2.0
"""Layers, pools and batches of SGLang, attended by Fovea and by a reference in fp64."""

import math
from types import SimpleNamespace

import pytest
import torch
from checkpoints import model_folder
from engines import scheduler
from fovea.sglang import specs, trees
from layers import DIM, HEADS, KV_HEADS, Pass, Request, mha_pool, mla_pool, window_pool
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from attention import attention

MIXED = [Request(1, 70), Request(33, 33), Request(5, 40), Request(1, 1)]
DECODE = [Request(1, 70), Request(1, 33), Request(1, 1)]
VERIFY = [Request(4, 70), Request(4, 19), Request(4, 5)]
PROMPTS = [Request(20, 20), Request(7, 7)]
SCALE = 0.2


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    folder = model_folder("llama", tmp_path_factory.mktemp("models"))
    with scheduler(folder, fovea=True, dtype="float32", context_length=160, max_total_tokens=256) as engine:
        yield engine.tp_worker.model_runner


def _layer(**options) -> RadixAttention:
    return RadixAttention(HEADS, DIM, SCALE, KV_HEADS, options.pop("layer_id", 0), **options)


def _tokens(pass_, heads, dim, seed=5):
    """Returns queries of the new tokens, and keys and values of all tokens of each request."""
    chance = torch.Generator().manual_seed(seed)
    q = torch.randn(pass_.tokens, HEADS, DIM, generator=chance)
    keys = [torch.randn(request.kv_len, heads, dim, generator=chance) for request in pass_.requests]
    values = [torch.randn(request.kv_len, heads, dim, generator=chance) for request in pass_.requests]
    return q, keys, values


def _fill(pass_, write, rows):
    """Writes the rows of the tokens before the new ones, and returns those of the new ones."""
    new = []
    for request, slots, own in zip(pass_.requests, pass_.slots, rows, strict=True):
        old = request.kv_len - request.new_tokens
        write(torch.tensor(slots[:old], dtype=torch.int64), own[:old])
        new.append(own[old:])
    return torch.cat(new)


def _expected(pass_, q, keys, values, **scores):
    outputs, first = [], 0
    for request, k, v in zip(pass_.requests, keys, values, strict=True):
        outputs.append(attention(q[first : first + request.new_tokens], k, v, SCALE, **scores).flatten(1))
        first += request.new_tokens
    return torch.cat(outputs).float()


CASES = {
    "mixed": (ForwardMode.EXTEND, MIXED, {}),
    "mixed chunk": (ForwardMode.MIXED, MIXED, {}),
    "decode": (ForwardMode.DECODE, DECODE, {}),
    "verify": (ForwardMode.TARGET_VERIFY, VERIFY, {}),
    "draft extend": (ForwardMode.DRAFT_EXTEND_V2, VERIFY, {}),
    "window": (ForwardMode.EXTEND, MIXED, {"sliding_window_size": 15}),
    "soft cap": (ForwardMode.EXTEND, MIXED, {"logit_cap": 5.0}),
}


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("case", CASES)
def test_modes_and_scores(runner, case, page_size):
    mode, requests, options = CASES[case]
    pass_, pool, layer = Pass(runner, requests, page_size), mha_pool(torch.float32, page_size), _layer(**options)
    q, keys, values = _tokens(pass_, KV_HEADS, DIM)
    k = _fill(pass_, pool.k_buffer[0].__setitem__, keys)
    v = _fill(pass_, pool.v_buffer[0].__setitem__, values)
    batch = pass_.forward_batch(mode, spec_info=SimpleNamespace(draft_token_num=4))
    backend = pass_.backend(pool, layer)
    backend.init_forward_metadata(batch)
    out = backend.forward(q.flatten(1), k, v, layer, batch)
    scores = {"window": specs.window(layer), "logit_cap": options.get("logit_cap")}
    torch.testing.assert_close(out, _expected(pass_, q, keys, values, **scores), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(pool.k_buffer[0][pass_.new_slots], k)


def test_sinks(runner):
    pass_, pool, layer = Pass(runner, MIXED, 1), mha_pool(torch.float32, 1), _layer()
    q, keys, values = _tokens(pass_, KV_HEADS, DIM)
    k = _fill(pass_, pool.k_buffer[0].__setitem__, keys)
    v = _fill(pass_, pool.v_buffer[0].__setitem__, values)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.bfloat16)
    batch, backend = pass_.forward_batch(ForwardMode.EXTEND), pass_.backend(pool, layer)
    backend.init_forward_metadata(batch)
    out = backend.forward(q, k, v, layer, batch, sinks=sinks)
    torch.testing.assert_close(out, _expected(pass_, q, keys, values, sinks=sinks), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mode, requests", [(ForwardMode.EXTEND, MIXED), (ForwardMode.DECODE, DECODE)])
@pytest.mark.parametrize("page_size", [1, 8])
def test_pools_of_windows(runner, page_size, mode, requests):
    pass_, pool = Pass(runner, requests, page_size), window_pool(page_size)
    full, window = _layer(), _layer(layer_id=1, sliding_window_size=11)
    q, keys, values = _tokens(pass_, KV_HEADS, DIM)
    batch, backend = pass_.forward_batch(mode), pass_.backend(pool, full, window)
    backend.init_forward_metadata(batch)
    for layer in (full, window):
        inner = pool.swa_kv_pool if layer is window else pool.full_kv_pool
        place = pool.translate_loc_from_full_to_swa if layer is window else torch.clone

        def write(buffer, slots, rows, place=place):
            buffer[place(slots)] = rows

        k = _fill(pass_, lambda slots, rows, inner=inner: write(inner.k_buffer[0], slots, rows), keys)
        v = _fill(pass_, lambda slots, rows, inner=inner: write(inner.v_buffer[0], slots, rows), values)
        out = backend.forward(q, k, v, layer, batch)
        expected = _expected(pass_, q, keys, values, window=specs.window(layer))
        torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(inner.k_buffer[0][place(pass_.new_slots)], k)


def test_padding_in_pools_of_windows(runner):
    """A batch in a graph is filled up with requests of row 0 and slot 0."""
    pass_, pool, window = Pass(runner, DECODE, 1), window_pool(1), _layer(layer_id=1, sliding_window_size=11)
    q, keys, values = _tokens(pass_, KV_HEADS, DIM)
    place = pool.translate_loc_from_full_to_swa
    k = _fill(pass_, lambda slots, rows: pool.swa_kv_pool.k_buffer[0].__setitem__(place(slots), rows), keys)
    v = _fill(pass_, lambda slots, rows: pool.swa_kv_pool.v_buffer[0].__setitem__(place(slots), rows), values)
    batch, backend = pass_.forward_batch(ForwardMode.DECODE), pass_.backend(pool, window)
    batch.batch_size += 2
    fills = {"input_ids": 0, "req_pool_indices": 0, "seq_lens": 1, "seq_lens_cpu": 1, "out_cache_loc": 0}
    for name, value in fills.items():
        setattr(batch, name, torch.nn.functional.pad(getattr(batch, name), (0, 2), value=value))
    backend.init_forward_metadata(batch)
    padded = [torch.cat([tensor, torch.ones(2, *tensor.shape[1:])]) for tensor in (q, k, v)]
    out = backend.forward(*padded, window, batch)[: len(DECODE)]
    expected = _expected(pass_, q, keys, values, window=specs.window(window))
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)


def test_fp8_caches_have_the_scales_of_their_layers(runner):
    pass_, pool, layer = Pass(runner, MIXED, 16), mha_pool(torch.float8_e4m3fn, 16), _layer(layer_id=1)
    layer.k_scale, layer.v_scale = torch.tensor(0.02), torch.tensor(0.05)
    q, keys, values = _tokens(pass_, KV_HEADS, DIM)
    rounded = []
    for buffer, rows, scale in ((pool.k_buffer[1], keys, 0.02), (pool.v_buffer[1], values, 0.05)):
        stored = [(own / scale).to(torch.float8_e4m3fn) for own in rows]
        _fill(pass_, lambda slots, own, buffer=buffer: buffer.__setitem__(slots, own.view(torch.uint8)), stored)
        rounded.append([own.float() * scale for own in stored])
    k = _fill(pass_, lambda slots, own: None, keys)
    v = _fill(pass_, lambda slots, own: None, values)
    batch, backend = pass_.forward_batch(ForwardMode.EXTEND), pass_.backend(pool, layer)
    backend.init_forward_metadata(batch)
    out = backend.forward(q, k, v, layer, batch)
    torch.testing.assert_close(out, _expected(pass_, q, *rounded), atol=2e-3, rtol=1e-3)


RANK, ROPE = 64, 16


@pytest.mark.parametrize("parts", ["joined", "apart"])
@pytest.mark.parametrize("mode, requests", [(ForwardMode.EXTEND, MIXED), (ForwardMode.TARGET_VERIFY, VERIFY)])
def test_mla(runner, mode, requests, parts):
    pass_, pool = Pass(runner, requests, 16), mla_pool(torch.float32, 16, RANK, ROPE)
    layer = RadixAttention(HEADS, RANK + ROPE, SCALE, 1, 0, v_head_dim=RANK)
    chance = torch.Generator().manual_seed(6)
    rows = [torch.randn(request.kv_len, 1, RANK + ROPE, generator=chance) for request in requests]
    q = torch.randn(pass_.tokens, HEADS, RANK + ROPE, generator=chance)
    new = _fill(pass_, pool.kv_buffer[0].__setitem__, rows)
    batch = pass_.forward_batch(mode, spec_info=SimpleNamespace(draft_token_num=4))
    backend = pass_.backend(pool, layer)
    backend.init_forward_metadata(batch)
    if parts == "joined":
        out = backend.forward(q.flatten(1), new, new[..., :RANK], layer, batch)
    else:
        latent = new[..., :RANK]
        further = {"q_rope": q[..., RANK:].contiguous(), "k_rope": new[..., RANK:]}
        out = backend.forward(q[..., :RANK].contiguous(), latent, latent, layer, batch, **further)
    expected = _expected(pass_, q, rows, [own[..., :RANK] for own in rows])
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(pool.kv_buffer[0][pass_.new_slots], new)


def test_mla_prompts_come_with_plain_heads(runner):
    """The model up-projects keys of prompts and stores the latents itself."""
    pass_, pool = Pass(runner, PROMPTS, 16), mla_pool(torch.float32, 16, RANK, ROPE)
    absorbed = RadixAttention(HEADS, RANK + ROPE, SCALE, 1, 0, v_head_dim=RANK)
    layer = RadixAttention(HEADS, DIM, SCALE, HEADS, 0, v_head_dim=16)
    q, keys, values = _tokens(pass_, HEADS, DIM)
    values = [own[..., :16] for own in values]
    batch, backend = pass_.forward_batch(ForwardMode.EXTEND), pass_.backend(pool, absorbed, layer)
    backend.init_forward_metadata(batch)
    out = backend.forward(q, torch.cat(keys), torch.cat(values), layer, batch, save_kv_cache=False)
    torch.testing.assert_close(out, _expected(pass_, q, keys, values), atol=1e-4, rtol=1e-4)
    assert pool.kv_buffer[0].abs().sum() == 0


def test_draft_steps_see_the_tokens_proposed_before(runner):
    pass_, pool, layer = Pass(runner, DECODE, 1), mha_pool(torch.float32, 1), _layer()
    q, keys, values = _tokens(pass_, KV_HEADS, DIM)
    k = _fill(pass_, pool.k_buffer[0].__setitem__, keys)
    v = _fill(pass_, pool.v_buffer[0].__setitem__, values)
    batch, backend = pass_.forward_batch(ForwardMode.DECODE), pass_.backend(pool, layer, draft_step=0)
    batch.seq_lens = batch.seq_lens - 1
    batch.seq_lens_cpu = batch.seq_lens_cpu - 1
    backend.init_forward_metadata(batch)
    out = backend.forward(q, k, v, layer, batch)
    torch.testing.assert_close(out, _expected(pass_, q, keys, values), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layout", ["all keys", "drafts only"])
def test_masks_of_trees(layout):
    """Draft 2 is a sibling of draft 1, draft 3 follows draft 1."""
    visible = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=torch.bool)
    seq_lens = torch.tensor([5, 9])
    if layout == "drafts only":
        mask = torch.cat([visible.flatten()] * 2)
    else:
        wide = [torch.cat([torch.ones(4, int(n), dtype=torch.bool), visible], dim=1).flatten() for n in seq_lens]
        mask = torch.cat(wide)
    ancestors = torch.zeros(10, dtype=torch.int64)
    trees.read(SimpleNamespace(draft_token_num=4, custom_mask=mask), seq_lens, ancestors)
    assert ancestors.tolist() == [1, 3, 5, 11, 1, 3, 5, 11, 0, 0]


def test_trees_are_verified(runner, monkeypatch):
    monkeypatch.setattr("fovea.sglang.backend.trees.drafts_are_trees", lambda: True)
    spec = SimpleNamespace(speculative_num_draft_tokens=4, speculative_algorithm="EAGLE", speculative_eagle_topk=2)
    monkeypatch.setattr("fovea.sglang.backend.get_spec", lambda: spec)
    visible = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=torch.bool)
    pass_, pool, layer = Pass(runner, VERIFY, 1), mha_pool(torch.float32, 1), _layer()
    q, keys, values = _tokens(pass_, KV_HEADS, DIM)
    k = _fill(pass_, pool.k_buffer[0].__setitem__, keys)
    v = _fill(pass_, pool.v_buffer[0].__setitem__, values)
    info = SimpleNamespace(draft_token_num=4, custom_mask=torch.cat([visible.flatten()] * len(VERIFY)))
    batch, backend = pass_.forward_batch(ForwardMode.TARGET_VERIFY, spec_info=info), pass_.backend(pool, layer)
    backend.init_forward_metadata(batch)
    out = backend.forward(q, k, v, layer, batch).view(-1, HEADS, DIM)
    for request, (own_k, own_v) in enumerate(zip(keys, values, strict=True)):
        old = own_k.shape[0] - 4
        for draft in range(4):
            seen = torch.cat([torch.arange(old), old + visible[draft].nonzero().flatten()])
            row = request * 4 + draft
            expected = attention(q[row : row + 1], own_k[seen], own_v[seen], SCALE).float()
            torch.testing.assert_close(out[row : row + 1], expected, atol=1e-4, rtol=1e-4)


def test_a_captured_pass_reads_the_lengths_of_each_run(runner):
    """The runner changes the tensors of a captured batch in place, and calls the pair of functions around the graph."""
    pass_, pool, layer = Pass(runner, DECODE, 1), mha_pool(torch.float32, 1), _layer()
    q, keys, values = _tokens(pass_, KV_HEADS, DIM)
    k = _fill(pass_, pool.k_buffer[0].__setitem__, keys)
    v = _fill(pass_, pool.v_buffer[0].__setitem__, values)
    batch, backend = pass_.forward_batch(ForwardMode.DECODE), pass_.backend(pool, layer)
    backend.init_cuda_graph_state(len(DECODE), len(DECODE))
    lens = batch.seq_lens.clone()
    batch.seq_lens.fill_(backend.get_cuda_graph_seq_len_fill_value())
    batch.seq_lens_cpu.fill_(1)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    backend.init_forward_metadata_in_graph(batch)
    backend.forward(q, k, v, layer, batch)
    batch.seq_lens.copy_(lens)
    backend.init_forward_metadata_in_graph(batch)
    out = backend.forward(q, k, v, layer, batch)
    torch.testing.assert_close(out, _expected(pass_, q, keys, values), atol=1e-4, rtol=1e-4)
    assert backend.forward_metadata._lengths.max_kv_len == pass_.table.req_to_token.shape[1]
    assert backend.forward_metadata._lengths.host_kv_lens is None


def test_limits_grow_with_a_pass(runner):
    many = [Request(1, 3)] * 7
    pass_, pool, layer = Pass(runner, many, 1), mha_pool(torch.float32, 1), _layer()
    backend = pass_.backend(pool, layer)
    backend._limits = backend._limits.replace(max_requests=2, max_tokens=2)
    q, keys, values = _tokens(pass_, KV_HEADS, DIM)
    k = _fill(pass_, pool.k_buffer[0].__setitem__, keys)
    v = _fill(pass_, pool.v_buffer[0].__setitem__, values)
    batch = pass_.forward_batch(ForwardMode.DECODE)
    backend.init_forward_metadata(batch)
    out = backend.forward(q, k, v, layer, batch)
    torch.testing.assert_close(out, _expected(pass_, q, keys, values), atol=1e-4, rtol=1e-4)
    assert backend._limits.max_requests == 1 << math.ceil(math.log2(len(many)))


def test_idle_passes_need_nothing(runner):
    pass_, pool, layer = Pass(runner, [], 1), mha_pool(torch.float32, 1), _layer()
    batch, backend = pass_.forward_batch(ForwardMode.IDLE), pass_.backend(pool, layer)
    backend.init_forward_metadata(batch)
    assert backend.forward(torch.zeros(0, HEADS * DIM), None, None, layer, batch).shape == (0, HEADS * DIM)
