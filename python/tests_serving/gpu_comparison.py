# SPDX-License-Identifier: Apache-2.0
"""The parts that the scripts for GPUs share: prompts, times of steps, and the comparison of two engines."""

import json
import random
from collections.abc import Callable
from pathlib import Path

POINTS = [(1, 1024), (1, 16384), (8, 4096), (32, 4096), (64, 4096), (128, 1024)]  # requests, tokens of a prompt
NEW_TOKENS = 64
NEAR_TIE = 1e-2  # difference of two logprobs

Prompts = list[list[int]]


def _prompts(chance: random.Random, lengths: list[int], vocabulary: int) -> Prompts:
    return [[chance.randrange(vocabulary // 2) for _ in range(length)] for length in lengths]


def time_steps(seconds: Callable[[Prompts, int], float], vocabulary: int) -> dict[str, list[float]]:
    """Returns the milliseconds of a prompt with 2 new tokens, and of a step, for each point. seconds(prompts, n) is the
    time in which an engine generates n tokens for each prompt."""
    chance = random.Random(1)
    mixed = [int(128 * 2 ** chance.uniform(0, 7)) for _ in range(64)]  # log-uniform, 128 to 16384
    cases = {f"{count} x {length}": [length] * count for count, length in POINTS} | {"64 mixed": mixed}
    times = {}
    for name, lengths in cases.items():
        seconds(_prompts(chance, lengths[:2], vocabulary), 4)
        short = seconds(_prompts(chance, lengths, vocabulary), 2)
        long = seconds(_prompts(chance, lengths, vocabulary), 2 + NEW_TOKENS)
        times[name] = [short * 1e3, (long - short) / NEW_TOKENS * 1e3]
        print(f"{name}: prompt + 2 tokens {times[name][0]:.1f} ms, step {times[name][1]:.3f} ms", flush=True)
    return times


def greedy_prompts(vocabulary: int) -> Prompts:
    """Returns 64 prompts for 256 new tokens each."""
    chance = random.Random(2)
    return _prompts(chance, [chance.randrange(16, 2048) for _ in range(64)], vocabulary)


def token(chosen: int, logprobs: list[float]) -> list[float]:
    """Returns [token, best logprob, second logprob]."""
    best, second = sorted(logprobs, reverse=True)[:2]
    return [chosen, best, second]


def compare(first: str, second: str) -> None:
    """Prints the steps of two files, and fails unless nearly all prompts have equal tokens up to a near tie."""
    a, b = (json.loads(Path(path).read_text()) for path in (first, second))
    for name, (prompt, step) in a["times"].items():
        other_prompt, other_step = b["times"][name]
        print(
            f"{name}: step {a['backend']} {step:.3f} ms, {b['backend']} {other_step:.3f} ms "
            f"({(other_step / step - 1) * 100:+.1f} %); prompt {prompt:.1f} and {other_prompt:.1f} ms "
            f"({(other_prompt / prompt - 1) * 100:+.1f} %)"
        )
    equal = ties = 0
    for own, ours in zip(a["greedy"], b["greedy"], strict=True):
        differing = [step for step, (x, y) in enumerate(zip(own, ours, strict=True)) if x[0] != y[0]]
        if not differing:
            equal += 1
        elif own[differing[0]][1] - own[differing[0]][2] < NEAR_TIE:
            ties += 1
    print(f"{equal} of {len(a['greedy'])} prompts have equal tokens, {ties} more until a near tie")
    assert (equal + ties) / len(a["greedy"]) >= 0.99
