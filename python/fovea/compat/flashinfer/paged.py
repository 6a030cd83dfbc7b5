# SPDX-License-Identifier: Apache-2.0
"""The common part of wrappers over a paged cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fovea.compat.flashinfer import planning
from fovea.compat.flashinfer.attention import Call, Heads, Pass, run_attention, softmax_scale
from fovea.compat.flashinfer.options import refuse, takes_sink_arguments

Output = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
PagedCache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class PagedWrapper:
    """Holds the result of plan(), and lends the cache of run() to a backend.

    `buffers` are the caller's (kv indptr, kv indices, last_page_len) of a wrapper with use_cuda_graph: plan() copies
    its arguments there, and what run() reads keeps its address.
    """

    def __init__(
        self,
        workspace: torch.Tensor,
        kv_layout: str,
        buffers: tuple[torch.Tensor | None, ...] | None,
        jit_args: Any = None,
    ) -> None:
        self._order = planning.check_layout(kv_layout)
        self._kv_layout = kv_layout
        self.device = workspace.device
        if buffers is not None and any(buffer is None for buffer in buffers):
            raise ValueError("use_cuda_graph needs the buffers of indptr, indices and last_page_len")
        self._buffers = buffers
        self._takes_sink_arguments = takes_sink_arguments(jit_args)
        self._heads: Heads | None = None
        self._pass: Pass | None = None
        self._page_size = 0
        self._has_token_scales = False

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._buffers is not None

    @property
    def resolved_backend(self) -> str:
        return "fovea"

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor | None = None
    ) -> None:
        """Does nothing: workspaces belong to fovea.torch."""

    def end_forward(self) -> None:
        """Does nothing."""

    def _copy_to_buffers(self, lists: planning.PageLists) -> planning.PageLists:
        if self._buffers is None or lists.indptr is None:
            return lists
        indptr, pages, last = self._buffers
        if lists.indptr.numel() != indptr.numel():
            raise ValueError(
                f"the batch has {lists.indptr.numel() - 1} requests, use_cuda_graph fixed {indptr.numel() - 1}"
            )
        count = lists.indices.numel()
        if count > pages.numel():
            raise ValueError(f"the batch has {count} pages, the buffer of indices has room for {pages.numel()}")
        for buffer, source in ((indptr, lists.indptr), (pages[:count], lists.indices), (last, lists.last_page_len)):
            if source.data_ptr() != buffer.data_ptr():
                buffer.copy_(source, non_blocking=True)
        return replace(lists, indptr=indptr, indices=pages[:count], last_page_len=last, capacity=pages.numel())

    def _plan_batch(self, queries: planning.Queries, lists: planning.PageLists) -> Pass:
        """Returns the arrays of a batch, without a mask."""
        self._page_size = lists.page_size
        lists = self._copy_to_buffers(lists)
        return planning.plan_paged(self.device, queries, lists, self.is_cuda_graph_enabled)

    def _keep(self, fresh: Pass) -> None:
        """Makes a pass the planned one."""
        self._pass = planning.keep_addresses(self._pass, fresh) if self.is_cuda_graph_enabled else fresh

    def _planned(self) -> tuple[Heads, Pass]:
        if self._heads is None or self._pass is None:
            raise RuntimeError("run() needs a prior plan()")
        return self._heads, self._pass

    def _override(self, window_left: int, logits_soft_cap: float | None, sm_scale: float | None, **fields: Any) -> None:
        """Replaces planned options by those of a deprecated forward()."""
        heads, _ = self._planned()
        self._heads = replace(
            heads, window_left=window_left, logits_soft_cap=logits_soft_cap or 0.0, sm_scale=sm_scale, **fields
        )

    def _attend(
        self,
        q: torch.Tensor,
        cache: PagedCache,
        custom: tuple[Any, ...],
        scales: tuple[float | None, float | torch.Tensor | None, float | torch.Tensor | None],
        token_scales: Any,
        window_left: int | None,
        fields: dict[str, Any],
    ) -> Output:
        """Runs the planned batch. scales: of q, k and v; custom: arguments of a custom kernel; fields: of Call."""
        heads, batch = self._planned()
        if window_left is not None and window_left != heads.window_left:
            raise ValueError(f"window_left is {window_left}, planned was {heads.window_left}")
        if custom:
            heads, fields["sinks"] = self._sink_arguments(custom, heads)
        q_scale, k_scale, v_scale = scales
        parts = planning.Cache.unpack(cache, self._kv_layout)
        parts.check(heads, self._page_size, self._kv_layout)
        layer: tuple[torch.Tensor, ...] = (parts.k, parts.v)
        scale_kind = "none"
        if self._has_token_scales:
            scale_kind, layer = "per_token_head", (*layer, *self._token_scales(token_scales, parts))
        elif token_scales is not None:
            refuse(True, "kv_cache_sf: NVFP4 caches are not supported")
        elif isinstance(k_scale, torch.Tensor) or isinstance(v_scale, torch.Tensor):
            scale_kind, layer = tensor_scales(heads, layer, k_scale, v_scale)
            k_scale = v_scale = None
        spec = heads.cache_spec(self._page_size, self._order, scale_kind)
        call = Call(q, softmax_scale(heads, q_scale, k_scale), v_scale=v_scale, **fields)
        return run_attention(heads, batch, call, spec, layer)

    def _sink_arguments(self, custom: tuple[Any, ...], heads: Heads) -> tuple[Heads, torch.Tensor]:
        refuse(not self._takes_sink_arguments, f"run() got {len(custom)} arguments of a custom kernel")
        if len(custom) != 2:
            raise TypeError(f"run() of an AttentionSink wrapper got {len(custom)} arguments, takes (sink, sm_scale)")
        return replace(heads, sm_scale=float(custom[1])), custom[0]

    def _token_scales(self, scales: Any, cache: planning.Cache) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns scales per token and head, f32 [pages, page_size, heads]."""
        refuse(self._order != "nhd", f"use_token_head_sf with kv_layout {self._kv_layout}, accepted: NHD")
        if not isinstance(scales, (tuple, list)) or len(scales) != 2:
            raise ValueError("use_token_head_sf needs kv_cache_sf=(k_sf, v_sf)")
        for name, part, of in zip(("k_sf", "v_sf"), scales, (cache.k, cache.v), strict=True):
            if tuple(part.shape) != tuple(of.shape[:3]) or part.dtype != torch.float32:
                raise ValueError(f"{name} is {part.dtype} {tuple(part.shape)}, must be float32 {tuple(of.shape[:3])}")
        return scales[0], scales[1]


def tensor_scales(
    heads: Heads, layer: tuple[torch.Tensor, ...], k_scale: Any, v_scale: Any
) -> tuple[str, tuple[torch.Tensor, ...]]:
    """Returns the kind of scales that tensors mean, and the layer with them: f32 of 1 or kv_heads elements."""
    if heads.kv_dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise NotImplementedError(f"k_scale or v_scale is a tensor, kv_data_type is {heads.kv_dtype}: must be fp8")
    given = [scale.numel() for scale in (k_scale, v_scale) if isinstance(scale, torch.Tensor)]
    count = max(given)
    if count not in (1, heads.kv_heads) or min(given) != count:
        accepted = f"1 or num_kv_heads {heads.kv_heads}"
        raise ValueError(f"k_scale and v_scale have {given} elements, must both have {accepted}")
    device = layer[0].device

    def make(scale: Any) -> torch.Tensor:
        if isinstance(scale, torch.Tensor):
            return scale.to(device=device, dtype=torch.float32).reshape(-1).contiguous()
        return torch.full((count,), 1.0 if scale is None else float(scale), device=device)

    return ("per_tensor" if count == 1 else "per_head"), (*layer, make(k_scale), make(v_scale))
