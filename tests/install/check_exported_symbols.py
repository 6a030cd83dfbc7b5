#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fails when a shared library exports other symbols than its committed list says.

Usage: check_exported_symbols.py attention|engine|c LIBRARY [--write]
--write replaces the list by what the library exports. The library of the engine exports the list of attention as well.
`c` compares the symbols of C in that library; the other lists hold those of C++.
"""
import pathlib
import subprocess
import sys

FOLDER = pathlib.Path(__file__).resolve().parent.parent.parent / "cmake"


def list_file(component):
    return FOLDER / f"exported_symbols_{component}.txt"


def read_list(component):
    file = list_file(component)
    return set(file.read_text(encoding="utf-8").splitlines()) if file.exists() else set()


def exported(library, of_c):
    listing = subprocess.run(["nm", "-D", "--defined-only", "-C", "--format=posix", library],
                             capture_output=True, text=True, check=True).stdout
    # "fovea::Engine::step(int) T 1f20 80": the name may have spaces, the three fields after it have none.
    symbols = {" ".join(line.split(" ")[:-3]) for line in listing.splitlines()}
    return {symbol for symbol in symbols if symbol.startswith("fovea_") == of_c}


def main():
    component, library = sys.argv[1:3]
    symbols = exported(library, component == "c")
    inherited = read_list("attention") if component == "engine" else set()
    if "--write" in sys.argv:
        lines = sorted(symbols - inherited)
        list_file(component).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return 0
    expected = read_list(component) | inherited
    for symbol in sorted(symbols - expected):
        print(f"exported, but not listed in {list_file(component).name}: {symbol}")
    for symbol in sorted(expected - symbols):
        print(f"listed, but not exported: {symbol}")
    if symbols != expected:
        print(f"If this is meant: {pathlib.Path(__file__).name} {component} {library} --write")
        return 1
    print(f"{len(symbols)} exported symbols, as listed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
