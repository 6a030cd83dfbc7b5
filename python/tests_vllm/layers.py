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
