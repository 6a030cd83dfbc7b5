#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs every fuzzer of a build folder, one after another. Stops at the first finding, fails, and leaves
# its input in <build>/findings. New inputs stay in <build>/corpus, so that later runs continue.
# Usage: run_fuzzers.sh <build folder> <seconds each>
set -euo pipefail
build=$1
seconds=$2
root=$(cd "$(dirname "$0")/.." && pwd)

mkdir -p "$build/findings"
for fuzzer in "$build"/tests/fuzz/*_fuzz; do
  name=$(basename "$fuzzer" _fuzz)
  mkdir -p "$build/corpus/$name"
  echo "== $name: $seconds s"
  # A reader may use up to 1 GiB of memory for any file of that size.
  "$fuzzer" -max_total_time="$seconds" -rss_limit_mb=1024 -timeout=20 -max_len=8192 -verbosity=0 \
    -print_final_stats=1 -artifact_prefix="$build/findings/$name-" \
    "$build/corpus/$name" "$root/tests/fuzz/corpus/$name"
done
