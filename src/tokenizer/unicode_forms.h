// SPDX-License-Identifier: Apache-2.0
// What normalizers do to characters, by the versions of Unicode that the `tokenizers` package has.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace fovea {

// Normalization forms (Unicode Standard Annex 15).
enum class UnicodeForm : uint8_t { nfc, nfd, nfkc, nfkd };

// `text` is valid UTF-8. Time is O(n log n) for any text.
std::string to_form(UnicodeForm form, std::string_view text);

// Full lower case of every character by itself.
std::string to_lower(std::string_view text);

bool is_combining_mark(uint32_t point);

}  // namespace fovea
