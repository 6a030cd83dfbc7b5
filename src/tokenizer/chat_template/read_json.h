// SPDX-License-Identifier: Apache-2.0
// JSON as values of a template. Objects keep their order; of equal keys the last one counts, as
// in Python.
#pragma once

#include <string_view>

#include "tokenizer/chat_template/value.h"

namespace fovea::jinja {

// Throws Error{invalid_argument} with `name` and the byte, also for containers nested deeper than
// 64 and for integers beyond 64 bits.
Value read_json(std::string_view text, std::string_view name);

}  // namespace fovea::jinja
