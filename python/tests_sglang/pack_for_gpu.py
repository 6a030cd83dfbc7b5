#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Packs SGLang 0.5.17 and what it imports for gpu_sglang.py, to be carried to a machine without a network.

    PYTHONPATH=python/tests_serving python3 python/tests_sglang/pack_for_gpu.py sglang.tar.xz [--python 3.12]
        [--wheel fovea.whl]

--wheel adds Fovea, with its kernels for an H100 or H200 alone. That machine has an H100 or H200, that version of Python
and torch 2.11. There:

    mkdir site && tar xf sglang.tar.xz -C site
    export PYTHONPATH=site:python/tests_serving SGLANG_IS_FLASHINFER_AVAILABLE=false HF_HUB_OFFLINE=1
    python3 python/tests_sglang/gpu_sglang.py run fovea MODEL_FOLDER fovea.json kernels='"torch"'

Wheels come from PyPI and stay in ~/.cache/fovea/sglang-gpu-wheels. The pack is small because it lacks SGLang's kernels,
which torch_kernels.py replaces, models of other families, and packages that are imported and not called, which it
replaces by names without a content.
"""

import re
from pathlib import Path

import packing

_WITH_DEPENDENCIES = [
    "fastapi",
    "msgspec",
    "nvidia-ml-py",
    "orjson",
    "partial-json-parser",
    "prometheus-client",
    "pybase64",
    "pydantic",
    "python-multipart",
    "pyzmq",
    "setproctitle",
    "uvicorn",
]
_ALONE = [
    "dill",
    "distro",
    "nanobind-backend",
    "sglang==0.5.17",
    "sniffio",
    "tokenizers==0.22.2",
    "transformers==5.12.1",
]
_EMPTY = [
    "IPython",
    "compressed_tensors",
    "datasets",
    "flashinfer",
    "gguf",
    "llguidance",
    "loguru",
    "modelscope",
    "openai",
    "openai_harmony",
    "sgl_kernel",
    "timm",
    "torchao",
    "tvm_ffi",
    "watchfiles",
    "xgrammar",
    "zstandard",
]
_MODELS = (
    r"(__init__|qwen\w*|llama\w*|deepseek\w*|gpt_oss|gemma\w*|utils|registry|transformers|dbrx|mixtral|\w*common\w*)"
)
_LEFT_OUT = re.compile(
    rf"^sglang/(test|benchmark|multimodal_gen)/|^sglang/srt/(grpc|server)/|^sglang/srt/models/(?!{_MODELS}\.py)\w+\.py$"
    r"|^sglang/srt/.*/configs/.*\.json$|^transformers/models/(?!auto/).*/(modeling|image_processing|video_proc)\w*\.py$"
    r"|/tests?/|swagger|\.(cu|cuh|h|hpp|jpg|png|svg|pyi|md|html|js|css)$"
)
_NEWEST = "99"  # versions of stand-ins: SGLang asks for a minimum


def main() -> None:
    options = packing.parser(__doc__).parse_args()

    def fill(site: Path) -> None:
        wheels = packing.download("sglang-gpu-wheels", options.python, _WITH_DEPENDENCIES, _ALONE)
        packing.unpack(wheels, site, _LEFT_OUT)
        packing.add_stand_ins(site, dict.fromkeys(_EMPTY, _NEWEST))
        if options.wheel:
            packing.add_fovea(options.wheel, site)
        packing.cut_libraries(site, re.compile("(?!)"))

    packing.write(options.output, fill)


if __name__ == "__main__":
    main()
