#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes a venv in which SGLang 0.5.17 runs on a CPU, from PyPI alone (about 6 GB). Usage: tools/sglang_venv.sh DIR
# SGLang asks for kernels that need a GPU, so it comes without dependencies, and with those that its imports need.
# python/tests_sglang has what stands in for the kernels.
set -euo pipefail
if [ -f "$1/complete" ]; then exit 0; fi
tools=$(cd "$(dirname "$0")" && pwd)
export PIP_DISABLE_PIP_VERSION_CHECK=1
python3 -m venv "$1"
pip() { "$1/bin/python" -m pip install --quiet "${@:2}"; }
pip "$1" nanobind-backend pytest==9.2.0 filelock fsspec jinja2 networkx setuptools==65.5.0 sympy typing-extensions \
  'numpy<2.5' packaging pyyaml regex safetensors 'tokenizers==0.22.2' huggingface_hub typer orjson pybase64 requests \
  tqdm psutil pyzmq fastapi uvicorn uvloop pydantic msgspec pillow aiohttp ipython partial_json_parser einops interegular \
  scipy sentencepiece setproctitle tiktoken blobfile xxhash zstandard nvidia-ml-py prometheus-client datasets==4.0.0 \
  openai==2.6.1 openai-harmony==0.0.4 'anthropic>=0.20' python-multipart numba==0.65.1 easydict watchfiles \
  'llguidance>=1.7.6,<2' loguru gguf
pip "$1" --no-deps --requirement "$tools/../python/tests_torch/requirements.txt"
pip "$1" --no-deps sglang==0.5.17 transformers==5.12.1 triton==3.6.0 torchvision==0.26.0 torchao==0.17.0 \
  xgrammar==0.2.1 apache-tvm-ffi==0.1.11 compressed-tensors 'kernels>=0.14.1,<0.15'
touch "$1/complete"
