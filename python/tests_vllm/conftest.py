# SPDX-License-Identifier: Apache-2.0
"""Settings of the vLLM tests. They come before the first import of vLLM."""

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# One thread: two that wait for each other are slow on a machine that is busy with other tests.
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # small functions would be compiled by a C++ compiler for a minute
os.environ.setdefault("HF_HUB_OFFLINE", "1")
