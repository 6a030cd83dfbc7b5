# SPDX-License-Identifier: Apache-2.0
"""Reads the signatures that the plug-in relies on out of vLLM's sources, without importing them.

python3 python/tests_vllm/signatures.py WHEEL_OR_FOLDER > python/tests_vllm/contract/0.33.0.json
"""

import ast
import json
import sys
import zipfile
from pathlib import Path

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
        "AttentionImplBase": ("process_weights_after_loading", "prepare_for_batch"),
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
}

Contract = dict[str, list[str] | None]
"""Names, as "file: Class.method", with their parameters; None: a field or a class without fields of interest."""


def read_contract(source: Path) -> Contract:
    """Returns what a wheel or a folder of site-packages has of the names above. Missing names are left out."""
    found: Contract = {}
    for file in sorted({*_CLASSES, *_FUNCTIONS}):
        tree = ast.parse(_read(source, file))
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name in _CLASSES.get(file, {}):
                _read_class(found, file, node, _CLASSES[file][node.name])
            elif isinstance(node, ast.FunctionDef) and node.name in _FUNCTIONS.get(file, ()):
                found[f"{file}: {node.name}"] = _parameters(node)
    return found


def differences(old: Contract, new: Contract) -> list[str]:
    """Returns a sentence for each name that is missing, is new or has other parameters."""
    lines = []
    for name in sorted({*old, *new}):
        if name not in new:
            lines.append(f"{name} is gone")
        elif name not in old:
            lines.append(f"{name} is new: {_text(new[name])}")
        elif old[name] != new[name]:
            lines.append(f"{name} was {_text(old[name])}, is {_text(new[name])}")
    return lines


def _text(parameters: list[str] | None) -> str:
    return "a field" if parameters is None else f"({', '.join(parameters)})"


def _read(source: Path, file: str) -> str:
    if source.is_dir():
        return (source / file).read_text(encoding="utf-8")
    with zipfile.ZipFile(source) as wheel:
        return wheel.read(file).decode()


def _read_class(found: Contract, file: str, node: ast.ClassDef, names: tuple[str, ...] | None) -> None:
    label = f"{file}: {node.name}"
    if names is None:
        fields = [item.target.id for item in node.body if isinstance(item, ast.AnnAssign)]
        found[label] = fields
        return
    found[label] = None
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name in names:
            found[f"{label}.{item.name}"] = _parameters(item)
        for target in _assigned(item):
            if target in names:
                found[f"{label}.{target}"] = None


def _assigned(item: ast.stmt) -> list[str]:
    targets = item.targets if isinstance(item, ast.Assign) else [item.target] if isinstance(item, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _parameters(node: ast.FunctionDef) -> list[str]:
    """Returns the parameters; "=" marks a default."""
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    names = [item.arg + ("=" if index >= required else "") for index, item in enumerate(positional)]
    names += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    names += [item.arg + ("=" if default is not None else "") for item, default in pairs]
    return names + ([f"**{arguments.kwarg.arg}"] if arguments.kwarg else [])


if __name__ == "__main__":
    json.dump(read_contract(Path(sys.argv[1])), sys.stdout, indent=1)
    print()
