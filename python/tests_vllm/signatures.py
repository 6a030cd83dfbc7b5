# SPDX-License-Identifier: Apache-2.0
"""The signatures of vLLM that the plug-in relies on.

PYTHONPATH=python/tests_serving python3 python/tests_vllm/signatures.py WHEEL_OR_FOLDER \\
    > python/tests_vllm/contract/0.33.0.json
"""

import json
import sys
from pathlib import Path

import wheel_contract

_BACKEND = "vllm/v1/attention/backend.py"
_ATTENTION = "vllm/model_executor/layers/attention"

# The plug-in subclasses, overrides, calls or reads these: classes with their methods and fields, and functions.
_CLASSES = {
    _BACKEND: {
        "AttentionType": (),
        "AttentionBackend": (
            "forward_includes_kv_cache_update",
            "get_builder_cls",
            "get_impl_cls",
            "get_kv_cache_shape",
            "get_kv_cache_stride_order",
            "get_name",
            "get_supported_kernel_block_sizes",
            "is_mla",
            "supported_kv_cache_layouts",
            "supports_attn_type",
            "supports_batch_invariance",
            "supports_non_causal",
            "supports_sink",
            "supports_sliding_window",
            "validate_configuration",
        ),
        "AttentionCGSupport": ("ALWAYS",),
        "AttentionMetadataBuilder": (
            "__init__",
            "_cudagraph_support",
            "build",
            "build_for_cudagraph_capture",
            "build_for_drafting",
            "reorder_batch_threshold",
            "supports_draft_decode_metadata_update",
            "supports_update_block_table",
            "update_block_table",
            "update_draft_decode_metadata",
        ),
        "AttentionImplBase": (
            "can_return_lse_for_decode",
            "dcp_rank",
            "dcp_world_size",
            "need_to_return_lse_for_decode",
            "prepare_for_batch",
            "process_weights_after_loading",
            "supports_mtp_with_cp_non_trivial_interleave_size",
        ),
        "AttentionImpl": ("__init__", "forward"),
        "MLAAttentionImpl": ("__init__", "do_kv_cache_update", "forward_mha", "forward_mqa"),
        "CommonAttentionMetadata": (
            "block_table_tensor",
            "causal",
            "max_query_len",
            "max_seq_len",
            "num_actual_tokens",
            "num_reqs",
            "query_start_loc",
            "query_start_loc_cpu",
            "seq_lens",
            "seq_lens_cpu_upper_bound",
            "slot_mapping",
        ),
    },
    "vllm/v1/attention/backends/registry.py": {
        "AttentionBackendEnum": ("CPU_ATTN", "CUSTOM", "FLASHMLA", "FLASH_ATTN", "FLASH_ATTN_MLA"),
    },
    "vllm/v1/attention/selector.py": {"AttentionSelectorConfig": None},
    "vllm/v1/kv_cache_interface.py": {"CrossAttentionSpec": (), "EncoderOnlyAttentionSpec": ()},
    f"{_ATTENTION}/attention.py": {"Attention": ("__init__",)},
    f"{_ATTENTION}/mla_attention.py": {"MLAAttention": ("forward_impl",)},
}
_FUNCTIONS = {
    "vllm/v1/attention/backends/registry.py": ("register_backend",),
    "vllm/config/vllm.py": ("get_current_vllm_config", "get_current_vllm_config_or_none"),
    "vllm/distributed/parallel_state.py": ("get_dcp_group",),
    "vllm/v1/attention/ops/common.py": ("cp_lse_ag_out_rs",),
    "vllm/v1/attention/ops/dcp_alltoall.py": ("dcp_a2a_lse_reduce",),
}


def read_contract(source: Path) -> wheel_contract.Contract:
    """Returns what a wheel or a folder of site-packages has of the names above."""
    return wheel_contract.read_contract(source, _CLASSES, _FUNCTIONS)


if __name__ == "__main__":
    json.dump(read_contract(Path(sys.argv[1])), sys.stdout, indent=1)
    print()
