// SPDX-License-Identifier: Apache-2.0
// The widths of a layer that `fovea explain` gets by flags: --q-heads, --kv-heads, --head-dim,
// --head-dim-v, --nope-dim, --v-dim and --conv-width.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "fovea/attention_spec.h"

namespace fovea::cli {

// If 32/8 heads of 128 do not suit the kind, missing flags get the values of DeepSeek-V3,
// Qwen3-Next, Falcon Mamba or LFM2. The widths of mla depend on each other, so a given width
// disables the defaults of the others.
void set_default_widths(const CLI::App& command, const std::string& kind, AttentionSpec& spec);

// Moves the values of --q-heads, --kv-heads and the head dims to the fields of the kind.
void place_widths(AttentionSpec& spec);

}  // namespace fovea::cli
