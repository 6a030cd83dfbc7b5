# SPDX-License-Identifier: Apache-2.0
"""The library of torch ops named fovea."""

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("fovea", "DEF")


def define(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Defines an op for CPU and CUDA tensors; `fake` returns its results for tensors without data."""
    name = schema[: schema.index("(")]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, implementation, key)
    torch.library.register_fake(f"fovea::{name}", fake, lib=_LIBRARY)


def refuse_gradients(*tensors: torch.Tensor | None) -> None:
    """Raises NotImplementedError if a result would need a backward pass."""
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise NotImplementedError("Fovea has no backward pass: detach the inputs, or run under torch.no_grad()")
