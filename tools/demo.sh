#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Asks a model a question, for `make demo`: SmolLM2-135M-Instruct, or the checkpoint folder MODEL. A model without a
# chat format continues a text instead. If SmolLM2 cannot be fetched, a model in testdata/models does so too.
# Usage: demo.sh FOVEA [MODEL]
set -euo pipefail
fovea=$1
cd "$(dirname "$0")/.."
cache=${XDG_CACHE_HOME:-$HOME/.cache}/fovea

if [ $# -gt 1 ]; then
  model=$2
elif tools/fetch_smollm2.sh "$cache"; then
  model=$cache/smollm2
else
  model=testdata/models/llama
fi
if [ -e "$model/chat_template.jinja" ] || grep -qs '"chat_template"' "$model/tokenizer_config.json"; then
  flags=(--chat --prompt "What is the capital of France?")
else
  flags=(--prompt "And God said unto him," --max-new-tokens 80)
fi
shown="$fovea generate ${model/#$HOME/\~}"
for flag in "${flags[@]}"; do
  [[ $flag = *" "* ]] && flag="\"$flag\""
  shown+=" $flag"
done
echo "$shown"
"$fovea" generate "$model" "${flags[@]}"
