#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the tests of a bundle of tools/gpu_bundle.py on this machine's GPU, several at a time.

    python3 gpu_tests/run.py --source CHECKOUT [--jobs 8] [--shards 4] [--limit 300] [--only PATTERN] [--logs FOLDER]

The tests read testdata below the path at which they were built; if that is not here, it becomes a link to CHECKOUT.
Programs of GoogleTest are divided into shards. The last line is the result: date, GPU, commit and counts; the exit code
is 1 if a test failed or did not end within its limit.
"""

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

BUNDLE = Path(__file__).resolve().parent
SKIPPED = 77  # exit code of an example that needs a GPU and finds none


def counted(log: str, kind: str) -> int:
    found = re.findall(rf"^\[  {kind} *\] (\d+) test", log, re.MULTILINE)
    return int(found[-1]) if found else 0


def run_shard(test: dict, shard: int, options: argparse.Namespace) -> dict:
    """Runs one shard and returns its counts; a program that is no GoogleTest has one shard and counts as a test."""
    environment = os.environ | test["environment"]
    environment |= {"GTEST_TOTAL_SHARDS": str(options.shards), "GTEST_SHARD_INDEX": str(shard)}
    environment |= {"LD_LIBRARY_PATH": str(BUNDLE / "lib"), "FOVEA_KERNEL_PACK": str(BUNDLE / "kernels.pack")}
    environment["LD_LIBRARY_PATH"] += ":" + os.environ.get("LD_LIBRARY_PATH", "")
    log_path = options.logs / f"{test['name'].replace('/', '_')}.{shard}.txt"
    start = time.monotonic()
    with log_path.open("w") as log:
        command = [BUNDLE / "bin" / test["program"], *test["arguments"]]
        try:
            code = subprocess.run(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=options.limit
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
    text = log_path.read_text(errors="replace")
    is_gtest = "[==========]" in text
    counts = {kind: counted(text, kind) for kind in ("PASSED", "SKIPPED", "FAILED")}
    if not is_gtest:
        counts = {"PASSED": int(code == 0), "SKIPPED": int(code == SKIPPED), "FAILED": 0}
        code = 0 if code == SKIPPED else code
    if code != 0 and counts["FAILED"] == 0:
        counts["FAILED"] = 1
    reason = "" if code == 0 else f"no end in {options.limit} s" if code is None else f"exit code {code}"
    failures = re.findall(r"^\[  FAILED  \] (\S+?)(?:, where .*)?$", text, re.MULTILINE)
    return counts | {
        "name": f"{test['name']}, shard {shard}",
        "reason": reason,
        "failures": sorted(set(failures)),
        "seconds": time.monotonic() - start,
    }


def link_source(built_at: str, source: Path | None) -> None:
    path = Path(built_at)
    if path.exists():
        return
    if source is None:
        raise SystemExit(f"{path} is not here: name a checkout of the same commit by --source")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(source.resolve())


def gpu_name() -> str:
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        return subprocess.run(query, check=True, capture_output=True, text=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "no GPU"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="a checkout with testdata")
    parser.add_argument("--jobs", type=int, default=8, help="programs at a time")
    parser.add_argument("--shards", type=int, default=4, help="parts of each program of GoogleTest")
    parser.add_argument("--limit", type=int, default=300, help="seconds of a part")
    parser.add_argument("--only", default="", help="tests whose names contain this")
    parser.add_argument("--logs", type=Path, default=Path("gpu_test_logs"), help="folder of the tests' output")
    options = parser.parse_args()
    about = json.loads((BUNDLE / "tests.json").read_text())
    link_source(about["source"], options.source)
    options.logs.mkdir(parents=True, exist_ok=True)
    tests = [test for test in about["tests"] if options.only in test["name"]]
    parts = [
        (test, shard) for test in tests for shard in range(options.shards if test["name"].startswith("gpu/") else 1)
    ]
    start = time.monotonic()
    with ThreadPoolExecutor(options.jobs) as workers:
        results = list(workers.map(lambda part: run_shard(*part, options), parts))
    for result in sorted(results, key=lambda result: -result["seconds"]):
        if result["reason"]:
            print(f"{result['name']}: {result['reason']}", *result["failures"], sep="\n  ")
    slowest = max(results, key=lambda result: result["seconds"], default=None)
    if slowest:
        print(f"slowest: {slowest['name']}, {slowest['seconds']:.0f} s")
    total = {kind: sum(result[kind] for result in results) for kind in ("PASSED", "SKIPPED", "FAILED")}
    print(
        f"{datetime.date.today()}, {gpu_name()}, commit {about['commit']}: {total['PASSED']} passed, "
        f"{total['SKIPPED']} skipped, {total['FAILED']} failed in {time.monotonic() - start:.0f} s"
    )
    sys.exit(total["FAILED"] > 0)


if __name__ == "__main__":
    main()
