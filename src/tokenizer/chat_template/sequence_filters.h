// SPDX-License-Identifier: Apache-2.0
// Parts of builtins that several of their files use.
#pragma once

#include <string_view>

#include "tokenizer/chat_template/builtins.h"

namespace fovea::jinja {

const Builtin* find_sequence_filter(std::string_view name);

// Returns the text with up to `count` occurrences replaced; charges for it before it is made.
Value replaced(const Call& call, std::string_view text, std::string_view old, std::string_view with,
               int64_t count);

// Returns str.join(), and charges for it before it is made.
Value joined(const Call& call, std::string_view separator, const List& items);

}  // namespace fovea::jinja
