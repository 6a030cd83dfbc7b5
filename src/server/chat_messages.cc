// SPDX-License-Identifier: Apache-2.0
#include "server/chat_messages.h"

#include <array>
#include <limits>

#include "fovea/error.h"
#include "server/api_error.h"
#include "server/json_text.h"

namespace fovea::server {
namespace {

using nlohmann::json;
using Ordered = nlohmann::ordered_json;

constexpr size_t kMaxMessages = 4096, kMaxBytes = std::numeric_limits<size_t>::max();

// Content is a text, or a list of parts of type "text". URLs of images and files are refused.
// Missing content is empty, because templates that know no calls add texts to it.
Ordered read_content(Fields& message, bool may_be_missing) {
  const std::string param = message.path("content");
  const json* const content = message.find("content");
  if (content == nullptr && may_be_missing) return "";
  if (content == nullptr) refuse(param, "{} is missing", param);
  if (content->is_string()) return content->get<std::string>();
  if (!content->is_array()) {
    refuse(param, "{} is {}, must be a string or an array of parts", param, shown(*content));
  }
  Ordered parts = Ordered::array();
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
    parts.push_back({{"type", "text"}, {"text", part.text("text", kMaxBytes).value_or("")}});
  }
  return parts;
}

void check_call(const json& call, const std::string& param) {
  if (!call.is_object()) refuse(param, "{} is {}, must be an object", param, shown(call));
  Fields fields(call, param + ".");
  (void)fields.text("id", 1024);
  if (fields.text("type", 64).value_or("function") != "function") {
    refuse(fields.path("type"), "{} must be function", fields.path("type"));
  }
  const std::string place = fields.path("function");
  const json* const given = fields.find("function");
  if (given == nullptr || !given->is_object()) {
    refuse(place, "{} is missing or no object", place);
  }
  Fields function(*given, place + ".");
  if (!function.text("name", 1024)) {
    refuse(function.path("name"), "{} is missing", function.path("name"));
  }
  const json* const arguments = function.find("arguments");
  if (arguments != nullptr && !arguments->is_string() && !arguments->is_object()) {
    refuse(function.path("arguments"), "{} is {}, must be a string of JSON",
           function.path("arguments"), shown(*arguments));
  }
}

// Returns true if the message has calls of tools.
bool check_calls(Fields& message, const std::string& role) {
  const std::string param = message.path("tool_calls");
  const json* const calls = message.find("tool_calls");
  if (calls == nullptr || (calls->is_array() && calls->empty())) return false;
  if (role != "assistant") refuse(param, "{} belongs to messages of the assistant", param);
  if (!calls->is_array()) refuse(param, "{} is {}, must be an array", param, shown(*calls));
  for (size_t i = 0; i < calls->size(); ++i)
    check_call((*calls)[i], fmt::format("{}[{}]", param, i));
  return true;
}

std::string read_role(Fields& message) {
  static constexpr std::array kRoles = {"system", "user", "assistant", "tool"};
  std::string role = message.text("role", 64).value_or("");
  if (role == "developer") role = "system";
  if (std::ranges::find(kRoles, role) == kRoles.end()) {
    refuse(message.path("role"), "{} must be system, developer, user, assistant or tool",
           message.path("role"));
  }
  return role;
}

// Returns message number `index` as the chat template gets it.
Ordered read_message(Fields& body, const json& value, size_t index) {
  const std::string param = fmt::format("messages[{}]", index);
  if (!value.is_object()) refuse(param, "{} is {}, must be an object", param, shown(value));
  Fields message(value, param + ".");
  const std::string role = read_role(message);
  if (const json* const used = message.find("function_call"); used != nullptr && !used->empty()) {
    refuse(message.path("function_call"), "{} is not supported by this server, use tool_calls",
           message.path("function_call"));
  }
  const bool has_calls = check_calls(message, role);
  Ordered given = {{"role", role}};
  given["content"] = read_content(message, has_calls);
  // Templates read the arguments in the client's order.
  if (has_calls) given["tool_calls"] = body.ordered("messages")[index]["tool_calls"];
  for (const char* name : {"name", "tool_call_id", "reasoning_content"}) {
    if (const auto text = message.text(name, kMaxBytes)) given[name] = *text;
  }
  return given;
}

std::string read_messages(Fields& body) {
  const json* const list = body.find("messages");
  if (list == nullptr) refuse("messages", "messages is missing");
  if (!list->is_array()) {
    refuse("messages", "messages is {}, must be an array", shown(*list));
  }
  if (list->empty() || list->size() > kMaxMessages) {
    refuse("messages", "messages has {} entries, must have 1 to {}", list->size(), kMaxMessages);
  }
  Ordered messages = Ordered::array();
  for (size_t i = 0; i < list->size(); ++i) messages.push_back(read_message(body, (*list)[i], i));
  return json_text(messages);
}

// Returns further variables of the template, as JSON.
std::string read_variables(Fields& body) {
  Ordered variables = Ordered::object();
  if (const json* const given = body.find("chat_template_kwargs")) {
    if (!given->is_object()) {
      refuse("chat_template_kwargs", "chat_template_kwargs is {}, must be an object",
             shown(*given));
    }
    for (const char* reserved : {"messages", "tools", "add_generation_prompt"}) {
      if (given->contains(reserved)) {
        refuse("chat_template_kwargs", "chat_template_kwargs has {}, which has a field of its own",
               reserved);
      }
    }
    variables = body.ordered("chat_template_kwargs");
  }
  if (const auto effort = body.text("reasoning_effort", 64))
    variables["reasoning_effort"] = *effort;
  if (const json* const documents = body.find("documents")) {
    if (!documents->is_array()) {
      refuse("documents", "documents is {}, must be an array", shown(*documents));
    }
    variables["documents"] = body.ordered("documents");
  }
  return variables.empty() ? std::string() : json_text(variables);
}

// Removes the folder of the model from a message, which clients do not learn.
std::string without_folder(const std::string& message) {
  for (const std::string_view file : {"chat_template.jinja", "tokenizer_config.json"}) {
    if (const size_t at = message.find(file); at != message.npos)
      return "the chat template" + message.substr(at + file.size());
  }
  static constexpr std::string_view kNone = "has no chat template";
  return message.ends_with(kNone) ? fmt::format("the model {}", kNone) : message;
}

}  // namespace

std::vector<int32_t> read_conversation(Fields& body, const Engine& engine,
                                       const std::string& tools) {
  Conversation conversation{.messages = read_messages(body), .tools = tools};
  conversation.variables = read_variables(body);
  const bool continues = body.boolean("continue_final_message").value_or(false);
  conversation.continue_last_message = continues;
  conversation.add_generation_prompt = body.boolean("add_generation_prompt").value_or(!continues);
  if (continues && conversation.add_generation_prompt) {
    refuse("add_generation_prompt",
           "add_generation_prompt is true, but continue_final_message is true, too");
  }
  try {
    return engine.encode_conversation(conversation);
  } catch (const Error& error) {
    refuse("messages", "{}", without_folder(error.what()));
  }
}

}  // namespace fovea::server
