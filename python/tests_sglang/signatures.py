# SPDX-License-Identifier: Apache-2.0
"""The signatures of SGLang that the plug-in relies on.

PYTHONPATH=python/tests_serving python3 python/tests_sglang/signatures.py WHEEL_OR_FOLDER \
    > python/tests_sglang/contract/0.5.23.json
"""

import json
import sys
from pathlib import Path

import wheel_contract

_SRT = "sglang/srt"

# The plug-in subclasses, overrides, calls or reads these: classes with their methods and fields, and functions.
_CLASSES = {
    f"{_SRT}/layers/attention/base_attn_backend.py": {
        "AttentionBackend": (
            "draft_extend_metadata_captured_in_graph",
            "forward",
            "forward_decode",
            "forward_extend",
            "forward_mixed",
            "get_cuda_graph_seq_len_fill_value",
            "init_cuda_graph_state",
            "init_forward_metadata",
            "init_forward_metadata_in_graph",
            "init_forward_metadata_out_graph",
            "kv_index_translator",
            "needs_cpu_seq_lens",
            "shared_read_ends",
            "support_triton",
            "update_verify_buffers_to_fill_after_draft",
            "verify_mask",
        ),
        "SharedReadEnds": ("POST_REPLAY",),
    },
    f"{_SRT}/layers/attention/verify_mask.py": {"VerifyMask": ("mode", "fits")},
    f"{_SRT}/layers/radix_attention.py": {
        "AttentionType": ("DECODER", "DECODER_BIDIRECTIONAL", "ENCODER_ONLY"),
        "RadixAttention": ("__init__", "forward"),
    },
    f"{_SRT}/mem_cache/memory_pool.py": {
        "KVCache": ("__init__", "post_capture_active", "register_layer_transfer_counter"),
        "MHATokenToKVPool": ("_kv_buffer_shapes", "is_quantized_kv_cache", "set_kv_buffer"),
        "MLATokenToKVPool": ("__init__", "set_mla_kv_buffer"),
        "HybridLinearKVPool": ("__init__",),
        "ReqToTokenPool": ("__init__", "write"),
    },
    f"{_SRT}/mem_cache/swa_memory_pool.py": {
        "SWAKVPool": ("__init__", "register_mapping", "translate_loc_from_full_to_swa"),
    },
    f"{_SRT}/model_executor/forward_batch_info.py": {
        "ForwardMode": (
            "is_decode_or_idle",
            "is_dllm_extend",
            "is_draft_extend_v2",
            "is_prebuilt",
            "is_target_verify",
        ),
        "ForwardBatch": (
            "_attn_output",
            "batch_size",
            "extend_seq_lens",
            "extend_seq_lens_cpu",
            "forward_mode",
            "input_ids",
            "out_cache_loc",
            "positions",
            "req_pool_indices",
            "seq_lens",
            "seq_lens_cpu",
            "spec_info",
        ),
    },
    f"{_SRT}/model_executor/forward_batch_deepseek_mha_mixin.py": {
        "ForwardBatchDeepSeekMHAMixin": ("attn_attend_prefix_cache", "mha_one_shot", "mha_return_lse"),
    },
    f"{_SRT}/models/deepseek_common/attention_backend_handler.py": {
        "AttentionBackendRegistry": ("get_handler", "register"),
    },
    f"{_SRT}/plugins/hook_registry.py": {"HookRegistry": ("register",), "HookType": ("AROUND",)},
    f"{_SRT}/speculative/draft_utils.py": {
        "DraftBackendFactory": (
            "_create_backend",
            "_create_triton_decode_backend",
            "_create_triton_prefill_backend",
            "create_decode_backend",
            "create_draft_extend_backend",
        ),
    },
    f"{_SRT}/speculative/eagle_info.py": {"EagleVerifyInput": ("custom_mask", "draft_token_num")},
}
_FUNCTIONS = {
    f"{_SRT}/layers/attention/attention_registry.py": ("ATTENTION_BACKENDS", "register_attention_backend"),
    f"{_SRT}/layers/attention/verify_mask.py": ("maybe_create_verify_mask",),
    f"{_SRT}/models/deepseek_common/utils.py": ("FORWARD_ABSORB_CORE_ATTENTION_BACKENDS",),
    f"{_SRT}/models/deepseek_common/attention_backend_handler.py": ("handle_attention_triton",),
    f"{_SRT}/runtime_context.py": ("get_exec", "get_parallel", "get_spec"),
}


def read_contract(source: Path) -> wheel_contract.Contract:
    """Returns what a wheel or a folder of site-packages has of the names above."""
    return wheel_contract.read_contract(source, _CLASSES, _FUNCTIONS)


if __name__ == "__main__":
    json.dump(read_contract(Path(sys.argv[1])), sys.stdout, indent=1)
    print()
