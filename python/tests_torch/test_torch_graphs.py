# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs: replays with other contents give the bits of eager passes; a capture never grows a limit."""

import random

import fovea
import pytest
import torch
from fovea.torch import BackendCache, BackendOps, default_cache, paged_attention, write_kv

pytestmark = pytest.mark.gpu

BUCKET = 32
PAGE = 16
MAX_LEN = 1024
PAGES = BUCKET * MAX_LEN // PAGE
Q_HEADS, KV_HEADS, DIM = 32, 8, 128


class Pass:
    """The static arrays of a decode pass and one layer of it, by the functional ops or by those of a backend."""

    def __init__(self):
        half = {"device": "cuda", "dtype": torch.bfloat16}
        whole = {"device": "cuda", "dtype": torch.int32}
        self.k_cache, self.v_cache = (torch.randn(PAGES, PAGE, KV_HEADS, DIM, **half) for _ in range(2))
        self.q = torch.randn(BUCKET, Q_HEADS, DIM, **half)
        self.k, self.v = torch.randn(2, BUCKET, KV_HEADS, DIM, **half).unbind()
        self.table = torch.zeros(BUCKET, MAX_LEN // PAGE, **whole)
        self.lens = torch.zeros(BUCKET, **whole)
        self.slots = torch.full((BUCKET,), -1, device="cuda", dtype=torch.int64)
        self.numbers = torch.arange(BUCKET + 1, **whole)
        spec = fovea.AttentionSpec(q_heads=Q_HEADS, kv_heads=KV_HEADS, head_dim=DIM, q_dtype="bf16")
        cache = fovea.KvCacheSpec(kv_heads=KV_HEADS, head_dim=DIM, page_size=PAGE, dtype="bf16")
        limits = fovea.BatchLimits(max_requests=BUCKET, max_tokens=BUCKET, max_q_len=1, max_kv_len=MAX_LEN)
        self.backend = BackendCache().backend_for(
            spec, cache, [(self.k_cache, self.v_cache)], limits, own_workspace=True
        )
        self.ops = BackendOps(self.backend)

    def fill(self, generator):
        """Fills the arrays with random requests, at most BUCKET of them. Returns their number."""
        requests = generator.randint(1, BUCKET)
        pages = torch.randperm(PAGES)
        table = pages[: BUCKET * MAX_LEN // PAGE].view(BUCKET, -1).to(torch.int32)
        lens = torch.tensor([generator.randint(1, MAX_LEN) for _ in range(requests)] + [0] * (BUCKET - requests))
        last = (lens - 1).clamp(min=0)
        slots = table[torch.arange(BUCKET), last // PAGE].long() * PAGE + last % PAGE
        slots[requests:] = -1
        self.table.copy_(table)
        self.lens.copy_(lens)
        self.slots.copy_(slots)
        self.q.normal_()
        self.k.normal_()
        self.v.normal_()
        return requests

    def functional(self):
        write_kv(self.k, self.v, self.k_cache, self.v_cache, self.slots)
        out, lse = paged_attention(
            self.q, self.k_cache, self.v_cache, self.table, self.lens, max_kv_len=MAX_LEN, needs_lse=True
        )
        return torch.cat([out.flatten(1).float(), lse], 1)

    def plan(self):
        self.ops.plan(
            "decode",
            self.numbers,
            self.lens,
            tokens=BUCKET,
            request_rows=self.numbers[:BUCKET],
            table=self.table,
            entry_tokens=PAGE,
            out_slots=self.slots,
            max_q_len=1,
            max_kv_len=MAX_LEN,
        )

    def by_backend(self):
        self.plan()
        out = torch.empty_like(self.q)
        self.ops.forward(0, self.q, self.k, self.v, out=out)
        return out


def capture(function):
    """Warms up on a side stream, as torch's documentation does, and captures on that of torch.cuda.graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function()
    return graph, out


@pytest.mark.parametrize("name", ["functional", "by_backend"])
def test_1000_replays_equal_eager_passes(name):
    torch.manual_seed(1)
    generator = random.Random(1)
    passes = Pass()
    function = getattr(passes, name)
    passes.fill(generator)
    graph, captured = capture(function)
    for replay in range(1000):
        requests = passes.fill(generator)
        eager = function()[:requests].clone()
        captured.zero_()
        graph.replay()
        assert torch.equal(captured[:requests], eager), f"replay {replay} of {requests} requests differs"
        assert torch.isfinite(eager).all()


def test_compiled_passes_run_in_graphs():
    torch.manual_seed(2)
    generator = random.Random(2)
    passes = Pass()
    passes.fill(generator)
    graph, captured = capture(torch.compile(passes.functional, fullgraph=True))
    for _ in range(6):
        requests = passes.fill(generator)
        graph.replay()
        assert torch.equal(captured[:requests], passes.functional()[:requests])


def test_a_capture_cannot_grow_limits():
    passes = Pass()
    passes.fill(random.Random(3))
    arguments = (passes.q, passes.k_cache, passes.v_cache, passes.table, passes.lens)

    def attend(longest):
        return paged_attention(*arguments, max_kv_len=longest)[0]

    default_cache.clear()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(fovea.Error, match="run the pass once before"), torch.cuda.graph(graph):
        attend(256)
    attend(256)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(fovea.Error, match=r"limits\.max_kv_len is 1024, 256 is reserved"), torch.cuda.graph(graph):
        attend(1024)
    passes.lens.clamp_(max=256)
    graph, captured = capture(lambda: attend(256))
    graph.replay()
    expected = captured.clone()
    attend(1024)  # a longer eager pass moves to another backend and leaves that of the graph as it is
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, expected)


def test_streams_have_backends_of_their_own():
    passes = Pass()
    passes.fill(random.Random(4))
    expected = passes.functional().clone()
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    results = [[] for _ in streams]
    for _ in range(20):
        for stream, result in zip(streams, results, strict=True):
            with torch.cuda.stream(stream):
                result.append(
                    paged_attention(
                        passes.q, passes.k_cache, passes.v_cache, passes.table, passes.lens, max_kv_len=MAX_LEN
                    )[0]
                )
    torch.cuda.synchronize()
    for result in results:
        for out in result:
            assert torch.equal(out.flatten(1).float()[passes.lens > 0], expected[:, : Q_HEADS * DIM][passes.lens > 0])
