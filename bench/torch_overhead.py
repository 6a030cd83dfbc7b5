#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Host time of fovea.torch's calls over that of the same forward() in C++.

The shape is tiny, so that the time of kernels does not hide that of the calls. On a GPU the host only enqueues. Fails
if the op `forward` costs more over C++ than LIMIT_US.
Usage: torch_overhead.py [cpu | cuda]
"""

import sys
import time
from collections.abc import Callable, Iterator

import fovea
import torch
from fovea.torch import BackendCache, BackendOps, paged_attention, write_kv

LIMIT_US = 6.0
LIMITED = "torch.ops.fovea.forward"
# Short rounds: some run undisturbed, and a GPU's queue has room for the work of a round.
CALLS, ROUNDS = 100, 200


def rounds() -> Iterator[int]:
    """Yields once a round, while the device is idle: a full queue would make the host wait."""
    for number in range(ROUNDS):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        yield number


def microseconds(call: Callable[[], object]) -> float:
    """Returns the time of a call: the best of the rounds, since other work disturbs them."""
    best = float("inf")
    for _ in rounds():
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        best = min(best, (time.perf_counter() - start) / CALLS * 1e6)
    return best


def main() -> int:
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda" if torch.cuda.is_available() else "cpu"
    dtype, name = (torch.float32, "fp32") if device == "cpu" else (torch.bfloat16, "bf16")
    dim = 64
    spec = fovea.AttentionSpec(q_heads=1, kv_heads=1, head_dim=dim, q_dtype=name)
    cache = fovea.KvCacheSpec(kv_heads=1, head_dim=dim, page_size=16, dtype=name)
    limits = fovea.BatchLimits(max_kv_len=16)
    k_cache, v_cache = torch.zeros(2, 4, 16, 1, dim, dtype=dtype, device=device).unbind()
    q, out = torch.zeros(2, 1, 1, dim, dtype=dtype, device=device).unbind()
    q_indptr = torch.tensor([0, 1], dtype=torch.int32, device=device)
    kv_lens, rows = torch.ones(1, dtype=torch.int32, device=device), q_indptr[:1]
    table, slots = q_indptr[1:].view(1, 1), torch.tensor([16], device=device)
    fields = {
        "q_indptr": q_indptr,
        "kv_lens": kv_lens,
        "tokens": 1,
        "request_rows": rows,
        "table": table,
        "entry_tokens": 16,
        "out_slots": slots,
        "max_q_len": 1,
        "max_kv_len": 16,
    }
    backends = BackendCache(threads=1)
    layers = [(k_cache, v_cache)]
    backend = backends.backend_for(spec, cache, layers, limits, own_workspace=True)
    ops = BackendOps(backend)
    batch = fovea.Batch(mode="decode", **fields)
    backend.plan(batch)
    bound = backend.bind(0, q=q, k=q, v=q, out=out)
    forward, state, number = torch.ops.fovea.forward.default, ops.state, ops.number
    calls = {
        "bound forward": bound.forward,
        "Backend.forward": lambda: backend.forward(0, q=q, k=q, v=q, out=out),
        LIMITED: lambda: forward(state, number, 0, q, q, q, out),
        "Backend.plan": lambda: backend.plan(batch),
        "torch.ops.fovea.plan": lambda: ops.plan("decode", **fields),
        "BackendCache.backend_for": lambda: backends.backend_for(spec, cache, layers, limits),
        "paged_attention": lambda: paged_attention(q, k_cache, v_cache, table, kv_lens, max_kv_len=16),
        "write_kv": lambda: write_kv(q, q, k_cache, v_cache, slots),
    }
    print(f"{backend.name} on {device}, torch {torch.__version__}\n\n| call | us | over C++ |\n| --- | ---: | ---: |")
    with torch.inference_mode():
        cpp = min(bound.time(CALLS) for _ in rounds()) / CALLS * 1e6
        print(f"| forward in C++ | {cpp:.2f} | |")
        taken = {what: microseconds(call) for what, call in calls.items()}
    for what, each in taken.items():
        print(f"| {what} | {each:.2f} | {each - cpp:+.2f} |")
    if taken[LIMITED] - cpp > LIMIT_US:
        print(f"{LIMITED} costs {taken[LIMITED] - cpp:.2f} us over C++, at most {LIMIT_US}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
