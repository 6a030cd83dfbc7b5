#!/usr/bin/env python3
"""Trains testdata/drafts/llama, the draft model of testdata/models/llama.

A Llama of one layer learns the distributions of the larger model on a text (distillation), so that its guesses are
accepted as often as those of real draft models. The text of testdata's models is the King James Bible.

Usage: train_draft.py TEXT TARGET OUT SECONDS
Needs torch, numpy and tokenizers; uses a GPU if there is one.
"""

import json
import math
import os
import pathlib
import shutil
import struct
import sys
import time

import numpy
import torch
from tokenizers import Tokenizer
from torch.nn import functional

DRAFT = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
BATCH, LENGTH = 48, 256
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def norm(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


class Llama:
    """A Llama whose weights are a dictionary with the names of a checkpoint."""

    def __init__(self, config, weights):
        self.config, self.weights = config, weights

    def rotate(self, x):
        half = x.shape[-1] // 2
        theta = self.config["rope_parameters"]["rope_theta"]
        angles = torch.arange(x.shape[-2], device=x.device)[:, None] * theta ** (
            -torch.arange(half, device=x.device) / half
        )
        first, second = x[..., :half], x[..., half:]
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1
        )

    def attention(self, x, name):
        heads, kv_heads, dim = (self.config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))

        def project(kind, count):
            return (x @ self.weights[f"{name}.{kind}_proj.weight"].T).unflatten(-1, (count, dim)).transpose(1, 2)

        q, k, v = self.rotate(project("q", heads)), self.rotate(project("k", kv_heads)), project("v", kv_heads)
        k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).flatten(2) @ self.weights[f"{name}.o_proj.weight"].T

    def logits(self, tokens, taken=None):
        """Returns the logits after each token; appends the residual stream before each layer to the list `taken`."""
        weights, eps = self.weights, self.config["rms_norm_eps"]
        embedding = weights["model.embed_tokens.weight"]
        x = embedding[tokens]
        for layer in range(self.config["num_hidden_layers"]):
            if taken is not None:
                taken.append(x)
            name = f"model.layers.{layer}"
            x = x + self.attention(norm(x, weights[f"{name}.input_layernorm.weight"], eps), f"{name}.self_attn")
            y = norm(x, weights[f"{name}.post_attention_layernorm.weight"], eps)
            gate, up, down = (weights[f"{name}.mlp.{kind}_proj.weight"] for kind in ("gate", "up", "down"))
            x = x + (functional.silu(y @ gate.T) * (y @ up.T)) @ down.T
        return norm(x, weights["model.norm.weight"], eps) @ embedding.T


def read_weights(path):
    data = pathlib.Path(path).read_bytes()
    (header_bytes,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + header_bytes])
    weights = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = (8 + header_bytes + offset for offset in entry["data_offsets"])
        tensor = torch.frombuffer(bytearray(data[begin:end]), dtype=torch.bfloat16)
        weights[name] = tensor.reshape(entry["shape"]).float().to(DEVICE)
    return weights


def write_weights(path, weights):
    """Writes integers as they are, everything else as bf16."""
    header, parts, offset = {"__metadata__": {"format": "pt"}}, [], 0
    for name in sorted(weights):
        tensor, dtype = weights[name].detach().cpu().contiguous(), "I64"
        if tensor.dtype != torch.int64:
            tensor, dtype = tensor.bfloat16().view(torch.int16), "BF16"
        parts.append(tensor.numpy().tobytes())
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [offset, offset + len(parts[-1])]}
        offset += len(parts[-1])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(parts))


def random_weights(config):
    hidden, middle, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        shapes |= {
            f"{name}.input_layernorm.weight": (hidden,),
            f"{name}.post_attention_layernorm.weight": (hidden,),
            f"{name}.self_attn.q_proj.weight": (heads * dim, hidden),
            f"{name}.self_attn.k_proj.weight": (kv_heads * dim, hidden),
            f"{name}.self_attn.v_proj.weight": (kv_heads * dim, hidden),
            f"{name}.self_attn.o_proj.weight": (hidden, heads * dim),
            f"{name}.mlp.gate_proj.weight": (middle, hidden),
            f"{name}.mlp.up_proj.weight": (middle, hidden),
            f"{name}.mlp.down_proj.weight": (hidden, middle),
        }
    weights = {}
    for name, shape in shapes.items():
        value = torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * (0.02 if "embed" in name else 0.05)
        weights[name] = value.to(DEVICE).requires_grad_()
    return weights


def train(target, draft, text, seconds):
    optimizer = torch.optim.AdamW(draft.weights.values(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.05)
    start, step, agreed = time.time(), 0, 0.0
    while (done := (time.time() - start) / seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1, (step + 1) / 50) * (0.5 * (1 + math.cos(math.pi * done)) + 0.02)
        first = torch.randint(0, len(text) - LENGTH, (BATCH,), device=DEVICE)
        tokens = text[first[:, None] + torch.arange(LENGTH, device=DEVICE)]
        with torch.no_grad():
            wanted = target.logits(tokens)
        guessed = draft.logits(tokens)
        loss = functional.kl_div(
            guessed.log_softmax(-1).flatten(0, 1),
            wanted.log_softmax(-1).flatten(0, 1),
            log_target=True,
            reduction="batchmean",
        )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(draft.weights.values()), 1.0)
        optimizer.step()
        step += 1
        if step % 100 == 0:
            agreed = (guessed.argmax(-1) == wanted.argmax(-1)).float().mean().item()
    print(f"{step} steps, KL {loss.item():.3f}, {100 * agreed:.0f} % of the likeliest tokens are equal")


def main():
    text_path, target_folder, out, seconds = sys.argv[1:]
    torch.manual_seed(1)
    tokenizer = Tokenizer.from_file(os.path.join(target_folder, "tokenizer.json"))
    text = pathlib.Path(text_path).read_text(encoding="utf-8")[:-200_000]  # testdata's models did not see the rest
    tokens = torch.tensor(numpy.array(tokenizer.encode(text).ids), device=DEVICE)
    config = json.loads(pathlib.Path(target_folder, "config.json").read_text())
    target = Llama(config, read_weights(os.path.join(target_folder, "model.safetensors")))
    draft = Llama(config | DRAFT, random_weights(config | DRAFT))
    train(target, draft, tokens, float(seconds))
    os.makedirs(out, exist_ok=True)
    write_weights(os.path.join(out, "model.safetensors"), draft.weights)
    with open(os.path.join(out, "config.json"), "w") as file:
        json.dump(draft.config, file, indent=2)
        file.write("\n")
    shutil.copy(os.path.join(target_folder, "generation_config.json"), out)


if __name__ == "__main__":
    main()
