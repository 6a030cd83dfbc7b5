// SPDX-License-Identifier: Apache-2.0
// Vocabularies of byte-level models write every byte as a printable character: most of Latin-1 as
// itself, the others as U+0100, U+0101, ... (Radford et al. 2019, the code of GPT-2).
#pragma once

#include <string>
#include <string_view>

namespace fovea {

std::string to_byte_letters(std::string_view bytes);

// Appends the bytes of a token. A token with any other character stands for its own UTF-8.
void append_letter_bytes(std::string_view token, std::string& bytes);

}  // namespace fovea
