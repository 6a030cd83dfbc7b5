#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes the Python environment of the torch tests, once: torch, transformers, numpy and pytest from PyPI, 3.8 GB on
# disk. Usage: torch_venv.sh FOLDER
# It is made in a temporary folder and moved to FOLDER when complete, and made anew when the packages below change.
set -euo pipefail
folder=$1
tools=$(cd "$(dirname "$0")" && pwd)
torch_packages=$tools/../python/tests_torch/requirements.txt
other_packages=(nanobind-backend numpy==2.4.6 pytest==9.2.0 transformers==5.17.0
                filelock fsspec jinja2 networkx setuptools==65.5.0 sympy typing-extensions)
export PIP_DISABLE_PIP_VERSION_CHECK=1

wanted=$(cat "$torch_packages"; printf '%s\n' "${other_packages[@]}")
[ "$(cat "$folder/packages.txt" 2>/dev/null)" = "$wanted" ] && exit 0

echo "making $folder, once: torch and transformers from PyPI, 2.3 GB to download" >&2
python3 -c 'import ensurepip' 2>/dev/null || "$tools/install_deps.sh"
mkdir -p "$(dirname "$folder")"
work=$(mktemp -d "$folder.XXXXXX")
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
# torch's wheel asks for more than its CPU part loads, so its requirements are listed. It comes last, or pip complains.
"$work/venv/bin/python" -m pip install --quiet --no-cache-dir "${other_packages[@]}"
"$work/venv/bin/python" -m pip install --quiet --no-cache-dir --no-deps --requirement "$torch_packages"
echo "$wanted" >"$work/venv/packages.txt"
rm -rf "$folder"
# If another run was faster, mv -T keeps its result.
mv -T "$work/venv" "$folder" || [ -e "$folder/packages.txt" ]
