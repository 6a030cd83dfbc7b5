# SPDX-License-Identifier: Apache-2.0
"""Layers of SGLang over its own pools, outside of a model."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from fovea.sglang.backend import FoveaBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

CONTEXT = 160
SLOTS = 640
HEADS, KV_HEADS, DIM = 4, 2, 32


@dataclass
class Request:
    """new_tokens of a request that has kv_len tokens with them."""

    new_tokens: int
    kv_len: int


class Model(torch.nn.Module):
    """Attention layers alone."""

    def __init__(self, *layers: RadixAttention):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)


def mha_pool(dtype: torch.dtype, page_size: int, layers: int = 2) -> MHATokenToKVPool:
    return MHATokenToKVPool(SLOTS, page_size, dtype, KV_HEADS, DIM, layers, "cpu", False)


def window_pool(page_size: int) -> SWAKVPool:
    """Returns a pool whose layer 1 has windows, with a mapping that shuffles pages."""
    pool = SWAKVPool(SLOTS, SLOTS, page_size, torch.float32, KV_HEADS, DIM, [1], [0], "cpu")
    pages = SLOTS // page_size
    moved = torch.cat([torch.zeros(1, dtype=torch.int64), 1 + torch.randperm(pages)])
    mapping = (moved[:, None] * page_size + torch.arange(page_size)).reshape(-1)
    pool.register_mapping(torch.cat([mapping, torch.tensor([-1])]))
    return pool


def mla_pool(dtype: torch.dtype, page_size: int, rank: int, rope: int) -> MLATokenToKVPool:
    return MLATokenToKVPool(SLOTS, page_size, dtype, rank, rope, 1, "cpu", False)


class Pass:
    """A batch of requests with slots in whole pages, in SGLang's own objects."""

    def __init__(self, runner: Any, requests: list[Request], page_size: int, seed: int = 0):
        self.requests = requests
        self.table = ReqToTokenPool(8, CONTEXT, "cpu", False)
        chance = torch.Generator().manual_seed(seed)
        pages = (1 + torch.randperm(SLOTS // page_size - 1, generator=chance)).tolist()  # page 0 is that of padding
        self.slots = []
        for row, request in enumerate(requests):
            own = [pages.pop() for _ in range(-(-request.kv_len // page_size))]
            slots = [own[at // page_size] * page_size + at % page_size for at in range(request.kv_len)]
            self.table.req_to_token[row + 1, : request.kv_len] = torch.tensor(slots, dtype=torch.int32)
            self.slots.append(slots)
        self.tokens = sum(request.new_tokens for request in requests)
        self._runner = runner

    @property
    def new_slots(self) -> torch.Tensor:
        """The slots of the new tokens, int64 [tokens]."""
        pairs = zip(self.requests, self.slots, strict=True)
        return torch.tensor([slot for request, slots in pairs for slot in slots[request.kv_len - request.new_tokens :]])

    def backend(self, pool: Any, *layers: RadixAttention, **options: Any) -> FoveaBackend:
        runner = copy.copy(self._runner)
        runner.model = Model(*layers)
        runner.token_to_kv_pool = pool
        runner.req_to_token_pool = self.table
        runner.sliding_window_size = None
        for name in [name for name in options if name != "draft_step"]:
            setattr(runner, name, options.pop(name))
        return FoveaBackend(runner, **options)

    def forward_batch(self, mode: ForwardMode, **fields: Any) -> ForwardBatch:
        """Returns the batch as SGLang describes it: in verification lengths do not count the drafts."""
        drafts = self.requests[0].new_tokens if mode == ForwardMode.TARGET_VERIFY else 0
        seq_lens = torch.tensor([request.kv_len - drafts for request in self.requests])
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(self.requests),
            input_ids=torch.zeros(self.tokens, dtype=torch.int64),
            req_pool_indices=torch.arange(1, len(self.requests) + 1),
            seq_lens=seq_lens,
            out_cache_loc=self.new_slots,
            seq_lens_sum=int(seq_lens.sum()),
            seq_lens_cpu=seq_lens.clone(),
        )
        if mode.is_extend(include_draft_extend_v2=True) and not mode.is_target_verify():
            news = [request.new_tokens for request in self.requests]
            batch.extend_seq_lens = torch.tensor(news, dtype=torch.int32)
            batch.extend_seq_lens_cpu = news
            batch.extend_prefix_lens_cpu = [request.kv_len - request.new_tokens for request in self.requests]
        for name, value in fields.items():
            setattr(batch, name, value)
        return batch
