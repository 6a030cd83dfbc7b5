# SPDX-License-Identifier: Apache-2.0
"""The core of the package on a GPU: arrays of torch, cupy and jax, streams, graphs, errors, the engine."""

import pathlib
import subprocess
import sys

import fovea
import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEADS, KV_HEADS, DIM, PAGE, PAGES = 8, 2, 128, 16, 64
LENGTHS = [1, 33, 200]


class Pass:
    """A decode step of three requests over lent memory, and what torch computes for it."""

    def __init__(self):
        torch.manual_seed(1)
        self.spec = fovea.AttentionSpec(q_heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, q_dtype="bf16", needs_lse=True)
        self.cache = fovea.KvCacheSpec(kv_heads=KV_HEADS, head_dim=DIM, page_size=PAGE, dtype="bf16")
        self.limits = fovea.BatchLimits(max_requests=3, max_tokens=3, max_kv_len=256)
        shape = (PAGES, PAGE, KV_HEADS, DIM)
        self.k, self.v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        self.pool = fovea.KvPool.lend(self.cache, [(self.k, self.v)])
        self.backend = fovea.select(self.spec, self.cache, limits=self.limits, device="cuda").create(self.pool)
        self.backend.reserve(self.limits)
        pages = iter(torch.randperm(PAGES - 1).add(1).tolist())
        self.table = torch.zeros(3, 16, dtype=torch.int32)
        for row, length in enumerate(LENGTHS):
            for column in range(-(-length // PAGE)):
                self.table[row, column] = next(pages)
        last = torch.tensor(LENGTHS) - 1
        slots = self.table[torch.arange(3), last // PAGE].long() * PAGE + last % PAGE
        self.arrays = {
            "q_indptr": torch.arange(4, dtype=torch.int32).cuda(),
            "kv_lens": torch.tensor(LENGTHS, dtype=torch.int32).cuda(),
            "request_rows": torch.arange(3, dtype=torch.int32).cuda(),
            "table": self.table.cuda(),
            "entry_tokens": PAGE,
            "out_slots": slots.cuda(),
        }
        self.batch = fovea.Batch(mode="decode", **self.arrays)
        self.q = torch.randn(3, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
        self.new_k, self.new_v = (torch.randn(3, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        self.out = torch.zeros_like(self.q)
        self.lse = torch.zeros(3, HEADS, device="cuda")

    def expected(self):
        outs, lses = [], []
        for row, length in enumerate(LENGTHS):
            pages = self.table[row, : -(-length // PAGE)].long().cuda()
            k, v = (cache[pages].reshape(-1, KV_HEADS, DIM)[:length].float() for cache in (self.k, self.v))
            k, v = (array.repeat_interleave(HEADS // KV_HEADS, dim=1) for array in (k, v))
            scores = torch.einsum("hd,khd->hk", self.q[row].float(), k) / DIM**0.5
            lses.append(scores.logsumexp(-1))
            outs.append(torch.einsum("hk,khd->hd", scores.softmax(-1), v))
        return torch.stack(outs), torch.stack(lses)

    def check(self):
        out, lse = self.expected()
        torch.testing.assert_close(self.out.float(), out, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(self.lse, lse, atol=2e-3, rtol=1e-3)

    def tensors(self):
        return {"q": self.q, "k": self.new_k, "v": self.new_v, "out": self.out, "lse": self.lse}


def test_decode_over_lent_tensors():
    run = Pass()
    assert run.backend.name in ("flash", "portable") and str(run.backend.device) == "cuda:0"
    run.backend.plan(run.batch)
    run.backend.forward(**run.tensors())
    run.check()


def test_work_goes_to_the_current_stream_or_the_given_one():
    run = Pass()
    for given in (None, "object", "address"):
        run.out.zero_()
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        argument = {"object": stream, "address": stream.cuda_stream}.get(given)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
            run.q.normal_()
            run.backend.plan(run.batch, stream=argument)
            run.backend.forward(**run.tensors(), stream=argument)
            assert not stream.query(), "the calls only enqueue"
        stream.synchronize()
        run.check()


def test_a_graph_captures_plan_and_forward():
    run = Pass()
    bound = run.backend.bind(**run.tensors())
    run.backend.plan(run.batch)
    bound.forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run.backend.plan(run.batch)
        bound.forward()
    for _ in range(20):
        run.q.normal_()
        run.new_k.normal_()
        graph.replay()
        run.check()
        replayed = run.out.clone()
        run.backend.plan(run.batch)
        bound.forward()
        assert torch.equal(replayed, run.out)


def test_own_pool_and_its_views():
    pool = fovea.KvPool(fovea.KvCacheSpec(kv_heads=2, head_dim=64, page_size=16, dtype="bf16"), 4, "cuda")
    k = torch.from_dlpack(pool.layer(0)[0])
    assert k.shape == (4, 16, 2, 64) and k.dtype == torch.bfloat16 and k.is_cuda and not k.any()
    k.fill_(3)
    assert torch.from_dlpack(pool.layer(0)[0]).eq(3).all()


def test_tensors_of_the_cpu_are_refused_by_name():
    run = Pass()
    run.backend.plan(run.batch)
    for name, tensor in run.tensors().items():
        with pytest.raises(fovea.Error, match=f"{name} is on cpu, must be on cuda:0"):
            run.backend.forward(**{**run.tensors(), name: tensor.cpu()})
    with pytest.raises(fovea.Error, match="kv_lens is on cpu, must be on cuda:0"):
        fovea.Batch(mode="decode", **{**run.arrays, "kv_lens": run.arrays["kv_lens"].cpu()})
    with pytest.raises(fovea.Error, match="q is at 0x"):
        wide = torch.zeros(3 * HEADS * DIM + 1, dtype=torch.bfloat16, device="cuda")[1:]
        run.backend.forward(**{**run.tensors(), "q": wide.view(3, HEADS, DIM)})


def test_cupy_arrays():
    cupy = pytest.importorskip("cupy")
    run = Pass()
    expected_stream = cupy.cuda.Stream()
    with expected_stream:
        batch = fovea.Batch(
            mode="decode",
            **{name: cupy.from_dlpack(a) if torch.is_tensor(a) else a for name, a in run.arrays.items()},
        )
    torch.cuda.synchronize()
    run.backend.plan(batch, stream=expected_stream)
    tensors = run.tensors()
    lse = cupy.from_dlpack(tensors.pop("lse"))
    run.backend.forward(**tensors, lse=lse, stream=expected_stream)
    expected_stream.synchronize()
    run.check()


def test_jax_arrays():
    jax = pytest.importorskip("jax")
    if not any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("this jax has no GPU")
    run = Pass()
    q = jax.dlpack.from_dlpack(run.q)
    torch.cuda.synchronize()
    run.backend.plan(run.batch)
    run.backend.forward(**{**run.tensors(), "q": q})
    torch.cuda.synchronize()
    run.check()


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_engine(name):
    folder = ROOT / "testdata" / "models" / name
    if not folder.exists():
        pytest.skip("testdata/models is not here")
    prompt = "And God said unto him,"
    on_cpu = fovea.Engine.load(folder).generate(prompt, max_new_tokens=8, ignore_eos=True)[0].tokens
    engine = fovea.Engine.load(folder, device="cuda")
    tokens = [event.token for event in engine.stream(prompt, max_new_tokens=8, ignore_eos=True)]
    assert len(tokens) == 8 and tokens[0] == on_cpu[0], "bf16 may change later tokens"
    assert engine.generate(prompt, max_new_tokens=8, ignore_eos=True)[0].tokens == tokens


def test_overhead():
    script = ROOT / "bench" / "python_overhead.py"
    run = subprocess.run([sys.executable, script, "--device", "cuda"], capture_output=True, text=True)
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr
