# SPDX-License-Identifier: Apache-2.0
"""SGLang gets every reason against a model when it makes the backend."""

from types import SimpleNamespace

import pytest
import torch
from checkpoints import model_folder
from engines import scheduler
from fovea.sglang import plugin
from fovea.sglang.draft import DraftSteps
from layers import DIM, HEADS, KV_HEADS, Pass, Request, mha_pool, mla_pool
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, DETERMINISTIC_ATTENTION_BACKEND_CHOICES


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    folder = model_folder("llama", tmp_path_factory.mktemp("models"))
    with scheduler(folder, fovea=True, dtype="float32", context_length=160, max_total_tokens=256) as engine:
        yield engine.tp_worker.model_runner


def _layer(**options) -> RadixAttention:
    return RadixAttention(HEADS, options.pop("dim", DIM), 0.2, KV_HEADS, 0, **options)


LAYERS = {
    "cross attention": ({"is_cross_attention": True}, "cross attention is not supported"),
    "spans of images": ({"attn_type": AttentionType.DECODER_BIDIRECTIONAL}, "tokens of images see each other"),
    "windows of encoders": (
        {"attn_type": AttentionType.ENCODER_ONLY, "sliding_window_size": 4},
        "Fovea's windows look back only",
    ),
    "caps": ({"logit_cap": 30.0, "logit_capping_method": "sigmoid"}, "logit_capping_method is sigmoid, Fovea has tanh"),
    "rotation": ({"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode is ALIBI"),
}


@pytest.mark.parametrize("case", LAYERS)
def test_layers(runner, case):
    options, reason = LAYERS[case]
    with pytest.raises(NotImplementedError, match=reason):
        Pass(runner, [Request(1, 1)], 1).backend(mha_pool(torch.float32, 1), _layer(**options))


def test_models_have_every_reason(runner):
    config = SimpleNamespace(is_encoder_decoder=True, is_local_attention_model=False, context_len=160)
    pass_, pool = Pass(runner, [Request(1, 1)], 1), mha_pool(torch.float32, 1)
    with pytest.raises(NotImplementedError) as error:
        pass_.backend(pool, _layer(is_cross_attention=True), model_config=config, prefill_aware_swa=True)
    reasons = str(error.value).splitlines()[1:]
    assert [reason.split(":")[0].strip() for reason in reasons] == [
        "the model has an encoder",
        "windows that depend on the length of the prompt are not supported",
        "layer 0",
    ]


def test_reasons_of_select(runner, monkeypatch):
    monkeypatch.setenv("FOVEA_SGLANG_BACKEND", "flash")
    with pytest.raises(NotImplementedError, match="layers from 0 on: .*(\n.*)*device"):
        Pass(runner, [Request(1, 1)], 1).backend(mha_pool(torch.float32, 1), _layer())


class _OwnPool(type(mha_pool(torch.float32, 1))):
    """A pool of another layout."""


@pytest.mark.parametrize("change", ["class", "layout"])
def test_pools(runner, change):
    pool = mha_pool(torch.float32, 1)
    if change == "class":
        pool.__class__ = _OwnPool
    else:
        pool.kv_cache_layout = "vectorized_5d"
    reason = {"class": "the pool is a _OwnPool", "layout": "kv_cache_layout is vectorized_5d"}[change]
    with pytest.raises(NotImplementedError, match=reason):
        Pass(runner, [Request(1, 1)], 1).backend(pool, _layer())


def test_arguments_that_the_plug_in_does_not_know(runner):
    pass_, pool, layer = Pass(runner, [Request(1, 1)], 1), mha_pool(torch.float32, 1), _layer()
    batch, backend = pass_.forward_batch(ForwardMode.DECODE), pass_.backend(pool, layer)
    backend.init_forward_metadata(batch)
    q = torch.zeros(1, HEADS, DIM)
    with pytest.raises(NotImplementedError, match="the layer gives topk_indices, which"):
        backend.forward(q, None, None, layer, batch, topk_indices=torch.zeros(1, 4))


def test_ragged_drafts(runner):
    pass_, pool, layer = Pass(runner, [Request(1, 1)], 1), mha_pool(torch.float32, 1), _layer()
    info = SimpleNamespace(draft_token_num=1, ragged_verify_layout=object())
    batch, backend = pass_.forward_batch(ForwardMode.TARGET_VERIFY, spec_info=info), pass_.backend(pool, layer)
    backend.init_forward_metadata(batch)
    with pytest.raises(NotImplementedError, match="equal numbers of drafts"):
        backend.forward(torch.zeros(1, HEADS, DIM), None, None, layer, batch)


def test_drafts_of_several_branches(runner):
    with pytest.raises(NotImplementedError, match="speculative_eagle_topk is 4"):
        DraftSteps(runner, 4, 3)


def test_names():
    assert ATTENTION_BACKENDS["fovea"] is plugin.create
    assert ATTENTION_BACKENDS["torch_native"] is plugin.create  # FOVEA_SGLANG_OVERRIDE
    assert ATTENTION_BACKEND_CHOICES.count("fovea") == 1
    assert DETERMINISTIC_ATTENTION_BACKEND_CHOICES.count("fovea") == 1


def test_overrides(monkeypatch):
    monkeypatch.setenv(plugin.OVERRIDE_VARIABLE, "fa3, triton")
    assert plugin.overridden() == ["fa3", "triton"]
    monkeypatch.setenv(plugin.OVERRIDE_VARIABLE, "fa33")
    with pytest.raises(ValueError, match='names "fa33", Fovea can replace fa3'):
        plugin.overridden()


def test_draft_models_get_fovea(runner):
    """SGLang's factory has a closed map of backends; the plug-in adds Fovea to it."""
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    pass_ = Pass(runner, [Request(1, 1)], 1)
    drafts = pass_.backend(mha_pool(torch.float32, 1), _layer())._runner
    arguments = SimpleNamespace(
        speculative_draft_attention_backend="fovea", attention_backend="fa3", decode_attention_backend=None
    )
    factory = DraftBackendFactory(arguments, drafts, 1, 3)
    steps = factory.create_decode_backend()
    assert [backend._draft_step for backend in steps.attn_backends] == [0, 1]
    arguments.prefill_attention_backend = None
    assert type(factory.create_draft_extend_backend()).__name__ == "FoveaBackend"


def test_scales_of_latents_are_those_of_sglang(runner):
    """SGLang stores latents unscaled, whatever the layer says."""
    pool = mla_pool(torch.float8_e4m3fn, 16, 64, 16)
    layer = RadixAttention(HEADS, 80, 0.2, 1, 0, v_head_dim=64)
    layer.k_scale = torch.tensor(0.5)
    backend = Pass(runner, [Request(1, 1)], 16).backend(pool, layer)
    assert backend._scales(pool) == {}


def test_keys_of_cached_prefixes(runner):
    pass_, pool = Pass(runner, [Request(3, 3)], 1), mla_pool(torch.float32, 1, 64, 16)
    absorbed = RadixAttention(HEADS, 80, 0.2, 1, 0, v_head_dim=64)
    layer = RadixAttention(HEADS, DIM, 0.2, HEADS, 0)
    batch, backend = pass_.forward_batch(ForwardMode.EXTEND), pass_.backend(pool, absorbed, layer)
    batch.mha_return_lse = True
    backend.init_forward_metadata(batch)
    heads = torch.zeros(3, HEADS, DIM)
    with pytest.raises(NotImplementedError, match="up-projected keys of a cached prefix"):
        backend.forward(heads, heads, heads, layer, batch, save_kv_cache=False)


def test_models_of_latents_divide_passes_as_for_triton(runner):
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers
    from sglang.srt.models.deepseek_common.utils import FORWARD_ABSORB_CORE_ATTENTION_BACKENDS

    layer = RadixAttention(HEADS, 80, 0.2, 1, 0, v_head_dim=64)
    Pass(runner, [Request(1, 1)], 16).backend(mla_pool(torch.float32, 16, 64, 16), layer)
    for name in ("fovea", "torch_native"):
        assert name in FORWARD_ABSORB_CORE_ATTENTION_BACKENDS
        assert handlers.AttentionBackendRegistry.get_handler(name) is handlers.handle_attention_triton
