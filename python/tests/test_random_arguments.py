# SPDX-License-Identifier: Apache-2.0
"""Random arrays in every argument: each call works or raises Error, and memory outside the arrays stays as it was."""

import fovea
import numpy as np
import pytest
from reference import Case, Pass

CASE = Case([1, 5, 7], [9, 12, 7])
DTYPES = [np.float32, np.float64, np.float16, np.int32, np.int64, np.uint8, np.bool_, np.uint16]
GUARD = 4096
PATTERN = 0xA5


def guarded(rng, shape, dtype, shift):
    """Returns an array of zeros and ones inside a buffer, and the parts of the buffer before and after it."""
    size = int(np.prod(shape)) * dtype.itemsize
    buffer = np.full(size + 2 * GUARD + 8, PATTERN, np.uint8)
    start = GUARD + shift
    array = buffer[start : start + size].view(dtype).reshape(shape)
    array[...] = rng.integers(0, 2, shape)
    return array, (buffer[:start], buffer[start + size :])


def random_array(rng, shape):
    """Returns a view of a guarded buffer, and its guards. Most views fit; the others differ in shape, dtype, strides,
    alignment, or may not be written."""
    if rng.random() < 0.7:
        return guarded(rng, shape, np.dtype(np.float32), 0)
    shape = list(shape)
    for _ in range(rng.integers(0, 2)):
        change, axis = rng.integers(0, 5), rng.integers(0, len(shape))
        if change == 0:
            shape[axis] = int(rng.integers(0, 20))
        elif change == 1 and len(shape) > 1:
            del shape[axis]
        elif change == 2 and len(shape) < 5:
            shape.insert(axis, int(rng.integers(1, 3)))
    dtype = np.dtype(DTYPES[0] if rng.random() < 0.6 else rng.choice(DTYPES))
    wide = list(shape)
    wide[-1] *= 2 if rng.random() < 0.2 else 1
    shift = int(rng.integers(0, dtype.itemsize)) if rng.random() < 0.1 else 0
    array, guards = guarded(rng, wide, dtype, shift)
    if wide[-1] != shape[-1]:
        array = array[..., ::2] if rng.random() < 0.5 else array[..., : shape[-1]]
    if rng.random() < 0.1:
        array = array.swapaxes(0, -1)
    if rng.random() < 0.1:
        array = array[::-1]
    if rng.random() < 0.1:
        array.setflags(write=False)
    return array, guards


def run_and_check(call, guards):
    try:
        call()
        worked = True
    except fovea.Error as error:
        assert error.code == "invalid_argument" and str(error)
        worked = False
    for before, after in guards:
        assert (before == PATTERN).all() and (after == PATTERN).all()
    return worked


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_layers(backend):
    rng = np.random.default_rng(11)
    run = Pass(CASE, backend)
    run.run()
    shapes = {"q": (13, 4, 64), "k": (13, 2, 64), "v": (13, 2, 64), "out": (13, 4, 64), "lse": (13, 4)}
    worked = 0
    for _ in range(400):
        arrays = {name: random_array(rng, shape) for name, shape in shapes.items() if rng.random() < 0.9}
        tensors = {name: array for name, (array, _) in arrays.items()}
        call = run.backend.forward if rng.random() < 0.7 else lambda **t: run.backend.bind(**t).forward()
        worked += run_and_check(lambda f=call, t=tensors: f(**t), [guards for _, guards in arrays.values()])
    assert 0 < worked < 400
    np.testing.assert_allclose(Pass(CASE, backend).run()[0], Pass(CASE).expected()[0], atol=2e-5)


def test_batches_and_lent_pools():
    rng = np.random.default_rng(12)
    run = Pass(CASE)
    good = {
        "q_indptr": np.array([0, 1, 6, 13]),
        "kv_lens": np.array([9, 12, 7]),
        "request_rows": np.array(run.rows),
        "table": np.from_dlpack(run.table.table),
        "out_slots": np.array([s for own, q, n in zip(run.slots, CASE.q_lens, CASE.kv_lens) for s in own[n - q : n]]),
        "positions": np.array([8, *range(7, 12), *range(7)]),
    }
    planned = 0
    for _ in range(600):
        arrays = {}
        for name, array in good.items():
            if name == "positions" and rng.random() < 0.5:
                continue
            dtype = np.int64 if name == "out_slots" else np.int32
            if rng.random() < 0.1:
                dtype = rng.choice(DTYPES)
            copy = np.array(array, dtype)
            if rng.random() < 0.2 and copy.size:
                copy.flat[rng.integers(0, copy.size)] = (
                    rng.choice([0, 1, 100])
                    if dtype == np.bool_
                    else rng.choice(
                        [0, 1, 100, np.iinfo(np.int32).max] if np.dtype(dtype).itemsize >= 4 else [0, 1, 100]
                    )
                )
            if rng.random() < 0.1:
                copy = copy[: rng.integers(0, len(copy) + 1)]
            arrays[name] = copy
        mode = rng.choice(["decode", "extend", "mixed", "target_verify", "idle"])
        planned += run_and_check(lambda a=arrays, m=mode: run.backend.plan(fovea.Batch(mode=str(m), **a)), [])
    assert 0 < planned < 600
    lent = 0
    for _ in range(200):
        k, v = (random_array(rng, (9, 4, 2, 64))[0] for _ in range(2))
        lent += run_and_check(lambda k=k, v=v: fovea.KvPool.lend(run.cache, [(k, v)]), [])
    assert 0 < lent < 200
