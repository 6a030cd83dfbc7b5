# SPDX-License-Identifier: Apache-2.0
"""The compiled part of Fovea. Names and meanings are those of the C++ headers in include/fovea.

Arrays are read through DLPack without a copy: numpy, torch, jax, cupy, and anything else with `__dlpack__`. numpy has
no bf16 and no fp8: their bits come as uint16 and uint8. An array that is written must not be read-only. The last axis
of every array is contiguous; other strides are free. Every misuse raises `Error` with the code "invalid_argument" and
a message that names the argument, its value and the limit.

Enumerations are accepted as enum members or as their names ("decoder", "nhd"), dtypes also by the usual spellings
("bf16", "bfloat16", "fp8_e4m3"). Devices are accepted as `Device` or as text: "cpu", "cuda", "cuda:1".
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol

from fovea._error import Error as Error

class Array(Protocol):
    """An array of any library that speaks DLPack."""

    def __dlpack__(self, **kwargs: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

__version__: str

# Enumerations. A member equals its text, which explain() and error messages use.

class DType(StrEnum):
    f32 = "fp32"
    f16 = "fp16"
    bf16 = "bf16"
    f8e4m3 = "fp8_e4m3"
    f8e5m2 = "fp8_e5m2"
    i32 = "int32"
    i64 = "int64"
    u8 = "uint8"

class AttentionKind(StrEnum):
    mha = "mha"
    mla = "mla"
    gated_delta_net = "gated_delta_net"
    mamba2 = "mamba2"
    kda = "kda"
    lightning = "lightning"
    mamba1 = "mamba1"
    short_conv = "short_conv"

class AttentionScope(StrEnum):
    decoder = "decoder"
    ragged = "ragged"
    encoder = "encoder"
    encoder_cache = "encoder_cache"
    cross = "cross"

class MaskKind(StrEnum):
    none = "none"
    tree = "tree"
    custom = "custom"
    prefix_spans = "prefix_spans"
    multi_item = "multi_item"

class ForwardMode(StrEnum):
    idle = "idle"
    decode = "decode"
    extend = "extend"
    mixed = "mixed"
    target_verify = "target_verify"

class KvLayout(StrEnum):
    mha = "mha"
    mla = "mla"
    mla_fp8_rows = "mla_fp8_rows"

class KvScale(StrEnum):
    none = "none"
    per_tensor = "per_tensor"
    per_head = "per_head"
    per_token_head = "per_token_head"

class KvOrder(StrEnum):
    nhd = "nhd"
    hnd = "hnd"

class DeviceKind(StrEnum):
    cpu = "cpu"
    cuda = "cuda"

class RejectCode(StrEnum):
    device = "device"
    kind = "kind"
    scope = "scope"
    mask = "mask"
    heads = "heads"
    head_dim = "head_dim"
    q_dtype = "q_dtype"
    kv_dtype = "kv_dtype"
    kv_scale = "kv_scale"
    kv_layout = "kv_layout"
    window = "window"
    chunk = "chunk"
    dual_chunk = "dual_chunk"
    logit_cap = "logit_cap"
    sinks = "sinks"
    alibi = "alibi"
    rope = "rope"
    lse = "lse"
    batch_invariant = "batch_invariant"
    limits = "limits"
    not_built = "not_built"
    kernels = "kernels"

class FinishReason(StrEnum):
    none = "none"
    stop = "stop"
    length = "length"
    cancelled = "cancelled"
    failed = "failed"

class Phase(StrEnum):
    prefill = "prefill"
    decode = "decode"

# Value types. They are immutable, compare and hash by value, pickle, and make changed copies with replace().

class DualChunk:
    """Dual chunk attention; chunk_size 0 means off."""

    def __init__(self, *, chunk_size: int = 0, local_size: int = 0) -> None: ...
    @property
    def chunk_size(self) -> int: ...
    @property
    def local_size(self) -> int: ...
    @property
    def length(self) -> int: ...
    def replace(self, **fields: Any) -> DualChunk: ...

class ScoreSpec:
    """How scores are made of products of q and k. softmax_scale 0 means 1 / sqrt(width of k)."""

    def __init__(
        self, *, softmax_scale: float = 0, logit_cap: float = 0, has_sinks: bool = False, has_alibi: bool = False
    ) -> None: ...
    @property
    def softmax_scale(self) -> float: ...
    @property
    def logit_cap(self) -> float: ...
    @property
    def has_sinks(self) -> bool: ...
    @property
    def has_alibi(self) -> bool: ...
    def replace(self, **fields: Any) -> ScoreSpec: ...

class MlaSpec:
    """Widths of multi-head latent attention. nope_dim 0 means that q arrives absorbed."""

    def __init__(self, *, kv_lora_rank: int = 0, rope_dim: int = 0, nope_dim: int = 0, v_dim: int = 0) -> None: ...
    @property
    def kv_lora_rank(self) -> int: ...
    @property
    def rope_dim(self) -> int: ...
    @property
    def nope_dim(self) -> int: ...
    @property
    def v_dim(self) -> int: ...
    @property
    def row_dim(self) -> int: ...
    def replace(self, **fields: Any) -> MlaSpec: ...

class LinearSpec:
    """Heads and widths of a linear layer. Its state is [value_heads, value_dim, key_dim]."""

    def __init__(
        self, *, key_heads: int = 0, value_heads: int = 0, key_dim: int = 0, value_dim: int = 0, conv_width: int = 0
    ) -> None: ...
    @property
    def key_heads(self) -> int: ...
    @property
    def value_heads(self) -> int: ...
    @property
    def key_dim(self) -> int: ...
    @property
    def value_dim(self) -> int: ...
    @property
    def conv_width(self) -> int: ...
    @property
    def conv_dim(self) -> int: ...
    def replace(self, **fields: Any) -> LinearSpec: ...

class AttentionSpec:
    """The needs of a group of layers. A missing head_dim_v means head_dim."""

    def __init__(
        self,
        *,
        kind: AttentionKind | str = "mha",
        scope: AttentionScope | str = "decoder",
        mask: MaskKind | str = "none",
        q_heads: int = 0,
        kv_heads: int = 0,
        head_dim: int = 0,
        head_dim_v: int | None = None,
        q_dtype: DType | str = "fp32",
        window: int = 0,
        chunk: int = 0,
        dual_chunk: DualChunk = ...,
        has_rope: bool = False,
        needs_lse: bool = False,
        batch_invariant: bool = False,
        scores: ScoreSpec = ...,
        mla: MlaSpec = ...,
        linear: LinearSpec = ...,
    ) -> None: ...
    @property
    def kind(self) -> AttentionKind: ...
    @property
    def scope(self) -> AttentionScope: ...
    @property
    def mask(self) -> MaskKind: ...
    @property
    def q_heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def head_dim_v(self) -> int: ...
    @property
    def q_dtype(self) -> DType: ...
    @property
    def window(self) -> int: ...
    @property
    def chunk(self) -> int: ...
    @property
    def dual_chunk(self) -> DualChunk: ...
    @property
    def has_rope(self) -> bool: ...
    @property
    def needs_lse(self) -> bool: ...
    @property
    def batch_invariant(self) -> bool: ...
    @property
    def scores(self) -> ScoreSpec: ...
    @property
    def mla(self) -> MlaSpec: ...
    @property
    def linear(self) -> LinearSpec: ...
    @property
    def draft_inputs(self) -> int: ...
    def replace(self, **fields: Any) -> AttentionSpec: ...

class KvCacheSpec:
    """Layout of the cache of a group of layers. A missing head_dim_v means head_dim, for mla layouts it is needed."""

    def __init__(
        self,
        *,
        layout: KvLayout | str = "mha",
        order: KvOrder | str = "nhd",
        dtype: DType | str = "fp32",
        scale: KvScale | str = "none",
        layers: int = 1,
        kv_heads: int = 0,
        head_dim: int = 0,
        head_dim_v: int | None = None,
        page_size: int = 1,
        window: int = 0,
    ) -> None: ...
    @property
    def layout(self) -> KvLayout: ...
    @property
    def order(self) -> KvOrder: ...
    @property
    def dtype(self) -> DType: ...
    @property
    def scale(self) -> KvScale: ...
    @property
    def layers(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def head_dim_v(self) -> int: ...
    @property
    def page_size(self) -> int: ...
    @property
    def window(self) -> int: ...
    @property
    def bytes_per_page(self) -> int: ...
    def replace(self, **fields: Any) -> KvCacheSpec: ...

class StateCacheSpec:
    """Layout of the recurrent states of linear layers."""

    def __init__(
        self,
        *,
        layers: int = 1,
        conv_dim: int = 0,
        conv_width: int = 0,
        heads: int = 0,
        rows: int = 0,
        columns: int = 0,
        dtype: DType | str = "fp32",
        max_drafts: int = 0,
        draft_inputs: int = 0,
    ) -> None: ...
    @property
    def layers(self) -> int: ...
    @property
    def conv_dim(self) -> int: ...
    @property
    def conv_width(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def dtype(self) -> DType: ...
    @property
    def max_drafts(self) -> int: ...
    @property
    def draft_inputs(self) -> int: ...
    @property
    def bytes_per_slot(self) -> int: ...
    def replace(self, **fields: Any) -> StateCacheSpec: ...

class BatchLimits:
    """Upper bounds by which reserve() sizes every buffer."""

    def __init__(
        self,
        *,
        max_requests: int = 1,
        max_tokens: int = 1,
        max_q_len: int = 1,
        max_kv_len: int = 1,
        max_encoder_len: int = 0,
        prefix_levels: int = 0,
        min_prefix_savings: int = ...,
        workspace_budget: int = ...,
    ) -> None: ...
    @property
    def max_requests(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def max_q_len(self) -> int: ...
    @property
    def max_kv_len(self) -> int: ...
    @property
    def max_encoder_len(self) -> int: ...
    @property
    def prefix_levels(self) -> int: ...
    @property
    def min_prefix_savings(self) -> int: ...
    @property
    def workspace_budget(self) -> int: ...
    def replace(self, **fields: Any) -> BatchLimits: ...

# Devices and threads.

class Device:
    """A processor: the CPU, or the GPU that the driver lists at `index`. str() gives "cpu" or "cuda:0"."""

    def __init__(self, name: str = "cpu") -> None: ...
    @property
    def kind(self) -> DeviceKind: ...
    @property
    def index(self) -> int: ...

class DeviceInfo:
    """A device and its properties. Construct one to select backends for a GPU that this machine lacks."""

    def __init__(
        self,
        *,
        kind: DeviceKind | str = "cpu",
        index: int = 0,
        name: str = "",
        sm: int = 0,
        isa: str = "",
        cores: int = 1,
        memory_bytes: int = 0,
    ) -> None: ...
    @property
    def kind(self) -> DeviceKind: ...
    @property
    def index(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def sm(self) -> int: ...
    @property
    def isa(self) -> str: ...
    @property
    def cores(self) -> int: ...
    @property
    def memory_bytes(self) -> int: ...
    @property
    def device(self) -> Device: ...
    def replace(self, **fields: Any) -> DeviceInfo: ...

def devices() -> list[DeviceInfo]:
    """Returns the CPU, then every GPU that the driver lists."""

def find_device(name: str) -> DeviceInfo:
    """Returns the device named "cpu", "cuda" (the first GPU) or "cuda:N"."""

def why_no_gpu() -> str:
    """Returns why no GPU can be used; empty: there is one."""

class ThreadPool:
    """The threads that CPU kernels run on. 0: one per core available to this process."""

    def __init__(self, threads: int = 0) -> None: ...
    @property
    def size(self) -> int: ...

# Caches.

class KvPool:
    """Keys and values of all layers of a group.

    KvPool(spec, pages, device) allocates zeroed memory; page 0 is reserved for padding. lend() makes a pool over
    arrays of the caller.
    """

    def __init__(self, spec: KvCacheSpec, pages: int, device: Device | str = "cpu") -> None: ...
    @staticmethod
    def lend(
        spec: KvCacheSpec,
        layers: Sequence[Sequence[Array]],
        device: Device | str | None = None,
        *,
        keep: bool = True,
        reserves_page_zero: bool = False,
    ) -> KvPool:
        """Makes a pool over arrays that the caller owns.

        The pool keeps references to the arrays, unless `keep` is False: then the caller keeps their memory.

        Each layer is (k, v), (k, v, k_scale, v_scale), for mla layouts (rows,) or (rows, scale).
        nhd: k and v are [pages, page_size, kv_heads, dim]; hnd: [pages, kv_heads, page_size, dim]; mla: rows are
        [pages, page_size, head_dim] or [pages, page_size, 1, head_dim]; mla_fp8_rows: uint8 or fp8, [.., 656].
        Scales, f32: per_tensor [1], per_head [kv_heads], per_token_head [pages * page_size, kv_heads] (or split into
        [pages, page_size, kv_heads]), dense. device: None means that of the arrays. reserves_page_zero: only padding
        uses page 0, as in pools of the library; else padding has lengths of 0 and writes to -1.
        """
    def layer(self, index: int) -> tuple[LayerArray, ...]:
        """Returns the arrays of a layer in the form that lend() takes. They share memory with the pool."""
    @property
    def spec(self) -> KvCacheSpec: ...
    @property
    def pages(self) -> int: ...
    @property
    def reserves_page_zero(self) -> bool: ...
    @property
    def device(self) -> Device: ...
    @property
    def nbytes(self) -> int: ...

class LayerArray:
    """An array over memory of a pool, for numpy.from_dlpack, torch.from_dlpack and the like. It keeps the pool."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def strides(self) -> tuple[int, ...]:
        """Elements between neighbours, per axis."""
    @property
    def dtype(self) -> str:
        """"fp32", "bf16", "int32", ..."""
    @property
    def device(self) -> Device: ...
    @property
    def address(self) -> int: ...
    @property
    def bits(self) -> LayerArray:
        """The same memory as unsigned integers, for libraries without bf16 or fp8."""
    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

class WindowKvPool(KvPool):
    """A pool of window layers whose slots are translated from those of a full pool of `full_slots` slots."""

    def __init__(self, spec: KvCacheSpec, pages: int, full_slots: int, device: Device | str = "cpu") -> None: ...
    def map(self, full_slots: Array | Sequence[int]) -> bool:
        """Maps slots (int64 or int32). Returns False, and maps nothing, if the pool is full."""
    def unmap(self, full_slots: Array | Sequence[int]) -> None: ...
    def unmap_pages(self, full_pages: Array | Sequence[int]) -> None: ...
    def publish(self, stream: Any = None) -> None:
        """Copies changes to the device, for work that is enqueued on the stream afterwards."""
    def usable_prefix(self, full_pages: Array | Sequence[int]) -> int:
        """Returns the tokens of a cached prefix that a request can continue from."""
    @property
    def free_pages(self) -> int: ...
    @property
    def slot_map(self) -> LayerArray:
        """int64 [full_slots], host memory: the slot of this pool, -1 if the token has left the window."""

class StatePool:
    """Recurrent states of linear layers, one slot per request. Slot 0 is the dummy."""

    def __init__(self, spec: StateCacheSpec, slots: int, device: Device | str = "cpu") -> None: ...
    def allocate(self) -> int | None:
        """Returns a zeroed slot; None: the pool is full."""
    def release(self, slot: int) -> None: ...
    def copy(self, source: int, target: int) -> None: ...
    def publish(self, stream: Any = None) -> None:
        """On a GPU: enqueues what allocate() and copy() do to the states, for later work of the stream."""
    def in_use(self, slot: int) -> bool: ...
    def layer(self, index: int) -> tuple[LayerArray, LayerArray]:
        """Returns conv [slots, conv_dim, conv_width - 1] and state [slots, heads, rows, columns], f32."""
    @property
    def spec(self) -> StateCacheSpec: ...
    @property
    def slots(self) -> int: ...
    @property
    def device(self) -> Device: ...
    @property
    def free_slots(self) -> int: ...

class RequestTable:
    """The slots of each request's tokens, int32 [max_requests, max_context] in host memory; row 0 is the dummy."""

    def __init__(self, max_requests: int, max_context: int) -> None: ...
    def allocate(self) -> int | None: ...
    def release(self, row: int) -> None: ...
    def row(self, row: int) -> LayerArray:
        """Returns the writable row, int32 [max_context]."""
    def write(self, row: int, first: int, slots: Array | Sequence[int]) -> None:
        """Writes slots (int32 or int64) of the tokens from position `first` on, and marks the row as changed."""
    def mark_changed(self, row: int, first: int) -> None: ...
    def take_changed(self, row: int) -> int: ...
    @property
    def table(self) -> LayerArray:
        """The whole table, int32 [max_requests, max_context]."""
    @property
    def max_requests(self) -> int: ...
    @property
    def max_context(self) -> int: ...
    @property
    def available(self) -> int: ...

class PageAllocator:
    """Free pages and reference counts of one pool. Page 0 is reserved."""

    def __init__(self, pages: int, page_size: int) -> None: ...
    def extend(self, prefix: int, length: int, last_slot: int = -1) -> list[int] | None:
        """Returns the slots of tokens [prefix, length) of a request; None, and nothing is taken: too few pages."""
    def allocate(self, count: int) -> list[int] | None: ...
    def retain(self, page: int) -> None: ...
    def release(self, page: int) -> None: ...
    def release_slots(self, slots: Array | Sequence[int]) -> None: ...
    def truncate(self, slots: Array | Sequence[int], length: int) -> None: ...
    def references(self, page: int) -> int: ...
    @property
    def free_pages(self) -> int: ...
    @property
    def pages(self) -> int: ...
    @property
    def page_size(self) -> int: ...

class PrefixMatch:
    tokens: int
    pages: list[int]
    state_slot: int

class PrefixCacheStats:
    queries: int
    hits: int
    pages: int
    evicted_pages: int
    snapshots: int

class PrefixDomain:
    """The conditions, besides equal tokens, under which cached keys and values can be reused."""

    def __init__(self, *, model: str = "", adapter: str = "", kv_format: str = "", salt: str = "") -> None: ...
    @property
    def model(self) -> str: ...
    @property
    def adapter(self) -> str: ...
    @property
    def kv_format(self) -> str: ...
    @property
    def salt(self) -> str: ...
    def replace(self, **fields: Any) -> PrefixDomain: ...

class PrefixCache:
    """Finds the pages that hold the keys and values of a token prefix. Tokens are int32 arrays or sequences."""

    def __init__(self, pages: PageAllocator, state: StatePool | None = None) -> None: ...
    def match(
        self, domain: PrefixDomain, tokens: Array | Sequence[int], max_tokens: int | None = None
    ) -> PrefixMatch: ...
    def insert(
        self,
        domain: PrefixDomain,
        tokens: Array | Sequence[int],
        pages: Array | Sequence[int],
        state_slot: int = -1,
    ) -> None: ...
    def evict(self, pages: int) -> list[int]: ...
    def evict_state(self) -> bool: ...
    def pin(self, domain: PrefixDomain, tokens: Array | Sequence[int]) -> int: ...
    def unpin(self, domain: PrefixDomain, tokens: Array | Sequence[int]) -> None: ...
    def clear(self) -> list[int]: ...
    @property
    def stats(self) -> PrefixCacheStats: ...

# Selection.

class Reason:
    code: RejectCode
    text: str

class Candidate:
    name: str
    reasons: list[Reason]

class Selection:
    """A choice of backend, with every reason of every rejection."""

    @property
    def name(self) -> str: ...
    @property
    def asked(self) -> str: ...
    @property
    def fallback(self) -> str: ...
    @property
    def workspace_bytes(self) -> int: ...
    @property
    def notes(self) -> str: ...
    @property
    def graphs(self) -> bool:
        """True if passes of the backend can be captured in CUDA graphs."""
    @property
    def candidates(self) -> list[Candidate]: ...
    @property
    def spec(self) -> AttentionSpec: ...
    @property
    def limits(self) -> BatchLimits: ...
    @property
    def device(self) -> Device: ...
    def explain(self) -> str: ...
    def create(self, kv: KvPool | None = None, state: StatePool | None = None) -> Backend:
        """Creates the backend over pools, which it keeps. Call reserve() before plan()."""

def select(
    spec: AttentionSpec,
    cache: KvCacheSpec | None = None,
    *,
    limits: BatchLimits = ...,
    device: Device | DeviceInfo | str = "cpu",
    threads: ThreadPool | int | None = None,
    backend: str = "auto",
) -> Selection:
    """Chooses a backend. `backend` is "auto", "NAME" (required) or "prefer:NAME".

    threads: of the CPU; None is a pool of all cores that all backends of the process share. Raises Error with the
    code "unsupported" and every reason if no backend accepts.
    """

def backends() -> list[tuple[str, str]]:
    """Returns name and role of every backend, in order of preference."""

# Batches and backends.

class Batch:
    """One forward pass over several requests. It keeps references to its arrays, which live on the backend's device.

    Shapes: q_indptr int32 [requests + 1]; kv_lens int32 [requests]; request_rows int32 [requests]; table int32
    [rows, stride] of slots, or of pages with entry_tokens = page_size, or a RequestTable; out_slots int64 [tokens];
    positions int32 [tokens].
    Masks: tree_ancestors uint64 or int64 [tokens]; custom_visible uint8 or bool [bytes], custom_indptr int64
    [requests + 1]; span_bounds int32 [2 * spans] or [spans, 2], span_indptr int32 [requests + 1]; item_prefix_lens
    uint32 or int32 [requests], item_token_pos uint16 or int16 [requests, stride].
    Cross attention: cross_lens int32 [requests], cross_table as table. Linear layers: state_slots int32 [requests],
    snapshot_slots int32 [tokens], draft_counts int32 [requests].
    Hints: max_q_len, max_kv_len, host_q_lens and host_kv_lens int32 [requests] in host memory, shared_prefix int32
    [requests], prefix_written.

    requests defaults to the length of kv_lens, or that of q_indptr less 1. tokens defaults to the length of
    out_slots or positions, else to requests for mode decode, else on the CPU to the last entry of q_indptr; on a GPU
    it is then needed.
    """

    def __init__(
        self,
        *,
        mode: ForwardMode | str,
        requests: int | None = None,
        tokens: int | None = None,
        q_indptr: Array | None = None,
        kv_lens: Array | None = None,
        request_rows: Array | None = None,
        table: Array | RequestTable | None = None,
        entry_tokens: int = 1,
        out_slots: Array | None = None,
        positions: Array | None = None,
        tree_ancestors: Array | None = None,
        custom_visible: Array | None = None,
        custom_indptr: Array | None = None,
        span_bounds: Array | None = None,
        span_indptr: Array | None = None,
        item_prefix_lens: Array | None = None,
        item_token_pos: Array | None = None,
        cross_lens: Array | None = None,
        cross_table: Array | RequestTable | None = None,
        cross_entry_tokens: int = 1,
        state_slots: Array | None = None,
        snapshot_slots: Array | None = None,
        draft_counts: Array | None = None,
        max_q_len: int = 0,
        max_kv_len: int = 0,
        host_q_lens: Array | None = None,
        host_kv_lens: Array | None = None,
        shared_prefix: Array | None = None,
        prefix_written: bool = False,
    ) -> None: ...
    @property
    def mode(self) -> ForwardMode: ...
    @property
    def requests(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def device(self) -> Device: ...

class RotaryTensors:
    """Rotary positions of q and k, for specs with has_rope.

    cos and sin: f32 [max_positions, rotary_dim / 2], dense. positions: int32 [tokens]. interleaved: pairs
    (2i, 2i + 1), else (i, i + rotary_dim / 2). The object keeps references to the arrays.
    """

    def __init__(self, *, cos: Array, sin: Array, positions: Array, interleaved: bool = False) -> None: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def rotary_dim(self) -> int: ...
    @property
    def interleaved(self) -> bool: ...

class BoundLayer:
    """The checked tensors of one layer, made by Backend.bind(). It keeps references to them."""

    def forward(self, stream: Any = None) -> None:
        """Runs the layer on the planned batch."""
    def time(self, count: int, stream: Any = None) -> float:
        """Returns the seconds that `count` calls of forward() take in C++, to compare."""

class Backend:
    """One attention implementation over one pool. Calls on one object wait for each other.

    On a GPU, plan() and forward() only enqueue work, and a CUDA graph may capture both. `stream` is an address (int),
    an object with `cuda_stream` or `__cuda_stream__`, or None: the stream that the arrays' library works on, else the
    default stream.
    """

    @property
    def name(self) -> str: ...
    @property
    def device(self) -> Device: ...
    @property
    def spec(self) -> AttentionSpec: ...
    @property
    def kv(self) -> KvPool | None: ...
    @property
    def state(self) -> StatePool | None: ...
    @property
    def limits(self) -> BatchLimits | None:
        """The limits of the last reserve()."""
    def workspace_bytes(self, limits: BatchLimits) -> int: ...
    def reserve(self, limits: BatchLimits, workspace: Array | None = None) -> None:
        """Fixes every buffer. `workspace`: a dense array of the device, of workspace_bytes(limits) bytes or more,
        64-byte aligned, which the backend keeps; None: the backend allocates."""
    def plan(self, batch: Batch, stream: Any = None) -> None:
        """Builds indices and divides the work, once per forward pass. The backend keeps the batch."""
    def forward(
        self,
        layer: int = 0,
        *,
        q: Array | None = None,
        k: Array | None = None,
        v: Array | None = None,
        out: Array | None = None,
        lse: Array | None = None,
        q_scale: Array | None = None,
        save_kv: bool = True,
        sinks: Array | None = None,
        alibi_slopes: Array | None = None,
        rope: RotaryTensors | None = None,
        q_succ: Array | None = None,
        q_inter: Array | None = None,
        latent: Array | None = None,
        k_rope: Array | None = None,
        q_rope: Array | None = None,
        w_uk: Array | None = None,
        w_uv: Array | None = None,
        mixed: Array | None = None,
        conv_weight: Array | None = None,
        conv_bias: Array | None = None,
        log_decay: Array | None = None,
        beta: Array | None = None,
        skip: Array | None = None,
        l2_normalise_qk: bool = False,
        plain_conv: bool = False,
        stream: Any = None,
    ) -> None:
        """Runs one layer of the planned batch: stores k and v, attends, writes out and, if given, lse.

        Rows beyond the batch's tokens may exist and stay untouched. dtype: that of the spec's q_dtype, for an fp8 q
        bf16.
        q [tokens, q_heads, head_dim]; k [tokens, kv_heads, head_dim]; v [tokens, kv_heads, head_dim_v];
        out [tokens, q_heads, head_dim_v]; lse f32 [tokens, q_heads], dense, natural logarithm, needs spec.needs_lse;
        q_scale f32 [1], [tokens], [1, q_heads] or [tokens, q_heads]; sinks and alibi_slopes f32 [q_heads].
        mla: q [tokens, q_heads, kv_lora_rank + rope_dim] or, with weights, [.., nope_dim + rope_dim], without the
        rope_dim values if q_rope [tokens, q_heads, rope_dim] holds them; latent [tokens, 1, kv_lora_rank] or
        [tokens, kv_lora_rank]; k_rope [tokens, 1, rope_dim] or [tokens, rope_dim]; w_uk [q_heads, nope_dim,
        kv_lora_rank]; w_uv [q_heads, v_dim, kv_lora_rank]; out [tokens, q_heads, v_dim or kv_lora_rank].
        dual chunk without has_rope: q_succ and q_inter, of q's shape.
        linear, f32 and dense: mixed [tokens, conv_dim]; conv_weight [conv_dim, conv_width]; conv_bias [conv_dim];
        log_decay and beta [tokens, value_heads], but kda: log_decay [tokens, value_heads, key_dim], lightning:
        log_decay [value_heads] and no beta, mamba1: log_decay [value_heads, key_dim]; skip [value_heads]; out
        [tokens, value_heads, value_dim]. Layers of mamba1 make two calls: one with conv_weight, of which out is the
        convolution of mixed [tokens, value_heads], then the scan. short_conv has the first of them only.
        The arrays are borrowed: on a GPU they must live until the work has run, as stream-ordered allocators ensure.
        """
    def bind(
        self,
        layer: int = 0,
        *,
        q: Array | None = None,
        k: Array | None = None,
        v: Array | None = None,
        out: Array | None = None,
        lse: Array | None = None,
        q_scale: Array | None = None,
        save_kv: bool = True,
        sinks: Array | None = None,
        alibi_slopes: Array | None = None,
        rope: RotaryTensors | None = None,
        q_succ: Array | None = None,
        q_inter: Array | None = None,
        latent: Array | None = None,
        k_rope: Array | None = None,
        q_rope: Array | None = None,
        w_uk: Array | None = None,
        w_uv: Array | None = None,
        mixed: Array | None = None,
        conv_weight: Array | None = None,
        conv_bias: Array | None = None,
        log_decay: Array | None = None,
        beta: Array | None = None,
        skip: Array | None = None,
        l2_normalise_qk: bool = False,
        plain_conv: bool = False,
    ) -> BoundLayer:
        """Prepares a forward() over arrays that stay in place. Their rows may exceed the tokens of later batches."""

def compose_by_phase(prefill: Backend, decode: Backend, verify: Phase | str = "prefill") -> Backend:
    """Composes two backends over one pool. The arguments become parts of the result and cannot be used any more."""

class StateMerger:
    """Merges attention over disjoint sets of keys: (out, lse) of each, lse the natural logarithm."""

    def __init__(
        self,
        *,
        dtype: DType | str,
        heads: int,
        dim: int,
        device: Device | str = "cpu",
        threads: ThreadPool | int | None = None,
    ) -> None: ...
    def merge(
        self,
        out: Array,
        lse: Array,
        part_out: Array,
        part_lse: Array,
        *,
        tokens: int | None = None,
        stream: Any = None,
    ) -> None:
        """Turns (out, lse) into the state over the keys of both.

        out and part_out [tokens, heads, dim]; lse and part_lse f32 [tokens, heads], dense. tokens: None means all
        rows of out.
        """

# The engine.

class SamplingParams:
    """How tokens are chosen and when a request ends."""

    def __init__(
        self,
        *,
        max_new_tokens: int = 64,
        temperature: float = 0,
        top_k: int = 0,
        top_p: float = 1,
        min_p: float = 0,
        seed: int = 0,
        stop: Sequence[str] = (),
        stop_tokens: Sequence[int] = (),
        ignore_eos: bool = False,
        logprobs: int = -1,
        prompt_logprobs: bool = False,
        logit_bias: Mapping[int, float] = {},
        repetition_penalty: float = 1,
        frequency_penalty: float = 0,
        presence_penalty: float = 0,
        min_tokens: int = 0,
        json_schema: str = "",
    ) -> None: ...
    @property
    def max_new_tokens(self) -> int: ...
    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...
    @property
    def seed(self) -> int: ...
    @property
    def stop(self) -> list[str]: ...
    @property
    def stop_tokens(self) -> list[int]: ...
    @property
    def ignore_eos(self) -> bool: ...
    @property
    def logprobs(self) -> int: ...
    @property
    def prompt_logprobs(self) -> bool: ...
    @property
    def logit_bias(self) -> dict[int, float]: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def min_tokens(self) -> int: ...
    @property
    def json_schema(self) -> str: ...
    def replace(self, **fields: Any) -> SamplingParams: ...

class TokenLogprob:
    token: int
    logprob: float

class TokenEvent:
    """A token of a request, or its end. finish is FinishReason.none until the last event."""

    request: int
    token: int
    text: str
    logprob: float
    top: list[TokenLogprob]
    finish: FinishReason
    error: str
    prompt_tokens: int
    cached_tokens: int
    prompt_logprobs: list[float]

class GenerateResult:
    request: int
    tokens: list[int]
    text: str
    finish: FinishReason
    error: str
    logprobs: list[float]
    top: list[list[TokenLogprob]]
    prompt_logprobs: list[float]
    prompt_tokens: int
    cached_tokens: int

class EngineMemory:
    weights: int
    caches: int
    activations: int
    positions: int
    attention: int
    logits: int
    products: int
    batch: int
    graphs: int
    drafter: int
    total: int
    def explain(self) -> str: ...

class EngineStats:
    steps: int
    prefill_tokens: int
    decode_tokens: int
    prefill_seconds: float
    decode_seconds: float
    memory: EngineMemory
    graphs: int
    shared_steps: int
    prefix_queries: int
    prefix_hits: int
    preemptions: int
    draft_steps: int
    draft_requests: int
    drafts: int
    accepted_drafts: int
    speculation_gain: float
    kv_pages: int
    kv_pages_free: int

Prompt = str | Sequence[int]
"""Text, or token ids."""

class TokenStream(Iterator[TokenEvent]):
    """The events of one request, in order. close() cancels the request."""

    @property
    def request(self) -> int: ...
    def __iter__(self) -> TokenStream: ...
    def __next__(self) -> TokenEvent: ...
    def close(self) -> None: ...
    def __enter__(self) -> TokenStream: ...
    def __exit__(self, *error: Any) -> None: ...

class Engine:
    """Generates text from a checkpoint. Calls from several threads wait for each other; the GIL is released."""

    @staticmethod
    def load(
        path: Any,
        *,
        random_weights: int | None = None,
        device: str = "cpu",
        backend: str = "auto",
        decode_backend: str | None = None,
        kv_dtype: DType | str | None = None,
        kv_scale: KvScale | str = "none",
        page_size: int = 16,
        kv_memory_bytes: int = 0,
        max_requests: int = 32,
        max_batch_tokens: int = 512,
        max_mixed_tokens: int = 0,
        max_context: int = 0,
        threads: int = 0,
        prefix_cache: bool = True,
        batch_invariant: bool = False,
        cuda_graphs: bool = True,
        max_graph_requests: int = 256,
        prefix_levels: int = 2,
        min_prefix_savings: int | None = None,
        workspace_budget: int = ...,
        overlap: bool | None = None,
        speculate: str = "",
        max_drafts: int = 4,
        draft_branches: int = 1,
        always_speculate: bool = False,
    ) -> Engine:
        """Loads a checkpoint folder. Options are those of EngineOptions; kv_dtype None is fp32, on a GPU bf16."""
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_token: Callable[[TokenEvent], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
        salt: str = "",
        **fields: Any,
    ) -> list[GenerateResult]:
        """Generates for all prompts and returns their results in order. `fields` are those of SamplingParams.

        on_token receives every event and may call add() and cancel(). should_stop is called before every step; True
        cancels the unfinished requests. An exception of either ends all requests and is raised here.
        """
    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *, salt: str = "", **fields: Any
    ) -> TokenStream:
        """Returns an iterator over the events of one request. Streams and step() may be used side by side."""
    def chat(
        self,
        user: str,
        sampling: SamplingParams | None = None,
        *,
        system: str | None = None,
        salt: str = "",
        **fields: Any,
    ) -> GenerateResult:
        """Answers one message in the chat format of the checkpoint."""
    def add(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *, salt: str = "", **fields: Any
    ) -> int:
        """Queues a request and returns its id."""
    def step(self) -> list[TokenEvent]:
        """Runs one forward pass and returns the events of requests without a stream."""
    def cancel(self, request: int) -> None: ...
    def clear_prefix_cache(self) -> None: ...
    def encode(self, text: str) -> list[int]: ...
    def encode_chat(self, user: str, system: str | None = None) -> list[int]: ...
    def encode_conversation(
        self,
        messages: str | Sequence[Any],
        tools: str | Sequence[Any] | None = None,
        *,
        variables: str | Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_last_message: bool = False,
    ) -> list[int]:
        """Encodes a conversation as the chat template of the checkpoint writes it.

        messages, tools and variables are those of OpenAI's chat completions, as objects or as JSON. The prompt ends
        with the beginning of an answer, or within the last message.
        """
    def decode(self, tokens: Array | Sequence[int]) -> str: ...
    def logits(self, tokens: Array | Sequence[int]) -> LayerArray:
        """Returns the logits of every token of one sequence, f32 [tokens, vocabulary], for numpy.from_dlpack."""
    def explain(self) -> str: ...
    @property
    def idle(self) -> bool: ...
    @property
    def stats(self) -> EngineStats: ...
    @property
    def notes(self) -> list[str]: ...
    @property
    def has_text(self) -> bool: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def max_context(self) -> int: ...
    @property
    def wanted_context(self) -> int: ...

def explain(path: Any, *, device: DeviceInfo | str = "cpu", **options: Any) -> str:
    """Describes the backends and the memory that Engine.load(path, **options) would choose, without loading."""

def run_command(arguments: list[str]) -> int:
    """Runs the command line tool and returns its exit status. It changes how the process treats signals."""
