# SPDX-License-Identifier: Apache-2.0
"""Continuous batching of transformers: Fovea's tokens equal those of sdpa or eager, in fp32 on the CPU."""

import pytest

pytest.importorskip("transformers")

import transformers_models as models  # noqa: E402
from transformers.generation.continuous_batching import cache as cache_module  # noqa: E402
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager  # noqa: E402
from transformers_models import one_thread  # noqa: E402, F401

LENGTHS = [5, 37, 130, 200, 64, 3]


@pytest.fixture
def counts(monkeypatch):
    """Counts the tokens that requests found in the pages of earlier ones."""
    found = {"shared": 0}
    original = cache_module.PagedAttentionCache.search_prefix_match

    def search(self, request_id, prompt_ids):
        tokens = original(self, request_id, prompt_ids)
        found["shared"] += tokens
        return tokens

    monkeypatch.setattr(cache_module.PagedAttentionCache, "search_prefix_match", search)
    return found


@pytest.fixture
def no_copies(monkeypatch):
    """Returns a function that makes the functions of transformers an error that copy the keys and values of a pass."""

    def refuse(*args, **kwargs):
        raise AssertionError("the keys and values of a layer were copied")

    if models.IS_BEFORE_5_19:
        owner = cache_module.PagedAttentionCache
    else:
        from transformers.generation.continuous_batching.cache_allocators.full_attention import (
            FullAttentionCacheAllocator as owner,
        )
    return lambda: monkeypatch.setattr(owner, "update", refuse)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt_oss"])
def test_tokens_equal_the_reference(name, no_copies):
    """Prompts of several lengths in chunks of at most 96 tokens; windows of 128 tokens are passed."""
    prompts = models.make_prompts(LENGTHS)
    options = {"num_blocks": 128, "max_batch_tokens": 96}
    expected = models.generate_batch(models.load(name, models.batching_reference(name)), prompts, 256, **options)
    no_copies()
    found = models.generate_batch(models.load(name, models.FLASH_NAME), prompts, 256, **options)
    assert found == expected
    assert all(len(tokens) == 256 for tokens in found)


@pytest.mark.skipif(not models.SMOLLM2.exists(), reason="tools/fetch_smollm2.sh fetches the model")
def test_smollm2_continues_text():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models.SMOLLM2)
    texts = [
        "The three largest cities of France are",
        "def fibonacci(n):",
        "Once upon a time, in a village by the sea,",
    ]
    prompts = [tokenizer(text).input_ids for text in texts]
    options = {"num_blocks": 64, "max_batch_tokens": 64}
    expected = models.generate_batch(
        models.load("smollm2", models.batching_reference("smollm2")), prompts, 32, **options
    )
    assert models.generate_batch(models.load("smollm2", models.FLASH_NAME), prompts, 32, **options) == expected


def test_prefix_of_an_earlier_request_is_read_from_its_pages(counts):
    """The last prompt is admitted after its prefix was computed."""
    prompts = models.make_prompts([300, 20])
    options = {"num_blocks": 64, "max_batch_tokens": 64, "max_requests_per_batch": 1}
    expected = models.generate_batch(models.load("llama", models.batching_reference("llama")), prompts, 32, **options)
    counts["shared"] = 0
    found = models.generate_batch(models.load("llama", models.FLASH_NAME), prompts, 32, **options)
    assert counts["shared"] >= 192
    assert found == expected


def test_requests_that_lose_their_pages_continue_alike(monkeypatch):
    """A cache that is too small for all requests makes the scheduler evict some and compute them again."""
    evicted = []
    original = OffloadingManager.offload_requests

    def offload_requests(self):
        number = original(self)
        evicted.append(number)
        return number

    monkeypatch.setattr(OffloadingManager, "offload_requests", offload_requests)
    prompts = models.make_prompts([60, 70, 80, 50])
    options = {"num_blocks": 14, "max_batch_tokens": 64}
    roomy = {"num_blocks": 128, "max_batch_tokens": 64}
    expected = models.generate_batch(models.load("llama", models.batching_reference("llama")), prompts, 96, **roomy)
    evicted.clear()
    found = models.generate_batch(models.load("llama", models.FLASH_NAME), prompts, 96, **options)
    assert any(evicted)
    assert found == expected
