#!/usr/bin/env python3
"""Trains testdata/drafts/llama_eagle, an EAGLE-3 head (arXiv:2503.01840) for testdata/models/llama.

The head learns the distributions of the model on a text, over chains of its own drafts: step k of a chain reads the
head's hidden state of step k - 1 in place of the model's features, as it will when it drafts. Its tensors have the
names of public EAGLE-3 checkpoints, and its vocabulary is the half of the tokens that the text has most often.

Also writes reference.json: how many drafts each step accepts when the model continues its reference prompts, by the
code below, which computes whole texts anew and has no caches.

Usage: train_eagle.py TEXT TARGET OUT SECONDS
Needs torch, numpy and tokenizers; uses a GPU if there is one.
"""

import json
import math
import os
import pathlib
import struct
import sys
import time

import numpy
import torch
from tokenizers import Tokenizer
from torch.nn import functional
from train_draft import DEVICE, Llama, norm, read_weights, write_weights

HEAD = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "head_dim": 32,
    "draft_vocab_size": 1024,
    "tie_word_embeddings": False,
    # Features are the streams after these layers.
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True},
}
BATCH, LENGTH, STEPS = 8, 128, 3
RATE = 2e-3
# Reference steps: max drafts of a step, and how many of the target's reference prompts are continued.
MAX_DRAFTS, PROMPTS = 4, 3


class Head:
    def __init__(self, config, embedding):
        self.config, self.embedding = config, embedding
        hidden, middle, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        layers = len(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
        shapes = {
            "fc.weight": (hidden, layers * hidden),
            "midlayer.input_layernorm.weight": (hidden,),
            "midlayer.hidden_norm.weight": (hidden,),
            "midlayer.post_attention_layernorm.weight": (hidden,),
            "midlayer.self_attn.q_proj.weight": (heads * dim, 2 * hidden),
            "midlayer.self_attn.k_proj.weight": (kv_heads * dim, 2 * hidden),
            "midlayer.self_attn.v_proj.weight": (kv_heads * dim, 2 * hidden),
            "midlayer.self_attn.o_proj.weight": (hidden, heads * dim),
            "midlayer.mlp.gate_proj.weight": (middle, hidden),
            "midlayer.mlp.up_proj.weight": (middle, hidden),
            "midlayer.mlp.down_proj.weight": (hidden, middle),
            "norm.weight": (hidden,),
            "lm_head.weight": (config["draft_vocab_size"], hidden),
        }
        self.weights = {}
        for name, shape in shapes.items():
            value = torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * 0.05
            self.weights[name] = value.to(DEVICE).requires_grad_()

    def rotate(self, x, first):
        half = x.shape[-1] // 2
        theta = self.config["rope_parameters"]["rope_theta"]
        places = torch.arange(first, first + x.shape[-2], device=x.device)
        angles = places[:, None] * theta ** (-torch.arange(half, device=x.device) / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    def attention(self, x, step, keys, values):
        """Row i of a step sees rows 0 to i of step 0, and row i of the steps after it: its own chain."""
        heads, kv_heads, dim = (self.config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))

        def project(kind, count):
            rows = x @ self.weights[f"midlayer.self_attn.{kind}_proj.weight"].T
            return rows.unflatten(-1, (count, dim)).transpose(1, 2)

        q = self.rotate(project("q", heads), step)
        k = self.rotate(project("k", kv_heads), step).repeat_interleave(heads // kv_heads, 1)
        v = project("v", kv_heads).repeat_interleave(heads // kv_heads, 1)
        keys.append(k)
        values.append(v)
        rows = x.shape[1]
        hidden = torch.ones(rows, rows, dtype=torch.bool, device=x.device).triu(1)
        scores = [(q @ keys[0].transpose(-1, -2)).masked_fill(hidden, -math.inf)]
        scores += [(q * key).sum(-1, keepdim=True) for key in keys[1:]]
        shares = (torch.cat(scores, -1) / math.sqrt(dim)).softmax(-1)
        out = shares[..., :rows] @ values[0]
        for i, value in enumerate(values[1:]):
            out = out + shares[..., rows + i, None] * value
        return out.transpose(1, 2).flatten(2) @ self.weights["midlayer.self_attn.o_proj.weight"].T

    def step(self, tokens, x, step, keys, values):
        weights, eps = self.weights, self.config["rms_norm_eps"]
        embedded = norm(self.embedding[tokens], weights["midlayer.input_layernorm.weight"], eps)
        both = torch.cat([embedded, norm(x, weights["midlayer.hidden_norm.weight"], eps)], -1)
        x = x + self.attention(both, step, keys, values)
        y = norm(x, weights["midlayer.post_attention_layernorm.weight"], eps)
        gate, up, down = (weights[f"midlayer.mlp.{kind}_proj.weight"] for kind in ("gate", "up", "down"))
        x = x + (functional.silu(y @ gate.T) * (y @ up.T)) @ down.T
        return norm(x, weights["norm.weight"], eps) @ weights["lm_head.weight"].T, x


def losses(target, head, tokens, kept):
    """Returns the cross entropy of each step, and the share of its guesses that are the model's likeliest token."""
    layers = head.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    with torch.no_grad():
        streams = []
        wanted = target.logits(tokens, streams)
        features = torch.cat([streams[layer + 1] for layer in layers], -1)
    rows = tokens.shape[1] - STEPS
    x, keys, values, all_losses, shares = features[:, :rows] @ head.weights["fc.weight"].T, [], [], [], []
    for step in range(STEPS):
        guessed, x = head.step(tokens[:, step + 1 : step + 1 + rows], x, step, keys, values)
        of_model = wanted[:, step + 1 : step + 1 + rows]
        loss = -(of_model[..., kept].softmax(-1) * guessed.log_softmax(-1)).sum(-1).mean()
        all_losses.append(loss)
        shares.append((kept[guessed.argmax(-1)] == of_model.argmax(-1)).float().mean().item())
    return all_losses, shares


def train(target, head, text, kept, seconds):
    optimizer = torch.optim.AdamW(head.weights.values(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.05)
    start, step = time.time(), 0
    while (done := (time.time() - start) / seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / 50) * (0.5 * (1 + math.cos(math.pi * done)) + 0.02)
        first = torch.randint(0, len(text) - LENGTH, (BATCH,), device=DEVICE)
        tokens = text[first[:, None] + torch.arange(LENGTH, device=DEVICE)]
        parts, shares = losses(target, head, tokens, kept)
        loss = sum(0.8**k * part for k, part in enumerate(parts))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(head.weights.values()), 1.0)
        optimizer.step()
        step += 1
        if step % 50 == 0:
            right = ", ".join(f"{share:.2f}" for share in shares)
            print(f"{step} steps, loss {loss.item():.3f}, likeliest tokens by step: {right}", flush=True)


def read_ints(path, names):
    """Returns the int32 or int64 tensors with these names."""
    data = pathlib.Path(path).read_bytes()
    (header_bytes,) = struct.unpack("<Q", data[:8])
    header, found = json.loads(data[8 : 8 + header_bytes]), []
    for name in names:
        begin, end = (8 + header_bytes + offset for offset in header[name]["data_offsets"])
        dtype = {"I32": numpy.int32, "I64": numpy.int64}[header[name]["dtype"]]
        found.append(numpy.frombuffer(data[begin:end], dtype=dtype).tolist())
    return found


def chain(target, head, text, kept, drafts):
    """Returns the likeliest drafts after a text whose last token the model has not computed."""
    layers, streams = head.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"], []
    tokens = torch.tensor([text], device=DEVICE)
    target.logits(tokens[:, :-1], streams)
    x = torch.cat([streams[layer + 1] for layer in layers], -1) @ head.weights["fc.weight"].T
    tokens, keys, values, chosen = tokens[:, 1:], [], [], []
    for step in range(drafts):  # all rows draft; the last one's chain is wanted
        guessed, x = head.step(tokens, x, step, keys, values)
        tokens = kept[guessed.argmax(-1)]
        chosen.append(tokens[0, -1].item())
    return chosen


def accepted_drafts(draft, prompt, greedy):
    """Returns how many of the drafts of draft(text, count) each step accepts, if the text is the greedy one."""
    text, end, accepted = prompt + greedy[:1], len(prompt) + len(greedy), []
    whole = prompt + greedy
    while len(text) < end:
        wanted = min(MAX_DRAFTS, end - len(text) - 1)
        count = 0
        for token in draft(text, wanted) if wanted > 0 else []:
            if token != whole[len(text) + count]:
                break
            count += 1
        if wanted > 0:
            accepted.append(count)
        text = whole[: len(text) + count + 1]
    return accepted


@torch.no_grad()
def write_reference(draft, target_folder, out):
    reference = {"max_drafts": MAX_DRAFTS}
    for i in range(PROMPTS):
        names = [f"prompt_{i}.input_ids", f"prompt_{i}.greedy_64"]
        prompt, greedy = read_ints(os.path.join(target_folder, "reference.safetensors"), names)
        accepted = accepted_drafts(draft, prompt, greedy)
        print(f"prompt of {len(prompt)}: {1 + sum(accepted) / len(accepted):.2f} tokens a step")
        reference[f"prompt_{i}"] = accepted
    pathlib.Path(out, "reference.json").write_text(json.dumps(reference) + "\n")


def main():
    text_path, target_folder, out, seconds = sys.argv[1:]
    torch.manual_seed(1)
    tokenizer = Tokenizer.from_file(os.path.join(target_folder, "tokenizer.json"))
    text = pathlib.Path(text_path).read_text(encoding="utf-8")[:-200_000]  # testdata's models did not see the rest
    tokens = torch.tensor(numpy.array(tokenizer.encode(text).ids), device=DEVICE)
    config = json.loads(pathlib.Path(target_folder, "config.json").read_text())
    target = Llama(config, read_weights(os.path.join(target_folder, "model.safetensors")))
    head = Head(config | HEAD, target.weights["model.embed_tokens.weight"])
    often = torch.bincount(tokens, minlength=config["vocab_size"]).argsort(descending=True, stable=True)
    kept = often[: HEAD["draft_vocab_size"]].sort().values
    train(target, head, tokens, kept, float(seconds))
    os.makedirs(out, exist_ok=True)
    offsets = kept - torch.arange(len(kept), device=DEVICE)
    write_weights(os.path.join(out, "model.safetensors"), head.weights | {"d2t": offsets})
    with open(os.path.join(out, "config.json"), "w") as file:
        json.dump(head.config, file, indent=2)
        file.write("\n")
    head.weights = {name: value.detach().bfloat16().float() for name, value in head.weights.items()}
    write_reference(lambda text, count: chain(target, head, text, kept, count), target_folder, out)


if __name__ == "__main__":
    main()
