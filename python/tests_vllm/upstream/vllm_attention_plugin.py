# SPDX-License-Identifier: Apache-2.0
"""pytest plugin of run_attention_tests.py: Fovea in the place of the backends that vLLM's tests list.

It changes no test. The tests' layers are mocks that no builder can find, so each is registered before it runs. Their
models are configs of testdata, because nothing is downloaded.
"""

import functools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm.config
from fovea.vllm.metadata import MetadataBuilder
from fovea.vllm.mha import MhaImpl
from fovea.vllm.plugin import register
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.attention.backends.registry import AttentionBackendEnum

_SHAPES = Path(__file__).parents[3] / "testdata" / "shapes"
# Changes to the config of Llama 3 8B.
_MODELS: dict[str, dict[str, Any]] = {
    "meta-llama/Meta-Llama-3-8B": {},
    "microsoft/Phi-tiny-MoE-instruct": {
        "head_dim": 128,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "sliding_window": 2047,
    },
}
_ModelConfig = vllm.config.ModelConfig


def pytest_configure(config: pytest.Config) -> None:
    register()
    folder = tempfile.TemporaryDirectory()
    config.add_cleanup(folder.cleanup)
    # The tests import the name ModelConfig after this.
    vllm.config.ModelConfig = functools.partial(_model_config, Path(folder.name))


def _model_config(folder: Path, model: str, **options: Any) -> Any:
    place = folder / model.replace("/", "_")
    if not place.exists():
        place.mkdir()
        config = json.loads((_SHAPES / "llama3_8b.json").read_text()) | _MODELS[model]
        (place / "config.json").write_text(json.dumps(config), encoding="utf-8")
    options.pop("tokenizer", None)
    return _ModelConfig(model=str(place), skip_tokenizer_init=True, **options)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for module in {item.module for item in items}:
        for name in [name for name in vars(module) if name.endswith("BACKENDS_TO_TEST")]:
            getattr(module, name)[:] = [AttentionBackendEnum.CUSTOM]
        module.try_get_attention_backend = _classes
        module._test_backend_correctness = functools.partial(_only_fovea, module._test_backend_correctness)


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
        before = torch.get_default_dtype()
        torch.set_default_dtype(config.model_config.dtype)
        try:
            with set_current_vllm_config(config):
                impl = MhaImpl(**options)
        finally:
            torch.set_default_dtype(before)
        impl.forward = functools.partial(_forward, impl, impl.forward, made)
        return impl

    return make_builder, make_impl


def _forward(impl: MhaImpl, forward: Any, made: dict[str, Any], layer: Any, *tensors: Any, **options: Any) -> Any:
    layer.layer_name, layer.impl, layer.kv_cache = made["name"], impl, tensors[3]
    made["config"].compilation_config.static_forward_context[made["name"]] = layer
    return forward(layer, *tensors, **options)


@pytest.fixture(autouse=True)
def default_vllm_config() -> Iterator[VllmConfig]:
    """As in vLLM's conftest.py. Tests that do not ask for it rely on what earlier ones cached."""
    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config
