# SPDX-License-Identifier: Apache-2.0
"""Decode context parallelism (DCP) of vLLM: the tokens of each request are distributed over ranks.

Token t of a request is on rank t // interleave % ranks. A rank's cache has the same blocks as that of the whole, with
1 / ranks of their tokens in each. Every rank attends to its own keys with the q heads of all ranks and returns the LSE
of every row; vLLM's collectives then give each rank the result of its own heads over all keys. docs/distributed.md
describes the same for Fovea's own engine.

| scope of Fovea's plug-in | a pass, as a rank sees it |
| --- | --- |
| tokens | Every new token is a request of its own, with the keys of the rank that it sees: decodes, and all of MLA. |
| context | The tokens of a request see the rank's keys before the new ones. |
| own | New tokens see each other. Every rank has them, so nothing is exchanged. |
"""

from dataclasses import dataclass
from typing import Any

import torch

import fovea
from fovea.serving.layer_group import LayerGroup
from fovea.torch import consecutive
from fovea.vllm.contract import rank_merger

SCOPES = {"tokens": "decoder", "context": "cross", "own": "ragged"}
"""Fovea's scope for each scope of this module."""


@dataclass(frozen=True)
class Shards:
    """The distribution of tokens, and this rank's place in it."""

    ranks: int = 1
    rank: int = 0
    interleave: int = 1

    @classmethod
    def of(cls, vllm_config: Any) -> "Shards":
        parallel = vllm_config.parallel_config
        if parallel.decode_context_parallel_size <= 1:
            return cls()
        rank_merger(False)  # raises where this version of vLLM is not known
        from vllm.distributed.parallel_state import get_dcp_group

        group = get_dcp_group()
        return cls(group.world_size, group.rank_in_group, parallel.cp_kv_cache_interleave_size)

    def local_lens(self, lens: torch.Tensor) -> torch.Tensor:
        """Returns how many of the first lens[i] tokens are on this rank."""
        period = self.ranks * self.interleave
        rest = (lens % period - self.rank * self.interleave).clamp(0, self.interleave)
        return (lens // period * self.interleave + rest).to(torch.int32)

    def max_local_len(self, length: int, page_size: int) -> int:
        """Returns the most tokens of `length` on any rank, in whole pages."""
        pages = -(-length // (page_size * self.ranks))
        return pages * page_size


def spec_of(spec: fovea.AttentionSpec, scope: str, ranks: int) -> fovea.AttentionSpec:
    """Returns the spec of a layer in a scope of SCOPES. Sinks are added after the merge."""
    heads = spec.q_heads * (1 if scope == "own" else ranks)
    scores = spec.scores.replace(has_sinks=False)
    return spec.replace(scope=SCOPES[scope], q_heads=heads, needs_lse=True, scores=scores)


def limits_of(limits: fovea.BatchLimits, scope: str, shards: Shards, page_size: int) -> fovea.BatchLimits:
    """Returns the limits of a scope's passes, by those of the passes of the whole."""
    if scope == "own":
        return limits.replace(max_kv_len=limits.max_q_len)
    longest = shards.max_local_len(limits.max_kv_len, page_size)
    if scope == "context":
        return limits.replace(max_encoder_len=longest)
    return limits.replace(max_requests=limits.max_tokens, max_q_len=1, max_kv_len=longest)


def refusals(spec: fovea.AttentionSpec) -> list[str]:
    """Returns why layers of this spec cannot have their context on several ranks. Empty: they can."""
    found = []
    if spec.window > 0:
        found.append(f"a window of {spec.window}")
    if spec.scores.has_alibi:
        found.append("ALiBi")
    return [f"decode context parallelism: {each} measures distances, which a rank's keys do not keep" for each in found]


class TokenPass:
    """A pass in the scope "tokens". Its arrays are computed on the device, inside a graph, too."""

    def __init__(self, metadata: Any, shards: Shards):
        self._metadata = metadata
        self._shards = shards

    def batch(self, group: LayerGroup) -> fovea.Batch:
        whole = self._metadata
        device = whole.seq_lens.device
        starts = whole.query_start_loc[: whole.num_reqs + 1]
        tokens = torch.arange(whole.num_actual_tokens, dtype=torch.int32, device=device)
        # Requests without new tokens begin where the next one does, and padding comes after the last request.
        rows = (torch.searchsorted(starts, tokens, right=True) - 1).clamp(max=whole.num_reqs - 1)
        seen = whole.seq_lens[rows] + tokens + 1 - starts[rows + 1]
        seen = torch.where(tokens < starts[-1], seen, 0).clamp(min=0)
        longest = self._shards.max_local_len(whole.max_seq_len, group.page_size)
        return fovea.Batch(
            mode="decode",
            requests=whole.num_actual_tokens,
            tokens=whole.num_actual_tokens,
            q_indptr=consecutive(whole.num_actual_tokens + 1, device),
            kv_lens=self._shards.local_lens(seen),
            request_rows=rows.to(torch.int32),
            table=whole.block_table[: whole.num_reqs],
            entry_tokens=group.page_size,
            out_slots=whole.slot_mapping,
            max_q_len=1,
            max_kv_len=min(longest, group.backend.limits.max_kv_len, whole.block_table.shape[1] * group.page_size),
        )


class ContextPass:
    """A pass in the scope "context"."""

    def __init__(self, metadata: Any, shards: Shards):
        self._metadata = metadata
        self._shards = shards

    def batch(self, group: LayerGroup) -> fovea.Batch:
        whole = self._metadata
        starts = whole.query_start_loc[: whole.num_reqs + 1]
        before = (whole.seq_lens[: whole.num_reqs] - (starts[1:] - starts[:-1])).clamp(min=0)
        return fovea.Batch(
            mode=whole.mode,
            requests=whole.num_reqs,
            tokens=whole.num_actual_tokens,
            q_indptr=starts,
            request_rows=consecutive(whole.num_reqs, starts.device),
            cross_lens=self._shards.local_lens(before),
            cross_table=whole.block_table[: whole.num_reqs],
            cross_entry_tokens=group.page_size,
            max_q_len=min(whole.max_query_len, group.backend.limits.max_q_len),
        )


class OwnPass:
    """A pass in the scope "own"."""

    def __init__(self, metadata: Any, shards: Shards):
        self._metadata = metadata

    def batch(self, group: LayerGroup) -> fovea.Batch:
        whole = self._metadata
        longest = min(whole.max_query_len, group.backend.limits.max_q_len)
        return fovea.Batch(
            mode="extend",
            requests=whole.num_reqs,
            tokens=whole.num_actual_tokens,
            q_indptr=whole.query_start_loc[: whole.num_reqs + 1],
            max_q_len=longest,
            max_kv_len=longest,
        )


PASSES = {"tokens": TokenPass, "context": ContextPass, "own": OwnPass}


def combine(out: torch.Tensor, lse: torch.Tensor, group: Any, *, all_to_all: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out, lse) of this rank's heads over all keys from those of all heads over this rank's keys, by vLLM's
    collectives."""
    return rank_merger(all_to_all)(out, lse, group, return_lse=True)


def attend(
    group: LayerGroup, current: Any, index: int, q: torch.Tensor, **tensors: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs a layer of a pass with queries of any heads, and returns (out, lse)."""
    width = group.spec.mla.kv_lora_rank or group.spec.head_dim_v
    out = q.new_empty((q.shape[0], q.shape[1], width))
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    group.forward(current, index, q=q, out=out, lse=lse, **tensors)
    return out, lse
