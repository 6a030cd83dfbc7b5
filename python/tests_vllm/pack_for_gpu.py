#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Packs vLLM 0.24.0 and what it imports for the scripts gpu_*.py, to be carried to a machine without a network.

    PYTHONPATH=python/tests_serving python3 python/tests_vllm/pack_for_gpu.py vllm.tar.xz [--python 3.12]

That machine has an H100 or H200, that version of Python, torch 2.11 and transformers 5.17. There:

    mkdir site && tar xf vllm.tar.xz -C site
    export PYTHONPATH=site VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_DEEP_GEMM=0 HF_HUB_OFFLINE=1

Wheels come from PyPI and stay in ~/.cache/fovea/vllm-gpu-wheels (400 MB); needs Linux with xz, zstd and binutils. The
pack is small because it lacks what those scripts do not use: code for other GPUs, kernels of quantised weights and of
other heads than those of gpu_shapes.py, and structured output, whose packages it replaces by names without a content.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import fatbins
from wheel_contract import CACHE

_VLLM = "vllm==0.24.0"
# The other machine has these; what is downloaded must fit them.
_PRESENT = ["numpy==2.5.2", "requests==2.34.2", "typing_extensions==4.16.0", "pillow==12.3.0"]
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


def download(python: str) -> Path:
    """Returns a folder with the wheels."""
    folder = CACHE / "vllm-gpu-wheels" / python
    if (folder / "complete").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(_PRESENT) + "\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder), "--only-binary=:all:"]
    pip += ["--python-version", python, "--implementation", "cp"]
    pip += [f"--abi={abi}" for abi in (f"cp{python.replace('.', '')}", "abi3", "none")]
    platforms = ["manylinux_2_28", "manylinux_2_34", "manylinux_2_31", "manylinux_2_17", "manylinux2014"]
    pip += ["--platform=any", *[f"--platform={name}_x86_64" for name in platforms]]
    subprocess.run([*pip, "--constraint", str(constraints), *_WITH_DEPENDENCIES], check=True)
    subprocess.run([*pip, "--no-deps", *_ALONE, _VLLM], check=True)
    (folder / "complete").touch()
    return folder


def unpack(wheels: Path, site: Path) -> None:
    """Unpacks wheels without the files that no script reads."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site, [name for name in archive.namelist() if not _LEFT_OUT.search(name)])


def cut_libraries(site: Path) -> None:
    """Removes GPU code for other architectures and unused kernels, and the symbols that only debuggers read."""
    for library in sorted(site.rglob("*.so")):
        subprocess.run(["strip", "--strip-unneeded", str(library)], check=True)
        before, after = fatbins.cut(library, 90, unused_kernels())
        if before > 0:
            print(f"{library.name}: {after / 1e6:.1f} MB of {before / 1e6:.1f} MB of GPU code", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--python", default="3.12", help="version of Python of the other machine")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder)
        unpack(download(options.python), site)
        for name in _EMPTY:
            (site / name).mkdir()
            shutil.copy(Path(__file__).with_name("empty_package.py"), site / name / "__init__.py")
        cut_libraries(site)
        packer = "xz --threads=1 --lzma2=preset=6,dict=256MiB"
        subprocess.run(
            ["tar", "-C", folder, "--sort=name", "-I", packer, "-cf", options.output.resolve(), "."], check=True
        )
    print(f"{options.output}: {options.output.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
