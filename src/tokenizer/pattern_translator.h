// SPDX-License-Identifier: Apache-2.0
// Oniguruma's regular expressions in the syntax of PCRE2.
#pragma once

#include <string>
#include <string_view>

namespace fovea {

// Characters of words, inside a class of PCRE2: Oniguruma's \w. Rust's \w has U+200C and U+200D in
// addition.
inline constexpr std::string_view kWordClass = "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}";
// White_Space of Unicode, inside a class of PCRE2, whose own \s has U+180E in addition.
inline constexpr std::string_view kWhiteSpaceClass = "\\t-\\r\\x{85}\\p{Z}";

// A pattern that PCRE2 with UTF, UCP and newlines of LF matches as Oniguruma matches `regex`.
// Error{unsupported} names a construct that the two read differently; `name` is the file.
std::string translate_pattern(std::string_view regex, std::string_view name);

}  // namespace fovea
