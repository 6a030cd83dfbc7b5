# SPDX-License-Identifier: Apache-2.0
"""Ordinary forward passes: attention over the tensors that a model passes, with or without a cache of transformers."""

from dataclasses import dataclass
from functools import cache

import torch

import fovea
from fovea.torch import BackendCache, consecutive

from .specs import attention_spec, cache_spec, new_backends, staging

_PAGE = 64
_MAX_STAGED = 64


@dataclass(frozen=True)
class Layer:
    """The settings of a layer's attention, without its tensors."""

    scaling: float | None
    window: int
    chunk: int
    softcap: float | None
    sinks: torch.Tensor | None
    is_causal: bool

    def spec(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scope: str) -> fovea.AttentionSpec:
        return attention_spec(
            query,
            key,
            value,
            scope=scope,
            scaling=self.scaling,
            window=self.window,
            chunk=self.chunk,
            softcap=self.softcap,
            sinks=self.sinks,
        )


def forward(
    layer: Layer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    kwargs: dict,
) -> torch.Tensor:
    """Attends. query is [batch, q_heads, tokens, dim], key and value are [batch, kv_heads, keys, dim].

    mask: as padding_mask() returns it. Returns [batch, tokens, q_heads, dim of value]; rows of padding are 0.
    """
    if mask is not None and mask.ndim != 2:
        raise NotImplementedError(f"attention_mask has {mask.ndim} dimensions, must have 2: [batch, keys]")
    tokens = query.shape[2]
    places = None
    if mask is not None:
        key, value = key[:, :, : mask.shape[1]], value[:, :, : mask.shape[1]]
        places = None if mask.dtype == torch.bool else mask
        mask = mask.to(torch.bool)
    keys = key.shape[2]
    if keys == tokens:
        lengths = _packed_lengths(query, mask, kwargs)
        return _packed(layer, query, key, value, mask, lengths)
    if not layer.is_causal and tokens > 1:
        raise NotImplementedError(
            f"cross attention of {tokens} tokens over {keys} keys is not supported; use attn_implementation 'sdpa'"
        )
    if keys < tokens:
        raise NotImplementedError(f"{tokens} tokens attend to {keys} keys, must be at least as many")
    return _cached(layer, query, key, value, mask, places)


def _packed_lengths(query: torch.Tensor, mask: torch.Tensor | None, kwargs: dict) -> torch.Tensor:
    """Returns the tokens of each sequence, int32: of the rows of the batch, or of sequences packed into them."""
    batch, _, tokens, _ = query.shape
    if mask is not None:
        return mask.sum(1, dtype=torch.int32)
    offsets = kwargs.get("cu_seq_lens_q")
    if offsets is not None:
        return (offsets[1:] - offsets[:-1]).to(torch.int32)
    positions = kwargs.get("position_ids")
    if positions is not None and positions.ndim == 2 and tokens > 1 and not _is_capturing(query.device):
        positions = positions.expand(batch, -1)
        starts = torch.ones_like(positions, dtype=torch.bool)
        starts[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
        first = starts.flatten().nonzero()[:, 0]
        if first.numel() != batch:
            end = first.new_tensor([batch * tokens])
            return torch.diff(first, append=end).to(torch.int32)
    return torch.full((batch,), tokens, dtype=torch.int32, device=query.device)


class _Staging:
    """Memory to which keys and values of ordinary passes are copied; the oldest makes room."""

    def __init__(self) -> None:
        self._kept: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = {}

    def get(self, pages: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns memory for this many pages, [pages, _PAGE, heads, dim]. key and value, [batch, heads, keys, dim],
        have the heads and dims."""
        size = 1 << pages.bit_length()
        name = (size, key.shape[1], key.shape[3], value.shape[3], key.dtype, key.device)
        if name not in self._kept:
            if len(self._kept) == _MAX_STAGED:
                del self._kept[next(iter(self._kept))]
            self._kept[name] = tuple(
                staging((size, _PAGE, each.shape[1], each.shape[3]), each) for each in (key, value)
            )
        return self._kept[name]


_staged = _Staging()


def _packed(
    layer: Layer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    lengths: torch.Tensor,
) -> torch.Tensor:
    """Attends over the passed keys alone, as many as tokens; sequences follow each other without padding."""
    batch, heads, tokens, _ = query.shape
    rows = batch * tokens
    kept = None if mask is None else mask.flatten().nonzero()[:, 0]
    q, k, v = (each.transpose(1, 2).reshape(rows, each.shape[1], each.shape[3]) for each in (query, key, value))
    if kept is not None:
        q, k, v = (each.index_select(0, kept) for each in (q, k, v))
    spec = layer.spec(query, key, value, "ragged" if layer.is_causal else "encoder")
    requests = lengths.numel()
    limits = fovea.BatchLimits(max_requests=requests, max_tokens=rows, max_q_len=rows, max_kv_len=rows)
    batch_of = fovea.Batch(
        mode="extend",
        requests=requests,
        tokens=q.shape[0],
        q_indptr=_offsets(lengths),
        kv_lens=lengths,
        max_q_len=rows,
        max_kv_len=rows,
    )
    out = q.new_zeros((q.shape[0], heads, value.shape[3]))
    _backends(query.device).run(
        spec, None, (), limits, batch_of, device=q.device, q=q, k=k, v=v, out=out, sinks=layer.sinks
    )
    if kept is not None:
        out = out.new_zeros((rows, *out.shape[1:])).index_copy_(0, kept, out)
    return out.view(batch, tokens, heads, -1)


def _cached(
    layer: Layer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    places: torch.Tensor | None,
) -> torch.Tensor:
    """Attends to more keys than tokens. They are copied to staging memory, each sequence without padding."""
    batch, heads, tokens, _ = query.shape
    keys = key.shape[2]
    device = query.device
    lens = (
        torch.full((batch,), keys, dtype=torch.int32, device=device) if mask is None else mask.sum(1, dtype=torch.int32)
    )
    shift = _chunk_shift(layer.chunk, lens, places)
    kv_lens = lens if shift is None else lens + shift
    kv_len = keys + (layer.chunk if shift is not None else 0)
    columns = -(-kv_len // _PAGE)
    spec = layer.spec(query, key, value, "decoder")
    memory = _staged.get(batch * columns, key, value)
    source = _sources(mask, shift, keys, columns * _PAGE)
    for each, stage in zip((key, value), memory, strict=True):
        _stage(each, source, stage[: batch * columns].view(batch, columns * _PAGE, *stage.shape[2:]))
    kept = None
    q_lens = torch.full((batch,), tokens, dtype=torch.int32, device=device)
    q = query.transpose(1, 2).reshape(batch * tokens, heads, -1)
    if mask is not None and tokens > 1:
        recent = mask[:, keys - tokens :]
        kept = recent.flatten().nonzero()[:, 0]
        q_lens = recent.sum(1, dtype=torch.int32)
        q = q.index_select(0, kept)
    table = consecutive(batch * columns, device).view(batch, columns)
    limits = fovea.BatchLimits(
        max_requests=batch, max_tokens=batch * tokens, max_q_len=tokens, max_kv_len=columns * _PAGE
    )
    batch_of = fovea.Batch(
        mode="decode" if tokens == 1 else "extend",
        requests=batch,
        tokens=q.shape[0],
        q_indptr=_offsets(q_lens),
        kv_lens=kv_lens,
        request_rows=consecutive(batch, device),
        table=table,
        entry_tokens=_PAGE,
        max_q_len=tokens,
        max_kv_len=columns * _PAGE,
    )
    out = q.new_zeros((q.shape[0], heads, value.shape[3]))
    _backends(query.device).run(
        spec, cache_spec(*memory), [memory], limits, batch_of, q=q, out=out, save_kv=False, sinks=layer.sinks
    )
    if kept is not None:
        out = out.new_zeros((batch * tokens, *out.shape[1:])).index_copy_(0, kept, out)
    return out.view(batch, tokens, heads, -1)


def _chunk_shift(chunk: int, lens: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor | None:
    """Returns by how many places keys move back so that chunks begin at multiples of `chunk`, int32 [batch]; None: the
    cache has not dropped earlier tokens."""
    if not chunk or places is None:
        return None
    return (places.amax(1).to(torch.int32) - lens) % chunk


def _sources(mask: torch.Tensor | None, shift: torch.Tensor | None, keys: int, length: int) -> torch.Tensor | None:
    """Returns the key of each staged place, int64 [batch, length], or None if place i has key i."""
    if mask is None and shift is None:
        return None
    any_row = mask if mask is not None else shift
    place = torch.arange(length, device=any_row.device).expand(any_row.shape[0], length)
    if shift is not None:
        place = place - shift[:, None]
    place = place.clamp(0, keys - 1)
    if mask is None:
        return place
    return torch.argsort(~mask, dim=1, stable=True).gather(1, place)


def _stage(tensor: torch.Tensor, source: torch.Tensor | None, stage: torch.Tensor) -> None:
    """Copies keys or values, [batch, heads, keys, dim], to [batch, places, heads, dim]."""
    rows = tensor.transpose(1, 2)
    if source is None:
        stage[:, : rows.shape[1]].copy_(rows)
    else:
        row = torch.arange(rows.shape[0], device=rows.device)[:, None]
        stage.copy_(rows[row, source])


@cache
def _backends(device: torch.device) -> BackendCache:
    return new_backends(device)


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _offsets(lengths: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
