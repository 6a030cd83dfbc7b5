// SPDX-License-Identifier: Apache-2.0
// Vocabularies of byte-level models write every byte as a printable character. Printable bytes of
// Latin-1 keep their character; the others become U+0100, U+0101, ... (Radford et al. 2019, code of
// GPT-2).
#pragma once

#include <string>
#include <string_view>

namespace fovea {

std::string to_byte_letters(std::string_view bytes);

// Appends the bytes of a token. If any character is no such letter, appends the token's own UTF-8.
void append_letter_bytes(std::string_view token, std::string& bytes);

}  // namespace fovea
