#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Packs vLLM 0.24.0 and what it imports for the scripts gpu_*.py, to be carried to a machine without a network.

    PYTHONPATH=python/tests_serving python3 python/tests_vllm/pack_for_gpu.py vllm.tar.xz [--python 3.12]
        [--tests SOURCES] [--wheel fovea.whl]

--tests adds vLLM's own tests of attention backends, in site/vllm-tests, from the unpacked source archive of vLLM;
--wheel adds Fovea, with its kernels for an H100 or H200 alone.

That machine has an H100 or H200, that version of Python, torch 2.11 and transformers 5.17. There:

    mkdir site && tar xf vllm.tar.xz -C site
    export PYTHONPATH=site VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_DEEP_GEMM=0 HF_HUB_OFFLINE=1

Wheels come from PyPI and stay in ~/.cache/fovea/vllm-gpu-wheels (400 MB); needs Linux with xz, zstd and binutils. The
pack is small because it lacks what those scripts do not use: code for other GPUs, kernels of quantised weights and of
other heads than those of gpu_shapes.py, and structured output, whose packages it replaces by names without a content.
"""

import re
import shutil
from pathlib import Path

import packing

_VLLM = "vllm==0.24.0"
_WITH_DEPENDENCIES = [
    "cachetools",
    "blake3",
    "fastapi>=0.133,<0.137",
    "starlette>=1.0.1",
    "openai",
    "pydantic>=2.12",
    "prometheus-fastapi-instrumentator>=8",
    "diskcache==5.6.3",
    "lark==1.2.2",
    "partial-json-parser",
    "jsonschema",
    "pyzmq",
    "msgspec",
    "watchfiles",
    "python-json-logger",
    "pybase64",
    "cbor2",
    "ijson",
    "setproctitle",
    "anthropic",
    "opentelemetry-sdk",
    "opentelemetry-api",
    "uvicorn",
    "pydantic-settings",
    "python-multipart",
    "pydantic-extra-types",
    "pycountry",
]
_ALONE = [
    "lm-format-enforcer==0.11.3",
    "mistral_common",
    "compressed-tensors==0.17.0",
    "depyf==0.20.0",
    "mcp",
    "model-hosting-container-standards<1.0.0,>=0.1.14",
    "opentelemetry-exporter-otlp",
    "nanobind-backend",
    "opentelemetry-semantic-conventions-ai",
    "interegular",
    "astor",
    "dill",
    "httpx-sse",
    "sse-starlette",
    "pyjwt",
    "supervisor",
    "jmespath",
]
_TESTS = ["__init__.py", "v1/__init__.py", "v1/attention/utils.py"]
_TESTS += [f"v1/attention/test_{name}_backends.py" for name in ("attention", "mla")]
# Structured output and the format of gpt-oss: imported, not called.
_EMPTY = ["llguidance", "openai_harmony", "outlines_core", "tvm_ffi", "xgrammar"]

_LEFT_OUT = re.compile(
    r"^vllm/(vllm-rs$|_qutlass|_rust_tool|third_party/(fmha_sm100|deep_gemm)/|vllm_flash_attn/_vllm_fa2)"
    r"|^vllm/model_executor/layers/.*/configs/(?!.*H200).*\.json$"
    r"|^pycountry/locales/|^mistral_common/data/|/tests?/|swagger|\.(cu|cuh|h|hpp|jpg|png|pyi|md)$"
)
# Parts of the names of kernels that no script launches.
_UNUSED = (
    r"paged_attention_v|selective_scan|marlin|machete|gptq|awq|gguf|hadamard|minimax|deepseek_v4|moe_wna16"
    r"|router_gemm|cutlass_3x|GemmUniversal|get_group_gemm|cross_device_reduce|topkGatingSoftplus|moeSigmoid"
)
# FlashAttention 3: head dim, head dim of values, types and soft cap of the shapes in gpu_shapes.py.
_HEADS = [
    (128, 128, "bfloat16_t|half_t|float_e4m3_t", False),
    (64, 64, "bfloat16_t", False),
    (256, 256, "bfloat16_t", True),
    (192, 128, "bfloat16_t", False),  # prompts of MLA
    (64, 512, "bfloat16_t", False),  # decodes of MLA
]


def unused_kernels() -> re.Pattern[str]:
    """Returns what matches the names of kernels that no script launches."""
    wanted = "|".join(
        rf"C<{dim}> >, {value_dim}, cutlass::(?:{types}), float, cutlass::arch::Sm90, \w+, \w+, {str(cap).lower()},"
        for dim, value_dim, types, cap in _HEADS
    )
    return re.compile(rf"{_UNUSED}|FlashAttnFwdSm90<(?!.*(?:{wanted}))")


def add_tests(sources: Path, site: Path) -> None:
    """Copies vLLM's tests of attention backends."""
    for name in _TESTS:
        file = site / "vllm-tests" / "tests" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(sources / "tests" / name, file)


def main() -> None:
    parser = packing.parser(__doc__)
    parser.add_argument("--tests", type=Path, metavar="SOURCES", help="vLLM's unpacked source archive")
    options = parser.parse_args()

    def fill(site: Path) -> None:
        wheels = packing.download("vllm-gpu-wheels", options.python, _WITH_DEPENDENCIES, [*_ALONE, _VLLM])
        packing.unpack(wheels, site, _LEFT_OUT)
        packing.add_stand_ins(site, dict.fromkeys(_EMPTY, "0"))
        if options.tests:
            add_tests(options.tests, site)
        if options.wheel:
            packing.add_fovea(options.wheel, site)
        packing.cut_libraries(site, unused_kernels())

    packing.write(options.output, fill)


if __name__ == "__main__":
    main()
