# SPDX-License-Identifier: Apache-2.0
"""The life of cached backends: what they are found by, how they grow, and when they go."""

import gc
import sys
import threading
import weakref

import fovea
import pytest
import torch
from fovea.torch import BackendCache, backend_cache
from torch_reference import paged_requests

SPEC = fovea.AttentionSpec(q_heads=4, kv_heads=2, head_dim=64)
CACHE = fovea.KvCacheSpec(kv_heads=2, head_dim=64, page_size=4)


def limits(requests=2, tokens=2, q_len=1, kv_len=16, **more):
    return fovea.BatchLimits(max_requests=requests, max_tokens=tokens, max_q_len=q_len, max_kv_len=kv_len, **more)


def new_layer(pages=8):
    return tuple(torch.zeros(2, pages, 4, 2, 64).unbind())


def test_importing_fovea_does_not_import_torch():
    import subprocess

    code = "import sys, fovea; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_equal_keys_share_a_backend_and_others_do_not():
    cache = BackendCache()
    k, v = new_layer()
    backend = cache.backend_for(SPEC, CACHE, [(k, v)], limits())
    assert cache.backend_for(SPEC.replace(), CACHE.replace(), [(k.view_as(k), v)], limits()) is backend
    others = [
        cache.backend_for(SPEC.replace(window=3), CACHE, [(k, v)], limits()),
        cache.backend_for(SPEC, CACHE, [(v, k)], limits()),
        cache.backend_for(SPEC, CACHE, [(k[:4], v[:4])], limits()),
        cache.backend_for(SPEC, CACHE, [(k[::2], v[::2])], limits()),
        cache.backend_for(SPEC, CACHE, [(k, v)], limits(), own_workspace=True),
        cache.backend_for(SPEC, CACHE, [(k, v)], limits(prefix_levels=1)),
    ]
    assert len({id(other) for other in [backend, *others]}) == 7
    assert len(cache) == 7


def test_limits_grow_by_powers_of_two_and_never_shrink():
    cache = BackendCache()
    layer = new_layer()
    backend = cache.backend_for(SPEC, CACHE, [layer], limits(requests=3, tokens=5, q_len=5, kv_len=17))
    assert backend.limits == limits(requests=4, tokens=8, q_len=8, kv_len=32)
    assert cache.backend_for(SPEC, CACHE, [layer], limits(tokens=8, kv_len=32)) is backend
    assert backend.limits == limits(requests=4, tokens=8, q_len=8, kv_len=32)
    assert cache.backend_for(SPEC, CACHE, [layer], limits(requests=5)) is backend
    assert backend.limits == limits(requests=8, tokens=8, q_len=8, kv_len=32)


def test_backends_share_one_workspace_which_grows():
    cache = BackendCache()
    first, second = [new_layer()], [new_layer()]
    cache.backend_for(SPEC, CACHE, first, limits())
    (small,) = cache._workspaces.values()
    cache.backend_for(SPEC, CACHE, second, limits(tokens=512, q_len=512, kv_len=512))
    (large,) = cache._workspaces.values()
    assert large.nbytes > small.nbytes
    freed = weakref.ref(small)
    del small
    cache.backend_for(SPEC, CACHE, first, limits())
    gc.collect()
    assert freed() is None, "the first backend keeps the workspace that was replaced"
    assert all(entry.workspace is large for entry in cache._entries.values())


def test_the_backend_that_was_unused_longest_goes_first():
    cache = BackendCache(capacity=2)
    layers = [[new_layer()] for _ in range(3)]
    backends = [cache.backend_for(SPEC, CACHE, layer, limits()) for layer in layers[:2]]
    assert cache.backend_for(SPEC, CACHE, layers[0], limits()) is backends[0]
    cache.backend_for(SPEC, CACHE, layers[2], limits())
    assert len(cache) == 2
    assert cache.backend_for(SPEC, CACHE, layers[0], limits()) is backends[0]
    assert cache.backend_for(SPEC, CACHE, layers[1], limits()) is not backends[1]
    with pytest.raises(ValueError, match="capacity is 0, must be at least 1"):
        BackendCache(capacity=0)


def test_cache_tensors_are_freed_and_their_backends_go():
    cache = BackendCache()
    k, v = new_layer()
    storage = weakref.ref(k.untyped_storage())
    cache.backend_for(SPEC, CACHE, [(k, v)], limits())
    assert len(cache) == 1
    del k, v
    gc.collect()
    assert storage() is None, "the cache of backends keeps a cache tensor"
    other = [new_layer(9)]
    cache.backend_for(SPEC, CACHE, other, limits())
    assert len(cache) == 1


def test_memory_that_is_used_again_gets_the_strides_of_its_new_tensor():
    """A tensor at the address of a freed one must not be read through the strides of the freed one."""
    cache = BackendCache()
    memory = torch.zeros(8 * 4 * 2 * 64 * 2)
    for page_size, pages in ((4, 8), (16, 2), (4, 8)):
        requests = paged_requests([1], [pages * page_size - page_size], page_size=page_size)
        shape = (requests.k_cache.shape[0], page_size, 2, 128)
        both = memory[: requests.k_cache.shape[0] * page_size * 256].view(shape)
        both[..., :64], both[..., 64:] = requests.k_cache, requests.v_cache
        length = requests.kv_lens[0]
        out = torch.empty(1, 4, 64)
        batch = fovea.Batch(
            mode="decode",
            q_indptr=torch.tensor([0, 1], dtype=torch.int32),
            kv_lens=requests.device_lens,
            request_rows=torch.zeros(1, dtype=torch.int32),
            table=requests.page_table,
            entry_tokens=page_size,
            max_q_len=1,
            max_kv_len=length,
        )
        layer = (both[..., :64], both[..., 64:])
        cache.run(
            SPEC, CACHE.replace(page_size=page_size), [layer], limits(kv_len=length), batch, q=requests.q, out=out,
            save_kv=False,
        )  # fmt: skip
        torch.testing.assert_close(out.double(), requests.expected()[0], atol=2e-5, rtol=2e-5)


def test_a_run_keeps_no_array_of_its_batch():
    cache = BackendCache()
    requests = paged_requests([1], [20])
    numbers = torch.arange(2, dtype=torch.int32)
    batch = fovea.Batch(
        mode="decode", q_indptr=numbers, kv_lens=requests.device_lens, request_rows=numbers, table=requests.page_table,
        entry_tokens=16, max_q_len=1, max_kv_len=32,
    )  # fmt: skip
    table = weakref.ref(requests.page_table)
    layer = (requests.k_cache, requests.v_cache)
    out = torch.empty_like(requests.q)
    cache.run(
        SPEC, CACHE.replace(page_size=16), [layer], limits(kv_len=32), batch, q=requests.q, out=out, save_kv=False
    )
    torch.testing.assert_close(out.double(), requests.expected()[0], atol=2e-5, rtol=2e-5)
    del batch, requests
    gc.collect()
    assert table() is None


def test_clear_drops_everything():
    cache = BackendCache()
    layer = [new_layer()]
    cache.backend_for(SPEC, CACHE, layer, limits())
    cache.clear()
    assert len(cache) == 0
    assert not cache._workspaces
    cache.backend_for(SPEC, CACHE, layer, limits())


def test_scopes_without_a_cache_need_no_layers():
    cache = BackendCache()
    backend = cache.backend_for(SPEC.replace(scope="ragged"), limits=limits(tokens=4, q_len=4), device="cpu")
    assert str(backend.device) == "cpu"


def test_the_wish_is_followed_and_refusals_have_reasons():
    layer = [new_layer()]
    assert BackendCache(backend="reference").backend_for(SPEC, CACHE, layer, limits()).name == "reference"
    with pytest.raises(fovea.Error, match="flash") as refusal:
        BackendCache(backend="flash").backend_for(SPEC, CACHE, layer, limits())
    assert refusal.value.code == "unsupported"


def test_threads_share_a_cache():
    """Threads with batches of their own get the results that one thread gets."""
    cache = BackendCache(capacity=3)
    everything = [paged_requests([2, 1], [length, 9], seed=length) for length in range(20, 28)]
    failures = []

    def run(requests):
        try:
            for _ in range(20):
                out = torch.empty_like(requests.q)
                batch = fovea.Batch(
                    mode="extend",
                    q_indptr=requests.q_indptr,
                    kv_lens=requests.device_lens,
                    request_rows=torch.arange(2, dtype=torch.int32),
                    table=requests.page_table,
                    entry_tokens=16,
                    tokens=3,
                    max_q_len=2,
                    max_kv_len=requests.kv_lens[0],
                )
                layer = (requests.k_cache, requests.v_cache)
                cache.run(
                    SPEC, CACHE.replace(page_size=16), [layer], limits(tokens=3, q_len=2, kv_len=32), batch,
                    q=requests.q, out=out, save_kv=False,
                )  # fmt: skip
                torch.testing.assert_close(out.double(), requests.expected()[0], atol=2e-5, rtol=2e-5)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(requests,)) for requests in everything]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


class Streams:
    """Stands in for the streams of a GPU."""

    def __init__(self, monkeypatch):
        self.current, self.capturing = 0, False
        monkeypatch.setattr(backend_cache, "current_stream", lambda device: (self.current, self.capturing))


def test_streams_have_backends_and_workspaces_of_their_own(monkeypatch):
    streams = Streams(monkeypatch)
    cache = BackendCache()
    layer = [new_layer()]
    first = cache.backend_for(SPEC, CACHE, layer, limits())
    streams.current = 7
    second = cache.backend_for(SPEC, CACHE, layer, limits())
    assert first is not second
    assert len(cache._workspaces) == 2


def test_a_capture_takes_a_backend_that_was_warmed_up_and_grows_nothing(monkeypatch):
    streams = Streams(monkeypatch)
    cache = BackendCache(capacity=4)
    layer = [new_layer()]
    streams.current, streams.capturing = 9, True
    with pytest.raises(fovea.Error, match="run the pass once before it is captured"):
        cache.backend_for(SPEC, CACHE, layer, limits())

    streams.current, streams.capturing = 7, False
    warm = cache.backend_for(SPEC, CACHE, layer, limits(kv_len=64))
    streams.current, streams.capturing = 9, True
    with pytest.raises(fovea.Error, match=r"limits\.max_kv_len is 65, 64 is reserved"):
        cache.backend_for(SPEC, CACHE, layer, limits(kv_len=65))
    assert cache.backend_for(SPEC, CACHE, layer, limits(kv_len=64)) is warm

    # The backend of the graph stays as it is: a longer pass gets another one, and so does a later capture.
    streams.current, streams.capturing = 7, False
    assert cache.backend_for(SPEC, CACHE, layer, limits(kv_len=30)) is warm
    longer = cache.backend_for(SPEC, CACHE, layer, limits(kv_len=100))
    assert longer is not warm
    assert warm.limits.max_kv_len == 64
    streams.current, streams.capturing = 9, True
    assert cache.backend_for(SPEC, CACHE, layer, limits(kv_len=100)) is longer

    # It outlives its place in the cache, because a graph may still use it.
    freed = weakref.ref(cache._captured[0].workspace)
    del warm
    streams.capturing = False
    for _ in range(5):
        cache.backend_for(SPEC, CACHE, [new_layer(9)], limits())
    gc.collect()
    assert freed() is not None
    cache.clear()
    gc.collect()
    assert freed() is None
