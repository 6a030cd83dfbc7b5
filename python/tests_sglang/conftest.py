# SPDX-License-Identifier: Apache-2.0
"""Settings of the SGLang tests. They come before the first import of SGLang."""

import os
import sys
from pathlib import Path

import pytest

SHIMS = Path(__file__).parent / "shims"

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
# SGLang decides by the name of a backend whether it uses Triton, which has no CPU.
os.environ["FOVEA_SGLANG_OVERRIDE"] = "torch_native"
# One thread: two that wait for each other are slow on a machine that is busy with other tests.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCHDYNAMO_DISABLE"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["SGLANG_TEST_RETRACT"] = "1"
os.environ["SGLANG_TEST_RETRACT_INTERVAL"] = "7"
sys.path.insert(0, str(SHIMS))

_paths = [str(SHIMS), str(Path(__file__).parents[1] / "tests_serving"), os.environ.get("PYTHONPATH", "")]
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, _paths))}
"""The environment of processes with SGLang. Its imports change that of this process."""


@pytest.fixture(scope="session", autouse=True)
def plugins() -> None:
    """Loads the plug-ins of SGLang, as each of its processes does at its start."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
