#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Prints the folder of libnvrtc, which compiles GPU kernels and needs no GPU. If the machine lacks the release that the
# kernels are tuned for, unpacks the PyPI package nvidia-cuda-nvrtc into FOLDER.
# Usage: find_nvrtc.sh FOLDER
set -euo pipefail

# Other releases allocate registers differently: with 13.5 ten kernels spill and the compiler
# serialises the products of three (2026-11-23).
release=13.0
for folder in /usr/local/cuda/lib64 "$1/nvidia/cu13/lib"; do
  if [ -e "$folder/libnvrtc.so.13" ] && [ -e "$folder/libnvrtc-builtins.so.$release" ]; then
    echo "$folder"
    exit 0
  fi
done
if ! python3 -m pip --version >/dev/null 2>&1; then
  echo "installing python3-pip" >&2
  sudo=(); [ "$(id -u)" -eq 0 ] || sudo=(sudo)
  "${sudo[@]}" apt-get update -qq >&2
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends python3-pip >&2
fi
echo "fetching NVRTC $release from PyPI" >&2
python3 -m pip install --quiet --no-deps --upgrade --target "$1" "nvidia-cuda-nvrtc==$release.*" >&2
[ -e "$1/nvidia/cu13/lib/libnvrtc-builtins.so.$release" ] || { echo "the package does not contain release $release" >&2; exit 1; }
echo "$1/nvidia/cu13/lib"
