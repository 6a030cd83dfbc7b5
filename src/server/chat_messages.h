// SPDX-License-Identifier: Apache-2.0
// The conversation of a chat, as the tokens of a prompt.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fovea/engine.h"
#include "server/fields.h"

namespace fovea::server {

// Reads `messages` and the fields that shape the prompt: `add_generation_prompt`,
// `continue_final_message`, `chat_template_kwargs`, `reasoning_effort` and `documents`. `tools` is
// JSON for the chat template, or empty. Throws ApiError 400 naming the field, also if the
// checkpoint's chat template cannot express the conversation.
std::vector<int32_t> read_conversation(Fields& body, const Engine& engine,
                                       const std::string& tools);

}  // namespace fovea::server
