// SPDX-License-Identifier: Apache-2.0
// Calls of tools that are written as Python.
#pragma once

#include <string_view>
#include <vector>

#include "fovea/tool_calls.h"

namespace fovea {

// Returns the calls of [name(key=value, ...), ...], or of one call without brackets; none if the
// text is anything else. Values are literals: texts, numbers, True, False, None, lists, tuples and
// dictionaries, and JSON's words for some of them. The source of the format is Python's grammar.
std::vector<ToolCall> read_python_calls(std::string_view text);

}  // namespace fovea
