# SPDX-License-Identifier: Apache-2.0
"""vLLM's question whether a configuration is served is answered with Fovea's reasons."""

import importlib
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import get_args

import fovea
import pytest
import torch
from checkpoints import model_folder
from fovea.vllm import plugin, specs
from fovea.vllm.mha import MhaBackend
from fovea.vllm.mla import MlaBackend
from vllm.config import set_current_vllm_config
from vllm.config.cache import CacheDType
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
QUESTION = {
    "head_size": 64,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "auto",
    "block_size": 16,
    "use_mla": False,
    "has_sink": False,
    "use_sparse": False,
    "use_mm_prefix": False,
    "use_per_head_quant_scales": False,
    "device_capability": None,
    "attn_type": AttentionType.DECODER,
    "use_non_causal": False,
    "use_batch_invariant": False,
    "use_kv_connector": False,
}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = model_folder("llama", tmp_path_factory.mktemp("models"))
    return EngineArgs(model=str(folder), dtype="bfloat16", max_model_len=128).create_engine_config()


@pytest.fixture
def hopper(monkeypatch):
    device = fovea.DeviceInfo(kind="cuda", sm=90, cores=132)
    monkeypatch.setattr(specs, "device_of_platform", lambda capability: device)


def _reasons(config, backend=MhaBackend, **changes):
    with set_current_vllm_config(config):
        return backend.validate_configuration(**(QUESTION | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"has_sink": True},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "fp8", "use_per_head_quant_scales": True},
        {"attn_type": AttentionType.ENCODER_ONLY},
        {"attn_type": AttentionType.ENCODER_DECODER},
        {"use_non_causal": True},
        {"use_batch_invariant": True},
        {"block_size": None},
    ],
)
def test_accepted(config, hopper, changes):
    assert _reasons(config, **changes) == []


@pytest.mark.parametrize("kv_cache_dtype", get_args(CacheDType))
def test_the_listed_cache_types_are_those_accepted(config, hopper, kv_cache_dtype):
    """vLLM and its own tests read the list of a backend, too."""
    refused = [reason for reason in _reasons(config, kv_cache_dtype=kv_cache_dtype) if "kv_cache_dtype" in reason]
    assert (not refused) == (kv_cache_dtype in MhaBackend.supported_kv_cache_dtypes)
    assert MlaBackend.supported_kv_cache_dtypes == MhaBackend.supported_kv_cache_dtypes


def test_reasons_are_those_of_select(config, hopper):
    text = "a head of 72 fp8_e5m2 values has 72 bytes, accepted: multiples of 16"
    reasons = _reasons(config, head_size=72, kv_cache_dtype="fp8_e5m2")
    assert reasons == [f"Fovea's flash: head_dim: {text}", f"Fovea's portable: head_dim: {text}"]
    spec = fovea.AttentionSpec(q_heads=4, kv_heads=2, head_dim=72, q_dtype="bf16")
    cache = fovea.KvCacheSpec(dtype="fp8_e5m2", scale="per_tensor", kv_heads=2, head_dim=72, page_size=16)
    with pytest.raises(fovea.Error, match=text):
        fovea.select(spec, cache, device=fovea.DeviceInfo(kind="cuda", sm=90, cores=132))


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"use_mla": True}, "the model uses MLA"),
        ({"use_sparse": True}, "indexer"),
        ({"use_mm_prefix": True}, "spans"),
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype nvfp4"),
        ({"use_dcp": True}, "decode context parallelism"),
        ({"use_something_new": True}, "vLLM asks for use_something_new"),
    ],
)
def test_refused(config, hopper, changes, reason):
    reasons = _reasons(config, **changes)
    assert len(reasons) == 1
    assert reason in reasons[0]


@pytest.fixture
def cuda(monkeypatch, hopper):
    if "vllm.platforms.cuda" not in sys.modules:
        # vLLM for CPUs has no CUDA kernels; the platform imports them, and the test calls none.
        monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", ModuleType("vllm._C_stable_libtorch"))
    platform = importlib.import_module("vllm.platforms.cuda").CudaPlatformBase
    monkeypatch.setattr(platform, "get_device_capability", classmethod(lambda cls, device_id=0: DeviceCapability(9, 0)))
    return platform


def _choose(platform, config, **changes):
    options = {name: value for name, value in (QUESTION | changes).items() if name != "device_capability"}
    with set_current_vllm_config(config):
        plugin.register()
        return platform.get_attn_backend_cls(AttentionBackendEnum.CUSTOM, AttentionSelectorConfig(**options), 4)


def test_cuda_platform_takes_custom(config, cuda):
    assert _choose(cuda, config) == "fovea.vllm.mha.MhaBackend"


def test_error_of_the_cuda_platform_has_the_reasons(config, cuda):
    with pytest.raises(ValueError, match="Fovea's flash: head_dim: a head of 72 fp8_e5m2 values has 72 bytes"):
        _choose(cuda, config, head_size=72, kv_cache_dtype="fp8_e5m2")


def test_mla_backend_refuses_other_models(config, hopper):
    assert "no MLA" in _reasons(config, MlaBackend)[0]


def test_custom_is_the_class_that_the_model_needs(config, monkeypatch):
    plugin.register()
    with set_current_vllm_config(config):
        assert AttentionBackendEnum.CUSTOM.get_class() is MhaBackend
    monkeypatch.setattr(type(config.model_config), "use_mla", True)
    with set_current_vllm_config(config):
        assert AttentionBackendEnum.CUSTOM.get_class() is MlaBackend


def test_overrides(monkeypatch):
    monkeypatch.setenv(plugin.OVERRIDE_VARIABLE, "FLASH_ATTN, FLASHMLA")
    try:
        plugin.register()
        assert AttentionBackendEnum.FLASH_ATTN.get_class() is MhaBackend
        assert AttentionBackendEnum.FLASHMLA.get_class() is MlaBackend
    finally:
        AttentionBackendEnum.FLASH_ATTN.clear_override()
        AttentionBackendEnum.FLASHMLA.clear_override()
    monkeypatch.setenv(plugin.OVERRIDE_VARIABLE, "FLASH_ATN")
    with pytest.raises(ValueError, match='names "FLASH_ATN", Fovea can replace FLASH_ATTN'):
        plugin.register()


def test_package_names_the_entry_point():
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {"fovea": "fovea.vllm.plugin:register"}
