// SPDX-License-Identifier: Apache-2.0
// Translates Oniguruma's regular expressions to the syntax of PCRE2.
#pragma once

#include <string>
#include <string_view>

namespace fovea {

// Word characters, for use inside a class of PCRE2. Equals Oniguruma's \w. Rust's \w has U+200C and
// U+200D in addition.
inline constexpr std::string_view kWordClass = "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}";
// Unicode's White_Space, for use inside a class of PCRE2, whose own \s has U+180E in addition.
inline constexpr std::string_view kWhiteSpaceClass = "\\t-\\r\\x{85}\\p{Z}";

// Returns a pattern that PCRE2 (with UTF, UCP and LF newlines) matches as Oniguruma matches
// `regex`. Throws Error{unsupported} naming a construct that the two interpret differently; `name`
// is the file.
std::string translate_pattern(std::string_view regex, std::string_view name);

}  // namespace fovea
