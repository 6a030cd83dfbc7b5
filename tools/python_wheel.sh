#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes the Python wheel from a build folder, whose libraries it takes as they are, installs it into a new environment
# with numpy and pytest alone, and runs the package's tests there. The linter looks at the sources first.
# Usage: python_wheel.sh BUILD
set -euo pipefail
cd "$(dirname "$0")/.."
build=$1
tools=${XDG_CACHE_HOME:-$HOME/.cache}/fovea/python-build

# The tools stay, because the build folder remembers where nanobind is.
if ! "$tools/bin/python" -c "import nanobind, ruff, scikit_build_core" 2>/dev/null; then
  python3 -m venv --clear "$tools"
  "$tools/bin/pip" install --quiet "scikit-build-core==1.1.*" "nanobind==3.1.*" "ruff==0.17.*"
fi
"$tools/bin/ruff" check --quiet python
rm -rf "$build/wheel" "$build/wheel-test"
prefix=$(sed -n 's/^CMAKE_INSTALL_PREFIX:PATH=//p' "$build/CMakeCache.txt")
"$tools/bin/pip" wheel . --quiet --no-deps --no-build-isolation --wheel-dir "$build/wheel" \
  --config-settings=build-dir="$build"
cmake -S . -B "$build" -DCMAKE_INSTALL_PREFIX="$prefix" >/dev/null  # the wheel had a prefix of its own
wheel=$(echo "$build"/wheel/fovea-*.whl)
bytes=$(stat -c %s "$wheel")
if [ "$bytes" -gt $((64 * 1024 * 1024)) ]; then
  echo "$wheel: $bytes bytes, at most 64 MiB" >&2
  exit 1
fi
python3 -m venv "$build/wheel-test"
"$build/wheel-test/bin/pip" install --quiet "$wheel" numpy pytest
"$build/wheel-test/bin/python" -m pytest --quiet python/tests
echo "$wheel: $bytes bytes"
