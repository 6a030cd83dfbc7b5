# SPDX-License-Identifier: Apache-2.0
"""References to arrays and objects, threads, and the interfaces of other array libraries."""

import gc
import sys
import threading
import time
import weakref

import fovea
import numpy as np
import pytest
from reference import Case, Pass

CASE = Case([1, 5, 7], [9, 12, 7])


class Tracked(np.ndarray):
    """An array whose end can be watched."""


def tracked(values, dtype):
    return np.asarray(values, dtype).view(Tracked)


def test_a_batch_keeps_its_arrays_and_a_plan_its_batch():
    run = Pass(CASE)
    expected, _ = run.run()
    arrays = {
        "q_indptr": tracked([0, 1, 6, 13], np.int32),
        "kv_lens": tracked([9, 12, 7], np.int32),
        "request_rows": tracked(run.rows, np.int32),
        "table": tracked(np.from_dlpack(run.table.table).copy(), np.int32),
    }
    watched = [weakref.ref(array) for array in arrays.values()]
    run.backend.plan(fovea.Batch(mode="mixed", **arrays))
    del arrays
    gc.collect()
    assert all(ref() is not None for ref in watched)
    out = np.zeros_like(expected)
    run.backend.forward(q=run.q, out=out, save_kv=False)
    np.testing.assert_array_equal(out, expected)
    run.backend.plan(run.batch(CASE.q_lens, CASE.kv_lens, "mixed"))
    gc.collect()
    assert all(ref() is None for ref in watched), "the next plan() lets the batch go"


def test_a_lent_pool_keeps_its_arrays_and_a_backend_its_pool():
    spec = fovea.KvCacheSpec(kv_heads=2, head_dim=8, page_size=4)
    k, v = (tracked(np.zeros((3, 4, 2, 8)), np.float32) for _ in range(2))
    watched = [weakref.ref(k), weakref.ref(v)]
    pool = fovea.KvPool.lend(spec, [(k, v)])
    backend = fovea.select(fovea.AttentionSpec(q_heads=2, kv_heads=2, head_dim=8), spec, threads=1).create(pool)
    assert backend.kv is pool
    del k, v, pool
    gc.collect()
    assert all(ref() is not None for ref in watched)
    del backend
    gc.collect()
    assert all(ref() is None for ref in watched)


def test_forward_keeps_nothing_and_bind_keeps_all():
    run = Pass(CASE)
    run.run()
    out = tracked(np.zeros((13, 4, 64)), np.float32)
    watched = weakref.ref(out)
    before = sys.getrefcount(run.q)
    run.backend.forward(q=run.q, out=out, save_kv=False)
    after = sys.getrefcount(run.q)
    assert after == before
    bound = run.backend.bind(q=run.q, out=out, save_kv=False)
    del out
    gc.collect()
    bound.forward()
    assert np.abs(watched()).max() > 0
    del bound
    gc.collect()
    after = sys.getrefcount(run.q)
    assert watched() is None and after == before


def test_a_workspace_is_kept_until_the_next_reserve():
    run = Pass(CASE)
    expected, _ = run.run()
    size = run.backend.workspace_bytes(run.limits)
    memory = np.zeros(size + 64, np.uint8)
    memory = memory[-memory.ctypes.data % 64 :].view(Tracked)
    watched = weakref.ref(memory)
    run.backend.reserve(run.limits, memory)
    del memory
    gc.collect()
    assert watched() is not None and run.backend.limits == run.limits
    np.testing.assert_array_equal(run.run()[0], expected)
    run.backend.reserve(run.limits)
    gc.collect()
    assert watched() is None


def test_prefix_cache_and_threads_are_kept():
    threads = fovea.ThreadPool(2)
    merger = fovea.StateMerger(dtype="fp32", heads=1, dim=4, threads=threads)
    del threads
    gc.collect()
    out, lse = np.ones((2, 1, 4), np.float32), np.zeros((2, 1), np.float32)
    merger.merge(out, lse, out + 1, lse.copy())
    np.testing.assert_allclose(out, 1.5)
    np.testing.assert_allclose(lse, np.log(2), rtol=1e-6)


def test_two_threads_may_use_one_backend():
    run = Pass(CASE)
    expected, _ = run.run()
    outs = [np.zeros_like(expected) for _ in range(4)]

    def work(out):
        for _ in range(50):
            run.backend.forward(q=run.q, out=out, save_kv=False)

    threads = [threading.Thread(target=work, args=(out,)) for out in outs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for out in outs:
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("call", ["forward", "plan"])
def test_other_threads_run_meanwhile(call):
    """A thread counts while long calls run. Nobody has to let the GIL go for 100 s, so the calls must do so."""
    case = Case([256] if call == "forward" else [1] * 512, [256] if call == "forward" else [64] * 512, q_heads=8)
    run = Pass(case)
    run.run()
    out, count, done = np.zeros((case.tokens, 8, 64), np.float32), [0], threading.Event()
    batch = run.batch(case.q_lens, case.kv_lens, "mixed")

    def work():
        while not done.is_set():
            count[0] += 1
            time.sleep(0)  # lets the GIL go

    thread, interval = threading.Thread(target=work), sys.getswitchinterval()
    sys.setswitchinterval(100)
    try:
        thread.start()
        seen, deadline = count[0], time.monotonic() + 20
        while count[0] == seen and time.monotonic() < deadline:
            if call == "plan":
                run.backend.plan(batch)
            else:
                run.backend.forward(q=run.q, out=out, save_kv=False)
        assert count[0] > seen
    finally:
        done.set()
        sys.setswitchinterval(interval)
        thread.join()


class OldLibrary:
    """An array of a library from before DLPack 1.0: its `__dlpack__` knows neither max_version nor copy."""

    def __init__(self, array):
        self.array = array
        self.calls = []

    def __dlpack__(self, stream=None):
        self.calls.append(stream)
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_libraries_without_versions():
    run = Pass(CASE)
    expected, _ = run.run()
    q, out = OldLibrary(run.q), OldLibrary(np.zeros_like(expected))
    for _ in range(2):
        run.backend.forward(q=q, out=out, save_kv=False)
    np.testing.assert_array_equal(out.array, expected)
    assert q.calls == [None, None], "arrays of the CPU have no stream"


def test_exported_arrays_follow_the_protocol():
    pool = fovea.KvPool(fovea.KvCacheSpec(kv_heads=2, head_dim=8, page_size=4), 3)
    k, _ = pool.layer(0)
    assert k.__dlpack_device__() == (1, 0)
    assert "dltensor_versioned" in repr(k.__dlpack__(max_version=(1, 0))) and '"dltensor"' in repr(k.__dlpack__())
    with pytest.raises(BufferError):
        k.__dlpack__(copy=True)
    with pytest.raises(BufferError):
        k.__dlpack__(dl_device=(2, 0))
    watched = weakref.finalize(pool, lambda: None) if hasattr(pool, "__weakref__") else None
    capsule = k.__dlpack__()
    del pool, k, capsule
    gc.collect()
    assert watched is None or not watched.alive


def test_read_only_inputs_are_fine():
    run = Pass(CASE)
    expected, _ = run.run()
    run.q.setflags(write=False)
    out = np.zeros_like(expected)
    run.backend.forward(q=run.q, out=out, save_kv=False)
    np.testing.assert_array_equal(out, expected)
