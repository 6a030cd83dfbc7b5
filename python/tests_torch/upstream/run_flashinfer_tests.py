# SPDX-License-Identifier: Apache-2.0
"""Runs FlashInfer's own tests, unchanged, against fovea.compat.flashinfer, and says why any does not pass.

    python3 python/tests_torch/upstream/run_flashinfer_tests.py CHECKOUT [--all | --cases N] [--seconds N] [--copy-mla]

CHECKOUT is a folder of the FlashInfer repository that holds `tests`. Without --all, N cases of each test function run
(8 by default), the same in every run: those whose names have the smallest SHA-1. The package `flashinfer` that the
tests import is in flashinfer_shim; it says which names are not Fovea's.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import re
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

HERE = Path(__file__).resolve().parent

_MAX_RESERVED = 48 << 30  # bytes that torch may keep between tests

# Test files of the functions that the module offers.
FILES = (
    "test_alibi.py",
    "test_attention_sink.py",
    "test_batch_decode_kernels.py",
    "test_batch_invariant_fa2.py",
    "test_batch_prefill.py",
    "test_batch_prefill_kernels.py",
    "test_decode_fp8_calibration_scale.py",
    "test_decode_prefill_lse.py",
    "test_deepseek_mla.py",
    "test_fp8_prefill.py",
    "test_hopper.py",
    "test_hopper_fp8_sliding_window.py",
    "test_logits_cap.py",
    "test_mla_page.py",
    "test_non_contiguous_decode.py",
    "test_non_contiguous_prefill.py",
    "test_page.py",
    "test_shared_prefix_kernels.py",
    "test_single_prefill.py",
    "test_sliding_window.py",
    "test_tensor_cores_decode.py",
)

# Tests of the functions for one request; all other tests use these functions as their oracle.
SINGLE_FILES = ("test_alibi.py", "test_logits_cap.py", "test_decode_prefill_lse.py")
SINGLE_NAMES = ("test_single", "test_sinqle")

# Tests whose expected values come from other functions of the module, so that they show agreement only.
SELF_COMPARED = {
    "test_batch_attention_with_shared_prefix_paged_kv_cache",
    "test_batch_decode_tensor_cores",
    "test_batch_decode_tensor_cores_cuda_graph",
    "test_batch_decode_tensor_cores_with_fast_plan",
    "test_batch_fast_decode_tensor_cores_cuda_graph",
    "test_batch_mla_fp8_kv_matches_bf16_reference",
    "test_batch_mla_fp8_nope_group_scales_matches_bf16_reference",
    "test_batch_paged_decode_packed_input",
    "test_batch_paged_prefill",
    "test_batch_paged_prefill_packed_input",
    "test_batch_prefill_tensor_cores",
    "test_batch_ragged_prefill",
    "test_batch_ragged_prefill_packed_input",
    "test_cuda_graph_uniform_multi_token_decode_with_paged_kv_cache",
    "test_deepseek_prefill",
    "test_merge_state_in_place_with_mask",
    "test_single_decode_prefill_sliding_window_match",
    "test_single_decode_sliding_window",
    "test_single_decode_tensor_cores",
    "test_single_prefill",
    "test_single_prefill_packed_input",
    "test_single_prefill_sliding_window",
}


def is_offered(item: pytest.Item) -> bool:
    """Returns False for tests of NVFP4 caches and of CUTLASS's own entry, which the module does not have."""
    return "nvfp4" not in item.name.lower() and "cutlass" not in item.name.lower()


def is_single(item: pytest.Item) -> bool:
    return item.path.name in SINGLE_FILES or item.name.startswith(SINGLE_NAMES)


def function_of(item: pytest.Item) -> str:
    return f"{item.path.name}::{getattr(item, 'originalname', item.name)}"


def sample(items: list[pytest.Item], count: int) -> list[pytest.Item]:
    """Returns up to `count` cases of each function: the first case of every function, then the second ones, ..."""
    groups: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in sorted(items, key=lambda item: hashlib.sha1(item.nodeid.encode()).hexdigest()):
        groups[function_of(item)].append(item)
    ranks = [[group[rank] for group in groups.values() if rank < len(group)] for rank in range(count)]
    return [item for rank in ranks for item in rank]


def reason_of(report: Any) -> str:
    """Returns why a test did not pass, without the numbers of its case."""
    if isinstance(report.longrepr, tuple):
        return f"skipped: {report.longrepr[2].removeprefix('Skipped: ')}"
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    text = text.split("\n", 1)[0]
    if text.startswith(("NotImplementedError", "ValueError")):
        return re.sub(r"\b\d[\d.e+-]*", "N", text)[:160]
    if "no backend serves" in text or ("fovea" in text and "Error" in text):
        lines = [line.strip() for line in crash.message.split("\n") if line.startswith("  ")]
        return f"no backend: {lines[0]}"[:160] if lines else text[:160]
    if text.startswith(("AssertionError", "assert")):
        return "results differ"
    return text[:160]


class OnCpu(TorchFunctionMode):
    """Makes tensors on the CPU that a test asks for on the first GPU. Graphs and streams stay impossible."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs and kwargs["device"] is not None:
            kwargs["device"] = "cpu"
        if function in (torch.Tensor.to, torch.Tensor.cuda):
            args = tuple("cpu" if isinstance(each, (int, str, torch.device)) else each for each in args)
            args = args[:1] if function is torch.Tensor.cuda else args
            function = torch.Tensor.to if function is torch.Tensor.cuda and kwargs else function
            if function is torch.Tensor.cuda:
                return args[0]
        return function(*args, **kwargs)


class Collector:
    """A pytest plugin that chooses tests, switches the oracle, and counts results by reason."""

    def __init__(self, cases: int | None, seconds: float) -> None:
        self.cases = cases
        self.end = time.monotonic() + seconds
        self.collected = self.not_offered = 0
        self.outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        self.reasons: dict[str, list[str]] = defaultdict(list)
        self.self_compared = 0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        offered = [item for item in items if is_offered(item)]
        self.collected, self.not_offered = len(offered), len(items) - len(offered)
        items[:] = offered if self.cases is None else sample(offered, self.cases)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.reasons[f"not collected: {str(report.longrepr).splitlines()[-1]}"].append(report.nodeid)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        import flashinfer

        flashinfer.use_oracle = not is_single(item)
        self.current = item

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        if torch.cuda.is_available() and torch.cuda.memory_reserved() > _MAX_RESERVED:
            torch.cuda.empty_cache()
        if time.monotonic() > self.end:
            item.session.shouldstop = "the time is over"

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.passed:
            return
        function = function_of(self.current)
        outcome = "xfailed" if hasattr(report, "wasxfail") and report.skipped else report.outcome
        self.outcomes[function][outcome] += 1
        if outcome == "passed":
            self.self_compared += self.current.originalname in SELF_COMPARED
            return
        if torch.cuda.is_available() and "CUDA error" in str(report.longrepr):
            self.current.session.shouldstop = "a CUDA error, after which nothing in the process works"
        reason = f"xfail of the test: {report.wasxfail}" if outcome == "xfailed" else reason_of(report)
        self.reasons[f"{outcome}: {reason}"].append(report.nodeid)

    def print_summary(self, seconds: float) -> None:
        totals = sum(self.outcomes.values(), Counter())
        ran = sum(totals.values())
        print(f"\n{'function':<100} passed failed skipped xfailed")
        for function, counts in sorted(self.outcomes.items()):
            numbers = [counts[name] for name in ("passed", "failed", "skipped", "xfailed")]
            print(f"{function:<100} {numbers[0]:6} {numbers[1]:6} {numbers[2]:7} {numbers[3]:7}")
        print("\nwhy the others did not pass, with one case of each:")
        for reason, nodes in sorted(self.reasons.items(), key=lambda pair: -len(pair[1])):
            print(f"{len(nodes):6}  {reason}\n        {nodes[0]}")
        print(
            f"\n{ran} of {self.collected} cases ran ({self.not_offered} more test NVFP4 or CUTLASS): "
            f"{totals['passed']} passed, {totals['failed']} failed, {totals['skipped']} skipped, "
            f"{totals['xfailed']} xfailed; {self.self_compared} of the passed ones compare functions of the module "
            f"with each other; {seconds:.0f} s"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--all", action="store_true", help="run every case")
    parser.add_argument("--cases", type=int, default=8, help="cases of each test function")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no test after this time")
    parser.add_argument("--copy-mla", action="store_true", help="allow MLA caches in two tensors, by copies")
    parser.add_argument("--cpu", action="store_true", help="run on the CPU what the tests put on cuda:0")
    parser.add_argument("--log", default=os.devnull, help="file for pytest's own report")
    parser.add_argument("--files", nargs="*", default=FILES, help="names in tests/attention")
    arguments = parser.parse_args()
    folder = arguments.checkout.resolve() / "tests" / "attention"
    files = [str(folder / name) for name in arguments.files if (folder / name).exists()]
    if not files:
        parser.error(f"{folder} has none of the test files")
    shim = str(HERE / "flashinfer_shim")
    sys.path.insert(0, shim)
    os.environ["PYTHONPATH"] = os.pathsep.join([shim, os.environ.get("PYTHONPATH", "")])  # for tests' subprocesses
    import flashinfer  # noqa: F401  (before the tests, which would find the checkout's)
    import fovea.compat.flashinfer.mla as mla

    mla.copy_split_caches = arguments.copy_mla
    collector = Collector(None if arguments.all else arguments.cases, arguments.seconds)
    start = time.monotonic()
    options = ["-q", "--noconftest", "--no-header", "-p", "no:cacheprovider", "--tb=short", "--show-capture=no", "-rN"]
    options += ["--continue-on-collection-errors", "--rootdir", str(arguments.checkout.resolve()), "-W", "ignore"]
    if arguments.cpu:
        torch.cuda.synchronize = lambda *args: None
        torch.cuda.get_device_properties = lambda device: SimpleNamespace(total_memory=1 << 40)
    place = OnCpu() if arguments.cpu else contextlib.nullcontext()
    with open(arguments.log, "w") as log, contextlib.redirect_stdout(log), place:
        pytest.main([*options, *files], plugins=[collector])
    collector.print_summary(time.monotonic() - start)
    return 0


if __name__ == "__main__":
    sys.exit(main())
