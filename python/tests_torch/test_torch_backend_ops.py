# SPDX-License-Identifier: Apache-2.0
"""plan() and forward() as ops: the results of the backend itself, in eager and compiled models."""

import gc

import fovea
import pytest
import torch
from fovea.torch import BackendCache, BackendOps
from torch_reference import paged_requests, tolerance

LIMITS = fovea.BatchLimits(max_requests=4, max_tokens=16, max_q_len=8, max_kv_len=64)


class Model(torch.nn.Module):
    """Two layers over one cache. Every layer stores k and v; the second reads its own cache of the same pages."""

    def __init__(self, backend):
        super().__init__()
        self.attention = BackendOps(backend)

    def forward(self, q, k, v, q_indptr, kv_lens, rows, table, slots):
        tokens = q.shape[0]
        self.attention.plan(
            "extend",
            q_indptr,
            kv_lens,
            tokens=tokens,
            request_rows=rows,
            table=table,
            entry_tokens=16,
            out_slots=slots,
            max_q_len=8,
            max_kv_len=48,
        )
        for layer in range(2):
            out = torch.empty_like(q)
            self.attention.forward(layer, q, k, v, out=out)
            q = q + out
        return q


def new_model(device="cpu", dtype=torch.float32):
    """Returns a model and the caches of its two layers, which it does not keep."""
    name = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    spec = fovea.AttentionSpec(q_heads=4, kv_heads=2, head_dim=64, q_dtype=name)
    cache = fovea.KvCacheSpec(layers=2, kv_heads=2, head_dim=64, page_size=16, dtype=name)
    layers = [tuple(torch.zeros(2, 8, 16, 2, 64, dtype=dtype, device=device).unbind()) for _ in range(2)]
    return Model(BackendCache().backend_for(spec, cache, layers, LIMITS, own_workspace=True)), layers


def new_batch(q_lens, kv_lens, device="cpu", dtype=torch.float32):
    requests = paged_requests(q_lens, kv_lens, dtype=dtype, device=device)
    k = torch.cat([keys[-n:] for keys, n in zip(requests.keys, q_lens, strict=True)]).to(device, dtype)
    v = torch.cat([values[-n:] for values, n in zip(requests.values, q_lens, strict=True)]).to(device, dtype)
    slots = torch.cat([own[-n:] for own, n in zip(requests.slots, q_lens, strict=True)]).to(device)
    table = torch.nn.functional.pad(requests.page_table, (0, 3 - requests.page_table.shape[1]), value=-1)
    rows = torch.arange(len(q_lens), dtype=torch.int32, device=device)
    return requests.q, k, v, requests.q_indptr, requests.device_lens, rows, table, slots


def test_new_tokens_attend_to_themselves():
    """With every token new, one layer is causal attention over the batch's own k and v."""
    model, layers = new_model()
    q, k, v, *rest = new_batch([8, 5], [8, 5])
    out = torch.empty_like(q)
    q_indptr, kv_lens, rows, table, slots = rest
    model.attention.plan(
        "extend", q_indptr, kv_lens, tokens=13, request_rows=rows, table=table, entry_tokens=16, out_slots=slots,
        max_q_len=8, max_kv_len=48,
    )  # fmt: skip
    model.attention.forward(0, q, k, v, out=out)
    requests = paged_requests([8, 5], [8, 5])
    torch.testing.assert_close(out.double(), requests.expected()[0], atol=2e-5, rtol=2e-5)
    assert torch.equal(layers[0][0].view(-1, 2, 64)[slots], k)


def test_rarer_arguments():
    sinks, slopes = torch.tensor([0.5, -1.0, 2.0, 0.0]), torch.tensor([0.5, 0.25, 0.125, 0.0625])
    requests = paged_requests([2, 3], [20, 33])
    spec = fovea.AttentionSpec(
        q_heads=4, kv_heads=2, head_dim=64, needs_lse=True, scores=fovea.ScoreSpec(has_sinks=True, has_alibi=True)
    )
    cache = fovea.KvCacheSpec(kv_heads=2, head_dim=64, page_size=16)
    layers = [(requests.k_cache, requests.v_cache)]
    attention = BackendOps(BackendCache().backend_for(spec, cache, layers, LIMITS, own_workspace=True))
    attention.plan(
        "extend", requests.q_indptr, requests.device_lens, tokens=5, request_rows=torch.arange(2, dtype=torch.int32),
        table=requests.page_table, entry_tokens=16, max_q_len=3, max_kv_len=48,
    )  # fmt: skip
    out, lse = torch.empty_like(requests.q), torch.empty(5, 4)
    attention.forward(0, requests.q, out=out, lse=lse, save_kv=False, sinks=sinks, alibi_slopes=slopes)
    expected, expected_lse = requests.expected(sinks=sinks, alibi_slopes=slopes)
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(lse.double(), expected_lse, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_models_equal_eager_ones(backend):
    torch.compiler.reset()
    for q_lens, kv_lens in (([1, 1], [9, 30]), ([3, 8], [20, 30])):
        batch = new_batch(q_lens, kv_lens)
        eager, eager_layers = new_model()
        compiled, compiled_layers = new_model()
        expected = eager(*batch)
        result = torch.compile(compiled, fullgraph=True, backend=backend)(*batch)
        assert torch.equal(result, expected)
        for first, second in zip(eager_layers, compiled_layers, strict=True):
            assert torch.equal(first[0], second[0])
            assert first[0].any()


def ops_of(model, batch):
    q, k, v, q_indptr, kv_lens, rows, table, slots = batch
    attention = model.attention
    yield (
        torch.ops.fovea.plan.default,
        (attention.state, attention.number, "extend", q.shape[0], q_indptr, kv_lens, rows, table, 16, slots, None,
         None, None, None, 1, None, 8, 48, False),
    )  # fmt: skip
    yield torch.ops.fovea.forward.default, (attention.state, attention.number, 0, q, k, v, torch.zeros_like(q))
    yield (
        torch.ops.fovea.forward_options.default,
        (attention.state, attention.number, 1, q, k, v, torch.zeros_like(q), None, True, None, None, None),
    )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_opcheck(device):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model, layers = new_model(device, dtype)
    for op, arguments in ops_of(model, new_batch([3, 8], [20, 30], device, dtype)):
        torch.library.opcheck(op, arguments)
    assert layers[0][0].any()


def mla_backend(device="cpu", dtype="fp32"):
    spec = fovea.AttentionSpec(
        kind="mla",
        q_heads=4,
        kv_heads=1,
        q_dtype=dtype,
        scores=fovea.ScoreSpec(softmax_scale=0.1),
        mla=fovea.MlaSpec(kv_lora_rank=512, rope_dim=64),
    )
    cache = fovea.KvCacheSpec(layout="mla", kv_heads=1, head_dim=576, head_dim_v=512, page_size=16, dtype=dtype)
    rows = torch.zeros(8, 16, 576, dtype=torch.float32 if dtype == "fp32" else torch.bfloat16, device=device)
    return BackendCache().backend_for(spec, cache, [(rows,)], LIMITS, own_workspace=True), rows


def test_mla_layers_attend_over_latents():
    backend, rows = mla_backend()
    attention = BackendOps(backend)
    tokens = 6
    q, latent, k_rope = torch.randn(tokens, 4, 576), torch.randn(tokens, 1, 512), torch.randn(tokens, 1, 64)
    out = torch.empty(tokens, 4, 512)
    attention.plan(
        "extend",
        torch.tensor([0, tokens], dtype=torch.int32),
        torch.tensor([tokens], dtype=torch.int32),
        tokens=tokens,
        request_rows=torch.zeros(1, dtype=torch.int32),
        table=torch.tensor([[3]], dtype=torch.int32),
        entry_tokens=16,
        out_slots=torch.arange(48, 48 + tokens),
        max_q_len=8,
        max_kv_len=16,
    )
    attention.forward_mla(0, q, latent, k_rope, out=out)
    keys = torch.cat([latent, k_rope], -1)
    scores = torch.einsum("thd,sd->hts", q.double(), keys[:, 0].double()) * 0.1
    scores = scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -torch.inf)
    expected = torch.einsum("hts,sd->thd", scores.softmax(-1), latent[:, 0].double())
    torch.testing.assert_close(out.double(), expected, atol=tolerance(torch.float32), rtol=1e-4)
    assert torch.equal(rows[3, :tokens], keys[:, 0])
    arguments = (
        attention.state, attention.number, 0, q, latent, k_rope, out, None, None, None, None, True
    )  # fmt: skip
    torch.library.opcheck(torch.ops.fovea.forward_mla.default, arguments)


def test_ops_of_a_dropped_backend_are_errors():
    model, _ = new_model()
    batch = new_batch([1, 1], [9, 30])
    (op, arguments), *_ = ops_of(model, batch)
    del model
    gc.collect()
    with pytest.raises(ValueError, match="its BackendOps no longer exists"):
        op(*arguments)


def test_gradients_are_refused():
    model, _ = new_model()
    q, *rest = new_batch([1, 1], [9, 30])
    with pytest.raises(NotImplementedError, match="no backward pass"):
        model(q.requires_grad_(), *rest)
