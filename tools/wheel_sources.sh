#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Unpacks the Python sources of a version of a package from its wheel, for the contract tests of the plug-ins.
# Usage: tools/wheel_sources.sh PACKAGE VERSION
set -euo pipefail
out="${XDG_CACHE_HOME:-$HOME/.cache}/fovea/$1-sources/$2"
if [ -d "$out" ]; then exit 0; fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m pip download --quiet --no-deps --dest "$scratch" --only-binary=:all: --python-version 3.12 \
  --implementation cp --abi cp312 --abi abi3 --abi none --platform manylinux_2_28_x86_64 \
  --platform manylinux_2_31_x86_64 --platform manylinux_2_34_x86_64 --platform manylinux_2_35_x86_64 "$1==$2"
python3 - "$scratch" "$out.part" "$1" <<'PYTHON'
import sys, zipfile
from pathlib import Path

wheel = zipfile.ZipFile(next(Path(sys.argv[1]).glob("*.whl")))
names = [name for name in wheel.namelist() if name.startswith(f"{sys.argv[3]}/") and name.endswith(".py")]
wheel.extractall(sys.argv[2], names)
PYTHON
mv "$out.part" "$out"
