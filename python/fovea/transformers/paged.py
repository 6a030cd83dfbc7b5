# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: attention over the paged cache of transformers, without copies of full-attention layers.

An adapter of a version family describes the cache (`CacheView`) and the arguments of a pass (`PassArguments`); this
module turns them into a plan per group of layers and a forward per layer. Everything that depends on the contents of
the arguments is computed on the device, so a pass can be captured in a CUDA graph.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

import fovea
from fovea.torch import consecutive

from .specs import attention_spec, cache_spec, new_backends, staging


@dataclass(frozen=True)
class LayerGroup:
    """Layers whose tokens lie in the same rows of their caches."""

    index: int
    """Place in read_index, write_index and block_table."""
    layers: tuple[int, ...]
    """Layers of the model, in the order in which they run."""
    window: int
    """0: every token stays in the cache, page by page. Otherwise the rows are a ring of this length."""
    page_tokens: int
    rows_per_page: int
    """Row numbers between the starts of two pages; at least page_tokens, because layers may lie between them."""


@dataclass(frozen=True)
class CacheView:
    """The paged cache of transformers as Fovea sees it."""

    groups: tuple[LayerGroup, ...]
    pages: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    """Layer -> k and v, [pages, page_tokens, kv_heads, dim], of a layer without a window."""
    rows: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    """Layer -> k and v by row number, [rows, kv_heads, dim]."""
    group_of: dict[int, LayerGroup] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.group_of.update({layer: group for group in self.groups for layer in group.layers})


@dataclass(frozen=True)
class PassArguments:
    """The arguments of one layer of a pass. Padding follows the last request: sequences of length 0 and tokens from
    cu_q[-1] on."""

    cu_q: torch.Tensor
    """int32 [requests + 1] offsets of new tokens."""
    cu_k: torch.Tensor
    """int32 [requests + 1] offsets of the tokens that a request attends to."""
    max_q: int
    max_k: int
    read: torch.Tensor
    """int64 [tokens of cu_k] rows to attend to; empty: no request has cached tokens."""
    write: torch.Tensor
    """int64 [tokens] row that stores each new token."""
    block_table: torch.Tensor | None = None
    """int32 [requests, entries], instead of read and write, for passes with one new token per request. An entry is the
    first row of a page divided by page_tokens."""


class _PagedGroup:
    """Plans of a group without a window: its pages are lent to Fovea as they are."""

    def __init__(self, view: CacheView, group: LayerGroup, spec: fovea.AttentionSpec) -> None:
        self._group = group
        self._spec = spec
        self._layers = [view.pages(layer) for layer in group.layers]
        self._cache_spec = cache_spec(*self._layers[0], layers=len(self._layers))
        # Groups can share tensors and interleave, so each has backends of its own.
        self._backends = new_backends(self._layers[0][0].device)
        self._backend: fovea.Backend | None = None

    def plan(self, args: PassArguments, tokens: int) -> None:
        """Plans a pass of at most `tokens` new tokens, once for all layers of the group."""
        if args.block_table is not None:
            table, out_slots, kv_len = self._from_block_table(args, tokens)
            mode, q_len = "decode", 1
        else:
            table, out_slots, kv_len = self._from_rows(args, tokens)
            mode, q_len = ("decode" if args.max_q == 1 else "mixed"), args.max_q
        requests = args.cu_q.numel() - 1
        self._backend = self._backends.backend_for(
            self._spec, self._cache_spec, self._layers, _limits(requests, tokens, q_len, kv_len), own_workspace=True
        )
        # Earlier passes stored all earlier tokens of every request, and this pass writes only new tokens.
        self._backend.plan(
            fovea.Batch(
                mode=mode,
                requests=requests,
                tokens=tokens,
                q_indptr=args.cu_q,
                kv_lens=_differences(args.cu_k),
                request_rows=consecutive(requests, args.cu_q.device),
                table=table,
                entry_tokens=self._group.page_tokens,
                out_slots=out_slots,
                max_q_len=q_len,
                max_kv_len=kv_len,
                prefix_written=True,
            )
        )

    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> None:
        self._backend.forward(self._group.layers.index(layer), q=q, k=k, v=v, out=out, sinks=sinks)

    def _from_rows(self, args: PassArguments, tokens: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        # Without cached tokens the rows of the new tokens are the rows to read, and cu_k equals cu_q.
        read = args.read if args.read.numel() else args.write
        page_tokens, stride = self._group.page_tokens, self._group.rows_per_page
        columns = -(-args.max_k // page_tokens)
        first = args.cu_k[:-1, None] + page_tokens * consecutive(columns, read.device)
        page = torch.take(read, first.clamp(max=read.numel() - 1).to(torch.int64)) // stride
        table = torch.where(first < args.cu_k[1:, None], page, 0).to(torch.int32)
        write = args.write[:tokens]
        slots = write if stride == page_tokens else write // stride * page_tokens + write % stride
        is_real = consecutive(tokens, read.device) < args.cu_q[-1]
        return table, torch.where(is_real, slots, -1), columns * page_tokens

    def _from_block_table(self, args: PassArguments, tokens: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        page_tokens = self._group.page_tokens
        entries_per_page = self._group.rows_per_page // page_tokens
        table = args.block_table if entries_per_page == 1 else args.block_table // entries_per_page
        last = _differences(args.cu_k).to(torch.int64) - 1
        page = table.gather(1, (last.clamp(min=0) // page_tokens)[:, None])[:, 0].to(torch.int64)
        slots = torch.where(last >= 0, page * page_tokens + last % page_tokens, -1)
        if slots.numel() < tokens:
            slots = torch.nn.functional.pad(slots, (0, tokens - slots.numel()), value=-1)
        return table, slots[:tokens], table.shape[1] * page_tokens


class _WindowGroup:
    """Plans of groups with a window. New tokens overwrite ring rows that earlier queries of the same pass still need,
    so each layer first copies the rows that it reads, at most window - 1 a request, to staging memory."""

    def __init__(self, view: CacheView, group: LayerGroup, spec: fovea.AttentionSpec) -> None:
        self._view = view
        self._group = group
        self._spec = spec
        self._staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._backends = new_backends(view.rows(group.layers[0])[0].device)
        self._backend: fovea.Backend | None = None
        self._copied = 0

    def plan(self, args: PassArguments, tokens: int) -> None:
        """Plans a pass of at most `tokens` new tokens, once for all layers of the group."""
        requests = args.cu_q.numel() - 1
        device = args.cu_q.device
        # Padding of read_index lies behind the rows of all requests, so the copy may end before it.
        self._copied = min(args.read.numel(), tokens + requests * (self._group.window - 1))
        staged = self._stage(max(self._copied, tokens))
        self._backend = self._backends.backend_for(
            self._spec,
            cache_spec(*staged),
            [staged],
            _limits(requests, tokens, args.max_q, args.max_k),
            own_workspace=True,
        )
        column = consecutive(args.max_k, device)
        table = torch.where(column < _differences(args.cu_k)[:, None], args.cu_k[:-1, None] + column, 0)
        token = consecutive(tokens, device)
        request = torch.searchsorted(args.cu_q, token, right=True, out_int32=True) - 1
        ends = args.cu_k[1:] - args.cu_q[1:]
        slots = torch.take(ends, request.clamp(max=requests - 1).to(torch.int64)) + token
        self._backend.plan(
            fovea.Batch(
                mode="decode" if args.max_q == 1 else "mixed",
                requests=requests,
                tokens=tokens,
                q_indptr=args.cu_q,
                kv_lens=_differences(args.cu_k),
                request_rows=consecutive(requests, device),
                table=table,
                out_slots=torch.where(token < args.cu_q[-1], slots, -1).to(torch.int64),
                max_q_len=args.max_q,
                max_kv_len=args.max_k,
            )
        )

    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None,
        args: PassArguments,
    ) -> None:
        staged = self._staged[-1]
        for rows, new, stage in zip(self._view.rows(layer), (k, v), staged, strict=True):
            if self._copied:
                torch.index_select(rows, 0, args.read[: self._copied], out=stage[: self._copied, 0])
            rows.index_copy_(0, args.write, new[: args.write.numel()])
        self._backend.forward(q=q, k=k, v=v, out=out, sinks=sinks)

    def _stage(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns staging memory for this many rows, [rows, 1, kv_heads, dim]. Smaller memory stays alive, because
        captured graphs use it."""
        if not self._staged or self._staged[-1][0].shape[0] < rows:
            size = 1 << rows.bit_length()
            self._staged.append(
                tuple(staging((size, 1, *each.shape[1:]), each) for each in self._view.rows(self._group.layers[0]))
            )
        return self._staged[-1]


class PagedCache:
    """The plans of all layer groups of one paged cache."""

    def __init__(self, view: CacheView) -> None:
        self._view = view
        self._plans: dict[int, _PagedGroup | _WindowGroup] = {}
        self._needs: dict[int, tuple] = {}

    def group(self, layer: int) -> LayerGroup:
        """Returns the group of a layer of the model."""
        return self._view.group_of[layer]

    def forward(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        args: PassArguments,
        *,
        scaling: float | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Stores the new tokens of a layer and attends. query, key and value are [1, heads, tokens, dim].

        Returns [1, tokens, q_heads, dim of value]; rows of padding are 0.
        """
        group = self._view.group_of[layer]
        needs = (query.dtype, query.shape[1], value.shape[3], scaling, softcap, sinks is not None)
        if self._needs.setdefault(group.index, needs) != needs:
            raise NotImplementedError(
                f"layer {layer} needs (dtype, q_heads, head_dim_v, scaling, softcap, sinks) = {needs}, but other "
                f"layers of its cache group need {self._needs[group.index]}"
            )
        planned = self._plans.get(group.index)
        if planned is None:
            spec = attention_spec(
                query, key, value, scope="decoder", scaling=scaling, window=group.window, softcap=softcap, sinks=sinks
            )
            planned = (_WindowGroup if group.window else _PagedGroup)(self._view, group, spec)
            self._plans[group.index] = planned
        if layer == group.layers[0]:
            planned.plan(args, _token_count(args, query.shape[2]))
        q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
        out = torch.zeros((query.shape[2], query.shape[1], value.shape[3]), dtype=query.dtype, device=query.device)
        if isinstance(planned, _WindowGroup):
            planned.forward(layer, q, k, v, out, sinks, args)
        else:
            planned.forward(layer, q, k, v, out, sinks)
        return out[None]


def _token_count(args: PassArguments, rows: int) -> int:
    """Returns the new tokens of a pass: on a GPU the bound that the shapes give, because nothing may wait for it."""
    return rows if args.cu_q.is_cuda else int(args.cu_q[-1])


def _limits(requests: int, tokens: int, q_len: int, kv_len: int) -> fovea.BatchLimits:
    return fovea.BatchLimits(max_requests=requests, max_tokens=tokens, max_q_len=q_len, max_kv_len=kv_len)


def _differences(offsets: torch.Tensor) -> torch.Tensor:
    return offsets[1:] - offsets[:-1]
