#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares Fovea's CPU attention with PyTorch's scaled_dot_product_attention and onnxruntime's
GroupQueryAttention, or with itself on one thread: same machine, threads, dtype and shapes.

The libraries alternate in short turns of calls (at least one call each), so that a change of the machine's
speed affects all. A turn begins when the previous library's threads have stopped spinning. Its result is its
median call. Fovea samples the machine's ceilings before and after each of its turns.

Peers are PyPI packages, which the build does not need: numpy with torch, or with onnxruntime and onnx. The
script measures those that are installed. They read one contiguous cache; Fovea reads pages of 16 in random
order. Caches rotate so that none is warm.

Usage: attention_peers.py [--fovea build/fovea] [--threads 2] [--seconds 5] [--quick] [--scaling]
                          [--phase decode|prefill] [--dtype fp32|bf16] [--filter SUBSTRING] [--csv FILE]
"""
import argparse
import importlib
import importlib.util
import json
import subprocess
import sys
import time

COLD_BYTES = 640e6
EXPANDED_BYTES = 6e9  # max size of caches with one key and value for each query head
TURN_SECONDS = 0.01
MIN_TURNS = 5
MODULES_OF = {"torch": ("torch", "numpy"), "onnxruntime": ("onnxruntime", "onnx", "numpy")}


def installed_peers():
    """Returns the installed peers. Prints a line on stderr with the missing modules of the others."""
    missing = {peer: [module for module in modules if importlib.util.find_spec(module) is None]
               for peer, modules in MODULES_OF.items()}
    absent = [f"{peer} (no module {', '.join(modules)})" for peer, modules in missing.items() if modules]
    if absent:
        print("not measured: " + "; ".join(absent), file=sys.stderr)
    return [peer for peer, modules in missing.items() if not modules]


def median(values):
    return sorted(values)[len(values) // 2]


class Fovea:
    """A process `fovea bench attention --turns` for one case."""

    def __init__(self, binary, case, threads):
        command = [binary, "bench", "attention", "--turns", "-o", "json", "--threads", str(threads)]
        for flag in ("phase", "batch", "q_len", "kv_len", "q_heads", "kv_heads", "head_dim"):
            command += ["--" + flag.replace("_", "-"), str(case[flag])]
        command += ["--dtype", case["dtype"], "--kv-dtype", case["dtype"]]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.turns = []

    def take_turn(self):
        print(file=self.process.stdin, flush=True)
        self.turns.append(float(self.process.stdout.readline()))

    def end(self):
        report, _ = self.process.communicate()
        result = json.loads(report)["results"][0]
        self.seconds, self.best = result["seconds"], result["seconds_min"]
        self.ceiling = f"{result['fraction']:.2f} {result['bound']}"


class Peer:
    """`call(i)` attends to the i-th of `variants` caches."""

    def __init__(self, call, variants):
        self.call, self.variants, self.next = call, variants, 0
        self.turns, self.calls = [], []
        self.take_turn()  # makes the allocations for later calls
        self.turns, self.calls = [], []

    def take_turn(self):
        calls, end = [], time.perf_counter() + TURN_SECONDS
        while not calls or time.perf_counter() < end:
            start = time.perf_counter()
            self.call(self.next)
            calls.append(time.perf_counter() - start)
            self.next = (self.next + 1) % self.variants
        self.turns.append(median(calls))
        self.calls += calls

    def end(self):
        self.seconds, self.best, self.ceiling = median(self.calls), min(self.calls), "-"


def make_caches(case, kv_heads):
    """Returns enough fp32 keys and values that none stays warm. Their noise repeats."""
    import numpy
    shape = (case["batch"], kv_heads, case["kv_len"], case["head_dim"])
    noise = numpy.random.default_rng(0).standard_normal((1 << 20) + 7, dtype=numpy.float32)
    bytes_each = 2 * 4 * numpy.prod(shape)
    count = max(1, min(64, int(COLD_BYTES / bytes_each))) if case["phase"] == "decode" else 1
    return [[numpy.resize(noise, shape) for _ in ("keys", "values")] for _ in range(count)]


def torch_peer(case, caches, enable_gqa):
    import torch
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[case["dtype"]]
    q = torch.randn(case["batch"], case["q_heads"], case["q_len"], case["head_dim"]).to(dtype)
    pairs = [[torch.from_numpy(tensor).to(dtype) for tensor in pair] for pair in caches]
    causal = case["q_len"] > 1

    def call(i):
        with torch.inference_mode():
            torch.nn.functional.scaled_dot_product_attention(
                q, *pairs[i], is_causal=causal, enable_gqa=enable_gqa)

    return Peer(call, len(pairs))


def onnx_peer(case, caches, threads):
    """Supports fp32 only, because the CPU provider lacks bf16. kv_len includes the new tokens."""
    import numpy
    import onnx
    import onnxruntime
    from onnx import TensorProto, helper
    batch, q_len, total, dim = case["batch"], case["q_len"], case["kv_len"], case["head_dim"]
    q_heads, kv_heads = case["q_heads"], case["kv_heads"]
    f32, i32 = TensorProto.FLOAT, TensorProto.INT32
    cache = [batch, kv_heads, total, dim]
    node = helper.make_node(
        "GroupQueryAttention",
        ["query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length"],
        ["output", "present_key", "present_value"], domain="com.microsoft",
        num_heads=q_heads, kv_num_heads=kv_heads)
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [node], "gqa",
        [value("query", f32, [batch, q_len, q_heads * dim]), value("key", f32, [batch, q_len, kv_heads * dim]),
         value("value", f32, [batch, q_len, kv_heads * dim]), value("past_key", f32, cache),
         value("past_value", f32, cache), value("seqlens_k", i32, [batch]),
         value("total_sequence_length", i32, [1])],
        [value("output", f32, [batch, q_len, q_heads * dim]), value("present_key", f32, cache),
         value("present_value", f32, cache)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17),
                                                    helper.make_opsetid("com.microsoft", 1)])
    model.ir_version = 8
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(model.SerializeToString(), options,
                                           providers=["CPUExecutionProvider"])
    random = numpy.random.default_rng(0)
    ort_value = onnxruntime.OrtValue.ortvalue_from_numpy

    def tensor(*shape):
        return ort_value(random.standard_normal(shape, dtype=numpy.float32))

    inputs = {"query": tensor(batch, q_len, q_heads * dim), "key": tensor(batch, q_len, kv_heads * dim),
              "value": tensor(batch, q_len, kv_heads * dim),
              "seqlens_k": ort_value(numpy.full(batch, total - 1, numpy.int32)),
              "total_sequence_length": ort_value(numpy.array([total], numpy.int32))}
    output = tensor(batch, q_len, q_heads * dim)
    bindings = []
    for pair in caches:
        binding = session.io_binding()
        for name, tensor_of_name in inputs.items():
            binding.bind_ortvalue_input(name, tensor_of_name)
        # One buffer serves as past and present, as in generation loops.
        for name, array in zip(("key", "value"), pair):
            buffer = ort_value(array)
            binding.bind_ortvalue_input("past_" + name, buffer)
            binding.bind_ortvalue_output("present_" + name, buffer)
        binding.bind_ortvalue_output("output", output)
        bindings.append(binding)
    return Peer(lambda i: session.run_with_iobinding(bindings[i]), len(bindings))


def make_peers(case, flags):
    caches = make_caches(case, case["kv_heads"])
    peers = {}
    if "torch" in flags.peers:
        peers["torch"] = torch_peer(case, caches, enable_gqa=True)
        expanded_bytes = 2 * 4 * case["batch"] * case["kv_len"] * case["q_heads"] * case["head_dim"]
        if expanded_bytes <= EXPANDED_BYTES:
            peers["torch expanded"] = torch_peer(case, make_caches(case, case["q_heads"]), enable_gqa=False)
    if "onnxruntime" in flags.peers and case["dtype"] == "fp32":
        peers["onnxruntime"] = onnx_peer(case, caches, flags.threads)
    return peers


def rest():
    """Waits until no threads spin. Peers' threads spin after their last call. A running thread's time is
    accounted at its core's next tick, so the check must last longer than a tick."""
    while True:
        used = time.process_time()
        time.sleep(0.02)
        if time.process_time() - used < 0.001:
            return


def measure(case, flags):
    """Returns Fovea and the other libraries by name, each with seconds, best call and the medians of its turns."""
    ours = Fovea(flags.fovea, case, flags.threads)
    others = {"1 thread": Fovea(flags.fovea, case, 1)} if flags.scaling else make_peers(case, flags)
    ours.take_turn()  # waits for its setup
    ours.turns, end = [], time.perf_counter() + flags.seconds
    while time.perf_counter() < end or len(ours.turns) < MIN_TURNS:
        for library in (ours, *others.values()):
            rest()
            library.take_turn()
    for library in (ours, *others.values()):
        library.end()
    return ours, others


def ratios(ours, others, flags):
    """Returns the best time of the others relative to ours: of medians, of best calls, and the median over
    turns. With --scaling, divides by the threads, so that 1 is linear scaling."""
    unit = flags.threads if flags.scaling else 1
    return [min(other.seconds for other in others) / ours.seconds / unit,
            min(other.best for other in others) / ours.best / unit,
            median([min(turn) / own for own, *turn in
                    zip(ours.turns, *(other.turns for other in others))]) / unit]


def name_of(case):
    return (f"{case['phase']} {case['dtype']} B {case['batch']} q {case['q_len']} kv {case['kv_len']} "
            f"D {case['head_dim']}")


def all_cases(quick, phase, dtype_wanted):
    cases = []
    base = {"batch": 1, "q_heads": 32, "kv_heads": 8}
    for dtype in ("fp32", "bf16"):
        for dim in (64, 128):
            for length in ((1024,) if quick else (1024, 2048, 4096, 8192)):
                cases.append({**base, "phase": "prefill", "head_dim": dim, "q_len": length, "kv_len": length,
                              "dtype": dtype})
        for batch in ((1,) if quick else (1, 8, 32)):
            for length in ((1024, 4096) if quick else (1024, 4096, 16384)):
                cases.append({**base, "phase": "decode", "batch": batch, "head_dim": 128, "q_len": 1,
                              "kv_len": length, "dtype": dtype})
    return [case for case in cases
            if phase in (None, case["phase"]) and dtype_wanted in (None, case["dtype"])]


def parse_flags():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fovea", default="build/fovea")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds of turns per case")
    parser.add_argument("--dtype", choices=("fp32", "bf16"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--scaling", action="store_true", help="compare with Fovea on one thread instead of peers")
    parser.add_argument("--phase", choices=("prefill", "decode"))
    parser.add_argument("--filter", default="", help="substring of the case's name in the first column")
    parser.add_argument("--csv", help="also write the rows to this file")
    return parser.parse_args()


def main():
    flags = parse_flags()
    flags.peers = [] if flags.scaling else installed_peers()
    if not flags.peers and not flags.scaling:
        return 1
    if "torch" in flags.peers:
        importlib.import_module("torch").set_num_threads(flags.threads)
    versions = [f"{peer} {importlib.import_module(peer).__version__}" for peer in flags.peers]
    what = "of linear" if flags.scaling else "vs best peer"
    print(", ".join([*versions, f"{flags.threads} threads"]) + "; ms: median and best call\n")
    print(f"| case | turns | fovea ms | of ceiling | others ms | {what}: medians | best calls | turns |")
    print("| --- | ---: | ---: | ---: | --- | ---: | ---: | ---: |")
    rows = []
    for case in all_cases(flags.quick, flags.phase, flags.dtype):
        if flags.filter not in name_of(case):
            continue
        ours, others = measure(case, flags)
        shown = "; ".join(f"{name} {other.seconds * 1e3:.3f} {other.best * 1e3:.3f}"
                          + (f" ({other.ceiling})" if flags.scaling else "") for name, other in others.items())
        compared = ratios(ours, others.values(), flags)
        print(f"| {name_of(case)} | {len(ours.turns)} | {ours.seconds * 1e3:.3f} {ours.best * 1e3:.3f} | "
              f"{ours.ceiling} | {shown} | {' | '.join(f'{ratio:.2f}' for ratio in compared)} |", flush=True)
        for name, library in {"fovea": ours, **others}.items():
            rows.append([name_of(case), name, library.seconds, library.best, library.ceiling, *compared])
    if flags.csv:
        with open(flags.csv, "w", encoding="utf-8") as file:
            file.write("case,library,seconds,best_seconds,of_ceiling,ratio_medians,ratio_best,ratio_turns\n")
            for row in rows:
                file.write(",".join(map(str, row)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
