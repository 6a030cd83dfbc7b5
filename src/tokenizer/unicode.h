// SPDX-License-Identifier: Apache-2.0
// Bridges the versions of Unicode: tokenizers are defined by the tables of version 16, PCRE2 10.42
// has those of version 14.
#pragma once

#include <string>
#include <string_view>

namespace fovea {

// Whether the valid UTF-8 text has a character that is younger than Unicode 14.
bool has_young_characters(std::string_view text);

// The text with every such character replaced by an older one of the same general category and the
// same number of bytes, so that patterns match at the same places. Right for every pattern that
// names neither the old nor the young character itself.
std::string with_old_characters(std::string_view text);

}  // namespace fovea
