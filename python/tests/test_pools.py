# SPDX-License-Identifier: Apache-2.0
"""Pools of the library and of the caller, tables, allocators, prefix caches."""

import dataclasses
import gc
import sys

import fovea
import numpy as np
import pytest
from reference import Case, Pass

MIXED = Case([1, 5, 7], [9, 12, 7])
EXPECTED = Pass(MIXED).run()[0]


def dense(spec, pages, order="nhd"):
    axes = (spec.page_size, spec.kv_heads) if order == "nhd" else (spec.kv_heads, spec.page_size)
    return [np.zeros((pages, *axes, dim), np.float32) for dim in (spec.head_dim, spec.head_dim_v)]


def lend_dense(spec, pages):
    return fovea.KvPool.lend(spec, [dense(spec, pages, spec.order)])


def lend_side_by_side(spec, pages):
    """K and V of a page next to each other, as in one tensor [pages, 2, page, heads, dim]."""
    both = np.zeros((pages, 2, spec.page_size, spec.kv_heads, spec.head_dim), np.float32)
    return fovea.KvPool.lend(spec, [(both[:, 0], both[:, 1])])


def lend_in_one_row(spec, pages):
    """K and V of a head next to each other, with a gap between tokens."""
    rows = np.zeros((pages, spec.page_size, spec.kv_heads + 1, 2 * spec.head_dim), np.float32)[:, :, 1:]
    return fovea.KvPool.lend(spec, [(rows[..., : spec.head_dim], rows[..., spec.head_dim :])])


def lend_transposed(spec, pages):
    """Pages whose heads come first in memory, described as nhd."""
    k, v = (array.transpose(0, 2, 1, 3) for array in dense(spec, pages, "hnd"))
    return fovea.KvPool.lend(spec, [(k, v)])


@pytest.mark.parametrize(
    "lend", [lend_dense, lend_side_by_side, lend_in_one_row, lend_transposed], ids=lambda f: f.__name__
)
def test_lent_memory_gives_the_same_bits(lend):
    run = Pass(MIXED, pool=lend)
    gc.collect()  # nobody but the pool keeps the arrays
    np.testing.assert_array_equal(run.run()[0], EXPECTED)
    written = np.from_dlpack(run.pool.layer(0)[0])
    assert written.shape == (9, 4, 2, 64)
    np.testing.assert_array_equal(written.reshape(-1, 2, 64)[run.slots[0]], run.k[:9])


def test_lent_memory_with_heads_first():
    case = dataclasses.replace(MIXED, order="hnd")
    np.testing.assert_array_equal(Pass(case, pool=lend_dense).run()[0], Pass(case).run()[0])


def test_lent_scales():
    case = dataclasses.replace(MIXED, cache_dtype="fp8_e4m3", scale="per_head")
    scales = [np.full(2, value, np.float32) for value in (0.5, 2.0)]

    def lend(spec, pages):
        k, v = (array.astype(np.uint8) for array in dense(spec, pages))
        return fovea.KvPool.lend(spec, [(k, v, *scales)])

    run = Pass(case, pool=lend)
    out, _ = run.run()
    np.testing.assert_allclose(out, EXPECTED, atol=0.25)
    own = Pass(case)
    for array, scale in zip(own.pool.layer(0)[2:], scales):
        np.from_dlpack(array)[:] = scale
    np.testing.assert_array_equal(own.run()[0], out)


SPEC = fovea.KvCacheSpec(kv_heads=2, head_dim=8, page_size=4)


def arrays(**changes):
    shape = changes.get("shape", (3, 4, 2, 8))
    return np.zeros(shape, changes.get("dtype", np.float32)), np.zeros((3, 4, 2, 8), np.float32)


def read_only():
    k, v = arrays()
    v.setflags(write=False)
    return k, v


@pytest.mark.parametrize(
    "layers, message",
    [
        (lambda: 3, "layers is of type int, must be a list of tuples of arrays"),
        (lambda: [arrays(), arrays()], "layers has 2 entries, the spec has 1 layers"),
        (lambda: [arrays()[0]], r"layers\[0\]: the entry is of type ndarray, must be a tuple of arrays"),
        (lambda: [arrays()[:1]], r"layers\[0\]: the entry has 1 arrays, must be \(k, v\)"),
        (lambda: [(1, arrays()[1])], r"layers\[0\]: k is of type int, must be an array that speaks DLPack"),
        (lambda: [arrays(shape=(3, 4, 8, 2))], r"layers\[0\]: k has shape \[3, 4, 8, 2\], must be \[3, 4, 2, 8\]"),
        (lambda: [arrays(shape=(3, 4, 16))], r"layers\[0\]: k has shape \[3, 4, 16\], must be \[3, 4, 2, 8\]"),
        (lambda: [arrays(shape=(2, 4, 2, 8))], r"layers\[0\]: v has shape \[3, 4, 2, 8\], must be \[2, 4, 2, 8\]"),
        (lambda: [arrays(dtype=np.float64)], r"layers\[0\]: k has dtype float64, must be fp32"),
        (
            lambda: [(arrays()[0].transpose(0, 1, 3, 2).copy().transpose(0, 1, 3, 2), arrays()[1])],
            "k has a stride of 2",
        ),
        (lambda: [read_only()], r"layers\[0\]: v is read-only, must be writable"),
    ],
)
def test_lend_names_what_is_wrong(layers, message):
    with pytest.raises(fovea.Error, match=message):
        fovea.KvPool.lend(SPEC, layers())


def test_lend_on_another_device():
    with pytest.raises(fovea.Error, match=r"layers\[0\]: k is on cpu, must be on cuda:0"):
        fovea.KvPool.lend(SPEC, [arrays()], "cuda:0")


def test_page_zero_of_lent_memory():
    """Other engines give page 0 to requests."""
    spec = fovea.AttentionSpec(q_heads=2, kv_heads=2, head_dim=8)
    limits = fovea.BatchLimits(max_kv_len=4)
    batch = fovea.Batch(
        mode="decode",
        q_indptr=np.array([0, 1], np.int32),
        kv_lens=np.array([1], np.int32),
        request_rows=np.zeros(1, np.int32),
        table=np.zeros((1, 1), np.int32),
        entry_tokens=4,
        out_slots=np.zeros(1, np.int64),
    )
    v = np.arange(16, dtype=np.float32).reshape(1, 2, 8)
    for reserves in (False, True):
        k, out = arrays()[0], np.zeros((1, 2, 8), np.float32)
        pool = fovea.KvPool.lend(SPEC, [(k, arrays()[1])], reserves_page_zero=reserves)
        made = fovea.select(spec, SPEC, limits=limits, threads=1).create(pool)
        made.reserve(limits)
        made.plan(batch)
        made.forward(q=v, k=v, v=v, out=out)
        assert pool.reserves_page_zero is reserves
        # A pool that reserves page 0 takes the request for padding, whose result nobody reads.
        np.testing.assert_array_equal(k[0, 0], v[0])
        assert reserves or np.allclose(out, v)
    assert fovea.KvPool(SPEC, 2).reserves_page_zero


def test_memory_that_the_caller_keeps():
    k, v = arrays()
    before = sys.getrefcount(k)
    pool = fovea.KvPool.lend(SPEC, [(k, v)], keep=False)
    after = sys.getrefcount(k)
    assert after == before and pool.layer(0)[0].address == k.ctypes.data
    with pytest.raises(fovea.Error, match="keep is 0, must be True or False"):
        fovea.KvPool.lend(SPEC, [(k, v)], keep=0)


def test_overlapping_rows_are_refused_when_a_backend_is_made():
    k = np.lib.stride_tricks.as_strided(np.zeros(1000, np.float32), (3, 4, 2, 8), (64, 32, 16, 4))
    spec = fovea.AttentionSpec(q_heads=2, kv_heads=2, head_dim=8)
    pool = fovea.KvPool.lend(SPEC, [(k, arrays()[1])])
    with pytest.raises(fovea.Error, match="overlap"):
        fovea.select(spec, SPEC, threads=1).create(pool)


def test_own_pool():
    pool = fovea.KvPool(SPEC, 5)
    assert (pool.spec, pool.pages, str(pool.device), pool.nbytes) == (SPEC, 5, "cpu", 5 * 4 * 2 * 8 * 4 * 2)
    k, v = pool.layer(0)
    assert k.shape == (5, 4, 2, 8) and k.strides == (64, 16, 8, 1) and k.dtype == "fp32" and k.address % 64 == 0
    view = np.from_dlpack(k)
    view[1, 2, 0, 3] = 5
    del pool, k, v
    gc.collect()
    assert view[1, 2, 0, 3] == 5 and view.sum() == 5, "the view keeps the pool"
    with pytest.raises(fovea.Error, match="5"):
        fovea.KvPool(SPEC, 5).layer(5)
    with pytest.raises(fovea.Error, match="pages is 1"):
        fovea.KvPool(SPEC, 1)


def test_bits_of_narrow_caches():
    pool = fovea.KvPool(SPEC.replace(dtype="bf16"), 2)
    k, _ = pool.layer(0)
    assert k.dtype == "bf16" and k.bits.dtype == "uint16"
    assert np.from_dlpack(k.bits).dtype == np.uint16


def test_layer_arrays_of_mla_can_be_lent():
    spec = fovea.KvCacheSpec(layout="mla", kv_heads=1, head_dim=40, head_dim_v=32, page_size=4)
    pool = fovea.KvPool(spec, 3)
    (rows,) = pool.layer(0)
    assert rows.shape == (3, 4, 40)
    assert fovea.KvPool.lend(spec, [pool.layer(0)]).layer(0)[0].address == rows.address
    rows_of_656 = spec.replace(layout="mla_fp8_rows", dtype="fp8_e4m3", head_dim=576, head_dim_v=512)
    assert fovea.KvPool(rows_of_656, 2).layer(0)[0].shape == (2, 4, 656)
    assert fovea.KvPool.lend(rows_of_656, [(np.zeros((2, 4, 656), np.uint8),)]).pages == 2


def test_window_pool():
    spec = SPEC.replace(window=6)
    pool = fovea.WindowKvPool(spec, 4, 40)
    assert isinstance(pool, fovea.KvPool) and pool.free_pages == 3
    assert pool.map([4, 5, 6, 7, 8]) and pool.free_pages == 1
    slot_map = np.from_dlpack(pool.slot_map)
    assert slot_map[4] % 4 == 0 and slot_map[9] == -1
    assert pool.usable_prefix([1]) in (0, 4)
    assert not pool.map(np.array([12, 16], np.int64)), "one free page is not enough"
    pool.unmap(np.array([8], np.int32))
    pool.unmap_pages([1])
    pool.publish()
    assert pool.free_pages == 3
    with pytest.raises(fovea.Error, match=r"full_slots\[1\] is 'x', must be an integer"):
        pool.map([1, "x"])


def test_state_pool():
    spec = fovea.StateCacheSpec(conv_dim=6, conv_width=4, heads=2, rows=3, columns=4)
    pool = fovea.StatePool(spec, 3)
    assert str(pool.device) == "cpu"
    first, second = pool.allocate(), pool.allocate()
    assert {first, second} == {1, 2} and pool.allocate() is None and pool.free_slots == 0
    conv, state = (np.from_dlpack(array) for array in pool.layer(0))
    assert conv.shape == (3, 6, 3) and state.shape == (3, 2, 3, 4)
    state[first] = 7
    pool.copy(first, second)
    pool.publish()
    assert (state[second] == 7).all()
    pool.release(first)
    assert not pool.in_use(first) and pool.in_use(second)
    with pytest.raises(fovea.Error, match="slot"):
        pool.release(first)
    half = spec.replace(dtype="fp16")
    assert half.bytes_per_slot == spec.bytes_per_slot - 2 * 3 * 4 * 2
    assert np.from_dlpack(fovea.StatePool(half, 2).layer(0)[1]).dtype == np.float16
    with pytest.raises(fovea.Error, match="dtype is fp8_e4m3"):
        fovea.StatePool(spec.replace(dtype="fp8_e4m3"), 2)


def test_request_table():
    table = fovea.RequestTable(3, 8)
    row = table.allocate()
    table.write(row, 2, np.array([9, 10], np.int64))
    assert np.from_dlpack(table.row(row)).tolist() == [0, 0, 9, 10, 0, 0, 0, 0]
    assert np.from_dlpack(table.table).shape == (3, 8)
    assert table.take_changed(row) == 2 and table.take_changed(row) == 8
    table.mark_changed(row, 1)
    assert table.take_changed(row) == 1 and table.available == 1
    for arguments, message in (
        ((row, 7, [1, 2]), "slots has 2 entries from position 7 on, a row has 8"),
        ((row, 9, [1]), r"first is 9, must be in \[0, 8\]"),
        ((5, 0, [1]), "5"),
        ((row, 0, [2**31]), r"slots\[0\] is 2147483648"),
        ((row, 0, np.zeros(2)), "slots has dtype float64, must be int32 or int64"),
        ((row, 0, "x"), "slots is of type str, must be a list or array of integers"),
    ):
        with pytest.raises(fovea.Error, match=message):
            table.write(*arguments)
    table.release(row)
    with pytest.raises(fovea.Error):
        table.release(row)


def test_page_allocator():
    pages = fovea.PageAllocator(4, 4)
    slots = pages.extend(0, 6)
    assert len(slots) == 6 and min(slots) >= 4 and pages.free_pages == 1
    assert pages.extend(6, 7, slots[-1]) == [slots[-1] + 1]
    assert pages.extend(7, 30, slots[-1] + 1) is None and pages.allocate(2) is None
    pages.truncate(slots, 4)
    assert pages.free_pages == 2
    pages.retain(slots[0] // 4)
    assert pages.references(slots[0] // 4) == 2
    pages.release(slots[0] // 4)
    pages.release_slots(slots[:4])
    assert pages.free_pages == 3 and (pages.pages, pages.page_size) == (4, 4)
    with pytest.raises(fovea.Error, match=r"page is 9, must be in \[0, 4\)"):
        pages.references(9)


def test_prefix_cache():
    pages = fovea.PageAllocator(8, 4)
    cache = fovea.PrefixCache(pages)
    domain = fovea.PrefixDomain(model="m")
    owned = pages.allocate(2)
    tokens = np.arange(8, dtype=np.int32)
    cache.insert(domain, tokens, owned)
    hit = cache.match(domain, [*range(8), 99])
    assert hit.tokens == 8 and hit.pages == owned and hit.state_slot == -1
    assert cache.match(domain, tokens, 7).tokens == 4
    assert cache.match(domain.replace(salt="other"), tokens).tokens == 0
    for page in (*owned, *hit.pages, owned[0]):
        pages.release(page)
    assert cache.pin(domain, tokens) == 8 and cache.evict(2) == []
    cache.unpin(domain, tokens)
    assert cache.stats.pages == 2 and sorted(cache.evict(2)) == sorted(owned)
    assert cache.stats.evicted_pages == 2 and cache.clear() == [] and not cache.evict_state()
    del pages
    gc.collect()
    assert cache.match(domain, tokens).tokens == 0, "the cache keeps its allocator"
