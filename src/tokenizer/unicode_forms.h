// SPDX-License-Identifier: Apache-2.0
// Character transformations of normalizers, for the Unicode versions in the `tokenizers` package.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace fovea {

// Normalization forms (Unicode Standard Annex 15).
enum class UnicodeForm : uint8_t { nfc, nfd, nfkc, nfkd };

// Normalizes valid UTF-8 in O(n log n) time.
std::string to_form(UnicodeForm form, std::string_view text);

// Converts each character to its full lower case, independent of context.
std::string to_lower(std::string_view text);

bool is_combining_mark(uint32_t point);

}  // namespace fovea
