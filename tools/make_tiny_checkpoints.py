#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes testdata/goldens/: for each architecture a tiny config, the list of its weights, and the logits that
transformers 5.24 computes from them in eager fp32. Arguments restrict it to the named architectures.

No weights are stored. Value i of a tensor is offset + scale * u, rounded to bf16, where u in [-1, 1) comes from the
splitmix64 of the FNV-1a hash of the tensor's name plus i; weights.json holds shape, scale and offset of every tensor.
The tests generate the same bits (tests/support/golden_model.h).

    python3 -m venv ~/.cache/fovea/transformers
    ~/.cache/fovea/transformers/bin/pip install 'torch==2.*' 'transformers==5.24.*' safetensors
    ~/.cache/fovea/transformers/bin/python tools/make_tiny_checkpoints.py
"""
import json
import math
import pathlib
import re
import shutil
import sys
import tempfile

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = pathlib.Path(__file__).resolve().parent.parent
OUT = ROOT / "testdata" / "goldens"
PROMPTS = [7, 33, 150, 170, 200]
FULL_LOGITS = 33  # prompts up to this length keep the logits of every token

COMMON = dict(vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
              num_key_value_heads=2, max_position_embeddings=512, rms_norm_eps=1e-5, tie_word_embeddings=False,
              bos_token_id=1, eos_token_id=2, pad_token_id=0)

ABSENT = object()  # for fields of COMMON that an architecture does not have
NO_ATTENTION = dict.fromkeys(["intermediate_size", "num_attention_heads", "num_key_value_heads",
                              "max_position_embeddings", "rms_norm_eps"], ABSENT)

# Config fields of each architecture. Fields that only it has get values that change the logits.
MODELS = {
    # Windows on all layers, heads wider than hidden / heads.
    "mistral": dict(head_dim=64, sliding_window=24, rope_theta=1e6),
    # All MLPs are mixtures of experts; the default theta.
    "mixtral": dict(head_dim=64, sliding_window=None, num_local_experts=4, num_experts_per_tok=2,
                    intermediate_size=64),
    # Biases of q, k and v; windows from the third layer on.
    "qwen2": dict(hidden_size=128, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=4,
                  use_sliding_window=True, sliding_window=20, max_window_layers=2, rope_theta=1e6,
                  tie_word_embeddings=True),
    # Norms of q and k, one mixture of experts among dense layers, windows on all layers.
    "qwen3_moe": dict(head_dim=64, num_hidden_layers=4, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True,
                      decoder_sparse_step=2, mlp_only_layers=[1], moe_intermediate_size=32, use_sliding_window=True,
                      sliding_window=40, rope_theta=1e6),
    # Different frequencies on windowed and on full layers, in the older spelling.
    "gemma3_text": dict(head_dim=64, num_hidden_layers=4, query_pre_attn_scalar=96, sliding_window=16,
                        sliding_window_pattern=3, rope_theta=1e6, rope_local_base_freq=1e4,
                        rope_scaling={"rope_type": "linear", "factor": 8.0}, tie_word_embeddings=True),
    # Fused projections, a part of each head rotates, longrope beyond the original context.
    "phi3": dict(hidden_size=192, num_attention_heads=2, num_key_value_heads=1, partial_rotary_factor=0.75,
                 rope_theta=1e4, original_max_position_embeddings=4, sliding_window=100,
                 rope_scaling={"type": "longrope", "short_factor": [1.0 + 0.01 * i for i in range(36)],
                               "long_factor": [1.0 + 0.05 * i * i for i in range(36)]}),
    # The prompts fit into the original context, so the short factors apply.
    "phi3_short": dict(hidden_size=192, num_attention_heads=2, num_key_value_heads=1, partial_rotary_factor=0.75,
                       rope_theta=1e4, original_max_position_embeddings=512, num_hidden_layers=2,
                       rope_scaling={"type": "longrope", "short_factor": [1.0 + 0.01 * i for i in range(36)],
                                     "long_factor": [1.0 + 0.05 * i * i for i in range(36)]}),
    # Norms only after the blocks, and norms over all heads of q and k together.
    "olmo2": dict(hidden_size=256, rope_theta=5e5),
    # Interleaved pairs of half a head, biases of q, k and v, a fused gate and up, norms on both sides.
    "glm4": dict(head_dim=64, attention_bias=True, rope_theta=1e4),
    "glm": dict(head_dim=64, attention_bias=True, partial_rotary_factor=0.5, rope_theta=1e4),
    # Layers without positions.
    "smollm3": dict(hidden_size=256, num_hidden_layers=4, no_rope_layers=[1, 0, 1, 1], rope_theta=5e6,
                    tie_word_embeddings=True),
    # Four multipliers, biases everywhere.
    "granite": dict(hidden_size=128, num_attention_heads=2, num_key_value_heads=1, embedding_multiplier=6.0,
                    residual_multiplier=0.3, attention_multiplier=0.03, logits_scaling=3.0, attention_bias=True,
                    mlp_bias=True, rope_theta=1e4),
    # Mamba2 layers with all biases, groups of B and C, bounded time steps, and attention without positions.
    "granitemoehybrid": dict(hidden_size=128, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=4,
                             layer_types=["mamba", "attention", "mamba", "mamba"], num_local_experts=0,
                             num_experts_per_tok=0, shared_intermediate_size=96, position_embedding_type="nope",
                             embedding_multiplier=6.0, residual_multiplier=0.3, attention_multiplier=0.03,
                             logits_scaling=3.0, mamba_n_heads=16, mamba_d_head=16, mamba_expand=2, mamba_n_groups=2,
                             mamba_d_state=32, mamba_d_conv=3, mamba_conv_bias=True, mamba_proj_bias=True,
                             mamba_chunk_size=64, time_step_limit=[0.05, 1.5], attention_bias=True),
    # The same without biases and bounds, with rotary positions and the default widths of a head.
    "granitemoehybrid_rope": dict(hidden_size=128, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=3,
                                  layer_types=["mamba", "mamba", "attention"], num_local_experts=0,
                                  num_experts_per_tok=0, shared_intermediate_size=64, position_embedding_type="rope",
                                  rope_theta=1e4, mamba_n_heads=8, mamba_d_head="auto", mamba_n_groups=1,
                                  mamba_d_state=16, mamba_conv_bias=False, mamba_chunk_size=32,
                                  tie_word_embeddings=True),
    # Selective scans alone, with all biases and steps of a rank of their own.
    "mamba": dict(NO_ATTENTION, num_hidden_layers=4, expand=3, state_size=8, conv_kernel=3, time_step_rank=16,
                  use_bias=True, use_conv_bias=True, layer_norm_epsilon=1e-4),
    # The same without biases, with tied embeddings and the default widths.
    "mamba_plain": dict(NO_ATTENTION, hidden_size=128, num_hidden_layers=2, use_conv_bias=False,
                        layer_norm_epsilon=1e-5, tie_word_embeddings=True),
    # Short convolutions with all biases, in the spelling of the first checkpoints; an MLP of 144 columns.
    "lfm2": dict(hidden_size=128, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=4,
                 full_attn_idxs=[2], conv_L_cache=4, conv_bias=True, rms_norm_eps=ABSENT, norm_eps=1e-4,
                 intermediate_size=ABSENT, block_ff_dim=150, block_auto_adjust_ff_dim=True,
                 block_ffn_dim_multiplier=1.3, block_multiple_of=48, rope_theta=1e4, tie_embedding=True),
    # The same without biases, in the newer spelling, with a head of its own.
    "lfm2_plain": dict(hidden_size=128, num_attention_heads=2, num_key_value_heads=2,
                       layer_types=["conv", "full_attention", "conv"], rms_norm_eps=ABSENT, norm_eps=1e-5,
                       block_auto_adjust_ff_dim=False),
    # A dense layer before mixtures of experts, which a bias chooses.
    "lfm2_moe": dict(hidden_size=128, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=4,
                     layer_types=["conv", "conv", "full_attention", "conv"], rms_norm_eps=ABSENT, norm_eps=1e-5,
                     num_dense_layers=1, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32,
                     use_expert_bias=True, norm_topk_prob=True, routed_scaling_factor=2.5,
                     tie_word_embeddings=True),
    # Expert groups ranked by their best expert, YaRN, queries without a latent.
    "deepseek_v2": dict(num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=512, q_lora_rank=None,
                        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=8,
                        num_experts_per_tok=3, n_group=4, topk_group=2, topk_method="group_limited_greedy",
                        routed_scaling_factor=2.5, n_shared_experts=2, moe_intermediate_size=32,
                        first_k_dense_replace=1, norm_topk_prob=False, rope_theta=1e4,
                        rope_scaling={"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64,
                                      "mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 32, "beta_slow": 1}),
    # KDA layers and MLA without positions, in the spelling of the published checkpoint.
    "kimi_linear": dict(num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=2,
                        max_position_embeddings=ABSENT, model_max_length=512, kv_lora_rank=512, q_lora_rank=None,
                        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, mla_use_nope=True, num_experts=8,
                        num_experts_per_token=3, num_shared_experts=1, moe_intermediate_size=32,
                        first_k_dense_replace=1, moe_layer_freq=1, moe_renormalize=True,
                        moe_router_activation_func="sigmoid", num_expert_group=1, topk_group=1,
                        routed_scaling_factor=2.446,
                        linear_attn_config=dict(full_attn_layers=[3], kda_layers=[1, 2, 4], head_dim=32, num_heads=8,
                                                short_conv_kernel_size=4)),
}
ARCHITECTURES = {"mistral": "MistralForCausalLM", "mixtral": "MixtralForCausalLM", "qwen2": "Qwen2ForCausalLM",
                 "qwen3_moe": "Qwen3MoeForCausalLM", "gemma3_text": "Gemma3ForCausalLM", "phi3": "Phi3ForCausalLM",
                 "olmo2": "Olmo2ForCausalLM", "glm4": "Glm4ForCausalLM", "glm": "GlmForCausalLM",
                 "smollm3": "SmolLM3ForCausalLM", "granite": "GraniteForCausalLM",
                 "granitemoehybrid": "GraniteMoeHybridForCausalLM", "deepseek_v2": "DeepseekV2ForCausalLM",
                 "kimi_linear": "KimiLinearForCausalLM", "mamba": "MambaForCausalLM",
                 "lfm2": "Lfm2ForCausalLM", "lfm2_moe": "Lfm2MoeForCausalLM"}


def model_type(name):
    return name.removesuffix("_short").removesuffix("_rope").removesuffix("_plain")


def config_of(name):
    """Returns config.json in the spelling that checkpoints used when the architecture appeared."""
    kind = model_type(name)
    fields = {key: value for key, value in {**COMMON, **MODELS[name]}.items() if value is not ABSENT}
    return {"architectures": [ARCHITECTURES[kind]], "model_type": kind, "dtype": "bfloat16", **fields}


def uniform(name, count):
    """Returns float32 values in [-1, 1) that are multiples of 2^-23."""
    seed = np.uint64(0xCBF29CE484222325)
    with np.errstate(over="ignore"):
        for byte in name.encode():
            seed = (seed ^ np.uint64(byte)) * np.uint64(0x100000001B3)
        z = seed + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)


def scale_of(name, shape, plus_one):
    """Returns scale and offset of a tensor. The scale is a power of two, so that only the final rounding is inexact."""
    if name.endswith("bias"):
        return 0.25, 0.0
    if len(shape) == 1:
        return 0.5, 0.0 if plus_one else 1.0
    if "embed_tokens" in name:
        return 0.25, 0.0
    gain = 4 if name.endswith("gate.weight") else 1.2
    return 2.0 ** round(math.log2(gain * math.sqrt(3 / shape[-1]))), 0.0


def tensor_of(name, entry):
    values = np.float32(entry["offset"]) + np.float32(entry["scale"]) * uniform(name, math.prod(entry["shape"]))
    return torch.from_numpy(values).to(torch.bfloat16).reshape(entry["shape"])


def weights_of(config, folder):
    """Returns names and shapes as a checkpoint stores them."""
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16).save_pretrained(folder)
    with safe_open(folder / "model.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}
    # transformers writes the dense layer of Kimi Linear under another name than its checkpoint has.
    shapes = {re.sub(r"block_sparse_moe\.(\w+_proj)", r"mlp.\1", name): shape for name, shape in shapes.items()}
    plus_one = config["model_type"].startswith("gemma")
    entries = {}
    for name in sorted(shapes):
        scale, offset = scale_of(name, shapes[name], plus_one)
        entries[name] = {"shape": shapes[name], "scale": scale, "offset": offset}
    return entries


def prompts(vocabulary):
    return [torch.from_numpy((uniform(f"prompt_{i}", n) * 0.5 + 0.5) * (vocabulary - 3) + 3).to(torch.int32)
            for i, n in enumerate(PROMPTS)]


def logits_of(folder, tokens, dtype=torch.float32):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    with torch.no_grad():
        return [model(ids[None].long()).logits[0].float() for ids in tokens]


def make(name, patch=None):
    """Returns the logits of the five prompts. Writes the folder too, unless a patch changes its config."""
    config = {**config_of(name), **(patch or {})}
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        entries = weights_of(config, folder)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file({key: tensor_of(key, entry) for key, entry in entries.items()}, folder / "model.safetensors",
                  metadata={"format": "pt"})
        tokens = prompts(config["vocab_size"])
        logits = logits_of(folder, tokens)
        rounded = logits_of(folder, tokens, torch.bfloat16)
    if patch is not None:
        return logits
    # GPU tests bound their error by the error that bf16 rounding causes in the last logits.
    errors = [(a[-1] - b[-1]).abs().max() for a, b in zip(logits, rounded)]
    reference = {"bf16_error": torch.stack(errors)}
    for i, (ids, rows) in enumerate(zip(tokens, logits)):
        reference[f"prompt_{i}.input_ids"] = ids
        reference[f"prompt_{i}.last_logits"] = rows[-1].clone()
        if len(ids) <= FULL_LOGITS:
            reference[f"prompt_{i}.logits"] = rows.clone()
    out = OUT / name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in entries.items())
    (out / "weights.json").write_text("{\n" + lines + "\n}\n")
    save_file(reference, out / "reference.safetensors")
    return logits


def main():
    for name in sys.argv[1:] or MODELS:
        logits = make(name)
        spread = torch.cat(logits).std().item()
        print(f"{name}: logits spread {spread:.2f}, last of the longest prompt {logits[-1][-1][:3].tolist()}")


if __name__ == "__main__":
    main()
