# SPDX-License-Identifier: Apache-2.0
"""Tells how far the logprobs of greedy tokens are from those of transformers in fp32.

    PYTHONPATH=python/tests_serving python3 python/tests_serving/exact_logprobs.py CHECKPOINT RESULT.json ...

A result has the tokens of greedy_prompts() under "greedy", as gpu_sglang.py and gpu_vllm.py write them. transformers
computes the probabilities of each token after the tokens that the engine had generated, on a GPU if there is one.
"""

import json
import sys
from pathlib import Path

import torch
from gpu_comparison import greedy_prompts
from transformers import AutoModelForCausalLM


def differences(model: torch.nn.Module, prompt: list[int], steps: list[list[float]]) -> torch.Tensor:
    """Returns how far the logprob of each token is from the exact one."""
    tokens = torch.tensor([prompt + [int(step[0]) for step in steps]], device=model.device)
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits[0, len(prompt) - 1 :]
    exact = logits.log_softmax(dim=-1).gather(1, tokens[0, len(prompt) :, None])[:, 0]
    return (torch.tensor([step[1] for step in steps], device=model.device) - exact).abs()


def main(checkpoint: str, results: list[str]) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    model = model.to(device).eval()
    for result in results:
        greedy = json.loads(Path(result).read_text())["greedy"]
        prompts = greedy_prompts(model.config.vocab_size, len(greedy))
        found = torch.cat([differences(model, *pair) for pair in zip(prompts, greedy, strict=True)])
        print(
            f"{result}: logprobs of {found.numel()} tokens are off by {found.mean():.5f} on average, "
            f"by {found.quantile(0.99):.4f} in one of a hundred, by {found.max():.4f} at most",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
