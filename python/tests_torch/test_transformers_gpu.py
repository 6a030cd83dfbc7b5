# SPDX-License-Identifier: Apache-2.0
"""Continuous batching and generate() of transformers on a GPU, in bf16 with CUDA graphs."""

import pytest
import torch

pytest.importorskip("transformers")

import transformers_models as models  # noqa: E402

pytestmark = pytest.mark.gpu

LENGTHS = [5, 37, 130, 200, 64, 3, 77, 150]
NEW = 256


def batching(model, prompts, *, graphs: bool, name: str) -> list[list[int]]:
    loaded = models.load(model, name, torch.bfloat16, "cuda")
    return models.generate_batch(
        loaded,
        prompts,
        NEW,
        page=32,
        num_blocks=256,
        max_batch_tokens=128,
        use_cuda_graph=graphs,
        use_async_batching=graphs,
        max_requests_per_batch=16,
    )


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt_oss"])
def test_graphs_do_not_change_tokens(name):
    """Padding changes how keys are divided among blocks, and so the last bits of sums."""
    prompts = models.make_prompts(LENGTHS)
    eager = batching(name, prompts, graphs=False, name=models.FLASH_NAME)
    graphs = batching(name, prompts, graphs=True, name=models.FLASH_NAME)
    _assert_equal_but_for_ties(name, prompts, graphs, eager)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt_oss"])
def test_tokens_equal_the_reference(name):
    prompts = models.make_prompts(LENGTHS)
    expected = batching(name, prompts, graphs=False, name="paged|eager")
    found = batching(name, prompts, graphs=True, name=models.FLASH_NAME)
    _assert_equal_but_for_ties(name, prompts, found, expected)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_next"])
def test_generate_equals_the_reference(name):
    prompts = models.make_prompts([5, 60, 120])
    reference = models.REFERENCE.get(name, "sdpa")
    expected = models.generate(models.load(name, reference, torch.bfloat16, "cuda"), prompts, 64)
    found = models.generate(models.load(name, models.FLASH_NAME, torch.bfloat16, "cuda"), prompts, 64)
    _assert_equal_but_for_ties(name, prompts, found, expected)


def test_logits_are_close_to_fp32():
    """bf16 logits of Fovea are as near to fp32 ones as those of eager attention, within a factor of 1.5."""
    ids = torch.tensor([models.make_prompts([300])[0]], device="cuda")
    with torch.no_grad():
        exact = models.load("llama", "eager", torch.float32, "cuda")(ids).logits
        errors = [
            (models.load("llama", name, torch.bfloat16, "cuda")(ids).logits.float() - exact).abs().mean().item()
            for name in ("eager", models.FLASH_NAME)
        ]
    assert errors[1] <= 1.5 * errors[0], errors


def _assert_equal_but_for_ties(name: str, prompts, found, expected, tie: float = 0.25) -> None:
    """Continuations may part only where fp32 logits of the two tokens differ by less than `tie`: the logits of these
    models reach 16, where neighbours in bf16 are 0.06 apart."""
    model = models.load(name, "eager", torch.float32, "cuda")
    equal = 0
    for prompt, one, other in zip(prompts, found, expected, strict=True):
        assert len(one) == len(other)
        place = next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)
        if place is None:
            equal += 1
            continue
        with torch.no_grad():
            logits = model(torch.tensor([prompt + one[:place]], device="cuda")).logits[0, -1]
        gap = (logits[one[place]] - logits[other[place]]).abs().item()
        best = (logits.max() - torch.minimum(logits[one[place]], logits[other[place]])).item()
        assert gap < tie and best < 2 * tie, (
            f"token {place} of a prompt of {len(prompt)}: gap {gap}, to the best {best}"
        )
    print(f"{name}: {equal} of {len(found)} continuations are equal")
