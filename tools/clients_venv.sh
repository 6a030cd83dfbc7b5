#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes or updates the environment of tests/clients. Usage: clients_venv.sh FOLDER
set -euo pipefail
folder=$1
requirements=$(cd "$(dirname "$0")/.." && pwd)/tests/clients/requirements.txt
export PIP_DISABLE_PIP_VERSION_CHECK=1
cmp -s "$requirements" "$folder/installed.txt" && exit 0
python3 -c 'import ensurepip' 2>/dev/null || "$(dirname "$0")/install_deps.sh"
[ -x "$folder/bin/python" ] || python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --requirement "$requirements"
cp "$requirements" "$folder/installed.txt"
