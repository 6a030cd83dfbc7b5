# SPDX-License-Identifier: Apache-2.0
"""Value types, enumerations, devices and selection."""

import copy
import pickle

import fovea
import pytest

SPEC = fovea.AttentionSpec(q_heads=32, kv_heads=8, head_dim=128)
CACHE = fovea.KvCacheSpec(kv_heads=8, head_dim=128, page_size=16)
H200 = fovea.DeviceInfo(kind="cuda", name="H200", sm=90, cores=132)

VALUES = [
    SPEC,
    SPEC.replace(
        window=4,
        scores=fovea.ScoreSpec(softmax_scale=0.1, has_sinks=True),
        mla=fovea.MlaSpec(kv_lora_rank=512, rope_dim=64),
        linear=fovea.LinearSpec(key_heads=2),
        dual_chunk=fovea.DualChunk(chunk_size=64, local_size=16),
    ),
    CACHE,
    fovea.StateCacheSpec(heads=2, rows=3, columns=4),
    fovea.BatchLimits(max_requests=7),
    fovea.SamplingParams(temperature=0.5, stop=["a", "b"], stop_tokens=[3]),
    fovea.SamplingParams(logit_bias={3: 1.5, 4: -100}, min_tokens=2, json_schema='{"type": "object"}'),
    fovea.PrefixDomain(model="m", salt="s"),
    H200,
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_compare_hash_print_copy_and_pickle(value):
    again = pickle.loads(pickle.dumps(value))
    assert again == value and hash(again) == hash(value) and again is not value
    assert copy.deepcopy(value) == value
    assert value.replace() == value
    assert eval(repr(value), vars(fovea)) == value
    assert value != 1 and value is not None


COMPUTED = {"length", "row_dim", "conv_dim", "bytes_per_page", "bytes_per_slot", "device"}


def fields(value):
    """Returns the names of the fields that the constructor takes."""
    names = {name for name in dir(value) if not name.startswith("_") and name != "replace"}
    return sorted(names - COMPUTED if not isinstance(value, fovea.StateCacheSpec) else names - {"bytes_per_slot"})


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_are_immutable(value):
    for name in fields(value):
        with pytest.raises(AttributeError):
            setattr(value, name, getattr(value, name))


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_every_field_counts_for_equality(value):
    default, changed = type(value)(), 0
    for name in fields(value):
        own = getattr(value, name)
        if own == getattr(default, name):
            continue
        changed += 1
        assert default.replace(**{name: own}) != default, name
        assert hash(default.replace(**{name: own})) != hash(default), name
    assert changed > 0


def test_defaults():
    assert SPEC.head_dim_v == 128 and CACHE.head_dim_v == 128 and CACHE.layers == 1
    assert fovea.AttentionSpec(head_dim=8, head_dim_v=4).head_dim_v == 4
    assert (SPEC.kind, SPEC.scope, SPEC.mask, SPEC.q_dtype) == ("mha", "decoder", "none", "fp32")
    assert fovea.ScoreSpec(softmax_scale=0.1).softmax_scale == 0.1
    assert CACHE.bytes_per_page == 16 * 8 * 128 * 4 * 2


@pytest.mark.parametrize("name", ["bf16", "bfloat16", fovea.DType.bf16])
def test_dtypes_have_names_and_synonyms(name):
    assert fovea.AttentionSpec(q_dtype=name).q_dtype is fovea.DType.bf16


def test_enumerators_are_texts():
    assert str(fovea.DType.f8e4m3) == "fp8_e4m3" == fovea.DType.f8e4m3
    assert pickle.loads(pickle.dumps(fovea.KvOrder.hnd)) is fovea.KvOrder.hnd


def test_errors():
    with pytest.raises(fovea.Error, match="kind is 'conv', known: mha, mla") as info:
        fovea.AttentionSpec(kind="conv")
    assert info.value.code == "invalid_argument" and isinstance(info.value, RuntimeError)
    again = pickle.loads(pickle.dumps(info.value))
    assert (str(again), again.code) == (str(info.value), info.value.code)
    assert fovea.Error("text", "io").code == "io"


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: fovea.AttentionSpec(q_heads="x"), "q_heads is 'x', must be an integer"),
        (lambda: fovea.AttentionSpec(q_heads=1.5), "q_heads is 1.5, must be an integer"),
        (lambda: fovea.AttentionSpec(q_heads=2**31), r"q_heads is 2147483648, must be in \[-2147483648, 2147483647\]"),
        (lambda: fovea.AttentionSpec(has_rope=1), "has_rope is 1, must be True or False"),
        (lambda: fovea.AttentionSpec(scores={}), "scores is of type dict, must be a fovea._core.ScoreSpec"),
        (lambda: fovea.AttentionSpec(heads=1), "AttentionSpec has no field 'heads', known: kind, scope"),
        (lambda: fovea.ScoreSpec(logit_cap="x"), "logit_cap is 'x', must be a number"),
        (lambda: fovea.KvCacheSpec(dtype="int4"), "dtype is 'int4', known: fp32"),
        (lambda: fovea.KvCacheSpec(order=3), "order is 3, known: nhd, hnd"),
        (lambda: fovea.SamplingParams(seed=-1), r"seed is -1, must be in \[0, 18446744073709551615\]"),
        (lambda: fovea.SamplingParams(stop="x"), "stop is of type str, must be a list"),
        (lambda: fovea.SamplingParams(stop=[1]), r"stop\[0\] is 1, must be text"),
        (lambda: fovea.SamplingParams(logit_bias=[1]), "logit_bias is of type list, must be a dict"),
        (lambda: fovea.SamplingParams(logit_bias={"a": 1}), "a key of logit_bias is 'a', must be an integer"),
        (lambda: fovea.SamplingParams(logit_bias={1: "a"}), r"logit_bias\[1\] is 'a', must be a number"),
        (lambda: fovea.SamplingParams(json_schema={}), "json_schema is {}, must be text"),
        (lambda: fovea.Device("tpu"), "name is 'tpu', known: cpu, cuda, cuda:N"),
        (lambda: fovea.Device("cuda:-1"), "name is 'cuda:-1', known: cpu, cuda, cuda:N"),
        (lambda: fovea.ThreadPool(-1), "-1"),
        (lambda: fovea.select("mha"), "spec is of type str, must be a fovea._core.AttentionSpec"),
        (lambda: fovea.select(SPEC, CACHE, limits=1), "limits is of type int"),
        (lambda: fovea.select(SPEC, CACHE, device=1), "device is 1, must be a device or its name"),
        (lambda: fovea.select(SPEC, CACHE, threads="x"), "threads is 'x', must be an integer"),
        (lambda: fovea.select(SPEC, CACHE, backend="nothing"), "nothing"),
        (lambda: fovea.select(SPEC, CACHE, backends="cpu"), "select has no argument 'backends', known: limits"),
        (lambda: fovea.select(SPEC, CACHE, device=H200, threads=1), "threads is given, a GPU does not take it"),
    ],
)
def test_wrong_arguments_are_named(make, message):
    with pytest.raises(fovea.Error, match=message) as info:
        make()
    assert info.value.code == "invalid_argument"


def test_devices():
    cpu = fovea.devices()[0]
    assert cpu.kind == "cpu" and cpu.cores >= 1 and fovea.find_device("cpu") == cpu
    assert str(fovea.Device("cuda:3")) == "cuda:3" and fovea.Device("cuda:3").index == 3
    assert fovea.Device("cuda") == fovea.Device("cuda:0") != fovea.Device() == cpu.device
    assert len({fovea.Device(), fovea.Device("cpu"), fovea.Device("cuda:1")}) == 2
    assert pickle.loads(pickle.dumps(fovea.Device("cuda:1"))) == fovea.Device("cuda:1")
    if fovea.why_no_gpu():
        with pytest.raises(fovea.Error) as info:
            fovea.find_device("cuda")
        assert info.value.code == "unsupported"


def test_selection_tells_every_reason():
    choice = fovea.select(SPEC, CACHE, threads=1)
    assert choice.name == "cpu" and choice.workspace_bytes > 0 and not choice.graphs
    assert [c.name for c in choice.candidates if not c.reasons][0] == "cpu"
    flash = next(c for c in choice.candidates if c.name == "flash")
    assert flash.reasons[0].code == "device" and flash.reasons[0].text
    assert choice.name in choice.explain() and choice.spec == SPEC and str(choice.device) == "cpu"


def test_selection_for_a_gpu_that_is_not_here():
    spec, cache = SPEC.replace(q_dtype="bf16"), CACHE.replace(dtype="bf16")
    choice = fovea.select(spec, cache, device=H200)
    assert choice.name == "flash" and choice.graphs and str(choice.device) == "cuda:0"


def test_unsupported_needs_list_the_reasons():
    with pytest.raises(fovea.Error, match="flash") as info:
        fovea.select(SPEC, CACHE, backend="flash")
    assert info.value.code == "unsupported"
    choice = fovea.select(SPEC, CACHE, backend="prefer:flash", threads=1)
    assert choice.name == "cpu" and choice.asked == "flash" and choice.fallback


def test_backends_lists_the_table():
    names = [name for name, _ in fovea.backends()]
    assert {"cpu", "reference", "flash"} <= set(names)
