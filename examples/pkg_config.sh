#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds hello_attention without CMake, against an installed Fovea, and runs it. The headers give no warnings where
# others ask for all.
# Usage: pkg_config.sh DIR/lib/pkgconfig COMPILER PROGRAM
set -euo pipefail
export PKG_CONFIG_PATH=$1
read -ra flags <<<"$(pkg-config --static --cflags --libs fovea)"
"$2" -Wall -Wextra -Werror -o "$3" "$(dirname "$0")/hello_attention.cc" "${flags[@]}"
"$3"
