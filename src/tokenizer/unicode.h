// SPDX-License-Identifier: Apache-2.0
// Bridges two Unicode versions: tokenizers use the tables of version 16, PCRE2 10.42 has those of
// version 14.
#pragma once

#include <string>
#include <string_view>

namespace fovea {

// Returns true if the valid UTF-8 text contains a character newer than Unicode 14.
bool has_new_characters(std::string_view text);

// Replaces each such character by an older one of the same general category and the same number of
// bytes, so that patterns match at the same positions. Correct for patterns that mention neither of
// the two characters explicitly.
std::string with_older_characters(std::string_view text);

}  // namespace fovea
