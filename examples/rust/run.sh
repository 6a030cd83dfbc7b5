#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Compiles the Rust program with rustc alone and runs it. Exits with 77 if there is no rustc.
# Usage: run.sh <folder of libfovea.so> <program to write>
set -euo pipefail
if ! rustc --version 2>/dev/null; then
  echo "skipped: rustc is not installed (Debian has it: apt-get install rustc)"
  exit 77
fi
rustc --edition 2021 -D warnings -L "$1" "$(dirname "$0")/decode.rs" -o "$2"
LD_LIBRARY_PATH=$1 "$2"
