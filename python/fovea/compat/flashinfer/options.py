# SPDX-License-Identifier: Apache-2.0
"""Options of FlashInfer that Fovea answers with a fixed rule."""

from __future__ import annotations

from typing import Any


def refuse(condition: bool, text: str) -> None:
    """Raises NotImplementedError with a text that names the argument and its value, if the condition holds."""
    if condition:
        raise NotImplementedError(text)


def position_encoding(mode: str) -> bool:
    """Returns True for ALIBI and False for NONE. Refuses ROPE_LLAMA."""
    refuse(
        mode == "ROPE_LLAMA",
        "pos_encoding_mode is ROPE_LLAMA: caches of Fovea hold rotated keys; rotate q and k before they are stored",
    )
    if mode not in ("NONE", "ALIBI"):
        raise KeyError(f"pos_encoding_mode is {mode!r}, must be NONE, ROPE_LLAMA or ALIBI")
    return mode == "ALIBI"


def takes_sink_arguments(jit_args: Any) -> bool:
    """Returns True for FlashInfer's AttentionSink variant, whose run() takes (sink, sm_scale) after the cache.

    jit_args: (uri, dtype_q, dtype_kv, dtype_o, idtype, head_dim_qk, head_dim_vo, tensor names, tensor dtypes, scalar
    names, scalar dtypes, variant name, source). Other variants are source code of kernels and are refused.
    """
    if jit_args is None:
        return False
    variant = jit_args[11] if len(jit_args) > 11 else None
    is_sink = variant == "AttentionSink" and list(jit_args[7]) == ["sink"] and list(jit_args[9]) == ["sm_scale"]
    refuse(not is_sink, f"jit_args: variant {variant!r} is source code of a kernel; accepted: AttentionSink")
    return True
