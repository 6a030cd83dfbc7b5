# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention (MLA) in Fovea.

vLLM's layer splits a pass into decodes, whose queries it absorbs itself, and prompts, whose keys it up-projects itself.
The metadata of this plug-in calls every request a prompt, so that queries arrive as the model made them. Fovea then
absorbs or up-projects, whatever is cheaper for each request by its lengths on the device.

With decode context parallelism (context.py) vLLM absorbs and exchanges, so the metadata calls every request a decode.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionBackend, AttentionType, MLAAttentionImpl

import fovea
from fovea.serving.layer_group import take_workspace
from fovea.serving.specs import CACHE_DTYPES, cache_dtype, mla_cache_spec, mla_spec, typed_cache
from fovea.torch.dtypes import indexed_device
from fovea.vllm import context, specs
from fovea.vllm.contract import MlaCache
from fovea.vllm.metadata import Metadata, MetadataBuilder
from fovea.vllm.validation import mla_reasons


@dataclass
class MlaMetadata(Metadata):
    """Metadata with the fields by which vLLM's MLA layer divides a pass. All tokens belong to prompts, or to decodes if
    contexts are distributed over ranks."""

    num_decodes: int = 0
    num_decode_tokens: int = 0
    num_prefills: int = 1
    decode: Any = None
    prefill: None = None

    def __post_init__(self) -> None:
        if self.builder.shards.ranks > 1:
            self.num_decodes, self.num_decode_tokens, self.num_prefills = self.num_reqs, self.num_actual_tokens, 0
            self.decode = self


class MlaMetadataBuilder(MetadataBuilder):
    """MetadataBuilder for MLA layers."""

    metadata_class = MlaMetadata


class MlaBackend(MlaCache, AttentionBackend):
    """Answers vLLM's questions before it makes MLA layers."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = CACHE_DTYPES
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type["MlaImpl"]:
        return MlaImpl

    @staticmethod
    def get_builder_cls() -> type[MlaMetadataBuilder]:
        return MlaMetadataBuilder

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def validate_configuration(cls, **options: Any) -> list[str]:
        """Returns Fovea's reasons against a configuration. Empty: Fovea serves it."""
        return mla_reasons(options)


class MlaImpl(MLAAttentionImpl[MlaMetadata]):
    """One MLA layer."""

    can_return_lse_for_decode = True
    supports_mtp_with_cp_non_trivial_interleave_size = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        qk_head_dim: int,
        v_head_dim: int,
        kv_b_proj: torch.nn.Module,
        indexer: object | None = None,
        **further: Any,
    ) -> None:
        given = dict(further, indexer=indexer, alibi_slopes=alibi_slopes, sliding_window=sliding_window)
        given |= {"logits_soft_cap": logits_soft_cap, "kv_sharing_target_layer_name": kv_sharing_target_layer_name}
        unknown = [name for name, value in given.items() if value is not None]
        if unknown:
            raise NotImplementedError(f"the MLA layer has {', '.join(unknown)}, which Fovea's plug-in does not serve")
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"attn_type is {attn_type}, MLA layers take {AttentionType.DECODER.value}")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.v_head_dim = v_head_dim
        config = get_current_vllm_config()
        dtype = torch.get_default_dtype()
        widths = fovea.MlaSpec(
            kv_lora_rank=kv_lora_rank, rope_dim=qk_rope_head_dim, nope_dim=qk_nope_head_dim, v_dim=v_head_dim
        )
        self._spec = mla_spec(widths, num_heads, self.scale, dtype, batch_invariant=bool(envs.VLLM_BATCH_INVARIANT))
        self._cache = mla_cache_spec(widths, cache_dtype(kv_cache_dtype, dtype), config.cache_config.block_size or 64)
        self._weights: tuple[torch.Tensor, torch.Tensor] | None = None
        device = indexed_device(torch.device(config.device_config.device))
        limits = specs.batch_limits(config)
        # Contexts on several ranks: latents of this pass wait here between do_kv_cache_update() and forward_mqa().
        self._new: tuple[torch.Tensor, torch.Tensor] | None = None
        if self.dcp_world_size > 1:
            # vLLM absorbs the queries and multiplies the outputs.
            absorbed = widths.replace(nope_dim=0, v_dim=0)
            self._spec = context.spec_of(self._spec.replace(mla=absorbed), "tokens", self.dcp_world_size)
            limits = context.limits_of(limits, "tokens", context.Shards.of(config), self._cache.page_size)
        take_workspace(self._spec, self._cache, limits, device, specs.wish())

    def needs(self, layer: Any, scope: str) -> tuple[fovea.AttentionSpec, fovea.KvCacheSpec]:
        """Returns the specs of the layer, with a cache of one layer."""
        return self._spec, self._cache.replace(page_size=self.caches(layer)[0].shape[1])

    def caches(self, layer: Any) -> tuple[torch.Tensor, ...]:
        """Returns the layer's cache as (rows,) [pages, page_size, row_dim], with the scale if it is fp8."""
        rows = MlaCache.rows(typed_cache(layer.kv_cache, self.kv_cache_dtype))
        if self._cache.scale == fovea.KvScale.none:
            return (rows,)
        return rows, layer._k_scale.reshape(-1)

    def prepare(self, layer: Any) -> None:
        """Takes the up-projections (w_uk, w_uv) [heads, nope_dim or v_dim, kv_lora_rank] from the layer. They are views
        of its weights unless those are quantised."""
        w_uk, w_uv = layer.W_UK_T, layer.W_UV.transpose(1, 2)
        self._weights = _dense_heads(w_uk), _dense_heads(w_uv)

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MlaMetadata,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Stores the latents and rotary keys and attends. q [tokens, heads, nope_dim + rope_dim], kv_c_normed [tokens,
        kv_lora_rank], k_pe [tokens, 1, rope_dim], output [tokens, heads * v_dim]."""
        if output_scale is not None:
            raise NotImplementedError("output_scale: Fovea does not quantise its output")
        group, index = attn_metadata.builder.place(self, attn_metadata.scope)
        w_uk, w_uv = self._weights
        group.forward(
            attn_metadata,
            index,
            q=q,
            latent=kv_c_normed,
            k_rope=k_pe,
            w_uk=w_uk,
            w_uv=w_uv,
            out=output.view(-1, self.num_heads, self.v_head_dim),
        )

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MlaMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores the latents and rotary keys of this rank's tokens and attends to its keys. q [tokens, heads of all
        ranks, kv_lora_rank + rope_dim]. Returns out [tokens, heads, kv_lora_rank] and the LSE. vLLM calls it only if
        contexts are distributed over ranks: else the metadata has no decodes."""
        if attn_metadata.builder.shards.ranks == 1 or self._new is None:
            raise NotImplementedError("forward_mqa: without context parallelism every request goes to forward_mha")
        if isinstance(q, tuple):
            q = torch.cat(q, dim=-1)
        group, index = attn_metadata.builder.place(self, "tokens")
        latent, k_rope = self._new
        self._new = None
        return context.attend(group, attn_metadata.part("tokens"), index, q, latent=latent, k_rope=k_rope)

    def do_kv_cache_update(self, kv_c_normed: torch.Tensor, k_pe: torch.Tensor, *further: Any, **options: Any) -> None:
        """Keeps the rows for forward_mqa(). forward_mha() gets them itself."""
        if self.dcp_world_size > 1:
            self._new = kv_c_normed, k_pe


def _dense_heads(weight: torch.Tensor) -> torch.Tensor:
    dense = weight.stride(2) == 1 and weight.stride(1) == weight.shape[2]
    return weight if dense else weight.contiguous()
