#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs flash-attention's public tests, unchanged, against fovea.compat.flash_attn.

    run_flash_attention_tests.py CHECKOUT [--suite fa2|fa3] [--sample N] [--seconds S] [-k EXPRESSION]

CHECKOUT is a checkout of github.com/Dao-AILab/flash-attention. Needs a GPU, pytest, einops and triton. The tests
import `flash_attn` and `flash_attn_interface`. flash_attention_plugin.py makes modules of these names that hand the
calls to Fovea, and takes the tests' helpers (padding, the rotary embedding of the reference) from the checkout.

The functions have hundreds of thousands of parameter combinations. The script draws a fixed sample of each function
and prints, for each function and reason, how many tests passed, failed and were skipped, and a table of failures.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_GRACE_SECONDS = 60  # for the imports and for the test that runs when the time is over
_SUITES = {"fa2": "tests/test_flash_attn.py", "fa3": "hopper/test_flash_attn.py"}


def _run(suite: str, options: argparse.Namespace, folder: Path) -> dict:
    """Runs the tests of a suite and returns the report of the plugin."""
    report = folder / f"{suite}.json"
    checkout = options.checkout.resolve()
    test = checkout / _SUITES[suite]
    if not test.is_file():
        raise SystemExit(f"{test} does not exist: CHECKOUT must be a checkout of Dao-AILab/flash-attention")
    paths = [str(_HERE), str(test.parent), os.environ.get("PYTHONPATH", "")]
    if options.fovea:
        paths.insert(0, str(options.fovea.resolve()))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "FLASH_ATTENTION_DISABLE_BACKWARD": "TRUE",
        "FOVEA_UPSTREAM_REPORT": str(report),
        "FOVEA_UPSTREAM_CHECKOUT": str(checkout),
        "FOVEA_UPSTREAM_SAMPLE": str(options.sample),
        "FOVEA_UPSTREAM_SEED": str(options.seed),
        "FOVEA_UPSTREAM_SECONDS": str(options.seconds),
    }
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider"]
    command += ["-p", "flash_attention_plugin", "--rootdir", str(folder), str(test)]
    if options.k:
        command += ["-k", options.k]
    log = folder / f"{suite}.log"
    with log.open("w", encoding="utf-8") as file:
        try:
            limit = options.seconds + _GRACE_SECONDS
            subprocess.run(command, cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT, timeout=limit)
        except subprocess.TimeoutExpired:
            print(f"{suite}: ended after {limit:.0f} s, in the middle of a test")
    if not report.is_file():
        raise SystemExit(log.read_text(encoding="utf-8")[-4000:])
    return json.loads(report.read_text(encoding="utf-8"))


def _print_report(suite: str, report: dict) -> None:
    print(f"\n{_SUITES[suite]}")
    print("| function | combinations | run | passed | skipped | failed |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for function, total in report["combinations"].items():
        outcomes = collections.Counter(r["outcome"] for r in report["results"] if r["function"] == function)
        run = sum(outcomes.values())
        if run == 0:
            continue
        row = [function, total, run, outcomes["passed"], outcomes["skipped"], outcomes["failed"]]
        print("| " + " | ".join(str(cell) for cell in row) + " |")
    reasons = collections.Counter(
        (r["outcome"], r["function"], r["reason"]) for r in report["results"] if r["outcome"] != "passed"
    )
    print("\n| tests | outcome | function | reason |\n| ---: | --- | --- | --- |")
    for (outcome, function, reason), count in sorted(reasons.items(), key=lambda item: -item[1]):
        print(f"| {count} | {outcome} | {function} | {reason} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT", help="a checkout of flash-attention")
    parser.add_argument("--suite", choices=sorted(_SUITES), help="default: both")
    parser.add_argument("--sample", type=int, default=100, help="combinations of each function, 0: all; default 100")
    parser.add_argument("--seed", default="0", help="of the sample; default 0")
    parser.add_argument("--seconds", type=float, default=90, help="for each suite: no test starts later; default 90")
    parser.add_argument("--fovea", type=Path, help="a folder to import fovea from, before the installed one")
    parser.add_argument("--report", type=Path, help="a folder that receives the results as JSON and pytest's log")
    parser.add_argument("-k", help="pytest's expression for the names of tests")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fovea-flash-attention-") as temporary:
        folder = options.report.resolve() if options.report else Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for suite in [options.suite] if options.suite else sorted(_SUITES):
            _print_report(suite, _run(suite, options, folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
