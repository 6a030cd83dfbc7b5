# SPDX-License-Identifier: Apache-2.0
"""SGLang's models on a GPU without its kernels: operations of torch in their place.

Norms, activations, rotary positions, and stores of keys are SGLang's own fallbacks, which other platforms use.
Attention and the kernels in Triton stay. Call replace() before a model is made.
"""

import torch


def replace() -> None:
    from sglang.srt.layers.utils.multi_platform import MultiPlatformOp
    from sglang.srt.mem_cache import memory_pool
    from sglang.srt.model_executor import forward_batch_info
    from sglang.srt.models import utils

    MultiPlatformOp.dispatch_forward = lambda self: self.forward_native
    utils.can_use_fused_inplace_qknorm = lambda *arguments: False
    memory_pool.can_use_store_cache = lambda *arguments: False
    forward_batch_info.clamp_position = lambda seq_lens: torch.clamp(seq_lens - 1, min=0).to(torch.int64)
