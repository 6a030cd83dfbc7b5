#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fails when a source is larger than CONTRIBUTING.md allows: files of more than 400 lines; in C++ and CUDA also lines
of more than 100 columns, functions of more than 80 lines or 6 parameters, and templates of more than 5 parameters.
size_exceptions.txt lists larger functions and templates with their sizes. An entry that is larger than needed fails
too, so that the list only shrinks.

Usage: check_sizes.py [--write-exceptions]
"""
import pathlib
import sys

from cpp_functions import find_functions, find_templates

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXCEPTIONS = ROOT / "tools" / "size_exceptions.txt"
FOLDERS = ["bench", "examples", "include", "python", "src", "tests", "tools"]
SUFFIXES = {".h", ".cc", ".cuh", ".py"}
LINES, COLUMNS = 400, 100
LIMITS = {"lines": 80, "parameters": 6, "template_parameters": 5}


def read_exceptions():
    """Returns {(file, function or template, a key of LIMITS): number}."""
    exceptions = {}
    for line in EXCEPTIONS.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, function, number, kind = line.split()
            exceptions[name, function, kind] = int(number)
    return exceptions


def large_parts(name, source):
    """Returns the functions and templates that exceed LIMITS, as read_exceptions(); of equal names the largest."""
    sizes = [(function.name, kind, getattr(function, kind))
             for function in find_functions(source) for kind in ("lines", "parameters")]
    sizes += [(template, "template_parameters", number) for template, number in find_templates(source)]
    large = {}
    for part, kind, number in sizes:
        if number > LIMITS[kind]:
            key = str(name), part, kind
            large[key] = max(number, large.get(key, 0))
    return large


def write_exceptions(large):
    head = "# Functions and templates beyond the limits of check_sizes.py: file, name, size. The list only shrinks.\n"
    rows = [f"{name} {function} {number} {kind}\n" for (name, function, kind), number in sorted(large.items())]
    EXCEPTIONS.write_text(head + "".join(rows), encoding="utf-8")


def main():
    errors, large = [], {}
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.suffix in SUFFIXES]
    for file in sorted(files):
        name, source = file.relative_to(ROOT), file.read_text(encoding="utf-8")
        lines = source.splitlines()
        if len(lines) > LINES:
            errors.append(f"{name}: {len(lines)} lines, at most {LINES}")
        if file.suffix != ".py":
            errors += [f"{name}:{number}: {len(line)} columns, at most {COLUMNS}"
                       for number, line in enumerate(lines, 1) if len(line) > COLUMNS]
            large |= large_parts(name, source)
    if "--write-exceptions" in sys.argv:
        write_exceptions(large)
        return 0
    exceptions = read_exceptions()
    for key in sorted(large.keys() | exceptions.keys()):
        (name, function, kind), allowed, found = key, exceptions.get(key, LIMITS[key[2]]), large.get(key, 0)
        if found > allowed:
            errors.append(f"{name}: {function} has {found} {kind}, at most {allowed}")
        elif found < allowed and key in exceptions:
            errors.append(f"{EXCEPTIONS.name}: {name} {function} may have {allowed} {kind}, has {found or 'fewer'}")
    fine = (f"{len(files)} sources within {LINES} lines, C++ and CUDA within {COLUMNS} columns; functions within "
            f"{LIMITS['lines']} lines and {LIMITS['parameters']} parameters, templates within "
            f"{LIMITS['template_parameters']}, but for {len(exceptions)} exceptions")
    if errors and any(EXCEPTIONS.name in error for error in errors):
        errors.append("where functions have moved or shrunk: tools/check_sizes.py --write-exceptions")
    print("\n".join(errors) if errors else fine)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
