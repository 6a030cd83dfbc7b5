// SPDX-License-Identifier: Apache-2.0
// The fields of a chat about tools: `tools`, `tool_choice` and `parallel_tool_calls`.
#pragma once

#include <cstdint>
#include <string>

#include "fovea/engine.h"
#include "server/fields.h"

namespace fovea::server {

enum class ToolUse : uint8_t {
  none,       // the answer is text
  automatic,  // the model may call tools, in the format of its chat template
  required,   // the answer is a list of calls
  function,   // the answer is the arguments of one function
};

struct ToolChoice {
  ToolUse use = ToolUse::none;
  std::string tools = {};                        // JSON for the chat template; empty: none
  std::string schema = {};                       // JSON schema of an answer that must be calls
  std::string function = {};                     // with ToolUse::function: its name
  ToolCallFormat format = ToolCallFormat::none;  // with ToolUse::automatic
  bool several = true;                           // false: one call at most
};

// Reads `tools` as JSON for the chat template, or an empty text if there are none. Throws ApiError
// 400 naming the field.
std::string read_tool_list(Fields& body);

// Reads all of the fields. Throws ApiError 400 naming the field, also for tools whose calls the
// server could not recognise.
ToolChoice read_tools(Fields& body, const Engine& engine);

}  // namespace fovea::server
