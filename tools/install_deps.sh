#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs missing Debian packages that the build needs. Prints nothing if none is missing.
# Usage: install_deps.sh [fuzz | lint | ci | browser]
set -euo pipefail

packages=(build-essential cmake ninja-build pkg-config python3-dev python3-venv libfmt-dev nlohmann-json3-dev
          libcli11-dev libzstd-dev libpcre2-dev libutf8proc-dev libhwy-dev libgtest-dev librapidcheck-dev
          libbenchmark-dev libboost1.81-dev)
[ "${1:-}" = lint ] && packages+=(clang-format clang-tidy)
# ccache compiles the sources of a second build folder once.
[ "${1:-}" = ci ] && packages+=(clang-format clang-tidy ccache)
[ "${1:-}" = browser ] && packages+=(chromium chromium-driver)
[ "${1:-}" = fuzz ] && packages+=(clang libclang-rt-14-dev)

missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

if ! command -v apt-get >/dev/null; then
  echo "Fovea needs these packages (Debian 12 names): ${missing[*]}" >&2
  exit 1
fi
sudo=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || { echo "run as root, or install: ${missing[*]}" >&2; exit 1; }
  sudo=(sudo)
fi
echo "installing ${missing[*]}"
"${sudo[@]}" apt-get update -qq
"${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}"
