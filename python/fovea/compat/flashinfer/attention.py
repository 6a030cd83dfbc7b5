# SPDX-License-Identifier: Apache-2.0
"""One call of attention: a plan of a FlashInfer wrapper becomes a spec and a batch of Fovea."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch

import fovea
from fovea.compat.flashinfer import indices
from fovea.torch import dtypes
from fovea.torch.backend_cache import default_cache

LOG2_E = math.log2(math.e)

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, *_FP8)


def torch_dtype(value: str | torch.dtype) -> torch.dtype:
    """Returns the dtype of a name such as "float16"."""
    if isinstance(value, torch.dtype):
        return value
    dtype = getattr(torch, value, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype is {value!r}, must be a torch dtype or its name")
    return dtype


def dtype_name(dtype: torch.dtype, argument: str) -> str:
    """Returns Fovea's name of a dtype."""
    if dtype not in _FLOATS:
        raise NotImplementedError(f"{argument} is {dtype}, accepted: {', '.join(str(each) for each in _FLOATS)}")
    return dtypes.dtype_name(dtype)


def activation_dtype(q_dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the output: that of q, for an fp8 q bf16."""
    return torch.bfloat16 if q_dtype in _FP8 else q_dtype


@dataclass(frozen=True)
class Heads:
    """The part of a plan that does not depend on the batch."""

    q_heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    out_dtype: torch.dtype | None
    causal: bool
    window_left: int = -1
    logits_soft_cap: float = 0.0
    sm_scale: float | None = None
    has_alibi: bool = False
    batch_invariant: bool = False
    mla_rope_dim: int | None = None  # kind mla: width of the rotary key; head_dim_v is the latent

    def __post_init__(self) -> None:
        q_dtype, kv_dtype = torch_dtype(self.q_dtype), torch_dtype(self.kv_dtype)
        out_dtype = activation_dtype(q_dtype)
        if self.out_dtype is not None and torch_dtype(self.out_dtype) != out_dtype:
            raise NotImplementedError(
                f"o_data_type is {self.out_dtype}, with q_data_type {q_dtype} the output is {out_dtype}"
            )
        if self.kv_heads < 1 or self.q_heads % self.kv_heads != 0:
            raise ValueError(f"num_qo_heads is {self.q_heads}, must be a multiple of num_kv_heads {self.kv_heads}")
        for name, dtype in (("q_dtype", q_dtype), ("kv_dtype", kv_dtype), ("out_dtype", out_dtype)):
            object.__setattr__(self, name, dtype)

    def cache_spec(self, page_size: int, order: str = "nhd", scale: str = "none") -> fovea.KvCacheSpec:
        """Returns the layout of a paged cache of these heads."""
        return _cache_spec(self, page_size, order, scale)


@lru_cache(maxsize=256)
def _cache_spec(heads: Heads, page_size: int, order: str, scale: str) -> fovea.KvCacheSpec:
    return fovea.KvCacheSpec(
        layout="mha" if heads.mla_rope_dim is None else "mla",
        order=order,
        dtype=dtype_name(heads.kv_dtype, "kv_data_type"),
        scale=scale,
        kv_heads=heads.kv_heads,
        head_dim=heads.head_dim,
        head_dim_v=heads.head_dim_v,
        page_size=page_size,
    )


class Prepared(NamedTuple):
    """The objects that a backend needs for a pass."""

    spec: fovea.AttentionSpec
    limits: fovea.BatchLimits
    batch: fovea.Batch


@dataclass
class Pass:
    """The arrays of one batch, on the device of the wrapper, and bounds on its lengths.

    q_indptr int32 [requests + 1]; kv_lens, request_rows int32 [requests]; table int32 [rows, stride] of pages, None if
    q, k and v are packed alike. host_q_lens and host_kv_lens: int32 [requests] in host memory, or None if only the
    device knows them. max_q_len 0: the number of tokens bounds it.
    """

    q_indptr: torch.Tensor
    kv_lens: torch.Tensor
    request_rows: torch.Tensor
    table: torch.Tensor | None
    max_kv_len: int
    max_q_len: int = 0
    host_q_lens: torch.Tensor | None = None
    host_kv_lens: torch.Tensor | None = None
    mask: dict[str, torch.Tensor] = field(default_factory=dict)  # keywords of fovea.Batch
    mask_kind: str = "none"
    is_packed: bool = False
    is_replayed: bool = False  # a CUDA graph may find other contents in the arrays
    prepared: dict[tuple[Any, ...], Prepared] = field(default_factory=dict)
    windowed: dict[int, Pass] = field(default_factory=dict)

    @property
    def requests(self) -> int:
        return self.kv_lens.numel()

    def one_token_each(self) -> bool:
        """Returns True if the bounds say that no request has more than one new token."""
        return self.max_q_len == 1

    @cached_property
    def has_short_cache(self) -> bool:
        """True if the host knows a request with keys, but fewer than it has new tokens."""
        if self.host_q_lens is None or self.host_kv_lens is None:
            return False
        return bool(((self.host_kv_lens > 0) & (self.host_kv_lens < self.host_q_lens)).any())

    def split(self, tokens: int, causal: bool) -> Pass:
        """Returns the same pass with every token as a request of its own."""
        starts, lens, rows = indices.split_into_tokens(self.q_indptr, self.kv_lens, tokens, causal)
        made = Pass(starts, lens, rows, self.table, self.max_kv_len, max_q_len=1)
        if self.mask_kind == "custom":  # its rows lie one after the other
            made.mask_kind = "custom"
            made.mask = self.mask | {"custom_indptr": indices.mask_indptr(starts, lens)}
        return made

    def with_window(self, window_left: int) -> Pass:
        """Returns the same pass with the window as a mask, joined to the custom mask if there is one."""
        if window_left in self.windowed:
            return self.windowed[window_left]
        custom = self.mask.get("custom_visible")
        if custom is not None:
            total = custom.numel()
        elif self.host_q_lens is not None and self.host_kv_lens is not None:
            total = int((self.host_q_lens.to(torch.int64) * self.host_kv_lens).sum())
        else:
            raise NotImplementedError(
                f"window_left is {window_left} without causality: its mask needs index tensors in host memory"
            )
        q_lens = indices.lengths_of(self.q_indptr)
        visible = indices.window_mask(q_lens, self.kv_lens, max(total, 1), window_left).view(torch.uint8)
        mask = {"custom_indptr": indices.mask_indptr(self.q_indptr, self.kv_lens)}
        mask["custom_visible"] = visible if custom is None else visible & custom.ne(0)
        made = replace(self, mask=mask, mask_kind="custom", prepared={}, windowed={})
        if not self.is_replayed and not indices.is_capturing(self.kv_lens.device):
            self.windowed[window_left] = made
        return made


def needs_window_mask(heads: Heads, batch: Pass) -> bool:
    """Returns True if a window hides keys that no scope hides: those before a query that also sees later keys."""
    if heads.window_left < 0 or heads.window_left + 1 >= batch.max_kv_len or batch.mask_kind == "multi_item":
        return False
    if batch.mask_kind == "custom":
        return True
    return not heads.causal and (batch.is_packed or not batch.one_token_each())


def needs_split(heads: Heads, batch: Pass) -> bool:
    """Returns True if requests have fewer keys than queries and the scope would not accept that."""
    is_limited = heads.causal or heads.has_alibi or batch.mask_kind == "custom"
    return is_limited and not batch.is_packed and batch.has_short_cache


def choose_scope(heads: Heads, batch: Pass) -> tuple[str, int]:
    """Returns the scope and the window (0: none) of the spec."""
    window = heads.window_left + 1 if heads.window_left >= 0 else 0
    if window >= batch.max_kv_len:
        window = 0  # hides nothing
    is_custom = batch.mask_kind == "custom"
    if heads.causal and not is_custom:
        return ("ragged" if batch.is_packed else "decoder"), window
    if batch.one_token_each() and not batch.is_packed:
        return "decoder", window
    if batch.is_packed:
        return "encoder", 0
    return ("encoder_cache" if is_custom or heads.has_alibi else "cross"), 0


def softmax_scale(heads: Heads, *factors: float | None) -> float:
    """Returns sm_scale, by default 1 / sqrt(head_dim), times the factors that are given."""
    scale = 1.0 / math.sqrt(heads.head_dim) if heads.sm_scale is None else float(heads.sm_scale)
    for factor in factors:
        if isinstance(factor, torch.Tensor):
            raise NotImplementedError(
                "q_scale or k_scale is a tensor; it is a factor of the softmax scale and must be a float"
            )
        scale *= 1.0 if factor is None else float(factor)
    if not scale > 0:
        raise ValueError(f"sm_scale * q_scale * k_scale is {scale}, must be positive")
    return scale


def make_spec(heads: Heads, batch: Pass, scale: float, needs_lse: bool, has_sinks: bool) -> fovea.AttentionSpec:
    """Returns the spec of one call."""
    scope, window = choose_scope(heads, batch)
    scores = fovea.ScoreSpec(
        softmax_scale=scale, logit_cap=heads.logits_soft_cap, has_sinks=has_sinks, has_alibi=heads.has_alibi
    )
    common = {
        "scope": scope,
        "mask": batch.mask_kind,
        "q_heads": heads.q_heads,
        "kv_heads": heads.kv_heads,
        "q_dtype": dtype_name(heads.q_dtype, "q_data_type"),
        "window": window,
        "needs_lse": needs_lse,
        "batch_invariant": heads.batch_invariant,
        "scores": scores,
    }
    if heads.mla_rope_dim is not None:
        mla = fovea.MlaSpec(kv_lora_rank=heads.head_dim_v, rope_dim=heads.mla_rope_dim)
        return fovea.AttentionSpec(kind="mla", mla=mla, **common)
    return fovea.AttentionSpec(head_dim=heads.head_dim, head_dim_v=heads.head_dim_v, **common)


def make_limits(batch: Pass, tokens: int, scope: str) -> fovea.BatchLimits:
    """Returns limits that hold for this pass."""
    is_cross = scope == "cross"
    return fovea.BatchLimits(
        max_requests=max(batch.requests, 1),
        max_tokens=max(tokens, 1),
        max_q_len=max(batch.max_q_len or tokens, 1),
        max_kv_len=1 if is_cross else max(batch.max_kv_len, 1),
        max_encoder_len=max(batch.max_kv_len, 1) if is_cross else 0,
    )


def make_batch(batch: Pass, tokens: int, scope: str, entry_tokens: int) -> fovea.Batch:
    """Returns the batch of a pass with `tokens` rows of q."""
    fields: dict[str, Any] = {
        "mode": "decode" if batch.one_token_each() and scope == "decoder" and not batch.mask else "extend",
        "requests": batch.requests,
        "tokens": tokens,
        "q_indptr": batch.q_indptr,
        "max_q_len": batch.max_q_len or tokens,
        **batch.mask,
    }
    if scope == "cross":
        fields |= {"request_rows": batch.request_rows, "cross_lens": batch.kv_lens, "cross_table": batch.table}
        fields["cross_entry_tokens"] = entry_tokens
    else:
        fields |= {"kv_lens": batch.kv_lens, "max_kv_len": batch.max_kv_len}
        if batch.host_q_lens is not None and batch.host_kv_lens is not None:
            fields |= {"host_q_lens": batch.host_q_lens, "host_kv_lens": batch.host_kv_lens}
        if batch.table is not None:
            fields |= {"request_rows": batch.request_rows, "table": batch.table, "entry_tokens": entry_tokens}
    return fovea.Batch(**fields)


def prepare(heads: Heads, batch: Pass, call: Call, cache: fovea.KvCacheSpec | None) -> Prepared:
    """Returns spec, limits and batch of a call. A pass keeps them, because calls of all layers are alike."""
    tokens, needs_lse = call.q.shape[0], call.return_lse or call.lse is not None
    entry_tokens = cache.page_size if cache is not None else 1
    key = (heads, tokens, call.scale, needs_lse, call.sinks is not None, entry_tokens, batch.max_kv_len)
    found = batch.prepared.get(key)
    if found is None:
        spec = make_spec(heads, batch, call.scale, needs_lse, call.sinks is not None)
        scope = str(spec.scope)
        found = Prepared(spec, make_limits(batch, tokens, scope), make_batch(batch, tokens, scope, entry_tokens))
        batch.prepared[key] = found
    return found


def check_tensor(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> None:
    """Raises ValueError if a tensor of the caller has another shape or dtype."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, must be {shape}")
    if tensor.dtype != dtype:
        raise ValueError(f"{name} has dtype {tensor.dtype}, must be {dtype}")


@dataclass
class Call:
    """The arguments of one run()."""

    q: torch.Tensor
    scale: float
    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    return_lse: bool = False
    lse_base: str = "log2"
    lse_layout: str = "NH"
    v_scale: float | torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # further keywords of Backend.forward()


def run_attention(
    heads: Heads, batch: Pass, call: Call, cache: fovea.KvCacheSpec | None, layer: tuple[torch.Tensor, ...] | None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Plans the batch on the device and runs one layer. Returns out or (out, lse), as FlashInfer's run()."""
    tokens = call.q.shape[0]
    if call.q.dtype != heads.q_dtype:
        raise ValueError(f"q has dtype {call.q.dtype}, planned was q_data_type {heads.q_dtype}")
    needs_lse = call.return_lse or call.lse is not None
    out = call.out
    if out is None:
        out = torch.empty(tokens, heads.q_heads, heads.head_dim_v, dtype=heads.out_dtype, device=call.q.device)
    check_tensor(out, (tokens, heads.q_heads, heads.head_dim_v), heads.out_dtype, "out")
    lse = make_lse(call, heads.q_heads) if needs_lse else None
    if tokens == 0 or batch.requests == 0:
        return (out, finish_lse(call, lse)) if call.return_lse else out
    if needs_window_mask(heads, batch):
        heads, batch = replace(heads, window_left=-1), batch.with_window(heads.window_left)
    if needs_split(heads, batch):
        batch = batch.split(tokens, heads.causal and batch.mask_kind == "none")

    spec, limits, made = prepare(heads, batch, call, cache)
    tensors = dict(call.tensors)
    if call.sinks is not None:
        tensors["sinks"] = call.sinks
    if heads.has_alibi:
        tensors["alibi_slopes"] = indices.alibi_slopes(heads.q_heads, call.q.device)
    default_cache.run(
        spec,
        cache,
        (layer,) if layer else (),
        limits,
        made,
        device=call.q.device,
        q=call.q,
        out=out,
        lse=lse,
        save_kv=False,
        **tensors,
    )
    if call.v_scale is not None and not (isinstance(call.v_scale, float) and call.v_scale == 1.0):
        out.mul_(call.v_scale)
    if lse is None:
        return out
    lse = finish_lse(call, lse)
    return (out, lse) if call.return_lse else out


def make_lse(call: Call, q_heads: int) -> torch.Tensor:
    """Returns the tensor that forward() fills, f32 [tokens, heads]: the caller's, unless its layout is "HN"."""
    if call.lse_base not in ("log2", "ln"):
        raise ValueError(f'lse_base is {call.lse_base!r}, must be "log2" or "ln"')
    if call.lse_layout not in ("NH", "HN"):
        raise ValueError(f'lse_layout is {call.lse_layout!r}, must be "NH" or "HN"')
    tokens = call.q.shape[0]
    if call.lse is not None:
        shape = (tokens, q_heads) if call.lse_layout == "NH" else (q_heads, tokens)
        check_tensor(call.lse, shape, torch.float32, "lse")
        if call.lse_layout == "NH":
            return call.lse
    return torch.empty(tokens, q_heads, dtype=torch.float32, device=call.q.device)


def finish_lse(call: Call, lse: torch.Tensor) -> torch.Tensor:
    """Turns natural logarithms into the base and the layout of the call."""
    if call.lse_base == "log2":
        lse.mul_(LOG2_E)
    if call.lse_layout == "NH":
        return lse
    if call.lse is None:
        return lse.t().contiguous()
    return call.lse.copy_(lse.t())
