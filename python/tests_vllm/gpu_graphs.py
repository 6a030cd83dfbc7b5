# SPDX-License-Identifier: Apache-2.0
"""Checks that steps of changing batches in CUDA graphs have the bits of eager steps, with Fovea in vLLM.

    export PYTHONPATH=python/tests_serving
    python3 gpu_graphs.py run eager MODEL_FOLDER eager.json
    python3 gpu_graphs.py run FULL_DECODE_ONLY MODEL_FOLDER graphs.json     # or FULL: prompts in graphs, too
    python3 gpu_graphs.py compare eager.json graphs.json

Requests arrive and end all the time, and at least 1000 passes run in graphs. A graph is captured for every number of
tokens, so that matrix products have the same sizes in both, and only attention could differ.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

from gpu_comparison import make_prompts

_STEPS = 1500
_REQUESTS = 16
_TOKENS = 64  # new tokens of a pass, at most
_MIN_REPLAYS = 1000


def run(mode: str, folder: str, out: str) -> None:
    import torch
    from gpu_engine import make_engine

    graphs = {"mode": 0, "cudagraph_mode": mode, "cudagraph_capture_sizes": list(range(1, _TOKENS + 1))}
    llm = make_engine(
        "CUSTOM",
        folder,
        max_model_len=1024,
        max_num_seqs=_REQUESTS,
        max_num_batched_tokens=_TOKENS,
        kv_cache_memory_bytes=1 << 30,
        gpu_memory_utilization=0.02,
        **({"enforce_eager": True} if mode == "eager" else {"compilation_config": graphs}),
    )
    replays = 0
    replay = torch.cuda.CUDAGraph.replay

    def count(graph: Any) -> None:
        nonlocal replays
        replays += 1
        replay(graph)

    torch.cuda.CUDAGraph.replay = count
    answers, steps = _serve(llm.llm_engine, llm.llm_engine.model_config.get_vocab_size())
    print(f"{mode}: {steps} steps, {replays} graphs replayed, {len(answers)} requests", flush=True)
    Path(out).write_text(json.dumps({"steps": steps, "replays": replays, "answers": answers}), encoding="utf-8")


def _serve(engine: Any, vocabulary: int) -> tuple[dict[str, list[Any]], int]:
    """Serves requests that arrive over more than _STEPS steps. Returns the tokens of each with their logprobs."""
    from vllm import SamplingParams

    chance = random.Random(4)
    answers: dict[str, list[Any]] = {}
    added = steps = 0
    while steps < _STEPS or engine.has_unfinished_requests():
        while steps < _STEPS and added - len(answers) < _REQUESTS and (added == 0 or chance.random() < 0.06):
            new_tokens = chance.randrange(1, 160)
            sampling = SamplingParams(
                temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, logprobs=2
            )
            # Mostly short prompts, which one pass takes, and some of several chunks.
            length = chance.randrange(1, 300 if chance.random() < 0.2 else 48)
            prompt = make_prompts(chance, [length], vocabulary)[0]
            engine.add_request(str(added), {"prompt_token_ids": prompt}, sampling)
            added += 1
        for output in engine.step():
            if output.finished:
                tokens = list(output.outputs[0].token_ids)
                logprobs = [sorted(item.logprob for item in step.values()) for step in output.outputs[0].logprobs]
                answers[output.request_id] = [tokens, logprobs]
        steps += 1
    return answers, steps


def compare(first: str, second: str) -> None:
    a, b = (json.loads(Path(path).read_text()) for path in (first, second))
    assert a["replays"] == 0, "the first file is not that of an eager run"
    assert b["replays"] >= _MIN_REPLAYS, f"{b['replays']} passes ran in graphs, needed: {_MIN_REPLAYS}"
    assert a["answers"].keys() == b["answers"].keys()
    differing = [name for name, answer in a["answers"].items() if answer != b["answers"][name]]
    print(
        f"{len(a['answers'])} requests in {a['steps']} eager steps and {b['steps']} steps with {b['replays']} graphs: "
        f"{len(differing)} have other tokens or other bits of a logprob"
    )
    assert not differing


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run(*sys.argv[2:5])
    else:
        compare(*sys.argv[2:4])
