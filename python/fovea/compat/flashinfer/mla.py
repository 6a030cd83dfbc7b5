# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention over a paged cache of latents: flashinfer.mla.

A cached row of Fovea holds the latent (ckv), then the rotary key (kpe). Caches whose ckv and kpe are neighbouring
views of such rows are read in place. Caches in two tensors are refused, unless `copy_split_caches` is set: then every
run() copies them into rows first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partialmethod
from typing import Any

import torch

from fovea.compat.flashinfer import indices, planning
from fovea.compat.flashinfer.attention import Call, Heads, Pass, run_attention, softmax_scale
from fovea.compat.flashinfer.options import refuse

__all__ = ["BatchMLAPagedAttentionWrapper", "MLAPlanMetadata"]

Output = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

copy_split_caches = False


@dataclass(frozen=True)
class MLAPlanMetadata:
    """The batch of a plan: page lists in CSR form, or a table."""

    qo_indptr: torch.Tensor | None = None
    kv_indptr: torch.Tensor | None = None
    kv_indices: torch.Tensor | None = None
    kv_len_arr: torch.Tensor | None = None
    cum_seq_lens_q: torch.Tensor | None = None
    block_tables: torch.Tensor | None = None
    seq_lens: torch.Tensor | None = None
    max_q_len: int | None = None

    @classmethod
    def csr(
        cls, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, kv_len_arr: torch.Tensor
    ) -> MLAPlanMetadata:
        """int32: qo_indptr, kv_indptr [requests + 1], kv_indices [pages], kv_len_arr [requests]."""
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)

    @classmethod
    def dense(
        cls,
        cum_seq_lens_q: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        max_q_len: int | None = None,
    ) -> MLAPlanMetadata:
        """int32: cum_seq_lens_q [requests + 1], block_tables [requests, stride], seq_lens [requests]."""
        return cls(cum_seq_lens_q=cum_seq_lens_q, block_tables=block_tables, seq_lens=seq_lens, max_q_len=max_q_len)

    @classmethod
    def dual(
        cls,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        **dense: Any,
    ) -> MLAPlanMetadata:
        """Both forms of one batch; the table is used."""
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr, **dense)

    def queries(self) -> planning.Queries:
        indptr = self.cum_seq_lens_q if self.cum_seq_lens_q is not None else self.qo_indptr
        if indptr is None:
            raise ValueError("plan() needs qo_indptr or cum_seq_lens_q")
        return planning.Queries(indptr, self.max_q_len or 0)

    def pages(self, page_size: int, max_kv_len: int | None) -> planning.PageLists:
        if self.block_tables is not None:
            return planning.PageLists(page_size, block_tables=self.block_tables, seq_lens=self.seq_lens)
        if self.kv_indptr is None or self.kv_indices is None or self.kv_len_arr is None:
            raise ValueError("plan() needs kv_indptr, kv_indices and kv_len_arr, or block_tables and seq_lens")
        return planning.PageLists(
            page_size, self.kv_indptr, self.kv_indices, seq_lens=self.kv_len_arr, max_kv_len=max_kv_len
        )


class BatchMLAPagedAttentionWrapper:
    """Attention of absorbed queries over latents.

    Arguments and shapes are those of FlashInfer 0.7.4. plan() never waits for the device, so it may be captured in a
    CUDA graph together with run(). Without causality every token becomes a request of its own.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        self.device = float_workspace_buffer.device
        self._is_graph = use_cuda_graph
        self._capacity = kv_indices.numel() if use_cuda_graph and kv_indices is not None else None
        self._heads: Heads | None = None
        self._pass: Pass | None = None
        self._split: dict[int, Pass] = {}
        self._rows: torch.Tensor | None = None
        self._lse_mode = "none"
        self._use_sinks = False
        self._page_size = 0

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor | None = None
    ) -> None:
        """Does nothing: workspaces belong to fovea.torch."""

    def plan(
        self,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        num_heads: int | None = None,
        head_dim_ckv: int | None = None,
        head_dim_kpe: int | None = None,
        page_size: int | None = None,
        causal: bool | None = None,
        sm_scale: float | None = None,
        q_data_type: torch.dtype | None = None,
        kv_data_type: torch.dtype | None = None,
        use_profiler: bool = False,
        *,
        metadata: MLAPlanMetadata | None = None,
        cum_seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        max_q_len: int | None = None,
        query_layout: str | None = None,
        kv_cache_layout: str | None = None,
        lse_mode: str = "none",
        output_dtype: torch.dtype | None = None,
        output_scale: str = "none",
        scale_mode: str = "default",
        skip_softmax: bool = False,
        enable_pdl: bool | None = None,
        use_sinks: bool = False,
        max_kv_len: int | None = None,
    ) -> None:
        """Prepares run() for a batch: `metadata`, or its fields. max_kv_len bounds the tokens of a request."""
        given = {"num_heads": num_heads, "head_dim_ckv": head_dim_ckv, "head_dim_kpe": head_dim_kpe}
        given |= {"page_size": page_size, "causal": causal, "sm_scale": sm_scale, "q_data_type": q_data_type}
        for name, value in given.items():
            if value is None:
                raise TypeError(f"plan() needs {name}")
        refuse(use_profiler, "use_profiler: there is no profiler buffer")
        refuse(output_scale != "none", f"output_scale is {output_scale!r}: the output is not quantised")
        refuse(skip_softmax, "skip_softmax: softmax is exact")
        refuse(scale_mode not in ("default", "kv-per-tensor"), f"scale_mode is {scale_mode!r}")
        if lse_mode not in ("none", "base2", "basee"):
            raise ValueError(f'lse_mode is {lse_mode!r}, must be "none", "base2" or "basee"')
        if metadata is None:
            metadata = MLAPlanMetadata(
                qo_indptr, kv_indptr, kv_indices, kv_len_arr, cum_seq_lens_q, block_tables, seq_lens, max_q_len
            )
        self._heads = Heads(
            num_heads, 1, head_dim_ckv + head_dim_kpe, head_dim_ckv, q_data_type, kv_data_type or q_data_type,
            output_dtype,
            causal=bool(causal),
            sm_scale=sm_scale,
            mla_rope_dim=head_dim_kpe,
        )  # fmt: skip
        self._page_size, self._lse_mode, self._use_sinks = page_size, lse_mode, use_sinks
        lists = replace(metadata.pages(page_size, max_kv_len), capacity=self._capacity)
        fresh = planning.plan_paged(self.device, metadata.queries(), lists, self._is_graph)
        self._pass = planning.keep_addresses(self._pass, fresh) if self._is_graph else fresh
        self._split = {}

    def run(
        self,
        q_nope: torch.Tensor | None = None,
        q_pe: torch.Tensor | None = None,
        ckv_cache: torch.Tensor | None = None,
        kpe_cache: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        query: Any = None,
        kv_cache: Any = None,
        ckv_scale: float | None = None,
        ckv_scale_arr: torch.Tensor | None = None,
        kpe_scale: float | None = None,
        sinks: torch.Tensor | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        bmm1_scale: float | torch.Tensor | None = None,
        bmm2_scale: float | torch.Tensor | None = None,
    ) -> Output:
        """Returns out [tokens, heads, head_dim_ckv], or (out, lse); lse f32 [tokens, heads], base 2 or e.

        query: [tokens, heads, ckv + kpe], or (q_nope, q_pe); kv_cache: [pages, page_size, ckv + kpe], or (ckv, kpe).
        """
        if self._heads is None or self._pass is None:
            raise RuntimeError("run() needs a prior plan()")
        self._check_scales(ckv_scale, ckv_scale_arr, kpe_scale)
        self._refuse_options(profiler_buffer, kv_len, page_table, o_scale, ckv_scale_arr)
        refuse(skip_softmax_threshold_scale_factor is not None, "skip_softmax_threshold_scale_factor: softmax is exact")
        refuse(bmm1_scale is not None or bmm2_scale is not None, "bmm1_scale and bmm2_scale: fold them into sm_scale")
        if (sinks is not None) != self._use_sinks:
            given = "given" if sinks is not None else "absent"
            raise ValueError(f"sinks are {given}, planned was use_sinks={self._use_sinks}")
        heads = self._heads
        q, tensors = self._queries(query if query is not None else (q_nope, q_pe), ckv_scale, kpe_scale)
        rows = self._cache_rows(kv_cache if kv_cache is not None else (ckv_cache, kpe_cache))
        base = "ln" if return_lse_base_on_e or self._lse_mode == "basee" else "log2"
        scale = softmax_scale(heads, ckv_scale)
        call = Call(q, scale, out, lse, return_lse, base, v_scale=ckv_scale, sinks=sinks, tensors=tensors)
        spec = heads.cache_spec(self._page_size)
        return run_attention(replace(heads, causal=True), self._tokens_pass(q.shape[0]), call, spec, (rows,))

    run_return_lse = partialmethod(run, return_lse=True)

    def _check_scales(self, ckv_scale: Any, ckv_scale_arr: Any, kpe_scale: Any) -> None:
        """Raises ValueError unless an fp8 cache comes with its scales, which have no default."""
        if self._heads.kv_dtype.itemsize > 1:
            return
        if (ckv_scale is None) == (ckv_scale_arr is None):
            raise ValueError("Exactly one of ckv_scale or ckv_scale_arr must be given with an fp8 cache")
        if kpe_scale is None and self._heads.mla_rope_dim > 0:
            raise ValueError("kpe_scale is absent, an fp8 cache needs it")

    def _check_dtype(self, name: str, tensor: torch.Tensor, planned: torch.dtype) -> None:
        if tensor.dtype != planned:
            raise ValueError(f"{name}.dtype is {tensor.dtype}, planned was {planned}")

    @staticmethod
    def _refuse_options(profiler_buffer: Any, kv_len: Any, page_table: Any, o_scale: Any, ckv_scale_arr: Any) -> None:
        refuse(profiler_buffer is not None, "profiler_buffer: there is no profiler")
        refuse(kv_len is not None or page_table is not None, "kv_len and page_table belong to plan()")
        refuse(o_scale is not None, f"o_scale is {o_scale}: the output is not quantised")
        refuse(ckv_scale_arr is not None, "ckv_scale_arr: scales of 128 values are part of a row (mla_fp8_rows)")

    def _tokens_pass(self, tokens: int) -> Pass:
        """Returns the planned pass; without causality, one in which every token is a request."""
        batch = self._pass
        if self._heads.causal or batch.one_token_each():
            return batch
        keeps = not batch.is_replayed and not indices.is_capturing(self.device)
        if not keeps:
            return batch.split(tokens, causal=False)
        if tokens not in self._split:
            self._split[tokens] = batch.split(tokens, causal=False)
        return self._split[tokens]

    def _queries(
        self, query: Any, ckv_scale: float | None, kpe_scale: float | None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns q without its rotary part, and q_rope. The softmax scale contains ckv_scale, q_rope kpe_scale."""
        ratio = (1.0 if kpe_scale is None else kpe_scale) / (1.0 if ckv_scale is None else ckv_scale)
        latent_dim, rope_dim = self._heads.head_dim_v, self._heads.mla_rope_dim
        if isinstance(query, torch.Tensor):
            query = query.split((latent_dim, rope_dim), dim=-1)
        q_nope, q_pe = query
        if q_nope is None:
            raise TypeError("run() needs query=, or q_nope and q_pe")
        self._check_dtype("q_nope", q_nope, self._heads.q_dtype)
        if rope_dim == 0:
            return q_nope, {}
        self._check_dtype("q_pe", q_pe, self._heads.q_dtype)
        if tuple(q_pe.shape) != (*q_nope.shape[:2], rope_dim):
            raise ValueError(f"q_pe has shape {tuple(q_pe.shape)}, must be {(*q_nope.shape[:2], rope_dim)}")
        return q_nope, {"q_rope": q_pe if ratio == 1.0 else q_pe * ratio}

    def _cache_rows(self, cache: Any) -> torch.Tensor:
        """Returns rows [pages, page_size, ckv + kpe]."""
        latent_dim, rope_dim = self._heads.head_dim_v, self._heads.mla_rope_dim
        if isinstance(cache, torch.Tensor):
            cache = cache.split((latent_dim, rope_dim), dim=-1)
        ckv, kpe = cache
        if ckv is None:
            raise TypeError("run() needs kv_cache=, or ckv_cache and kpe_cache")
        for name, part, dim in (("ckv_cache", ckv, latent_dim), ("kpe_cache", kpe, rope_dim)):
            if dim == 0:
                continue
            self._check_dtype(name, part, self._heads.kv_dtype)
            if part.ndim != 3 or tuple(part.shape[1:]) != (self._page_size, dim) or part.shape[0] != ckv.shape[0]:
                expected = f"[pages, {self._page_size}, {dim}]"
                raise ValueError(f"{name} has shape {tuple(part.shape)}, planned were {expected}")
        if rope_dim == 0:
            return ckv
        is_row = (
            ckv.untyped_storage().data_ptr() == kpe.untyped_storage().data_ptr()
            and kpe.storage_offset() == ckv.storage_offset() + latent_dim
            and kpe.stride() == ckv.stride()
            and ckv.stride(-1) == 1
        )
        if is_row:
            return ckv.as_strided((*ckv.shape[:2], latent_dim + rope_dim), ckv.stride())
        refuse(
            not copy_split_caches,
            "ckv and kpe are not neighbouring views of rows [pages, page_size, ckv + kpe]; make them with "
            "rows.split((ckv, kpe), -1), or set fovea.compat.flashinfer.mla.copy_split_caches = True to copy both "
            "caches in every run()",
        )
        shape = (*ckv.shape[:2], latent_dim + rope_dim)
        if self._rows is None or self._rows.shape != shape or self._rows.dtype != ckv.dtype:
            self._rows = torch.empty(shape, dtype=ckv.dtype, device=ckv.device)
        self._rows[..., :latent_dim].copy_(ckv)
        self._rows[..., latent_dim:].copy_(kpe)
        return self._rows
