# SPDX-License-Identifier: Apache-2.0
"""Attention in numpy, and paged caches filled with noise, for the tests."""

from dataclasses import dataclass, field

import fovea
import numpy as np

NOISE_SEED = 20261129


@dataclass
class Case:
    """Shapes of one pass: request i has q_lens[i] new tokens of kv_lens[i]."""

    q_lens: list[int]
    kv_lens: list[int]
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    head_dim_v: int = 64
    page_size: int = 4
    window: int = 0
    logit_cap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    order: str = "nhd"
    dtype: str = "fp32"
    cache_dtype: str = "fp32"
    scale: str = "none"
    mode: str = "mixed"
    spec: dict = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return sum(self.q_lens)


def softmax_attention(q, k, v, case: Case, sinks=None, slopes=None):
    """Attends one request: q [q_len, q_heads, d], k and v [kv_len, kv_heads, d]. Returns out and lse in float64."""
    q, k, v = (array.astype(np.float64) for array in (q, k, v))
    q_len, kv_len = len(q), len(k)
    group = case.q_heads // case.kv_heads
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(case.head_dim)
    if case.logit_cap > 0:
        scores = case.logit_cap * np.tanh(scores / case.logit_cap)
    query = np.arange(kv_len - q_len, kv_len)[:, None]
    key = np.arange(kv_len)[None, :]
    if slopes is not None:
        scores = scores + slopes.astype(np.float64)[:, None, None] * (key - query)[None]
    visible = key <= query
    if case.window > 0:
        visible &= key > query - case.window
    scores = np.where(visible[None], scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    lse = (top + np.log(total))[..., 0]
    if sinks is not None:
        total = total + np.exp(sinks.astype(np.float64)[:, None, None] - top)
    out = np.einsum("hqk,khd->qhd", weights / total, v)
    return out, lse.T


def to_bf16(values):
    """Rounds float32 to bf16 and returns the bits as uint16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def encode(values, dtype: str):
    """Returns an array of the dtype; bf16 as its bits."""
    if dtype == "fp32":
        return np.ascontiguousarray(values, np.float32)
    if dtype == "fp16":
        return np.ascontiguousarray(values, np.float16)
    return to_bf16(values)


def decode(array, dtype: str):
    return from_bf16(array) if dtype == "bf16" else np.asarray(array, np.float32)


class Pass:
    """A prepared pass over a cache whose older keys are stored by a first pass."""

    def __init__(self, case: Case, backend: str = "auto", pool=None):
        self.case = case
        rng = np.random.default_rng(NOISE_SEED)
        self.requests = len(case.q_lens)
        total = sum(case.kv_lens)
        shape_k, shape_v = (total, case.kv_heads, case.head_dim), (total, case.kv_heads, case.head_dim_v)
        self.k = encode(rng.standard_normal(shape_k), case.dtype)
        self.v = encode(rng.standard_normal(shape_v), case.dtype)
        self.q = encode(rng.standard_normal((case.tokens, case.q_heads, case.head_dim)), case.dtype)
        self.sinks = rng.standard_normal(case.q_heads).astype(np.float32) if case.sinks else None
        self.slopes = (2.0 ** -np.arange(1, case.q_heads + 1)).astype(np.float32) if case.alibi else None
        self.spec = fovea.AttentionSpec(
            q_heads=case.q_heads,
            kv_heads=case.kv_heads,
            head_dim=case.head_dim,
            head_dim_v=case.head_dim_v,
            q_dtype=case.dtype,
            window=case.window,
            needs_lse=True,
            scores=fovea.ScoreSpec(logit_cap=case.logit_cap, has_sinks=case.sinks, has_alibi=case.alibi),
            **case.spec,
        )
        self.cache = fovea.KvCacheSpec(
            kv_heads=case.kv_heads,
            head_dim=case.head_dim,
            head_dim_v=case.head_dim_v,
            page_size=case.page_size,
            dtype=case.cache_dtype,
            order=case.order,
            scale=case.scale,
        )
        pages = 1 + sum(-(-n // case.page_size) for n in case.kv_lens)
        self.pool = pool(self.cache, pages) if pool else fovea.KvPool(self.cache, pages)
        self.limits = fovea.BatchLimits(
            max_requests=self.requests,
            max_tokens=total,
            max_q_len=max(case.kv_lens),
            max_kv_len=max(case.kv_lens),
        )
        self.backend = fovea.select(self.spec, self.cache, limits=self.limits, backend=backend, threads=2).create(
            self.pool
        )
        self.backend.reserve(self.limits)
        self._place(pages)

    def _place(self, pages: int) -> None:
        allocator = fovea.PageAllocator(pages, self.case.page_size)
        self.table = fovea.RequestTable(self.requests + 1, max(self.case.kv_lens))
        self.rows, self.slots = [], []
        for length in self.case.kv_lens:
            row, slots = self.table.allocate(), allocator.extend(0, length)
            self.table.write(row, 0, slots)
            self.rows.append(row)
            self.slots.append(slots)

    def batch(self, q_lens, kv_lens, mode) -> fovea.Batch:
        slots = [s for own, q, n in zip(self.slots, q_lens, kv_lens) for s in own[n - q : n]]
        return fovea.Batch(
            mode=mode,
            q_indptr=np.cumsum([0, *q_lens]).astype(np.int32),
            kv_lens=np.array(kv_lens, np.int32),
            request_rows=np.array(self.rows, np.int32),
            table=self.table,
            out_slots=np.array(slots, np.int64),
        )

    def rows_of(self, q_lens, kv_lens):
        """Returns the rows of self.k that a pass stores."""
        starts = np.cumsum([0, *self.case.kv_lens])
        return np.concatenate([np.arange(s + n - q, s + n) for s, q, n in zip(starts, q_lens, kv_lens)])

    def store_older(self) -> None:
        """Stores the keys and values of all tokens before the new ones."""
        older = [n - q for q, n in zip(self.case.q_lens, self.case.kv_lens)]
        if sum(older) == 0:
            return
        self.backend.plan(self.batch(older, older, "extend"))
        rows = self.rows_of(older, older)
        self.backend.forward(k=self.k[rows], v=self.v[rows])

    def run(self):
        """Runs the pass and returns out and lse."""
        case = self.case
        self.store_older()
        out = encode(np.zeros((case.tokens, case.q_heads, case.head_dim_v)), case.dtype)
        lse = np.zeros((case.tokens, case.q_heads), np.float32)
        self.backend.plan(self.batch(case.q_lens, case.kv_lens, case.mode))
        rows = self.rows_of(case.q_lens, case.kv_lens)
        self.backend.forward(
            q=self.q, k=self.k[rows], v=self.v[rows], out=out, lse=lse, sinks=self.sinks, alibi_slopes=self.slopes
        )
        return decode(out, case.dtype), lse

    def expected(self):
        """Returns out and lse of numpy, from keys and values as they were given."""
        case, outs, lses = self.case, [], []
        kv, queries = np.cumsum([0, *case.kv_lens]), np.cumsum([0, *case.q_lens])
        for i in range(self.requests):
            out, lse = softmax_attention(
                decode(self.q, case.dtype)[queries[i] : queries[i + 1]],
                decode(self.k, case.dtype)[kv[i] : kv[i + 1]],
                decode(self.v, case.dtype)[kv[i] : kv[i + 1]],
                case,
                self.sinks,
                self.slopes,
            )
            outs.append(out)
            lses.append(lse)
        return np.concatenate(outs), np.concatenate(lses)
