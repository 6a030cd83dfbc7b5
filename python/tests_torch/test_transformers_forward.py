# SPDX-License-Identifier: Apache-2.0
"""Ordinary forward passes and generate() of transformers with Fovea, in fp32 on the CPU."""

import pytest
import torch

pytest.importorskip("transformers")

import transformers_models as models  # noqa: E402
from transformers_models import one_thread  # noqa: E402, F401

ALL = ["llama", "qwen3", "gemma2", "gpt_oss", "llama4_text", "deepseek_v3", "qwen3_next"]


@pytest.mark.parametrize("name", ALL)
def test_generate_equals_the_reference(name):
    """One batch padded on the left; windows and chunks of 128 tokens are passed."""
    implementation = models.PLAIN_NAME if name == "llama4_text" else models.FLASH_NAME
    prompts = models.make_prompts([5, 60, 120])
    expected = models.generate(models.load(name, models.REFERENCE.get(name, "sdpa")), prompts, 64)
    found = models.generate(models.load(name, implementation), prompts, 64)
    assert found == expected


def test_generate_256_tokens_without_padding():
    prompts = [models.make_prompts([40])[0]]
    expected = models.generate(models.load("llama", "sdpa"), prompts, 256)
    assert models.generate(models.load("llama", models.PLAIN_NAME), prompts, 256) == expected
    assert len(expected[0]) == 256


def test_generate_with_a_static_cache():
    prompts = models.make_prompts([5, 40])
    expected = models.generate(models.load("llama", "sdpa"), prompts, 32)
    model = models.load("llama", models.PLAIN_NAME)
    assert models.generate(model, prompts, 32, cache_implementation="static", disable_compile=True) == expected


def test_generate_in_inference_mode_and_then_without():
    """Memory that outlives the first call is written by the second."""
    model = models.load("gpt_oss", models.PLAIN_NAME)
    prompts = models.make_prompts([90, 31])
    with torch.inference_mode():
        expected = models.generate(model, prompts, 3)
    assert models.generate(model, prompts, 3) == expected


def _logits(model, ids, **inputs):
    with torch.no_grad():
        return model(ids, **inputs).logits


@pytest.mark.parametrize("implementation", [models.PLAIN_NAME, models.FLASH_NAME])
@pytest.mark.parametrize("side", ["left", "right", "none"])
def test_logits_of_padded_batches(implementation, side):
    prompts = models.make_prompts([9, 33])
    ids, mask = models.padded(prompts)
    if side == "right":
        ids, mask = ids.flip(1), mask.flip(1)
    if side == "none":
        mask = torch.ones_like(ids)
    expected = _logits(models.load("llama", "eager"), ids, attention_mask=mask)
    found = _logits(models.load("llama", implementation), ids, attention_mask=mask)
    kept = mask.bool()
    torch.testing.assert_close(found[kept], expected[kept], atol=2e-4, rtol=2e-4)


def test_sequences_packed_by_position_ids():
    """Position ids that start again begin a sequence."""
    first, second = models.make_prompts([21, 34])[:2]
    packed = torch.tensor([first + second])
    positions = torch.tensor([[*range(21), *range(34)]])
    model = models.load("llama", models.FLASH_NAME)
    found = _logits(model, packed, position_ids=positions, use_cache=False)[0]
    expected = torch.cat([_logits(model, torch.tensor([each]))[0] for each in (first, second)])
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


def test_chunks_of_a_prompt_over_a_cache():
    """A prompt in two forward passes: the second attends to more keys than tokens."""
    prompt = torch.tensor([models.make_prompts([150])[0]])
    for name in ("gemma2", "gpt_oss"):
        model = models.load(name, models.FLASH_NAME)
        expected = _logits(models.load(name, "eager"), prompt)
        with torch.no_grad():
            cached = model(prompt[:, :140], use_cache=True).past_key_values
            found = model(prompt[:, 140:], past_key_values=cached).logits
        torch.testing.assert_close(found, expected[:, 140:], atol=2e-4, rtol=2e-4)


def test_soft_cap_changes_logits_as_in_eager_attention():
    prompt = torch.tensor([models.make_prompts([60])[0]])
    found = []
    for name in ("eager", models.FLASH_NAME):
        model = models.load("gemma2", name)
        plain = _logits(model, prompt)
        for layer in model.model.layers:
            layer.self_attn.attn_logit_softcapping = 0.5
        found.append(_logits(model, prompt))
    torch.testing.assert_close(found[1], found[0], atol=2e-4, rtol=2e-4)
    assert (found[1] - plain).abs().max() > 0.01


def test_bidirectional_models():
    """Encoders see all tokens of their sequence but no padding."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        vocab_size=500,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model = BertModel(config).eval()
    ids, mask = models.padded(models.make_prompts([7, 19], vocabulary=400))
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).last_hidden_state
        model.set_attn_implementation(models.PLAIN_NAME)
        found = model(ids, attention_mask=mask).last_hidden_state
    kept = mask.bool()
    torch.testing.assert_close(found[kept], expected[kept], atol=1e-4, rtol=1e-4)


def test_refusals_name_the_reason():
    model = models.load("llama", models.FLASH_NAME)
    ids = torch.tensor([[5, 6, 7]])
    with pytest.raises(NotImplementedError, match="no backward pass: run the model under torch.no_grad"):
        model(ids)
    with pytest.raises(NotImplementedError, match="attention_mask has 4 dimensions, must have 2"):
        _logits(model, ids, attention_mask=torch.zeros(1, 1, 3, 3))
    with pytest.raises(TypeError, match="dtype is torch.float64"):
        _logits(model.to(torch.float64), ids)


def test_dropout_is_refused():
    model = models.load("llama", models.FLASH_NAME)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(NotImplementedError, match="dropout is 0.1, must be 0"):
        _logits(model.train(), torch.tensor([[5, 6, 7]]))


@pytest.mark.skipif(not models.IS_BEFORE_5_19, reason="names with paged| exist before 5.19 only")
def test_paged_name_without_a_paged_cache_is_refused():
    model = models.load("llama", f"paged|{models.FLASH_NAME}")
    with pytest.raises(ValueError, match="was called without a paged cache"):
        _logits(model, torch.tensor([[5, 6, 7]]))


def test_masks_with_functions_of_a_model_are_refused():
    from transformers.masking_utils import create_causal_mask

    model = models.load("llama", models.FLASH_NAME)
    with pytest.raises(NotImplementedError, match="or_mask_function or and_mask_function"):
        create_causal_mask(
            config=model.config,
            inputs_embeds=torch.zeros(1, 3, 8),
            attention_mask=None,
            past_key_values=None,
            or_mask_function=lambda batch, head, query, key: query == key,
        )
