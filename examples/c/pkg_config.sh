#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the C program without CMake, against an installed Fovea, and runs it. The headers give no warnings where others
# ask for all.
# Usage: pkg_config.sh DIR/lib/pkgconfig COMPILER PROGRAM
set -euo pipefail
export PKG_CONFIG_PATH=$1
read -ra flags <<<"$(pkg-config --cflags --libs fovea_c)"
"$2" -std=c11 -Wall -Wextra -Wpedantic -Wstrict-prototypes -Werror -o "$3" "$(dirname "$0")/decode.c" "${flags[@]}" -lm
LD_LIBRARY_PATH=$(pkg-config --variable=libdir fovea_c) "$3"
