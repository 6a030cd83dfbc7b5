# SPDX-License-Identifier: Apache-2.0
"""Attention with heads of keys and values (MHA, GQA, MQA) in Fovea."""

from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionType

import fovea
from fovea.serving.counters import counters
from fovea.serving.layer_group import take_workspace
from fovea.serving.specs import CACHE_DTYPES, cache_dtype, cache_scale, typed_cache
from fovea.torch import dtype_name, merge_states, write_kv
from fovea.torch.dtypes import indexed_device
from fovea.vllm import context, specs
from fovea.vllm.contract import MhaCache
from fovea.vllm.metadata import Metadata, MetadataBuilder
from fovea.vllm.validation import mha_reasons

_SCOPES = {
    AttentionType.DECODER: "decoder",
    AttentionType.ENCODER: "encoder",
    AttentionType.ENCODER_ONLY: "encoder",
    AttentionType.ENCODER_DECODER: "cross",
}


class MhaBackend(MhaCache, AttentionBackend):
    """Answers vLLM's questions before it makes layers. MhaCache is the part that differs between versions of vLLM."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = CACHE_DTYPES
    # forward() stores keys and values itself, in the same launch where it can.
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type["MhaImpl"]:
        return MhaImpl

    @staticmethod
    def get_builder_cls() -> type[MetadataBuilder]:
        return MetadataBuilder

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in _SCOPES

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def validate_configuration(cls, **options: Any) -> list[str]:
        """Returns Fovea's reasons against a configuration. Empty: Fovea serves it."""
        return mha_reasons(_SCOPES, options)


class MhaImpl(AttentionImpl[Metadata]):
    """One attention layer."""

    can_return_lse_for_decode = True
    supports_mtp_with_cp_non_trivial_interleave_size = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **further: Any,
    ) -> None:
        unknown = [name for name, value in further.items() if value is not None]
        if unknown:
            raise NotImplementedError(f"the layer has {', '.join(unknown)}, which Fovea's plug-in does not know")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self._sinks = sinks
        self._sinks_f32: torch.Tensor | None = None
        config = get_current_vllm_config()
        device = indexed_device(torch.device(config.device_config.device))
        self._all_to_all = False
        self._alibi = None
        if alibi_slopes is not None:
            self._alibi = torch.tensor(alibi_slopes, dtype=torch.float32, device=device)
        self._spec = fovea.AttentionSpec(
            scope=_SCOPES[attn_type],
            q_heads=num_heads,
            kv_heads=self.num_kv_heads,
            head_dim=head_size,
            q_dtype=dtype_name(torch.get_default_dtype()),
            window=sliding_window or 0,
            batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
            scores=fovea.ScoreSpec(
                softmax_scale=self.scale,
                logit_cap=logits_soft_cap or 0,
                has_sinks=sinks is not None,
                has_alibi=alibi_slopes is not None,
            ),
        )
        self._cache_dtype = cache_dtype(kv_cache_dtype, torch.get_default_dtype())
        self._cache = fovea.KvCacheSpec(
            dtype=self._cache_dtype,
            scale=cache_scale(self._cache_dtype),
            kv_heads=self.num_kv_heads,
            head_dim=head_size,
            page_size=config.cache_config.block_size or 16,
        )
        limits = specs.batch_limits(config)
        if self.dcp_world_size == 1 or self._spec.scope != fovea.AttentionScope.decoder:
            take_workspace(self._spec, self._cache, limits, device, specs.wish())
            return
        reasons = context.refusals(self._spec)
        if reasons:
            raise NotImplementedError("; ".join(reasons))
        self._all_to_all = config.parallel_config.dcp_comm_backend == "a2a"
        shards = context.Shards.of(config)
        for scope in context.SCOPES:
            spec, cache = self._distributed(scope)
            scope_limits = context.limits_of(limits, scope, shards, self._cache.page_size)
            take_workspace(spec, cache, scope_limits, device, specs.wish())

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        if self._sinks is not None:
            self._sinks_f32 = self._sinks.detach().to(torch.float32).contiguous()

    def _distributed(self, scope: str) -> tuple[fovea.AttentionSpec, fovea.KvCacheSpec | None]:
        return context.spec_of(self._spec, scope, self.dcp_world_size), None if scope == "own" else self._cache

    def needs(self, layer: Any, scope: str) -> tuple[fovea.AttentionSpec, fovea.KvCacheSpec | None]:
        """Returns the specs of the layer in passes of a scope, with a cache of one layer."""
        spec = self._distributed(scope)[0] if scope in context.SCOPES else self._spec.replace(scope=scope)
        if scope in ("encoder", "own"):
            return spec, None
        k = self.caches(layer)[0]
        return spec, self._cache.replace(page_size=k.shape[1], scale=cache_scale(self._cache_dtype, layer._k_scale))

    def caches(self, layer: Any) -> tuple[torch.Tensor, ...]:
        """Returns the layer's cache as (k, v) [pages, page_size, kv_heads, head_dim], with scales if it is fp8."""
        k, v = MhaCache.views(typed_cache(layer.kv_cache, self.kv_cache_dtype), self.head_size)
        if k.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
            return k, v
        return k, v, layer._k_scale.reshape(-1), layer._v_scale.reshape(-1)

    def prepare(self, layer: Any) -> None:
        """Does nothing: heads of keys and values need no weights."""

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: Metadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Stores key and value and attends. query [tokens, heads, head_size], key and value [tokens, kv heads,
        head_size], output [tokens, heads, head_size]; rows beyond the batch's tokens are padding."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("output_scale: Fovea does not quantise its output")
        if attn_metadata is None:
            return output.zero_()
        scope = attn_metadata.scope
        stores = key is not None and self.kv_sharing_target_layer_name is None
        if attn_metadata.builder.shards.ranks > 1 and scope != "encoder":
            if scope != "decoder" or key is None:
                raise NotImplementedError("decode context parallelism serves decoder layers with new keys alone")
            tokens = attn_metadata.num_actual_tokens
            new = query[:tokens], key[:tokens], value[:tokens]
            output[:tokens] = self._attend_distributed(layer, new, kv_cache, attn_metadata, stores)
            return output
        if scope == "cross" and stores:
            # The tokens of key are the encoder's, or all tokens of the pass before any attends without causality.
            self.do_kv_cache_update(layer, key, value, kv_cache, attn_metadata.slot_mapping)
            key = value = None
        group, index = attn_metadata.builder.place(self, scope)
        group.forward(
            attn_metadata,
            index,
            q=query,
            k=key,
            v=value,
            out=output,
            save_kv=stores,
            sinks=self._sinks_f32,
            alibi_slopes=self._alibi,
        )
        return output

    def _attend_distributed(
        self,
        layer: Any,
        new: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        metadata: Metadata,
        stores: bool,
    ) -> torch.Tensor:
        """Stores new keys and values (q, k, v) and returns the outputs over the keys of all ranks."""
        from vllm.distributed.parallel_state import get_dcp_group

        q, k, v = new
        ranks = get_dcp_group()
        all_q = ranks.all_gather(q.contiguous(), dim=1)
        if metadata.mode == "decode":
            out, lse = self._attend(metadata, "tokens", all_q, k=k, v=v, save_kv=stores)
            out, lse = context.combine(out, lse, ranks, all_to_all=self._all_to_all)
        else:
            if stores:
                self.do_kv_cache_update(layer, k, v, kv_cache, metadata.slot_mapping)
            out, lse = self._attend(metadata, "context", all_q, save_kv=False)
            out, lse = context.combine(out, lse, ranks, all_to_all=self._all_to_all)
            out, lse = merge_states(out, lse, *self._attend(metadata, "own", q, k=k, v=v))
        if self._sinks_f32 is not None:
            out = out * torch.sigmoid(lse - self._sinks_f32).unsqueeze(2)
        return out

    def _attend(
        self, metadata: Metadata, scope: str, q: torch.Tensor, **tensors: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        group, index = metadata.builder.place(self, scope)
        return context.attend(group, metadata.part(scope), index, q, **tensors)

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Stores key and value only. They may have more rows than there are slots."""
        if _SCOPES[self.attn_type] == "encoder" or kv_cache.numel() == 0:
            return
        tokens = min(slot_mapping.shape[0], key.shape[0])
        slot_mapping = slot_mapping[:tokens]
        k_cache, v_cache, *scales = self.caches(layer)
        k_scale, v_scale = scales or (None, None)
        write_kv(key[:tokens], value[:tokens], k_cache, v_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)
        counters.stores += 1
