# SPDX-License-Identifier: Apache-2.0
"""Arrays, workspaces and pools of threads that outlive the call that made them."""

import threading
from collections.abc import Callable
from functools import cache

import torch

import fovea
from fovea.torch.dtypes import indexed_device

# Earlier, shorter arrays stay, because captured graphs hold their addresses.
_consecutive: dict[torch.device, list[torch.Tensor]] = {}
_spans: dict[tuple[torch.device, int], torch.Tensor] = {}


def current_stream(device: torch.device) -> tuple[int, bool]:
    """Returns the address of a device's current stream, and whether a CUDA graph is being captured on it."""
    if device.type != "cuda":
        return 0, False
    return torch._C._cuda_getCurrentRawStream(device.index), torch.cuda.is_current_stream_capturing()


def thread_pool() -> fovea.ThreadPool:
    """Returns a pool of as many threads as torch has now, the same for equal numbers."""
    return _pool(torch.get_num_threads())


@cache
def _pool(threads: int) -> fovea.ThreadPool:
    return fovea.ThreadPool(threads)


def allocate(make: Callable[[], torch.Tensor], device: torch.device) -> torch.Tensor:
    """Returns make(), in memory of no CUDA graph. It must not be called during a capture.

    While torch.compile warms a graph up, allocations of its thread go to the pool of that graph, which must contain
    nothing that lasts. So another thread allocates, on the same stream.
    """
    if device.type != "cuda":
        return make()
    stream = torch.cuda.current_stream(device)
    made: list[torch.Tensor] = []
    failures: list[Exception] = []

    def run() -> None:
        try:
            with torch.cuda.stream(stream):
                made.append(make())
        except Exception as failure:
            failures.append(failure)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return made[0]


def consecutive(count: int, device: torch.device) -> torch.Tensor:
    """Returns 0, 1, ... count - 1 as int32 on the device. The array must not be written."""
    device = indexed_device(device)
    arrays = _consecutive.setdefault(device, [])
    if not arrays or arrays[-1].shape[0] < count:
        size = max(1 << (count - 1).bit_length(), 1024)
        array = _shared(lambda: torch.arange(size, dtype=torch.int32, device=device), device)
        if array is None:  # during a capture: memory of its graph
            return torch.arange(count, dtype=torch.int32, device=device)
        arrays.append(array)
    return arrays[-1][:count]


def span(tokens: int, device: torch.device) -> torch.Tensor:
    """Returns 0, tokens as int32 on the device: q_indptr of one request. The array must not be written."""
    array = _spans.get((device, tokens))
    if array is not None:
        return array

    def make() -> torch.Tensor:
        return torch.arange(0, tokens + 1, tokens, dtype=torch.int32, device=device)

    array = _shared(make, device)
    if array is None:
        return make()
    _spans[(device, tokens)] = array
    return array


def _shared(make: Callable[[], torch.Tensor], device: torch.device) -> torch.Tensor | None:
    """Returns make() in memory that every stream can read from now on; None during a capture."""
    if current_stream(device)[1]:
        return None
    array = allocate(make, device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return array
