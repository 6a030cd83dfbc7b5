#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM's own tests of attention backends, unchanged, with Fovea as the backend.

    run_attention_tests.py SOURCES [options of pytest]

SOURCES has the tests of the installed version of vLLM: its unpacked source archive, or vllm-tests of the pack of
pack_for_gpu.py. vllm_attention_plugin.py puts Fovea into the tests' lists of backends, and prints what passed as one
line. Without a GPU they run on the CPU, in an environment of tools/vllm_venv.sh. There the tests of MLA with 128 heads
take long: -k 'not mla_backends or small' chooses some. With pytest-xdist, "-n 8" runs eight at a time.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_TESTS = [f"tests/v1/attention/test_{name}_backends.py" for name in ("attention", "mla")]
_SETTINGS = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "TORCHDYNAMO_DISABLE": "1"}


def main(sources: Path, options: list[str]) -> int:
    for test in _TESTS:
        if not (sources / test).is_file():
            raise SystemExit(f"{sources / test} does not exist: SOURCES must have vLLM's tests")
    with tempfile.TemporaryDirectory() as folder:
        # The tests alone: a folder `vllm` next to them would hide the installed one.
        root = Path(folder)
        (root / "tests").symlink_to(sources / "tests")
        paths = [str(root), str(_HERE), os.environ.get("PYTHONPATH", "")]
        environment = _SETTINGS | os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        pytest = [sys.executable, "-m", "pytest", "--noconftest", "-p", "vllm_attention_plugin"]
        pytest += ["-p", "no:cacheprovider", "--rootdir", folder]
        tests = [str(root / test) for test in _TESTS]
        return subprocess.run([*pytest, *tests, *options], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
