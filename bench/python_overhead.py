#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures what Python adds to a forward(): the same small decode step in C++, bound, and with arrays as arguments.

Uses torch's tensors if torch can be imported, else numpy's; with --device cuda torch's on the GPU. Fails if a bound
forward() costs more over C++ than LIMIT_US.

Usage: python_overhead.py [--device cpu|cuda]
"""

import argparse
import sys
import time

import fovea

LIMIT_US = 3.0
# Short rounds: some run undisturbed, and a GPU's queue has room for the work of a round.
CALLS, ROUNDS = 100, 400


def make_arrays(device):
    """Returns (library, an array of float zeros by shape, one of integers by values and dtype, wait for the device)."""
    try:
        import torch
    except ImportError:
        import numpy as np

        return (
            "numpy",
            lambda *shape: np.zeros(shape, np.float32),
            lambda values, dtype: np.array(values, dtype),
            lambda: None,
        )
    kind = torch.bfloat16 if device == "cuda" else torch.float32
    return (
        f"torch {torch.__version__}",
        lambda *shape: torch.zeros(shape, dtype=kind, device=device),
        lambda values, dtype: torch.tensor(values, dtype=getattr(torch, dtype), device=device),
        torch.cuda.synchronize if device == "cuda" else lambda: None,
    )


def best(function, wait):
    """Returns the seconds of one call: the best of some rounds, since other work disturbs them. A round begins with an
    empty queue of the device, because a full one would make the host wait for the device."""
    seconds = float("inf")
    for _ in range(ROUNDS):
        wait()
        begin = time.perf_counter()
        for _ in range(CALLS):
            function()
        seconds = min(seconds, (time.perf_counter() - begin) / CALLS)
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    device = parser.parse_args().device
    library, zeros, integers, wait = make_arrays(device)
    dtype = "bf16" if device == "cuda" else "fp32"
    spec = fovea.AttentionSpec(q_heads=4, kv_heads=2, head_dim=64, q_dtype=dtype)
    cache = fovea.KvCacheSpec(kv_heads=2, head_dim=64, page_size=16, dtype=dtype)
    limits = fovea.BatchLimits(max_kv_len=64)
    threads = None if device == "cuda" else 1
    choice = fovea.select(spec, cache, limits=limits, device=device, threads=threads)
    backend = choice.create(fovea.KvPool.lend(cache, [(zeros(8, 16, 2, 64), zeros(8, 16, 2, 64))]))
    backend.reserve(limits)
    batch = fovea.Batch(
        mode="decode",
        q_indptr=integers([0, 1], "int32"),
        kv_lens=integers([1], "int32"),
        request_rows=integers([0], "int32"),
        table=integers([[1, 0, 0, 0]], "int32"),
        entry_tokens=16,
        out_slots=integers([16], "int64"),
    )
    backend.plan(batch)
    tensors = {"q": zeros(1, 4, 64), "k": zeros(1, 2, 64), "v": zeros(1, 2, 64), "out": zeros(1, 4, 64)}
    bound = backend.bind(**tensors)

    def unbound():
        backend.forward(0, q=tensors["q"], k=tensors["k"], v=tensors["v"], out=tensors["out"])

    def cpp_round():
        wait()
        return bound.time(CALLS)

    empty = best(lambda: None, wait)
    cpp = min(cpp_round() for _ in range(ROUNDS)) / CALLS
    rows = [
        ("forward() in C++", cpp, 0),
        ("BoundLayer.forward()", best(lambda: bound.forward(), wait) - empty, cpp),
        ("Backend.forward(q=, k=, v=, out=)", best(unbound, wait) - empty, cpp),
        ("Backend.plan(batch)", best(lambda: backend.plan(batch), wait) - empty, 0),
    ]
    print(f"{library}, {choice.name} on {device}")
    for name, seconds, base in rows:
        over = f", {1e6 * (seconds - base):.2f} us over C++" if base else ""
        print(f"{name:36}{1e6 * seconds:7.2f} us{over}")
    over = 1e6 * (rows[1][1] - cpp)
    if over > LIMIT_US:
        print(f"BoundLayer.forward() costs {over:.2f} us over C++, at most {LIMIT_US}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
