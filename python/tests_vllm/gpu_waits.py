# SPDX-License-Identifier: Apache-2.0
"""Calls in which the host waits for the GPU, by a trace of the builder and of the layers."""

import functools
import json
import random
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from gpu_comparison import make_prompts

_STEPS = 12
_WAITING = re.compile(r"Synchronize|Memcpy(?!.*Async)|(Malloc|Free|HostAlloc)$")
_SYNC = re.compile(r"Sync")  # "Stream Wait Event" is a wait of the GPU
_RANGES = {"fovea build", "fovea forward"}


def waits_of_passes(llm: Any, vocabulary: int) -> dict[str, Any]:
    """Traces passes with prompts, which run layer by layer, and decode steps. Returns what waits_in_ranges() finds."""
    import torch
    from fovea.serving import layer_group
    from fovea.vllm import metadata
    from gpu_engine import decoding

    owners = [(metadata.MetadataBuilder, "build"), (layer_group.LayerGroup, "forward")]
    methods = [getattr(owner, name) for owner, name in owners]
    for owner, name in owners:
        setattr(owner, name, _marked(getattr(owner, name), f"fovea {name}"))
    prompts = make_prompts(random.Random(5), [700, 90, 1], vocabulary)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    waits = torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=True)
    try:
        with decoding(llm, prompts, 2 * _STEPS):  # the first passes may load kernels
            llm.llm_engine.step()
        profile = torch.profiler.profile(activities=activities, experimental_config=waits)
        with profile as trace, decoding(llm, prompts, 2 * _STEPS):
            for _ in range(_STEPS):
                llm.llm_engine.step()
    finally:
        for (owner, name), method in zip(owners, methods, strict=True):
            setattr(owner, name, method)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        return waits_in_ranges(json.loads(path.read_text())["traceEvents"])


def _marked(method: Any, label: str) -> Any:
    import torch

    @functools.wraps(method)
    def marked(*arguments: Any, **options: Any) -> Any:
        with torch.profiler.record_function(label):
            return method(*arguments, **options)

    return marked


def waits_in_ranges(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the number of each range of Fovea's, the calls of CUDA inside of them by name, those of them that wait,
    and the waiting calls elsewhere, which show that the trace has such calls."""
    complete = [event for event in events if event.get("ph") == "X"]
    ranges = [event for event in complete if event["name"] in _RANGES and event.get("cat") == "user_annotation"]
    copies_to_host = {event["args"].get("correlation") for event in complete if event["name"].startswith("Memcpy DtoH")}
    inside: Counter[str] = Counter()
    waiting: Counter[str] = Counter()
    elsewhere: Counter[str] = Counter()
    for event in complete:
        if event.get("cat") not in ("cuda_runtime", "cuda_driver", "cuda_sync"):
            continue
        waits = bool((_SYNC if event["cat"] == "cuda_sync" else _WAITING).search(event["name"]))
        waits = waits or event.get("args", {}).get("correlation") in copies_to_host
        if any(_contains(each, event) for each in ranges):
            inside[event["name"]] += 1
            waiting[event["name"]] += waits
        else:
            elsewhere[event["name"]] += waits
    return {
        "ranges": dict(Counter(event["name"] for event in ranges)),
        "calls": dict(inside),
        "waits": {name: count for name, count in waiting.items() if count},
        "waits_elsewhere": {name: count for name, count in elsewhere.items() if count},
    }


def _contains(outer: dict[str, Any], event: dict[str, Any]) -> bool:
    """Returns whether an event begins in a range, on whatever thread: records of waits do not name one."""
    return outer["ts"] <= event["ts"] < outer["ts"] + outer["dur"]
