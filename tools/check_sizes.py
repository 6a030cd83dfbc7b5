#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fails when a source file has more than 400 lines, or a line of C++ or CUDA more than 100 columns (CONTRIBUTING.md)."""
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ["bench", "examples", "include", "src", "tests", "tools"]
SUFFIXES = {".h", ".cc", ".cuh", ".py"}
LINES, COLUMNS = 400, 100


def main():
    errors = []
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.suffix in SUFFIXES]
    for file in sorted(files):
        name, lines = file.relative_to(ROOT), file.read_text(encoding="utf-8").splitlines()
        if len(lines) > LINES:
            errors.append(f"{name}: {len(lines)} lines, at most {LINES}")
        if file.suffix != ".py":
            errors += [f"{name}:{number}: {len(line)} columns, at most {COLUMNS}"
                       for number, line in enumerate(lines, 1) if len(line) > COLUMNS]
    fine = f"{len(files)} sources within {LINES} lines, C++ and CUDA within {COLUMNS} columns"
    print("\n".join(errors) if errors else fine)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
