# SPDX-License-Identifier: Apache-2.0
"""plan() and forward() of a backend as torch ops, for models that plan a pass once and run many layers."""

import itertools
import weakref

import torch

import fovea
from fovea.torch.library import define, refuse_gradients

_numbers = itertools.count(1)


class _Backends(dict[int, fovea.Backend]):
    def __missing__(self, number: int) -> fovea.Backend:
        raise ValueError(f"backend is {number}, its BackendOps no longer exists")


_backends = _Backends()


class BackendOps:
    """A backend whose plan() and forward() are torch ops.

    Ops that torch.compile traces depend on each other through tensors only. So every op changes `state`, a tensor
    without a meaning of its own, and the ops of a backend keep their order. Ops that read or write the cache itself are
    not ordered with them inside one compiled graph.

    The arguments are those of fovea.Batch and fovea.Backend.forward(). A plan reads its arrays until the last forward()
    has run, which a compiled graph does not know: give it arrays from outside the graph. Compiled graphs do not keep
    the object alive.
    """

    def __init__(self, backend: fovea.Backend):
        self.backend = backend
        self.number = next(_numbers)
        self.state = torch.zeros(1, dtype=torch.int64, device=str(backend.device))
        _backends[self.number] = backend
        weakref.finalize(self, _backends.pop, self.number, None)

    def plan(
        self,
        mode: str,
        q_indptr: torch.Tensor,
        kv_lens: torch.Tensor | None = None,
        *,
        tokens: int,
        request_rows: torch.Tensor | None = None,
        table: torch.Tensor | None = None,
        entry_tokens: int = 1,
        out_slots: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        tree_ancestors: torch.Tensor | None = None,
        cross_lens: torch.Tensor | None = None,
        cross_table: torch.Tensor | None = None,
        cross_entry_tokens: int = 1,
        shared_prefix: torch.Tensor | None = None,
        max_q_len: int = 0,
        max_kv_len: int = 0,
        prefix_written: bool = False,
    ) -> None:
        """Plans a batch of q_indptr.shape[0] - 1 requests. Other fields of fovea.Batch: use Backend.plan()."""
        torch.ops.fovea.plan.default(
            self.state,
            self.number,
            mode,
            tokens,
            q_indptr,
            kv_lens,
            request_rows,
            table,
            entry_tokens,
            out_slots,
            positions,
            tree_ancestors,
            cross_lens,
            cross_table,
            cross_entry_tokens,
            shared_prefix,
            max_q_len,
            max_kv_len,
            prefix_written,
        )

    def forward(
        self,
        layer: int,
        q: torch.Tensor | None,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        save_kv: bool = True,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        q_scale: torch.Tensor | None = None,
    ) -> None:
        """Runs one layer of kind mha. Without q it only stores k and v."""
        if save_kv and lse is None and sinks is None and alibi_slopes is None and q_scale is None:
            torch.ops.fovea.forward.default(self.state, self.number, layer, q, k, v, out)
        else:
            torch.ops.fovea.forward_options.default(
                self.state, self.number, layer, q, k, v, out, lse, save_kv, sinks, alibi_slopes, q_scale
            )

    def forward_mla(
        self,
        layer: int,
        q: torch.Tensor | None,
        latent: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        q_rope: torch.Tensor | None = None,
        w_uk: torch.Tensor | None = None,
        w_uv: torch.Tensor | None = None,
        save_kv: bool = True,
    ) -> None:
        """Runs one layer of kind mla. Without q it only stores latent and k_rope."""
        torch.ops.fovea.forward_mla.default(
            self.state, self.number, layer, q, latent, k_rope, out, lse, q_rope, w_uk, w_uv, save_kv
        )


def _plan(
    state, backend, forward_mode, tokens, q_indptr, kv_lens, request_rows, table, entry_tokens, out_slots, positions,
    tree_ancestors, cross_lens, cross_table, cross_entry_tokens, shared_prefix, max_q_len, max_kv_len, prefix_written,
):  # fmt: skip
    batch = fovea.Batch(
        mode=forward_mode,
        requests=q_indptr.shape[0] - 1,
        tokens=tokens,
        q_indptr=q_indptr,
        kv_lens=kv_lens,
        request_rows=request_rows,
        table=table,
        entry_tokens=entry_tokens,
        out_slots=out_slots,
        positions=positions,
        tree_ancestors=tree_ancestors,
        cross_lens=cross_lens,
        cross_table=cross_table,
        cross_entry_tokens=cross_entry_tokens,
        shared_prefix=shared_prefix,
        max_q_len=max_q_len,
        max_kv_len=max_kv_len,
        prefix_written=prefix_written,
    )
    _backends[backend].plan(batch)


def _forward(state, backend, layer, q, k, v, out):
    if torch.is_grad_enabled():
        refuse_gradients(q, k, v)
    _backends[backend]._forward_rows(layer, q, k, v, out)


def _forward_options(state, backend, layer, q, k, v, out, lse, save_kv, sinks, alibi_slopes, q_scale):
    if torch.is_grad_enabled():
        refuse_gradients(q, k, v)
    _backends[backend].forward(
        layer,
        q=q,
        k=k,
        v=v,
        out=out,
        lse=lse,
        save_kv=save_kv,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        q_scale=q_scale,
    )


def _forward_mla(state, backend, layer, q, latent, k_rope, out, lse, q_rope, w_uk, w_uv, save_kv):
    if torch.is_grad_enabled():
        refuse_gradients(q, latent, k_rope, q_rope)
    _backends[backend].forward(
        layer,
        q=q,
        out=out,
        lse=lse,
        save_kv=save_kv,
        latent=latent,
        k_rope=k_rope,
        q_rope=q_rope,
        w_uk=w_uk,
        w_uv=w_uv,
    )


def _nothing(*arguments):
    """The results of these ops, which only change tensors."""


define(
    "plan(Tensor(a!) state, int backend, str forward_mode, SymInt tokens, Tensor q_indptr, Tensor? kv_lens, "
    "Tensor? request_rows, Tensor? table, int entry_tokens, Tensor? out_slots, Tensor? positions, "
    "Tensor? tree_ancestors, Tensor? cross_lens, Tensor? cross_table, int cross_entry_tokens, Tensor? shared_prefix, "
    "SymInt max_q_len, SymInt max_kv_len, bool prefix_written) -> ()",
    _plan,
    _nothing,
)
# Every argument costs time in each call, so the rarer ones have an op of their own.
define(
    "forward(Tensor(a!) state, int backend, int layer, Tensor? q, Tensor? k, Tensor? v, Tensor(b!)? out) -> ()",
    _forward,
    _nothing,
)
define(
    "forward_options(Tensor(a!) state, int backend, int layer, Tensor? q, Tensor? k, Tensor? v, Tensor(b!)? out, "
    "Tensor(c!)? lse, bool save_kv, Tensor? sinks, Tensor? alibi_slopes, Tensor? q_scale) -> ()",
    _forward_options,
    _nothing,
)
define(
    "forward_mla(Tensor(a!) state, int backend, int layer, Tensor? q, Tensor? latent, Tensor? k_rope, "
    "Tensor(b!)? out, Tensor(c!)? lse, Tensor? q_rope, Tensor? w_uk, Tensor? w_uv, bool save_kv) -> ()",
    _forward_mla,
    _nothing,
)
