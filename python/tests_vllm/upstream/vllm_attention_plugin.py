# SPDX-License-Identifier: Apache-2.0
"""pytest plugin of run_attention_tests.py: Fovea in the place of the backends that vLLM's tests list.

It changes no test. The tests' layers are mocks that no builder can find, so each is registered before it runs. Their
models are configs of testdata, because nothing is downloaded. MLA layers of Fovea use no prefill backend of vLLM, so
the tests that differ in it only are left out but for one, and what they make is empty.
"""

import functools
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.config
from fovea.vllm.metadata import MetadataBuilder
from fovea.vllm.mha import MhaImpl
from fovea.vllm.mla import MlaImpl, MlaMetadataBuilder
from fovea.vllm.plugin import register
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.platforms import current_platform
from vllm.v1.attention.backends.mla.prefill import (
    MLAPrefillBackend,
    MLAPrefillBackendEnum,
    register_mla_prefill_backend,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.workspace import init_workspace_manager, reset_workspace_manager

_SHAPES = Path(__file__).parents[3] / "testdata" / "shapes"
# A config of testdata for each model, with changes; None removes a key.
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "meta-llama/Meta-Llama-3-8B": ("llama3_8b", {}),
    "microsoft/Phi-tiny-MoE-instruct": (
        "llama3_8b",
        {"head_dim": 128, "num_attention_heads": 16, "num_key_value_heads": 4, "sliding_window": 2047},
    ),
    "deepseek-ai/DeepSeek-R1": (
        "deepseek_v3_8th",
        {"num_attention_heads": 128, "num_key_value_heads": 128, "quantization_config": None},
    ),
}
_MLA_BLOCK = 16
_REFUSED = "test_sliding_window_encoder_backend_correctness"  # Fovea refuses windows in encoder layers
_ModelConfig = vllm.config.ModelConfig


def pytest_configure(config: pytest.Config) -> None:
    register()
    folder = tempfile.TemporaryDirectory()
    config.add_cleanup(folder.cleanup)
    # The tests import the name ModelConfig after this.
    vllm.config.ModelConfig = _Models(Path(folder.name))


class _Models:
    """Makes a ModelConfig of testdata by the name of a model, and is a type in the annotations of modules that are
    imported later."""

    def __init__(self, folder: Path):
        self._folder = folder

    def __call__(self, model: str, **options: Any) -> Any:
        place = self._folder / model.replace("/", "_")
        if not place.exists():
            place.mkdir()
            shape, changes = _MODELS[model]
            config = json.loads((_SHAPES / f"{shape}.json").read_text()) | changes
            config = {key: value for key, value in config.items() if value is not None}
            (place / "config.json").write_text(json.dumps(config), encoding="utf-8")
        options.pop("tokenizer", None)
        return _ModelConfig(model=str(place), skip_tokenizer_init=True, **options)

    def __or__(self, other: Any) -> Any:
        return _ModelConfig | other


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if _is_left_out(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    for module in {item.module for item in items}:
        if hasattr(module, "BACKEND_BLOCK_SIZES"):
            _test_mla(module)
            continue
        for name in [name for name in vars(module) if name.endswith("BACKENDS_TO_TEST")]:
            getattr(module, name)[:] = [AttentionBackendEnum.CUSTOM]
        module.try_get_attention_backend = _classes
        module._test_backend_correctness = functools.partial(_only_fovea, module._test_backend_correctness)


def _is_left_out(item: pytest.Item) -> bool:
    prefill = item.callspec.params.get("prefill_backend", MLAPrefillBackendEnum.FLASH_ATTN)
    return item.originalname == _REFUSED or prefill is not MLAPrefillBackendEnum.FLASH_ATTN


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints what each file's tests gave, as one line."""
    counts: dict[str, Counter[str]] = {}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            counts.setdefault(Path(report.nodeid.split("::")[0]).name, Counter())[outcome] += 1
    texts = [f"{name} {', '.join(f'{n} {outcome}' for outcome, n in c.items())}" for name, c in sorted(counts.items())]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    terminalreporter.write_line(f"vLLM {vllm.__version__}, Fovea on {device}: {'; '.join(texts)}")


def _only_fovea(check: Any, batch: Any, model: str, backends: list[Any], *arguments: Any, **options: Any) -> None:
    """Leaves out FlexAttention, which the tests add for itself."""
    if AttentionBackendEnum.CUSTOM in backends:
        check(batch, model, backends, *arguments, **options)


def _classes(backend: Any) -> tuple[Any, Any]:
    """Returns a builder and an implementation as the tests take them: the layer is made last."""
    made: dict[str, Any] = {}

    def make_builder(spec: Any, layer_names: list[str], config: VllmConfig, device: torch.device) -> MetadataBuilder:
        made.update(config=config, name=layer_names[0])
        return MetadataBuilder(spec, layer_names, config, device)

    def make_impl(**options: Any) -> MhaImpl:
        config = made["config"]
        with _default_dtype(config), set_current_vllm_config(config):
            impl = MhaImpl(**options)
        impl.forward = functools.partial(_forward, impl, impl.forward, made)
        return impl

    return make_builder, make_impl


def _forward(impl: MhaImpl, forward: Any, made: dict[str, Any], layer: Any, *tensors: Any, **options: Any) -> Any:
    layer.layer_name, layer.impl, layer.kv_cache = made["name"], impl, tensors[3]
    made["config"].compilation_config.static_forward_context[made["name"]] = layer
    return forward(layer, *tensors, **options)


@contextmanager
def _default_dtype(config: VllmConfig) -> Iterator[None]:
    """Makes the dtype of the model the default, as it is when vLLM makes layers."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(config.model_config.dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _test_mla(module: Any) -> None:
    custom = AttentionBackendEnum.CUSTOM
    for name in ("BACKENDS_TO_TEST", "SPEC_DECODE_BACKENDS"):
        getattr(module, name)[:] = [custom]
    register_mla_prefill_backend(MLAPrefillBackendEnum.FLASH_ATTN, f"{__name__}.NoPrefillBackend")
    module.BACKEND_BLOCK_SIZES[custom] = _MLA_BLOCK
    if not torch.cuda.is_available():
        module.ops = SimpleNamespace(concat_and_cache_mla=_store_mla)
    module.try_get_attention_backend = lambda backend: (_make_mla_builder, _make_mla_impl)


class NoPrefillBackend(MLAPrefillBackend):
    """Stands for the backend that the tests make and Fovea's layers never call."""

    def __init__(self, **options: Any) -> None:
        pass

    @staticmethod
    def get_name() -> str:
        return "NONE"

    @classmethod
    def validate_configuration(cls, *arguments: Any) -> list[str]:
        return []

    def run_prefill_new_tokens(self, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError("Fovea's layers use no prefill backend of vLLM")

    run_prefill_context_chunk = run_prefill_new_tokens


def _store_mla(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    scale: torch.Tensor,
) -> None:
    """Does on a CPU what vLLM's kernel of that name does on a GPU."""
    rows = torch.cat([kv_c, k_pe], dim=-1)
    if kv_cache_dtype.startswith("fp8"):
        rows = (rows.float() / scale).to(torch.float8_e4m3fn).view(torch.uint8)
    kv_cache.view(-1, kv_cache.shape[-1])[slot_mapping] = rows


def _make_mla_builder(*arguments: Any) -> MlaMetadataBuilder:
    return MlaMetadataBuilder(*arguments)


def _make_mla_impl(**options: Any) -> MlaImpl:
    config = vllm.config.get_current_vllm_config()
    with _default_dtype(config):
        impl = MlaImpl(**options)
    impl.forward_mha = functools.partial(_forward_mha, config, impl.forward_mha)
    return impl


def _forward_mha(config: VllmConfig, forward: Any, *tensors: Any, **options: Any) -> None:
    """Gives the test's layer its name and its cache, as vLLM does."""
    for name, layer in config.compilation_config.static_forward_context.items():
        layer.layer_name, layer.kv_cache = name, tensors[3]
    forward(*tensors, **options)


@pytest.fixture(autouse=True)
def custom_class(request: pytest.FixtureRequest) -> None:
    """Makes CUSTOM the class of the test's file. The tests ask for it while no model is current."""
    mla = hasattr(request.module, "BACKEND_BLOCK_SIZES")
    register_backend(AttentionBackendEnum.CUSTOM, f"fovea.vllm.{'mla.MlaBackend' if mla else 'mha.MhaBackend'}")


@pytest.fixture
def dist_init(tmp_path: Path) -> Iterator[None]:
    """As in vLLM's conftest.py."""
    init_distributed_environment(1, 0, f"file://{tmp_path}/store", 0, "nccl" if torch.cuda.is_available() else "gloo")
    initialize_model_parallel(1, 1)
    yield
    cleanup_dist_env_and_memory()


@pytest.fixture
def workspace_init() -> Iterator[None]:
    """As in vLLM's conftest.py."""
    init_workspace_manager(torch.device(f"{current_platform.device_type}:0"))
    yield
    reset_workspace_manager()


@pytest.fixture(autouse=True)
def default_vllm_config() -> Iterator[VllmConfig]:
    """As in vLLM's conftest.py. Tests that do not ask for it rely on what earlier ones cached."""
    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config
