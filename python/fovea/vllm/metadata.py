# SPDX-License-Identifier: Apache-2.0
"""The metadata of one pass, and the builder that vLLM calls for it."""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.logger import init_logger
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import CrossAttentionSpec, EncoderOnlyAttentionSpec

import fovea
from fovea.serving.layer_group import LayerGroup
from fovea.torch import consecutive
from fovea.vllm import context
from fovea.vllm.specs import batch_limits, wish

logger = init_logger(f"vllm.plugins.{__name__}")  # below "vllm", whose handlers and level it then has


# Fields of batches that ask for what the plug-in does not do. On a CPU vLLM does not ask before it loads a model.
_REFUSED = {
    "mm_req_doc_ranges": "tokens of images see each other: the plug-in does not pass such spans on",
    "rswa_prefix_lens": "retrieval windows are not supported",
}


@dataclass
class Metadata(AttentionMetadata):
    """The arrays of a pass. They live on the device; the host knows upper bounds only.

    vLLM reads and writes some fields by name and copies the others, so the names are its own.
    """

    builder: "MetadataBuilder"
    scope: str  # a name of AttentionScope: "decoder", "cross" or "encoder"
    mode: str  # a name of ForwardMode
    num_actual_tokens: int  # padding of CUDA graphs included
    num_reqs: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor  # int32 [requests + 1]
    seq_lens: torch.Tensor  # int32 [requests]; cross attention: encoder tokens
    block_table: torch.Tensor  # int32 [requests, blocks]
    slot_mapping: torch.Tensor  # int64 [tokens]; -1: store nothing
    host_q_lens: torch.Tensor | None = None  # int32 [requests], as host_kv_lens
    host_kv_lens: torch.Tensor | None = None
    prefix_written: bool = False
    parts: dict[str, Any] = field(default_factory=dict)  # as part() returns them

    @classmethod
    def of(cls, builder: "MetadataBuilder", common: CommonAttentionMetadata, *, captured: bool) -> "Metadata":
        """Returns the metadata of a pass. A captured pass serves later batches, too, so it may not rely on the lengths
        of this one."""
        for name, reason in _REFUSED.items():
            value = getattr(common, name, None)
            if value is not None and (name != "mm_req_doc_ranges" or any(value.values())):
                raise NotImplementedError(f"{name} is given: {reason}")
        metadata = cls(
            builder=builder,
            scope=_scope(builder.kv_cache_spec, common.causal),
            mode="decode" if common.max_query_len <= 1 and common.num_actual_tokens <= common.num_reqs else "mixed",
            num_actual_tokens=common.num_actual_tokens,
            num_reqs=common.num_reqs,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
        )
        metadata.prefix_written = builder.prefixes_are_written and metadata.scope == "decoder"
        if metadata.mode == "mixed" and not captured and common.query_start_loc_cpu is not None:
            metadata._read_host_lengths(common)
        return metadata

    def _read_host_lengths(self, common: CommonAttentionMetadata) -> None:
        starts = common.query_start_loc_cpu[: self.num_reqs + 1]
        q_lens = starts[1:] - starts[:-1]
        if self.num_reqs > 0 and int(q_lens.min()) > 1:
            self.mode = "extend"
        bounds = common.seq_lens_cpu_upper_bound
        if bounds is not None and self.scope == "decoder":
            self.host_q_lens = q_lens.to(torch.int32)
            self.host_kv_lens = bounds[: self.num_reqs].to(torch.int32)

    def part(self, scope: str) -> Any:
        """Returns the pass in a scope of context.SCOPES."""
        if scope not in self.parts:
            self.parts[scope] = context.PASSES[scope](self, self.builder.shards)
        return self.parts[scope]

    def batch(self, group: LayerGroup) -> fovea.Batch:
        """Returns the pass as a group's backend takes it."""
        limits = group.backend.limits
        keys: dict[str, Any] = {}
        if group.page_size > 0:
            keys["request_rows"] = consecutive(self.num_reqs, self.seq_lens.device)
            prefix = "cross_" if self.scope == "cross" else ""
            keys[f"{prefix}table"] = self.block_table[: self.num_reqs]
            keys[f"{prefix}entry_tokens"] = group.page_size
            table_tokens = self.block_table.shape[1] * group.page_size
        if self.scope == "cross":
            keys["cross_lens"] = self.seq_lens[: self.num_reqs]
        else:
            keys["kv_lens"] = self.seq_lens[: self.num_reqs]
        if self.scope == "decoder":
            keys["out_slots"] = self.slot_mapping
            keys["max_kv_len"] = min(self.max_seq_len, limits.max_kv_len, table_tokens)
            keys["prefix_written"] = self.prefix_written
        return fovea.Batch(
            mode=self.mode,
            requests=self.num_reqs,
            tokens=self.num_actual_tokens,
            q_indptr=self.query_start_loc[: self.num_reqs + 1],
            max_q_len=1 if self.mode == "decode" else min(self.max_query_len, limits.max_q_len),
            host_q_lens=self.host_q_lens,
            host_kv_lens=self.host_kv_lens,
            **keys,
        )


def _scope(kv_cache_spec: Any, causal: Any) -> str:
    if isinstance(kv_cache_spec, EncoderOnlyAttentionSpec):
        return "encoder"
    if isinstance(kv_cache_spec, CrossAttentionSpec) or causal is False:
        return "cross"
    if causal is True:
        return "decoder"
    raise NotImplementedError("causal is a tensor: Fovea has no choice of causality for each request")


@dataclass(frozen=True)
class _Place:
    """A layer's place in a group, and the address of its cache."""

    group: LayerGroup
    index: int
    layer: Any
    address: int


class MetadataBuilder(AttentionMetadataBuilder[Metadata]):
    """Makes the metadata of a pass, and keeps the groups of layers of one KV cache group of vLLM."""

    _cudagraph_support = AttentionCGSupport.ALWAYS
    supports_update_block_table = True
    supports_draft_decode_metadata_update = True
    metadata_class = Metadata

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.limits = batch_limits(vllm_config)
        self.shards = context.Shards.of(vllm_config)
        self._layers = vllm_config.compilation_config.static_forward_context
        mode = vllm_config.compilation_config.cudagraph_mode
        self._captures_mixed = mode is not None and mode.mixed_mode() == CUDAGraphMode.FULL
        # vLLM's prefix cache gives a block to a second request in the pass that fills it, and a connector brings keys
        # while layers run.
        shares_blocks = vllm_config.cache_config.enable_prefix_caching is not False
        self.prefixes_are_written = not shares_blocks and vllm_config.kv_transfer_config is None
        self._places: dict[tuple[int, str], _Place] = {}
        self._outgrown: list[_Place] = []

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Metadata:
        self._fit(common_attn_metadata)
        return self.metadata_class.of(self, common_attn_metadata, captured=False)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Metadata:
        self._fit(common_attn_metadata)
        if self._captures_mixed:
            # Replays may divide the tokens among the requests in any way.
            common_attn_metadata = common_attn_metadata.replace(max_query_len=common_attn_metadata.num_actual_tokens)
        return self.metadata_class.of(self, common_attn_metadata, captured=True)

    def update_block_table(self, metadata: Metadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor) -> Metadata:
        updated = copy.copy(metadata)
        updated.builder = self
        updated.block_table = blk_table
        updated.slot_mapping = slot_mapping
        updated.parts = {}
        return updated

    def update_draft_decode_metadata(self, metadata: Metadata) -> None:
        """Does nothing: the next forward pass with this metadata is planned anew, inside a graph, too."""

    def _fit(self, common: CommonAttentionMetadata) -> None:
        """Raises the limits for layers that divide requests into several, as chunked local attention does."""
        needed = {"max_requests": common.num_reqs, "max_tokens": common.num_actual_tokens}
        grown = {name: 1 << (n - 1).bit_length() for name, n in needed.items() if n > getattr(self.limits, name)}
        if grown:
            self.limits = self.limits.replace(**grown)
            self._outgrown += self._places.values()  # captured graphs have their addresses
            self._places.clear()

    def place(self, impl: Any, scope: str) -> tuple[LayerGroup, int]:
        """Returns the group of the layer of an implementation, and the layer's index in it."""
        place = self._places.get((id(impl), scope))
        # vLLM binds other caches after it has profiled CUDA graphs.
        if place is None or place.address != place.layer.kv_cache.data_ptr():
            self._group_layers(scope)
            place = self._places[(id(impl), scope)]
        return place.group, place.index

    def _group_layers(self, scope: str) -> None:
        members: dict[tuple[fovea.AttentionSpec, fovea.KvCacheSpec | None], list[Any]] = {}
        for name in self.layer_names:
            layer = self._layers[name]
            members.setdefault(layer.impl.needs(layer, scope), []).append(layer)
        for (spec, cache), layers in members.items():
            caches = [] if cache is None else [layer.impl.caches(layer) for layer in layers]
            several = None if cache is None else cache.replace(layers=len(layers))
            limits = self.limits
            if scope in context.SCOPES:
                limits = context.limits_of(limits, scope, self.shards, 1 if cache is None else cache.page_size)
            group = LayerGroup(spec, several, caches, limits, self.device, wish=wish())
            logger.info("Fovea: %d layers from %s on: %s", len(layers), layers[0].layer_name, group.description)
            for index, layer in enumerate(layers):
                layer.impl.prepare(layer)
                place = _Place(group, index, layer, layer.kv_cache.data_ptr())
                self._places[(id(layer.impl), scope)] = place
