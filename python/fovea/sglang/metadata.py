# SPDX-License-Identifier: Apache-2.0
"""One forward pass of SGLang, as Fovea's backends take it."""

from dataclasses import dataclass
from typing import Any

import torch

import fovea
from fovea.sglang.windows import WindowTable
from fovea.torch import consecutive


@dataclass
class Lengths:
    """The lengths of a pass. Tensors are int32 on the device; the host knows upper bounds only."""

    mode: str
    tokens: int
    max_q_len: int
    max_kv_len: int
    q_indptr: torch.Tensor
    kv_lens: torch.Tensor
    rows: torch.Tensor
    host_q_lens: torch.Tensor | None = None
    host_kv_lens: torch.Tensor | None = None


class Pass:
    """A forward pass. Its arrays are made when a group of layers first plans it: in a capture they are then part of the
    graph, which reads the lengths of every replay."""

    def __init__(self, max_kv_len: int, *, captured: bool, draft_step: int | None, ancestors: torch.Tensor | None):
        """max_kv_len: the width of the table of slots. captured: the pass serves later batches, too. draft_step: of the
        tokens that a draft model has proposed. ancestors: the mask of a tree of drafts, int64 [tokens]."""
        self.forward_batch: Any = None
        self._width = max_kv_len
        self._captured = captured
        self._draft_step = draft_step
        self._ancestors = ancestors
        self._lengths: Lengths | None = None
        self._planned: set[int] = set()

    def batch(self, group: Any) -> fovea.Batch:
        """Returns the pass as a group's backend takes it."""
        # A group that plans again is in the next run of a captured pass: warm-ups come before the capture.
        if self._lengths is None or id(group) in self._planned:
            self._lengths = self._read()
            self._planned.clear()
        self._planned.add(id(group))
        own, limits = self._lengths, group.backend.limits
        scope = group.spec.scope
        keys: dict[str, Any] = {}
        if scope == fovea.AttentionScope.decoder:
            keys = self._keys(group, own, limits)
        return fovea.Batch(
            mode=own.mode if scope == fovea.AttentionScope.decoder else "extend",
            requests=own.kv_lens.shape[0],
            tokens=own.tokens,
            q_indptr=own.q_indptr,
            kv_lens=own.kv_lens,
            max_q_len=min(own.max_q_len, limits.max_q_len),
            max_kv_len=min(own.max_kv_len, limits.max_kv_len),
            host_q_lens=own.host_q_lens,
            host_kv_lens=own.host_kv_lens,
            **keys,
        )

    def _keys(self, group: Any, own: Lengths, limits: fovea.BatchLimits) -> dict[str, Any]:
        slots = self.forward_batch.out_cache_loc
        keys = {"request_rows": own.rows, "table": group.table, "out_slots": slots}
        if group.windows is not None:
            keys = self._window_keys(group.windows, group, own)
        if slots is None:
            del keys["out_slots"]
        else:
            keys["out_slots"] = keys["out_slots"].reshape(-1)[: own.tokens].to(torch.int64).contiguous()
        if own.mode == "target_verify" and group.spec.mask == fovea.MaskKind.tree:
            keys["tree_ancestors"] = self._ancestors[: own.tokens]
        return keys

    def _window_keys(self, windows: WindowTable, group: Any, own: Lengths) -> dict[str, Any]:
        table, rows = windows.fill(group.table, own.rows, own.kv_lens, group.spec.window + own.max_q_len)
        slots = self.forward_batch.out_cache_loc
        return {
            "request_rows": rows,
            "table": table,
            "out_slots": None if slots is None else windows.translate(slots),
        }

    def _read(self) -> Lengths:
        forward_batch = self.forward_batch
        mode, requests = forward_batch.forward_mode, forward_batch.batch_size
        seq_lens = forward_batch.seq_lens[:requests]
        rows = forward_batch.req_pool_indices[:requests].to(torch.int32)
        if mode.is_decode_or_idle():
            return self._decode(seq_lens, rows)
        if mode.is_target_verify():
            return self._verify(seq_lens, rows)
        if mode.is_dllm_extend() or mode.is_prebuilt():
            raise NotImplementedError(f"forward_mode is {mode.name}: the plug-in does not serve it")
        return self._extend(seq_lens, rows)

    def _bound(self, further: int = 0) -> int:
        host = None if self._captured else self.forward_batch.seq_lens_cpu
        if host is None or host.numel() == 0:
            return self._width
        return min(int(host.max()) + further, self._width)

    def _decode(self, seq_lens: torch.Tensor, rows: torch.Tensor) -> Lengths:
        requests = rows.shape[0]
        proposed = 0 if self._draft_step is None else self._draft_step + 1
        return Lengths(
            mode="decode",
            tokens=requests,
            max_q_len=1,
            max_kv_len=self._bound(proposed),
            q_indptr=consecutive(requests + 1, rows.device),
            kv_lens=(seq_lens + proposed if proposed else seq_lens).to(torch.int32),
            rows=rows,
        )

    def _verify(self, seq_lens: torch.Tensor, rows: torch.Tensor) -> Lengths:
        info = self.forward_batch.spec_info
        if getattr(info, "ragged_verify_layout", None) is not None:
            raise NotImplementedError("ragged_verify_layout: the plug-in verifies equal numbers of drafts")
        drafts, requests = info.draft_token_num, rows.shape[0]
        return Lengths(
            mode="target_verify",
            tokens=requests * drafts,
            max_q_len=drafts,
            max_kv_len=self._bound(drafts),
            q_indptr=consecutive(requests + 1, rows.device) * drafts,
            kv_lens=(seq_lens + drafts).to(torch.int32),
            rows=rows,
        )

    def _extend(self, seq_lens: torch.Tensor, rows: torch.Tensor) -> Lengths:
        forward_batch, requests = self.forward_batch, rows.shape[0]
        q_lens = forward_batch.extend_seq_lens[:requests]
        ends = torch.cumsum(q_lens, dim=0, dtype=torch.int32)
        own = Lengths(
            mode="mixed",
            tokens=token_count(forward_batch),
            max_q_len=token_count(forward_batch),
            max_kv_len=self._bound(),
            q_indptr=torch.nn.functional.pad(ends, (1, 0)),
            kv_lens=seq_lens.to(torch.int32),
            rows=rows,
        )
        if not self._captured and forward_batch.extend_seq_lens_cpu is not None:
            host = torch.tensor(list(forward_batch.extend_seq_lens_cpu)[:requests], dtype=torch.int32)
            own.tokens = int(host.sum())
            if requests > 0:
                own.max_q_len = int(host.max())
                own.mode = "extend" if int(host.min()) > 1 else "mixed"
            if forward_batch.seq_lens_cpu is not None and not forward_batch.forward_mode.is_draft_extend_v2():
                own.host_q_lens = host
                own.host_kv_lens = forward_batch.seq_lens_cpu[:requests].to(torch.int32)
        return own


def token_count(forward_batch: Any) -> int:
    """Returns the tokens of a batch, padding included. Batches of embeddings have no token numbers."""
    tokens = forward_batch.positions if forward_batch.input_ids is None else forward_batch.input_ids
    return tokens.shape[0]
