#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fails when a folder includes one that is below it in the picture of docs/architecture.md, when device code outside
kernels/cuda/common contains assembly (tests/emulation replaces the functions in that folder), when a file outside a
kernel family makes a variant of it, or when the Python package evaluates or unpickles data."""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
ORDER = ["include", "core", "gpu", "kernels", "kvcache", "attention", "dist", "model", "tokenizer", "engine", "c", "server", "surface"]
# Surfaces include only public headers, the server's and each other. bench/ may include any layer.
SURFACES = {"cli", "bench"}
# The C interface includes only public headers and itself.
C_INTERFACE = ("include", "c")
# Kernel implementations do not include each other.
KERNEL_KINDS = ["reference", "cpu", "cuda"]
# A family's own files that spell its variants, and the files that handle all families.
MAKES_VARIANTS = re.compile(r"kernels/cuda/(family\.h|family\.cc|build_pack\.cc|\w+/\w+/(launch|variants)\.cc)")
# The folders of attention/ that each folder of it may include. Files directly in attention/ include only validate/,
# except for the registry, which includes backends/, and merge_states.cc and speculation.cc, which serve both devices.
ATTENTION = {"backends": {"host", "cuda", "validate"}, "host": {"validate"}, "cuda": {"validate"}, "validate": set(),
             "": {"validate"}}
ATTENTION_TOP = {"registry.cc": {"backends"}, "merge_states.cc": {"host", "cuda"}, "speculation.cc": {"host", "cuda"}}


def layer_of(path):
    top = path.split("/")[0]
    if top == "fovea":
        return "include"
    return "surface" if top in SURFACES else top


def folder_of(path):
    """Returns the folder of attention/ that contains the file, "" for attention/ itself."""
    parts = path.split("/")
    return parts[1] if len(parts) > 2 else ""


def check_attention(inside, included):
    """Returns True if a file of attention/ may include another one."""
    here, there = folder_of(inside), folder_of(included)
    allowed = ATTENTION[here] | (ATTENTION_TOP.get(inside.split("/")[1], set()) if not here else set())
    return there in ("", here) or there in allowed


# Data that is executed: a file or a message could then run anything.
EXECUTES = re.compile(r"\b(pickle|marshal|shelve|torch|joblib)\.loads?\(|(?<![.\w])(eval|exec)\(|\byaml\.load\(")


def check_python():
    """Returns an error for each line of the Python package that executes data."""
    errors = []
    for file in sorted(ROOT.glob("python/fovea/**/*.py")):
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if EXECUTES.search(line):
                errors.append(f"{file.relative_to(ROOT)}:{number}: evaluates or unpickles data")
    return errors


def main():
    errors = check_python()
    files = [*ROOT.glob("include/**/*.h"), *ROOT.glob("src/**/*.h"), *ROOT.glob("src/**/*.cc"),
             *ROOT.glob("src/**/*.cuh")]
    for file in sorted(files):
        relative = file.relative_to(ROOT)
        inside = str(relative.relative_to("include" if relative.parts[0] == "include" else "src"))
        here = layer_of(inside)
        text = file.read_text(encoding="utf-8")
        if inside.startswith("kernels/cuda/") and not inside.startswith("kernels/cuda/common/"):
            if re.search(r"\basm\b", text):
                errors.append(f"{relative}: assembly belongs under kernels/cuda/common/")
        if "make_variant(" in text and not MAKES_VARIANTS.fullmatch(inside):
            errors.append(f"{relative}: only the launch.cc of a family makes its variants")
        for line in text.splitlines():
            match = re.match(r'\s*#include "([^"]+)"', line)
            if not match or "/" not in match.group(1):
                continue
            there = layer_of(match.group(1))
            if there not in ORDER:
                errors.append(f"{relative}: {match.group(1)} is in no layer")
            elif ORDER.index(there) > ORDER.index(here):
                errors.append(f"{relative}: {here}/ must not include {there}/")
            elif here == "surface" and there not in ("include", "server", "surface"):
                errors.append(f"{relative}: a surface must not include {there}/")
            elif here == "c" and there not in C_INTERFACE:
                errors.append(f"{relative}: the C interface must not include {there}/")
            elif here == "server" and there == "c":
                errors.append(f"{relative}: the server must not include the C interface")
            if inside.startswith("attention/") and match.group(1).startswith("attention/"):
                if not check_attention(inside, match.group(1)):
                    errors.append(f"{relative}: must not include {match.group(1)}")
            kinds = [k for k in KERNEL_KINDS if inside.startswith(f"kernels/{k}/")]
            target = [k for k in KERNEL_KINDS if match.group(1).startswith(f"kernels/{k}/")]
            if kinds and target and kinds != target:
                errors.append(f"{relative}: kernels/{kinds[0]}/ must not include kernels/{target[0]}/")
    print("\n".join(errors) if errors else f"{len(files)} files, every include points up")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
