# SPDX-License-Identifier: Apache-2.0
"""SGLang's models on a GPU without its kernels: operations of torch in their place.

Norms, activations, rotary positions, and stores of keys are SGLang's own fallbacks, which other platforms use. Its
fallback of experts reads lengths on the host, which a CUDA graph cannot, so there is another. Attention and the kernels
in Triton stay. Call replace() before a model is made.
"""

from typing import Any

import torch
from torch.nn import functional


def replace() -> None:
    from sglang.kernels.ops.kvcache import set_mla_kv_buffer
    from sglang.srt.layers.attention import triton_backend
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
    from sglang.srt.layers.utils.multi_platform import MultiPlatformOp
    from sglang.srt.mem_cache import memory_pool
    from sglang.srt.model_executor import forward_batch_info
    from sglang.srt.models import utils

    MultiPlatformOp.dispatch_forward = lambda self: self.forward_native
    UnquantizedFusedMoEMethod.forward_native = _run_experts
    triton_backend.is_arch_support_pdl = lambda: False
    utils.can_use_fused_inplace_qknorm = lambda *arguments: False
    set_mla_kv_buffer.can_use_set_mla_kv_buffer = lambda *arguments: False
    memory_pool.can_use_store_cache = lambda *arguments: False
    forward_batch_info.clamp_position = lambda seq_lens: torch.clamp(seq_lens - 1, min=0).to(torch.int64)


def _run_experts(method: Any, layer: torch.nn.Module, dispatch_output: Any) -> Any:
    """Runs every expert on every token, and weighs the results."""
    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe import swiglu_gpt_oss_sigmoid_alpha
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    x, config = dispatch_output.hidden_states, method.moe_runner_config
    weights, chosen, _ = dispatch_output.topk_output
    biases = [getattr(layer, f"{name}_weight_bias", None) for name in ("w13", "w2")]
    total = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(layer.w13_weight.shape[0]):
        first, second = (None if bias is None else bias[expert].to(x.dtype) for bias in biases)
        hidden = functional.linear(x, layer.w13_weight[expert], first)
        if config.gemm1_alpha is not None:
            hidden = swiglu_gpt_oss_sigmoid_alpha(hidden, config.gemm1_alpha, config.gemm1_clamp_limit)
        else:
            gate, up = hidden.chunk(2, dim=-1)
            hidden = functional.silu(gate) * up
        share = (weights * (chosen == expert)).sum(dim=1, keepdim=True)
        total += share * functional.linear(hidden, layer.w2_weight[expert], second)
    scale = config.routed_scaling_factor
    return StandardCombineInput(hidden_states=(total if scale is None else total * scale).to(x.dtype))
