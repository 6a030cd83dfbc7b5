// SPDX-License-Identifier: Apache-2.0
// Finds calls of tools in generated text.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/api.h"

namespace FOVEA_API fovea {

// How a model writes calls of tools.
enum class ToolCallFormat : uint8_t {
  none,     // not at all, or in a way that is not known
  hermes,   // <tool_call>{"name": ..., "arguments": ...}</tool_call>, any number of them
  llama3,   // the answer is {"name": ..., "parameters": ...}, or several of them with ";" between
  mistral,  // [TOOL_CALLS][{"name": ..., "arguments": ...}, ...], or [TOOL_CALLS]name[ARGS]{...}
  // <tool_call><function=name><parameter=key>value</parameter></function></tool_call>
  qwen3_coder,
  // <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>, as GLM-4.5 does
  glm4,
  // <|tool_call_start|>[name(key=value, ...), ...]<|tool_call_end|> with literals of Python, as
  // LFM2 does, or with the objects of hermes
  lfm2,
};

// Returns the format of the models that a chat template is made for.
ToolCallFormat tool_call_format(std::string_view chat_template);

struct ToolCall {
  std::string name;
  std::string arguments;  // a JSON object, in one line
};

// Divides a text that arrives in pieces into content and calls. Text that may become a call is
// withheld. Text that looks like a call and is none, because it is no JSON or has no name, becomes
// content. qwen3_coder and glm4 write values without quotes: one is a text if the function's schema
// says so or if it is no JSON.
class ToolCallParser {
 public:
  struct Output {
    std::string content = {};
    std::vector<ToolCall> calls = {};
  };

  // `tools` is the array of functions that the chat template got, as JSON. Without it, every value
  // that is JSON counts as such.
  explicit ToolCallParser(ToolCallFormat format, std::string_view tools = {});

  // Takes the next text. Texts of special tokens for which is_mark() is true belong to it, too.
  Output push(std::string_view text);
  Output finish();  // the text has ended
  static bool is_mark(std::string_view special_token);

 private:
  void read(Output& output, bool ends);
  // Reads formats with a tag on either side of calls.
  void read_tagged(Output& output, bool ends);
  void read_llama3(Output& output, bool ends);
  void read_mistral(Output& output, bool ends);
  // Releases text before the mark, and removes the mark. Returns false if it has not come; a
  // beginning of it is withheld.
  bool skip_to_mark(std::string_view mark, Output& output, bool ends);
  void release(size_t bytes, Output& output);
  // Returns the calls between two tags, or none if the text is no call.
  std::vector<ToolCall> tagged_calls(std::string_view text) const;

  ToolCallFormat format_;
  std::map<std::string, std::string> schemas_;  // JSON of parameters, by the function's name
  std::string held_;
  std::string before_;       // white space before the mark
  bool inside_ = false;      // after the mark of a call
  bool has_calls_ = false;   // white space between calls is dropped
  bool is_content_ = false;  // the answer is no call
};

}  // namespace fovea
