#!/usr/bin/env python3
"""Trains testdata/drafts/deepseek_v3_mtp and qwen3_next_mtp, layers of multi-token prediction (MTP, arXiv:2412.19437)
for testdata's models of these names.

Published checkpoints store this layer with the layers of the model. Testdata's stands alone, is narrower than a layer
of the model, and has the model's embeddings and head. A second step, whose features are the layer's own hidden states,
is trained with half the weight, because drafts after the first one are made so.

Also writes reference.json, as train_eagle.py does.

Usage: train_mtp.py TEXT TARGET OUT SECONDS
Needs torch, transformers, numpy and tokenizers; uses a GPU if there is one.
"""

import json
import math
import os
import pathlib
import sys
import tempfile
import time

import numpy
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional
from train_draft import DEVICE, write_weights
from train_eagle import write_reference
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

BATCH, LENGTH, STEPS = 8, 128, 2
RATE = 2e-3


class Mtp(nn.Module):
    """The result of forward() is the features of the next step; norm() of it is what the model's head takes."""

    def __init__(self, config, rms_norm, model):
        super().__init__()
        hidden = config.hidden_size
        self.embedding_norm, self.hidden_norm = (rms_norm(hidden, eps=config.rms_norm_eps) for _ in range(2))
        self.join = nn.Linear(2 * hidden, hidden, bias=False)
        # A model whose last layer is the one wanted gives it its masks, its positions and its names in checkpoints.
        self.model = model

    def forward(self, embedded, features):
        x = self.join(torch.cat([self.embedding_norm(embedded), self.hidden_norm(features)], -1))
        return self.model.model(inputs_embeds=x, use_cache=False).last_hidden_state

    def stored(self, begin, name):
        """Returns the tensors of the model whose names begin so, under another name."""
        with tempfile.TemporaryDirectory() as folder:
            self.model.save_pretrained(folder)
            tensors = load_file(os.path.join(folder, "model.safetensors"))
        return {name + key.removeprefix(begin): value for key, value in tensors.items() if key.startswith(begin)}


class DeepseekV3Mtp(Mtp):
    TARGET = DeepseekV3ForCausalLM
    LAYER = {
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "n_routed_experts": 4,
        "moe_intermediate_size": 48,
        "num_nextn_predict_layers": 1,
    }

    def __init__(self, config):
        one_layer = DeepseekV3Config(**{**config, "num_hidden_layers": 1, "first_k_dense_replace": 0})
        one_layer._attn_implementation = "eager"
        super().__init__(one_layer, DeepseekV3RMSNorm, DeepseekV3ForCausalLM(one_layer))
        self.norm = DeepseekV3RMSNorm(one_layer.hidden_size, eps=one_layer.rms_norm_eps)
        self.model.model.norm = nn.Identity()
        self.name = f"model.layers.{config['num_hidden_layers']}"

    def tensors(self):
        return self.stored("model.layers.0", self.name) | {
            f"{self.name}.enorm.weight": self.embedding_norm.weight,
            f"{self.name}.hnorm.weight": self.hidden_norm.weight,
            f"{self.name}.eh_proj.weight": self.join.weight,
            f"{self.name}.shared_head.norm.weight": self.norm.weight,
        }


class Qwen3NextMtp(Mtp):
    """Its hidden states are those after its last norm, as in vLLM."""

    TARGET = Qwen3NextForCausalLM
    LAYER = {"num_attention_heads": 1, "head_dim": 128, "moe_intermediate_size": 48}

    def __init__(self, config):
        one_layer = Qwen3NextConfig(**{**config, "num_hidden_layers": 1, "layer_types": ["full_attention"]})
        one_layer._attn_implementation = "eager"
        super().__init__(one_layer, Qwen3NextRMSNorm, Qwen3NextForCausalLM(one_layer))
        self.norm = nn.Identity()

    def tensors(self):
        layers = self.stored("model.layers.0", "mtp.layers.0")
        return layers | {
            "mtp.pre_fc_norm_embedding.weight": self.embedding_norm.weight,
            "mtp.pre_fc_norm_hidden.weight": self.hidden_norm.weight,
            "mtp.fc.weight": self.join.weight,
            "mtp.norm.weight": self.model.model.norm.weight,
        }


LAYERS = {"DeepseekV3ForCausalLM": DeepseekV3Mtp, "Qwen3NextForCausalLM": Qwen3NextMtp}


def losses(target, mtp, tokens):
    with torch.no_grad():
        features = target.model(tokens, use_cache=False).last_hidden_state
        wanted = target.lm_head(features).log_softmax(-1)
    rows = tokens.shape[1] - STEPS
    x, all_losses, shares = features[:, :rows], [], []
    for step in range(STEPS):
        first = step + 1
        x = mtp(target.model.embed_tokens(tokens[:, first : first + rows]).detach(), x)
        guessed = target.lm_head(mtp.norm(x)).log_softmax(-1)
        of_model = wanted[:, first : first + rows]
        all_losses.append(functional.kl_div(guessed, of_model, log_target=True, reduction="none").sum(-1).mean())
        shares.append((guessed.argmax(-1) == of_model.argmax(-1)).float().mean().item())
    return all_losses, shares


def chain(target, mtp, text, count):
    """Returns the likeliest drafts after a text whose last token the model has not computed."""
    tokens = torch.tensor([text], device=DEVICE)
    features = target.model(tokens[:, :-1], use_cache=False).last_hidden_state
    tokens, chosen = tokens[:, 1:], []
    for _ in range(count):
        x = mtp(target.model.embed_tokens(tokens), features)[:, -1:]
        token = target.lm_head(mtp.norm(x)).argmax(-1)
        chosen.append(token.item())
        tokens, features = torch.cat([tokens, token], 1), torch.cat([features, x], 1)
    return chosen


def train(target, mtp, text, seconds):
    optimizer = torch.optim.AdamW(mtp.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.05)
    start, step = time.time(), 0
    while (done := (time.time() - start) / seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / 50) * (0.5 * (1 + math.cos(math.pi * done)) + 0.02)
        first = torch.randint(0, len(text) - LENGTH, (BATCH,), device=DEVICE)
        tokens = text[first[:, None] + torch.arange(LENGTH, device=DEVICE)]
        parts, shares = losses(target, mtp, tokens)
        loss = sum(0.5**k * part for k, part in enumerate(parts))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in mtp.parameters() if p.grad is not None], 1.0)
        optimizer.step()
        step += 1
        if step % 50 == 0:
            right = ", ".join(f"{share:.2f}" for share in shares)
            print(f"{step} steps, KL {parts[0].item():.3f}, likeliest tokens by step: {right}", flush=True)


def main():
    text_path, target_folder, out, seconds = sys.argv[1:]
    torch.manual_seed(1)
    tokenizer = Tokenizer.from_file(os.path.join(target_folder, "tokenizer.json"))
    text = pathlib.Path(text_path).read_text(encoding="utf-8")[:-200_000]  # testdata's models did not see the rest
    tokens = torch.tensor(numpy.array(tokenizer.encode(text).ids), device=DEVICE)
    config = json.loads(pathlib.Path(target_folder, "config.json").read_text())
    kind = LAYERS[config["architectures"][0]]
    target = kind.TARGET.from_pretrained(target_folder, dtype=torch.float32, attn_implementation="eager")
    target = target.to(DEVICE).requires_grad_(False).eval()
    config |= kind.LAYER
    mtp = kind(config).to(DEVICE)
    train(target, mtp, tokens, float(seconds))
    os.makedirs(out, exist_ok=True)
    write_weights(os.path.join(out, "model.safetensors"), mtp.tensors())
    with open(os.path.join(out, "config.json"), "w") as file:
        json.dump(config, file, indent=2)
        file.write("\n")
    with torch.no_grad():
        for parameter in mtp.parameters():
            parameter.copy_(parameter.bfloat16())
    write_reference(lambda text, count: chain(target, mtp, text, count), target_folder, out)


if __name__ == "__main__":
    main()
