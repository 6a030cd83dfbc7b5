# SPDX-License-Identifier: Apache-2.0
"""The package `flashinfer` for FlashInfer's own tests: its attention API is fovea.compat.flashinfer.

Two groups of names are not Fovea's:
- Kernel warm-ups (flashinfer.jit and the functions gen_*) do nothing.
- single_prefill_with_kv_cache and single_decode_with_kv_cache are, in tests of other functions, the oracle that these
  are compared with. There they are plain torch in fp32 (oracle.py); `use_oracle` switches.
"""

from __future__ import annotations

import sys
from functools import wraps
from types import ModuleType
from typing import Any

import fovea.compat.flashinfer as _fovea
import torch
from fovea.compat.flashinfer import *  # noqa: F403  (the shim has every name of the module)
from fovea.compat.flashinfer import cascade, decode, mla, page, prefill

from flashinfer import oracle as _oracle

use_oracle = False
"""True while a test runs that uses the functions for one request as its oracle."""


def _switch(name: str) -> Any:
    ours, reference = getattr(_fovea, name), getattr(_oracle, name)

    @wraps(ours)
    def call(*args: Any, **options: Any) -> Any:
        return (reference if use_oracle else ours)(*args, **options)

    return call


class _Inert(ModuleType):
    """A module of warm-ups: every name is a function or a table that does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **options: []


class _Named:
    """A table whose entries are the names of its keys."""

    def __getitem__(self, key: Any) -> str:
        return str(key)


def _module(name: str, kind: type[ModuleType] = ModuleType, **names: Any) -> ModuleType:
    module = kind(f"flashinfer.{name}")
    module.__path__ = []
    module.__dict__.update(names)
    sys.modules[module.__name__] = module
    parent, _, leaf = module.__name__.rpartition(".")
    setattr(sys.modules[parent], leaf, module)
    return module


def _copy(name: str, source: ModuleType, **names: Any) -> None:
    """Makes flashinfer.NAME, with the names of a module of Fovea. Its settings stay in the module of Fovea."""
    _module(name, **({each: getattr(source, each) for each in source.__all__} | names))


def _no_nvfp4(*args: Any, **options: Any) -> Any:
    raise NotImplementedError("NVFP4 caches are not supported")


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (9, 0)


single_prefill_with_kv_cache = _switch("single_prefill_with_kv_cache")
single_decode_with_kv_cache = _switch("single_decode_with_kv_cache")


def single_prefill_with_kv_cache_return_lse(*args: Any, **options: Any) -> Any:
    return single_prefill_with_kv_cache(*args, **options, return_lse=True)


_copy("decode", decode, single_decode_with_kv_cache=single_decode_with_kv_cache)
_copy(
    "prefill",
    prefill,
    single_prefill_with_kv_cache=single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse=single_prefill_with_kv_cache_return_lse,
)
_copy("mla", mla)
_copy("page", page)
_copy("cascade", cascade)
_module("jit", _Inert, JitSpec=object)
_module("jit.attention", _Inert)
_module("jit.attention.variants", attention_sink_decl=_Named())
_module("jit.utils", filename_safe_dtype_map=_Named())
_module("quantization")
_module(
    "quantization.nvfp4_quantization_utils",
    NVFP44Over6Config=type("NVFP44Over6Config", (), {}),
    NVFP44Over6ErrMode=type("NVFP44Over6ErrMode", (), {}),
    nvfp4_e4m3_max=_no_nvfp4,
)
_module("fp4_quantization", e2m1_and_ufp8sf_scale_to_float=_no_nvfp4)
_module(
    "utils",
    GPUArchitectureError=type("GPUArchitectureError", (RuntimeError,), {}),
    get_compute_capability=_capability,
    has_flashinfer_jit_cache=lambda: True,
    is_fa3_backend_supported=lambda *args, **options: True,
    is_fa3_prefill_head_dim_supported=lambda *args, **options: True,
    is_sm90a_supported=lambda device: _capability(device)[0] == 9,
    is_sm100a_supported=lambda device: False,
    is_sm110a_supported=lambda device: False,
    round_up=lambda value, step: -(-value // step) * step,
)
for _name in (
    "nvfp4_kv_quantize",
    "nvfp4_kv_dequantize_paged",
    "nvfp4_quantize_append_paged_kv_cache",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
):
    globals()[_name] = _no_nvfp4
