// SPDX-License-Identifier: Apache-2.0
// Reduces a C++ source to its tokens, without comments and layout.
#pragma once

#include <string>
#include <string_view>

namespace fovea::gpu {

// Returns the tokens of `source` in a form that is independent of comments, white space and line
// breaks: one line per token, and one per directive with its white space collapsed. Sources with
// equal results compile to the same code, unless they use __LINE__ or stringify macro arguments
// with spaces.
std::string source_tokens(std::string_view source);

}  // namespace fovea::gpu
