// SPDX-License-Identifier: Apache-2.0
// Finds calls of tools in the text of one choice.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "fovea/engine.h"
#include "fovea/tool_calls.h"
#include "server/tools.h"

namespace fovea::server {

// Returns the text of a special token, which the text of events leaves out; of other tokens
// nothing.
std::string special_text(const Engine& engine, int32_t token);

// A new call, or more of the arguments of a call.
struct CallPart {
  size_t index = 0;                      // number of the call in its choice
  std::optional<std::string> name = {};  // set in the first part of a call
  std::string arguments = {};
};

class ToolOutput {
 public:
  struct Parts {
    std::string content = {};
    std::vector<CallPart> calls = {};
  };

  // `choice` and `engine` must outlive this.
  ToolOutput(const ToolChoice& choice, const Engine& engine)
      : choice_(choice), engine_(engine), parser_(choice.format, choice.tools) {}

  // Takes the next event of the choice and returns what it adds to the answer.
  Parts add(const TokenEvent& event);

 private:
  Parts read_calls(const TokenEvent& event);
  Parts read_list(const TokenEvent& event);
  Parts read_arguments(const TokenEvent& event);
  void append(ToolCallParser::Output output, Parts& parts);

  const ToolChoice& choice_;
  const Engine& engine_;
  ToolCallParser parser_;
  std::string list_;  // with ToolUse::required: the answer so far
  size_t calls_ = 0;
};

}  // namespace fovea::server
