# SPDX-License-Identifier: Apache-2.0
"""Layers of the plug-in outside of an engine, and the attention that they must compute."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.attention.backend import CommonAttentionMetadata

BLOCK = 16
BLOCKS = 40


@dataclass
class Request:
    """new_tokens of a request that has kv_len tokens with them."""

    new_tokens: int
    kv_len: int


class Pass:
    """A batch of requests with a block table, as vLLM describes it."""

    def __init__(self, requests: list[Request], *, causal: bool = True, seed: int = 0):
        self.requests = requests
        chance = torch.Generator().manual_seed(seed)
        blocks = (1 + torch.randperm(BLOCKS - 1, generator=chance)).tolist()  # vLLM gives block 0 to nobody
        width = max(-(-request.kv_len // BLOCK) for request in requests)
        self.table = torch.zeros(len(requests), width, dtype=torch.int32)
        self.slots = []
        for row, request in enumerate(requests):
            own = [blocks.pop() for _ in range(-(-request.kv_len // BLOCK))]
            self.table[row, : len(own)] = torch.tensor(own, dtype=torch.int32)
            self.slots.append([own[place // BLOCK] * BLOCK + place % BLOCK for place in range(request.kv_len)])
        self.causal = causal
        self.tokens = sum(request.new_tokens for request in requests)

    @property
    def new_slots(self) -> torch.Tensor:
        """The slots of the new tokens, int64 [tokens]."""
        pairs = zip(self.requests, self.slots, strict=True)
        return torch.tensor([slot for request, slots in pairs for slot in slots[request.kv_len - request.new_tokens :]])

    def common(self) -> CommonAttentionMetadata:
        """Returns the pass in the form that vLLM's builders take."""
        starts = torch.tensor([0, *[request.new_tokens for request in self.requests]]).cumsum(0).to(torch.int32)
        lens = torch.tensor([request.kv_len for request in self.requests], dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=lens,
            num_reqs=len(self.requests),
            num_actual_tokens=self.tokens,
            max_query_len=max(request.new_tokens for request in self.requests),
            max_seq_len=int(lens.max()),
            block_table_tensor=self.table,
            slot_mapping=self.new_slots,
            causal=self.causal,
            seq_lens_cpu_upper_bound=lens,
        )


def add_layer(config: VllmConfig, name: str, impl: Any, kv_cache: torch.Tensor, **further: Any) -> SimpleNamespace:
    """Makes a layer that builders find by its name."""
    layer = SimpleNamespace(
        layer_name=name, impl=impl, kv_cache=kv_cache, _k_scale=torch.tensor(1.0), _v_scale=torch.tensor(1.0), **further
    )
    config.compilation_config.static_forward_context[name] = layer
    return layer


def make_impl(config: VllmConfig, cls: type, *arguments: Any, **options: Any) -> Any:
    """Makes an implementation as vLLM does, with the config current and the default dtype that of the model."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(config.model_config.dtype)
    try:
        with set_current_vllm_config(config):
            return cls(*arguments, **options)
    finally:
        torch.set_default_dtype(dtype)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, **scores: Any) -> torch.Tensor:
    """Returns softmax attention in fp64 of one request, q [new, heads, dim], k and v [keys, kv_heads, dim]. The new
    tokens are the last; `scores` may have causal, window, logit_cap, sinks and slopes."""
    new, heads, keys = q.shape[0], q.shape[1], k.shape[0]
    k, v = (x.double().repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    logits = torch.einsum("thd,shd->hts", q.double(), k) * scale
    if scores.get("logit_cap"):
        logits = scores["logit_cap"] * torch.tanh(logits / scores["logit_cap"])
    distance = torch.arange(keys)[None, :] - torch.arange(keys - new, keys)[:, None]
    if scores.get("slopes") is not None:
        logits = logits + scores["slopes"].double()[:, None, None] * distance
    if scores.get("causal", True):
        logits = logits.masked_fill(distance > 0, -torch.inf)
    if scores.get("window"):
        logits = logits.masked_fill(distance <= -scores["window"], -torch.inf)
    if scores.get("sinks") is not None:
        sinks = scores["sinks"].double()[:, None, None].expand(-1, new, 1)
        weights = torch.cat([logits, sinks], dim=2).softmax(dim=2)[..., :keys]
    else:
        weights = logits.softmax(dim=2)
    return torch.einsum("hts,shd->thd", weights, v)
