#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes the tables of docs/results anew, as Markdown files in a folder.
#
# Usage: tools/results.sh BUILD FOLDER [cpu|gpu]
set -euo pipefail
build=$1 folder=$2 device=${3:-cpu}
root=$(cd "$(dirname "$0")/.." && pwd)
fovea=$build/fovea
mkdir -p "$folder"

make_cpu_tables() {
  for model in "$root"/testdata/models/*/; do
    "$fovea" check "$model"
  done >"$folder/cpu_checks.md"
  "$fovea" bench attention >"$folder/cpu_attention.md"
  python3 "$root/bench/peers/attention_peers.py" --fovea "$fovea" >"$folder/cpu.md" ||
    echo "cpu.md: comparing needs torch or onnxruntime" >&2
  python3 "$root/bench/peers/attention_peers.py" --fovea "$fovea" --dtype fp32 --scaling >"$folder/cpu_scaling.md"
}

make_gpu_tables() {
  "$fovea" bench ceilings --state burst,sustained >"$folder/gpu_ceilings.md"
  "$fovea" bench attention --device cuda --suite full --backend flash --save "$folder/gpu_attention_full"
  "$fovea" bench attention --device cuda --state sustained --save "$folder/gpu_attention_sustained"
  for backend in mla portable portable_mla; do
    "$fovea" bench attention --device cuda --suite table --backend $backend --save "$folder/gpu_attention_$backend"
  done
  for model in "$root"/testdata/models/*/; do
    # qwen3_next runs on the CPU alone.
    if [[ $model != *qwen3_next* ]]; then "$fovea" check "$model" --device cuda --kv-dtypes bf16,fp8_e4m3; fi
  done >"$folder/gpu_checks.md"
}

"make_${device}_tables"
echo "tables in $folder" >&2
