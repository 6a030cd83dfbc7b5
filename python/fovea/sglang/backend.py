# SPDX-License-Identifier: Apache-2.0
"""Attention of SGLang's layers in Fovea."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask, maybe_create_verify_mask
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.runtime_context import get_spec

import fovea
from fovea.serving.layer_group import LayerGroup, select
from fovea.sglang import mla, pools, specs, trees
from fovea.sglang.contract import SharedReads
from fovea.sglang.metadata import Pass, token_count
from fovea.sglang.windows import WindowTable
from fovea.torch.dtypes import indexed_device

logger = logging.getLogger(__name__)


class SlotGroup(LayerGroup):
    """A group of layers over a pool of token slots."""

    table: torch.Tensor | None = None
    """Slots of each request of the full pool, int32 [request rows, positions]."""
    windows: WindowTable | None = None
    """Translates them for layers of a pool of windows."""


@dataclass(frozen=True)
class _Bound:
    """A layer, its group, and its index there."""

    layer: RadixAttention
    group: SlotGroup
    index: int
    is_mla: bool


class FoveaBackend(SharedReads, AttentionBackend):
    """The attention backend of one model runner. Groups of layers are made when their first layer runs, because a layer
    says only then whether it has sinks."""

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any, *, draft_step: int | None = None):
        """draft_step: of a draft model's decode step, whose requests have that many proposed tokens and one more."""
        super().__init__()
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.max_context_len = runner.model_config.context_len
        self.device = indexed_device(self.req_to_token_pool.req_to_token.device)
        self.forward_metadata: Pass | None = None
        self._runner = runner
        self._draft_step = draft_step
        self._limits = specs.batch_limits(runner)
        self._chunk = (runner.attention_chunk_size or 0) if runner.model_config.is_local_attention_model else 0
        self._tree = trees.drafts_are_trees() and not runner.is_draft_worker
        self._layers = _attention_layers(runner.model)
        self._groups: dict[tuple[Any, ...], SlotGroup] = {}
        self._bound: dict[tuple[int, bool, torch.dtype], _Bound] = {}
        self._outgrown: list[SlotGroup] = []
        self._windows: WindowTable | None = None
        self._ancestors: torch.Tensor | None = None
        self._sinks: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}
        self._verify_mask: VerifyMask | None = None
        self._refuse(runner.dtype)

    def _refuse(self, dtype: torch.dtype) -> None:
        """Raises NotImplementedError with every reason against the model, before it serves anything."""
        found = specs.refused_model(self._runner)
        for layer in self._layers.values():
            found += specs.refused_layer(layer)
        questions: dict[tuple[Any, ...], int] = {}
        for layer in [] if found else self._layers.values():
            try:
                spec, cache = self._needs(layer, dtype, sinks=False)
                questions.setdefault((spec, cache), layer.layer_id)
            except (NotImplementedError, TypeError) as error:
                found.append(f"layer {layer.layer_id}: {error}")
        for (spec, cache), layer_id in questions.items():
            try:
                select(spec, cache, self._limits, self.device, specs.wish())
            except fovea.Error as error:
                found.append(f"layers from {layer_id} on: {error}")
        if found:
            raise NotImplementedError("Fovea's attention backend does not serve this model:\n  " + "\n  ".join(found))
        if any(isinstance(pools.find(self.token_to_kv_pool, i).pool, MLATokenToKVPool) for i in self._layers):
            mla.prepare_models()

    # Called by SGLang before a pass.

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self._begin(forward_batch, captured=False)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        self._begin(forward_batch, captured=in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Does nothing: the first layer of a group plans, inside the graph."""

    def draft_extend_metadata_captured_in_graph(self) -> bool:
        return True

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self._fit(max_bs, max_num_tokens)
        if self._tree:  # read where SGLang makes it
            return
        self._verify_mask = maybe_create_verify_mask(
            is_draft_runner=self._runner.is_draft_worker,
            skip_prefill=False,
            max_bs=max_bs,
            max_context_len=self.max_context_len,
            num_draft_tokens=get_spec().speculative_num_draft_tokens,
            device=self.device,
            is_read=False,
        )

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        return 1

    @property
    def verify_mask(self) -> VerifyMask | None:
        return self._verify_mask

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Reads the mask of a tree anew: it was not there yet when the pass was prepared
        while the draft ran."""
        if self._tree:
            self._read_tree(self.forward_metadata.forward_batch, spec_info)

    def _begin(self, forward_batch: Any, *, captured: bool) -> None:
        self._fit(forward_batch.batch_size, token_count(forward_batch))
        if self._tree and forward_batch.forward_mode.is_target_verify():
            self._read_tree(forward_batch, None if captured else forward_batch.spec_info)
        self.forward_metadata = Pass(
            self._limits.max_kv_len, captured=captured, draft_step=self._draft_step, ancestors=self._ancestors
        )
        self.forward_metadata.forward_batch = forward_batch

    def _read_tree(self, forward_batch: Any, spec_info: Any) -> None:
        """Writes the mask of a pass to a fixed address. spec_info None: a capture, whose mask does not matter yet."""
        if self._ancestors is None:
            count = self._limits.max_requests * get_spec().speculative_num_draft_tokens
            self._ancestors = torch.ones(count, dtype=torch.int64, device=self.device)
        if spec_info is not None:
            trees.read(spec_info, forward_batch.seq_lens[: forward_batch.batch_size], self._ancestors)

    def _fit(self, requests: int, tokens: int) -> None:
        """Raises the limits for a larger pass. Groups of earlier limits stay: captured graphs have their addresses."""
        needed = {"max_requests": requests, "max_tokens": tokens}
        grown = {name: 1 << (n - 1).bit_length() for name, n in needed.items() if n > getattr(self._limits, name)}
        if grown:
            self._limits = self._limits.replace(**grown)
            self._limits = self._limits.replace(max_q_len=min(self._limits.max_tokens, self._limits.max_kv_len))
            self._outgrown += self._groups.values()
            self._groups.clear()
            self._bound.clear()
            self._windows = self._ancestors = None

    # Called by SGLang's layers.

    def forward_decode(self, *arguments: Any, **options: Any) -> torch.Tensor:
        return self._attend(*arguments, **options)

    def forward_extend(self, *arguments: Any, **options: Any) -> torch.Tensor:
        return self._attend(*arguments, **options)

    def forward_mixed(self, *arguments: Any, **options: Any) -> torch.Tensor:
        return self._attend(*arguments, **options)

    def support_triton(self) -> bool:
        return self.device.type == "cuda"

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        **further: Any,
    ) -> torch.Tensor:
        """Stores keys and values and attends. Returns [tokens, heads * v_head_dim]."""
        unknown = [name for name, value in further.items() if value is not None]
        if unknown:
            raise NotImplementedError(f"the layer gives {', '.join(unknown)}, which Fovea's plug-in does not know")
        current = self.forward_metadata
        current.forward_batch = forward_batch
        bound = self._bound_layer(layer, sinks is not None, q.dtype)
        heads, width = layer.tp_q_head_num, layer.v_head_dim
        out = getattr(forward_batch, "_attn_output", None)
        out = q.new_empty(q.shape[0], heads * width) if out is None else out
        tensors: dict[str, Any] = {"out": out.view(-1, heads, width), "save_kv": save_kv_cache and k is not None}
        if bound.is_mla:
            tensors |= mla.tensors(layer, q, k, q_rope, k_rope)
        else:
            if bound.group.spec.scope == fovea.AttentionScope.ragged:
                mla.check_plain_heads(forward_batch)
            tensors["q"] = q.view(-1, heads, layer.qk_head_dim)
            if k is not None:
                tensors["k"] = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
                tensors["v"] = v.view(-1, layer.tp_v_head_num, width)
        if sinks is not None:
            tensors["sinks"] = self._sinks_f32(sinks)
        pools.wait(self.token_to_kv_pool, layer.layer_id)
        bound.group.forward(current, bound.index, **tensors)
        return out.view(-1, heads * width)

    def _bound_layer(self, layer: RadixAttention, sinks: bool, dtype: torch.dtype) -> _Bound:
        bound = self._bound.get((id(layer), sinks, dtype))
        if bound is None:
            bound = self._bind(layer, sinks, dtype)
            self._bound[(id(layer), sinks, dtype)] = bound
        return bound

    def _bind(self, layer: RadixAttention, sinks: bool, dtype: torch.dtype) -> _Bound:
        place = pools.find(self.token_to_kv_pool, layer.layer_id)
        spec, cache = self._needs(layer, dtype, sinks=sinks)
        key = (spec, id(place.pool))
        group = self._groups.get(key)
        if group is None:
            caches = [] if cache is None else pools.caches(place.pool, self._scales(place.pool))
            group = SlotGroup(
                spec, cache, caches, self._limits, self.device, wish=specs.wish(), reserves_page_zero=True
            )
            group.table = self.req_to_token_pool.req_to_token
            if place.in_window_pool:
                group.windows = self._window_table()
            self._groups[key] = group
            logger.info("Fovea: layers from %d on: %s", layer.layer_id, group.description)
        return _Bound(layer, group, place.index if cache is not None else layer.layer_id, spec.kind == "mla")

    def _needs(
        self, layer: RadixAttention, dtype: torch.dtype, *, sinks: bool
    ) -> tuple[fovea.AttentionSpec, fovea.KvCacheSpec | None]:
        pool = pools.find(self.token_to_kv_pool, layer.layer_id).pool
        spec = specs.spec(layer, pool, dtype, chunk=self._chunk, tree=self._tree, sinks=sinks)
        return spec, pools.cache_spec(pool) if spec.scope == fovea.AttentionScope.decoder else None

    def _window_table(self) -> WindowTable:
        if self._windows is None:
            limits = self._limits
            self._windows = WindowTable(self.token_to_kv_pool, limits.max_requests, limits.max_kv_len, self.device)
        return self._windows

    def _scales(self, pool: Any) -> dict[int, tuple[torch.Tensor, ...]]:
        """Returns the scales of the layers of an fp8 pool that have some, by their index in it."""
        found = {}
        for layer in self._layers.values():
            place = pools.find(self.token_to_kv_pool, layer.layer_id)
            if place.pool is pool and layer.k_scale is not None and not isinstance(pool, MLATokenToKVPool):
                found[place.index] = tuple(
                    scale.detach().to(self.device, torch.float32).reshape(-1)
                    for scale in (layer.k_scale, layer.v_scale)
                )
        return found

    def _sinks_f32(self, sinks: torch.Tensor) -> torch.Tensor:
        """Returns sinks as Fovea reads them, converted again only after they changed."""
        known = self._sinks.get(id(sinks))
        if known is None or known[0] is not sinks or known[1] != sinks._version:
            known = (sinks, sinks._version, sinks.detach().to(torch.float32).contiguous())
            self._sinks[id(sinks)] = known
        return known[2]


def _attention_layers(model: torch.nn.Module) -> dict[int, RadixAttention]:
    """Returns the attention layers of a model by number, for the questions that are asked before any of them runs. MLA
    layers have two; the absorbed one comes first."""
    layers: dict[int, RadixAttention] = {}
    modules: Iterable[torch.nn.Module] = model.modules()
    for module in modules:
        if isinstance(module, RadixAttention):
            layers.setdefault(module.layer_id, module)
    return layers
