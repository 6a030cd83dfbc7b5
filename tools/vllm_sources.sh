#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Unpacks the Python sources of a version of vLLM from its wheel, for python/tests_vllm/test_contract.py.
# Usage: tools/vllm_sources.sh VERSION
set -euo pipefail
out="${XDG_CACHE_HOME:-$HOME/.cache}/fovea/vllm-sources/$1"
if [ -d "$out" ]; then exit 0; fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m pip download --quiet --no-deps --dest "$scratch" --only-binary=:all: --python-version 3.12 \
  --implementation cp --abi cp312 --abi abi3 --abi none --platform manylinux_2_28_x86_64 \
  --platform manylinux_2_31_x86_64 --platform manylinux_2_34_x86_64 --platform manylinux_2_35_x86_64 "vllm==$1"
python3 - "$scratch" "$out.part" <<'PYTHON'
import sys, zipfile
from pathlib import Path

wheel = zipfile.ZipFile(next(Path(sys.argv[1]).glob("*.whl")))
names = [name for name in wheel.namelist() if name.startswith("vllm/") and name.endswith(".py")]
wheel.extractall(sys.argv[2], names)
PYTHON
mv "$out.part" "$out"
