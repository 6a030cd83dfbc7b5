// SPDX-License-Identifier: Apache-2.0
// Operations of Python's str on valid UTF-8. Positions and lengths count characters. Changes of
// case map one character to one, so "ß" stays as it is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fovea::jinja {

enum class Side : uint8_t { left, right, both };

bool is_space(uint32_t point);
bool is_letter_or_digit(uint32_t point);

std::vector<std::string_view> characters(std::string_view text);
int64_t length(std::string_view text);
// Returns the position of the character at this byte.
int64_t position_of(std::string_view text, size_t byte);

// Removes white space, or the characters of `chars`, from the ends.
std::string_view strip(std::string_view text, Side side = Side::both,
                       std::optional<std::string_view> chars = {});
// A negative number of replacements or splits is no limit.
std::string replace_all(std::string_view text, std::string_view old, std::string_view with,
                        int64_t count = -1);
std::vector<std::string_view> split(std::string_view text, std::string_view separator,
                                    int64_t count = -1);
std::vector<std::string_view> split_from_right(std::string_view text, std::string_view separator,
                                               int64_t count);
// Splits at runs of white space, which also are dropped at the ends.
std::vector<std::string_view> split_words(std::string_view text, int64_t count = -1);
std::vector<std::string_view> split_lines(std::string_view text, bool keep_ends = false);

std::string to_lower(std::string_view text);
std::string to_upper(std::string_view text);
std::string capitalized(std::string_view text);
// Makes the first letter of each word large and all others small. `words` returns true for
// characters that separate words.
std::string titled(std::string_view text, bool (*separates)(uint32_t point));

// Returns repr(text): quotes around it, escapes for what cannot be printed.
std::string repr_of(std::string_view text);
// Returns repr(number), the shortest text that reads back as the same number.
std::string float_text(double number);

}  // namespace fovea::jinja
