# SPDX-License-Identifier: Apache-2.0
"""The kernels of a decode step, by a trace."""

import random
from typing import Any

import torch
from gpu_comparison import make_prompts
from gpu_engine import decoding

_STEPS = 12


def kernels_of_step(llm: Any, vocabulary: int, requests: int, length: int) -> list[list[Any]]:
    """Returns [name, launches of a step, microseconds of a step] of each kernel of decode steps, the costliest first. A
    kernel costs the time from the end of all kernels before it to its own end, so the sum is the time of the step."""
    prompts = make_prompts(random.Random(3), [length] * requests, vocabulary)
    with decoding(llm, prompts, 2 * _STEPS):
        for _ in range(_STEPS):
            llm.llm_engine.step()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
            for _ in range(_STEPS):
                llm.llm_engine.step()
            torch.cuda.synchronize()
    return _costs([event for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA])


def _costs(events: list[Any]) -> list[list[Any]]:
    costs: dict[str, list[float]] = {}
    busy_until = None
    for event in sorted(events, key=lambda event: event.time_range.start):
        end = event.time_range.end
        if busy_until is not None:
            cost = costs.setdefault(event.name, [0, 0.0])
            cost[0] += 1
            cost[1] += max(end - busy_until, 0)
        busy_until = end if busy_until is None else max(busy_until, end)
    rows = [[name, count / _STEPS, time / _STEPS] for name, (count, time) in costs.items()]
    return sorted(rows, key=lambda row: -row[2])
