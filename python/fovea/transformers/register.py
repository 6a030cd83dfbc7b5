# SPDX-License-Identifier: Apache-2.0
"""Registration of the attention implementations."""

from functools import partial, wraps
from pathlib import Path
from types import ModuleType

import torch
import transformers
from transformers import masking_utils, modeling_flash_attention_utils, modeling_utils

from . import dense
from .masks import padding_mask
from .versions import adapter_for

FLASH_NAME = "fovea_flash_3"
"""For continuous batching. transformers accepts only names with "flash" there, and with "flash ... 3" it passes block
tables, captures CUDA graphs and prepares batches asynchronously."""
PLAIN_NAME = "fovea"
"""For ordinary forward passes and generate(), without the rules that transformers has for flash names: it is the one
for layers with attention chunks (Llama 4)."""

_adapter: ModuleType | None = None


def register() -> tuple[str, str]:
    """Registers the implementations with transformers and returns their names: FLASH_NAME, PLAIN_NAME.

    Later calls do nothing but return the names. Raises fovea.Error if there is no adapter for the installed version of
    transformers; the message names what differs from the newest adapter's.
    """
    global _adapter
    if _adapter is None:
        adapter = adapter_for(transformers.__version__, Path(transformers.__file__).parent)
        names = tuple(prefix + name for prefix in adapter.PREFIXES for name in (FLASH_NAME, PLAIN_NAME))
        for name in names:
            modeling_utils.AttentionInterface.register(name, partial(attention, adapter=adapter))
        for name in (FLASH_NAME, PLAIN_NAME):
            masking_utils.AttentionMaskInterface.register(name, padding_mask)
        _accept_names(names)
        _provide_flash_functions(names)
        adapter.install(names)
        _adapter = adapter
    return FLASH_NAME, PLAIN_NAME


@torch.compiler.disable
def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    adapter: ModuleType,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """The attention function that models call. query, key and value are [batch, heads, tokens, dim].

    Returns [batch, tokens, q_heads, dim of value].
    """
    if dropout != 0:
        raise NotImplementedError(f"dropout is {dropout}, must be 0: Fovea is for inference")
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        raise NotImplementedError("Fovea has no backward pass: run the model under torch.no_grad()")
    if kwargs.get("output_attentions"):
        raise NotImplementedError("output_attentions is set; use attn_implementation 'eager' for attention weights")
    sinks = None if s_aux is None else s_aux.detach().to(torch.float32)
    batching = adapter.paged_pass(module, kwargs)
    if batching is not None:
        cache, args = batching
        out = cache.forward(module.layer_idx, query, key, value, args, scaling=scaling, softcap=softcap, sinks=sinks)
        return out, None
    layer = dense.Layer(
        scaling=scaling,
        window=sliding_window or 0,
        chunk=_chunk_of(module),
        softcap=softcap,
        sinks=sinks,
        is_causal=getattr(module, "is_causal", True) if is_causal is None else is_causal,
    )
    return dense.forward(layer, query, key, value, attention_mask, kwargs), None


def _chunk_of(module: torch.nn.Module) -> int:
    """Returns the attention chunk of a layer of the model, 0 if it has none."""
    layer_types = getattr(module.config, "layer_types", None)
    layer = getattr(module, "layer_idx", None)
    if layer_types is None or layer is None or layer_types[layer] != "chunked_attention":
        return 0
    return module.config.attention_chunk_size


def _accept_names(names: tuple[str, ...]) -> None:
    """Makes models take the names as they are. transformers would look for kernels of flash names on its hub and
    would replace them in models that list compatible names."""
    original = modeling_utils.PreTrainedModel._check_and_adjust_attn_implementation

    @wraps(original)
    def check(self, attn_implementation, *args, **kwargs):
        if attn_implementation in names:
            return attn_implementation
        return original(self, attn_implementation, *args, **kwargs)

    modeling_utils.PreTrainedModel._check_and_adjust_attn_implementation = check


def _provide_flash_functions(names: tuple[str, ...]) -> None:
    """Gives transformers flash-attention's functions under the names, for the code that asks for them by name."""
    original = modeling_flash_attention_utils._lazy_imports

    @wraps(original)
    def lazy_imports(implementation, *args, **kwargs):
        if implementation not in names:
            return original(implementation, *args, **kwargs)
        from fovea.compat import flash_attn

        return (
            flash_attn.flash_attn_func,
            flash_attn.flash_attn_varlen_func,
            flash_attn.flash_attn_with_kvcache,
            modeling_flash_attention_utils._pad_input,
            modeling_flash_attention_utils._unpad_input,
        )

    modeling_flash_attention_utils._lazy_imports = lazy_imports
