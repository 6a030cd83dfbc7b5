# SPDX-License-Identifier: Apache-2.0
"""pytest plugin of run_flash_attention_tests.py: samples flash-attention's own tests and sorts their results.

It changes no test. It draws the parameters of each test function from all their combinations, runs the tests without
autograd, because Fovea has no backward pass, and gives NaN where a test asks for gradients. Such a test still fails,
at the first assert about a gradient, which is after its asserts about the output.

Environment: FOVEA_UPSTREAM_SAMPLE (combinations of a function, 0: all), FOVEA_UPSTREAM_SEED, FOVEA_UPSTREAM_SECONDS
(no test starts later), FOVEA_UPSTREAM_CHECKOUT (flash-attention's repository), FOVEA_UPSTREAM_REPORT (a JSON file that
receives the results).
"""

import itertools
import json
import math
import os
import random
import re
import sys
import time
import types

import pytest
import torch
from fovea.compat import flash_attn
from fovea.compat.flash_attn import flash_attn_interface

_SAMPLE = int(os.environ.get("FOVEA_UPSTREAM_SAMPLE", "0"))
_SEED = os.environ.get("FOVEA_UPSTREAM_SEED", "0")
_SECONDS = float(os.environ.get("FOVEA_UPSTREAM_SECONDS", "inf"))
_REPORT = os.environ["FOVEA_UPSTREAM_REPORT"]
_CHECKOUT = os.environ["FOVEA_UPSTREAM_CHECKOUT"]

_GRADIENT = re.compile(r"assert.*\bd(q|k|v|kv|qkv)\b|assert.*\.grad\b|dq_equal")

_combinations: dict[str, int] = {}
_results: list[dict[str, str]] = []
_started = time.monotonic()


def _gradients(outputs: object, inputs: object, *arguments: object, **options: object) -> tuple[torch.Tensor, ...]:
    tensors = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    return tuple(torch.full_like(tensor, torch.nan) for tensor in tensors)


def _module(name: str, source: types.ModuleType, **more: object) -> None:
    """Makes a module of flash-attention's name from one of ours."""
    module = types.ModuleType(name)
    module.__dict__.update({each: getattr(source, each) for each in source.__all__}, **more)
    sys.modules[name] = module


def _block_size(*arguments: object) -> tuple[int, int]:
    raise NotImplementedError("the layout of dropout masks: Fovea has no dropout")


def pytest_configure(config: pytest.Config) -> None:
    _module("flash_attn", flash_attn, __path__=[os.path.join(_CHECKOUT, "flash_attn")])
    _module("flash_attn.flash_attn_interface", flash_attn, USE_TRITON_ROCM=False, _get_block_size_n=_block_size)
    _module("flash_attn_interface", flash_attn_interface)
    torch.autograd.grad = _gradients


def _axes(marks: list[pytest.Mark]) -> list[tuple[list[str], list[object]]]:
    axes = []
    for mark in marks:
        names, values = mark.args[:2]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        axes.append((names, list(values)))
    return axes


def _draw(name: str, axes: list[tuple[list[str], list[object]]]) -> list[tuple[object, ...]]:
    """Returns a sample of the combinations, in random order that depends on the seed and the name only."""
    total = math.prod(len(values) for _, values in axes)
    count = min(_SAMPLE or total, total)
    rows = []
    for number in random.Random(f"{_SEED}:{name}").sample(range(total), count):
        row: list[object] = []
        for names, values in axes:
            number, index = divmod(number, len(values))
            row.extend([values[index]] if len(names) == 1 else values[index])
        rows.append(tuple(row))
    return rows


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> None:
    if not name.startswith("test_") or not callable(obj):
        return
    marks = list(getattr(obj, "pytestmark", []))
    grid = [mark for mark in marks if mark.name == "parametrize"]
    axes = _axes(grid)
    _combinations[name] = math.prod(len(values) for _, values in axes)
    if not grid or not _SAMPLE:
        return
    names = list(itertools.chain.from_iterable(names for names, _ in axes))
    rows = _draw(name, axes)
    ids = ["-".join(str(value).removeprefix("torch.") for value in row) for row in rows]
    mark = pytest.mark.parametrize(names, rows, ids=ids).mark
    obj.pytestmark = [mark for mark in marks if mark.name != "parametrize"] + [mark]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Takes turns between the functions, so that a time limit cuts all of them."""
    turns: dict[str, int] = {}
    order = {}
    for item in items:
        order[item] = turns[item.originalname] = turns.get(item.originalname, 0) + 1
    items.sort(key=order.__getitem__)


def pytest_runtest_protocol(item: pytest.Item) -> None:
    if time.monotonic() - _started > _SECONDS:
        item.session.shouldstop = f"{_SECONDS:.0f} seconds are over"


@pytest.hookimpl(hookwrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function):
    with torch.no_grad():
        yield


def _why(excinfo: pytest.ExceptionInfo) -> str:
    """Returns why a test failed, in one line without the values of this test."""
    error = excinfo.value
    text = str(error).replace("\n", " / ")
    if isinstance(error, AssertionError):
        own = [entry for entry in excinfo.traceback if str(entry.path).startswith(_CHECKOUT)]
        statement = str(own[-1].statement).strip().replace("\n", " ") if own else text
        if _GRADIENT.search(statement):
            return "reached the asserts about gradients: Fovea has no backward pass"
        return f"assert: {statement}"
    if "does not require grad" in text or "does not have a grad_fn" in text:
        return "the test is about gradients: Fovea has no backward pass"
    if isinstance(error, flash_attn.Unsupported):
        argument, _, rest = text.removeprefix("flash_attn: ").partition(" is ")
        return f"{argument}: {rest.partition(': ')[2]}"
    return f"{type(error).__name__}: {re.sub(r'[0-9]+', 'N', text)[:300]}"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    outcome = yield
    report = outcome.get_result()
    if report.when != "call" and report.passed:
        return
    reason = ""
    if report.failed:
        reason = _why(call.excinfo)
    elif report.skipped:
        reason = str(call.excinfo.value) or "the test skips this combination"
    _results.append(
        {
            "function": item.originalname,
            "test": item.name,
            "outcome": report.outcome,
            "reason": reason,
            "seconds": f"{report.duration:.2f}",
        }
    )
    # After every test, because a time limit may end the process.
    with open(_REPORT, "w", encoding="utf-8") as file:
        json.dump({"combinations": _combinations, "results": _results}, file)
