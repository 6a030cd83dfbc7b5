# SPDX-License-Identifier: Apache-2.0
"""The time that the host spends in the builder and in the layers of an attention backend, and in a whole step."""

import cProfile
import functools
import pstats
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from gpu_comparison import make_prompts
from gpu_engine import decoding
from vllm.v1.attention.backend import AttentionImpl, AttentionMetadataBuilder, MLAAttentionImpl


@contextmanager
def host_times() -> Iterator[dict[str, list[float]]]:
    """Yields [calls, microseconds of all] by name of each build() of a builder and each forward of a layer that runs
    meanwhile. Layers in a replayed graph do not run on the host."""
    times: dict[str, list[float]] = {}
    changed = []
    for base, names in (
        (AttentionMetadataBuilder, ("build",)),
        (AttentionImpl, ("forward",)),
        (MLAAttentionImpl, ("forward_mha", "forward_mqa")),
    ):
        for owner in _subclasses(base):
            for name in names:
                if name in vars(owner):
                    changed.append((owner, name, vars(owner)[name]))
                    setattr(owner, name, _timed(vars(owner)[name], f"{owner.__name__}.{name}", times))
    try:
        yield times
    finally:
        for owner, name, method in changed:
            setattr(owner, name, method)


_STEPS = 32
_FUNCTIONS = 40


def host_of_step(llm: Any, vocabulary: int, requests: int, length: int) -> dict[str, Any]:
    """Returns the milliseconds after which step() returns, of each decode step, without a profiler, and [function,
    calls of a step, microseconds of a step, of which inside the function itself] of the functions of Python that take
    the most time of their own, with one."""
    prompts = make_prompts(random.Random(3), [length] * requests, vocabulary)
    with decoding(llm, prompts, 3 * _STEPS):
        for _ in range(8):
            llm.llm_engine.step()
        torch.cuda.synchronize()
        steps = []
        for _ in range(_STEPS):
            begin = time.perf_counter()
            llm.llm_engine.step()
            steps.append((time.perf_counter() - begin) * 1e3)
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(_STEPS):
            llm.llm_engine.step()
        profile.disable()
    stats = pstats.Stats(profile).stats.items()
    rows = [
        [
            f"{file.rpartition('site-packages/')[2]}:{line} {name}",
            calls / _STEPS,
            total / _STEPS * 1e6,
            own / _STEPS * 1e6,
        ]
        for (file, line, name), (_, calls, own, total, _) in stats
    ]
    return {"step_ms": steps, "functions": sorted(rows, key=lambda row: -row[3])[:_FUNCTIONS]}


def _subclasses(owner: type) -> set[type]:
    direct = set(owner.__subclasses__())
    return direct | {each for sub in direct for each in _subclasses(sub)}


def _timed(method: Any, label: str, times: dict[str, list[float]]) -> Any:
    @functools.wraps(method)
    def timed(*arguments: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        result = method(*arguments, **options)
        entry = times.setdefault(label, [0, 0.0])
        entry[0] += 1
        entry[1] += (time.perf_counter() - begin) * 1e6
        return result

    return timed
