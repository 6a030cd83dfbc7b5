#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times PyTorch's attention on a GPU for the cases of `fovea bench attention --device cuda --peers`: cuDNN and
FlashAttention through scaled_dot_product_attention, and Flex attention (Triton).

Reads a JSON list of cases from standard input and writes one JSON object per line for each result:
{"case", "peer", "seconds", "seconds_min", "error"} or {"case", "peer", "skipped"}. Shapes, distribution, seeds, idle
gaps and medians equal Fovea's: events time long calls, graph replays short ones. Peers rotate over several contiguous
caches, so that none is in the L2 cache. `error` is relative to fp64 on sampled rows.

Needs torch with CUDA, which the build does not. Usage: cuda_attention_peers.py [--state burst|sustained] [--peers cudnn,flash,flex]
"""
import argparse
import json
import sys
import time

COLD_BYTES = 2e9
MAX_BYTES = 40e9
GRAPH_BELOW = 400e-6


def normal(torch, shape, seed):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)


class Case:
    """Inputs of one case: q and `sets` caches in the layout [batch, tokens, heads, dim]."""

    def __init__(self, torch, case):
        self.torch, self.case = torch, case
        batch, q_len, kv_len = case["batch"], case["q_len"], case["kv_len"]
        dim = case["head_dim"]
        kv_bytes = 4 * batch * kv_len * case["kv_heads"] * dim
        self.sets = max(1, min(256, int(COLD_BYTES / kv_bytes), int(MAX_BYTES / kv_bytes)))
        q_bytes = 2 * batch * q_len * case["q_heads"] * dim
        self.q_sets = max(1, min(self.sets, int(-(-128e6 // q_bytes))))
        # scaled_dot_product_attention takes [batch, heads, tokens, dim], so these are strided views.
        self.q = [normal(torch, (batch, q_len, case["q_heads"], dim), 3 + i).transpose(1, 2)
                  for i in range(self.q_sets)]
        self.k = [normal(torch, (batch, kv_len, case["kv_heads"], dim), 1000 + i).transpose(1, 2)
                  for i in range(self.sets)]
        self.v = [normal(torch, (batch, kv_len, case["kv_heads"], dim), 2000 + i).transpose(1, 2)
                  for i in range(self.sets)]

    def of(self, turn):
        return self.q[turn % self.q_sets], self.k[turn % self.sets], self.v[turn % self.sets]

    def error(self, out):
        """Returns ||out - fp64|| / ||fp64|| over the rows of sampled (request, head, token)."""
        torch, case = self.torch, self.case
        q, k, v = self.of(0)
        group = case["q_heads"] // case["kv_heads"]
        wrong = norm = 0.0
        for i in range(8):
            request, head = i % case["batch"], (5 * i) % case["q_heads"]
            token = (case["q_len"] - 1) * i // 7
            visible = case["kv_len"] if case["phase"] == "prefill-full" else case["kv_len"] - case["q_len"] + token + 1
            keys, values = (x[request, head // group, :visible].double() for x in (k, v))
            weights = torch.softmax(keys @ q[request, head, token].double() / case["head_dim"] ** 0.5, 0)
            expected = weights @ values
            wrong += float(((out[request, head, token].double() - expected) ** 2).sum())
            norm += float((expected ** 2).sum())
        return (wrong / norm) ** 0.5


def sdpa(torch, case, backend):
    """Returns a call of scaled_dot_product_attention by one of its backends, or None if it does not support the case."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right
    chosen = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}[backend]
    square = case["q_len"] == case["kv_len"]
    bias = None
    if case["phase"] == "extend":
        if backend == "cudnn":
            return None  # its causal mask is aligned to the first token
        bias = causal_lower_right(case["q_len"], case["kv_len"])
    causal = case["phase"] == "prefill-causal"
    assert square or not causal

    def call(q, k, v):
        with sdpa_kernel(chosen):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=bias, is_causal=causal, enable_gqa=True)

    return call


def flex(torch, case):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    compiled = torch.compile(flex_attention, dynamic=False)
    mask = None
    if case["phase"] in ("prefill-causal", "extend"):
        offset = case["kv_len"] - case["q_len"]
        mask = create_block_mask(lambda b, h, q, kv: q + offset >= kv, None, None, case["q_len"], case["kv_len"],
                                 device="cuda")
    return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=True)


def measure(torch, inputs, call, state):
    """Returns the median and the best seconds of a call."""
    for turn in range(3):
        call(*inputs.of(turn))
    torch.cuda.synchronize()

    def interval():
        return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    begin, end = interval()
    begin.record()
    for turn in range(2):
        call(*inputs.of(turn))
    end.record()
    end.synchronize()
    calls, graph, turns = 1, None, 0
    if begin.elapsed_time(end) / 2e3 < 1.5 * GRAPH_BELOW:
        calls = max(8, min(256, inputs.sets))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for turn in range(calls):
                call(*inputs.of(turn))
    torch.cuda.synchronize()
    if state == "burst":
        time.sleep(0.3)

    def repeat(window):
        nonlocal turns
        flights, seconds, spent = [], [], 0.0
        while spent < window or len(seconds) < 7:
            begin, end = interval()
            begin.record()
            if graph:
                graph.replay()
            else:
                call(*inputs.of(turns))
                turns += 1
            end.record()
            flights.append((begin, end))
            if len(flights) == 8:
                first, last = flights.pop(0)
                last.synchronize()
                seconds.append(first.elapsed_time(last) / 1e3)
                spent += seconds[-1]
        torch.cuda.synchronize()
        return sorted(seconds)

    repeat(4e-3)
    seconds = repeat(30e-3 if state == "burst" else 1.5)
    return seconds[len(seconds) // 2] / calls, seconds[0] / calls


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", choices=("burst", "sustained"), default="burst")
    parser.add_argument("--peers", default="cudnn,flash,flex")
    flags = parser.parse_args()
    import torch
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU")
    torch.set_grad_enabled(False)
    print(f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}", file=sys.stderr)
    for case in json.load(sys.stdin):
        inputs = Case(torch, case)
        for peer in flags.peers.split(","):
            row = {"case": case["name"], "peer": peer}
            try:
                call = flex(torch, case) if peer == "flex" else sdpa(torch, case, peer)
                if call is None:
                    continue
                row["error"] = inputs.error(call(*inputs.of(0)))
                row["seconds"], row["seconds_min"] = measure(torch, inputs, call, flags.state)
            except Exception as error:  # a refused case is a result
                row["skipped"] = str(error).splitlines()[0][:200]
            print(json.dumps(row), flush=True)
        del inputs
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
