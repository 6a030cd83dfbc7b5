# SPDX-License-Identifier: Apache-2.0
"""The parts of an attention call, and the checks that every entry point shares."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fovea import Error


class Unsupported(Error, NotImplementedError):
    """An argument that flash-attn takes and Fovea does not."""


@dataclass(frozen=True)
class Scores:
    """How scores are made, masked and normalised.

    window is (left, right) as in flash-attn, -1 means unlimited. chunk 0 and softcap 0 mean off. sinks: f32 [q_heads].
    slopes: f32 [q_heads] or [requests, q_heads].
    """

    scale: float
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    chunk: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    slopes: torch.Tensor | None = None


@dataclass(frozen=True)
class Queries:
    """The new tokens of all requests.

    rows: [tokens, q_heads, head_dim]. indptr: int32 [requests + 1]. used: int32 [requests], leading tokens of each
    request that attend; the rest gets 0; None: all. uniform: every request has max_len tokens.
    """

    rows: torch.Tensor
    indptr: torch.Tensor
    max_len: int
    uniform: bool = False
    used: torch.Tensor | None = None

    @property
    def requests(self) -> int:
        return self.indptr.shape[0] - 1


@dataclass(frozen=True)
class NewKeys:
    """Keys and values that a call stores before it attends.

    k and v: [tokens, kv_heads, dim]. slots: int64 [tokens], -1 stores nothing. max_len: no request has more. uniform:
    every request has max_len.
    """

    k: torch.Tensor
    v: torch.Tensor
    slots: torch.Tensor
    max_len: int
    uniform: bool = False


@dataclass(frozen=True)
class Keys:
    """The keys and values of all requests.

    Packed (table is None): k and v are [tokens, kv_heads, dim], and every request has as many keys as queries.
    Otherwise k and v are [pages, page_size, kv_heads, dim]; table: int32 [requests, entries] of pages; lens: int32
    [requests]; max_len: no request has more keys. covers_queries: no request has fewer keys than queries. new: keys
    that lens counts and that the pages do not hold yet.
    """

    k: torch.Tensor
    v: torch.Tensor
    max_len: int
    table: torch.Tensor | None = None
    lens: torch.Tensor | None = None
    covers_queries: bool = False
    new: NewKeys | None = None

    @property
    def packed(self) -> bool:
        return self.table is None

    @property
    def page_size(self) -> int:
        return self.k.shape[1]


def refuse(argument: str, value: object, reason: str) -> None:
    """Raises Unsupported naming the argument, its value and the reason."""
    raise Unsupported(f"flash_attn: {argument} is {value}: {reason}", "unsupported")


def check(holds: bool, message: str) -> None:
    """Raises Error{invalid_argument} unless the condition holds."""
    if not holds:
        raise Error(f"flash_attn: {message}", "invalid_argument")


def check_no_grad(**tensors: torch.Tensor | None) -> None:
    """Refuses tensors whose gradient autograd would ask for: there is no backward pass."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            refuse(
                name, "a tensor that requires grad", "Fovea has no backward pass; use torch.no_grad() or detach() it"
            )


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Checks what q, k and v must have in common. Their last two axes are heads and dim."""
    for name, tensor in (("k", k), ("v", v)):
        check(tensor.device == q.device, f"{name} is on {tensor.device}, q on {q.device}")
        check(tensor.dtype == q.dtype, f"{name} is {tensor.dtype}, q is {q.dtype}")
    check(k.shape[-1] == q.shape[-1], f"k has head_dim {k.shape[-1]}, q has {q.shape[-1]}")
    check(v.shape[:-1] == k.shape[:-1], f"v is {tuple(v.shape)}, k is {tuple(k.shape)}: only the last axis may differ")
    check(
        k.shape[-2] > 0 and q.shape[-2] % k.shape[-2] == 0,
        f"q has {q.shape[-2]} heads, must be a multiple of the {k.shape[-2]} of k",
    )


def check_lens(name: str, lens: torch.Tensor, count: int, device: torch.device) -> torch.Tensor:
    """Returns the int32 array [count], dense."""
    check(lens.dtype == torch.int32, f"{name} is {lens.dtype}, must be torch.int32")
    check(lens.device == device, f"{name} is on {lens.device}, q on {device}")
    check(tuple(lens.shape) == (count,), f"{name} is {tuple(lens.shape)}, must be ({count},)")
    return lens.contiguous()


def check_table(name: str, table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns the int32 array [requests, entries] of pages with a dense last axis."""
    check(table.dtype == torch.int32, f"{name} is {table.dtype}, must be torch.int32")
    check(table.device == device, f"{name} is on {table.device}, q on {device}")
    check(table.dim() == 2, f"{name} has {table.dim()} axes, must have 2")
    return table if table.stride(1) == 1 else table.contiguous()


def make_scores(
    q: torch.Tensor,
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    attention_chunk: int = 0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> Scores:
    """Returns the Scores of a call; q gives the default scale and the number of heads."""
    left, right = (int(side) for side in window_size)
    heads = q.shape[-2]
    if sinks is not None:
        check(tuple(sinks.shape) == (heads,), f"sinks is {tuple(sinks.shape)}, must be ({heads},)")
        sinks = sinks.to(device=q.device, dtype=torch.float32).contiguous()
    if alibi_slopes is not None:
        check(
            alibi_slopes.dim() in (1, 2) and alibi_slopes.shape[-1] == heads,
            f"alibi_slopes is {tuple(alibi_slopes.shape)}, must be ({heads},) or (batch, {heads})",
        )
        check(alibi_slopes.dtype == torch.float32, f"alibi_slopes is {alibi_slopes.dtype}, must be torch.float32")
        alibi_slopes = alibi_slopes.contiguous()
    return Scores(
        scale=q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale),
        causal=causal,
        window=(left, right),
        chunk=int(attention_chunk or 0),
        softcap=max(float(softcap or 0.0), 0.0),
        sinks=sinks,
        slopes=alibi_slopes,
    )


def refuse_unsupported(*, dropout_p: float = 0.0, qv: object = None, **others: object) -> None:
    """Refuses what no backend can do. `others` are arguments of extensions: each must be None, False or 1."""
    if dropout_p:
        refuse("dropout_p", dropout_p, "Fovea is for inference, only 0.0 is accepted")
    if qv is not None:
        refuse("qv", "given", "use an AttentionSpec of kind mla for latent attention")
    for name, value in others.items():
        if value is not None and value is not False and value != 1:
            refuse(name, "given" if isinstance(value, torch.Tensor) else value, "Fovea has no such feature")


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, or a dense copy if the last axis is not dense or rows begin off the 16 bytes of a GPU."""
    size = tensor.element_size()
    strides = [stride for stride, extent in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if extent > 1]
    dense = tensor.stride(-1) == 1 or tensor.shape[-1] == 1
    if dense and tensor.data_ptr() % 16 == 0 and all(stride * size % 16 == 0 for stride in strides):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def padded(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor with heads padded by zeros to a multiple of 16 bytes, as flash-attn does."""
    missing = -tensor.shape[-1] % (16 // tensor.element_size())
    if missing == 0:
        return tensor
    if tensor.element_size() == 1:  # torch pads no fp8, whose zero is the byte 0
        return torch.nn.functional.pad(tensor.view(torch.uint8), (0, missing)).view(tensor.dtype)
    return torch.nn.functional.pad(tensor, (0, missing))
