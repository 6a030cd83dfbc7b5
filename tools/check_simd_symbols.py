#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fails when an object compiled for one instruction set defines a symbol that other code may pick.

The linker keeps one copy of an inline function. If that copy were the AVX-512 one, a processor
without AVX-512 would fault in portable code. So these objects may define functions only in the
namespace of their instruction set. Data symbols, which sanitizers add, are harmless.

usage: check_simd_symbols.py INSTRUCTION_SET OBJECT...
"""
import subprocess
import sys

CODE = set("TWiu")  # letters that nm prints for functions


def shared_symbols(instruction_set, objects):
    listing = subprocess.run(["nm", "-C", "--defined-only", "--extern-only", *objects], check=True,
                             capture_output=True, text=True).stdout
    for line in listing.splitlines():
        parts = line.split(maxsplit=2)
        if len(parts) == 3 and parts[1] in CODE and f"::{instruction_set}::" not in parts[2]:
            yield line


def main():
    instruction_set, *objects = sys.argv[1:]
    shared = list(shared_symbols(instruction_set, objects))
    for line in shared:
        print(f"not in namespace {instruction_set}: {line}")
    print(f"{len(objects)} objects, {len(shared)} symbols outside of the namespace")
    return 1 if shared or not objects else 0


if __name__ == "__main__":
    sys.exit(main())
