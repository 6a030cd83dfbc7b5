// SPDX-License-Identifier: Apache-2.0
// Calls of tools whose values are written without quotes.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "fovea/tool_calls.h"

namespace fovea {

inline constexpr std::string_view kSpace = " \t\r\n";
inline constexpr int kMaxValueDepth = 64;  // lists and objects within each other

// Removes white space at both ends.
std::string_view trimmed(std::string_view text);

// Returns the bytes of the JSON object or array that begins the text; 0 if its end has not come,
// npos if it is none or nested too deep.
size_t json_end(std::string_view text);

// The JSON schemas of parameters, by the name of their function.
using ParameterSchemas = std::map<std::string, std::string>;

// Returns the schemas of an array of functions; of anything else none.
ParameterSchemas parameter_schemas(std::string_view tools);

// Both take the text inside <tool_call>, without white space at its ends, and return nothing if it
// is no call. The last </parameter> and </function> may be missing.
std::optional<ToolCall> read_qwen3_coder_call(std::string_view text,
                                              const ParameterSchemas& schemas);
std::optional<ToolCall> read_glm4_call(std::string_view text, const ParameterSchemas& schemas);

}  // namespace fovea
