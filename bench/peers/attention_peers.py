#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fovea's CPU attention beside PyTorch's scaled_dot_product_attention and onnxruntime's
GroupQueryAttention: same machine, threads, dtype, shapes and kind of inputs, one run, case by case.
Rounds of all libraries alternate and the median round counts: a machine that slows down slows all.

Peers are PyPI packages, which the build does not need: torch; onnxruntime with onnx and numpy. Those
installed are measured. They read one contiguous cache; Fovea reads pages of 16 in random order. Caches
rotate so that none is warm.

Usage: attention_peers.py [--fovea build/fovea] [--threads 2] [--rounds 3] [--quick]
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
MODULES_OF = {"torch": ("torch",), "onnxruntime": ("onnxruntime", "onnx", "numpy")}


def installed_peers():
    """Says on stderr, in one line, which peers lack which module."""
    missing = {peer: [module for module in modules if importlib.util.find_spec(module) is None]
               for peer, modules in MODULES_OF.items()}
    absent = [f"{peer} (no module {', '.join(modules)})" for peer, modules in missing.items() if modules]
    if absent:
        print("not measured: " + "; ".join(absent), file=sys.stderr)
    return [peer for peer, modules in missing.items() if not modules]


def median_seconds(call, variants, budget):
    call(0)
    times, end, i = [], time.perf_counter() + budget, 1
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        call(i % variants)
        times.append(time.perf_counter() - start)
        i += 1
    return sorted(times)[len(times) // 2]


def variants_of(case, element_bytes):
    kv = 2 * case["batch"] * case["kv_len"] * case["kv_heads"] * case["head_dim"] * element_bytes
    return max(1, min(64, int(COLD_BYTES / kv))) if case["phase"] == "decode" else 1


def torch_seconds(case, dtype_name, budget, expanded):
    import torch
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype_name]
    count = variants_of(case, dtype.itemsize)
    kv_heads = case["q_heads"] if expanded else case["kv_heads"]
    if expanded and case["batch"] * case["kv_len"] * kv_heads * case["head_dim"] * dtype.itemsize * 2 > 6e9:
        return None
    count = max(1, count // (case["q_heads"] // case["kv_heads"])) if expanded else count
    q = torch.randn(case["batch"], case["q_heads"], case["q_len"], case["head_dim"]).to(dtype)
    shape = (case["batch"], kv_heads, case["kv_len"], case["head_dim"])
    keys = [torch.randn(shape).to(dtype) for _ in range(count)]
    values = [torch.randn(shape).to(dtype) for _ in range(count)]
    causal = case["q_len"] > 1

    def call(i):
        torch.nn.functional.scaled_dot_product_attention(
            q, keys[i], values[i], is_causal=causal, enable_gqa=not expanded)

    with torch.inference_mode():
        return median_seconds(call, count, budget)


def onnx_seconds(case, budget, threads):
    """fp32 only: the CPU provider has no bf16. The new tokens are part of kv_len."""
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

    def tensor(*shape):
        return onnxruntime.OrtValue.ortvalue_from_numpy(random.standard_normal(shape, dtype=numpy.float32))

    count = variants_of(case, 4)
    inputs = {"query": tensor(batch, q_len, q_heads * dim), "key": tensor(batch, q_len, kv_heads * dim),
              "value": tensor(batch, q_len, kv_heads * dim),
              "seqlens_k": onnxruntime.OrtValue.ortvalue_from_numpy(numpy.full(batch, total - 1, numpy.int32)),
              "total_sequence_length": onnxruntime.OrtValue.ortvalue_from_numpy(numpy.array([total], numpy.int32))}
    output = tensor(batch, q_len, q_heads * dim)
    bindings = []
    for _ in range(count):
        binding = session.io_binding()
        for name, ort_value in inputs.items():
            binding.bind_ortvalue_input(name, ort_value)
        # One buffer is both past and present, as generation loops use it.
        for past, present in (("past_key", "present_key"), ("past_value", "present_value")):
            buffer = tensor(*cache)
            binding.bind_ortvalue_input(past, buffer)
            binding.bind_ortvalue_output(present, buffer)
        binding.bind_ortvalue_output("output", output)
        bindings.append(binding)
    return median_seconds(lambda i: session.run_with_iobinding(bindings[i]), count, budget)


def fovea_result(binary, case, threads, budget):
    command = [binary, "bench", "attention", "-o", "json", "--threads", str(threads), "--seconds", str(budget)]
    for flag in ("phase", "batch", "q_len", "kv_len", "q_heads", "kv_heads", "head_dim"):
        command += ["--" + flag.replace("_", "-"), str(case[flag])]
    command += ["--dtype", case["q_dtype"], "--kv-dtype", case["kv_dtype"]]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return report["results"][0]


def measure(case, flags):
    """One round: Fovea's result and the seconds of each peer, None where it is absent or has no such case."""
    ours = fovea_result(flags.fovea, case, flags.threads, flags.seconds)
    peers = {"torch": None, "torch expanded": None, "onnxruntime": None}
    if "torch" in flags.peers:
        peers["torch"] = torch_seconds(case, case["q_dtype"], flags.seconds, False)
        peers["torch expanded"] = torch_seconds(case, case["q_dtype"], flags.seconds, True)
    if "onnxruntime" in flags.peers and case["q_dtype"] == "fp32":
        peers["onnxruntime"] = onnx_seconds(case, flags.seconds, flags.threads)
    return ours, peers


def median(values):
    return None if None in values else sorted(values)[len(values) // 2]


def name_of(case):
    return (f"{case['phase']} {case['q_dtype']} B {case['batch']} q {case['q_len']} kv {case['kv_len']} "
            f"D {case['head_dim']}")


def all_cases(quick, phase, dtype_wanted):
    cases = []
    base = {"batch": 1, "q_heads": 32, "kv_heads": 8, "q_dtype": "fp32", "kv_dtype": "fp32"}
    for dtype in ("fp32", "bf16"):
        for dim in (64, 128):
            for length in ((1024,) if quick else (1024, 2048, 4096, 8192)):
                cases.append({**base, "phase": "prefill", "head_dim": dim, "q_len": length, "kv_len": length,
                              "q_dtype": dtype, "kv_dtype": dtype})
        for batch in ((1,) if quick else (1, 8, 32)):
            for length in ((1024, 4096) if quick else (1024, 4096, 16384)):
                cases.append({**base, "phase": "decode", "batch": batch, "head_dim": 128, "q_len": 1,
                              "kv_len": length, "q_dtype": dtype, "kv_dtype": dtype})
    return [case for case in cases
            if phase in (None, case["phase"]) and dtype_wanted in (None, case["q_dtype"])]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fovea", default="build/fovea")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="per case and library")
    parser.add_argument("--rounds", type=int, default=3, help="of each case; the libraries alternate")
    parser.add_argument("--dtype", choices=("fp32", "bf16"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--phase", choices=("prefill", "decode"))
    parser.add_argument("--filter", default="", help="part of the case's name, as in the first column")
    parser.add_argument("--csv", help="also write the rows here")
    flags = parser.parse_args()
    flags.peers = installed_peers()
    if not flags.peers:
        return 1
    if "torch" in flags.peers:
        importlib.import_module("torch").set_num_threads(flags.threads)
    versions = [f"{peer} {importlib.import_module(peer).__version__}" for peer in flags.peers]
    rows = []
    print(f"{', '.join(versions)}, {flags.threads} threads\n")
    print("| case | fovea ms | of ceiling | torch ms | torch expanded ms | onnxruntime ms | fovea vs best peer |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for case in all_cases(flags.quick, flags.phase, flags.dtype):
        if flags.filter not in name_of(case):
            continue
        rounds = [measure(case, flags) for _ in range(flags.rounds)]
        ours = sorted((ours for ours, _ in rounds), key=lambda result: result["seconds"])[len(rounds) // 2]
        peers = {name: median([peers[name] for _, peers in rounds]) for name in rounds[0][1]}
        best = min((seconds for seconds in peers.values() if seconds), default=None)
        ratio = best / ours["seconds"] if best else None
        name = name_of(case)
        shown = [f"{seconds * 1e3:.3f}" if seconds else "-" for seconds in peers.values()]
        print(f"| {name} | {ours['seconds'] * 1e3:.3f} | {ours['fraction']:.2f} {ours['bound']} | "
              f"{' | '.join(shown)} | {f'{ratio:.2f}' if ratio else '-'} |", flush=True)
        rows.append([name, ours["seconds"], ours["fraction"], ours["bound"], *peers.values(), ratio])
    if flags.csv:
        with open(flags.csv, "w", encoding="utf-8") as file:
            file.write("case,fovea_s,fraction,bound,torch_s,torch_expanded_s,onnxruntime_s,ratio\n")
            for row in rows:
                file.write(",".join("" if item is None else str(item) for item in row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
