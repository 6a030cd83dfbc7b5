// SPDX-License-Identifier: Apache-2.0
// Makes text from files and users safe for error messages.
#pragma once

#include <string>
#include <string_view>

namespace fovea {

// Replaces everything that a terminal would act on: control characters, marks that change the
// direction of text, and bytes that are not UTF-8 become escapes such as \x1b or \u202e. Does not
// shorten the text, so it suits paths.
std::string printable(std::string_view text);

// Returns printable(text), cut between characters at 200 bytes and followed by the number of bytes.
std::string clipped(std::string_view text);

// Returns clipped(text) in single quotes, with quotes and backslashes inside escaped.
std::string quote(std::string_view text);

}  // namespace fovea
