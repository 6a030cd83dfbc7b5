# SPDX-License-Identifier: Apache-2.0
"""The entry point of vLLM's plug-in group `vllm.general_plugins`.

This module is imported in every process that imports vLLM's plug-ins, so it imports neither torch nor Fovea's compiled
part: the classes are imported when vLLM asks for them by name.
"""

import os
from typing import Any

OVERRIDE_VARIABLE = "FOVEA_VLLM_OVERRIDE"

_MHA = "fovea.vllm.mha.MhaBackend"
_MLA = "fovea.vllm.mla.MlaBackend"
_CLASSES = {"FLASH_ATTN": _MHA, "CPU_ATTN": _MHA, "FLASHMLA": _MLA, "FLASH_ATTN_MLA": _MLA}


def register() -> None:
    """Registers Fovea as CUSTOM, and as the backends that FOVEA_VLLM_OVERRIDE names."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "fovea.vllm.plugin.CustomBackend")
    for name in overridden():
        register_backend(AttentionBackendEnum[name], _CLASSES[name])


def overridden() -> list[str]:
    """Returns the backends that FOVEA_VLLM_OVERRIDE names. Raises ValueError for a name that cannot be replaced."""
    names = [name.strip() for name in os.environ.get(OVERRIDE_VARIABLE, "").split(",") if name.strip()]
    for name in names:
        if name not in _CLASSES:
            known = ", ".join(_CLASSES)
            raise ValueError(f'{OVERRIDE_VARIABLE} names "{name}", Fovea can replace {known}')
    return names


def __getattr__(name: str) -> Any:
    """Returns the class that serves CUSTOM. vLLM has one such name for both kinds of attention, so the model that is
    being loaded decides."""
    if name != "CustomBackend":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if config is not None and config.model_config is not None and config.model_config.use_mla:
        from fovea.vllm.mla import MlaBackend

        return MlaBackend
    from fovea.vllm.mha import MhaBackend

    return MhaBackend
