# SPDX-License-Identifier: Apache-2.0
"""Fovea's specs of the caches and layers of serving engines, and Fovea's reasons against a configuration."""

from collections.abc import Iterable

import torch

import fovea
from fovea.torch import dtype_name

_CACHE_DTYPES = {
    "float16": "fp16",
    "bfloat16": "bf16",
    "fp8": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
}
CACHE_DTYPES = ["auto", *_CACHE_DTYPES]
"""The cache types of serving engines that Fovea has."""

_FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def cache_dtype(kv_cache_dtype: str | None, dtype: torch.dtype) -> str:
    """Returns Fovea's name of a cache type of vLLM. "auto" is the model's `dtype`."""
    if kv_cache_dtype in (None, "auto"):
        return dtype_name(dtype)
    if kv_cache_dtype not in _CACHE_DTYPES:
        raise NotImplementedError(f"kv_cache_dtype {kv_cache_dtype}: Fovea has {', '.join(CACHE_DTYPES)}")
    return _CACHE_DTYPES[kv_cache_dtype]


def typed_cache(cache: torch.Tensor, kv_cache_dtype: str | None) -> torch.Tensor:
    """Returns an fp8 cache with its type; vLLM hands it over as bytes. Other caches are returned as they are."""
    fp8 = _FP8.get(_CACHE_DTYPES.get(kv_cache_dtype or "", ""))
    return cache if fp8 is None or cache.dtype == fp8 else cache.view(fp8)


def cache_scale(dtype: str, scale: torch.Tensor | None = None) -> str:
    """Returns the kind of scale of a cache, by the layer's tensor of scales if it is known."""
    if not dtype.startswith("fp8"):
        return "none"
    return "per_tensor" if scale is None or scale.numel() == 1 else "per_head"


def mla_spec(
    widths: fovea.MlaSpec, heads: int, scale: float, dtype: torch.dtype, *, batch_invariant: bool
) -> fovea.AttentionSpec:
    """Returns the spec of MLA layers whose queries arrive as the model made them."""
    return fovea.AttentionSpec(
        kind="mla",
        q_heads=heads,
        kv_heads=1,
        q_dtype=dtype_name(dtype),
        batch_invariant=batch_invariant,
        scores=fovea.ScoreSpec(softmax_scale=scale),
        mla=widths,
    )


def mla_cache_spec(widths: fovea.MlaSpec, dtype: str, page_size: int) -> fovea.KvCacheSpec:
    """Returns the spec of a cache of latents and rotary keys of one layer."""
    return fovea.KvCacheSpec(
        layout="mla",
        dtype=dtype,
        scale=cache_scale(dtype),
        kv_heads=1,
        head_dim=widths.row_dim,
        head_dim_v=widths.kv_lora_rank,
        page_size=page_size,
    )


def reasons(
    spec: fovea.AttentionSpec, cache: fovea.KvCacheSpec | None, device: fovea.DeviceInfo | str, wish: str
) -> list[str]:
    """Returns why no backend of Fovea serves the layers. Empty: one does."""
    try:
        fovea.select(spec, cache, limits=fovea.BatchLimits(max_encoder_len=1), device=device, backend=wish)
    except fovea.Error as error:
        return _relevant(str(error).splitlines()) if error.code == "unsupported" else [str(error)]
    return []


def _relevant(lines: Iterable[str]) -> list[str]:
    """Returns the reasons of backends that fit the device and the kind of attention; all, if there is none."""
    rejections: dict[str, list[str]] = {}
    everything = []
    name = ""
    for line in lines:
        everything.append(line.strip())
        if line.endswith(": rejected"):
            name = line.removesuffix(": rejected")
            rejections[name] = []
        elif line.startswith("  ") and name:
            rejections[name].append(line.strip())
    elsewhere = ("device:", "kind:", "kv_layout:", "not_built:")
    fitting = {
        name: texts
        for name, texts in rejections.items()
        if texts and not any(text.startswith(elsewhere) for text in texts)
    }
    return [f"Fovea's {name}: {text}" for name, texts in fitting.items() for text in texts] or everything
