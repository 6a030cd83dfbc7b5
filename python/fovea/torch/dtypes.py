# SPDX-License-Identifier: Apache-2.0
"""Names of element types and devices in torch and in Fovea."""

import torch

_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}


def dtype_name(dtype: torch.dtype) -> str:
    """Returns Fovea's name of a torch dtype: "bf16" for torch.bfloat16."""
    try:
        return _NAMES[dtype]
    except KeyError:
        raise TypeError(f"dtype is {dtype}, Fovea has {', '.join(str(known) for known in _NAMES)}") from None


def device_name(device: torch.device) -> str:
    """Returns Fovea's name of a torch device: "cuda:0" for torch.device("cuda", 0)."""
    if device.type not in ("cpu", "cuda"):
        raise TypeError(f"device is {device}, Fovea has cpu and cuda")
    return "cpu" if device.type == "cpu" else f"cuda:{indexed_device(device).index}"


def indexed_device(device: torch.device) -> torch.device:
    """Returns the device as tensors name it: the current GPU if its index is missing."""
    if device.index is None and device.type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return device
