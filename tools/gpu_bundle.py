#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Packs the tests that need a GPU, with their kernels and libraries, for a machine without compiler and packages.

    tools/gpu_bundle.py BUILD gpu_tests.tar.xz [--sm 90] [--only PATTERN]

BUILD is built, and BUILD/kernels.pack is there (`make kernels`). --sm keeps the kernels of one architecture, --only the
tests whose names contain PATTERN. On the other machine, which needs Python, xz and the driver:

    tar xf gpu_tests.tar.xz && python3 gpu_tests/run.py --source CHECKOUT

runs them (tools/gpu_bundle_run.py).
"""

import argparse
import json
import re
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

# Every Linux with the driver has these.
SYSTEM_LIBRARIES = re.compile(r"(ld-linux-x86-64|libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+)\.so")
PACK_HEADER = 16  # 8 bytes of magic and version, 8 of the size of the index


def gpu_tests(build: Path, only: str) -> list[dict]:
    """Returns name, program, arguments and environment of each test that is labelled gpu."""
    listing = subprocess.run(
        ["ctest", "--test-dir", build, "-L", "gpu", "--show-only=json-v1"], check=True, capture_output=True, text=True
    )
    tests = []
    for test in json.loads(listing.stdout)["tests"]:
        if only not in test["name"]:
            continue
        if "command" not in test:
            raise SystemExit(f"{test['name']} is not built: run `make build` first")
        program, *arguments = test["command"]
        environment = {}
        for each in test.get("properties", []):
            if each["name"] == "ENVIRONMENT":
                environment = dict(pair.split("=", 1) for pair in each["value"])
        tests.append({"name": test["name"], "program": program, "arguments": arguments, "environment": environment})
    if not tests:
        raise SystemExit(f"no test labelled gpu has '{only}' in its name")
    return tests


def add_libraries(program: Path, folder: Path) -> None:
    """Copies the shared libraries that a program loads and that the other machine may lack."""
    listing = subprocess.run(["ldd", program], check=True, capture_output=True, text=True).stdout
    for name, path in re.findall(r"^\s*(\S+) => (/\S+)", listing, re.MULTILINE):
        if not SYSTEM_LIBRARIES.match(name):
            shutil.copy(path, folder / name)


def cut_pack(pack: Path, to: Path, sm: str | None) -> None:
    """Copies a kernel pack, of one architecture if sm is given. src/gpu/pack_index.h describes the format."""
    data = pack.read_bytes()
    if sm is None:
        to.write_bytes(data)
        return
    (index_bytes,) = struct.unpack_from("<Q", data, 8)
    frames = data[PACK_HEADER + index_bytes :]
    index, kept = "", bytearray()
    for line in data[PACK_HEADER : PACK_HEADER + index_bytes].decode().splitlines():
        fields = dict(field.split("=", 1) for field in line.split("\t"))
        if not fields["name"].endswith(f".sm{sm}"):
            continue
        begin, size = int(fields["offset"]), int(fields["frame_bytes"])
        fields["offset"] = str(len(kept))
        index += "\t".join(f"{name}={value}" for name, value in fields.items()) + "\n"
        kept += frames[begin : begin + size]
    if not index:
        raise SystemExit(f"{pack} has no kernels of sm_{sm}")
    to.write_bytes(data[:8] + struct.pack("<Q", len(index.encode())) + index.encode() + kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--sm", help="architecture whose kernels are kept, for example 90; default all")
    parser.add_argument("--only", default="", help="tests whose names contain this")
    options = parser.parse_args()
    cache = (options.build / "CMakeCache.txt").read_text()
    source = Path(re.search(r"^CMAKE_HOME_DIRECTORY:INTERNAL=(.*)$", cache, re.MULTILINE)[1])
    tests = gpu_tests(options.build, options.only)
    pack = options.build / "kernels.pack"
    if not pack.exists():
        raise SystemExit(f"{pack} does not exist: run `make kernels` first")
    commit = subprocess.run(["git", "-C", source, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)

    with tempfile.TemporaryDirectory() as work:
        bundle = Path(work) / "gpu_tests"
        for folder in ("bin", "lib"):
            (bundle / folder).mkdir(parents=True)
        for test in tests:
            program = Path(test["program"])
            add_libraries(program, bundle / "lib")
            subprocess.run(["strip", "-o", bundle / "bin" / program.name, program], check=True)
            test["program"] = program.name
        cut_pack(pack, bundle / "kernels.pack", options.sm)
        shutil.copy(Path(__file__).with_name("gpu_bundle_run.py"), bundle / "run.py")
        about = {"commit": commit.stdout.strip() or "unknown", "source": str(source), "tests": tests}
        (bundle / "tests.json").write_text(json.dumps(about, indent=1))
        # The programs contain the same libraries, so a dictionary larger than one of them pays.
        packer = "xz --threads=1 --lzma2=preset=3,dict=96MiB"
        subprocess.run(["tar", "-C", work, "-I", packer, "-cf", options.output.resolve(), "gpu_tests"], check=True)
    print(f"{options.output}: {len(tests)} tests, {options.output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
