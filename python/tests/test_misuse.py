# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments of batches and layers. Each error names the argument, its value and the limit."""

import ctypes

import fovea
import numpy as np
import pytest
from reference import Case, Pass

CASE = Case([1, 5, 7], [9, 12, 7])


@pytest.fixture(scope="module")
def run():
    made = Pass(CASE)
    made.run()
    return made


def good(run):
    rows = run.rows_of(CASE.q_lens, CASE.kv_lens)
    return {"q": run.q, "k": run.k[rows], "v": run.v[rows], "out": np.zeros((13, 4, 64), np.float32)}


def read_only(array):
    copy = array.copy()
    copy.setflags(write=False)
    return copy


def unaligned(shape):
    count = int(np.prod(shape)) * 4
    return np.zeros(count + 1, np.uint8)[1:].view(np.float32).reshape(shape)


class Lying:
    """An array whose library fails."""

    def __dlpack__(self, **_):
        raise ValueError("no export today")

    def __dlpack_device__(self):
        return (1, 0)


class NoCapsule(Lying):
    def __dlpack__(self, **_):
        return 7


class CudaCapsule:
    """Exports memory of the CPU as that of a GPU, which is never read."""

    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return (2, 0)

    def __dlpack__(self, stream=None, **_):
        capsule = self.array.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        address = pointer(capsule, b"dltensor")
        ctypes.cast(address + 8, ctypes.POINTER(ctypes.c_int32))[0] = 2  # DLTensor::device::kind
        return capsule


LAYERS = {
    "q is no array": ({"q": 3}, "q is of type int, must be an array that speaks DLPack"),
    "q is a list": ({"q": [1.0]}, "q is of type list, must be an array that speaks DLPack"),
    "q of float64": (lambda t: {"q": t["q"].astype(np.float64)}, "q has dtype float64, must be fp32"),
    "k of fp16": (lambda t: {"k": t["k"].astype(np.float16)}, "k has dtype fp16, must be fp32"),
    "k of int32": (lambda t: {"k": t["k"].view(np.int32)}, "k has dtype int32, must be fp32"),
    "q of 2 axes": (
        lambda t: {"q": t["q"].reshape(13, 256)},
        r"q has shape \[13, 256\], must be \[tokens, 4, 64\]",
    ),
    "q of 6 axes": (lambda t: {"q": t["q"].reshape(13, 1, 1, 1, 4, 64)}, "q has 6 axes, at most 5"),
    "heads of q": (lambda t: {"q": t["q"][:, :3]}, r"q has shape \[13, 3, 64\], must be \[tokens, 4, 64\]"),
    "width of v": (lambda t: {"v": t["v"][:, :, :32]}, r"v has shape \[13, 2, 32\], must be \[tokens, 2, 64\]"),
    "rows of q": (lambda t: {"q": t["q"][:12]}, "q has 12 rows, the planned batch has 13 tokens"),
    "rows of out": (lambda t: {"out": t["out"][:1]}, "out has 1 rows, the planned batch has 13 tokens"),
    "stride of q": (
        lambda t: {"q": np.repeat(t["q"], 2, axis=2)[:, :, ::2]},
        "q has a stride of 2 elements along its last axis, must be 1",
    ),
    "broadcast q": (
        lambda t: {"q": np.broadcast_to(t["q"][:, :, :1], (13, 4, 64))},
        "q has a stride of 0 along its last axis of 64, must be 1",
    ),
    "broadcast out": (
        lambda t: {"out": np.lib.stride_tricks.as_strided(t["out"], (13, 4, 64), (0, 256, 4))},
        "out",
    ),
    "alignment of q": ({"q": unaligned((13, 4, 64))}, "q is at 0x"),
    "read-only out": (lambda t: {"out": read_only(t["out"])}, "out is read-only, must be writable"),
    "out is missing": ({"out": None}, "out is null"),
    "v is missing": ({"v": None}, "v is"),
    "nothing": ({"q": None, "k": None, "v": None, "out": None}, "q is null and there is no k to store"),
    "shape of lse": ({"lse": np.zeros((13, 3), np.float32)}, r"lse has shape \[13, 3\], must be \[tokens, q_heads\]"),
    "dtype of lse": ({"lse": np.zeros((13, 4))}, "lse has dtype float64, must be fp32"),
    "stride of lse": ({"lse": np.zeros((4, 13), np.float32).T}, r"lse of shape \[13, 4\] is not dense, must be"),
    "read-only lse": ({"lse": read_only(np.zeros((13, 4), np.float32))}, "lse is read-only"),
    "sinks without the spec": ({"sinks": np.zeros(4, np.float32)}, "sinks"),
    "sinks of 3 heads": ({"sinks": np.zeros(3, np.float32)}, r"sinks has shape \[3\], must be \[q_heads\]"),
    "slopes without the spec": ({"alibi_slopes": np.zeros(4, np.float32)}, "alibi_slopes"),
    "rope of another type": ({"rope": 1}, "rope is of type int, must be RotaryTensors"),
    "latent of another kind": ({"latent": np.zeros(1)}, "latent is given, layers of kind mha do not take it"),
    "mixed of another kind": ({"mixed": np.zeros(1)}, "mixed is given, layers of kind mha do not take it"),
    "q_scale without fp8": ({"q_scale": np.zeros(1, np.float32)}, "q_scale"),
    "shape of q_scale": (
        {"q_scale": np.zeros((13, 3), np.float32)},
        r"q_scale has shape \[13, 3\], must be \[1\], \[tokens\] or \[tokens or 1, 4 or 1\]",
    ),
    "save_kv of another type": ({"save_kv": 1}, "save_kv is 1, must be True or False"),
    "layer": ({"layer": 1}, "layer is 1"),
    "negative layer": ({"layer": -1}, "layer is -1"),
    "layer of another type": ({"layer": "x"}, "layer is 'x', must be an integer"),
    "unknown argument": ({"queries": 1}, "forward has no argument 'queries', known: q, k, v"),
    "stream of another type": ({"stream": "x"}, "stream is 'x', must be an address or have cuda_stream"),
    "failing export": ({"q": Lying()}, "q: its library failed: ValueError: no export today"),
    "no capsule": ({"q": NoCapsule()}, "q: __dlpack__ returned of type int, must be a DLPack capsule"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(run, name):
    changes, message = LAYERS[name]
    run.backend.plan(run.batch(CASE.q_lens, CASE.kv_lens, "mixed"))
    tensors = good(run)
    tensors.update(changes(tensors) if callable(changes) else changes)
    with pytest.raises(fovea.Error, match=message) as info:
        run.backend.forward(**tensors)
    assert info.value.code == "invalid_argument"
    run.backend.forward(**good(run))  # the plan and the backend are as before


def test_bind_checks_too(run):
    with pytest.raises(fovea.Error, match="q has dtype float64, must be fp32"):
        run.backend.bind(q=np.zeros((13, 4, 64)))
    with pytest.raises(fovea.Error, match="stream is given, bind"):
        run.backend.bind(stream=0)
    bound = run.backend.bind(q=run.q[:1], out=np.zeros((1, 4, 64), np.float32), save_kv=False)
    run.backend.plan(run.batch(CASE.q_lens, CASE.kv_lens, "mixed"))
    with pytest.raises(fovea.Error, match="q has 1 rows, the planned batch has 13 tokens"):
        bound.forward()


def good_batch(run):
    return {
        "mode": "mixed",
        "q_indptr": np.array([0, 1, 6, 13], np.int32),
        "kv_lens": np.array([9, 12, 7], np.int32),
        "request_rows": np.array(run.rows, np.int32),
        "table": run.table,
        "out_slots": np.array([s for own, q, n in zip(run.slots, CASE.q_lens, CASE.kv_lens) for s in own[n - q : n]]),
    }


BATCHES = {
    "mode": ({"mode": "prefill"}, "mode is 'prefill', known: idle, decode, extend"),
    "no mode": ({"mode": None}, "mode is missing"),
    "q_indptr of int64": ({"q_indptr": np.zeros(4, np.int64)}, "q_indptr has dtype int64, must be int32"),
    "q_indptr is no array": ({"q_indptr": 5}, "q_indptr is of type int, must be an array"),
    "kv_lens of floats": ({"kv_lens": np.zeros(3, np.float32)}, "kv_lens has dtype fp32, must be int32"),
    "kv_lens of 2 axes": ({"kv_lens": np.zeros((3, 1), np.int32)}, r"kv_lens has shape \[3, 1\], must be \[count\]"),
    "strided kv_lens": ({"kv_lens": np.zeros(6, np.int32)[::2]}, r"kv_lens of shape \[3\] is not dense, must be"),
    "unaligned kv_lens": (
        {"kv_lens": np.zeros(13, np.uint8)[1:].view(np.int32)},
        "kv_lens is at 0x.*, must be aligned to 4 bytes",
    ),
    "out_slots of int32": ({"out_slots": np.zeros(13, np.int32)}, "out_slots has dtype int32, must be int64"),
    "table of 1 axis": ({"table": np.zeros(4, np.int32)}, r"table has shape \[4\], must be \[rows, stride\]"),
    "table of int64": ({"table": np.zeros((4, 9), np.int64)}, "table has dtype int64, must be int32"),
    "pages of a RequestTable": ({"entry_tokens": 4}, "entry_tokens is 4, a RequestTable has entries of 1"),
    "entry_tokens": ({"entry_tokens": "x"}, "entry_tokens is 'x', must be an integer"),
    "requests": ({"requests": 2**40}, "requests is 1099511627776, must be in"),
    "unknown argument": ({"block_table": 1}, "Batch has no argument 'block_table', known: mode, requests"),
    "prefix_written": ({"prefix_written": 1}, "prefix_written is 1, must be True or False"),
    "two devices": (
        {"positions": CudaCapsule(np.zeros(13, np.int32))},
        "positions is on cuda:0, must be on cpu",
    ),
    "host_q_lens elsewhere": (
        {"host_q_lens": CudaCapsule(np.zeros(3, np.int32))},
        "host_q_lens is on cuda:0, must be on cpu",
    ),
}


@pytest.mark.parametrize("name", BATCHES)
def test_batches(run, name):
    changes, message = BATCHES[name]
    with pytest.raises(fovea.Error, match=message) as info:
        fovea.Batch(**{**good_batch(run), **changes})
    assert info.value.code == "invalid_argument"


# Only plan() can tell these.
PLANS = {
    "q_indptr is not monotone": ({"q_indptr": np.array([0, 6, 1, 13], np.int32)}, r"q_indptr\[2\]"),
    "short kv_lens": ({"kv_lens": np.array([9, 12], np.int32), "requests": 3}, "kv_lens"),
    "too many tokens": ({"tokens": 99, "out_slots": np.zeros(99, np.int64)}, "tokens"),
    "long request": ({"kv_lens": np.array([9, 99, 7], np.int32)}, "kv_len is 99"),
    "row outside the table": ({"request_rows": np.array([1, 2, 9], np.int32)}, r"request_rows\[2\] is 9"),
    "slot outside the pool": ({"out_slots": np.full(13, 999, np.int64)}, r"out_slots\[0\] is 999"),
    "no table": ({"table": None}, "table"),
}


@pytest.mark.parametrize("name", PLANS)
def test_plans(run, name):
    changes, message = PLANS[name]
    with pytest.raises(fovea.Error, match=message):
        run.backend.plan(fovea.Batch(**{**good_batch(run), **changes}))
    with pytest.raises(fovea.Error, match="plan"):
        run.backend.forward(**good(run))
    run.backend.plan(fovea.Batch(**good_batch(run)))
    run.backend.forward(**good(run))


def test_batch_of_another_device(run):
    arrays = {"q_indptr": CudaCapsule(np.arange(4, dtype=np.int32)), "tokens": 3}
    batch = fovea.Batch(mode="decode", **arrays)
    assert str(batch.device) == "cuda:0" and batch.requests == 3
    with pytest.raises(fovea.Error, match="the batch is on cuda:0, the backend on cpu"):
        run.backend.plan(batch)
    with pytest.raises(fovea.Error, match="tokens is missing: on a GPU"):
        fovea.Batch(mode="extend", q_indptr=arrays["q_indptr"])
    with pytest.raises(fovea.Error, match="q is on cuda:0, must be on cpu"):
        run.backend.forward(**{**good(run), "q": CudaCapsule(run.q)})


def test_reserve_and_create(run):
    limits = run.limits
    for workspace, message in (
        (np.zeros(64, np.uint8), "workspace"),
        (3, "workspace is of type int"),
        (np.zeros(0, np.uint8), "workspace is empty, must have [0-9]+ bytes"),
        (read_only(np.zeros(64, np.uint8)), "workspace is read-only"),
        (np.zeros((64, 2), np.uint8)[:, 0], r"workspace of shape \[64\] is not dense"),
    ):
        with pytest.raises(fovea.Error, match=message):
            run.backend.reserve(limits, workspace)
    run.backend.reserve(limits)
    with pytest.raises(fovea.Error, match="limits is of type int"):
        run.backend.workspace_bytes(3)
    choice = fovea.select(run.spec, run.cache, threads=1)
    with pytest.raises(fovea.Error, match="kv is of type int, must be a KvPool"):
        choice.create(3)
    with pytest.raises(fovea.Error, match="kv is null"):
        choice.create()
    with pytest.raises(fovea.Error, match="batch is of type int, must be a Batch"):
        run.backend.plan(3)


def test_small_workspace_tells_the_bytes(run):
    with pytest.raises(fovea.Error, match=str(run.backend.workspace_bytes(run.limits))) as info:
        run.backend.reserve(run.limits, np.zeros(1, np.uint8))
    assert info.value.code == "workspace_too_small"
    run.backend.reserve(run.limits)


def test_merger():
    with pytest.raises(fovea.Error, match="heads is missing"):
        fovea.StateMerger(dtype="fp32", dim=8)
    with pytest.raises(fovea.Error, match="dtype is 'int4'"):
        fovea.StateMerger(dtype="int4", heads=2, dim=8)
    merger = fovea.StateMerger(dtype="fp32", heads=2, dim=8, threads=1)
    out, lse = np.zeros((3, 2, 8), np.float32), np.zeros((3, 2), np.float32)
    cases = [
        ((out[:, :1], lse, out, lse), {}, r"out has shape \[3, 1, 8\], must be \[tokens, 2, 8\]"),
        ((out, lse[:2], out.copy(), lse.copy()), {}, "lse has 2 rows, must have 3"),
        ((out, lse, out.astype(np.float64), lse), {}, "part_out has dtype float64, must be fp32"),
        ((out, lse, out.copy(), lse.T.copy()), {}, "part_lse has shape"),
        ((read_only(out), lse, out, lse), {}, "out is read-only"),
        ((out, lse, out.copy(), lse.copy()), {"tokens": 4}, "out has 3 rows, must have 4"),
        ((out, lse, out.copy(), lse.copy()), {"tokens": -1}, "tokens is -1, must not be negative"),
        ((out, lse, out, lse), {}, "shares memory"),
    ]
    for arrays, options, message in cases:
        with pytest.raises(fovea.Error, match=message):
            merger.merge(*arrays, **options)


def test_rope_arrays():
    table, positions = np.zeros((8, 4), np.float32), np.zeros(3, np.int32)
    for changes, message in (
        ({"sin": np.zeros((8, 3), np.float32)}, r"sin has shape \[8, 3\]"),
        ({"cos": np.zeros(8, np.float32)}, r"cos has shape \[8\], must be \[max_positions, rotary_dim / 2\]"),
        ({"cos": np.zeros((8, 4))}, "cos has dtype float64, must be fp32"),
        ({"positions": np.zeros(3, np.int64)}, "positions has dtype int64, must be int32"),
        ({"interleaved": 1}, "interleaved is 1, must be True or False"),
    ):
        with pytest.raises(fovea.Error, match=message):
            fovea.RotaryTensors(**{"cos": table, "sin": table, "positions": positions, **changes})
