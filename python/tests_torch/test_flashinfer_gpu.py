# SPDX-License-Identifier: Apache-2.0
"""fovea.compat.flashinfer on a GPU: plan() waits for nothing, and one CUDA graph holds plan() and run()."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import fovea
import fovea.compat.flashinfer as flashinfer
import pytest
import torch
from flashinfer_oracle import Paged, Scores, attend, check, offsets

pytestmark = pytest.mark.gpu

DTYPE = torch.bfloat16
HEADS, KV_HEADS, DIM, PAGE = 8, 2, 128, 16


@contextmanager
def no_waits() -> Iterator[None]:
    """Makes torch raise an error where it would wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Device:
    """A batch whose arrays stay at their addresses on the GPU, so that a graph can be replayed with other contents."""

    def __init__(self, kv_lens: list[int], q_lens: list[int]) -> None:
        self.workspace = torch.empty(1, dtype=torch.uint8, device="cuda")
        self.pages = torch.zeros(64, dtype=torch.int32, device="cuda")
        self.indptr = torch.zeros(len(kv_lens) + 1, dtype=torch.int32, device="cuda")
        self.last = torch.zeros(len(kv_lens), dtype=torch.int32, device="cuda")
        self.q_indptr = offsets(q_lens).cuda()
        self.cache = torch.zeros(64, 2, PAGE, KV_HEADS, DIM, dtype=DTYPE, device="cuda")
        self.q = torch.randn(sum(q_lens), HEADS, DIM, dtype=DTYPE, device="cuda")
        self.q_lens = q_lens
        self.fill(kv_lens, 0)

    def fill(self, kv_lens: list[int], seed: int) -> None:
        """Writes another cache and other lengths."""
        self.paged = Paged(kv_lens, PAGE, KV_HEADS, DIM, DTYPE, seed=seed)
        self.indptr.copy_(self.paged.indptr)
        self.pages[: self.paged.indices.numel()].copy_(self.paged.indices)
        self.last.copy_(self.paged.last_page_len)
        self.cache[: self.paged.cache.shape[0]].copy_(self.paged.cache)

    def check(self, out: torch.Tensor, lse: torch.Tensor, scores: Scores) -> None:
        rows = self.q.cpu().split(self.q_lens)
        parts = [attend(each, *self.paged.keys(i), scores) for i, each in enumerate(rows)]
        check(out.cpu(), torch.cat([each for each, _ in parts]), DTYPE)
        check(lse.cpu(), torch.cat([each for _, each in parts]), torch.float16)

    def decode(self, wrapper: Any) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (HEADS, KV_HEADS, DIM, PAGE)
        wrapper.plan(self.indptr, self.pages, self.last, *shape, q_data_type=DTYPE, max_kv_len=512)
        return wrapper.run(self.q, self.cache, return_lse=True)

    def prefill(self, wrapper: Any, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
        lists, shape = (self.indptr, self.pages, self.last), (HEADS, KV_HEADS, DIM, PAGE)
        wrapper.plan(self.q_indptr, *lists, *shape, causal=causal, q_data_type=DTYPE, max_sequence_kv=512)
        return wrapper.run(self.q, self.cache, return_lse=True)


def run_decode(batch: Device) -> tuple[torch.Tensor, torch.Tensor]:
    return batch.decode(flashinfer.BatchDecodeWithPagedKVCacheWrapper(batch.workspace))


def run_causal(batch: Device) -> tuple[torch.Tensor, torch.Tensor]:
    return batch.prefill(flashinfer.BatchPrefillWithPagedKVCacheWrapper(batch.workspace), True)


def run_all_keys(batch: Device) -> tuple[torch.Tensor, torch.Tensor]:
    return batch.prefill(flashinfer.BatchPrefillWithPagedKVCacheWrapper(batch.workspace), False)


RUNS: dict[str, tuple[list[int], Callable[[Device], Any], Scores]] = {
    "decode": ([1, 1, 1], run_decode, Scores()),
    "causal prefill": ([5, 1, 40], run_causal, Scores()),
    "prefill of all keys": ([5, 1, 40], run_all_keys, Scores(causal=False)),
}


@pytest.mark.parametrize("case", RUNS.values(), ids=RUNS.keys())
def test_plan_does_not_wait(case: tuple[list[int], Callable[[Device], Any], Scores]) -> None:
    q_lens, run, scores = case
    batch = Device([100, 33, 200], q_lens)
    run(batch)
    with no_waits():
        out, lse = run(batch)
    batch.check(out, lse, scores)


@pytest.mark.parametrize("option", [{"disable_split_kv": True}, {"fixed_split_size": 2048}], ids=str)
def test_rows_do_not_depend_on_the_batch(option: dict[str, Any]) -> None:
    batch = Device([100, 33, 200], [1, 1, 1])
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(batch.workspace)
    results = []
    for count in (3, 2):
        lists = (batch.indptr[: count + 1], batch.pages, batch.last[:count])
        wrapper.plan(*lists, HEADS, KV_HEADS, DIM, PAGE, q_data_type=DTYPE, max_kv_len=512, **option)
        results.append(wrapper.run(batch.q[:count], batch.cache, return_lse=True))
    for whole, part in zip(*results, strict=True):
        assert torch.equal(whole[:2], part)


@pytest.mark.parametrize("case", RUNS.values(), ids=RUNS.keys())
def test_one_graph_of_plan_and_run(case: tuple[list[int], Callable[[Device], Any], Scores]) -> None:
    """Replays see the lengths, pages and keys that the arrays hold at their time."""
    q_lens, run, scores = case
    batch = Device([100, 33, 200], q_lens)
    run(batch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = run(batch)
    for seed, kv_lens in enumerate(([100, 33, 200], [300, 1, 40], [7, 512, 41], [64, 64, 64])):
        batch.fill(kv_lens, seed)
        graph.replay()
        torch.cuda.synchronize()
        eager = run(batch)
        batch.check(out, lse, scores)
        assert torch.equal(out, eager[0])
        assert torch.equal(lse, eager[1])


def test_graph_wrapper_planned_outside_of_the_graph() -> None:
    """FlashInfer's own way: only run() is captured, plan() copies to fixed memory between replays."""
    batch = Device([100, 33, 200], [1, 1, 1])
    buffers = [torch.zeros_like(each) for each in (batch.indptr, batch.pages, batch.last)]
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(batch.workspace, *buffers)
    batch.decode(wrapper)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = wrapper.run(batch.q, batch.cache, return_lse=True)
    for seed, kv_lens in enumerate(([300, 1, 40], [7, 512, 41])):
        batch.fill(kv_lens, seed)
        lists = (batch.paged.indptr, batch.paged.indices, batch.paged.last_page_len)  # in host memory
        wrapper.plan(*lists, HEADS, KV_HEADS, DIM, PAGE, q_data_type=DTYPE, max_kv_len=512)
        graph.replay()
        batch.check(out, lse, Scores())


def test_host_tensors_are_refused_in_a_capture() -> None:
    batch = Device([100, 33, 200], [1, 1, 1])
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(batch.workspace)
    batch.decode(wrapper)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(ValueError, match="inside a CUDA graph capture"):
        wrapper.plan(*batch.paged.lists, HEADS, KV_HEADS, DIM, PAGE, q_data_type=DTYPE)


@pytest.mark.parametrize("causal", [True, False])
def test_mla_in_a_graph(causal: bool) -> None:
    torch.manual_seed(0)
    rows = torch.randn(12, 64, 576, device="cuda", dtype=DTYPE) * 0.3
    q = torch.randn(4, 16, 576, device="cuda", dtype=DTYPE) * 0.5
    q_indptr, indptr = offsets([1, 3]).cuda(), offsets([2, 4]).cuda()
    indices = torch.randperm(12)[:6].to("cuda", torch.int32)
    lens = torch.tensor([70, 250], device="cuda", dtype=torch.int32)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(q)
        wrapper.plan(q_indptr, indptr, indices, lens, 16, 512, 64, 64, causal, 192**-0.5, DTYPE, DTYPE)
        return wrapper.run(query=q, kv_cache=rows, return_lse=True)

    run()
    with no_waits():
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = run()
    for counts in ([70, 250], [128, 193]):
        lens.copy_(torch.tensor(counts, dtype=torch.int32))
        graph.replay()
        for i, part in enumerate(q.cpu().split([1, 3])):
            pages = indices.cpu()[[0, 2][i] : [2, 6][i]].long()
            keys = rows.cpu()[pages].flatten(0, 1)[: counts[i], None]
            expected = attend(part, keys, keys[..., :512], Scores(scale=192**-0.5, causal=causal))
            check(out.cpu().split([1, 3])[i], expected[0], DTYPE)
            check(lse.cpu().split([1, 3])[i], expected[1], torch.float16)


def test_ragged_in_a_graph() -> None:
    """The table of ragged keys is made again in every replay."""
    shapes = ((6, HEADS, DIM), (60, KV_HEADS, DIM), (60, KV_HEADS, DIM))
    q, k, v = (torch.randn(shape, device="cuda", dtype=DTYPE) for shape in shapes)
    q_indptr, kv_indptr = offsets([2, 4]).cuda(), offsets([20, 40]).cuda()

    def run() -> torch.Tensor:
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(q)
        wrapper.plan(q_indptr, kv_indptr, HEADS, KV_HEADS, DIM, causal=True, q_data_type=DTYPE)
        return wrapper.run(q, k, v)

    run()
    with no_waits():
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for counts in ([20, 40], [50, 10]):
        kv_indptr.copy_(offsets(counts))
        graph.replay()
        rows = zip(q.cpu().split([2, 4]), k.cpu().split(counts), v.cpu().split(counts), strict=True)
        check(out.cpu(), torch.cat([attend(*each, Scores())[0] for each in rows]), DTYPE)


def test_refusal_of_a_backend_names_its_reasons() -> None:
    q = torch.randn(1, 512, device="cuda", dtype=DTYPE)
    with pytest.raises(fovea.Error, match="head_dim is 512, at most 256") as error:
        flashinfer.single_decode_with_kv_cache(q, q[:, None], q[:, None])
    assert error.value.code == "unsupported"
