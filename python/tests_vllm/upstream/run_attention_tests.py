#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM's own tests of attention backends, unchanged, with Fovea as the backend.

    run_attention_tests.py CHECKOUT [options of pytest]

CHECKOUT has the sources of the installed version of vLLM, with its tests. vllm_attention_plugin.py puts Fovea into the
tests' lists of backends. Without a GPU they run on the CPU, in an environment of tools/vllm_venv.sh; the tests of MLA
need a GPU.
"""

import os
import subprocess
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_TEST = "tests/v1/attention/test_attention_backends.py"
_MLA_TEST = "tests/v1/attention/test_mla_backends.py"
_SETTINGS = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "TORCHDYNAMO_DISABLE": "1"}


def main(checkout: Path, options: list[str]) -> int:
    if not (checkout / _TEST).is_file():
        raise SystemExit(f"{checkout / _TEST} does not exist: CHECKOUT must have vLLM's sources with its tests")
    paths = [str(checkout), str(_HERE), os.environ.get("PYTHONPATH", "")]
    environment = _SETTINGS | os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    pytest = [sys.executable, "-m", "pytest", "--noconftest", "-p", "vllm_attention_plugin", "-p", "no:cacheprovider"]
    # Fovea refuses windows in encoder layers.
    chosen = ["--rootdir", str(checkout), str(checkout / _TEST), "-k", "not sliding_window_encoder"]
    if Path("/dev/nvidiactl").exists():
        chosen.insert(2, str(checkout / _MLA_TEST))
    return subprocess.run([*pytest, *chosen, *options], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
