# SPDX-License-Identifier: Apache-2.0
"""The parts that the scripts for GPUs share: prompts, times of steps, and the comparison of two engines."""

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

POINTS = [(1, 1024), (1, 16384), (8, 4096), (32, 4096), (64, 4096), (128, 1024)]  # requests, tokens of a prompt
NEW_TOKENS = 64
WARM_TOKENS = 40000
NEAR_TIE = 1e-2  # difference of two logprobs

Prompts = list[list[int]]


def make_prompts(chance: random.Random, lengths: list[int], vocabulary: int) -> Prompts:
    """Returns prompts of random tokens from the first half of the vocabulary."""
    return [[chance.randrange(vocabulary // 2) for _ in range(length)] for length in lengths]


def cases(points: list[tuple[int, int]] | None = None) -> dict[str, list[int]]:
    """Returns the lengths of the prompts of each point; without `points` those of POINTS and 64 of 128 to 16384."""
    if points is not None:
        return {f"{count} x {length}": [length] * count for count, length in points}
    chance = random.Random(1)
    return cases(POINTS) | {"64 mixed": [int(128 * 2 ** chance.uniform(0, 7)) for _ in range(64)]}  # log-uniform


def time_steps(
    measure: Callable[[Prompts, int], list[float]], vocabulary: int, points: list[tuple[int, int]] | None = None
) -> dict[str, list[float]]:
    """Returns what measure(prompts, steps) gives for each point of cases(): the milliseconds of the prompts, and those
    of a decode step after them. Before a point is measured, as many of its prompts as fill a few passes run, because
    the first pass of a size compiles kernels."""
    chance = random.Random(1)
    times = {}
    for name, lengths in cases(points).items():
        some = [
            length for length, end in zip(lengths, itertools.accumulate(lengths), strict=True) if end <= WARM_TOKENS
        ]
        measure(make_prompts(chance, some, vocabulary), 4)
        times[name] = measure(make_prompts(chance, lengths, vocabulary), NEW_TOKENS)
        print(f"{name}: prompts {times[name][0]:.1f} ms, step {times[name][1]:.3f} ms", flush=True)
    return times


def greedy_prompts(vocabulary: int, count: int = 64) -> Prompts:
    """Returns prompts for 256 new tokens each."""
    chance = random.Random(2)
    return make_prompts(chance, [chance.randrange(16, 2048) for _ in range(count)], vocabulary)


def token(chosen: int, logprobs: list[float]) -> list[float]:
    """Returns [token, best logprob, second logprob]."""
    best, second = sorted(logprobs, reverse=True)[:2]
    return [chosen, best, second]


def compare(first: str, second: str) -> None:
    """Prints the steps of two files, and fails unless nearly all prompts have equal tokens up to a near tie."""
    a, b = (json.loads(Path(path).read_text()) for path in (first, second))
    for line in step_lines(a, b):
        print(line)
    if a["greedy"]:
        line, agree = compare_tokens(a["greedy"], b["greedy"])
        print(line)
        assert agree


def step_lines(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Returns a sentence for each point: the times of an engine, and those of another."""
    lines = []
    for name, (prompt, step) in a["times"].items():
        other_prompt, other_step = b["times"][name]
        lines.append(
            f"{name}: step {a['backend']} {step:.3f} ms, {b['backend']} {other_step:.3f} ms "
            f"({(other_step / step - 1) * 100:+.1f} %); prompts {prompt:.1f} and {other_prompt:.1f} ms "
            f"({(other_prompt / prompt - 1) * 100:+.1f} %)"
        )
    return lines


def compare_tokens(
    own: list[list[list[float]]], others: list[list[list[float]]], near_tie: float = NEAR_TIE
) -> tuple[str, bool]:
    """Compares tokens of prompts, as token() returns them. Returns what was found, and True if nearly all prompts have
    equal tokens up to the first near tie."""
    equal = ties = 0
    gaps, apart = [], 0.0
    for a, b in zip(own, others, strict=True):
        differing = [step for step, (x, y) in enumerate(zip(a, b, strict=True)) if x[0] != y[0]]
        common = differing[0] if differing else len(a)
        apart = max([apart, *(abs(x[1] - y[1]) for x, y in zip(a[:common], b[:common], strict=True))])
        if not differing:
            equal += 1
            continue
        gaps.append(a[common][1] - a[common][2])
        ties += gaps[-1] < near_tie
    line = f"{equal} of {len(own)} prompts have equal tokens, {ties} more until a near tie"
    line += f", largest gap where tokens part {max(gaps):.4f}" if gaps else ""
    return f"{line}; logprobs of equal tokens differ by {apart:.4f} at most", (equal + ties) / len(own) >= 0.99
