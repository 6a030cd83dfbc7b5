// SPDX-License-Identifier: Apache-2.0
// Text that a file or a user wrote, made safe for error messages.
#pragma once

#include <string>
#include <string_view>

namespace fovea {

// The text without anything a terminal would act on: control characters, marks that change the
// direction of text and bytes that are not UTF-8 become \x1b or \u202e. Paths are shown whole.
std::string printable(std::string_view text);

// The same, cut at 200 bytes, between characters, followed by the number of bytes.
std::string clipped(std::string_view text);

// Clipped text in single quotes, with quotes and backslashes inside escaped.
std::string quote(std::string_view text);

}  // namespace fovea
