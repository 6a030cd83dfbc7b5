// SPDX-License-Identifier: Apache-2.0
#include "server/chat_messages.h"

#include <limits>

#include "server/api_error.h"

namespace fovea::server {
namespace {

using nlohmann::json;

constexpr size_t kMaxMessages = 4096;

// Content is a text, or a list of parts of type "text". URLs of images and files are refused.
std::string read_content(Fields& message) {
  const std::string param = message.path("content");
  const json* const content = message.find("content");
  if (content == nullptr) refuse(param, "{} is missing", param);
  if (content->is_string()) return content->get<std::string>();
  if (!content->is_array()) {
    refuse(param, "{} is {}, must be a string or an array of parts", param, shown(*content));
  }
  std::string text;
  for (size_t i = 0; i < content->size(); ++i) {
    const std::string part_param = fmt::format("{}[{}]", param, i);
    if (!(*content)[i].is_object()) {
      refuse(part_param, "{} is {}, must be an object", part_param, shown((*content)[i]));
    }
    Fields part((*content)[i], part_param + ".");
    if (part.text("type", 64) != "text") {
      refuse(part.path("type"), "{} must be text; images, audio and files are not supported",
             part.path("type"));
    }
    text += part.text("text", std::numeric_limits<size_t>::max()).value_or("");
  }
  return text;
}

// Returns the message as the chat template gets it.
json read_message(const json& value, size_t index) {
  const std::string param = fmt::format("messages[{}]", index);
  if (!value.is_object()) refuse(param, "{} is {}, must be an object", param, shown(value));
  Fields message(value, param + ".");
  std::string role = message.text("role", 64).value_or("");
  if (role == "developer") role = "system";
  if (role != "system" && role != "user" && role != "assistant") {
    refuse(message.path("role"), "{} must be system, developer, user or assistant",
           message.path("role"));
  }
  for (const char* name : {"tool_calls", "function_call", "tool_call_id"}) {
    if (const json* const used = message.find(name); used != nullptr && !used->empty()) {
      refuse(message.path(name), "{} is not supported by this server", message.path(name));
    }
  }
  json given = json::object();
  given["role"] = std::move(role);
  given["content"] = read_content(message);
  return given;
}

}  // namespace

std::vector<int32_t> read_messages(Fields& body, const Engine& engine) {
  const json* const list = body.find("messages");
  if (list == nullptr) refuse("messages", "messages is missing");
  if (!list->is_array()) {
    refuse("messages", "messages is {}, must be an array", shown(*list));
  }
  if (list->empty() || list->size() > kMaxMessages) {
    refuse("messages", "messages has {} entries, must have 1 to {}", list->size(), kMaxMessages);
  }
  json messages = json::array();
  for (size_t i = 0; i < list->size(); ++i) messages.push_back(read_message((*list)[i], i));
  return engine.encode_conversation({.messages = messages.dump()});
}

}  // namespace fovea::server
