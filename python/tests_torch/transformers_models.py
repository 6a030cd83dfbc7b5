# SPDX-License-Identifier: Apache-2.0
"""Models, prompts and generation for the tests of fovea.transformers."""

import os
from pathlib import Path

import fovea.transformers
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import cache as cache_module

MODELS = Path(__file__).parents[2] / "testdata" / "models"
SMOLLM2 = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fovea" / "smollm2"
if not torch.cuda.is_available():
    # transformers asks psutil for the memory of a CPU, and psutil need not be installed.
    cache_module.get_device_and_memory_breakdown = lambda: (torch.device("cpu"), 8 << 30, 0, 0)

FLASH_NAME, PLAIN_NAME = fovea.transformers.register()
# gpt_oss has sinks and Gemma 2 a soft cap, which sdpa does not take.
REFERENCE = {"gpt_oss": "eager", "gemma2": "eager"}
IS_BEFORE_5_19 = fovea.transformers.versions.parse(transformers.__version__) < (5, 19)


@pytest.fixture(autouse=True)
def one_thread():
    """Threads wait for each other, which takes most of the time of small models on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def load(model: str, implementation: str, dtype: torch.dtype = torch.float32, device: str = "cpu"):
    """Returns a model of testdata/models, or SmolLM2."""
    path = SMOLLM2 if model == "smollm2" else MODELS / model
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=implementation)
    return loaded.to(device).eval()


def make_prompts(lengths: list[int], vocabulary: int = 2000) -> list[list[int]]:
    """Returns random prompts. The last shares the first three quarters of the longest other."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, vocabulary, (length,), generator=generator).tolist() for length in lengths]
    longest = max(prompts, key=len)
    return [*prompts, longest[: len(longest) * 3 // 4] + [7, 8, 9]]


def greedy(new: int) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=1)


def generate_batch(model, prompts: list[list[int]], new: int, page: int = 32, **options) -> list[list[int]]:
    """Returns the new tokens of every prompt, by continuous batching."""
    options = {"block_size" if IS_BEFORE_5_19 else "page_size": page, **options}
    with torch.no_grad():
        outputs = model.generate_batch(
            prompts,
            generation_config=greedy(new),
            continuous_batching_config=ContinuousBatchingConfig(**options),
            progress_bar=False,
        )
    by_number = sorted(outputs.values(), key=lambda output: int(output.request_id.split("_")[-1]))
    failed = [output.error for output in by_number if output.error]
    assert not failed, failed[0]
    assert len(by_number) == len(prompts)
    return [output.generated_tokens for output in by_number]


def batching_reference(model: str) -> str:
    """Returns the implementation that continuous batching of transformers uses as the reference of a model."""
    name = REFERENCE.get(model, "sdpa")
    return f"paged|{name}" if IS_BEFORE_5_19 or name == "eager" else name


def padded(prompts: list[list[int]], pad: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns token ids, padded on the left, and the attention mask."""
    length = max(map(len, prompts))
    ids = torch.tensor([[pad] * (length - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


def generate(model, prompts: list[list[int]], new: int, **options) -> list[list[int]]:
    """Returns the new tokens of every prompt, by generate() of one padded batch."""
    ids, mask = padded(prompts)
    device = model.device
    with torch.no_grad():
        tokens = model.generate(
            ids.to(device), attention_mask=mask.to(device), generation_config=greedy(new), **options
        )
    return tokens[:, ids.shape[1] :].tolist()
