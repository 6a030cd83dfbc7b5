// SPDX-License-Identifier: Apache-2.0
// What a compiler sees of a C++ source: its tokens, without comments and layout.
#pragma once

#include <string>
#include <string_view>

namespace fovea::gpu {

// Returns the tokens of `source` in a form that does not change when comments, white space or line
// breaks do: one line per token, and one per directive with its white space collapsed. Sources with
// equal results compile alike, unless they read __LINE__ or make strings of spaced macro arguments.
std::string source_tokens(std::string_view source);

}  // namespace fovea::gpu
