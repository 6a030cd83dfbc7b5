// SPDX-License-Identifier: Apache-2.0
// Converts messages and tools of OpenAI's chat completions to those that templates expect.
#pragma once

#include <string_view>

#include "tokenizer/chat_template/value.h"

namespace fovea {

// Returns true if the template loops over the parts of a message's content, so that it takes
// content as a list. Other templates expect one text.
bool reads_content_parts(std::string_view source);

// Checks the messages and returns them with content as one text (parts are joined by line ends,
// unless `keeps_parts`), and with arguments of tool calls as objects. Throws
// Error{invalid_argument} naming the message and the field; parts other than text are refused.
jinja::Value template_messages(const jinja::Value& messages, bool keeps_parts);

// Checks that tools are objects in a list. An empty list becomes None.
jinja::Value template_tools(const jinja::Value& tools);

}  // namespace fovea
